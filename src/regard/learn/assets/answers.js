/* Yours / Specification / Difference: two answers as heatmaps and as numbers.

   The answers share one scale, blue below 0 and brown above. The difference has a separate scale, so that
   small differences are visible, and is empty where the answers agree. Non-finite numbers are hatched.

   Next: ink.js */

import { make } from "./course.js";
import { Ink } from "./ink.js";

const SMALL = 4; // up to this many rows and columns, the numbers are expanded
const LARGE = 24; // maximum rows and columns that are drawn
const SIDE = 168; // maximum size of a heatmap in pixels
const CELL = 34; // maximum size of a cell in pixels

export function drawAnswers(found, { atol, dark }) {
  const yours = cut(found.yours);
  const expected = cut(found.expected);
  const apart = yours.map((row, i) => row.map((x, j) => (agree(x, expected[i][j], atol) ? null : x - expected[i][j])));
  const ink = new Ink({ dark, low: -1 });
  const top = largest([...yours, ...expected]);
  const maps = [
    drawMap("Yours", yours, { ink, top }),
    drawMap("Specification", expected, { ink, top }),
    drawMap("Difference", apart, { ink, top: largest(apart) }),
  ];
  const row = make("div", ...maps);
  row.className = "maps";
  const box = make("div", row);
  const [rows, columns] = [found.yours.length, found.yours[0].length];
  if (rows > LARGE || columns > LARGE) {
    box.append(make("p", `These are the first ${LARGE} of ${rows} rows and ${columns} columns.`));
  }
  const tables = [["Yours", yours], ["Specification", expected], ["Yours − specification", apart]];
  const numbers = make("details", make("summary", "As numbers"), ...tables.map(([name, x]) => writeTable(name, x)));
  numbers.open = Math.max(rows, columns) <= SMALL;
  box.append(numbers);
  return box;
}

/* Non-finite numbers are encoded as "nan", "inf" and "-inf". */
function read(x) {
  return typeof x === "number" ? x : { nan: NaN, inf: Infinity, "-inf": -Infinity }[x];
}

function cut(x) {
  return x.slice(0, LARGE).map((row) => row.slice(0, LARGE).map(read));
}

/* The same rule as in regard.judge.difference: relative above 1. */
function agree(x, y, atol) {
  const room = atol * Math.max(1, Number.isFinite(y) ? Math.abs(y) : 1);
  return Object.is(x, y) || x === y || Math.abs(x - y) <= room;
}

function largest(rows) {
  const sizes = rows.flat().filter((x) => x !== null && Number.isFinite(x)).map(Math.abs);
  return Math.max(0, ...sizes) || 1;
}

function drawMap(name, x, { ink, top }) {
  const [rows, columns] = [x.length, x[0].length];
  const side = Math.max(3, Math.min(CELL, Math.floor(SIDE / Math.max(rows, columns))));
  const canvas = make("canvas");
  const scale = Math.ceil(devicePixelRatio || 1);
  canvas.width = columns * side * scale;
  canvas.height = rows * side * scale;
  canvas.style.width = `${columns * side}px`;
  canvas.style.height = `${rows * side}px`;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${name}: ${tell(x)}`);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  x.forEach((row, i) => row.forEach((value, j) => paint(context, value, { x: j * side, y: i * side, side, ink, top })));
  const ends = make("figcaption", make("b", name), ` ${tell(x)}`);
  return make("figure", canvas, ends);
}

function paint(context, value, { x, y, side, ink, top }) {
  if (value === null) return; // they agree
  if (Number.isFinite(value)) {
    const word = ink.signs[Math.round(((value / top + 1) / 2) * (ink.signs.length - 1))];
    context.fillStyle = `rgb(${word & 255} ${(word >> 8) & 255} ${(word >> 16) & 255})`;
    context.fillRect(x, y, side, side);
    return;
  }
  context.strokeStyle = "#888";
  for (let at = 4; at < 2 * side; at += 5) {
    context.beginPath();
    context.moveTo(x + Math.max(0, at - side), y + Math.min(at, side));
    context.lineTo(x + Math.min(at, side), y + Math.max(0, at - side));
    context.stroke();
  }
}

/* Return a one-line summary of a heatmap. */
function tell(x) {
  const all = x.flat();
  const numbers = all.filter((v) => v !== null && Number.isFinite(v));
  const others = all.filter((v) => v !== null && !Number.isFinite(v)).length;
  const differ = all.filter((v) => v !== null).length;
  const said = [`${x.length} × ${x[0].length}`];
  if (differ < all.length) said.push(`${differ} of ${all.length} differ`);
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)].map(write);
  if (numbers.length) said.push(low === high ? low : `${low} to ${high}`);
  if (others) said.push(`${others} not finite`);
  return said.join(", ");
}

function write(x) {
  if (x === null) return "=";
  if (!Number.isFinite(x)) return String(x).replace("Infinity", "∞");
  return String(Number(x.toPrecision(4)));
}

function writeTable(name, x) {
  const head = make("tr", make("th", ""), ...x[0].map((_, j) => make("th", `${j}`)));
  const rows = x.map((row, i) => make("tr", make("th", `${i}`), ...row.map((v) => make("td", write(v)))));
  const table = make("table", make("caption", name), head, ...rows);
  for (const cell of head.children) cell.scope = "col";
  for (const row of rows) row.firstChild.scope = "row";
  return table;
}
