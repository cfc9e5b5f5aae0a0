/* Beside the map: what is under the crosshair, what is pinned, and finding words.

   Tokens come from whatever text a model read: they become text nodes, never markup.

   Next: picture_view.js, ink.js */

import { make } from "./gallery.js";
import { badgesOf, rowOf, showNumber, showValue, tellFew } from "./head_table.js";
import { isMasked, showCount, showToken, showWeight, weightOf } from "./ink.js";
import { PictureView } from "./picture_view.js";

export const NEAR = 14; // pixels of a cell when going to a token
const AROUND = 9; // tokens of text on either side
const MOST = 2000; // places that are marked for a search

export class Panel {
  constructor(page) {
    const { part, source, plane, meta } = page;
    Object.assign(this, { page, part, source, plane, meta });
    this.found = []; // tokens
    this.turn = -1; // which of them was gone to
    this.picture = new PictureView(this);
  }

  get at() {
    return this.page.at;
  }

  nameCell(kind, index) {
    const { position, text } = this.plane.labels[kind](index);
    return text ? `${kind} ${showCount(position)} “${showToken(text)}”` : `${kind} ${showCount(position)}`;
  }

  showNumbers() {
    const row = rowOf(this.meta, this.at);
    const items = this.meta.statistics.flatMap(({ name, description, unit }) => {
      const title = Object.assign(make("dt", "", name), { title: `${description}, in ${unit}` });
      return [title, make("dd", "", showValue(row, name))];
    });
    const record = this.page.recordOf(this.at);
    const nan = row.nan_rows ? `NaN in ${showCount(row.nan_rows)} queries` : "";
    const badges = badgesOf(this.meta, { ...row, nk: record.nk }).map(({ name }) => (name === "nan_rows" ? nan : name));
    items.push(make("dt", "", "queries"), make("dd", "", showCount(record.nq)));
    items.push(make("dt", "", "keys"), make("dd", "", showCount(record.nk)));
    items.push(make("dt", "", "badges"), make("dd", "", badges.join(", ") || "none"));
    for (const statistic of this.meta.statistics.filter(({ name }) => row.few?.[name])) {
      items.push(make("dt", "wide", statistic.name), make("dd", "wide", tellFew(statistic, [row])));
    }
    this.part.numbers.replaceChildren(...items);
  }

  // ---- saying what is under the crosshair

  describe() {
    const { cursor } = this.plane;
    if (cursor) this.say(this.sentenceOf(cursor));
    const row = cursor?.i ?? this.at.row;
    const column = cursor?.j ?? this.at.column;
    const place = `${this.at.sequence}/${this.at.layer}/${row}/${column}`;
    if (place === this.told) return;
    this.told = place;
    if (!cursor) this.say("");
    this.showText(this.part.queryText, "query", row);
    this.showText(this.part.keyText, "key", column);
  }

  sentenceOf(cursor) {
    const { codes, how, exact, queries, keys } = this.plane.read(cursor);
    const one = queries[0] === queries[1] && keys[0] === keys[1];
    const who = one ? this.nameCell("query", cursor.i) : this.nameRange("queries", queries, "query");
    const whom = one ? this.nameCell("key", cursor.j) : this.nameRange("keys", keys, "key");
    if (!codes) return `${who} → ${whom}: not here yet`;
    if (codes.every(isMasked)) return `${who} may not look at ${whom}: masked`;
    if (codes.length === 2) {
      const [mine, theirs] = codes.map(weightOf);
      const { layer, head } = this.page.other;
      const more = mine - theirs;
      const by = Number.isNaN(more) ? "NaN" : more === 0 ? "0" : `${more > 0 ? "+" : "−"}${showWeight(Math.abs(more))}`;
      return `${who} → ${whom}: ${showWeight(mine)}; layer ${layer} head ${head}: ${showWeight(theirs)}; difference ${by}`;
    }
    const value = (this.meta.rounded ? "about " : "") + showWeight(weightOf(codes[0]));
    const sure = exact ? "" : " (preview, rows sampled)";
    if (one) return `${who} → ${whom}: ${value}${sure}`;
    return how === "mass"
      ? `${who} give ${whom} on average ${value} of their attention${sure}`
      : `strongest link from ${who} to ${whom}: ${value}${sure}`;
  }

