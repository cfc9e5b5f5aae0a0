/* The page: what is shown of which head, kept in the address so that a link reopens it.

     #v=text&sel=12-20&hs=18.8&w=attending&mix=max&sc=linear     the text; #: the same
     #l=18&h=8&i=5810&j=1811&z=24&s=max&lo=-4&t=dark&pin=5808&col=1809&vs=20.6&cmp=diff
     #v=heads, #sort=induction&only=sink                         the gallery
     #v=heads&px=entropy&py=sink&box=0,2,0.5,1                   heads chosen in its plot

   Every change goes one way: at (the state) -> apply -> text, gallery or plane -> address.

   Next: text_view.js, gallery.js, map_canvas.js */

import { Gallery, make } from "./gallery.js";
import { GalleryGuide } from "./gallery_guide.js";
import { listBadges, listHeads } from "./head_table.js";
import { Ink, showCount, showShare, showToken } from "./ink.js";
import { press } from "./keys.js";
import { NEAR, Panel } from "./panel.js";
import { Plane } from "./map_canvas.js";
import { Scatter } from "./scatter.js";
import { Tiles } from "./source.js";
import { TextView } from "./text_view.js";

/* Keys of the address, each with its name in the state and how to read it. */
const ADDRESS = {
  q: ["sequence", Number], l: ["layer", Number], h: ["head", Number],
  i: ["i", Number], j: ["j", Number], z: ["z", Number],
  s: ["how", String], lo: ["low", Number], t: ["theme", String],
  pin: ["row", Number], col: ["column", Number],
  vs: ["other", String], cmp: ["compare", String],
  sort: ["sort", String], only: ["only", String],
  px: ["plotX", String], py: ["plotY", String], box: ["box", String],
  v: ["view", String], sel: ["passage", String], hs: ["heads", String],
  w: ["show", String], mix: ["mix", String], by: ["by", String], two: ["versus", String], au: ["heard", String], sc: ["scale", String], tl: ["least", Number],
};
const START = {
  sequence: 0, how: "max", low: -3, sort: "layer", only: "", compare: "",
  show: "attended", mix: "mean", by: "weight", versus: "", scale: "log", least: -2,
};
const PLACES = ["v", "l", "h", "sort", "only", "px", "py", "box"]; // of the address: with none of them, it is the text

export class Page {
  constructor(root, source, address) {
    Object.assign(this, { root, source, address });
    this.part = {};
    for (const element of root.querySelectorAll("[data-at]")) this.part[element.dataset.at] = element;
    this.dark = window.matchMedia("(prefers-color-scheme: dark)");
  }

  async start() {
    try {
      this.meta = await this.source.meta();
    } catch (error) {
      this.part.wait.textContent = `The recording could not be read. ${error.message}`;
      return;
    }
    this.tiles = new Tiles(this.source, () => this.plane.refresh());
    const labels = {
      query: (i) => this.labelOf(i, "q"),
      key: (j) => this.labelOf(j, "k"),
    };
    this.plane = new Plane(this.part.plane, this.tiles, labels, {
      onMove: () => this.keepAddress(),
      onPin: (cell, column) => this.panel.pin(cell, column),
      onPaint: () => this.showPainted(),
    });
    this.panel = new Panel(this);
    this.fill = fillSelect;
    this.text = new TextView(this);
    const linkTo = ({ layer, head }) => `#${this.addressOf({ ...this.at, layer, head, view: undefined })}`;
    const onError = (error) => this.panel.say(error.message);
    this.guide = new GalleryGuide(this);
    this.scatter = new Scatter(this, { linkTo, onOpen: (row) => this.address.go(linkTo(row).slice(1)) });
    const onPaint = (place, picture) => this.guide.paintSample(place, picture);
    const tell = (sentence) => this.panel.say(sentence);
    this.gallery = new Gallery(this.part.cards, this.source, { linkTo, onError, onPaint, tell });
    const count = this.meta.sequences.length;
    this.part.sequences.hidden = count < 2;
    const names = this.meta.compared?.names.map((name) => showToken(name, 24).replaceAll("·", " "));
    fillSelect(this.part.sequence, Array.from({ length: count }, (_, at) => [at, names?.[at] ?? at]), 0);
    const choices = (entries) => entries.map(({ name, label }) => [name, label]);
    fillSelect(this.part.sort, [["layer", "layer and head"], ["behaviour", "behaviour"], ...choices(this.meta.statistics)], "layer");
    for (const axis of ["plotX", "plotY"]) fillSelect(this.part[axis], choices(this.meta.statistics), "");
    fillSelect(this.part.only, [["", "all heads"], ...choices(listBadges(this.meta))], "");
    this.listen();
    this.readAddress();
    this.awaitTable(600);
  }

