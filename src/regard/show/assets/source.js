/* Where the numbers come from.

     source.meta()                  the model, its layers, heads and tokens
     source.table()                 statistics of every head, as far as they are known
     source.tile(place)             256 × 256 codes of a level, see ink.js
     source.row(place), .column     entropy and the largest weights of a query or key
     source.gallery(place)          a small map of every head of a layer
     source.text(selection)         a code for every token of a text, see text_view.js
     source.sound(heads)            a code for every word and moment, see sound_view.js

   HttpSource asks the server that sent this page. A page with its data inside, or a
   notebook, gives another object with these eight calls. Tiles keeps what has come.

   Next: map_canvas.js */

const AT_ONCE = 4; // requests, so that a pinned row need not wait long
const KEPT = 320; // tiles, of 128 kB of codes and 256 kB of colours
const AGAIN = 1500; // ms until a preview or a failed tile is asked for again

export class HttpSource {
  constructor(base, token) {
    this.base = base;
    this.token = token;
  }

  async ask(path, place = {}, signal = undefined) {
    const url = new URL(`api/${path}`, this.base);
    url.search = new URLSearchParams({ ...place, ...(this.token && { token: this.token }) });
    const answer = await fetch(url, { signal });
    if (!answer.ok) {
      const { error = answer.statusText } = await answer.json().catch(() => ({}));
      throw new Error(`${path}: ${error}`);
    }
    return answer;
  }

  async meta() {
    return (await this.ask("meta")).json();
  }

  async table() {
    return (await this.ask("table")).json();
  }

  async row(place) {
    return (await this.ask("row", place)).json();
  }

  async column(place) {
    return (await this.ask("column", place)).json();
  }

  async text(selection, signal) {
    const answer = await this.ask("text", selection, signal);
    return { codes: new Uint16Array(await answer.arrayBuffer()) }; // (tokens)
  }

  async sound(heads, signal) {
    const answer = await this.ask("sound", heads, signal);
    return { codes: new Uint16Array(await answer.arrayBuffer()) }; // (words, moments)
  }

  async tile(place, signal) {
    const answer = await this.ask("tile", place, signal);
    return {
      codes: new Uint16Array(await answer.arrayBuffer()), // (rows, columns)
      rows: Number(answer.headers.get("X-Rows")),
      columns: Number(answer.headers.get("X-Columns")),
      how: answer.headers.get("X-How") ?? place.how,
      exact: /^(1|true|yes)$/i.test(answer.headers.get("X-Exact") ?? "true"),
      note: answer.headers.get("X-Note") ?? "", // what a preview is
    };
  }

  async gallery(place) {
    const answer = await this.ask("gallery", place);
    return {
      codes: new Uint16Array(await answer.arrayBuffer()), // (heads, rows, columns)
      heads: Number(answer.headers.get("X-Heads")),
      rows: Number(answer.headers.get("X-Rows")),
      columns: Number(answer.headers.get("X-Columns")),
    };
  }
}

/* Tiles that came, by place; the least lately used ones are forgotten. */
export class Tiles {
  constructor(source, onArrive) {
    this.source = source;
    this.onArrive = onArrive;
    this.trouble = ""; // why the last tile did not come
    this.kept = new Map(); // name -> tile, the oldest first
    this.asked = new Map(); // name -> how to give it up
    this.later = new Map(); // name -> when it may be asked for again
    this.wanted = [];
  }

  get(place) {
    const name = nameOf(place);
    const tile = this.kept.get(name);
    if (tile) {
      this.kept.delete(name);
      this.kept.set(name, tile); // now the youngest
    }
    return tile;
  }

  /* Ask for places, the first ones first; what is not wanted any more is given up. */
  want(places) {
    this.wanted = places;
    const names = new Set(places.map(nameOf));
    for (const [name, control] of this.asked) if (!names.has(name)) control.abort();
    this.askNext();
  }

  askNext() {
    for (const place of this.wanted) {
      if (this.asked.size >= AT_ONCE) return;
      const name = nameOf(place);
      const known = this.kept.get(name)?.exact || this.asked.has(name);
      if (!known && performance.now() >= (this.later.get(name) ?? 0)) this.fetch(place, name);
    }
  }

  async fetch(place, name) {
    const control = new AbortController();
    this.asked.set(name, control);
    try {
      const tile = await this.source.tile(place, control.signal);
      this.kept.set(name, tile);
      this.trouble = "";
      if (!tile.exact) this.askLater(name);
      while (this.kept.size > KEPT) this.kept.delete(this.kept.keys().next().value);
    } catch (error) {
      if (!control.signal.aborted) {
        this.askLater(name);
        this.trouble = error.message;
      }
    }
    this.asked.delete(name);
    this.onArrive();
    this.askNext();
  }

  askLater(name) {
    this.later.set(name, performance.now() + AGAIN);
    setTimeout(this.onArrive, AGAIN + 10);
  }
}

export function fromBase64(text) {
  const signs = atob(text);
  const bytes = new Uint8Array(signs.length);
  for (let at = 0; at < bytes.length; at++) bytes[at] = signs.charCodeAt(at);
  return bytes;
}

function nameOf({ sequence, layer, head, level, x, y, how }) {
  return `${sequence}/${layer}/${head}/${level}/${x}/${y}/${how}`;
}
