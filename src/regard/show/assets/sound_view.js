/* What an audio model heard, on a time axis below its spectrogram.

     moments   frames of the encoder: the tint of each, as of the tokens of a text
     words     a row for each word of a decoder: its weight on every moment, the mean or max
               of cross-attention heads, and the path that aligns words with time

   The state is that of text_view.js: of moments the selection is a range of frames, of
   words a range of words.

   Next: sound_path.js */

import { make } from "./gallery.js";
import { isMasked, showToken, showWeight, weightOf } from "./ink.js";
import { findTimes } from "./sound_path.js";
import { fromBase64 } from "./source.js";

const [SPECTRUM, AXIS, STRIP, ROW] = [96, 22, 64, 18]; // pixels
const MARGIN = 96; // for the words
const TICKS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60];
const SHARP = 2; // most canvas pixels per pixel

export class SoundView {
  constructor(view) {
    Object.assign(this, { view, part: view.part, page: view.page });
    this.canvas = this.part.soundCanvas;
    this.listen();
  }

  get sound() {
    return this.view.meta.sounds[this.view.at.sequence];
  }

  /* The layers that attend from the words to the moments. */
  get across() {
    const { sound, view } = this;
    const { count } = view.meta.sequences[view.at.sequence];
    return sound ? this.page.recordsHere(view.at.sequence).filter(({ nq, nk, qNamed, kNamed }) => nq === sound.words.length && nk === count && !(qNamed && kNamed)) : [];
  }

  get inWords() {
    return this.across.length > 0 && (this.view.at.heard !== "moments" || !this.view.namedOf(this.view.at.sequence).length);
  }

  /* Seconds of a frame. */
  get step() {
    return this.sound.seconds / this.view.meta.sequences[this.view.at.sequence].count;
  }

  showControls() {
    const { part, view, sound } = this;
    part.reading.parentElement.dataset.sound = !sound ? "" : this.inWords ? "words" : "moments";
    part.pickHeard.hidden = !sound || !this.across.length || !view.namedOf(view.at.sequence).length;
    part.lines.hidden = Boolean(sound);
    part.soundCanvas.hidden = !sound;
    part.heard.value = this.inWords ? "words" : "moments";
  }

  /* Tell the view what can be selected: frames, or words. */
  layOut() {
    const { view, sound, inWords } = this;
    const { sequence } = view.at;
    const laid = `${sequence} ${inWords ? "words" : "moments"}`;
    if (view.laid === laid) return;
    view.clear();
    const texts = inWords ? sound.words : view.textsOf(sequence);
    Object.assign(view, { laid, texts, count: texts.length, lines: [], codes: undefined, upper: undefined, known: undefined });
    view.usual = inWords ? texts.length - 1 : Math.floor(sound.frames / 2);
    this.cells = undefined;
  }

  // ---- words

  async ask(signal) {
    const { view, sound } = this;
    const { sequence, mix } = view.at;
    const { codes } = await this.page.source.sound({ sequence, heads: view.heads.list, combine: mix }, signal);
    if (signal.aborted) return;
    const { count } = view.meta.sequences[sequence];
    this.cells = Float64Array.from(codes, weightOf);
    const kept = new Float64Array(sound.words.length * sound.frames);
    sound.words.forEach((_, i) => kept.set(this.cells.subarray(i * count, i * count + sound.frames), i * sound.frames));
    view.largest = kept.reduce((most, x) => (x > most ? x : most), 0);
    this.times = kept.some(Number.isNaN) ? null : findTimes(kept, sound.words.length, sound.frames);
    this.showTable();
  }

  cellAt(word, frame) {
    return this.cells[word * this.view.meta.sequences[this.view.at.sequence].count + frame];
  }

  nameTime(first, last = first) {
    const digits = Math.max(0, Math.ceil(-Math.log10(this.step)));
    return `${(first * this.step).toFixed(digits)}–${((last + 1) * this.step).toFixed(digits)} s`;
  }

