/* The numbers of a page that holds them: weights from rounded q and k, as they are asked for.

     weight of query i and key j = exp(Σ_c q[i, c] k[j, c] - lse[i])      where the mask allows

   What a level shows of many cells is pooled from them: the largest, or of the sums over
   keys the mean over queries. Of a long text the coarse levels are there, made by page.py.
   A page whose cells do not all fit has one level of every head, its overview, and the
   cells of some heads; for the text it has lists of the largest weights (held_text.js). It is the source that page.js asks, as HttpSource is.

   Next: source.js */

import { readRuns, tintText, WeightList, weighWords } from "./held_text.js";
import { encode, NAN, weightOf } from "./ink.js";
import { fromBase64 } from "./source.js";

const SLICE = 8; // ms of work, then others may
const HEADS = 24; // kept unpacked
const MOST = 20; // keys of a pinned row
const RECORDS = 128; // whose numbers are kept inflated
const LISTS = 1200; // heads whose lists are known: views of what is inflated
const KEYS = 128; // heads whose keys are kept unpacked

export class HeldSource {
  /* textOf: gives the base64 of what is held under a name. */
  constructor(about, textOf) {
    Object.assign(this, { about, textOf });
    this.opened = new Map(); // what was read last, by name
    this.unpacked = new Map(); // keys of a head
    this.listed = new Map(); // lists of a head
    this.inflated = new Map(); // the numbers of a record: a text needs those of all heads
  }

  async meta() {
    return this.about;
  }

  async table() {
    const { table } = this.about;
    return { table };
  }

  /* The record of a place, its number, and which of its heads is meant. */
  find({ sequence, layer, head }) {
    const number = this.about.records.findIndex((x) => x.sequence === sequence && x.layer === layer);
    const record = this.about.records[number];
    return { record, number, at: record.heads.indexOf(head) };
  }

  /* What make gives, remembered for the next time. */
  keep(name, make, kept = this.opened, most = HEADS) {
    const made = kept.get(name) ?? make();
    kept.delete(name);
    kept.set(name, made); // now the youngest
    if (kept.size > most) kept.delete(kept.keys().next().value);
    return made;
  }

  read(name, kept = this.opened, most = HEADS) {
    return this.keep(name, () => inflate(fromBase64(this.textOf(name))), kept, most);
  }

  /* Where the cells of a head are: with those of its record, or alone; null if it has none. */
  cellsOf({ record, number, at }) {
    if (record.overview === undefined) return { name: `${number}`, about: record, at };
    const own = record.cells.find(({ head }) => head === record.heads[at]);
    return own ? { name: `${number}-${own.head}`, about: { ...record, ...own, heads: [own.head] }, at: 0 } : null;
  }

  async headOf(place) {
    const found = this.find(place);
    const cells = this.cellsOf(found);
    if (!cells) throw new Error("this page has an overview of this head, without single cells");
    const numbers = this.read(`factors-${cells.name}`, this.inflated, RECORDS);
    const [factors, mask] = await Promise.all([numbers, this.read(`mask-${found.record.mask}`, this.inflated, RECORDS)]);
    const keep = (name, work) => this.keep(`${name} of ${cells.name}`, work, this.unpacked, KEYS);
    const make = () => new Head(cells.about, cells.at, factors, { mask: new Int32Array(mask), maskAt: found.at, keep });
    return this.keep(`head ${found.number} ${found.at}`, make);
  }

  async row({ query, ...place }) {
    const head = await this.headOf(place);
    const weights = new Float64Array(head.nk);
    head.weigh(query, 0, head.nk, (j, weight) => (weights[j] = weight));
    const found = describeLine(weights, false);
    return this.about.pictures[place.sequence] ? { ...found, weights: [...weights] } : found;
  }

  async column({ key, ...place }) {
    const head = await this.headOf(place);
    const weights = new Float64Array(head.nq);
    for (let i = 0; i < head.nq; i++) head.weigh(i, key, key + 1, (_, weight) => (weights[i] = weight));
    return describeLine(weights, true);
  }

