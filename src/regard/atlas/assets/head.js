/* One head: all of its numbers, and where in the corpus it did most of something.

   Examples come from whatever text a model read: they become text nodes, never markup.

   Next: ../page.py */

import { make, showNumber, showPair, showWords } from "./data.js";
import { showCount } from "./ink.js";
import { makeLine } from "./order.js";

export class Head {
  constructor(element, atlas, onClose) {
    Object.assign(this, { element, atlas, onClose });
  }

  async show({ place, statistic, view }) {
    const turn = (this.turn = {}); // what is unpacked for another head comes too late
    this.element.hidden = !place;
    if (!place) return this.element.replaceChildren();
    const { atlas } = this;
    const close = make("button", "", "close");
    close.type = "button";
    close.addEventListener("click", this.onClose);
    const line = make("div", "line-of");
    line.append(make("h2", "", `layer ${place.layer} head ${place.head}`), close);
    const name = make("p", "", showWords(atlas.layers[place.layer], 120));
    const lists = { a: [0], b: [1], diff: [0, 1] }[view].map((table) => this.startExamples(table, statistic));
    this.element.replaceChildren(line, name, this.makeNumbers(place, statistic), ...lists.map(({ box }) => box));
    for (const { box, table } of lists) {
      const all = await atlas.examples(statistic, table);
      if (turn !== this.turn) return;
      this.fillExamples(box, all[place.layer][place.head], { place, statistic, table });
    }
  }

  makeNumbers(place, statistic) {
    const { atlas } = this;
    const table = make("table", "numbers");
    const words = { a: atlas.views.length > 1 ? atlas.nameOf("a") : "value", b: atlas.nameOf("b"), diff: "difference" };
    const titles = ["statistic", ...atlas.views.map((view) => words[view])];
    table.append(makeLine(titles.map((title) => Object.assign(make("th", "", title), { scope: "col" }))));
    for (const { name, unit } of atlas.statistics) {
      const first = make("th", "", name);
      first.scope = "row";
      if (unit !== name) first.append(" ", make("small", "", unit));
      const cells = atlas.views.map((view) => {
        const found = atlas.read(name, view, place);
        return make("td", "", `${showPair(found)}${found.marked ? " •" : ""}`);
      });
      const line = makeLine([first, ...cells]);
      if (name === statistic) line.className = "current";
      table.append(line);
    }
    return table;
  }

  startExamples(table, statistic) {
    const box = make("div", "examples");
    const where = this.atlas.names.length > 1 ? ` in ${this.atlas.nameOf(table ? "b" : "a")}` : "";
    box.append(make("h2", "", `most ${statistic}${where}`));
    return { box, table };
  }

  fillExamples(box, examples, { place, statistic, table }) {
    if (!examples.length) {
      box.append(make("p", "", "no examples were kept"));
      return;
    }
    const list = make("ol");
    list.start = 0; // as --rank counts
    list.append(...examples.map(([value, source, piece, position, ...texts]) => {
      const item = make("li");
      const at = `token ${showCount(position)}${piece ? ` of piece ${showCount(piece)}` : ""}`;
      const where = make("p");
      where.append(make("b", "", showNumber(value)), " ", make("bdi", "", showWords(source, 80)), ` ${at}`);
      const text = make("p", "text");
      const tags = ["bdi", "mark", "bdi"];
      text.append(...texts.map((words, n) => make(tags[n], "", showWords(words))));
      item.append(where, text);
      return item;
    }));
    const folder = this.atlas.folders[table] ?? "DIR";
    const command = `regard atlas record ${folder} --layer ${place.layer} --head ${place.head} --statistic ${statistic} --rank 0`;
    const { cut } = this.atlas;
    if (cut) box.append(make("p", "", `this page holds ${cut} of each head, the atlas more`));
    box.append(list, make("p", "", "to see one as a map, with its number as the rank:"), make("code", "command", command));
  }
}
