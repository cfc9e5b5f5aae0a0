/* The tint of a text from what a page holds: cells of heads, or lists of their weights.

     low[at] <= tint <= high[at]     of the same tint as in text_tint.py

   From cells both are the tint. A list (weight_lists.py) has the weights from `least` on;
   any other one is below `least`, and at most the rest of its row:

     attended     high[j] = mean over the selected rows i of  w, or min(least, rest[i])
     attending    high[i] = sum of w over the selected keys in the list
                            + min(rest[i], least · how many others the row may look at)

   By value, a weight on key j is multiplied by the length of its value; a bound by that, or
   by the longest of the selected keys. The mean over all heads has a list of its own. Then no other is needed.

   Next: offline_source.js */

import { encode, isMasked, weightOf } from "./ink.js";

const SLICE = 8; // ms of work, then others may
const PARTS = 250; // steps of a rest
const LOST = 255; // a row without weights

/* Return the codes of every token; from lists, also `upper` and what is `known`.
   also: "1.12.15", a selection of another sequence, whose answer is `there` */
export const tintText = async (source, { also, ...asked }, signal) => {
  if (also) {
    const [sequence, first, last] = also.split(".").map(Number);
    const here = await tintText(source, asked, signal);
    return { ...here, there: await tintText(source, { ...asked, sequence, first, last }, signal) };
  }
  const { sequence, heads, show, combine, by = "weight" } = asked;
  if (by === "rollout") return { codes: await tintRollout(source, asked) };
  const { count } = source.about.sequences[sequence];
  const [low, high, one, top] = Array.from({ length: 4 }, () => new Float64Array(count));
  const seen = new Uint8Array(count);
  const mean = (combine === "mean" && by === "weight" && !heads && source.about.means?.[sequence]) || null;
  const places = mean ? [null] : source.headsOfText(sequence, heads);
  const join = combine === "max" ? Math.max : (a, b) => a + b;
  let [used, listed, rest] = [0, 0, 0];
  let until = performance.now() + SLICE;
  for (const place of places) {
    one.fill(0);
    top.fill(0);
    const lists = await source.listsOf(place, sequence);
    const sizes = await source.sizesOf(place, by);
    const found = lists ? tintList(lists, asked, sizes, one, top, seen) : tintHead(await source.headOf(place), source.find(place).record, asked, sizes, one, seen);
    if (lists && found) {
      listed += 1;
      rest += lists.meanRest(asked);
    }
    used += found ? 1 : 0;
    for (let at = 0; at < count; at++) {
      low[at] = join(low[at], one[at]);
      high[at] = join(high[at], lists ? top[at] : one[at]);
    }
    if (performance.now() > until) {
      await pause();
      signal?.throwIfAborted();
      until = performance.now() + SLICE;
    }
  }
  const share = combine === "max" ? 1 : Math.max(1, used);
  const encodeAll = (totals) => Uint16Array.from(totals, (sum, at) => (seen[at] ? encode(Math.min(1, sum / share)) : 0));
  const codes = encodeAll(low);
  if (!listed) return { codes };
  const { least, off } = mean ?? source.about.lists;
  return { codes, upper: encodeAll(high), known: { least, off, rest: rest / listed, mean: Boolean(mean), all: show === "attending" } };
};

/* The same from the rollout of every pair of tokens (page_rollout.py). */
async function tintRollout(source, { sequence, first, last, show }) {
  const { count, ways } = source.about.sequences[sequence];
  if (ways.rollout) throw new Error(ways.rollout);
  const bytes = new Uint8Array(await source.read(`rollout-${sequence}`, source.inflated));
  const codes = new Uint16Array(count);
  const rows = show === "attended";
  for (let at = 0; at < count; at++) {
    let [sum, seen] = [0, false];
    for (let one = first; one <= last; one++) {
      const cell = rows ? one * count + at : at * count + one;
      const code = (bytes[cell] << 8) | bytes[count * count + cell];
      if (isMasked(code)) continue;
      seen = true;
      sum += weightOf(code);
    }
    if (seen) codes[at] = encode(Math.min(1, rows ? sum / (last + 1 - first) : sum));
  }
  return codes;
}