  nameRange(name, ends, kind) {
    const [first, last] = ends.map((at) => showCount(this.plane.labels[kind](at).position));
    return `${name} ${first}–${last}`;
  }

  /* The words around a token, the token itself lit. */
  showText(element, kind, index) {
    const nodes = [make("b", "", `${kind} `)];
    if (index === undefined || index === null) nodes.push("–");
    else {
      const count = kind === "query" ? this.plane.record.nq : this.plane.record.nk;
      const first = Math.max(0, index - AROUND);
      const last = Math.min(count - 1, index + AROUND);
      const texts = Array.from({ length: last + 1 - first }, (_, n) => this.plane.labels[kind](first + n).text);
      const apart = texts.some((text) => /\s/.test(text)) ? "" : " "; // pieces of words, or numbers
      texts.forEach((text, n) => nodes.push(make(first + n === index ? "mark" : "bdi", "", showToken(text, 20)), apart));
    }
    element.replaceChildren(...nodes);
  }

  say(sentence) {
    if (sentence === this.said) return;
    this.said = sentence;
    this.part.sentence.textContent = sentence;
    clearTimeout(this.speaking); // a screen reader hears where the crosshair rests
    this.speaking = setTimeout(() => (this.part.spoken.textContent = sentence), 400);
  }

  // ---- pins

  pin({ i, j }, column) {
    if (column) this.at.column = this.at.column === j ? undefined : j;
    else this.at.row = this.at.row === i ? undefined : i;
    this.showPins();
    this.page.keepAddress();
  }

  unpin() {
    if (this.at.row === undefined && this.at.column === undefined) return false;
    Object.assign(this.at, { row: undefined, column: undefined });
    this.showPins();
    this.page.keepAddress();
    return true;
  }

  async showPins() {
    const { row, column, sequence, layer, head } = this.at;
    const { nq, nk } = this.plane.record;
    const rowPinned = Number.isInteger(row) && row >= 0 && row < nq;
    const columnPinned = Number.isInteger(column) && column >= 0 && column < nk;
    const links = [];
    this.plane.pins = { row: rowPinned ? row : null, column: columnPinned ? column : null, links };
    this.plane.refresh();
    this.picture.show();
    const asked = (this.pinning = Symbol("only the last answer counts"));
    const place = { sequence, layer, head };
    const show = async (element, kind, index, ask) => {
      if (index === null) {
        const how = kind === "query" ? "click a cell, or press Enter" : "shift-click a cell, or press shift-Enter";
        element.replaceChildren(make("h2", "", `pinned ${kind}`), make("p", "", how));
        return;
      }
      try {
        const answer = await ask();
        if (asked !== this.pinning) return;
        const other = (at) => (kind === "query" ? { i: index, j: at } : { i: at, j: index });
        links.push(...answer.top.slice(0, 8).filter(({ weight }) => weight >= 0.01).map(({ index: at }) => other(at)));
        this.showLinks(element, kind, index, answer, other);
        this.plane.refresh();
      } catch (error) {
        if (asked !== this.pinning) return;
        element.replaceChildren(make("h2", "", `pinned ${this.nameCell(kind, index)}`), make("p", "", error.message));
        this.say(error.message);
      }
    };
    await Promise.all([
      show(this.part.row, "query", this.plane.pins.row, () => this.source.row({ ...place, query: row })),
      show(this.part.column, "key", this.plane.pins.column, () => this.source.column({ ...place, key: column })),
    ]);
  }