  /* The tint of every token, as text_tint.py defines it, or its bounds. */
  async text(asked, signal) {
    return tintText(this, asked, signal);
  }

  /* The weights of words over the moments of a sound, as sound_request.py defines them. */
  async sound(asked, signal) {
    return weighWords(this, asked, signal);
  }

  /* The lengths of the values of a head, of the longest 1; null: they are not asked for. */
  async sizesOf(place, by) {
    if (by !== "value") return null;
    const { record, number, at } = this.find(place);
    const bytes = new Uint8Array(await this.read(`values-${number}`, this.inflated, RECORDS));
    const start = record.values[at] * record.nk;
    return Float64Array.from({ length: record.nk }, (_, j) => weightOf((bytes[start + j] << 8) | bytes[bytes.length / 2 + start + j]));
  }

  /* The list of a head that has no cells here, or without a place that of the mean; null if there is none. */
  async listsOf(place, sequence) {
    const mean = place ? null : this.about.means[sequence];
    const number = mean ? mean.record : this.find(place).number;
    const record = this.about.records[number];
    if (place && (!record.lists || this.cellsOf(this.find(place)))) return null;
    const at = place ? record.heads.indexOf(place.head) : 0;
    const names = mean ? [`mean-${sequence}`, `mask-mean-${sequence}`] : [`lists-${number}`, `mask-${record.mask}`];
    const [lists, mask] = await Promise.all(names.map((name) => this.read(name, this.inflated, RECORDS)));
    const of = { at, heads: mean ? 1 : record.heads.length, mask: new Int32Array(mask), maskAt: at };
    return this.keep(`list ${names[0]} ${at}`, () => new WeightList(lists, record, mean ?? this.about.lists, of), this.listed, LISTS);
  }

  /* The heads that a list such as "17.5,18" names, "" for all; of those whose cells or lists are here. */
  headsOfText(sequence, list, isMeant = ({ qNamed, kNamed }) => qNamed && kNamed) {
    const wanted = list ? list.split(",").map((part) => part.split(".").map(Number)) : null;
    const isWanted = (layer, head) => !wanted || wanted.some(([at, one]) => at === layer && (one === undefined || one === head));
    const found = this.about.records.filter((x) => x.sequence === sequence && isMeant(x)).flatMap(({ layer, heads }) =>
      heads.filter((head) => isWanted(layer, head)).map((head) => ({ sequence, layer, head })),
    );
    const held = found.filter((place) => this.find(place).record.lists || this.cellsOf(this.find(place)));
    if (!held.length) throw new Error("this page has an overview of these heads, without single cells");
    return held;
  }

  async gallery({ sequence, layer }) {
    const { record, number } = this.find({ sequence, layer });
    const cells = 2 ** record.small;
    if (record.overview !== undefined) return this.pickGallery(record, number);
    const high = new Uint8Array(await this.read(`small-${number}`));
    return {
      codes: Uint16Array.from(high, (byte) => (byte === 1 ? NAN : byte && (byte << 8) | 128)),
      heads: record.heads.length,
      rows: Math.ceil(record.nq / cells),
      columns: Math.ceil(record.nk / cells),
    };
  }

  /* Small maps out of the overview. */
  async pickGallery(record, number) {
    const bytes = new Uint8Array(await this.read(`overview-${number}`));
    const part = { level: record.small, how: "max", top: 0, left: 0, bottom: record.nq, right: record.nk };
    const found = record.heads.map((_, at) => poolLevel(new Level(record, at, bytes, "max", record.overview), part));
    const [{ rows, columns }] = found;
    const codes = new Uint16Array(found.length * rows * columns);
    found.forEach((one, at) => codes.set(one.codes, at * rows * columns));
    return { codes, heads: found.length, rows, columns };
  }

  /* The stored level that has a pixel of this level; null if it comes from cells. */
  async levelOf({ record, number, at }, level, how) {
    const open = async (name, about, index, from) => new Level(about, index, new Uint8Array(await this.read(name)), how, from);
    const cells = this.cellsOf({ record, number, at });
    if (!cells) return level >= record.overview ? open(`overview-${number}`, record, at, record.overview) : null;
    const { stored } = cells.about;
    return stored && level >= stored ? open(`levels-${cells.name}`, cells.about, cells.at, stored) : null;
  }

