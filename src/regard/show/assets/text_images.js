/* The pictures of an image-text model beside its text, tinted by the same numbers.

     codes of the text ─▶ the token of each patch (vision_input.py) ─▶ patches.js

   Point at a patch to read its number. A click, or Enter, selects it and shows who
   attends to it. A picture is of a sequence; there may be several.

   Next: patches.js */

import { make } from "./gallery.js";
import { isMasked, weightOf } from "./ink.js";
import { drawPatches, placePatch, stepPatch } from "./patches.js";

const SIZE = 480; // pixels across, shown smaller
const PATCH = "▪"; // in the text

export class TextImages {
  constructor(view) {
    Object.assign(this, { view, part: view.part, views: [] });
  }

  /* The pictures of a sequence. */
  imagesOf(sequence) {
    return this.view.meta.images.filter((image) => image.sequence === sequence);
  }

  /* Texts in which every patch is a small square. */
  hide(sequence, texts) {
    const patches = new Set(this.imagesOf(sequence).flatMap(({ tokens }) => tokens));
    return texts.map((text, at) => (patches.has(at) ? PATCH : text));
  }

  /* Make the elements of the sequence's pictures, if they are others. */
  layOut() {
    const { part, view } = this;
    const images = this.imagesOf(view.at.sequence);
    part.images.hidden = !images.length && !view.meta.imagesMissing;
    if (this.laid === view.at.sequence) return;
    this.laid = view.at.sequence;
    this.views = images.map((image, at) => this.build(image, images.length > 1 ? `picture ${at + 1}` : "the picture"));
    const missing = view.meta.imagesMissing && !images.length ? [make("p", "", `No picture: ${view.meta.imagesMissing}`)] : [];
    part.images.replaceChildren(...this.views.flatMap(({ title, frame, told }) => [title, frame, told]), ...missing);
  }

  build(image, name) {
    const [title, frame, told] = [make("h2", "", name), make("div", "picture"), make("p", "", "")];
    const one = { image, title, frame, told, cursor: null };
    frame.tabIndex = 0;
    frame.setAttribute("role", "application");
    frame.setAttribute("aria-label", `${name}. Arrows move over the patches, Enter shows who attends to one.`);
    const point = (event) => this.point(one, placePatch(image, frame.firstChild, event));
    frame.addEventListener("pointermove", point);
    frame.addEventListener("click", (event) => this.pick(image, placePatch(image, frame.firstChild, event)));
    for (const name of ["pointerleave", "blur"]) frame.addEventListener(name, () => this.point(one, null));
    frame.addEventListener("keydown", (event) => {
      const next = stepPatch(image, one.cursor, event.key);
      if (next !== null) this.point(one, next);
      else if (event.key === "Enter" && one.cursor !== null) this.pick(image, one.cursor);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    return one;
  }

  point(one, patch) {
    if (patch === one.cursor) return;
    one.cursor = patch;
    this.drawOne(one);
    if (patch !== null) this.view.page.panel.say(this.view.sentenceOf(one.image.tokens[patch]));
  }

  /* Select a patch, and show who attends to it. */
  pick(image, patch) {
    const token = image.tokens[patch];
    this.view.page.set({ passage: `${token}`, show: "attending" });
    this.view.reveal(token);
  }

  draw() {
    for (const one of this.views) this.drawOne(one);
  }

  drawOne({ image, frame, told, cursor }) {
    const { view } = this;
    const [first, last] = view.dragged ?? view.chosen;
    const framed = [...image.tokens.keys()].filter((at) => at === cursor || (image.tokens[at] >= first && image.tokens[at] <= last));
    const canvas = drawPatches(image, (at) => view.shadeOf(image.tokens[at]), framed, view.page.plane.colours, SIZE);
    frame.replaceChildren(canvas);
    told.textContent = this.tell(image);
  }

  /* The share of the selection's attention that the picture has, where a sum is one. */
  tell({ tokens }) {
    const { codes, upper, at, heads, isDifference } = this.view;
    if (!codes || isDifference || at.show !== "attended" || at.by === "value") return "";
    if (at.mix === "max" && heads.count > 1 && at.by !== "rollout") return "";
    if (tokens.every((token) => isMasked(codes[token]))) return "later than the selection: masked";
    const sum = tokens.reduce((total, token) => total + weightOf(codes[token]), 0);
    return `${upper ? "at least " : ""}${sum.toFixed(4)} of the attention is on this picture`;
  }
}