  /* The statistics may come later than the maps. */
  async awaitTable(pause) {
    if (this.meta.table.length || !this.meta.tableAll) return;
    await new Promise((done) => setTimeout(done, pause));
    try {
      Object.assign(this.meta, await this.source.table());
      if (this.meta.table.length) this.apply();
      else if (this.view === "gallery") this.showTableState();
    } catch (error) {
      this.panel.say(error.message);
    }
    this.awaitTable(Math.min(30_000, 1.3 * pause));
  }

  showTableState() {
    const { table, tableDone, tableAll, note = "" } = this.meta;
    const left = tableAll ? `badges to come: ${tableDone} of ${tableAll} layers` : "no badges: they would take many minutes";
    const state = table.length ? note : left;
    const label = this.isUnlabelled ? "tokens are numbers: seen.label(tokenizer.decode) adds their text" : "";
    this.showStatus(label, state, "arrows walk, Enter opens, ? for keys");
  }

  // ---- the address

  readAddress() {
    const given = new URLSearchParams(this.address.read());
    this.at = { ...START };
    for (const [key, [name, read]] of Object.entries(ADDRESS)) {
      const value = given.has(key) ? read(given.get(key)) : undefined;
      if (value !== undefined && !Number.isNaN(value)) this.at[name] = value;
    }
    this.mendState();
    if (!PLACES.some((key) => given.has(key))) this.at.view = "text";
    this.apply();
  }

  /* An address may be old, or mistyped. */
  mendState() {
    const { at, part } = this;
    for (const name of ["how", "sort", "only", "compare", "sequence", "mix", "by", "scale", "plotX", "plotY"]) {
      const known = [...part[name].options].some(({ value }) => value === `${at[name]}`);
      if (!known) at[name] = START[name];
    }
    if (!["light", "dark"].includes(at.theme)) at.theme = undefined;
    if (this.meta.sequences[at.sequence]?.ways?.[at.by]) at.by = START.by; // it is not there
    if (!this.meta.compared || !["diff", "side"].includes(at.versus)) at.versus = START.versus;
    if (at.show !== "attending") at.show = START.show;
    at.least = Math.min(-1, Math.max(-8, at.least));
    at.low = Math.min(-1, Math.max(-8, at.low));
    if (!this.recordOf(at)) at.layer = undefined;
  }

  addressOf(state) {
    const given = new URLSearchParams();
    for (const [key, [name]] of Object.entries(ADDRESS)) {
      const value = name === "other" && !state.compare ? undefined : state[name];
      if (value === undefined || value === null || value === "" || value === START[name]) continue;
      given.set(key, typeof value === "number" ? Number(value.toPrecision(7)) : value);
    }
    return `${given}`;
  }

  /* Write where we are into the address, not more often than browsers allow. */
  keepAddress() {
    if (this.inMap) Object.assign(this.at, this.plane.at);
    clearTimeout(this.keeping);
    this.keeping = setTimeout(() => this.address.keep(this.addressOf(this.at)), 250);
  }

  set(change) {
    Object.assign(this.at, change);
    this.apply();
    this.keepAddress();
  }

  // ---- what there is

  get inMap() {
    return this.root.dataset.view === "map";
  }

  /* What is shown: the text, if there is one and it is asked for, a head, or all heads. */
  get view() {
    const { view, sequence } = this.at;
    if (view === "text" && this.text.hasText(sequence)) return "text";
    return view !== "heads" && this.recordOf(this.at) ? "map" : "gallery";
  }

  recordOf({ sequence, layer, head }) {
    return this.recordsHere(sequence).find((record) => record.layer === layer && record.heads.includes(head));
  }

  /* The finest level of a head: 0, unless the page has only an overview of it. */
  floorOf(place) {
    const { overview = 0, cells = [] } = this.recordOf(place) ?? {};
    return cells.some(({ head }) => head === place.head) ? 0 : overview;
  }

  recordsHere(sequence) {
    return this.meta.records.filter((record) => record.sequence === sequence && record.nq && record.nk);
  }

