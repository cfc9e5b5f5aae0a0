/* The picture that a vision model read: where one of its patches looks, as the pointer moves.

     pointer, arrows   the patch that looks; its weights lie over the picture (patches.js)
     click, Enter      pin it: its row is marked in the map
     buttons           the tokens before the patches: a class token, registers

   When the pointer leaves, the pinned query looks again; without one, the picture is bare.

   Next: patches.js */

import { make } from "./gallery.js";
import { showCount, showWeight } from "./ink.js";
import { drawPatches, placePatch, stepPatch, tellSpecial } from "./patches.js";

const MOST = 1024; // answers that are kept: as many as a picture has patches, or more
const WIDTH = 268; // pixels of the side panel

export class PictureView {
  constructor(panel) {
    this.panel = panel;
    this.element = panel.part.picture;
    this.chosen = null; // the token under the pointer, by position
    this.answers = new Map();
  }

  /* The picture of the head in sight; undefined if its keys are not the patches of one. */
  get picture() {
    const { meta, at, plane } = this.panel;
    const found = meta.pictures[at.sequence];
    const whole = found && plane.record.nk === found.special + found.rows * found.columns;
    return whole && plane.record.qNamed ? found : undefined;
  }

  /* Show the picture of this head, if it has one, and who looks. */
  show() {
    const { picture } = this;
    this.element.hidden = !picture;
    if (!picture) return;
    if (this.built !== picture) this.build(picture);
    this.look();
  }

  build(picture) {
    this.built = picture;
    this.chosen = null;
    this.frame = make("div", "picture");
    this.frame.tabIndex = 0;
    this.frame.setAttribute("role", "application");
    this.frame.setAttribute("aria-label", "The picture. Arrows choose the patch that looks, Enter pins it.");
    this.told = make("p", "", "");
    this.told.dataset.at = "pictureTold";
    const buttons = make("p", "specials");
    for (let at = 0; at < picture.special; at++) {
      const button = make("button", "link", `special ${at}`);
      button.type = "button";
      button.setAttribute("aria-label", `special token ${at}: where it looks`);
      button.addEventListener("pointerenter", () => this.choose(at));
      button.addEventListener("pointerleave", () => this.choose(null));
      button.addEventListener("focus", () => this.choose(at));
      button.addEventListener("blur", () => this.choose(null));
      button.addEventListener("click", () => this.pin(at));
      buttons.append(button, " ");
    }
    this.frame.addEventListener("pointermove", (event) => this.choose(this.patchAt(event)));
    this.frame.addEventListener("pointerdown", (event) => this.choose(this.patchAt(event)));
    this.frame.addEventListener("pointerleave", () => this.choose(null));
    this.frame.addEventListener("blur", () => this.choose(null));
    this.frame.addEventListener("click", (event) => this.pin(this.patchAt(event)));
    this.frame.addEventListener("keydown", (event) => this.press(event));
    this.element.replaceChildren(make("h2", "", "the picture"), this.frame, this.told, ...(picture.special ? [buttons] : []));
  }

  /* The token of the patch under the pointer. */
  patchAt(event) {
    return this.picture.special + placePatch(this.picture, this.frame.firstChild, event);
  }

  press(event) {
    const { special } = this.picture;
    const from = this.looking === null ? 0 : this.looking - special;
    const next = stepPatch(this.picture, from < 0 ? null : from, event.key); // from a special token to the first patch
    if (next !== null) this.choose(special + next);
    else if (event.key === "Enter" && this.looking !== null) this.pin(this.looking);
    else if (event.key === "Escape" && this.chosen !== null) this.choose(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  choose(position) {
    if (position === this.chosen) return;
    this.chosen = position;
    this.look();
  }

  pin(position) {
    const i = this.panel.indexOf("query", position);
    if (i >= 0 && i !== this.panel.at.row) this.panel.pin({ i }, false);
  }

  /* The position of the token that looks: the chosen one, else the pinned one. */
  get looking() {
    const { row } = this.panel.plane.pins;
    return this.chosen ?? (row === null ? null : this.panel.plane.labels.query(row).position);
  }

  async look() {
    const { picture, looking } = this;
    const asked = (this.asking = Symbol("only the last answer counts"));
    if (looking === null) {
      this.draw(picture, [], -1);
      this.told.textContent = "point at a patch to see where it looks";
      return;
    }
    try {
      const weights = await this.weigh(looking);
      if (asked !== this.asking) return;
      this.draw(picture, weights, looking);
      this.told.textContent = this.tell(picture, weights, looking);
      if (this.chosen !== null) this.panel.say(this.told.textContent);
    } catch (error) {
      if (asked === this.asking) this.told.textContent = error.message;
    }
  }

  /* The weights of a token, by key. */
  async weigh(position) {
    const { sequence, layer, head } = this.panel.at;
    const query = this.panel.indexOf("query", position);
    if (query < 0) throw new Error(`${this.nameToken(position)} has no row in this head`);
    const name = `${sequence}/${layer}/${head}/${query}`;
    if (!this.answers.has(name)) {
      if (this.answers.size >= MOST) this.answers.clear();
      const { weights } = await this.panel.source.row({ sequence, layer, head, query });
      this.answers.set(name, weights);
    }
    return this.answers.get(name);
  }

  draw(picture, weights, query) {
    const { page, plane } = this.panel;
    const { special } = picture;
    const shadeOf = (at) => {
      const weight = weights.length ? (weights[special + at] ?? NaN) : 0; // JSON has null for NaN
      return { css: page.ink.colour(weight), place: page.ink.placeOf(weight) };
    };
    const framed = query >= special ? [query - special] : [];
    this.frame.replaceChildren(drawPatches(picture, shadeOf, framed, plane.colours, WIDTH));
  }

  tell(picture, weights, query) {
    const lost = weights.filter((x) => x === null || Number.isNaN(x)).length;
    if (lost) return `${this.nameToken(query)}: NaN in ${showCount(lost)} weights`;
    const most = weights.reduce((best, x, at) => (x > weights[best] ? at : best), 0);
    const { position } = this.panel.plane.labels.key(most);
    const words = `${this.nameToken(query)} looks most at ${position === query ? "itself" : this.nameToken(position)}, ${showWeight(weights[most])}`;
    return [words, tellSpecial(picture, weights)].filter(Boolean).join("; ");
  }

  nameToken(position) {
    const { special, columns } = this.picture;
    if (position < special) return `special token ${position}`;
    return `patch (${Math.floor((position - special) / columns)}, ${(position - special) % columns})`;
  }
}
