/* All heads at a glance: a small map of each, by layer or in the order of a number.

   A pixel is the strongest link of its cells. Badges come from the statistics table:
   a head is called what it does with more than a given mean weight.

   Next: map.js */

import { showToken } from "./ink.js";

/* Mean weight from which on a head has the badge, and its short name. */
const BADGES = {
  nan_rows: { least: 1, name: "NaN" }, // queries, not a weight
  sink: { least: 0.5, name: "sink" },
  previous: { least: 0.3, name: "prev" },
  induction: { least: 0.1, name: "ind" },
  local: { least: 0.8, name: "local", keys: 256 }, // 64 tokens are all of a short text
};
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
    this.element.replaceChildren(sort === "layer" ? this.makeLayers() : this.makeOrder());
    if (!this.cards.size) this.element.append(make("p", "empty", "no head is like that"));
    this.setStop(this.element.querySelector("a"));
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
    const value = (row) => row[this.sort] ?? -Infinity; // what is not known comes last
    const rows = this.places.filter((row) => this.isChosen(row)).sort((a, b) => value(b) - value(a));
    const heads = make("div", "heads order");
    heads.append(...rows.map((row) => this.makeCard(row, `L${row.layer} h${row.head}`, showValue(row, this.sort))));
    return heads;
  }

  makeCard(row, name, value = "") {
    const badges = badgesOf(row);
    const card = make("a", "card");
    card.tabIndex = -1;
    const seen = [name, value, ...badges.map((badge) => BADGES[badge].name)].filter(Boolean).join(" ");
    card.setAttribute("aria-label", `${seen}: layer ${row.layer} head ${row.head} ${badges.join(", ")}`);
    card.title = Object.keys(BADGES).map((key) => `${key} ${showValue(row, key)}`).join("\n");
    const line = make("span", "line");
    line.append(make("span", "", name));
    if (value) line.append(" ", make("span", "value", value));
    for (const badge of badges) line.append(" ", make("span", `tag ${badge}`, BADGES[badge].name));
    card.append(make("span", "small"), line);
    this.cards.set(`${row.layer}/${row.head}`, card);
    this.heads.set(card, row);
    this.renewLink(card);
    return card;
  }

  isChosen(row) {
    return !this.only || badgesOf(row).includes(this.only);
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

export function badgesOf(row) {
  const isLong = (key) => row.nk >= (BADGES[key].keys ?? 0);
  const badges = Object.keys(BADGES).filter((key) => row[key] >= BADGES[key].least && isLong(key));
  // that the token before is near need not be said
  return badges.includes("previous") ? badges.filter((badge) => badge !== "local") : badges;
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