  /* The path as a table: the picture in words. */
  showTable() {
    const { view, part, sound } = this;
    const table = make("table");
    table.append(make("caption", "", this.times ? "words on the path, with their time and mean weight" : "no path: some weights are NaN"));
    this.times?.forEach(([first, last], i) => {
      let sum = 0;
      for (let j = first; j <= last; j++) sum += this.cellAt(i, j);
      const go = make("button", "link", `${i}`);
      go.type = "button";
      go.setAttribute("aria-label", `select word ${view.name(i)}`);
      go.addEventListener("click", () => view.select(i, i));
      const line = make("tr");
      const cells = [make("td"), make("td", "token"), make("td", "", this.nameTime(first, last)), make("td", "", showWeight(sum / (last + 1 - first)))];
      cells[0].append(go);
      cells[1].append(make("bdi", "", showToken(sound.words[i], 20)));
      line.append(...cells);
      table.append(line);
    });
    part.strongest.replaceChildren(table);
    const [first, last] = view.chosen;
    let [outside, all] = [0, 0];
    for (let i = first; i <= last; i++) {
      for (let j = sound.frames; j * sound.words.length < this.cells.length; j++) outside += this.cellAt(i, j);
      all += 1;
    }
    const after = outside / all >= 0.005 && (view.heads.count === 1 || view.at.mix === "mean") ? ` ${(outside / all).toFixed(2)} of the weight is after the end of the sound.` : "";
    part.meaning.textContent = `A row is a word, the colours are its weight on each moment. The line is the path through words and time that has the largest weights, each moment compared over the words.${after}`;
    this.page.panel.say(this.times ? `${view.nameChosen()} is at ${this.nameTime(this.times[first][0], this.times[last][1])}` : "some weights are NaN");
  }

  // ---- drawing

  get left() {
    return this.inWords ? MARGIN : 12;
  }

  get height() {
    return SPECTRUM + AXIS + (this.inWords ? ROW * this.sound.words.length : STRIP) + 4;
  }

  draw() {
    const { canvas, sound, view, part } = this;
    if (!sound) return;
    const width = part.reading.clientWidth - 2 * parseFloat(getComputedStyle(part.reading).paddingLeft);
    if (width <= this.left) return;
    const sharp = Math.min(SHARP, window.devicePixelRatio || 1);
    [canvas.width, canvas.height] = [Math.round(width * sharp), Math.round(this.height * sharp)];
    canvas.style.height = `${this.height}px`;
    this.wide = width - this.left - 12;
    const brush = canvas.getContext("2d");
    brush.scale(sharp, sharp);
    const { colours } = this.page.plane;
    brush.font = "12px system-ui, sans-serif";
    brush.textBaseline = "middle";
    brush.imageSmoothingEnabled = true;
    brush.drawImage(this.paintSpectrum(colours), this.left, 0, this.wide, SPECTRUM);
    this.drawAxis(brush, colours);
    if (this.inWords) this.drawWords(brush, colours);
    else this.drawMoments(brush, colours);
    canvas.setAttribute("aria-hidden", "true"); // the table and the sentence say it
  }

  /* Where a time in frames is. */
  placeOf(frame) {
    return this.left + (frame / this.sound.frames) * this.wide;
  }

  paintSpectrum(colours) {
    if (this.painted?.sound === this.sound && this.painted.page === colours.page) return this.painted.image;
    const { rows, columns, grey } = this.sound;
    const bytes = fromBase64(grey);
    const image = document.createElement("canvas");
    [image.width, image.height] = [columns, rows];
    const brush = image.getContext("2d");
    brush.fillStyle = colours.page;
    brush.fillRect(0, 0, columns, rows);
    brush.fillStyle = colours.text;
    for (let i = 0; i < rows; i++) {
      for (let j = 0; j < columns; j++) {
        brush.globalAlpha = bytes[i * columns + j] / 255;
        brush.fillRect(j, rows - 1 - i, 1, 1); // low frequencies below
      }
    }
    this.painted = { sound: this.sound, page: colours.page, image };
    return image;
  }

  drawAxis(brush, colours) {
    const end = this.sound.frames * this.step;
    const gap = TICKS.find((x) => (end / x) * 48 <= this.wide) ?? TICKS.at(-1);
    brush.fillStyle = colours.faint;
    brush.textAlign = "center";
    for (let n = 0; n * gap <= end + 1e-9; n++) {
      const x = this.placeOf((n * gap) / this.step);
      brush.fillRect(x, SPECTRUM, 1, 4);
      brush.fillText(`${Number((n * gap).toPrecision(6))}${n ? "" : " s"}`, Math.max(x, this.left + 8), SPECTRUM + 13);
    }
  }