  async tile(place, signal) {
    const found = this.find(place);
    const { record } = found;
    const { level, x, y, how } = place;
    const span = this.about.levels.tile * 2 ** level;
    const part = { level, how, top: y * span, left: x * span };
    part.bottom = Math.min(record.nq, part.top + span);
    part.right = Math.min(record.nk, part.left + span);
    const stored = await this.levelOf(found, level, how);
    const pixels = stored ? poolLevel(stored, part) : await poolCells(await this.headOf(place), part, signal);
    return { ...pixels, how, exact: true, note: "" };
  }
}

/* One head, unpacked. */
class Head {
  /* keep: remembers the keys, which several heads may share. */
  constructor({ nq, nk, width, keyHeads, heads, cap }, at, factors, { mask, maskAt, keep }) {
    Object.assign(this, { nq, nk, width, cap });
    const shared = Math.floor((at * keyHeads) / heads.length);
    const lses = new Float32Array(factors, 0, heads.length * nq);
    const steps = new Float32Array(factors, lses.byteLength, keyHeads * width);
    const bytes = new Uint8Array(factors, lses.byteLength + steps.byteLength);
    this.lse = lses.subarray(at * nq, (at + 1) * nq);
    this.steps = steps.subarray(shared * width, (shared + 1) * width);
    this.openRows = (i, end) => joinBytes(bytes, heads.length, at, width, nq, i, end);
    this.k = keep(`keys ${shared}`, () => joinBytes(bytes.subarray(3 * heads.length * width * nq), keyHeads, shared, width, nk, 0, nk));
    Object.assign(this, readRuns(mask, nq, maskAt));
  }

  /* All rows, unpacked when they are first asked for. */
  get q() {
    return (this.rows ??= this.rowsOf(0, this.nq));
  }

  rowsOf(first, end) {
    const rows = this.openRows(first, end);
    for (let i = 0; i < rows.length; i++) rows[i] *= this.steps[i % this.width];
    return rows;
  }

  /* Tell every weight of a row from one key up to another. */
  weigh(i, first, end, tell) {
    this.weighRow(i, this.q.subarray(i * this.width, (i + 1) * this.width), first, end, tell);
  }

  /* The same with the row itself, for which not all rows need be unpacked. */
  weighRow(i, q, first, end, tell) {
    const { k, width, cap, runs, starts } = this;
    const lse = this.lse[i];
    for (let run = starts[i]; run < starts[i + 1]; run += 2) {
      const stop = Math.min(end, runs[run + 1]);
      for (let j = Math.max(first, runs[run]); j < stop; j++) {
        let [a, b, c, d] = [0, 0, 0, 0];
        for (let at = 0, to = j * width; at < width; at += 4, to += 4) {
          a += q[at] * k[to];
          b += q[at + 1] * k[to + 1];
          c += q[at + 2] * k[to + 2];
          d += q[at + 3] * k[to + 3];
        }
        const score = a + b + c + d;
        tell(j, Math.exp((cap ? cap * Math.tanh(score / cap) : score) - lse));
      }
    }
  }
}

/* Pool the cells of a part of a head. */
async function poolCells(head, { level, how, top, left, bottom, right }, signal) {
  const cells = 2 ** level;
  const [rows, columns] = [Math.ceil((bottom - top) / cells), Math.ceil((right - left) / cells)];
  const codes = new Uint16Array(rows * columns); // 0: masked
  const line = new Float64Array(columns);
  const seen = new Uint8Array(columns);
  const larger = (j, weight) => {
    const at = (j - left) >> level;
    seen[at] = 1;
    line[at] = Math.max(line[at], weight); // NaN stays NaN
  };
  const more = (j, weight) => {
    const at = (j - left) >> level;
    seen[at] = 1;
    line[at] += weight;
  };
  let until = performance.now() + SLICE;
  for (let row = 0; row < rows; row++) {
    line.fill(0);
    seen.fill(0);
    const [first, end] = [top + row * cells, Math.min(bottom, top + (row + 1) * cells)];
    for (let i = first; i < end; i++) {
      head.weigh(i, left, right, how === "mass" ? more : larger);
      if (performance.now() > until) {
        await pause();
        signal?.throwIfAborted();
        until = performance.now() + SLICE;
      }
    }
    const share = how === "mass" ? end - first : 1;
    for (let at = 0; at < columns; at++) if (seen[at]) codes[row * columns + at] = encode(line[at] / share);
  }
  return { codes, rows, columns };
}

