/* The text itself, each token tinted by the weight between it and the selection.

     selection, heads ─▶ source.text ─▶ a code for every token ─▶ colours of those in sight

   What the codes are is defined in text_tint.py: what the selected tokens attend to, or
   what attends to them, in one head, or the mean or max of several. Tokens are elements
   only on the lines in sight. They become text nodes, never markup.

   Next: text_lines.js */

import { make } from "./gallery.js";
import { isMasked, showCount, showToken, showWeight, weightOf } from "./ink.js";
import { SoundView } from "./sound_view.js";
import { TextImages } from "./text_images.js";
import { TextPanel } from "./text_panel.js";
import { leastChange, TextPair } from "./text_pair.js";
import { SideText } from "./text_side.js";
import { breakLines, findLine, isFromRight, isSpecial, keepInSight, readToken, ROW } from "./text_lines.js";

const FAINTEST = 0.01; // place on the scale that is tinted
const GAP = 1; // pixels between tokens, as in map.css
const RED = [255, 0, 0]; // NaN, as in the map
const WIDE = 1.005; // a high end that is larger than the low one by more makes a range
const SLOW = 400; // ms after which it is said that an answer takes time
const DARKEST = 0.179; // luminance at which black and white have the same contrast
const NONE = { css: "", text: "", place: 0 };

