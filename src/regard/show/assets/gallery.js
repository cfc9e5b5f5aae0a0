/* All heads at a glance: a small map of each, by layer or in the order of a number.

   A pixel is the strongest link of its cells. The statistics, and the thresholds of their
   badges, come with the data (stats/registry.py): no name of a statistic stands here.

   Next: page.js */

import { showToken } from "./ink.js";

/* A column that is no statistic: how many queries of a head have NaN. */
const NAN = { name: "nan_rows", label: "NaN", badge: { label: "NaN", least: 1, keys: 0, light: "#c00000", dark: "#c00000" } };
const LAYERS = 2; // asked for together
const FRAME_TIME = 8; // ms
const PAUSE = 2000; // ms after a layer that did not come

export class Gallery {
  constructor(element, source, { linkTo, onError }) {
    Object.assign(this, { element, source, linkTo, onError });
    this.maps = new Map(); // layer -> its small maps
    this.unpainted = new Set(); // layers
    element.addEventListener("keydown", (event) => this.walk(event));
    element.addEventListener("focusin", ({ target }) => this.setStop(target));
    element.addEventListener("pointerdown", ({ target }) => this.renewLink(target.closest(".card")));
  }

  /* Draw the heads of a sequence; maps come as they are ready. */
  show({ meta, sequence, sort, only, ink }) {
    const asked = sequence === this.sequence;
    Object.assign(this, { meta, sequence, sort, only, ink });
    const order = JSON.stringify([sequence, sort, only, meta.table.length, this.element.clientWidth]);
    if (order !== this.order) this.build(); // new colours alone need no new cards
    this.order = order;
    if (!asked) {
      this.maps.clear();
      this.ask(sequence);
    }
    this.unpainted = new Set(this.maps.keys());
    this.paintSome();
  }

  /* Paint what there is time for in a frame, the rest in the next ones. */
  paintSome() {
    cancelAnimationFrame(this.painting);
    const end = performance.now() + FRAME_TIME;
    for (const layer of this.unpainted) {
      if (performance.now() > end) {
        this.painting = requestAnimationFrame(() => this.paintSome());
        return;
      }
      this.unpainted.delete(layer);
      this.paint(layer);
    }
  }

  build() {
    const { meta, sequence, sort } = this;
    this.places = listHeads(meta, sequence);
    this.cards = new Map(); // "layer/head" -> its card
    this.heads = new Map(); // card -> its head
    const heads = sort === "layer" ? this.makeLayers() : this.makeOrder();
    this.element.replaceChildren(...(meta.overview ? [this.makeNote()] : []), heads);
    if (!this.cards.size) this.element.append(make("p", "empty", "no head is like that"));
    this.setStop(this.element.querySelector("a.card"));
  }

  async ask(sequence) {
    const layers = [...new Set(this.places.map((row) => row.layer))];
    const work = async () => {
      for (let layer = layers.shift(); layer !== undefined; layer = layers.shift()) {
        try {
          const maps = await this.source.gallery({ sequence, layer });
          if (sequence !== this.sequence) return; // another one is shown now
          this.maps.set(layer, maps);
          this.unpainted.add(layer);
          this.paintSome();
        } catch (error) {
          layers.push(layer); // it may still be being made
          this.onError(error);
          await new Promise((done) => setTimeout(done, PAUSE));
        }
      }
    };
    await Promise.all(Array.from({ length: LAYERS }, work));
  }

  paint(layer) {
    const { codes, heads, rows, columns } = this.maps.get(layer);
    const numbers = this.meta.records.find((x) => x.layer === layer && x.sequence === this.sequence).heads;
    for (let at = 0; at < heads; at++) {
      const card = this.cards.get(`${layer}/${numbers[at]}`);
      const start = at * rows * columns;
      const picture = this.ink.paint(codes.subarray(start, start + rows * columns), rows, columns);
      card?.querySelector(".small").replaceChildren(picture);
    }
  }

  /* Say that cells did not all fit, and link to the heads whose cells did. */
  makeNote() {
    const { cells, exact } = this.meta.overview;
    const here = exact.filter(({ sequence }) => sequence === this.sequence);
    const pixel = cells === 1 ? "" : ` A pixel stands for up to ${cells} × ${cells} cells: the largest of their weights, or their share, within 0.3 %.`;
    const which = here.length ? " Single cells are here for the strongest heads: " : " Single cells are not here.";
    const note = make("p", "note", `The cells of all heads do not fit into this file, so it has an overview of every head.${pixel}${which}`);
    here.forEach(({ layer, head, why }, at) => {
      const link = make("a", "", `layer ${layer} head ${head}`);
      link.href = this.linkTo({ layer, head });
      note.append(at ? ", " : "", link, why ? ` (${why})` : "");
    });
    if (here.length) note.append(".");
    return note;
  }

  makeLayers() {
    const chosen = this.places.filter((row) => this.isChosen(row));
    const layers = Map.groupBy(chosen, (row) => row.layer);
    const widest = Math.max(1, ...[...layers.values()].map((rows) => rows.length));
    this.element.style.setProperty("--widest", Math.min(widest, 16));
    this.element.style.setProperty("--map", `${this.chooseSize(widest, layers.size)}px`);
    const all = make("div", "layers");
    all.append(...[...layers].map(([layer, rows]) => {
      const box = make("div", "layer");
      box.setAttribute("role", "group");
      box.setAttribute("aria-label", `layer ${layer} ${showToken(this.meta.layers[layer]?.name ?? "", 60)}`);
      const name = make("span", "name", `L${layer}`);
      name.title = this.meta.layers[layer]?.name ?? "";
      const heads = make("div", "heads");
      heads.append(...rows.map((row) => this.makeCard(row, `h${row.head}`)));
      box.append(name, heads);
      return box;
    }));
    return all;
  }

