/* Where the cells are on the screen, and how one moves among them.

     x = left + width / 2 + (key   - at.j) * at.z       at: the cell in the middle,
     y = top + height / 2 + (query - at.i) * at.z       and the pixels of a cell

   One or two panels stand side by side and show the same cells. A pixel of level l stands
   for 2^l × 2^l cells. The level is the finest of which a pixel is no smaller than one of
   the screen, so that none is lost.

   Next: map_canvas.js */

export const LEFT = 88; // room of the axes
export const TOP = 80;
const GAP = 14; // between two panels
const CLOSEST = 64; // pixels of a cell
const FLIGHT = 260; // ms

export class View {
  constructor(canvas, { onMove, onPin, onPaint }) {
    Object.assign(this, { canvas, onMove, onPin, onPaint });
    this.panels = []; // each a list of one or two heads
    this.record = null; // gives the shape
    this.at = { i: 0, j: 0, z: 1 };
    this.cursor = null; // {i, j, panel}
    this.width = this.height = 0;
    this.dots = 1; // of the screen, for each pixel
    this.topLevel = 0;
    this.floor = 0; // the finest level there is
    this.pointers = new Map(); // id -> where it was
    this.listen();
  }

  /* Draw again soon; Plane knows how, and where its small map is. */
  refresh() {}
  jump() {}

  // ---- where things are

  get panelWidth() {
    const count = Math.max(1, this.panels.length);
    return Math.max(1, (this.width - LEFT - GAP * (count - 1)) / count);
  }

  get panelHeight() {
    return Math.max(1, this.height - TOP);
  }

  panelLeft(panel) {
    return LEFT + panel * (this.panelWidth + GAP);
  }

  xOf(key, panel = 0) {
    return this.panelLeft(panel) + this.panelWidth / 2 + (key - this.at.j) * this.at.z;
  }

  yOf(query) {
    return TOP + this.panelHeight / 2 + (query - this.at.i) * this.at.z;
  }

  /* The cell under a point; null outside the map. */
  cellAt(x, y) {
    const panel = this.panels.findIndex((_, at) => {
      const start = this.panelLeft(at);
      return x >= start && x < start + this.panelWidth;
    });
    if (panel < 0 || y < TOP) return null;
    const i = Math.floor((y - this.yOf(0)) / this.at.z);
    const j = Math.floor((x - this.xOf(0, panel)) / this.at.z);
    const inside = i >= 0 && j >= 0 && i < this.record.nq && j < this.record.nk;
    return inside ? { i, j, panel } : null;
  }

  get level() {
    const level = Math.ceil(-Math.log2(this.at.z * this.dots) - 0.01);
    return Math.min(this.record.coarsest, Math.max(this.floor, level)); // of a small map, none is lost
  }

  get fitZoom() {
    const { nq, nk } = this.record;
    const whole = 0.985 * Math.min(this.panelWidth / nk, this.panelHeight / nq);
    // a map of one query is not made thinner than a line of text
    return Math.min(CLOSEST, Math.max(whole, 24 / Math.min(nq, nk)));
  }

  /* First and last query, first and last key in sight. */
  seenCells() {
    const { i, j, z } = this.at;
    const ends = (middle, pixels, count) => [
      clamp(Math.floor(middle - pixels / 2 / z), 0, count - 1),
      clamp(Math.ceil(middle + pixels / 2 / z), 0, count - 1),
    ];
    return [ends(i, this.panelHeight, this.record.nq), ends(j, this.panelWidth, this.record.nk)];
  }

  get isWhole() {
    return Math.abs(this.at.z / this.fitZoom - 1) < 0.01;
  }

  // ---- moving

  setView({ i, j, z }) {
    const closest = Math.max(CLOSEST, this.fitZoom);
    const zoom = Math.min(closest, Math.max(0.7 * this.fitZoom, z));
    this.at = {
      z: zoom,
      i: keepInside(i, this.record.nq, this.panelHeight / zoom),
      j: keepInside(j, this.record.nk, this.panelWidth / zoom),
    };
    this.onMove();
    this.refresh();
  }

  fit() {
    this.flyTo({ i: 0, j: 0, z: this.fitZoom });
  }

  panBy(x, y) {
    const { i, j, z } = this.at;
    this.setView({ i: i - y / z, j: j - x / z, z });
  }

  /* Zoom so that the cell under a point stays there. */
  zoomAt(x, y, factor) {
    const { i, j, z } = this.at;
    const panel = this.cellAt(x, y)?.panel ?? 0;
    const right = x - this.panelLeft(panel) - this.panelWidth / 2;
    const down = y - TOP - this.panelHeight / 2;
    const limit = Math.max(CLOSEST, this.fitZoom);
    const zoom = Math.min(limit, Math.max(0.7 * this.fitZoom, z * factor));
    const moved = 1 / z - 1 / zoom;
    this.setView({ i: i + down * moved, j: j + right * moved, z: zoom });
  }

