/* Above the heads: the text that they read, what a small map shows, what a badge means.

     strip     the first words of the text, or the picture, and a link to all of it
     sample    a small map with its axes, and the scale of the colours in words
     badges    each with its definition and threshold, and how many heads have it

   Definitions come with the data (head_table.js). Tokens become text nodes.

   Next: gallery.js */

import { make } from "./gallery.js";
import { badgesOf, listBadges, numberOf, tellBadge, tellFew } from "./head_table.js";
import { showCount } from "./ink.js";
import { fromBase64 } from "./source.js";
import { readToken } from "./text_lines.js";

const TOKENS = 120; // of the text that are shown
const SIGNS = 600; // characters of them
const ROOM = 760; // pixels: with less, the guide is closed at first

export class GalleryGuide {
  constructor(page) {
    Object.assign(this, { page, part: page.part, meta: page.meta });
    this.part.readAll.addEventListener("click", (event) => {
      event.preventDefault();
      page.openText();
    });
    this.part.badgeKey.addEventListener("click", ({ target }) => {
      const button = target.closest("button");
      if (button) page.set({ only: page.at.only === button.value ? "" : button.value });
    });
  }

  show(rows) {
    const { guide } = this.part;
    const wide = this.page.root.clientWidth;
    if (wide && this.opened === undefined) guide.open = this.opened = wide >= ROOM;
    this.showStrip();
    this.showSample(rows);
    this.showBadges(rows);
  }

  // ---- the text

  showStrip() {
    const { sequence } = this.page.at;
    const picture = this.meta.pictures[sequence];
    const { texts = [], tokens = [], count = 0 } = this.meta.sequences[sequence] ?? {};
    const words = texts.length ? texts : tokens.map((id) => `${id} `);
    const nodes = picture ? [drawPicture(picture)] : listWords(words);
    const length = picture ? `${picture.rows} × ${picture.columns} patches` : `${showCount(count)} tokens`;
    const about = picture ? "the picture" : texts.length ? "the text" : "the tokens, as numbers";
    this.part.stripName.textContent = count || picture ? `${about}, ${length}:` : "what the model read is not known";
    this.part.strip.replaceChildren(...nodes);
    this.part.readAll.hidden = !this.page.text.hasText(sequence);
  }

  // ---- a small map

  showSample(rows) {
    const { ink } = this.page;
    const most = Math.max(1, ...this.meta.records.filter(({ sequence }) => sequence === this.page.at.sequence).map(({ nq, nk }) => Math.max(nq, nk)));
    let cells = 1;
    while (most > 64 * cells) cells *= 2;
    const pixel = cells === 1 ? "a pixel is one weight" : `a pixel is the largest weight of up to ${cells} × ${cells} cells`;
    const least = Number((10 ** ink.low).toPrecision(2));
    const masked = this.meta.records.some(({ causal }) => causal) ? " Grey: the query may not look there." : "";
    this.part.sampleWords.textContent =
      `Each square is one head: queries from top to bottom, keys from left to right, the colour is the weight of a query on a key, from ${least} (or less) to 1 on a logarithmic scale; ${pixel}.${masked} A horizontal line is a query that looks everywhere, a vertical line a key that many look at, a diagonal a fixed distance.`;
    this.part.sampleScale.getContext("2d").drawImage(ink.paintLegend(false), 0, 0);
    this.part.sampleEnds.textContent = `${least} … 1`;
    this.sampled = rows[0];
  }

  /* Copy the map of the first head as soon as it is there. */
  paintSample({ layer, head }, picture) {
    const { sample } = this.part;
    if (layer !== this.sampled?.layer || head !== this.sampled.head) return;
    [sample.width, sample.height] = [picture.width, picture.height];
    sample.getContext("2d").drawImage(picture, 0, 0);
  }

  // ---- badges

  showBadges(rows) {
    const known = this.meta.table.length > 0;
    const items = listBadges(this.meta).map((statistic) => this.makeBadge(statistic, rows, known)).filter(Boolean);
    this.part.badgeKey.replaceChildren(...items);
    this.part.badgeWait.hidden = known;
  }

  makeBadge(statistic, rows, known) {
    const { name, label, badge, tooFew } = statistic;
    const count = rows.filter((row) => badgesOf(this.meta, row).includes(statistic)).length;
    if (!tooFew && !count) return null; // no head has NaN
    const item = make("li");
    const button = make("button", `tag ${name}`, badge.label);
    Object.assign(button, { type: "button", value: name, disabled: !count });
    for (const theme of ["light", "dark"]) button.style.setProperty(`--${theme}`, badge[theme]);
    button.setAttribute("aria-pressed", this.page.at.only === name);
    button.setAttribute("aria-label", `${badge.label}: show only these heads`);
    const few = tooFew ? tellFew(statistic, rows) : "";
    const none = rows.every((row) => numberOf(row, name) === null);
    const heads = few || (none ? "these layers do not have it" : `${showCount(count)} of ${showCount(rows.length)} heads`);
    item.append(button, make("span", "", ` ${label === badge.label ? "" : `${label}: `}${tellBadge(this.meta, statistic)}${known ? ` · ${heads}` : ""}`));
    return item;
  }
}

function listWords(words) {
  let room = SIGNS;
  const nodes = [];
  const apart = words.some((word) => /\s/.test(word)) ? "" : " "; // pieces of words
  for (const word of words.slice(0, TOKENS)) {
    const shown = readToken(word).replaceAll("⏎", "⏎ ");
    room -= shown.length;
    if (room < 0) break;
    nodes.push(make("bdi", "", shown), apart);
  }
  if (nodes.length < 2 * words.length) nodes.push(" …");
  return nodes;
}

function drawPicture({ height, width, rgb }) {
  const canvas = make("canvas");
  [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const bytes = fromBase64(rgb);
  for (let at = 0; at < height * width; at++) image.data.set([...bytes.subarray(3 * at, 3 * at + 3), 255], 4 * at);
  context.putImageData(image, 0, 0);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", "the picture that the model read");
  return canvas;
}
