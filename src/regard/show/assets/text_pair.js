/* Two recordings of one page: which tokens correspond, and what changed between them.

     change = B - A     of the tint of a token and of the token that corresponds to it

   The selection of one run is that of the other: from the first to the last token that
   corresponds to a selected one. A tint may be a range (held_text.js); then so is the
   change, and its colour is that of its smaller end, or none if its sign is not known.

   Next: text_view.js */

import { isMasked, weightOf } from "./ink.js";

export class TextPair {
  /* compared: as compare_recordings.py notes it; counts: tokens of both */
  constructor({ names, how, pairs, heads }, counts) {
    Object.assign(this, { names, how, heads });
    this.partners = counts.map((count) => new Int32Array(count).fill(-1)); // of each token of A and of B
    const [mine, theirs] = pairs ?? [0, 1].map(() => Array.from({ length: Math.min(...counts) }, (_, at) => at));
    mine.forEach((at, n) => {
      this.partners[0][at] = theirs[n];
      this.partners[1][theirs[n]] = at;
    });
  }

  /* The token of the other run that corresponds to one of this run; -1 if there is none. */
  partnerOf(sequence, at) {
    return this.partners[sequence][at];
  }

  /* First and last token of the other run for a selection of this one; null if there is none. */
  rangeOf(sequence, [first, last]) {
    const found = this.partners[sequence].subarray(first, last + 1).filter((at) => at >= 0);
    return found.length ? [found.reduce((a, b) => Math.min(a, b)), found.reduce((a, b) => Math.max(a, b))] : null;
  }

  /* What changed of every token of a run, {low, high}; null for tokens of this run alone. */
  changesOf(sequence, here, there) {
    const ends = ({ codes, upper }, at) => [codes[at], (upper ?? codes)[at]].map(weightOf);
    return Array.from(here.codes, (code, at) => {
      const other = this.partnerOf(sequence, at);
      if (other < 0 || (isMasked(code) && isMasked(there.codes[other]))) return null;
      const [mine, theirs] = [ends(here, at), ends(there, other)];
      const [a, b] = sequence === 0 ? [mine, theirs] : [theirs, mine];
      return { low: b[0] - a[1], high: b[1] - a[0], a, b };
    });
  }
}

/* The end of a change that is nearer to 0; 0 if its sign is not known. */
export function leastChange({ low, high }) {
  if (Number.isNaN(low)) return NaN;
  if (low > 0) return low;
  return high < 0 ? high : 0;
}