/* A stored level of one head. */
class Level {
  constructor({ nq, nk, heads }, at, bytes, how, stored) {
    const cells = 2 ** stored;
    Object.assign(this, { nq, stored, cells, rows: Math.ceil(nq / cells), columns: Math.ceil(nk / cells) });
    const size = this.rows * this.columns;
    const start = (2 * at + (how === "mass" ? 1 : 0)) * size;
    this.high = bytes.subarray(start, start + size);
    this.low = bytes.subarray(2 * heads.length * size + start, 2 * heads.length * size + start + size);
  }

  codeAt(row, column) {
    const at = row * this.columns + column;
    return (this.high[at] << 8) | this.low[at];
  }

  queriesOf(row) {
    return Math.min(this.nq, (row + 1) * this.cells) - row * this.cells;
  }
}

/* Pool the pixels of a stored level; those of its own level stay what they are. */
function poolLevel(stored, { level, how, top, left, bottom, right }) {
  const cells = 2 ** level;
  const [rows, columns] = [Math.ceil((bottom - top) / cells), Math.ceil((right - left) / cells)];
  const codes = new Uint16Array(rows * columns);
  const shift = 2 ** (level - stored.stored);
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const [y, x] = [(top / cells + row) * shift, (left / cells + column) * shift];
      codes[row * columns + column] = poolPixel(stored, how, y, x, shift);
    }
  }
  return { codes, rows, columns };
}

function poolPixel(stored, how, y, x, shift) {
  let [largest, mass, queries] = [0, 0, 0];
  for (let row = y; row < Math.min(stored.rows, y + shift); row++) {
    const count = stored.queriesOf(row);
    queries += count;
    for (let column = x; column < Math.min(stored.columns, x + shift); column++) {
      const code = stored.codeAt(row, column);
      largest = Math.max(largest, code);
      mass += weightOf(code) * count;
    }
  }
  return how === "mass" && shift > 1 && largest ? encode(mass / queries) : largest;
}

/* What a pinned row or column says, as the server does. */
function describeLine(weights, shares) {
  const total = sum(weights);
  const nan = weights.filter(Number.isNaN).length;
  let bits = 0;
  for (const weight of weights) {
    const part = shares ? weight / total : weight;
    if (part > 0) bits -= part * Math.log2(part);
  }
  const order = Array.from(weights.keys()).filter((index) => weights[index] > 0).sort((i, j) => weights[j] - weights[i] || i - j);
  const top = order.slice(0, MOST).map((index) => ({ index, weight: weights[index] }));
  const known = nan ? { entropy: null, total: null } : { entropy: Math.max(0, bits), total };
  return { ...known, unit: "bits", nan, top };
}

/* Whole numbers from three planes of bytes, each (heads, width, n), as some rows (n, width). */
function joinBytes(bytes, heads, head, width, n, first, end) {
  const plane = heads * width * n;
  const found = new Float32Array((end - first) * width);
  for (let c = 0; c < width; c++) {
    const start = (head * width + c) * n;
    for (let i = first; i < end; i++) {
      const at = start + i;
      const word = (bytes[at] << 16) | (bytes[plane + at] << 8) | bytes[2 * plane + at];
      found[(i - first) * width + c] = (word >>> 1) ^ -(word & 1); // the sign is the lowest bit
    }
  }
  return found;
}

function sum(numbers) {
  return numbers.reduce((total, x) => total + x, 0);
}

async function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

/* Let the page paint and hear its keys. */
function pause() {
  return new Promise((done) => setTimeout(done));
}
