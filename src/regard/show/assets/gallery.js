/* All heads at a glance: a small map of each.

     by layer         the layers of a kind together: encoder, decoder, cross, vision
     by behaviour     grouped by the badge that stands out most (head_table.js)
     by a number      in its order, heads without it last

   A pixel is the strongest link of its cells.

   Next: head_table.js, page.js */

import { badgesOf, behaviourOf, listBadges, listHeads, numberOf, showValue, tellBadge } from "./head_table.js";
import { showCount, showToken } from "./ink.js";

/* What the layers of a kind have in common; show/layer_kinds.py finds the kinds. */
const KINDS = {
  encoder: "a query may also look at later keys",
  decoder: "a query looks at itself and at what came before",
  cross: "the keys are of another sequence than the queries",
  vision: "queries and keys are patches of a picture",
};
const LAYERS = 2; // asked for together
const TITLE = 36; // pixels of the line above a kind
const FRAME_TIME = 8; // ms
const PAUSE = 2000; // ms after a layer that did not come

export class Gallery {
  constructor(element, source, { linkTo, onError, onPaint, tell }) {
    Object.assign(this, { element, source, linkTo, onError, onPaint, tell });
    this.maps = new Map(); // layer -> its small maps
    this.unpainted = new Set(); // layers
    element.addEventListener("keydown", (event) => this.walk(event));
    element.addEventListener("focusin", ({ target }) => {
      this.setStop(target);
      this.describe(target.closest(".card"));
    });
    element.addEventListener("pointerover", ({ target }) => this.describe(target.closest(".card")));
    element.addEventListener("pointerdown", ({ target }) => this.renewLink(target.closest(".card")));
  }