  /* The heads of a layer that are there: a page may hold only some. */
  headsOf(layer) {
    return this.recordsHere(this.at.sequence).find((record) => record.layer === layer).heads;
  }

  /* The position and text of a row or column; without text the number of the token. */
  labelOf(index, side) {
    const { record } = this.plane;
    const position = record[`${side}Positions`]?.[index] ?? record[`${side}Start`] + index;
    const words = this.meta.sounds[this.at.sequence]?.words;
    if (!record[`${side}Named`]) return { position, text: (record[`n${side}`] === words?.length && words[position]) || "" }; // other tokens, as of a decoder
    const { tokens = [], texts = [] } = this.meta.sequences[this.at.sequence] ?? {};
    return { position, text: texts[position] ?? (tokens[position] ?? "").toString() };
  }

  /* Whether the tokens of the sequence are known, but not their text. */
  get isUnlabelled() {
    const { tokens = [], texts = [] } = this.meta.sequences[this.at.sequence] ?? {};
    return tokens.length > 0 && !texts.length;
  }

  /* The head to compare with: given as "layer.head", else the next one. */
  get other() {
    const { sequence, layer, head } = this.at;
    const [otherLayer, otherHead] = (this.at.other ?? "").split(".").map(Number);
    const given = { sequence, layer: otherLayer, head: otherHead };
    const here = this.recordOf(this.at);
    const there = this.recordOf(given);
    if (there && there.nq === here.nq && there.nk === here.nk) return given;
    return { sequence, layer, head: after(here.heads, head, 1) };
  }

  // ---- showing

