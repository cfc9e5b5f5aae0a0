/* Weights over a picture: a colour for each patch, rows of patches from top to bottom.

   The picture is grey, half way to the colour of the page, and the thinner the more
   weight there is.

   Next: source.js */

import { fromBase64 } from "./source.js";

const GREY = [0.299, 0.587, 0.114];
const PALE = 0.5;
const VEIL = 0.75; // of the picture, where there is no weight
const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
const greys = new WeakMap(); // of a picture: {page, canvas}

/* Return a canvas of a picture with a colour over each patch.
   shadeOf: of a patch its colour, and its place on the scale; framed: patches */
export function drawPatches(picture, shadeOf, framed, colours, size) {
  const { rows, columns, height, width } = picture;
  const canvas = document.createElement("canvas");
  canvas.width = size;
  canvas.height = Math.round((size * height) / width);
  const context = canvas.getContext("2d");
  if (greys.get(picture)?.page !== colours.page) greys.set(picture, { page: colours.page, canvas: greyPicture(picture, colours.page) });
  const image = greys.get(picture).canvas;
  const [across, down] = [canvas.width / columns, canvas.height / rows];
  const boxOf = (i, j) => [Math.round(j * across), Math.round(i * down), Math.ceil(across), Math.ceil(down)];
  for (let i = 0; i < rows; i++) {
    for (let j = 0; j < columns; j++) {
      const { css, place = 0 } = shadeOf(i * columns + j);
      const from = [(j * width) / columns, (i * height) / rows, width / columns, height / rows];
      const box = boxOf(i, j);
      context.fillStyle = css || colours.page;
      context.fillRect(...box);
      context.globalAlpha = VEIL * (1 - place) ** 3;
      context.drawImage(image, ...from, ...box);
      context.globalAlpha = 1;
    }
  }
  context.strokeStyle = colours.accent;
  context.lineWidth = size > 300 ? 4 : 2;
  for (const at of framed) context.strokeRect(...boxOf(Math.floor(at / columns), at % columns));
  return canvas;
}

/* The patch under a pointer. */
export function placePatch({ rows, columns }, canvas, { clientX, clientY }) {
  const { left, top, width, height } = canvas.getBoundingClientRect();
  const part = (x, size, count) => Math.min(count - 1, Math.max(0, Math.floor((x / size) * count)));
  return part(clientY - top, height, rows) * columns + part(clientX - left, width, columns);
}

/* The patch to which an arrow leads, at first the first one; null for another key. */
export function stepPatch({ rows, columns }, from, key) {
  if (!STEPS[key]) return null;
  if (from === null) return 0;
  const [down, across] = STEPS[key];
  const row = Math.min(rows - 1, Math.max(0, Math.floor(from / columns) + down));
  return row * columns + Math.min(columns - 1, Math.max(0, (from % columns) + across));
}

/* Say what the patches cannot show. */
export function tellSpecial({ special }, weights) {
  const taken = weights.slice(0, special).reduce((total, x) => total + (x ?? NaN), 0);
  return special ? `${taken.toFixed(3)} on ${special} special token${special > 1 ? "s" : ""}` : "";
}

function greyPicture({ height, width, rgb }, page) {
  const bytes = fromBase64(rgb);
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d");
  context.fillStyle = page;
  context.fillRect(0, 0, width, height);
  const image = context.getImageData(0, 0, width, height);
  for (let at = 0; at < height * width; at++) {
    const light = GREY.reduce((total, share, c) => total + share * bytes[3 * at + c], 0);
    for (let c = 4 * at; c < 4 * at + 3; c++) image.data[c] += PALE * (light - image.data[c]);
  }
  context.putImageData(image, 0, 0);
  return canvas;
}