export class TextView {
  constructor(page) {
    const { part, source, meta } = page;
    Object.assign(this, { page, part, source, meta });
    this.rows = new Map(); // number of a line -> its element
    this.lines = [];
    const { compared, sequences } = meta;
    this.pair = compared ? new TextPair(compared, sequences.map(({ count }) => count)) : null;
    this.side = this.pair ? new SideText(this) : null;
    this.images = new TextImages(this);
    this.sound = new SoundView(this);
    this.panel = new TextPanel(this);
    part.reading.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => page.root.dataset.view === "text" && this.show()).observe(part.lines);
    this.listenToPointer();
  }

  get at() {
    return this.page.at;
  }

  /* The layers whose queries and keys are the tokens of the sequence, with the heads whose
     cells or lists are here: a page may have only an overview of some. */
  recordsOf(sequence) {
    const named = this.sound.inWords ? this.sound.across : this.namedOf(sequence);
    const held = named.map((record) => (record.overview === undefined || record.lists ? record : { ...record, heads: record.cells.map(({ head }) => head) }));
    return held.filter(({ heads }) => heads.length);
  }

  namedOf(sequence) {
    return this.page.recordsHere(sequence).filter(({ qNamed, kNamed }) => qNamed && kNamed);
  }

  /* How many heads read the text, with and without cells. */
  countAll() {
    return countHeads(this.namedOf(this.at.sequence));
  }

  /* Whether a sequence has a text, and heads that read it; patches of a picture are no text. */
  hasText(sequence) {
    return !this.meta.pictures[sequence] && (this.meta.sequences[sequence]?.count ?? 0) > 0 && this.recordsOf(sequence).length > 0;
  }

  // ---- the state

  /* First and last selected token; at first the last one that was in sight. */
  get chosen() {
    const [first, last = first] = `${this.at.passage ?? ""}`.split("-").map(Number);
    const known = /^\d+(-\d+)?$/.test(this.at.passage) && last >= first && last < this.count;
    if (known) return [first, last];
    return [this.usual, this.usual];
  }

  /* Which heads: "all", "layer", "head" or "set", with what is chosen of each. */
  get heads() {
    const { heads = "" } = this.at;
    const parts = heads.split(",").filter(Boolean);
    const records = this.recordsOf(this.at.sequence);
    const known = parts.every((part) => /^\d+(\.\d+)?$/.test(part) && records.some((record) => isIn(record, part)));
    if (!parts.length || !known) return { which: "all", list: "", count: countHeads(records) };
    if (parts.length > 1) return { which: "set", list: parts.join(","), count: countHeads(records, parts) };
    const [layer, head] = heads.split(".").map(Number);
    const record = records.find((x) => x.layer === layer);
    if (head === undefined) return { which: "layer", list: heads, layer, count: record.heads.length };
    return { which: "head", list: heads, layer, head, count: 1 };
  }

  /* Whether the difference of two runs is shown. */
  get isDifference() {
    return this.pair !== null && this.at.versus === "diff";
  }

  get isBeside() {
    return this.pair !== null && this.at.versus === "side";
  }

  /* Show a run, both, or the difference; the selection is of the tokens that correspond. */
  choosePair(which) {
    const { sequence } = this.at;
    const both = ["diff", "side"].includes(which);
    const next = both ? sequence : Number(which);
    const range = next === sequence ? this.chosen : this.pair.rangeOf(sequence, this.chosen);
    this.page.set({ versus: both ? which : "", sequence: next, passage: range ? range.join("-").replace(/^(\d+)-\1$/, "$1") : undefined });
  }

  turnPair() {
    if (!this.pair) return;
    const ways = ["0", "1", "side", "diff"];
    const now = this.at.versus || `${this.at.sequence}`;
    this.choosePair(ways[(ways.indexOf(now) + 1) % ways.length]);
  }

  /* Change one of the state's values to the next one of a list. */
  turn(name, values) {
    this.page.set({ [name]: values[(values.indexOf(this.at[name]) + 1) % values.length] });
  }

  turnWhich() {
    const ways = ["all", "layer", "head"];
    this.choose(ways[(ways.indexOf(this.heads.which) + 1) % ways.length]);
  }

  /* Choose all heads, a layer, a head or a list: of the layer and head that were chosen last. */
  choose(which, layer = this.heads.layer ?? this.at.layer) {
    const records = this.recordsOf(this.at.sequence);
    const record = records.find((x) => x.layer === layer) ?? records[0];
    const head = this.heads.head ?? this.at.head;
    const one = record.heads.includes(head) ? head : record.heads[0];
    const list = [one, record.heads.at(-1)].map((x) => `${record.layer}.${x}`).join(","); // to be edited
    const heads = { all: undefined, layer: `${record.layer}`, head: `${record.layer}.${one}`, set: list }[which];
    this.page.set({ heads, layer: record.layer, head: one });
  }

  stepLayer(by) {
    const records = this.recordsOf(this.at.sequence);
    const { layer, which } = this.heads;
    const at = records.findIndex((x) => x.layer === layer);
    this.choose(which === "head" ? "head" : "layer", records[(Math.max(0, at) + by + records.length) % records.length].layer);
  }

  step(what, by) {
    if (what === "layer") this.stepLayer(by);
    else this.stepHead(by);
  }

  stepHead(by) {
    const { layer, head, which } = this.heads;
    if (which !== "head") this.choose("head");
    else {
      const { heads } = this.recordsOf(this.at.sequence).find((x) => x.layer === layer);
      const next = heads[(heads.indexOf(head) + by + heads.length) % heads.length];
      this.page.set({ head: next, heads: `${layer}.${next}` });
    }
  }

  // ---- showing

  /* Show what the state says. */
  show() {
    this.part.beside.hidden = !this.isBeside;
    this.images.layOut();
    this.sound.showControls();
    if (this.sound.sound) this.sound.layOut();
    else this.layOut();
    this.panel.showControls();
    this.drawAll();
    this.ask();
  }

  /* Break the text into lines, if it or the width is another one. */
  layOut() {
    const { sequence } = this.at;
    const width = this.part.lines.clientWidth;
    if (this.laid === `${sequence} ${width}` || !width) return;
    const same = this.laid?.startsWith(`${sequence} `);
    const first = same ? this.firstInSight() : 0;
    if (!same) this.codes = undefined; // of another text
    this.laid = `${sequence} ${width}`;
    const { count, blocks } = this.meta.sequences[sequence];
    this.count = count;
    this.texts = this.textsOf(sequence);
    this.shown = this.images.hide(sequence, this.texts);
    const named = this.meta.sequences.length > 1 && !blocks.length ? [{ start: 0, name: this.pair?.names[sequence] ?? `sequence ${sequence}` }] : blocks;
    const context = document.createElement("canvas").getContext("2d");
    context.font = getComputedStyle(this.part.lines).font;
    this.lines = breakLines(this.shown, named, width, (text) => context.measureText(text).width + GAP);
    this.part.lines.style.height = `${this.lines.length * ROW}px`;
    if (!same) this.usual = Math.max(0, this.lines[Math.min(this.lines.length, this.linesInSight) - 1].end - 1);
    this.clear();
    const [place] = this.chosen;
    if (first || this.at.passage !== undefined) this.reveal(first || place);
  }

  /* The texts of a sequence; of tokens without text, their numbers. */
  textsOf(sequence) {
    const { texts, tokens, count } = this.meta.sequences[sequence];
    return Array.from({ length: count }, (_, at) => texts[at] ?? ` ${tokens[at]}`);
  }

  clear() {
    this.rows.clear();
    this.part.lines.replaceChildren();
  }

  get linesInSight() {
    return Math.max(1, Math.floor(this.part.reading.clientHeight / ROW) - 1);
  }

  firstInSight() {
    return this.lines[Math.floor(this.part.reading.scrollTop / ROW)]?.first ?? 0;
  }

  /* Make the lines in sight, and drop those that are far away. */
  draw() {
    const chosen = this.dragged ?? this.chosen;
    for (const row of keepInSight(this.part.reading, this.rows, this.lines.length, (at) => this.makeRow(at))) {
      for (const token of row.children) this.paint(token, chosen);
    }
  }

  /* Draw everything that shows the numbers or the selection. */
  drawAll() {
    this.draw();
    this.images.draw();
    this.sound.draw();
  }

  makeRow(at) {
    const { first, end, name } = this.lines[at];
    const row = make("div", name === undefined ? "text-line" : "text-line block", name === undefined ? "" : showToken(name, 40).replaceAll("·", " "));
    row.style.top = `${at * ROW}px`;
    if (name === undefined) {
      const texts = this.shown.slice(first, end);
      if (isFromRight(texts)) row.dir = "rtl";
      row.append(...texts.map((text, n) => {
        const shown = n ? readToken(text) : readToken(text).replace(/^ (?=.)/, ""); // lines start at the left
        const token = make("span", isSpecial(text) || !text.trim() ? "token sign" : "token", shown);
        token.dataset.token = first + n;
        return token;
      }));
    }
    this.part.lines.append(row);
    return row;
  }

  /* The colour of a weight, that of text on it, and its place; none for what is below the scale. */
  colourOf(weight) {
    const place = this.placeOf(weight);
    if (place < FAINTEST) return NONE;
    return writeColours(Number.isNaN(weight) ? RED : this.page.ink.bytesAt(place), place);
  }

  /* The colour of a change: of one hue if B has more, of another if A has. */
  colourChange(change) {
    const place = this.placeOf(Math.abs(change));
    if (!Number.isNaN(change) && !(place >= FAINTEST)) return NONE;
    return writeColours(Number.isNaN(change) ? RED : this.page.ink.signAt(Math.sign(change) * place), place);
  }

  placeOf(size) {
    const { scale, least } = this.at;
    return Math.min(1, scale === "linear" ? size / (this.largest || 1) : 1 - Math.log10(size) / least);
  }

  /* The colours of a token, and whether it is masked. */
  shadeOf(at) {
    if (this.isDifference && this.changes) {
      const change = this.changes[at];
      return change === null ? { ...NONE, masked: true } : this.colourChange(leastChange(change));
    }
    const code = this.codes?.[at] ?? 1;
    return { ...this.colourOf(weightOf(code)), masked: isMasked(code) };
  }

  paint(token, [first, last]) {
    const at = Number(token.dataset.token);
    token.classList.toggle("chosen", at >= first && at <= last);
    token.classList.toggle("only", at === first && at === last);
    const { css, text, masked = false } = this.shadeOf(at);
    token.classList.toggle("masked", masked);
    token.style.backgroundColor = css;
    token.style.color = text;
  }

  // ---- the numbers

  /* Ask for the codes of the selection, unless they are those that are shown. */
  async ask() {
    const { sequence, show, mix, by } = this.at;
    const [first, last] = this.chosen;
    const asked = { sequence, first, last, heads: by === "rollout" ? "" : this.heads.list, show, combine: mix, by };
    const words = this.sound.inWords;
    const name = JSON.stringify(words ? [sequence, this.heads.list, mix] : [asked, this.at.versus]);
    if (name === this.asked) {
      if (this.codes) this.panel.showMatrix(); // the colours may be others
      if (words && this.sound.cells) this.sound.showTable(); // another word
      return;
    }
    this.asked = name;
    this.control?.abort();
    const control = (this.control = new AbortController());
    this.part.reading.dataset.state = "wait";
    const slow = setTimeout(() => control.signal.aborted || this.page.panel.say("computing …"), SLOW);
    try {
      if (words) {
        await this.sound.ask(control.signal);
        if (control.signal.aborted) return;
        this.part.reading.dataset.state = "exact";
        this.drawAll();
        this.panel.showLegend();
        return;
      }
      const { codes, upper, known, there } = await this.askBoth(asked, control.signal);
      const changes = this.isDifference ? this.pair.changesOf(sequence, { codes, upper }, there) : undefined;
      if (control.signal.aborted) return;
      Object.assign(this, { codes, upper, known, changes });
      this.largest = changes
        ? changes.reduce((most, change) => Math.max(most, Math.abs(change ? leastChange(change) : 0) || 0), 0)
        : codes.reduce((most, code) => Math.max(most, weightOf(code) || 0), 0);
      this.part.reading.dataset.state = "exact";
      this.drawAll();
      if (this.isBeside) this.side.show({ sequence: 1 - sequence, codes: there.codes, range: this.otherRange });
      this.panel.showLegend();
      this.panel.showKnown();
      this.panel.showMatrix();
      this.panel.showStrongest();
    } catch (error) {
      if (control.signal.aborted) return;
      this.asked = "";
      this.codes = this.sound.cells = undefined;
      this.part.reading.dataset.state = "failed";
      this.part.strongest.replaceChildren();
      this.drawAll();
      this.page.panel.say(error.message);
    } finally {
      clearTimeout(slow);
    }
  }

  /* The codes of a selection; of two runs also those of the other one, in the same answer. */
  async askBoth(asked, signal) {
    if (!this.isDifference && !this.isBeside) return this.source.text(asked, signal);
    const { sequence, first, last } = asked;
    const range = this.pair.rangeOf(sequence, [first, last]);
    this.otherRange = range;
    if (!range) throw new Error(`the selection is only in ${this.pair.names[sequence]}`);
    const answer = await this.source.text({ ...asked, also: [1 - sequence, ...range].join(".") }, signal);
    if (answer.there) return answer;
    const { codes } = answer;
    return { ...answer, codes: codes.subarray(0, this.count), there: { codes: codes.subarray(this.count) } };
  }

  name(at) {
    return `${showCount(at)} “${showToken(this.texts[at])}”`;
  }

  nameChosen() {
    const [first, last] = this.chosen;
    return first === last ? this.name(first) : `${showCount(first)}–${showCount(last)}`;
  }

  /* What is between the selection and a token, in words. */
  sentenceOf(at) {
    const who = this.nameChosen();
    const code = this.codes?.[at];
    if (code === undefined) return `${this.name(at)}: not here yet`;
    const [from, to] = this.at.show === "attended" ? [who, this.name(at)] : [this.name(at), who];
    if (this.isDifference) return `${from} → ${to}: ${this.changes ? this.panel.tellChange(at) : "not here yet"}`;
    if (isMasked(code)) return `${from} may not look at ${to}: masked`;
    return `${from} → ${to}: ${this.tell(at, showWeight)}`;
  }

  /* The number of a token in words: a range, where weights are not in the file. */
  tell(at, show) {
    const [low, high] = [this.codes[at], (this.upper ?? this.codes)[at]].map(weightOf);
    if (!this.upper) return `${this.meta.rounded ? "about " : ""}${show(low)}`;
    if (!(high > WIDE * low)) return Number.isNaN(low) ? "NaN" : `about ${showRounded(low)}`;
    return low ? `${showRounded(low)} to ${showRounded(high)}` : `below ${showRounded(high)}`;
  }

  // ---- selecting

  /* tip: the end that moves. */
  select(first, last, tip = first) {
    this.tip = tip;
    this.page.set({ passage: first === last ? `${first}` : `${first}-${last}` });
    this.reveal(tip);
  }

  /* Move the end of the selection; without extending it, both ends. */
  move(by, extend) {
    const [first, last] = this.chosen;
    const from = this.tip >= first && this.tip <= last ? this.tip : last;
    const anchor = from === first ? last : first;
    const tip = Math.min(this.count - 1, Math.max(0, from + by));
    const other = extend ? anchor : tip;
    this.select(Math.min(tip, other), Math.max(tip, other), tip);
  }

  /* Move by lines, to the token that is nearest below or above. */
  moveLine(by, extend) {
    const [first, last] = this.chosen;
    const from = this.tip >= first && this.tip <= last ? this.tip : last;
    const step = Math.sign(by);
    if (!this.lines.length) return this.move(by, extend); // of a sound
    const line = findLine(this.lines, from);
    let to = Math.min(this.lines.length - 1, Math.max(0, line + by));
    while (this.lines[to] && !(this.lines[to].end > this.lines[to].first)) to += step; // a name, an empty line
    if (!this.lines[to]) return;
    this.reveal(this.lines[to].first);
    const leftOf = (at) => this.part.lines.querySelector(`[data-token="${at}"]`)?.getBoundingClientRect().left ?? 0;
    const left = leftOf(from);
    let best = this.lines[to].first;
    for (let at = best; at < this.lines[to].end; at++) if (Math.abs(leftOf(at) - left) < Math.abs(leftOf(best) - left)) best = at;
    this.move(best - from, extend);
  }

  /* Scroll as far as needed to have a token in sight; to the middle if it was far away. */
  reveal(token) {
    const { reading } = this.part;
    const { scrollTop, clientHeight } = reading;
    const top = findLine(this.lines, token) * ROW;
    if (!this.lines.length) return; // of a sound
    const [above, below] = [scrollTop - top, top + 3 * ROW - scrollTop - clientHeight];
    if (Math.max(above, below) > clientHeight / 2) reading.scrollTop = top - clientHeight / 2;
    else if (above > 0) reading.scrollTop = top - ROW;
    else if (below > 0) reading.scrollTop = scrollTop + below;
    this.draw();
  }

  /* Copy the selected passage as it was read; of a single token, the whole text. */
  async copyText() {
    const [first, last] = this.chosen;
    const part = first === last ? this.texts : this.texts.slice(first, last + 1);
    try {
      await window.navigator.clipboard.writeText(part.join(""));
      this.page.panel.say(`${showCount(part.length)} tokens are copied`);
    } catch {
      this.page.panel.say("this browser does not let the page copy text");
    }
  }

  /* Open the map at the selection, with the head that is chosen or was looked at last. */
  openMap() {
    const records = this.recordsOf(this.at.sequence);
    const { layer = this.at.layer, head = this.at.head } = this.heads;
    const record = records.find((x) => x.layer === layer) ?? records[0];
    const [first] = this.chosen;
    const rows = this.at.show === "attended" || this.sound.inWords;
    const index = indexOf(record, rows ? "q" : "k", first);
    const pins = rows ? { row: index, column: undefined } : { row: undefined, column: index };
    const one = record.heads.includes(head) ? head : record.heads[0];
    const passage = this.chosen.join("-");
    const state = { ...this.at, ...pins, passage, layer: record.layer, head: one, view: undefined, i: undefined, j: undefined, z: undefined };
    this.page.address.go(this.page.addressOf(state));
  }

  // ---- listening

  listenToPointer() {
    const { reading } = this.part;
    const tokenOf = ({ clientX, clientY }) => {
      const found = reading.getRootNode().elementFromPoint(clientX, clientY)?.closest("[data-token]");
      return found && reading.contains(found) ? Number(found.dataset.token) : null;
    };
    reading.addEventListener("pointerdown", (event) => {
      if (this.sound.sound) return; // its canvas has heard it
      this.anchor = event.button === 0 ? tokenOf(event) : null;
      if (this.anchor === null) return;
      if (event.shiftKey) this.anchor = this.tip ?? this.chosen[0];
      this.drag(tokenOf(event));
    });
    reading.addEventListener("pointermove", (event) => {
      const at = tokenOf(event);
      if (at === null) return;
      if (this.dragged && event.pointerType === "mouse") this.drag(at);
      this.page.panel.say(this.sentenceOf(at));
    });
    const drop = () => {
      const { dragged } = this;
      this.dragged = null;
      if (!dragged) return;
      this.tip = this.anchor;
      this.page.set({ passage: dragged[0] === dragged[1] ? `${dragged[0]}` : dragged.join("-") });
    };
    reading.addEventListener("pointerup", drop);
    reading.addEventListener("pointerleave", drop);
    reading.addEventListener("pointercancel", () => (this.dragged = null)); // it was a scroll
  }

  drag(at) {
    this.dragged = [Math.min(at, this.anchor), Math.max(at, this.anchor)];
    this.drawAll();
  }
}