  /* Draw the heads of a sequence; maps come as they are ready. */
  show({ meta, sequence, sort, only, box, isInBox, ink }) {
    const asked = sequence === this.sequence;
    Object.assign(this, { meta, sequence, sort, only, isInBox, ink });
    const order = JSON.stringify([sequence, sort, only, box, meta.table.length, this.element.clientWidth]);
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
    const heads = { layer: () => this.makeKinds(), behaviour: () => this.makeBehaviours() }[sort]?.() ?? [this.makeOrder()];
    this.element.replaceChildren(...(meta.overview ? [this.makeNote()] : []), ...heads);
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
      this.onPaint({ layer, head: numbers[at] }, picture);
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

  /* The layers of each kind under a line that says what the kind is, with their modules. */
  makeKinds() {
    const layers = Map.groupBy(this.places.filter((row) => this.isChosen(row)), (row) => row.layer);
    const widest = Math.max(1, ...[...layers.values()].map((rows) => rows.length));
    this.element.style.setProperty("--widest", Math.min(widest, 16));
    const kinds = Map.groupBy(layers, ([layer]) => this.meta.layers[layer]?.kind ?? "");
    const counts = [...kinds.values()].map((some) => some.length);
    this.element.style.setProperty("--map", `${this.chooseSize(widest, counts)}px`);
    return [...kinds].flatMap(([kind, some]) => {
      const modules = nameModules(some.map(([layer]) => this.meta.layers[layer]?.name ?? ""));
      const shown = modules.slice(0, 2).map((name) => showToken(name, 60)).join(", ") + (modules.length > 2 ? ", …" : "");
      const count = `${showCount(some.length)} ${some.length === 1 ? "layer" : "layers"}`;
      const all = make("div", "layers");
      all.append(...some.map(([layer, rows]) => this.makeLayer(layer, rows)));
      return [makeTitle(kind || "layers", [count, shown, KINDS[kind]]), all];
    });
  }

  makeLayer(layer, rows) {
    const box = make("div", "layer");
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", `layer ${layer} ${showToken(this.meta.layers[layer]?.name ?? "", 60)}`);
    const heads = make("div", "heads");
    heads.append(...rows.map((row) => this.makeCard(row, `h${row.head}`)));
    box.append(make("span", "name", `L${layer}`), heads);
    return box;
  }

  /* Heads of one behaviour under a line that defines it, the clearest first. */
  makeBehaviours() {
    this.element.style.setProperty("--map", "64px");
    const chosen = this.places.filter((row) => this.isChosen(row));
    const groups = Map.groupBy(chosen, (row) => behaviourOf(this.meta, row));
    const rule = "Heads are grouped by the badge whose number is the largest multiple of its threshold, and sorted by that number.";
    return [make("p", "note", rule), ...[...listBadges(this.meta), undefined].filter((badge) => groups.has(badge)).flatMap((statistic) => {
      const rows = groups.get(statistic);
      const count = `${showCount(rows.length)} ${rows.length === 1 ? "head" : "heads"}`;
      if (statistic) rows.sort((a, b) => b[statistic.name] - a[statistic.name]);
      const words = statistic ? tellBadge(this.meta, statistic) : this.meta.table.length ? "no number reaches its threshold" : "the numbers are not here yet";
      const heads = make("div", "heads order");
      heads.append(...rows.map((row) => this.makeCard(row, `L${row.layer} h${row.head}`, statistic ? showValue(row, statistic.name) : "")));
      return [makeTitle(statistic?.label ?? "no badge", [count, words]), heads];
    })];
  }

  /* The largest maps with which all are in sight; 64 pixels if none are.
     counts: the layers of each kind */
  chooseSize(heads, counts) {
    const { clientWidth, offsetTop, parentElement } = this.element;
    const clientHeight = parentElement.clientHeight + parentElement.offsetTop - offsetTop; // below the guide
    const fits = (size) => {
      const columns = Math.floor(clientWidth / (heads * (size + 2) + 34));
      const rows = counts.reduce((total, layers) => total + Math.ceil(layers / columns), 0);
      return columns > 0 && rows * (size + 28) + counts.length * TITLE < clientHeight;
    };
    return [192, 160, 128, 96].find(fits) ?? 64;
  }

  makeOrder() {
    const { ascending } = this.meta.statistics.find(({ name }) => name === this.sort);
    const sign = ascending ? -1 : 1;
    const value = (row) => sign * (numberOf(row, this.sort) ?? -sign * Infinity); // what is not known comes last
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

  /* Say what is known of a head: its module, and the number of each badge. */
  describe(card) {
    const row = this.heads?.get(card);
    if (!row) return;
    const numbers = listBadges(this.meta).filter(({ name, tooFew }) => tooFew || row[name]);
    const name = showToken(this.meta.layers[row.layer]?.name ?? "", 60);
    const told = numbers.map((statistic) => `${statistic.label} ${showValue(row, statistic.name)}${this.has(row, statistic) ? ` (badge: at least ${statistic.badge.least})` : ""}`);
    this.tell(`layer ${row.layer} head ${row.head}, ${name}: ${told.join(", ")}`);
  }

  has(row, statistic) {
    return badgesOf(this.meta, row).includes(statistic);
  }

  isChosen(row) {
    return this.isInBox(row) && this.isOfKind(row);
  }

  isOfKind(row) {
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

/* The modules of some layers, each number that differs as "#": blocks.#.attention */
function nameModules(names) {
  const shapes = Map.groupBy(names.map((name) => name.split(/(\d+)/)), (parts) => parts.filter((_, at) => at % 2 === 0).join("#"));
  return [...shapes.values()].map((some) => some[0].map((part, at) => (some.every((parts) => parts[at] === part) ? part : "#")).join(""));
}

/* A line above some heads: a name, and words about it. */
function makeTitle(name, words) {
  const title = make("h2", "group", name);
  title.append(make("span", "faint", ` · ${words.filter(Boolean).join(" · ")}`));
  return title;
}

/* Make an element; text is only ever text. */
export function make(tag, name = "", text = "") {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.textContent = text;
  return element;
}
