/* The page of an atlas: what every head does over a corpus, or over two.

     #s=induction&v=diff&l=18&h=8&up=1&t=dark

   Every change goes one way: at (the state) -> apply -> grid, order, head -> address.

   Next: grid.js */

import { HashAddress } from "./address.js";
import { Atlas, make } from "./data.js";
import { Grid } from "./grid.js";
import { Head } from "./head.js";
import { Ink } from "./ink.js";
import { listOrder } from "./order.js";

const AFTER = 400; // ms until what is pointed at is also spoken

class Page {
  constructor(root, atlas, address) {
    Object.assign(this, { root, atlas, address });
    this.part = {};
    for (const element of root.querySelectorAll("[data-at]")) this.part[element.dataset.at] = element;
    this.dark = window.matchMedia("(prefers-color-scheme: dark)");
    const acts = { onOpen: (place) => this.open(place), onPoint: (place) => this.point(place) };
    this.grid = new Grid(this.part.grid, this.part.scroll, atlas, acts);
    this.head = new Head(this.part.head, atlas, () => this.close());
  }

  start() {
    const { part, atlas } = this;
    part.title.textContent = atlas.title;
    part.about.append(...atlas.about.map((words) => make("p", "", words)));
    fill(part.statistic, atlas.statistics.map(({ name }) => [name, name]));
    fill(part.view, atlas.views.map((view) => [view, atlas.nameOf(view)]));
    part.views.hidden = atlas.views.length < 2;
    this.root.classList.toggle("two", atlas.views.length > 1);
    part.statistic.addEventListener("change", () => this.set({ statistic: part.statistic.value }));
    part.view.addEventListener("change", () => this.set({ view: part.view.value }));
    part.theme.addEventListener("click", () => this.turnTheme());
    this.dark.addEventListener("change", () => this.apply());
    this.root.addEventListener("keydown", (event) => this.press(event));
    this.address.onChange(() => this.readAddress());
    new ResizeObserver(() => this.grid.fit(this.part.all)).observe(this.part.all);
    this.readAddress();
    this.root.dataset.view = "gallery"; // it is there
  }

  /* An address may be old, or mistyped. */
  readAddress() {
    const { atlas } = this;
    const given = new URLSearchParams(this.address.read());
    const among = (key, known) => (known.includes(given.get(key)) ? given.get(key) : undefined);
    const place = { layer: Number(given.get("l") ?? NaN), head: Number(given.get("h") ?? NaN) };
    this.at = {
      statistic: among("s", atlas.statistics.map(({ name }) => name)) ?? atlas.statistics[0].name,
      view: among("v", atlas.views) ?? atlas.views.at(-1), // the difference, if there is one
      theme: among("t", ["light", "dark"]),
      up: given.has("up"),
      place: atlas.has(place) ? place : undefined,
    };
    this.apply();
  }

  keepAddress() {
    const { statistic, view, theme, up, place } = this.at;
    const parts = { s: statistic, v: this.atlas.views.length > 1 && view, l: place?.layer, h: place?.head, up: up && 1, t: theme };
    const kept = Object.entries(parts).filter(([, value]) => value !== undefined && value !== false);
    this.address.keep(`${new URLSearchParams(kept)}`);
  }

  set(change) {
    Object.assign(this.at, change);
    this.apply();
    this.keepAddress();
  }

  apply() {
    const { at, part, atlas } = this;
    const theme = at.theme ?? (this.dark.matches ? "dark" : "light");
    this.root.dataset.theme = theme;
    part.theme.textContent = theme === "dark" ? "light" : "dark";
    part.statistic.value = at.statistic;
    part.view.value = at.view;
    if (this.ink?.theme !== theme) {
      this.ink = new Ink({ dark: theme === "dark", low: -3 });
      this.ink.theme = theme;
    }
    const shown = atlas.show(at.statistic, at.view);
    part.legend.getContext("2d").drawImage(this.ink.paintLegend(shown.signed), 0, 0);
    part.ends.textContent = shown.ends;
    part.told.textContent = shown.told;
    this.grid.paint(shown, this.ink, at.place);
    this.grid.fit(part.all);
    const acts = { onOpen: (place) => this.openListed(place), onTurn: () => this.set({ up: !at.up }) };
    part.order.replaceChildren(...listOrder(atlas, shown, at, acts));
    this.head.show(at);
    document.title = at.place ? `L${at.place.layer} h${at.place.head} · atlas · regard` : "atlas · regard";
    this.point(at.place);
  }

  open(place) {
    this.set({ place });
    this.part.head.scrollIntoView({ block: "nearest" });
  }

  /* The list is made anew, so what had the focus is gone. */
  openListed(place) {
    this.open(place);
    this.part.head.focus();
  }

  close() {
    this.set({ place: undefined });
    this.grid.focus();
  }

  /* Say what is under the pointer, or what is chosen. */
  point(place = this.at.place) {
    const sentence = place ? this.atlas.describe(this.at.statistic, this.at.view, place) : "";
    if (sentence === this.part.sentence.textContent) return;
    this.part.sentence.textContent = sentence;
    clearTimeout(this.speaking);
    this.speaking = setTimeout(() => (this.part.spoken.textContent = sentence), AFTER);
  }

  turnTheme() {
    this.set({ theme: this.root.dataset.theme === "dark" ? "light" : "dark" });
  }

  /* Go to the next of some values, after the last to the first. */
  turn(name, values, step = 1) {
    const next = values.indexOf(this.at[name]) + step + values.length;
    this.set({ [name]: values[next % values.length] });
  }

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select")) return;
    const names = this.atlas.statistics.map(({ name }) => name);
    const keys = {
      s: () => this.turn("statistic", names),
      S: () => this.turn("statistic", names, -1),
      v: () => this.turn("view", this.atlas.views),
      t: () => this.turnTheme(),
      Escape: () => this.at.place && this.close(),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  }
}

function fill(select, options) {
  select.replaceChildren(...options.map(([value, words]) => Object.assign(make("option", "", words), { value })));
}

const data = JSON.parse(document.getElementById("data").textContent);
new Page(document.body, new Atlas(data), new HashAddress()).start();
