/* What is seen: codes as colours, numbers and tokens as text.

     code 0      masked                          no colour: the hatching shows through
     code 1      below 2^-30                     the first colour
     code c      log2 p = (c - 2) / 65532 * 30 - 30
     code 65535  not a number                    red, which is on no path of colours

   Colours are a path through OKLab along which lightness only falls, or on a dark page
   only rises, so that the order is also seen in grey and by colour-blind readers. The
   stops are those of palette.py. Differences have two colours that meet in none.

   Next: source.js */

const LIGHT = [[0.985, 0.025, 105], [0.78, 0.1, 160], [0.54, 0.09, 235], [0.26, 0.1, 275]];
const DARK = [[0.13, 0.025, 290], [0.42, 0.14, 325], [0.7, 0.155, 395], [0.97, 0.06, 460]];
const PALE_TWO = [[0.4, 0.1, 255], [0.72, 0.09, 250], [0.975, 0, 0], [0.72, 0.12, 55], [0.42, 0.1, 45]];
const DEEP_TWO = [[0.88, 0.06, 235], [0.55, 0.1, 250], [0.2, 0, 0], [0.56, 0.11, 50], [0.89, 0.08, 75]];

const SIZE = 256; // colours of a path
const CODES = 65536;
const MASKED = 0;
export const NAN = 65535;
const RED = 0xff0000ff; // as an ABGR word

const WEIGHTS = Float64Array.from({ length: CODES }, (_, code) =>
  code < 2 ? 0 : code === NAN ? NaN : 2 ** (((code - 2) / 65532) * 30 - 30),
);

export function isMasked(code) {
  return code === MASKED;
}

export function weightOf(code) {
  return WEIGHTS[code];
}

/* A weight as a code, see log_codes.py. */
export function encode(weight) {
  if (Number.isNaN(weight)) return NAN;
  if (!(weight >= 2 ** -30)) return 1;
  return 2 + Math.min(65532, Math.round((Math.log2(weight) + 30) * (65532 / 30)));
}

/* The colours of one theme and one scale, from 10^low to 1. */
export class Ink {
  constructor({ dark, low }) {
    this.low = low;
    this.path = tracePath(dark ? DARK : LIGHT);
    this.signs = tracePath(dark ? DEEP_TWO : PALE_TWO);
    this.table = new Uint32Array(CODES); // masked stays transparent
    this.table[1] = this.path[0];
    this.table[NAN] = RED;
    for (let code = 2; code < NAN; code++) {
      const power = (((code - 2) / 65532) * 30 - 30) * Math.LOG10E * Math.LN2; // of ten
      this.table[code] = this.path[Math.round(Math.max(0, 1 - power / low) * (SIZE - 1))];
    }
  }

  /* Where a weight is between the first colour, 0, and the last, 1. */
  placeOf(weight) {
    return weight > 0 ? Math.min(1, Math.max(0, 1 - Math.log10(weight) / this.low)) : 0;
  }

  /* The colour at a place of the path, as red, green and blue. */
  bytesAt(place) {
    const word = this.path[Math.round(place * (SIZE - 1))];
    return [word & 255, (word >> 8) & 255, (word >> 16) & 255];
  }

  /* The colour at a place of the two paths, from -1 to 1. */
  signAt(place) {
    const word = this.signs[Math.round(((place + 1) / 2) * (SIZE - 1))];
    return [word & 255, (word >> 8) & 255, (word >> 16) & 255];
  }

  /* A weight's colour, for CSS. */
  colour(weight) {
    const word = Number.isNaN(weight) ? RED : this.path[Math.round(this.placeOf(weight) * (SIZE - 1))];
    return `rgb(${word & 255} ${(word >> 8) & 255} ${(word >> 16) & 255})`;
  }

  colourDifference(difference) {
    if (Number.isNaN(difference)) return RED;
    const place = this.placeOf(Math.abs(difference)) * Math.sign(difference);
    return this.signs[Math.round(((place + 1) / 2) * (SIZE - 1))];
  }