/* Return the weights of words on the moments of a sound, mean or max over heads, as codes. */
export const weighWords = async (source, { sequence, heads, combine }, signal) => {
  const { words } = source.about.sounds[sequence];
  const { count } = source.about.sequences[sequence];
  const isMeant = ({ nq, nk, qNamed, kNamed }) => nq === words.length && nk === count && !(qNamed && kNamed);
  const places = source.headsOfText(sequence, heads, isMeant);
  const total = new Float64Array(words.length * count);
  for (const place of places) {
    const head = await source.headOf(place);
    for (let i = 0; i < words.length; i++) {
      head.weigh(i, 0, count, (j, weight) => {
        const at = i * count + j;
        total[at] = combine === "max" ? Math.max(total[at], weight) : total[at] + weight / places.length;
      });
    }
    await pause();
    signal?.throwIfAborted();
  }
  return { codes: Uint16Array.from(total, encode) };
};

/* Add what a head gives to each token, by position; return whether the selection is in it. */
function tintHead(head, record, { first, last, show }, sizes, given, seen) {
  const { nq, nk, width } = head;
  const [queryAt, keyAt] = placesOf(record);
  const isChosen = (position) => position >= first && position <= last;
  if (show === "attended") {
    const rows = Array.from({ length: nq }, (_, i) => i).filter((i) => isChosen(queryAt(i)));
    for (const i of rows) {
      head.weighRow(i, head.rowsOf(i, i + 1), 0, nk, (j, weight) => {
        given[keyAt(j)] += (weight * (sizes?.[j] ?? 1)) / rows.length;
        seen[keyAt(j)] = 1;
      });
    }
    return rows.length > 0;
  }
  const keys = Array.from({ length: nk }, (_, j) => j).filter((j) => isChosen(keyAt(j)));
  const rows = keys.length ? head.rowsOf(0, nq) : []; // too many to keep for every head
  for (let i = 0; keys.length && i < nq; i++) {
    head.weighRow(i, rows.subarray(i * width, (i + 1) * width), keys[0], keys.at(-1) + 1, (j, weight) => {
      if (!isChosen(keyAt(j))) return;
      given[queryAt(i)] += weight * (sizes?.[j] ?? 1);
      seen[queryAt(i)] = 1;
    });
  }
  return keys.length > 0;
}

/* The same from a list: low and high of each token. */
function tintList(list, { first, last, show }, sizes, low, high, seen) {
  const sizeOf = (j) => sizes?.[j] ?? 1;
  const [queryAt, keyAt] = placesOf(list.record);
  const isChosen = (position) => position >= first && position <= last;
  const chosen = (n, at) => Uint8Array.from({ length: n }, (_, index) => isChosen(at(index)));
  return show === "attended"
    ? tintKeys(list, chosen(list.nq, queryAt), keyAt, sizeOf, low, high, seen)
    : tintQueries(list, chosen(list.nk, keyAt), queryAt, sizeOf, low, high, seen);
}

function tintKeys(list, isRow, keyAt, sizeOf, low, high, seen) {
  const { nq, nk, runs, starts, least } = list;
  const [bound, may, lost] = Array.from({ length: 3 }, () => new Float64Array(nk + 1)); // differences along the keys
  const rows = isRow.reduce((sum, x) => sum + x, 0);
  for (let i = 0; i < nq; i++) {
    if (!isRow[i]) continue;
    const rest = list.restOf(i);
    for (let run = starts[i]; run < starts[i + 1]; run += 2) {
      for (const [at, sign] of [[runs[run], 1], [runs[run + 1], -1]]) {
        may[at] += sign;
        if (Number.isNaN(rest)) lost[at] += sign;
        else bound[at] += sign * Math.min(least, rest);
      }
    }
  }
  const own = new Float64Array(nk);
  const less = new Float64Array(nk);
  list.each((i, j, weight) => {
    if (!isRow[i]) return;
    own[j] += weight;
    less[j] += Math.min(least, list.restOf(i));
  });
  let [most, many, nan] = [0, 0, 0];
  for (let j = 0; j < nk; j++) {
    most += bound[j];
    many += may[j];
    nan += lost[j];
    if (!many) continue;
    low[keyAt(j)] = nan ? NaN : (own[j] * sizeOf(j)) / rows;
    high[keyAt(j)] = nan ? NaN : ((own[j] + Math.max(0, most - less[j])) * sizeOf(j)) / rows;
    seen[keyAt(j)] = 1;
  }
  return rows > 0;
}