function countHeads(records, parts) {
  return records.flatMap(({ layer, heads }) =>
    heads.filter((head) => !parts || parts.includes(`${layer}`) || parts.includes(`${layer}.${head}`)),
  ).length;
}

function isIn({ layer, heads }, part) {
  const [at, head] = part.split(".").map(Number);
  return at === layer && (head === undefined || heads.includes(head));
}

/* The row or column of a position; undefined if it has none. */
function indexOf(record, side, position) {
  const [positions, start, count] = [record[`${side}Positions`], record[`${side}Start`], record[`n${side}`]];
  const index = positions ? positions.indexOf(position) : position - start;
  return index >= 0 && index < count ? index : undefined;
}

/* A number that is known within 1 %. */
function showRounded(weight) {
  return weight && weight < 1e-3 ? weight.toExponential(2) : Number(weight.toPrecision(3)).toString();
}

/* A colour, and that of text on it. */
function writeColours(bytes, place) {
  return { css: `rgb(${bytes.join(" ")})`, text: luminance(bytes) > DARKEST ? "#000000" : "#ffffff", place: place || 0 };
}

/* The relative luminance of a colour, as WCAG 2 defines it. */
function luminance(bytes) {
  const [red, green, blue] = bytes.map((byte) => (byte <= 10 ? byte / 3294.6 : ((byte / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