  paint(codes, rows, columns) {
    return draw(rows, columns, (pixels) => {
      for (let at = 0; at < pixels.length; at++) pixels[at] = this.table[codes[at]];
    });
  }

  /* Paint how much more weight the first has than the second. */
  paintDifference(codes, others, rows, columns) {
    return draw(rows, columns, (pixels) => {
      for (let at = 0; at < pixels.length; at++) {
        if (isMasked(codes[at]) && isMasked(others[at])) continue;
        pixels[at] = this.colourDifference(WEIGHTS[codes[at]] - WEIGHTS[others[at]]);
      }
    });
  }

  paintLegend(signed) {
    const path = signed ? this.signs : this.path;
    return draw(1, SIZE, (pixels) => pixels.set(path));
  }
}

function draw(rows, columns, fill) {
  const canvas = document.createElement("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  fill(new Uint32Array(image.data.buffer));
  context.putImageData(image, 0, 0);
  return canvas;
}

/* Return SIZE colours along a path of (lightness, chroma, hue), as ABGR words. */
function tracePath(stops) {
  const labs = stops.map(([lightness, chroma, hue]) => {
    const angle = (hue * Math.PI) / 180;
    return [lightness, chroma * Math.cos(angle), chroma * Math.sin(angle)];
  });
  return Uint32Array.from({ length: SIZE }, (_, at) => {
    const place = (at / (SIZE - 1)) * (labs.length - 1);
    const from = Math.min(Math.floor(place), labs.length - 2);
    const lab = labs[from].map((x, axis) => x + (place - from) * (labs[from + 1][axis] - x));
    const [red, green, blue] = toBytes(lab);
    return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
  });
}

/* OKLab to sRGB: Ottosson 2020, bottosson.github.io/posts/oklab */
function toBytes([l, a, b]) {
  const long = (l + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const middle = (l - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const short = (l - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const light = [
    4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
    -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
    -0.0041960863 * long - 0.7034186147 * middle + 1.707614701 * short,
  ];
  return light.map((x) => {
    const curved = x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055;
    return Math.round(Math.min(1, Math.max(0, curved)) * 255);
  });
}

/* What steers a line, takes no room, or is half a character, is shown as its number. */
const UNSEEN = /[\p{C}\p{Z}\p{Default_Ignorable_Code_Point}]/u;
const SIGNS = { " ": "·", "\n": "⏎", "\t": "⇥" };

/* Return a token as at most `limit` characters that are all visible. */
export function showToken(text, limit = 24) {
  return showSigns(text, limit, SIGNS[" "]);
}

/* The same with another sign for a space. */
export function showSigns(text, limit, space) {
  const signs = { ...SIGNS, " ": space };
  let shown = "";
  let count = 0;
  // no more than can be shown: a token may be 10,000 characters long
  for (const sign of text.slice(0, 2 * limit + 2)) {
    const seen = signs[sign] ?? (UNSEEN.test(sign) ? `\\u{${sign.codePointAt(0).toString(16)}}` : sign);
    count += seen.length > 2 ? seen.length : 1;
    if (count > limit) return `${shown}…`;
    shown += seen;
  }
  // a mark would join what stands before it
  return /^\p{M}/u.test(shown) ? `◌${shown}` : shown;
}

export function showWeight(weight) {
  if (weight === 0) return "below 1e-9"; // 2^-30
  return Math.abs(weight) < 1e-3 ? weight.toExponential(4) : weight.toPrecision(5);
}

export function showCount(count) {
  return count.toLocaleString("en-US");
}

/* A share in per cent, rounded up: 0.0123 is 1.3 %. */
export function showShare(share) {
  const digits = share < 0.0095 ? 100 : 10;
  return `${Math.ceil(100 * share * digits) / digits} %`;
}
