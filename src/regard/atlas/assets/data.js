/* What the page knows: every statistic of every head, as page.py wrote it.

     atlas.show("induction", "diff")     the cells of a view, its scale and its words
     atlas.examples("induction", 0)      of one atlas, unpacked when they are first asked for

   Views: "a" and "b" are the atlases, "diff" is b - a.

   Next: head.js */

import { showCount, showToken } from "./ink.js";

const MARK = "A mark is an outline, or in a small cell a dot.";
const DOUBTS = ["", "few documents differ", "all documents are equal"]; // as in tally.py

export class Atlas {
  constructor(data) {
    Object.assign(this, data);
    this.views = data.names.length > 1 ? ["a", "b", "diff"] : ["a"];
    this.unpacked = new Map();
  }

  has({ layer, head }) {
    return Number.isInteger(head) && head >= 0 && head < (this.heads[layer] ?? 0);
  }

  nameOf(view) {
    const [a, b] = this.names.map((name) => showWords(name, 40));
    return { a, b, diff: `difference: ${b} − ${a}` }[view];
  }

  find(statistic) {
    return this.statistics.find(({ name }) => name === statistic);
  }

  /* A number of a head with its interval: { mean, half, marked }. */
  read(statistic, view, { layer, head }) {
    const { tables, difference } = this.find(statistic);
    const from = { a: tables[0], b: tables[1], diff: difference }[view];
    const [mean, half, count, marked, doubt] = ["mean", "half", "count", "marked", "doubt"].map((key) => from[key]?.[layer][head]);
    return { mean, half, count, marked: marked === 1, doubt };
  }

  show(statistic, view) {
    const { name, unit, told, tables, scale, difference } = this.find(statistic);
    if (view !== "diff") {
      const ends = `${showNumber(scale[0])} … ${showNumber(scale[1])} ${unit}`;
      return { ...tables[view === "a" ? 0 : 1], scale, unit, ends, told: `${name}: ${told}; ± is ${this.interval}.`, signed: false };
    }
    const [a, b] = this.names.map((x) => showWords(x, 40));
    const end = showNumber(difference.scale[1]);
    const ends = `−${end}, more in ${a} … 0 … +${end} ${unit}, more in ${b}`;
    return { ...difference, unit, ends, told: `${name}: ${told}; ± is ${this.interval}. ${difference.told} ${MARK}`, signed: true };
  }

  /* One sentence about one head. */
  describe(statistic, view, place) {
    const { unit } = this.find(statistic);
    const who = `layer ${place.layer} head ${place.head}`;
    const value = (of) => showPair(this.read(statistic, of, place));
    if (view !== "diff") {
      const { count } = this.read(statistic, view, place);
      return `${who}: ${statistic} ${value(view)} ${unit}, ${showCount(count)} documents`;
    }
    const [a, b] = this.names.map((x) => showWords(x, 40));
    const { mean, marked } = this.read(statistic, "diff", place);
    const sure = mean === null ? "" : marked ? ", marked" : ", not marked";
    return `${who}: ${statistic} ${value("a")} in ${a}, ${value("b")} in ${b}; difference ${value("diff")} ${unit}${sure}`;
  }

  /* All examples of a statistic: [layer][head] -> [value, document, piece, position, before, token, after]. */
  async examples(statistic, table) {
    const id = `examples-${table}-${this.statistics.findIndex(({ name }) => name === statistic)}`;
    if (!this.unpacked.has(id)) this.unpacked.set(id, unpack(document.getElementById(id).textContent));
    return this.unpacked.get(id);
  }
}

async function unpack(base64) {
  const bytes = Uint8Array.from(atob(base64), (sign) => sign.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

export function showNumber(x) {
  if (x === null) return "–";
  if (x !== 0 && Math.abs(x) < 1e-4) return x.toExponential(1).replaceAll("-", "−");
  const short = Math.abs(x) >= 1000 ? x.toFixed(0) : `${Number(x.toPrecision(3))}`;
  return short.replace("-", "−");
}

/* How many decimals show two digits of a number. */
function countDigits(x) {
  return Math.max(0, 1 - Math.floor(Math.log10(x)));
}

/* A number in a cell, in the digits that its scale has use for; what is marked has a sign. */
export function showShort(x, [low, high], marked) {
  if (x === null) return "";
  const short = Math.abs(x).toFixed(Math.min(6, countDigits(high - low)));
  const sign = x < 0 ? "−" : marked ? "+" : "";
  if (Number(short) === 0) return marked ? `${sign}0` : "0";
  return sign + short;
}

/* A mean and half its interval, with as many digits as the interval allows. */
export function showPair({ mean, half, doubt = 0 }) {
  if (doubt) return `${showPair({ mean, half })} (${DOUBTS[doubt]})`;
  if (mean === null) return "no value";
  if (half === null) return `${showNumber(mean)} ± ?`;
  const digits = half > 0 ? countDigits(half) : 3;
  if (digits > 6) return `${showNumber(mean)} ± ${half.toExponential(0)}`.replace("e-", "e−");
  return `${mean.toFixed(digits).replace("-", "−")} ± ${half.toFixed(digits)}`;
}

/* Words of others: spaces stay, whatever steers or hides is shown as its number. */
export function showWords(text, limit = 400) {
  const shown = text.split(" ").map((word) => showToken(word, limit)).join(" ");
  return shown.length > limit ? `${[...shown].slice(0, limit).join("")}…` : shown;
}

/* Make an element; text is only ever text. */
export function make(tag, name = "", text = "") {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.textContent = text;
  return element;
}
