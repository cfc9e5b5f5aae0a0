/* All heads as points of two statistics; a rectangle of the plot chooses heads.

     x = LEFT + (value - low) / (high - low) * (width - LEFT - RIGHT)       y upwards
     box    "x0,x1,y0,y1" in the units of the statistics: what the gallery shows

   The pointer drags a box; arrows go from head to head in the order of x (left, right) or
   y (up, down), with shift they extend a box. The fields set a box by its numbers, and the
   table has the same heads with the same numbers.

   Next: head_table.js */

import { make } from "./gallery.js";
import { badgesOf, behaviourOf, numberOf, showNumber, tellFew } from "./head_table.js";
import { showCount } from "./ink.js";

const [LEFT, RIGHT, TOP, BOTTOM] = [52, 14, 12, 40]; // room around the points
const RADIUS = 4;
const NEAR = 12; // pixels from a point at which it is meant
const STILL = 4; // pixels: a shorter drag is a click
const DIGITS = 5; // of a number in the table
const EDGES = ["x0", "x1", "y0", "y1"];

export class Scatter {
  constructor(page, { linkTo, onOpen }) {
    Object.assign(this, { page, part: page.part, meta: page.meta, linkTo, onOpen });
    const { scatter, plot, plotTable } = this.part;
    this.points = [];
    scatter.addEventListener("pointerdown", (event) => this.press(event));
    scatter.addEventListener("pointermove", (event) => this.move(event));
    scatter.addEventListener("pointerup", (event) => this.release(event));
    scatter.addEventListener("pointercancel", () => this.drag(undefined));
    scatter.addEventListener("pointerleave", () => this.from || this.point(undefined));
    scatter.addEventListener("keydown", (event) => this.walk(event));
    scatter.addEventListener("blur", () => this.point(undefined));
    plot.addEventListener("toggle", () => this.draw());
    plotTable.addEventListener("toggle", () => this.fillTable());
    new ResizeObserver(() => this.draw()).observe(scatter);
    for (const axis of ["plotX", "plotY"]) {
      this.part[axis].addEventListener("change", ({ target }) => page.set({ [axis]: target.value, box: undefined }));
    }
    EDGES.forEach((edge, at) => this.part[edge].addEventListener("change", ({ target }) => this.setEdge(at, target.value)));
    this.part.clearBox.addEventListener("click", () => page.set({ box: undefined }));
  }

  /* The two statistics; at first the first two. */
  get axes() {
    const { statistics } = this.meta;
    return ["plotX", "plotY"].map((axis, at) => statistics.find(({ name }) => name === this.page.at[axis]) ?? statistics[at] ?? statistics[0]);
  }

  /* The chosen ranges [x0, x1, y0, y1]; undefined if there are none. */
  get box() {
    return readBox(this.page.at.box);
  }

  /* Whether a head is in the box; all are if there is none. */
  has(row) {
    const { box } = this;
    if (!box) return true;
    const [x, y] = this.axes.map(({ name }) => numberOf(row, name));
    return x !== null && y !== null && x >= box[0] && x <= box[1] && y >= box[2] && y <= box[3];
  }

  show(rows) {
    const [x, y] = this.axes;
    this.rows = rows;
    const places = rows.map((row) => ({ row, x: numberOf(row, x.name), y: numberOf(row, y.name) }));
    this.points = places.filter((point) => point.x !== null && point.y !== null);
    this.ranges = [rangeOf(this.points.map((p) => p.x), x), rangeOf(this.points.map((p) => p.y), y)];
    this.part.plotX.value = x.name;
    this.part.plotY.value = y.name;
    const { box } = this;
    EDGES.forEach((edge, at) => (this.part[edge].value = box && Number.isFinite(box[at]) ? showNumber(box[at], 4) : ""));
    this.part.clearBox.disabled = !box;
    const found = this.points.filter(({ row }) => this.has(row)).length;
    const lost = places.length - this.points.length;
    const why = this.axes.map((statistic) => tellFew(statistic, rows) && `${statistic.label}: ${tellFew(statistic, rows)}`);
    this.part.plotWords.textContent = [
      this.meta.table.length ? `${showCount(found)} of ${showCount(places.length)} heads chosen` : "the numbers are not here yet",
      lost && this.meta.table.length ? `${showCount(lost)} have no number` : "",
      ...new Set(why),
    ].filter(Boolean).join(" · ");
    this.part.scatter.setAttribute("aria-label", `${x.label} across, ${y.label} up, a point for each of ${this.points.length} heads. Arrows go from head to head, with shift they choose a box of heads, Enter opens a head, Escape chooses all. The table below has the same numbers.`);
    this.draw();
    this.fillTable();
  }