  /* The largest maps with which all are in sight; 64 pixels if none are. */
  chooseSize(heads, layers) {
    const { clientWidth, clientHeight } = this.element;
    const fits = (size) => {
      const columns = Math.floor(clientWidth / (heads * (size + 2) + 34));
      return columns > 0 && Math.ceil(layers / columns) * (size + 28) < clientHeight;
    };
    return [192, 160, 128, 96].find(fits) ?? 64;
  }

  makeOrder() {
    const { ascending } = this.meta.statistics.find(({ name }) => name === this.sort);
    const sign = ascending ? -1 : 1;
    const value = (row) => sign * (row[this.sort] ?? -sign * Infinity); // what is not known comes last
    const rows = this.places.filter((row) => this.isChosen(row)).sort((a, b) => value(b) - value(a));
    const heads = make("div", "heads order");
    heads.append(...rows.map((row) => this.makeCard(row, `L${row.layer} h${row.head}`, showValue(row, this.sort))));
    return heads;
  }

  makeCard(row, name, value = "") {
    const badges = badgesOf(this.meta, row);
    const card = make("a", "card");
    card.tabIndex = -1;
    const cells = this.hasCells(row) ? "cells" : "";
    const seen = [name, value, cells, ...badges.map(({ badge }) => badge.label)].filter(Boolean).join(" ");
    card.setAttribute("aria-label", `${seen}: layer ${row.layer} head ${row.head} ${badges.map((badge) => badge.name).join(", ")}`);
    card.title = listBadges(this.meta).map((badge) => `${badge.name} ${showValue(row, badge.name)}`).join("\n");
    const line = make("span", "line");
    line.append(make("span", "", name));
    if (value) line.append(" ", make("span", "value", value));
    if (cells) line.append(" ", make("span", "tag cells", cells));
    for (const { name: kind, badge } of badges) {
      const tag = make("span", `tag ${kind}`, badge.label);
      for (const theme of ["light", "dark"]) tag.style.setProperty(`--${theme}`, badge[theme]);
      line.append(" ", tag);
    }
    card.append(make("span", "small"), line);
    this.cards.set(`${row.layer}/${row.head}`, card);
    this.heads.set(card, row);
    this.renewLink(card);
    return card;
  }

  /* Whether a page with an overview also has the single cells of a head. */
  hasCells({ sequence, layer, head }) {
    const { exact = [] } = this.meta.overview ?? {};
    return exact.some((x) => x.sequence === sequence && x.layer === layer && x.head === head);
  }

  isChosen(row) {
    return !this.only || badgesOf(this.meta, row).some(({ name }) => name === this.only);
  }

  /* A link holds the scale and theme of the moment. */
  renewLink(card) {
    if (card) card.href = this.linkTo(this.heads.get(card));
  }

  /* One card takes part in the tab order, arrows go to the others. */
  setStop(card) {
    if (!card?.classList.contains("card")) return;
    this.renewLink(card);
    if (this.stop) this.stop.tabIndex = -1;
    this.stop = card;
    card.tabIndex = 0;
  }

  walk(event) {
    const cards = [...this.cards.values()];
    const at = cards.indexOf(event.target);
    if (at < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const steps = {
      ArrowLeft: () => cards[at - 1],
      ArrowRight: () => cards[at + 1],
      ArrowUp: () => findNearest(cards.slice(0, at), event.target),
      ArrowDown: () => findNearest(cards.slice(at + 1), event.target),
      Home: () => cards[0],
      End: () => cards.at(-1),
    };
    const next = steps[event.key]?.();
    if (!steps[event.key]) return;
    event.preventDefault();
    next?.focus();
  }
}

/* Every head of a sequence, with its numbers as soon as they are known. */
export function listHeads(meta, sequence) {
  const known = new Map(meta.table.map((row) => [`${row.sequence}/${row.layer}/${row.head}`, row]));
  return meta.records.filter((record) => record.sequence === sequence && record.nq && record.nk).flatMap(({ layer, heads, nk }) =>
    heads.map((head) => ({ sequence, layer, head, nk, ...known.get(`${sequence}/${layer}/${head}`) })),
  );
}

/* The columns of the table that have a badge. */
export function listBadges(meta) {
  return [NAN, ...meta.statistics.filter(({ badge }) => badge)];
}

/* Those of them that a head has, without what another badge implies. */
export function badgesOf(meta, row) {
  const found = listBadges(meta).filter(({ name, badge }) => row[name] >= badge.least && row.nk >= badge.keys);
  return found.filter(({ badge }) => !found.some(({ name }) => name === badge.unless));
}

export function showNumber(x) {
  return x === null || x === undefined || Number.isNaN(x) ? "–" : Number(x.toPrecision(3)).toString();
}

/* A number of the table: null is NaN if a query has it, else no query has the number. */
export function showValue(row, name) {
  return row[name] === null && row.nan_rows ? "NaN" : showNumber(row[name]);
}

/* The card in the nearest other row that is nearest across. */
function findNearest(cards, card) {
  const from = card.getBoundingClientRect();
  let best;
  let least = Infinity;
  for (const other of cards) {
    const to = other.getBoundingClientRect();
    const down = Math.abs(to.top - from.top);
    const far = down < 4 ? Infinity : 8 * down + Math.abs(to.left - from.left);
    if (far < least) [best, least] = [other, far];
  }
  return best;
}

/* Make an element; text is only ever text. */
export function make(tag, name = "", text = "") {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.textContent = text;
  return element;
}
