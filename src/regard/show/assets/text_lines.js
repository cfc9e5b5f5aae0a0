/* A text as lines: which tokens stand on which line of a given width.

     tokens ─▶ words ─▶ lines        a word is not split, unless it is wider than a line
     a newline ends its line         two of them leave an empty one
     a block starts with its name    chat messages, documents, pages (text_blocks.py)

   Widths are measured once per distinct token, so 131,072 tokens take a moment, and only
   the lines in sight need elements.

   Next: text_view.js */

import { showSigns } from "./ink.js";

export const ROW = 28; // pixels of a line
const SPARE = 12; // lines above and below those in sight
const LONGEST = 120; // characters of a token that are shown
const WIDE = 0.98; // of a line that is filled: the text of the page may be a hair wider
const CLOSED = /[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef]/u; // written without spaces
const SPECIAL = /^(<\|?[\w ]+\|?>|<\/?[a-z_]+>|\[[A-Z]+\])$/;
const RIGHT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/u; // Hebrew, Arabic

/* A token as it is read: spaces stay, other invisible characters become signs. */
export function readToken(text) {
  return showSigns(text, LONGEST, " ");
}

export function isSpecial(text) {
  return SPECIAL.test(text);
}

/* Make the rows of the lines in sight of a box, and drop those that are far away.
   rows: elements by number of the line; count: all lines. Return the rows in sight. */
export function keepInSight({ scrollTop, clientHeight }, rows, count, makeRow) {
  const first = Math.max(0, Math.floor(scrollTop / ROW) - SPARE);
  const end = Math.min(count, Math.ceil((scrollTop + clientHeight) / ROW) + SPARE);
  for (const [at, row] of rows) {
    if (at >= first && at < end) continue;
    row.remove();
    rows.delete(at);
  }
  for (let at = first; at < end; at++) if (!rows.has(at)) rows.set(at, makeRow(at));
  return rows.values();
}

/* Return the lines, {first, end} of tokens; the line of a block's name has no tokens. */
export function breakLines(texts, blocks, width, measure) {
  const lines = [];
  const starts = new Map(blocks.map(({ start, name }) => [start, name]));
  const room = WIDE * width;
  const widths = new Map(); // of a text
  let [first, word, x, wordX] = [0, 0, 0, 0];
  const end = (at) => {
    if (at > first) lines.push({ first, end: at });
    first = at;
  };
  texts.forEach((text, at) => {
    if (starts.has(at)) {
      end(at);
      lines.push({ first: at, end: at, name: starts.get(at) });
      [word, x] = [at, 0];
    }
    let wide = widths.get(text);
    if (wide === undefined) widths.set(text, (wide = measure(readToken(text))));
    if (startsWord(texts, at)) [word, wordX] = [at, x];
    if (x + wide > room && at > first) {
      const from = word > first ? word : at; // a word that is wider than a line is split
      x = from === at ? 0 : x - wordX;
      end(from);
      [word, wordX] = [from, 0];
    }
    x += wide;
    if (text.includes("\n")) {
      end(at + 1);
      if (/\n[^]*\n/.test(text)) lines.push({ first: at + 1, end: at + 1 });
      [word, x, wordX] = [at + 1, 0, 0];
    }
  });
  end(texts.length);
  return lines;
}

function startsWord(texts, at) {
  const [text, before] = [texts[at], texts[at - 1] ?? " "];
  return /^\s/.test(text) || /\s$/.test(before) || isSpecial(text) || isSpecial(before) || CLOSED.test(text);
}

/* Whether most letters of a line are of a script that is read from the right. */
export function isFromRight(texts) {
  const letters = texts.join("").match(/\p{L}/gu) ?? [];
  return letters.filter((letter) => RIGHT.test(letter)).length > letters.length / 2;
}

/* Return the number of the line on which a token is: the last that starts at or before it. */
export function findLine(lines, token) {
  let [low, high] = [0, lines.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (lines[middle].first <= token) low = middle;
    else high = middle - 1;
  }
  return low;
}