  showLinks(element, kind, index, { entropy, total, top, nan }, cellOf) {
    const others = kind === "query" ? "key" : "query";
    const table = make("table");
    table.append(make("caption", "", kind === "query" ? "the keys it looks at most" : "the queries that look at it most"));
    const head = make("tr");
    for (const name of [others, "token", "weight"]) {
      const cell = make("th", "", name);
      cell.scope = "col";
      head.append(cell);
    }
    table.append(head);
    const most = Math.max(...top.map(({ weight }) => weight), 1e-9);
    for (const { index: at, weight } of top) {
      const { position, text } = this.plane.labels[others](at);
      const go = make("button", "link", showCount(position));
      go.type = "button";
      go.setAttribute("aria-label", `go to ${others} ${showCount(position)}`);
      go.addEventListener("click", () => this.plane.goTo(cellOf(at), Math.max(NEAR, this.plane.at.z)));
      const bar = make("span", "bar");
      bar.style.width = `${(100 * weight) / most}%`;
      const share = make("span", "share");
      share.append(bar);
      const line = make("tr");
      const cells = [make("td"), make("td", "token"), make("td")];
      cells[0].append(go);
      cells[1].append(make("bdi", "", showToken(text, 16)));
      cells[2].append(make("span", "", weight < 1e-4 ? weight.toExponential(1) : weight.toFixed(4)), share);
      line.append(...cells);
      table.append(line);
    }
    const spread = entropy === null || entropy === undefined
      ? "" : `entropy ${entropy.toFixed(2)} bits (≈ ${showNumber(2 ** entropy)} keys)`;
    const share = kind === "query" ? "weights add to" : "it gets in all";
    const sum = total === null || total === undefined ? "" : `${share} ${showNumber(total)}`;
    element.replaceChildren(
      make("h2", "", `pinned ${this.nameCell(kind, index)}`),
      make("p", "", [kind === "query" ? spread : "", sum, nan ? `NaN in ${showCount(nan)} weights` : ""].filter(Boolean).join(" · ")),
      table,
    );
  }

  // ---- searching

  /* Find words across tokens; "#12" is the token of that number. */
  search() {
    const sought = this.part.sought.value.toLowerCase();
    const { texts = [], tokens = [] } = this.meta.sequences[this.at.sequence] ?? {};
    this.found = [];
    this.turn = -1;
    const number = /^#\s*(\d+)$/.exec(sought);
    if (number) this.found = [Number(number[1])];
    else if (sought && !sought.startsWith("#")) {
      const words = (texts.length ? texts : tokens.map((id) => ` ${id}`)).map((text) => text.toLowerCase());
      this.found = findIn(words, sought);
    }
    // by words only where the tokens are those of the sequence
    this.markOf = (kind, position) => (number || this.plane.record[`${kind[0]}Named`] ? this.indexOf(kind, position) : -1);
    const indexes = (kind) => this.found.map((position) => this.markOf(kind, position));
    const marks = { query: indexes("query"), key: indexes("key") }; // -1: not in this map
    this.found = this.found.filter((_, at) => marks.query[at] >= 0 || marks.key[at] >= 0);
    this.part.hits.textContent = sought ? `${showCount(this.found.length)} found` : "";
    this.plane.marks = marks;
    this.plane.refresh();
  }

  goToFound(asKey) {
    if (!this.found.length) return;
    this.turn = (this.turn + 1) % this.found.length;
    const [i, j] = ["query", "key"].map((kind) => this.markOf(kind, this.found[this.turn]));
    this.part.hits.textContent = `${showCount(this.turn + 1)} of ${showCount(this.found.length)}`;
    Object.assign(this.at, asKey ? { column: j } : { row: i });
    this.showPins();
    this.plane.goTo({ i, j }, Math.max(NEAR, this.plane.at.z));
  }

  /* The row or column of a position; -1 if it has none. */
  indexOf(kind, position) {
    const { nq, nk, qStart, kStart, qPositions, kPositions } = this.plane.record;
    const [count, start, gaps] = kind === "query" ? [nq, qStart, qPositions] : [nk, kStart, kPositions];
    if (gaps) return gaps.indexOf(position);
    return position >= start && position < start + count ? position - start : -1;
  }
}

/* Return the tokens at which the words start, at most MOST. */
function findIn(words, sought) {
  const starts = [];
  let length = 0;
  for (const word of words) {
    starts.push(length);
    length += word.length;
  }
  const whole = words.join("");
  const found = [];
  let token = 0;
  for (let at = whole.indexOf(sought); at >= 0 && found.length < MOST; at = whole.indexOf(sought, at + 1)) {
    while (token + 1 < starts.length && starts[token + 1] <= at) token++;
    if (found.at(-1) !== token) found.push(token);
  }
  return found;
}

