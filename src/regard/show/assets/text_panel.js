/* Beside the text: which heads, which colours, where the selection is, and what is strongest.

   Next: text_view.js */

import { make } from "./gallery.js";
import { showCount, showShare, showToken, weightOf } from "./ink.js";
import { leastChange } from "./text_pair.js";

const MOST = 8; // tokens in the table
const NAMED = 3; // tokens in the spoken sentence
const MEANING = {
  attended: ["its weight on each token", "the weight on each token, mean over the selected tokens"],
  attending: ["the weight that each token gives to it", "the weight that each token gives to them, added up"],
};
const BY = {
  weight: "",
  value: "A weight is multiplied by the length of its key's value vector, as a share of the longest value of this text: what a head can write from a token, before its output matrix.",
  rollout: "Rollout: the mean over the heads of each layer, half and half with the token itself (the residual stream), multiplied over all layers. It shows paths through the layers, of all heads.",
};
const MIX = {
  mean: "mean: the average over the heads. What one head does alone is faint.",
  max: "max: the largest over the heads. A token is strong if any head attends to it.",
};

export class TextPanel {
  constructor(view) {
    Object.assign(this, { view, page: view.page, part: view.part });
    this.listen();
  }

  get at() {
    return this.page.at;
  }

  showControls() {
    const { part, at, page, view } = this;
    const { which, layer, head, list, count } = view.heads;
    const records = view.recordsOf(at.sequence);
    part.which.value = which;
    part.pickLayer.hidden = which !== "layer" && which !== "head";
    part.pickHead.hidden = which !== "head";
    part.pickList.hidden = which !== "set";
    const rolled = at.by === "rollout"; // of all heads
    part.pickHeads.hidden = rolled;
    part.pickMix.hidden = part.mixWords.hidden = count === 1 || rolled;
    if (layer !== undefined) page.fill(part.textLayer, records.map((x) => x.layer), layer);
    if (head !== undefined) page.fill(part.textHead, records.find((x) => x.layer === layer).heads, head);
    if (which === "set") part.textList.value = list;
    const whole = which === "all" ? view.countAll() : count;
    const some = whole > count ? ` of ${showCount(whole)} heads, those whose cells fit into this file;` : " heads,";
    this.showWays();
    this.showPair();
    part.mixWords.textContent = `${showCount(count)}${some} ${MIX[at.mix]}`;
    part.mix.value = at.mix;
    part.scale.value = at.scale;
    part.pickLow.hidden = at.scale === "linear";
    part.textLow.value = at.least;
    part.attending.checked = at.show === "attending";
    const [first, last] = view.chosen;
    part.chosen.textContent = first === last ? `token ${view.name(first)}` : `tokens ${showCount(first)}–${showCount(last)}`;
    if (!view.sound.inWords) part.meaning.textContent = `The colours are ${MEANING[at.show][first === last ? 0 : 1]}.`;
    this.showLegend();
  }

  /* What the weights are multiplied by, and why some of it cannot be chosen. */
  showWays() {
    const { part, at, view } = this;
    const { ways = {} } = view.meta.sequences[at.sequence];
    for (const option of part.by.options) option.disabled = Boolean(ways[option.value]);
    part.by.value = at.by;
    const names = { value: "By value", rollout: "Rollout" };
    const missing = Object.entries(ways).filter(([, why]) => why).map(([name, why]) => `${names[name]}: ${why}.`);
    part.byWords.textContent = [BY[at.by], ...missing].filter(Boolean).join(" ");
  }

  /* Which of two runs is shown, and the heads that changed most. */
  showPair() {
    const { part, at, page, view } = this;
    const { pair } = view;
    part.pair.hidden = !pair;
    if (!pair) return;
    const names = pair.names.map((name) => showToken(name, 24).replaceAll("·", " "));
    page.fill(part.versus, [["0", names[0]], ["1", names[1]], ["side", "both, side by side"], ["diff", `${names[1]} − ${names[0]}`]], at.versus || `${at.sequence}`);
    const other = at.versus && view.otherRange;
    const moved = other && other.join() !== view.chosen.join() ? ` There, tokens ${other.map(showCount).join("–")} are selected.` : "";
    const alone = pair.partners[at.sequence].includes(-1) ? " Tokens of one run alone have no colour." : "";
    const change = view.isDifference ? ` The colours are how much larger it is in ${names[1]} than in ${names[0]}.${alone}${moved}` : "";
    part.pairWords.textContent = `Aligned: ${pair.how}.${change || moved}`;
    const table = make("table");
    table.append(make("caption", "", "heads by the share of weight that moved"));
    const here = ([layer, head]) => view.recordsOf(at.sequence).some((x) => x.layer === layer && x.heads.includes(head));
    for (const [layer, head, moved] of pair.heads.filter(here).slice(0, MOST)) {
      const go = make("button", "link", `L${layer} h${head}`);
      go.type = "button";
      go.setAttribute("aria-label", `choose layer ${layer} head ${head}`);
      go.addEventListener("click", () => page.set({ layer, head, heads: `${layer}.${head}` }));
      const line = make("tr");
      const cells = [make("td"), make("td", "", moved === null ? "NaN" : moved.toFixed(3))];
      cells[0].append(go);
      line.append(...cells);
      table.append(line);
    }
    part.pairHeads.replaceChildren(table);
  }