  // ---- drawing

  get size() {
    return [this.part.scatter.clientWidth, this.part.scatter.clientHeight];
  }

  placeOf({ x, y }) {
    const [width, height] = this.size;
    const share = (value, [low, high]) => (value - low) / (high - low);
    return [
      LEFT + share(x, this.ranges[0]) * (width - LEFT - RIGHT),
      height - BOTTOM - share(y, this.ranges[1]) * (height - TOP - BOTTOM),
    ];
  }

  valueAt(left, top) {
    const [width, height] = this.size;
    const value = (share, [low, high]) => low + share * (high - low);
    return {
      x: value((left - LEFT) / (width - LEFT - RIGHT), this.ranges[0]),
      y: value((height - BOTTOM - top) / (height - TOP - BOTTOM), this.ranges[1]),
    };
  }

  draw() {
    const { scatter } = this.part;
    const [width, height] = this.size;
    if (!width || !this.ranges) return;
    const dots = window.devicePixelRatio || 1;
    [scatter.width, scatter.height] = [width * dots, height * dots];
    const pen = scatter.getContext("2d");
    pen.scale(dots, dots);
    const style = getComputedStyle(this.page.root);
    this.colour = (name) => style.getPropertyValue(`--${name}`).trim();
    pen.font = `11px ${style.fontFamily}`;
    this.drawAxes(pen, width, height);
    for (const point of this.points) this.drawPoint(pen, point);
    this.drawBox(pen);
    if (this.at) this.drawName(pen, width);
  }

  drawAxes(pen, width, height) {
    pen.lineWidth = 1;
    const [x, y] = this.axes.map(({ label, unit }) => `${label} (${unit})`);
    for (const value of listTicks(this.ranges[0], Math.max(2, width / 90))) {
      const [left] = this.placeOf({ x: value, y: this.ranges[1][0] });
      this.drawTick(pen, [left, TOP], [left, height - BOTTOM]);
      pen.textAlign = "center";
      pen.fillText(showNumber(value), left, height - BOTTOM + 14);
    }
    for (const value of listTicks(this.ranges[1], Math.max(2, height / 50))) {
      const [, top] = this.placeOf({ x: this.ranges[0][0], y: value });
      this.drawTick(pen, [LEFT, top], [width - RIGHT, top]);
      pen.textAlign = "right";
      pen.fillText(showNumber(value), LEFT - 6, top + 4);
    }
    pen.fillStyle = this.colour("text");
    pen.textAlign = "right";
    pen.fillText(`${x} →`, width - RIGHT, height - 8);
    pen.save();
    pen.translate(12, TOP);
    pen.rotate(-Math.PI / 2);
    pen.fillText(`${y} →`, 0, 0);
    pen.restore();
  }

  drawTick(pen, from, to) {
    pen.strokeStyle = this.colour("line");
    pen.fillStyle = this.colour("faint");
    pen.beginPath();
    pen.moveTo(...from);
    pen.lineTo(...to);
    pen.stroke();
  }

  drawPoint(pen, point) {
    const badge = behaviourOf(this.meta, point.row)?.badge;
    pen.globalAlpha = this.has(point.row) ? 0.9 : 0.18;
    pen.fillStyle = badge ? badge[this.page.root.dataset.theme] : this.colour("faint");
    pen.beginPath();
    pen.arc(...this.placeOf(point), RADIUS, 0, 2 * Math.PI);
    if (badge) pen.fill();
    else {
      pen.strokeStyle = pen.fillStyle; // a head without a badge is a ring
      pen.stroke();
    }
    pen.globalAlpha = 1;
  }