function tintQueries(list, isKey, queryAt, sizeOf, low, high, seen) {
  const { nq, nk, runs, starts, least } = list;
  const [own, held] = [new Float64Array(nq), new Float64Array(nq)];
  list.each((i, j, weight) => {
    if (!isKey[j]) return;
    own[i] += weight * sizeOf(j);
    held[i] += 1;
  });
  const before = new Uint32Array(nk + 1); // chosen keys
  let longest = 0; // value of a chosen key
  for (let j = 0; j < nk; j++) {
    before[j + 1] = before[j] + isKey[j];
    if (isKey[j]) longest = Math.max(longest, sizeOf(j));
  }
  for (let i = 0; i < nq; i++) {
    let many = 0;
    for (let run = starts[i]; run < starts[i + 1]; run += 2) many += before[runs[run + 1]] - before[runs[run]];
    if (!many) continue;
    const rest = list.restOf(i);
    low[queryAt(i)] = Number.isNaN(rest) ? NaN : own[i];
    high[queryAt(i)] = own[i] + longest * Math.min(rest, least * (many - held[i])); // NaN stays NaN
    seen[queryAt(i)] = 1;
  }
  return before[nk] > 0;
}

/* The lists of the heads of a record, of which one is read. */
export class WeightList {
  /* about: least and steps; at: which head of how many; mask: the keys that rows may look at */
  constructor(buffer, record, { least, steps }, { at, heads, mask, maskAt }) {
    const { nq, nk } = record;
    Object.assign(this, { record, nq, nk, least, ...readRuns(mask, nq, maskAt) });
    const bytes = new Uint8Array(buffer);
    const cut = (start, planes, n) => Array.from({ length: planes }, (_, plane) => bytes.subarray(start + plane * n, start + (plane + 1) * n));
    this.rests = bytes.subarray(at * nq, (at + 1) * nq);
    const counts = cut(heads * nq, 3, heads * nk);
    const countAt = (key) => (counts[0][key] << 16) | (counts[1][key] << 8) | counts[2][key];
    let [entries, before] = [0, 0];
    for (let key = 0; key < heads * nk; key++) {
      if (key === at * nk) before = entries;
      entries += countAt(key);
    }
    this.before = before;
    this.counts = Uint32Array.from({ length: nk }, (_, j) => countAt(at * nk + j));
    this.gaps = cut(heads * (nq + 3 * nk), 3, entries);
    this.codes = cut(heads * (nq + 3 * nk) + 3 * entries, 2, entries);
    this.weights = Float64Array.from({ length: steps }, (_, code) => least ** (1 - code / (steps - 1)));
  }

  /* The sum of the weights of a row that are not in the list, at most. */
  restOf(i) {
    return this.rests[i] === LOST ? NaN : this.rests[i] / PARTS;
  }

  /* Tell every entry: row, key and weight. */
  each(tell) {
    const { counts, gaps, codes, weights } = this;
    let at = this.before;
    for (let j = 0; j < this.nk; j++) {
      let i = -1;
      for (const end = at + counts[j]; at < end; at++) {
        i += 1 + ((gaps[0][at] << 16) | (gaps[1][at] << 8) | gaps[2][at]);
        tell(i, j, weights[(codes[0][at] << 8) | codes[1][at]]);
      }
    }
  }

  /* The mean rest of the selected rows, or of all rows if keys are selected. */
  meanRest({ first, last, show }) {
    const [queryAt] = placesOf(this.record);
    let [sum, rows] = [0, 0];
    for (let i = 0; i < this.nq; i++) {
      const here = show === "attending" || (queryAt(i) >= first && queryAt(i) <= last);
      if (!here || this.rests[i] === LOST) continue;
      sum += this.restOf(i);
      rows += 1;
    }
    return rows ? sum / rows : 0;
  }
}

/* The positions of queries and of keys by their index. */
function placesOf(record) {
  return ["q", "k"].map((side) => {
    const [positions, start] = [record[`${side}Positions`], record[`${side}Start`]];
    return positions ? (at) => positions[at] : (at) => start + at;
  });
}

/* Of each row the place of its first run, and then all runs: first key and end. */
export function readRuns(mask, nq, at) {
  let start = 1;
  for (let head = 0; head < (mask[0] > 1 ? at : 0); head++) start += nq + 2 * mask.subarray(start, start + nq).reduce((sum, x) => sum + x, 0);
  const starts = new Uint32Array(nq + 1);
  for (let i = 0; i < nq; i++) starts[i + 1] = starts[i] + 2 * mask[start + i];
  return { runs: mask.subarray(start + nq), starts };
}

/* Let the page paint and hear its keys. */
function pause() {
  return new Promise((done) => setTimeout(done));
}
