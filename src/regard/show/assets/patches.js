/* What a query of a vision model looks at, over the picture: a colour for each patch.

     key special + i * columns + j    is the patch in row i, column j

   The picture is grey, and the thinner the more weight there is.

   Next: source.js */

import { fromBase64 } from "./source.js";

const WIDTH = 268; // pixels of the side panel
const GREY = [0.299, 0.587, 0.114];
const PALE = 0.5;
const VEIL = 0.75; // of the picture, where there is no weight

/* Return a canvas with the weights of a row laid over its picture. */
export function drawPatches({ rows, columns, special, height, width, rgb }, weights, query, ink, colours) {
  const canvas = document.createElement("canvas");
  canvas.width = WIDTH;
  canvas.height = Math.round((WIDTH * height) / width);
  const context = canvas.getContext("2d");
  const image = greyPicture(height, width, fromBase64(rgb));
  const [across, down] = [canvas.width / columns, canvas.height / rows];
  const boxOf = (i, j) => [Math.round(j * across), Math.round(i * down), Math.ceil(across), Math.ceil(down)];
  for (let i = 0; i < rows; i++) {
    for (let j = 0; j < columns; j++) {
      const at = special + i * columns + j;
      const weight = at < weights.length ? (weights[at] ?? NaN) : 0; // JSON has null for NaN
      const from = [(j * width) / columns, (i * height) / rows, width / columns, height / rows];
      const box = boxOf(i, j);
      context.fillStyle = ink.colour(weight);
      context.fillRect(...box);
      context.globalAlpha = VEIL * (1 - ink.placeOf(weight)) ** 2;
      context.drawImage(image, ...from, ...box);
      context.globalAlpha = 1;
    }
  }
  if (query >= special && query < special + rows * columns) {
    const at = query - special;
    context.strokeStyle = colours.accent;
    context.lineWidth = 2;
    context.strokeRect(...boxOf(Math.floor(at / columns), at % columns));
  }
  return canvas;
}

/* Say what the patches cannot show. */
export function tellSpecial({ special }, weights) {
  const taken = weights.slice(0, special).reduce((total, x) => total + (x ?? NaN), 0);
  return special ? `${taken.toFixed(3)} on ${special} special token${special > 1 ? "s" : ""}` : "";
}

function greyPicture(height, width, bytes) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  for (let at = 0; at < height * width; at++) {
    const light = GREY.reduce((total, share, c) => total + share * bytes[3 * at + c], 0);
    image.data.fill(255 - PALE * (255 - light), 4 * at, 4 * at + 3);
    image.data[4 * at + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return canvas;
}