  drawBox(pen) {
    const corners = this.from && this.to ? [this.from, this.to] : this.cornersOfBox();
    if (!corners) return;
    const [[a, b], [c, d]] = corners;
    pen.strokeStyle = this.colour("accent");
    pen.lineWidth = 1.5;
    pen.strokeRect(Math.min(a, c), Math.min(b, d), Math.abs(c - a), Math.abs(d - b));
  }

  cornersOfBox() {
    const { box } = this;
    if (!box) return undefined;
    const inside = (value, [low, high]) => Math.min(high, Math.max(low, value));
    const at = (x, y) => this.placeOf({ x: inside(x, this.ranges[0]), y: inside(y, this.ranges[1]) });
    return [at(box[0], box[2]), at(box[1], box[3])];
  }

  drawName(pen, width) {
    const [left, top] = this.placeOf(this.at);
    pen.strokeStyle = this.colour("accent");
    pen.lineWidth = 2;
    pen.beginPath();
    pen.arc(left, top, RADIUS + 3, 0, 2 * Math.PI);
    pen.stroke();
    const { layer, head } = this.at.row;
    const toLeft = left > width / 2;
    const name = `L${layer} h${head}`;
    pen.textAlign = toLeft ? "right" : "left";
    const shift = toLeft ? -RADIUS - 7 : RADIUS + 7;
    pen.lineWidth = 4;
    pen.strokeStyle = this.colour("page");
    pen.strokeText(name, left + shift, top + 4);
    pen.fillStyle = this.colour("text");
    pen.fillText(name, left + shift, top + 4);
  }

  // ---- pointer

  press(event) {
    this.part.scatter.setPointerCapture(event.pointerId);
    this.from = [event.offsetX, event.offsetY];
  }

  move({ offsetX, offsetY }) {
    if (this.from) this.drag([offsetX, offsetY]);
    else this.point(this.findNear(offsetX, offsetY));
  }

  drag(to) {
    this.to = to;
    if (!to) this.from = undefined;
    this.draw();
  }

  release({ offsetX, offsetY }) {
    const { from } = this;
    if (!from) return;
    this.drag(undefined);
    if (Math.hypot(offsetX - from[0], offsetY - from[1]) < STILL) this.click(offsetX, offsetY);
    else {
      const [a, b] = [this.valueAt(...from), this.valueAt(offsetX, offsetY)];
      this.choose([Math.min(a.x, b.x), Math.max(a.x, b.x), Math.min(a.y, b.y), Math.max(a.y, b.y)]);
    }
  }

  click(left, top) {
    const near = this.findNear(left, top);
    if (near) this.onOpen(near.row);
    else if (this.box) this.page.set({ box: undefined });
  }

  findNear(left, top) {
    let best;
    let least = NEAR;
    for (const point of this.points) {
      const [x, y] = this.placeOf(point);
      const far = Math.hypot(x - left, y - top);
      if (far < least) [best, least] = [point, far];
    }
    return best;
  }

  /* Name a head: in the plot and in the sentence below. */
  point(point) {
    if (point === this.at) return;
    this.at = point;
    this.draw();
    if (!point) return;
    const [x, y] = this.axes;
    const { layer, head } = point.row;
    const badges = badgesOf(this.meta, point.row).map(({ label }) => label);
    const tags = badges.length ? `; ${badges.join(", ")}` : "";
    this.page.panel.say(`layer ${layer} head ${head}: ${x.label} ${showNumber(point.x, DIGITS)}, ${y.label} ${showNumber(point.y, DIGITS)}${tags}`);
  }

  // ---- choosing

  choose(box) {
    this.page.set({ box: box.map((value) => (Number.isFinite(value) ? Number(value.toPrecision(9)) : "")).join(",") });
  }

