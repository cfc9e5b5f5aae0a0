/* The map itself: one or two heads on a canvas, from all tokens to single cells.

     paint: tiles ─▶ grid ─▶ pins ─▶ crosshair ─▶ small map ─▶ axes ─▶ ask what is missing

   Until a tile is there, the part of a coarser one is shown. What is hatched is masked;
   what is blank has not come. A panel shows one head, or of two heads the difference.

   Next: panel.js */

import { LABELLED, drawAxes } from "./axes.js";
import { TOP, View } from "./view.js";

const FRAME = 8; // ms in which new tiles are coloured
const SMALL = 124; // longer side of the small map

export class Plane extends View {
  constructor(canvas, tiles, labels, callbacks) {
    super(canvas, callbacks);
    this.tiles = tiles;
    this.labels = labels; // of a query and of a key: their position and text
    this.context = canvas.getContext("2d");
    this.size = 256; // of a tile
    this.pins = { row: null, column: null, links: [] };
    this.marks = { query: [], key: [] }; // what was searched for
    this.pictures = new WeakMap(); // tile -> its colours
  }

  /* Say what to draw: the record gives the shape, floor the finest level of these heads. */
  open({ record, panels, how, size, floor }) {
    Object.assign(this, { record, panels, how, size, floor });
    const { i, j, panel } = this.cursor ?? {};
    if (!(i < record.nq && j < record.nk && panel < panels.length)) this.cursor = null;
    this.topLevel = Math.max(floor, Math.ceil(Math.log2(Math.max(record.nq, record.nk) / size)));
    this.refresh();
  }

  setInk(ink, colours) {
    this.ink = ink;
    this.colours = colours;
    this.hatching = makeHatching(this.context, colours);
    this.refresh();
  }

  resize() {
    const { clientWidth, clientHeight } = this.canvas;
    const whole = this.record && this.isWhole;
    this.dots = window.devicePixelRatio || 1;
    this.width = clientWidth;
    this.height = clientHeight;
    this.canvas.width = Math.round(clientWidth * this.dots);
    this.canvas.height = Math.round(clientHeight * this.dots);
    if (this.record) this.setView(whole ? { ...this.at, z: this.fitZoom } : this.at);
  }