  drawMoments(brush, colours) {
    const { view, sound } = this;
    const top = SPECTRUM + AXIS;
    const [first, last] = view.dragged ?? view.chosen;
    for (let at = 0; at < sound.frames; at++) {
      const { css, place, masked } = view.shadeOf(at);
      const [x, next] = [this.placeOf(at), this.placeOf(at + 1)];
      if (masked) {
        brush.fillStyle = colours.masked;
        brush.fillRect(x, top, next - x, STRIP);
      } else if (css) {
        brush.fillStyle = css;
        const high = Math.max(3, place * STRIP);
        brush.fillRect(x, top + STRIP - high, Math.max(1, next - x), high);
      }
    }
    brush.strokeStyle = colours.line;
    brush.strokeRect(this.left + 0.5, top + 0.5, this.wide - 1, STRIP - 1);
    const [from, to] = [this.placeOf(first), this.placeOf(last + 1)];
    brush.strokeStyle = colours.accent;
    brush.lineWidth = 2;
    brush.strokeRect(from - 1, 1, Math.max(3, to - from + 2), top + STRIP - 1);
  }

  drawWords(brush, colours) {
    const { view, sound } = this;
    const top = SPECTRUM + AXIS;
    const [first, last] = view.dragged ?? view.chosen;
    const columns = Math.min(sound.frames, Math.round(this.wide));
    sound.words.forEach((word, i) => {
      const y = top + i * ROW;
      brush.fillStyle = i >= first && i <= last ? colours.accent : colours.text;
      brush.textAlign = "right";
      brush.fillText(showToken(word, 10), MARGIN - 8, y + ROW / 2);
      for (let column = 0; this.cells && column < columns; column++) {
        const from = Math.floor((column / columns) * sound.frames);
        const end = Math.max(from + 1, Math.floor(((column + 1) / columns) * sound.frames));
        let most = 0;
        for (let j = from; j < end; j++) most = Math.max(most, this.cellAt(i, j)); // NaN stays NaN
        const { css } = view.colourOf(most);
        if (!css) continue;
        brush.fillStyle = css;
        brush.fillRect(this.placeOf(from), y, this.placeOf(end) - this.placeOf(from) + 0.5, ROW - 1);
      }
    });
    brush.strokeStyle = colours.line;
    brush.strokeRect(this.left - 0.5, top - 0.5, this.wide + 1, ROW * sound.words.length);
    if (this.times && this.cells) this.drawPath(brush, colours, top);
  }

  drawPath(brush, colours, top) {
    for (const [style, thick] of [[colours.page, 4], [colours.accent, 2]]) {
      brush.strokeStyle = style;
      brush.lineWidth = thick;
      brush.beginPath();
      this.times.forEach(([first, last], i) => {
        const y = top + (i + 0.5) * ROW;
        brush.lineTo(this.placeOf(first + 0.5), y);
        brush.lineTo(this.placeOf(last + 0.5), y);
      });
      brush.stroke();
    }
  }

  // ---- pointing

  /* The frame and the word under the pointer. */
  find({ clientX, clientY }) {
    const { left, top } = this.canvas.getBoundingClientRect();
    const within = (x, count) => Math.min(count - 1, Math.max(0, Math.floor(x)));
    const frame = within(((clientX - left - this.left) / this.wide) * this.sound.frames, this.sound.frames);
    const y = clientY - top - SPECTRUM - AXIS;
    return { frame, word: this.inWords && y >= 0 ? within(y / ROW, this.sound.words.length) : null };
  }

  sentenceOf({ frame, word }) {
    const { view } = this;
    if (!this.inWords) return view.sentenceOf(frame);
    if (word === null) return this.nameTime(frame);
    return `${view.name(word)} → ${this.nameTime(frame)}: ${this.cells ? showWeight(this.cellAt(word, frame)) : "not here yet"}`;
  }

  listen() {
    const { canvas, view } = this;
    const at = (event) => (this.inWords ? this.find(event).word : this.find(event).frame);
    canvas.addEventListener("pointerdown", (event) => {
      view.anchor = event.button === 0 ? at(event) : null;
      if (view.anchor !== null) view.drag(view.anchor);
    });
    canvas.addEventListener("pointermove", (event) => {
      const found = at(event);
      if (view.dragged && event.pointerType === "mouse" && found !== null) view.drag(found);
      this.page.panel.say(this.sentenceOf(this.find(event)));
    });
    new ResizeObserver(() => this.page.root.dataset.view === "text" && this.draw()).observe(this.part.reading);
    this.part.heard.addEventListener("change", () => this.page.set({ heard: this.part.heard.value, heads: undefined, passage: undefined }));
  }
}