  /* A change in words: a range where weights are not in the file. */
  tellChange(at) {
    const { pair, changes } = this.view;
    const change = changes[at];
    if (change === null) return pair.partnerOf(this.at.sequence, at) < 0 ? `only in ${pair.names[this.at.sequence]}` : "masked";
    const { low, high, a, b } = change;
    const sign = (x) => `${x > 0 ? "+" : ""}${showSmall(x)}`;
    const range = ([from, to]) => (to - from > 1e-3 * to ? `${showSmall(from)} to ${showSmall(to)}` : showSmall(from));
    const size = high - low > 2e-3 * Math.max(a[1], b[1]) ? `${sign(low)} to ${sign(high)}` : sign(low);
    return `${size} (${pair.names[0]} ${range(a)}, ${pair.names[1]} ${range(b)})`;
  }

  showChanges() {
    const { part, view } = this;
    const order = view.changes.map((change, at) => [change ? Math.abs(leastChange(change)) : 0, at]).filter(([size]) => size > 0);
    order.sort(([one], [other]) => other - one);
    const table = make("table");
    table.append(make("caption", "", "largest changes"));
    for (const [, at] of order.slice(0, MOST)) {
      const go = make("button", "link", showCount(at));
      go.type = "button";
      go.setAttribute("aria-label", `select token ${view.name(at)}`);
      go.addEventListener("click", () => view.select(at, at));
      const line = make("tr");
      const cells = [make("td"), make("td", "token"), make("td", "", this.tellChange(at).replace(/ \(.*/, ""))];
      cells[0].append(go);
      cells[1].append(make("bdi", "", showToken(view.texts[at], 20)));
      line.append(...cells);
      table.append(line);
    }
    part.strongest.replaceChildren(table);
    this.page.panel.say(order.length ? `${view.nameChosen()}: ${order.slice(0, NAMED).map(([, at]) => `${showToken(view.texts[at])} ${this.tellChange(at)}`).join(", ")}` : `${view.nameChosen()}: nothing changed`);
  }

  showLegend() {
    const { part, at, page, view } = this;
    part.textLegend.getContext("2d").drawImage(page.ink.paintLegend(view.isDifference), 0, 0);
    const least = at.scale === "linear" ? 0 : Number((10 ** at.least).toPrecision(2));
    const most = at.scale === "linear" ? Number((view.largest ?? 1).toPrecision(3)) : 1;
    const what = { value: "weight × value", rollout: "rollout" }[at.by] ?? "weight";
    part.textEnds.textContent = view.isDifference ? `change −${most} … ±${least} … ${most}` : `${what} ${least} … ${most}`;
    part.textLow.setAttribute("aria-valuetext", `colours from ${least} to 1`);
  }

  /* What a file without all cells has, and how much it does not. */
  showKnown() {
    const { part, view } = this;
    const { known } = view;
    part.knownWords.hidden = !known;
    if (!known) return;
    const [first, last] = view.chosen;
    const rows = known.all ? "of a row on average" : first === last ? "of this row" : "of these rows";
    const heads = view.heads.count > 1 && !known.mean ? ", on average over the heads" : "";
    const missing = `${known.mean ? "Means" : "Weights"} below ${Number(known.least.toPrecision(2))} are not in this file. They hold at most ${Math.max(1, Math.ceil(100 * known.rest))} % ${rows}${heads}.`;
    part.knownWords.textContent = `${missing} A number that they could change is a range; others are within ${showShare(known.off)}.`;
  }

  showStrongest() {
    const { part, view } = this;
    this.showPair();
    part.whereBlock.hidden = view.isDifference;
    if (view.isDifference) return this.showChanges();
    const { codes } = view;
    const order = [];
    for (let at = 0; at < codes.length; at++) { // no sorting of 131,072 tokens
      if (codes[at] < 2 || Number.isNaN(weightOf(codes[at]))) continue;
      if (order.length === MOST && codes[at] <= codes[order.at(-1)]) continue;
      const place = order.findIndex((other) => codes[other] < codes[at]);
      order.splice(place < 0 ? order.length : place, 0, at);
      order.length = Math.min(order.length, MOST);
    }
    const table = make("table");
    table.append(make("caption", "", this.at.show === "attended" ? "strongest tokens" : "tokens that attend most"));
    for (const at of order) {
      const go = make("button", "link", showCount(at));
      go.type = "button";
      go.setAttribute("aria-label", `select token ${view.name(at)}`);
      go.addEventListener("click", () => view.select(at, at));
      const line = make("tr");
      const cells = [make("td"), make("td", "token"), make("td", "", view.tell(at, (weight) => weight.toFixed(4)))];
      cells[0].append(go);
      cells[1].append(make("bdi", "", showToken(view.texts[at], 20)));
      line.append(...cells);
      table.append(line);
    }
    part.strongest.replaceChildren(table);
    const best = order.slice(0, NAMED).map((at) => `${showToken(view.texts[at])} ${view.tell(at, (weight) => weight.toFixed(3))}`);
    const who = view.nameChosen();
    const [first, last] = view.chosen;
    const verbs = { attended: ["attends most to", "attend most to"], attending: ["is attended to most by", "are attended to most by"] };
    const verb = verbs[this.at.show][first === last ? 0 : 1];
    this.page.panel.say(order.length ? `${who} ${verb} ${best.join(", ")}` : `${who}: no token has a weight`);
  }

  /* The selection as a band of the matrix of all weights: of rows, or of columns. */
  showMatrix() {
    const { part, page, view } = this;
    const { codes, count } = view;
    const { width: size } = part.matrix;
    const brush = part.matrix.getContext("2d");
    const { colours } = page.plane;
    const [first, last] = view.chosen;
    const rows = this.at.show === "attended";
    brush.fillStyle = colours.masked;
    brush.fillRect(0, 0, size, size);
    brush.fillStyle = colours.page;
    brush.beginPath();
    const { causal } = view.recordsOf(this.at.sequence)[0];
    for (const [x, y] of causal ? [[0, 0], [size, size], [0, size]] : [[0, 0], [size, 0], [size, size], [0, size]]) brush.lineTo(x, y);
    brush.fill();
    const thick = Math.max(6, ((last + 1 - first) / count) * size);
    const top = Math.min(size - thick - 2, Math.max(2, (first / count) * size));
    for (let pixel = 0; pixel < size; pixel++) {
      const from = Math.floor((pixel / size) * count);
      const here = codes.subarray(from, Math.max(from + 1, Math.ceil(((pixel + 1) / size) * count)));
      const { css } = view.colourOf(here.reduce((most, code) => Math.max(most, weightOf(code)), 0));
      if (!css) continue;
      brush.fillStyle = css;
      brush.fillRect(...(rows ? [pixel, top, 1, thick] : [top, pixel, thick, 1]));
    }
    brush.strokeStyle = colours.accent;
    brush.lineWidth = 2;
    brush.strokeRect(...(rows ? [1, top - 1, size - 2, thick + 2] : [top - 1, 1, thick + 2, size - 2]));
    part.where.textContent = `the selected ${rows ? "rows" : "columns"} of the matrix: queries down, keys across. Press it to open the map.`;
  }

  listen() {
    const { part, view } = this;
    const onChange = (element, act) => element.addEventListener("change", () => act(element.value));
    onChange(part.which, (which) => view.choose(which));
    onChange(part.textLayer, (layer) => view.choose(part.which.value, Number(layer)));
    onChange(part.textHead, (head) => this.page.set({ head: Number(head), heads: `${view.heads.layer}.${head}` }));
    onChange(part.textList, (list) => this.page.set({ heads: list.replace(/[\s,;]+/g, ",").replace(/^,|,$/g, "") }));
    onChange(part.mix, (mix) => this.page.set({ mix }));
    part.copyText.addEventListener("click", () => view.copyText());
    onChange(part.versus, (which) => view.choosePair(which));
    onChange(part.by, (by) => this.page.set({ by }));
    onChange(part.scale, (scale) => this.page.set({ scale }));
    part.textLow.addEventListener("input", () => this.page.set({ least: Number(part.textLow.value) }));
    part.attending.addEventListener("change", () => this.page.set({ show: part.attending.checked ? "attending" : "attended" }));
    part.matrixButton.addEventListener("click", () => view.openMap());
  }
}

/* A number with three digits. */
function showSmall(number) {
  return number && Math.abs(number) < 1e-3 ? number.toExponential(2) : Number(number.toPrecision(3)).toString();
}