  refresh() {
    if (this.waiting || !this.record || !this.ink || !this.width) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      this.paint();
    });
  }

  // ---- reading

  /* What stands at a cell: the codes of its pixel, and which queries and keys that is. */
  read({ i, j, panel }) {
    const { level, size } = this;
    const cells = 2 ** level;
    const [row, column] = [Math.floor(i / cells), Math.floor(j / cells)];
    const [y, x] = [Math.floor(row / size), Math.floor(column / size)];
    const found = this.panels[panel].map((head) => this.tiles.get({ ...head, level, x, y, how: this.how }));
    const whole = found.every(Boolean);
    const codes = whole
      ? found.map((tile) => tile.codes[(row - y * size) * tile.columns + column - x * size])
      : this.isAllMasked(level, x, y) ? [0] : null;
    return {
      codes,
      how: found[0]?.how ?? this.how,
      exact: found.every((tile) => !tile || tile.exact),
      queries: [row * cells, Math.min(this.record.nq, (row + 1) * cells) - 1],
      keys: [column * cells, Math.min(this.record.nk, (column + 1) * cells) - 1],
    };
  }

  /* Whether a causal mask hides the whole tile, so that it need not be asked for. */
  isAllMasked(level, x, y) {
    const { causal, nq, qStart, kStart, qPositions, kPositions } = this.record;
    if (!causal || qPositions || kPositions) return false; // positions with gaps
    const cells = this.size * 2 ** level;
    return kStart + x * cells > qStart + Math.min(nq, (y + 1) * cells) - 1;
  }

  // ---- painting

  paint() {
    const start = performance.now();
    const { context, colours } = this;
    context.setTransform(this.dots, 0, 0, this.dots, 0, 0);
    context.fillStyle = colours.page;
    context.fillRect(0, 0, this.width, this.height);
    this.deadline = start + FRAME;
    this.unfinished = false;
    this.missing = 0;
    this.rough = ""; // what a preview is, if one is shown
    const wanted = [];
    this.panels.forEach((_, panel) => {
      context.save();
      context.beginPath();
      context.rect(this.panelLeft(panel), TOP, this.panelWidth, this.panelHeight);
      context.clip();
      this.drawTiles(panel, wanted);
      if (this.at.z >= LABELLED && !this.floor) this.drawGrid(panel); // an overview has no cells
      this.drawPins(panel);
      this.drawCross(panel);
      this.drawMinimap(panel);
      context.restore();
    });
    drawAxes(this);
    this.tiles.want(wanted.sort((a, b) => a.far - b.far).map(({ place }) => place));
    if (this.unfinished) this.refresh();
    this.onPaint();
  }

  drawTiles(panel, wanted) {
    const { context, level, size } = this;
    const { nq, nk } = this.record;
    const left = this.panelLeft(panel);
    const end = [this.xOf(nk, panel), this.yOf(nq)];
    context.save();
    context.beginPath(); // the last pixels of a ragged edge stand for fewer cells
    context.rect(this.xOf(0, panel), this.yOf(0), end[0] - this.xOf(0, panel), end[1] - this.yOf(0));
    context.clip();
    context.fillStyle = this.colours.blank;
    context.fillRect(left, TOP, this.panelWidth, this.panelHeight);
    context.imageSmoothingEnabled = false;
    this.want(panel, this.topLevel, 0, 0, -1, wanted); // stands in for all others
    const span = size * 2 ** level;
    const first = [this.at.j - this.panelWidth / 2 / this.at.z, this.at.i - this.panelHeight / 2 / this.at.z];
    const last = [first[0] + this.panelWidth / this.at.z, first[1] + this.panelHeight / this.at.z];
    for (let y = Math.max(0, Math.floor(first[1] / span)); y * span < Math.min(nq, last[1]); y++) {
      for (let x = Math.max(0, Math.floor(first[0] / span)); x * span < Math.min(nk, last[0]); x++) {
        this.drawTile(panel, x, y, wanted);
      }
    }
    context.restore();
    context.strokeStyle = this.colours.line;
    context.strokeRect(this.xOf(0, panel), this.yOf(0), end[0] - this.xOf(0, panel), end[1] - this.yOf(0));
  }

  drawTile(panel, x, y, wanted) {
    const { level, size } = this;
    const span = size * 2 ** level;
    if (this.isAllMasked(level, x, y)) {
      this.fillCells(panel, y * span, x * span, span, span, this.hatching);
      return;
    }
    const far = Math.hypot((x + 0.5) * span - this.at.j, (y + 0.5) * span - this.at.i);
    this.want(panel, level, x, y, far, wanted);
    for (let up = level; up <= Math.max(level, this.topLevel); up++) {
      const shift = 2 ** (up - level);
      const place = { level: up, x: Math.floor(x / shift), y: Math.floor(y / shift) };
      const picture = this.pictureOf(panel, place);
      if (picture) {
        this.drawPart(panel, picture, place, [x * span, y * span, span]);
        return;
      }
    }
  }

  want(panel, level, x, y, far, wanted) {
    for (const head of this.panels[panel]) {
      const place = { ...head, level, x, y, how: this.how };
      const tile = this.tiles.get(place);
      if (!tile?.exact) wanted.push({ place, far });
      if (!tile && level === this.level) this.missing++;
      if (tile && !tile.exact && level === this.level) this.rough = tile.note || "preview";
    }
  }

  /* Draw the cells [key, query, span] out of a picture of this or a coarser level. */
  drawPart(panel, picture, { level, x, y }, [key, query, span]) {
    const cells = 2 ** level;
    const fromX = key / cells - x * this.size;
    const fromY = query / cells - y * this.size;
    const columns = Math.min(span / cells, picture.width - fromX);
    const rows = Math.min(span / cells, picture.height - fromY);
    if (columns <= 0 || rows <= 0) return;
    const box = this.fillCells(panel, query, key, rows * cells, columns * cells, this.hatching);
    this.context.drawImage(picture, fromX, fromY, columns, rows, ...box);
  }

  /* Fill a rectangle of cells, on whole dots so that no seams are seen. */
  fillCells(panel, query, key, rows, columns, style) {
    const snap = (at) => Math.round(at * this.dots) / this.dots;
    const [x, y] = [snap(this.xOf(key, panel)), snap(this.yOf(query))];
    const box = [x, y, snap(this.xOf(key + columns, panel)) - x, snap(this.yOf(query + rows)) - y];
    this.context.fillStyle = style;
    this.context.fillRect(...box);
    return box;
  }

  pictureOf(panel, place) {
    const found = this.panels[panel].map((head) => this.tiles.get({ ...head, ...place, how: this.how }));
    if (!found.every(Boolean)) return null;
    const [tile, other] = found;
    const made = this.pictures.get(tile);
    if (made?.ink === this.ink && made.other === other) return made.canvas;
    // the coarsest is always made: it stands in for those that are not
    if (place.level < this.topLevel && performance.now() > this.deadline) {
      this.unfinished = true;
      return made?.other === other ? made?.canvas : null; // for now in the old colours
    }
    const canvas = other
      ? this.ink.paintDifference(tile.codes, other.codes, tile.rows, tile.columns)
      : this.ink.paint(tile.codes, tile.rows, tile.columns);
    this.pictures.set(tile, { ink: this.ink, other, canvas });
    return canvas;
  }

  drawGrid(panel) {
    const { context } = this;
    const { nq, nk } = this.record;
    const [queries, keys] = this.seenCells();
    context.beginPath();
    for (let i = queries[0]; i <= queries[1] + 1; i++) {
      context.moveTo(this.xOf(0, panel), Math.round(this.yOf(i)) + 0.5);
      context.lineTo(this.xOf(nk, panel), Math.round(this.yOf(i)) + 0.5);
    }
    for (let j = keys[0]; j <= keys[1] + 1; j++) {
      context.moveTo(Math.round(this.xOf(j, panel)) + 0.5, this.yOf(0));
      context.lineTo(Math.round(this.xOf(j, panel)) + 0.5, this.yOf(nq));
    }
    context.strokeStyle = this.colours.grid;
    context.lineWidth = 1;
    context.stroke();
  }

  drawPins(panel) {
    const { context, colours } = this;
    const { row, column, links } = this.pins;
    const { z } = this.at;
    const left = this.panelLeft(panel);
    context.strokeStyle = colours.accent;
    context.lineWidth = z >= LABELLED ? 2 : 1.5;
    const { nq, nk } = this.record;
    const right = Math.min(this.panelWidth, this.xOf(nk, panel) - left); // not past the last key
    const down = Math.min(this.panelHeight, this.yOf(nq) - TOP);
    if (row !== null) context.strokeRect(left - 9, this.yOf(row) - 1, right + 10, Math.max(z, 1) + 2);
    if (column !== null) context.strokeRect(this.xOf(column, panel) - 1, TOP - 9, Math.max(z, 1) + 2, down + 10);
    for (const { i, j } of links) {
      context.beginPath();
      context.arc(this.xOf(j + 0.5, panel), this.yOf(i + 0.5), Math.max(4, 0.62 * z), 0, 2 * Math.PI);
      context.stroke();
    }
  }

  drawCross(panel) {
    if (!this.cursor) return;
    const { context } = this;
    const wide = Math.max(1, this.at.z);
    const [x, y] = [this.xOf(this.cursor.j, panel), this.yOf(this.cursor.i)];
    context.fillStyle = this.colours.cross;
    const [right, bottom] = [this.xOf(this.record.nk, panel), this.yOf(this.record.nq)];
    const left = this.panelLeft(panel);
    context.fillRect(left, Math.round(y + wide / 2), Math.min(this.panelWidth, right - left), 1);
    context.fillRect(Math.round(x + wide / 2), TOP, 1, Math.min(this.panelHeight, bottom - TOP));
    if (this.at.z >= LABELLED) {
      context.strokeStyle = this.colours.accent;
      context.lineWidth = 1.5;
      context.strokeRect(x + 0.5, y + 0.5, wide, wide);
    }
  }

  /* Where the small map is: null if all is in sight anyway. */
  minimapBox(panel) {
    if (panel !== this.panels.length - 1 || this.at.z < 1.3 * this.fitZoom) return null;
    const { nq, nk } = this.record;
    const scale = SMALL / Math.max(nq, nk);
    const [width, height] = [Math.max(6, nk * scale), Math.max(6, nq * scale)];
    return [this.width - width - 12, TOP + 12, width, height];
  }

  drawMinimap(panel) {
    const box = this.minimapBox(panel);
    const picture = box && this.pictureOf(panel, { level: this.topLevel, x: 0, y: 0 });
    if (!picture) return;
    const { context, colours, record } = this;
    const [left, top, width, height] = box;
    context.fillStyle = this.hatching;
    context.fillRect(...box);
    context.imageSmoothingEnabled = true;
    context.drawImage(picture, ...box);
    context.lineWidth = 1;
    context.strokeStyle = colours.line;
    context.strokeRect(left - 0.5, top - 0.5, width + 1, height + 1);
    const [queries, keys] = this.seenCells();
    const across = Math.max(5, ((keys[1] - keys[0]) / record.nk) * width);
    const down = Math.max(5, ((queries[1] - queries[0]) / record.nq) * height);
    const x = left + Math.min(width - across, (keys[0] / record.nk) * width);
    const y = top + Math.min(height - down, (queries[0] / record.nq) * height);
    context.strokeStyle = colours.accent;
    context.lineWidth = 2;
    context.strokeRect(x, y, across, down);
  }

  /* Go where the small map is pressed; tell whether it was. */
  jump(x, y) {
    const box = this.minimapBox(this.panels.length - 1);
    const right = box ? (x - box[0]) / box[2] : -1;
    const down = box ? (y - box[1]) / box[3] : -1;
    const inside = right >= 0 && right <= 1 && down >= 0 && down <= 1;
    if (inside) this.setView({ i: down * this.record.nq, j: right * this.record.nk, z: this.at.z });
    return inside;
  }
}

function makeHatching(context, colours) {
  const piece = document.createElement("canvas");
  piece.width = piece.height = 8;
  const brush = piece.getContext("2d");
  brush.fillStyle = colours.masked;
  brush.fillRect(0, 0, 8, 8);
  brush.strokeStyle = colours.hatch;
  brush.lineWidth = 1;
  for (const start of [-8, 0, 8]) {
    brush.moveTo(start, 0);
    brush.lineTo(start + 8, 8);
  }
  brush.stroke();
  return context.createPattern(piece, "repeat");
}