  /* Set one side of the box by a number; an empty field has no limit. */
  setEdge(at, text) {
    const box = this.box ?? [-Infinity, Infinity, -Infinity, Infinity];
    const value = Number(text);
    box[at] = text === "" || Number.isNaN(value) ? [-Infinity, Infinity][at % 2] : value;
    if (box.some(Number.isFinite)) this.choose(box);
    else this.page.set({ box: undefined });
  }

  walk(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const steps = { ArrowLeft: ["x", -1], ArrowRight: ["x", 1], ArrowDown: ["y", -1], ArrowUp: ["y", 1] };
    const step = steps[event.key];
    const acts = {
      Enter: () => this.at && this.onOpen(this.at.row),
      Escape: () => this.page.set({ box: undefined }),
    };
    const act = step ? () => this.stepTo(...step, event.shiftKey) : acts[event.key];
    if (!act || !this.points.length) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  }

  stepTo(axis, by, extend) {
    const order = [...this.points].sort((a, b) => a[axis] - b[axis]);
    const here = this.points.find(({ row }) => row.layer === this.at?.row.layer && row.head === this.at?.row.head);
    const from = here ?? order[by > 0 ? 0 : order.length - 1];
    const next = here ? (order[order.indexOf(here) + by] ?? here) : from;
    this.at = undefined;
    this.point(next);
    if (!extend) {
      this.anchor = next;
      return;
    }
    const anchor = this.anchor ?? from;
    const ends = (name) => [Math.min(anchor[name], next[name]), Math.max(anchor[name], next[name])];
    const wider = ([low, high], [first, last]) => [low - 1e-6 * (last - first), high + 1e-6 * (last - first)];
    this.anchor = anchor;
    this.choose([...wider(ends("x"), this.ranges[0]), ...wider(ends("y"), this.ranges[1])]);
  }

  // ---- the same as a table

  fillTable() {
    const { plotTable, plotRows } = this.part;
    if (!plotTable.open || !this.rows) return;
    const [x, y] = this.axes;
    const head = make("tr");
    for (const words of ["head", `${x.label} (${x.unit})`, `${y.label} (${y.unit})`, "badges"]) {
      head.append(Object.assign(make("th", "", words), { scope: "col" }));
    }
    const chosen = this.points.filter(({ row }) => this.has(row)).sort((a, b) => b.y - a.y);
    const lines = chosen.map((point) => {
      const line = make("tr");
      const link = make("a", "", `layer ${point.row.layer} head ${point.row.head}`);
      link.href = this.linkTo(point.row);
      link.addEventListener("click", (event) => {
        if (event.ctrlKey || event.metaKey || event.shiftKey) return; // a new tab
        event.preventDefault();
        this.onOpen(point.row);
      });
      const name = Object.assign(make("th"), { scope: "row" });
      name.append(link);
      const badges = badgesOf(this.meta, point.row).map(({ label }) => label).join(", ");
      line.append(name, make("td", "", showNumber(point.x, DIGITS)), make("td", "", showNumber(point.y, DIGITS)), make("td", "", badges));
      return line;
    });
    plotRows.replaceChildren(head, ...lines);
  }
}

/* Read "x0,x1,y0,y1"; an empty side has no limit. Undefined if it is not that. */
export function readBox(text) {
  const parts = `${text ?? ""}`.split(",");
  if (parts.length !== 4) return undefined;
  const box = parts.map((part, at) => (part === "" ? [-Infinity, Infinity][at % 2] : Number(part)));
  return box.some(Number.isNaN) || !box.some(Number.isFinite) ? undefined : box;
}

/* From the least to the largest number, with some room; weights start at 0. */
function rangeOf(values, { unit }) {
  if (!values.length) return [0, 1];
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (unit === "weight") low = 0;
  if (high === low) high = low + 1;
  const room = 0.04 * (high - low);
  return [unit === "weight" ? -room / 2 : low - room, high + room];
}

/* Round numbers between two ends, about `count` of them. */
function listTicks([low, high], count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((x) => x * power).find((x) => x >= rough);
  const ticks = [];
  for (let at = Math.ceil(low / step); at * step <= high; at++) ticks.push(Number((at * step).toPrecision(10)));
  return ticks;
}
