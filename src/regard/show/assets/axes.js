/* The names of rows and columns: tokens where there is room, else round numbers.

   The cell under the crosshair and the pinned ones are always named, what was searched for
   has a dot.

   Next: view.js */

import { showCount, showToken } from "./ink.js";
import { LEFT, TOP, clamp } from "./view.js";

export const LABELLED = 9; // pixels of a cell from which on tokens are named
const ROOM = 46; // pixels between two numbers
const LONGEST = 72; // pixels of a label

export function drawAxes(plane) {
  const { context, colours } = plane;
  context.fillStyle = colours.side;
  context.fillRect(0, 0, plane.width, TOP);
  context.fillRect(0, 0, LEFT, plane.height);
  context.fillStyle = colours.line;
  context.fillRect(0, TOP - 1, plane.width, 1);
  context.fillRect(LEFT - 1, 0, 1, plane.height);
  context.fillStyle = colours.faint;
  context.direction = "ltr";
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "right";
  context.fillText("query ↓", LEFT - 8, TOP - 26);
  context.fillText("key →", LEFT - 8, TOP - 12);
  const [queries, keys] = plane.seenCells();
  const rim = plane.at.z < LABELLED ? 12 : 0; // half of a number
  context.save();
  context.beginPath();
  context.rect(0, TOP - rim, LEFT - 1, plane.panelHeight + rim);
  context.clip();
  const down = {
    at: (i) => plane.yOf(i),
    label: (i) => plane.labels.query(i),
    move: (y) => context.translate(LEFT - 7, y),
    room: 13,
    dot: (y) => context.fillRect(LEFT - 5, y - 1, 4, 2),
    marks: plane.marks.query,
  };
  drawAxis(plane, queries, down, plane.cursor?.i, plane.pins.row);
  context.restore();
  plane.panels.forEach((_, panel) => {
    context.save();
    context.beginPath();
    context.rect(plane.panelLeft(panel) - rim, 0, plane.panelWidth + rim, TOP - 1);
    context.clip();
    const turn = (x) => {
      context.translate(x, TOP - 7);
      if (plane.at.z >= LABELLED) context.rotate(-Math.PI / 2); // tokens stand upright
      else context.translate(0, -6);
      context.textAlign = plane.at.z >= LABELLED ? "left" : "center";
    };
    const across = {
      at: (j) => plane.xOf(j, panel),
      label: (j) => plane.labels.key(j),
      move: turn,
      room: 62,
      dot: (x) => context.fillRect(x - 1, TOP - 5, 2, 4),
      marks: plane.marks.key,
    };
    drawAxis(plane, keys, across, plane.cursor?.j, plane.pins.column);
    if (plane.panels.flat().length > 1) drawTitle(plane, panel);
    context.restore();
  });
}

function drawTitle(plane, panel) {
  const { context, colours } = plane;
  const title = plane.panels[panel].map(({ layer, head }) => `layer ${layer} head ${head}`).join("  −  ");
  context.font = "bold 12px system-ui, sans-serif";
  context.textAlign = "left";
  context.fillStyle = colours.side;
  context.fillRect(plane.panelLeft(panel), 0, context.measureText(title).width + 12, 20);
  context.fillStyle = colours.text;
  context.fillText(title, plane.panelLeft(panel) + 6, 11);
}

/* Name cells along one axis, from the first to the last in sight. */
function drawAxis(plane, [first, last], { at, label, move, dot, marks, room }, lit, pinned) {
  const { colours } = plane;
  const { z } = plane.at;
  const named = z >= LABELLED;
  const step = named ? 1 : roundStep(ROOM / z);
  const write = (cell, colour, bold) => {
    const { position, text } = label(cell);
    const near = (named && showToken(text, 11)) || showCount(position);
    const both = named ? near : `${showCount(position)} ${showToken(text, 8)}`;
    const size = named ? clamp(z - 1, 8, 12) : 11;
    drawLabel(plane, move, at(cell) + z / 2, bold ? both : near, colour, size, bold);
  };
  const special = [pinned, lit].filter((cell) => cell !== null && cell !== undefined);
  const free = (cell) => named || special.every((other) => Math.abs(other - cell) * z > room);
  for (let cell = Math.ceil(first / step) * step; cell <= last; cell += step) {
    if (free(cell)) write(cell, colours.text);
  }
  plane.context.fillStyle = colours.accent;
  for (const mark of marks) if (mark >= first && mark <= last) dot(at(mark) + z / 2);
  for (const cell of special) write(cell, colours.accent, true);
}

function drawLabel(plane, move, at, text, colour, size, bold = false) {
  const { context, colours } = plane;
  context.save();
  move(at);
  context.font = `${bold ? "bold " : ""}${size}px ui-monospace, monospace`;
  if (bold) {
    const wide = Math.min(LONGEST, context.measureText(text).width);
    const start = { left: 0, center: -wide / 2, right: -wide }[context.textAlign];
    context.fillStyle = colours.side; // covers the numbers beneath
    context.fillRect(start - 4, -size / 2 - 2, wide + 8, size + 4);
  }
  context.fillStyle = colour;
  context.fillText(text, 0, 0, LONGEST);
  context.restore();
}

/* The least of 1, 2, 5, 10, 20, … that is not below. */
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return [1, 2, 5, 10].find((x) => x * power >= least) * power;
}