  zoomBy(factor) {
    const at = this.cursor;
    if (at) this.zoomAt(this.xOf(at.j + 0.5, at.panel), this.yOf(at.i + 0.5), factor);
    else this.zoomAt(LEFT + this.panelWidth / 2, TOP + this.panelHeight / 2, factor);
  }

  flyTo(target) {
    cancelAnimationFrame(this.flight);
    const from = { ...this.at };
    const start = performance.now();
    const still = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
    const step = (now) => {
      const part = still ? 1 : Math.min(1, Math.max(0, (now - start) / FLIGHT));
      const eased = part * part * (3 - 2 * part);
      this.setView({
        i: from.i + (target.i - from.i) * eased,
        j: from.j + (target.j - from.j) * eased,
        z: from.z * (target.z / from.z) ** eased,
      });
      if (part < 1) this.flight = requestAnimationFrame(step);
    };
    step(start);
  }

  /* Put the crosshair on a cell and bring it into view. */
  goTo({ i, j }, zoom = this.at.z) {
    const { nq, nk } = this.record;
    const cell = { i: clamp(i, 0, nq - 1), j: clamp(j, 0, nk - 1), panel: this.cursor?.panel ?? 0 };
    this.setCursor(cell);
    const x = this.xOf(cell.j + 0.5) - LEFT;
    const y = this.yOf(cell.i + 0.5) - TOP;
    const seen = x > 0 && x < this.panelWidth && y > 0 && y < this.panelHeight;
    if (!seen || zoom !== this.at.z) this.flyTo({ i: cell.i + 0.5, j: cell.j + 0.5, z: zoom });
  }

  moveCursor(down, right, page) {
    const at = this.cursor ?? { i: Math.floor(this.at.i), j: Math.floor(this.at.j) };
    const cells = page ? 0.8 * Math.min(this.panelWidth, this.panelHeight) / this.at.z : 2 ** this.level;
    const step = Math.max(1, Math.round(cells));
    this.goTo({ i: at.i + down * step, j: at.j + right * step });
  }

  setCursor(cell) {
    this.cursor = cell;
    this.refresh();
  }

  // ---- pointers

  listen() {
    const { canvas } = this;
    const place = (event) => [event.offsetX, event.offsetY];
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      cancelAnimationFrame(this.flight);
      const unit = event.deltaMode === 1 ? 30 : 1; // lines or pixels
      if (event.shiftKey) this.panBy(-(event.deltaX || event.deltaY) * unit, 0);
      else this.zoomAt(...place(event), Math.exp(clamp(-event.deltaY * unit, -240, 240) * 0.0025));
      this.setCursor(this.cellAt(...place(event)));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.focus({ preventScroll: true });
      canvas.setPointerCapture(event.pointerId);
      cancelAnimationFrame(this.flight);
      this.pointers.set(event.pointerId, place(event));
      this.moved = 0;
      this.onSmall = this.jump(...place(event));
    });
    canvas.addEventListener("pointermove", (event) => this.follow(event.pointerId, ...place(event)));
    canvas.addEventListener("pointerup", (event) => {
      const held = this.pointers.delete(event.pointerId);
      const cell = this.cellAt(...place(event));
      if (held && this.moved < 4 && cell && !this.onSmall) this.onPin(cell, event.shiftKey);
    });
    canvas.addEventListener("pointercancel", (event) => this.pointers.delete(event.pointerId));
    canvas.addEventListener("pointerleave", () => this.setCursor(null));
    canvas.addEventListener("dblclick", (event) => this.zoomAt(...place(event), 4));
  }

  follow(id, x, y) {
    const before = this.pointers.get(id);
    if (!before) {
      this.setCursor(this.cellAt(x, y));
      return;
    }
    this.moved += Math.hypot(x - before[0], y - before[1]);
    this.pointers.set(id, [x, y]);
    if (this.onSmall) this.jump(x, y);
    else if (this.pointers.size === 2) {
      const [other] = [...this.pointers].filter(([key]) => key !== id).map(([, at]) => at);
      const spread = Math.hypot(x - other[0], y - other[1]) / Math.hypot(before[0] - other[0], before[1] - other[1]);
      this.zoomAt((x + other[0]) / 2, (y + other[1]) / 2, spread || 1);
    } else this.panBy(x - before[0], y - before[1]);
  }
}

export function clamp(x, low, high) {
  return Math.min(high, Math.max(low, x));
}

/* Keep a map in sight; one that is smaller than the window starts at its edge. */
function keepInside(middle, count, seen) {
  if (count <= seen) return seen / 2;
  const rim = 0.02 * seen;
  return clamp(middle, seen / 2 - rim, count - seen / 2 + rim);
}
