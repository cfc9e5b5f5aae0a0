/* The text of the other run beside that of the first, tinted by its own selection.

   It has only the lines in sight, as text_view.js has. A click selects the token that
   corresponds in the first text, and with it this one.

   Next: text_pair.js */

import { make } from "./gallery.js";
import { isMasked, weightOf } from "./ink.js";
import { breakLines, findLine, isFromRight, keepInSight, readToken, ROW } from "./text_lines.js";

export class SideText {
  constructor(view) {
    Object.assign(this, { view, part: view.part, rows: new Map(), lines: [] });
    this.part.beside.addEventListener("scroll", () => this.draw());
    this.part.beside.addEventListener("click", ({ target }) => {
      const token = target.closest("[data-other]");
      if (token) this.choose(Number(token.dataset.other));
    });
  }

  /* codes: of every token of a sequence; range: the selected ones */
  show({ sequence, codes, range }) {
    Object.assign(this, { sequence, codes, range });
    const width = this.part.besideLines.clientWidth;
    if (this.laid !== `${sequence} ${width}`) {
      this.laid = `${sequence} ${width}`;
      this.texts = this.view.images.hide(sequence, this.view.textsOf(sequence));
      const context = document.createElement("canvas").getContext("2d");
      context.font = getComputedStyle(this.part.besideLines).font;
      const name = { start: 0, name: this.view.pair.names[sequence] };
      this.lines = breakLines(this.texts, [name], width, (text) => context.measureText(text).width + 1);
      this.part.besideLines.style.height = `${this.lines.length * ROW}px`;
      this.rows.clear();
      this.part.besideLines.replaceChildren();
    }
    const top = findLine(this.lines, range[0]) * ROW;
    const { scrollTop, clientHeight } = this.part.beside;
    if (top < scrollTop || top > scrollTop + clientHeight - 2 * ROW) this.part.beside.scrollTop = top - clientHeight / 2;
    this.draw();
  }

  draw() {
    for (const row of keepInSight(this.part.beside, this.rows, this.lines.length, (at) => this.makeRow(at))) {
      for (const token of row.children) this.paint(token);
    }
  }

  makeRow(at) {
    const { first, end, name } = this.lines[at];
    const row = make("div", name === undefined ? "text-line" : "text-line block", name === undefined ? "" : readToken(name));
    row.style.top = `${at * ROW}px`;
    const texts = this.texts.slice(first, end);
    if (isFromRight(texts)) row.dir = "rtl";
    row.append(...texts.map((text, n) => {
      const token = make("span", "token", n ? readToken(text) : readToken(text).replace(/^ (?=.)/, ""));
      token.dataset.other = first + n;
      return token;
    }));
    this.part.besideLines.append(row);
    return row;
  }

  paint(token) {
    const at = Number(token.dataset.other);
    const [first, last] = this.range;
    token.classList.toggle("chosen", at >= first && at <= last);
    token.classList.toggle("only", at === first && at === last);
    token.classList.toggle("masked", isMasked(this.codes[at]));
    const { css, text } = this.view.colourOf(weightOf(this.codes[at]));
    token.style.backgroundColor = css;
    token.style.color = text;
  }

  choose(at) {
    const partner = this.view.pair.partnerOf(this.sequence, at);
    if (partner >= 0) this.view.select(partner, partner);
    else this.view.page.panel.say(`this token is only in ${this.view.pair.names[this.sequence]}`);
  }
}
