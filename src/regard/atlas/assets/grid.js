/* The gallery: a row for each layer, a cell for each head, coloured by a number.

   Cells are elements, not pixels, so that arrows walk them and a screen reader finds them;
   10,000 of them are no burden to a browser. A mark is a form, not a colour.

   Next: order.js */

import { make, showPair, showShort } from "./data.js";

const SIDE = [6, 84]; // least and largest width of a cell, in pixels
const TALL = [6, 24];
const ROOM = { name: 36, value: 34, sign: 10, line: 15, dot: 13 }; // pixels, of what is written

export class Grid {
  constructor(element, scroll, atlas, { onOpen, onPoint }) {
    Object.assign(this, { element, scroll, atlas });
    this.rows = atlas.heads.map((count, layer) => Array.from({ length: count }, (_, head) => makeCell(layer, head)));
    this.places = new Map(this.rows.flatMap((cells, layer) => cells.map((cell, head) => [cell, { layer, head }])));
    this.top = make("div", "row top");
    this.top.setAttribute("aria-hidden", "true"); // every cell says its own place
    this.top.append(...Array.from({ length: Math.max(...atlas.heads) }, () => make("span")));
    element.append(this.top, ...this.rows.map((cells, layer) => makeRow(cells, layer, atlas.layers[layer])));
    this.setStop(this.rows.flat()[0]);
    const of = (event) => this.places.get(event.target);
    element.addEventListener("pointerover", (event) => onPoint(of(event)));
    element.addEventListener("pointerleave", () => onPoint());
    element.addEventListener("click", (event) => of(event) && onOpen(of(event)));
    element.addEventListener("focusin", (event) => {
      this.setStop(event.target);
      onPoint(of(event));
    });
    element.addEventListener("keydown", (event) => this.walk(event, onOpen));
  }

  /* Colour every cell; `shown` is what atlas.show returns. */
  paint(shown, ink, chosen) {
    this.shown = shown;
    const inks = readInks(shown.signed ? ink.signs : ink.path);
    const [low, high] = shown.scale;
    for (const [layer, cells] of this.rows.entries()) {
      for (const [head, cell] of cells.entries()) {
        const mean = shown.mean[layer][head];
        const marked = shown.marked?.[layer][head] === 1;
        const isChosen = chosen?.layer === layer && chosen.head === head;
        cell.className = `cell${mean === null ? " none" : ""}${marked ? " marked" : ""}${isChosen ? " chosen" : ""}`;
        cell.ariaSelected = `${isChosen}`;
        const place = mean === null ? 0 : (mean - low) / (high - low);
        const [back, front] = mean === null ? ["", ""] : inks[Math.round(Math.min(1, Math.max(0, place)) * 255)];
        cell.style.backgroundColor = back;
        cell.style.color = front;
        const [half, doubt] = [shown.half, shown.doubt].map((grid) => grid?.[layer][head]);
        const value = showPair({ mean, half, doubt });
        cell.ariaLabel = `layer ${layer} head ${head}: ${value}${marked ? ", marked" : ""}`;
      }
      if (chosen?.layer === layer) this.setStop(cells[chosen.head]);
    }
  }

  /* Choose the size of a cell, so that all are in sight if that is possible. */
  fit(room) {
    const bound = (x, [least, most]) => Math.min(most, Math.max(least, Math.floor(x)));
    const isStacked = getComputedStyle(room.parentElement).flexDirection === "column"; // then it may be long
    const above = this.scroll.offsetTop - room.offsetTop + 40;
    const tall = isStacked ? 0.75 * window.innerHeight : room.clientHeight - above;
    this.width = bound((room.clientWidth - 46 - ROOM.name) / Math.max(...this.atlas.heads), SIDE);
    this.height = bound(tall / this.rows.length, TALL);
    this.element.style.setProperty("--wide", `${this.width}px`);
    this.element.style.setProperty("--tall", `${this.height}px`);
    this.element.classList.toggle("tiny", Math.min(this.width, this.height) < ROOM.dot);
    this.write();
  }

  /* Write what there is room for: numbers of heads and layers, and values. */
  write() {
    const apart = (size, least) => [1, 2, 5, 10, 20, 50].find((step) => step * size >= least);
    const { mean, scale, marked, signed } = this.shown;
    const across = apart(this.width, 24);
    for (const [head, name] of [...this.top.children].entries()) name.textContent = head % across ? "" : head;
    const down = apart(this.height, 13);
    const full = this.width >= ROOM.value + (signed ? ROOM.sign : 0) && this.height >= ROOM.line;
    for (const [layer, cells] of this.rows.entries()) {
      cells[0]?.parentElement.firstChild.classList.toggle("unnamed", layer % down > 0);
      for (const [head, cell] of cells.entries()) {
        const words = full ? showShort(mean[layer][head], scale, marked?.[layer][head] === 1) : "";
        if (cell.textContent !== words) cell.textContent = words;
      }
    }
  }

  focus() {
    this.stop.focus();
  }

  /* One cell takes part in the tab order, arrows go to the others. */
  setStop(cell) {
    if (!this.places.has(cell)) return;
    if (this.stop) this.stop.tabIndex = -1;
    this.stop = cell;
    cell.tabIndex = 0;
  }

  walk(event, onOpen) {
    const place = this.places.get(event.target);
    if (!place || event.ctrlKey || event.metaKey || event.altKey) return;
    const { layer, head } = place;
    // a layer with fewer heads is stepped into at its last one
    const go = (row) => row?.[Math.min(head, row.length - 1)]?.focus();
    const steps = {
      ArrowLeft: () => this.rows[layer][head - 1]?.focus(),
      ArrowRight: () => this.rows[layer][head + 1]?.focus(),
      ArrowUp: () => go(this.rows[layer - 1]),
      ArrowDown: () => go(this.rows[layer + 1]),
      Home: () => this.rows[layer][0].focus(),
      End: () => this.rows[layer].at(-1).focus(),
      PageUp: () => go(this.rows[0]),
      PageDown: () => go(this.rows.at(-1)),
      Enter: () => onOpen(place),
      " ": () => onOpen(place),
    };
    if (!steps[event.key]) return;
    event.preventDefault();
    steps[event.key]();
  }
}

function makeCell(layer, head) {
  const cell = make("div", "cell");
  cell.role = "gridcell";
  cell.tabIndex = -1;
  cell.dataset.place = `${layer}.${head}`;
  return cell;
}

function makeRow(cells, layer, name) {
  const row = make("div", "row");
  row.role = "row";
  const title = make("span", "name", `${layer}`);
  title.role = "rowheader";
  title.ariaLabel = `layer ${layer}`;
  title.title = name;
  row.append(title, ...cells);
  return row;
}

/* Colours of a path for CSS, each with black or white, whichever is read better on it. */
function readInks(path) {
  return Array.from(path, (word) => {
    const bytes = [word & 255, (word >> 8) & 255, (word >> 16) & 255];
    const [r, g, b] = bytes.map((x) => (x <= 10 ? x / 3295 : ((x / 255 + 0.055) / 1.055) ** 2.4));
    const light = 0.2126 * r + 0.7152 * g + 0.0722 * b;
    return [`rgb(${bytes.join(" ")})`, light > 0.179 ? "#000" : "#fff"];
  });
}