  apply() {
    const { part, at } = this;
    const { view } = this;
    const theme = at.theme || (this.dark.matches ? "dark" : "light");
    this.root.dataset.theme = theme;
    this.root.dataset.view = view;
    part.wait.hidden = true;
    part.theme.textContent = theme === "dark" ? "light" : "dark";
    this.applyInk(theme);
    part.low.value = at.low;
    part.how.value = at.how;
    part.sort.value = at.sort;
    part.only.value = at.only;
    part.sequence.value = at.sequence;
    part.unlabelled.hidden = !this.isUnlabelled;
    part.toText.hidden = !this.text.hasText(at.sequence);
    part.toText.textContent = this.meta.sounds[at.sequence] ? "sound" : "text";
    for (const [name, link] of Object.entries({ text: part.toText, gallery: part.home, map: part.toMap })) {
      if (name === view) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    const title = showToken(this.meta.title ?? this.meta.model, 40).replaceAll("·", " ");
    part.title.textContent = title;
    if (this.root === document.body) document.title = { map: `L${at.layer} h${at.head} · regard`, text: `${title} · regard` }[view] ?? "regard";
    if (view === "text") this.applyText();
    else if (view === "map") this.applyMap(this.recordOf(at));
    else this.applyGallery();
  }

  applyInk(theme) {
    const { at, part } = this;
    if (this.ink?.low !== at.low || this.ink.theme !== theme) {
      this.ink = new Ink({ dark: theme === "dark", low: at.low });
      this.ink.theme = theme;
      const style = getComputedStyle(this.root);
      const names = ["page", "side", "text", "faint", "line", "accent", "cross", "grid", "masked", "hatch", "blank"];
      const colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
      this.plane.setInk(this.ink, colours);
    }
    const signed = at.compare === "diff" && this.view === "map";
    part.legend.getContext("2d").drawImage(this.ink.paintLegend(signed), 0, 0);
    const least = Number((10 ** at.low).toPrecision(2));
    part.ends.textContent = signed ? `−1 … ±${least} … 1` : `${least} … 1`;
    part.low.setAttribute("aria-valuetext", `colours from ${least} to 1`);
  }

  applyText() {
    this.text.show();
    const label = this.isUnlabelled ? "tokens are numbers: seen.label(tokenizer.decode) adds their text" : "";
    this.showStatus(label, this.meta.note, "click or drag to select, ? for keys");
  }

  applyGallery() {
    const { sequence, sort, only, box, plotX, plotY } = this.at;
    const rows = listHeads(this.meta, sequence);
    if (box || plotX || plotY) this.part.plot.open = true;
    this.guide.show(rows);
    this.scatter.show(rows);
    const isInBox = (row) => this.scatter.has(row);
    this.gallery.show({ meta: this.meta, sequence, sort, only, box: [box, plotX, plotY], isInBox, ink: this.ink });
    this.showTableState();
    const { size } = this.gallery.cards;
    this.panel.say(`${showCount(size)} ${size === 1 ? "head" : "heads"}; a pixel is the strongest link of its cells`);
  }

  applyMap(record) {
    const { at, part, plane } = this;
    const here = { sequence: at.sequence, layer: at.layer, head: at.head };
    const panels = { side: [[here], [this.other]], diff: [[here, this.other]] }[at.compare] ?? [[here]];
    const all = plane.record && plane.isWhole && at.z === plane.at.z; // stays all of it
    const view = at.z > 0 && !all && { i: at.i ?? 0, j: at.j ?? 0, z: at.z };
    const floor = Math.max(...panels.flat().map((place) => this.floorOf(place)));
    plane.open({ record, panels, how: at.how, size: this.meta.levels.tile, floor });
    if (plane.width !== part.plane.clientWidth) plane.resize();
    plane.setView(view || { i: 0, j: 0, z: plane.fitZoom });
    fillSelect(part.layer, this.layersHere(), at.layer);
    fillSelect(part.head, record.heads, at.head);
    fillSelect(part.otherLayer, this.layersHere(), this.other.layer);
    fillSelect(part.otherHead, this.headsOf(this.other.layer), this.other.head);
    part.compare.value = at.compare;
    this.panel.showNumbers();
    this.panel.showPins();
  }

  layersHere() {
    return this.recordsHere(this.at.sequence).map(({ layer }) => layer);
  }

  /* After a frame say what is in it: once, however often the pointer moved. */
  showPainted() {
    const { plane } = this;
    if (!this.inMap) return;
    this.panel.describe();
    const cells = 2 ** plane.level;
    const { rounded } = this.meta;
    const sure = rounded ? `rounded, about ${showShare(rounded.typical)}` : "exact";
    const kind = plane.floor ? "overview" : sure;
    const pixel = cells === 1 ? `${kind}, cells` : `${kind}, ${cells} × ${cells} cells per pixel`;
    const words = plane.rough || pixel;
    this.part.badge.textContent = plane.missing ? `${plane.missing} tiles to come` : words;
    const off = rounded ? `half of the weights above 0.001 are off by less, the worst measured by ${showShare(rounded.worst)}` : "";
    this.part.badge.title = plane.floor ? "the cells of this head did not fit into the file; a pixel is within 0.3 % of the max or mass of its cells" : off;
    this.part.badge.dataset.state = plane.missing || plane.rough || plane.floor ? "wait" : "exact";
    this.showStatus(this.tiles.trouble || "? for keys");
  }

  /* The status begins with what was checked of the recording; all of it is in a tooltip. */
  showStatus(...words) {
    const { certified = "" } = this.meta;
    const [checked] = certified.replace(/ \(.*?\)/, "").split(/;|: nothing/);
    this.part.status.textContent = [checked, ...words].filter(Boolean).join(" · ");
    this.part.status.title = certified;
  }

  // ---- acting

  /* Open another head or layer at the same place. */
  stepHead(by) {
    this.set({ head: after(this.headsOf(this.at.layer), this.at.head, by) });
  }

  stepLayer(by) {
    this.openLayer(after(this.layersHere(), this.at.layer, by));
  }

  openLayer(layer) {
    this.set({ layer, head: nearest(this.headsOf(layer), this.at.head) });
  }

  turnTheme() {
    this.set({ theme: this.root.dataset.theme === "dark" ? "light" : "dark" });
  }

  turnCompare() {
    const ways = ["", "side", "diff"];
    this.set({ compare: ways[(ways.indexOf(this.at.compare) + 1) % ways.length], other: nameHead(this.other) });
  }

  /* In a causal map there is nothing above the diagonal: go to it. */
  goToDiagonal() {
    const { plane } = this;
    const i = Math.min(plane.record.nq - 1, Math.max(0, Math.floor(plane.cursor?.i ?? plane.at.i)));
    const j = this.panel.indexOf("key", plane.labels.query(i).position);
    plane.goTo({ i, j }, Math.max(NEAR, plane.at.z));
  }

  goHome() {
    const { layer, head, row, column, i, j, z, other, compare, how, ...kept } = this.at;
    this.came = `${layer}/${head}`;
    this.address.go(this.addressOf({ ...kept, view: "heads" }));
  }

  /* Open the text with its selection; a row that was pinned since is the selection. */
  openText() {
    const { row, column } = this.at;
    const state = { ...this.at, view: "text" };
    const [kind, at, show] = row === undefined ? ["key", column, "attending"] : ["query", row, "attended"];
    if (this.inMap && at !== undefined) {
      const { position } = this.plane.labels[kind](at);
      const [first, last = first] = `${state.passage ?? ""}`.split("-").map(Number);
      if (!(state.passage && position >= first && position <= last)) state.passage = `${position}`;
      state.show = show;
    }
    this.address.go(this.addressOf(state));
  }

  listen() {
    const { part } = this;
    const onChange = (element, act) => element.addEventListener("change", () => act(element.value));
    onChange(part.layer, (value) => this.openLayer(Number(value)));
    onChange(part.head, (value) => this.set({ head: Number(value) }));
    onChange(part.sequence, (value) => this.set({ sequence: Number(value), row: undefined, column: undefined, z: undefined, passage: undefined }));
    onChange(part.how, (how) => this.set({ how }));
    onChange(part.sort, (sort) => this.set({ sort }));
    onChange(part.only, (only) => this.set({ only }));
    onChange(part.compare, (compare) => this.set({ compare, other: nameHead(this.other) }));
    onChange(part.otherLayer, (layer) => this.set({ other: nameHead({ layer, head: nearest(this.headsOf(Number(layer)), Number(part.otherHead.value)) }) }));
    onChange(part.otherHead, (head) => this.set({ other: nameHead({ layer: part.otherLayer.value, head }) }));
    part.low.addEventListener("input", () => this.set({ low: Number(part.low.value) }));
    part.fit.addEventListener("click", () => this.plane.fit());
    part.theme.addEventListener("click", () => this.turnTheme());
    part.copy.addEventListener("click", () => this.copyLink());
    for (const [link, act] of [[part.home, () => this.goHome()], [part.toText, () => this.openText()], [part.toMap, () => this.openMap()]]) {
      link.addEventListener("click", (event) => {
        event.preventDefault();
        if (!link.hasAttribute("aria-current")) act();
      });
    }
    part.gallery.addEventListener("click", (event) => {
      const card = event.target.closest(".card");
      if (!card || event.ctrlKey || event.metaKey || event.shiftKey) return; // a new tab
      event.preventDefault();
      this.address.go(card.getAttribute("href").slice(1));
    });
    part.more.addEventListener("click", () => {
      part.more.setAttribute("aria-expanded", part.controls.classList.toggle("open"));
    });
    part.sought.addEventListener("input", () => this.panel.search());
    part.search.addEventListener("submit", (event) => event.preventDefault());
    part.sought.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.panel.goToFound(event.shiftKey);
      if (event.key !== "Escape") return;
      event.preventDefault(); // what was found stays marked
      part.plane.focus();
    });
    this.root.addEventListener("keydown", (event) => press(this, event));
    this.address.onChange(() => {
      this.readAddress();
      if (this.inMap) part.plane.focus();
      else if (this.view === "text") part.reading.focus({ preventScroll: true });
      else this.gallery.cards.get(this.came)?.focus();
    });
    this.dark.addEventListener("change", () => this.apply());
    new ResizeObserver(() => this.inMap && this.plane.resize()).observe(part.plane);
  }

  /* Open the map of the head that was looked at last, else of the first. */
  openMap() {
    if (this.view === "text") this.text.openMap();
    else {
      const [record] = this.recordsHere(this.at.sequence);
      const { layer = record.layer, head = record.heads[0] } = this.at;
      this.address.go(this.addressOf({ ...this.at, layer, head, view: undefined }));
    }
  }

  async copyLink() {
    this.address.keep(this.addressOf(this.at));
    try {
      await window.navigator.clipboard.writeText(this.address.link);
      this.panel.say("the link is copied");
    } catch {
      this.panel.say("the link is in the address bar");
    }
  }
}

/* A value is a number, or what it stands for with what is shown. */
function fillSelect(select, values, chosen) {
  select.replaceChildren(...values.map((value) => {
    const [name, words = name] = [value].flat();
    return Object.assign(make("option", "", `${words}`), { value: name });
  }));
  select.value = chosen;
}

function nameHead({ layer, head }) {
  return `${layer}.${head}`;
}

/* What stands so many places after another, around in a circle. */
function after(list, value, by) {
  return list[(list.indexOf(value) + by + list.length) % list.length];
}

function nearest(list, value) {
  return list.reduce((best, x) => (Math.abs(x - value) < Math.abs(best - value) ? x : best));
}
