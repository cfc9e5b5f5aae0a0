/* Beside the gallery: the ten heads with the most, or the least, of a number.

   Of a difference only what is marked is listed: the rest may be chance.

   Next: data.js */

import { make, showPair } from "./data.js";

const MOST = 10;

export function listOrder(atlas, shown, { statistic, view, up }, { onOpen, onTurn }) {
  const places = atlas.heads.flatMap((count, layer) => Array.from({ length: count }, (_, head) => ({ layer, head })));
  const size = ({ layer, head }) => shown.signed ? Math.abs(shown.mean[layer][head]) : shown.mean[layer][head];
  const isListed = ({ layer, head }) => (shown.signed ? shown.marked[layer][head] === 1 : shown.mean[layer][head] !== null);
  const isUp = up !== (!shown.signed && atlas.find(statistic).ascending);
  const sign = isUp ? 1 : -1;
  const listed = places.filter(isListed).sort((a, b) => sign * (size(a) - size(b))).slice(0, MOST);
  const which = isUp ? "smallest" : "largest";
  const title = make("h2", "", shown.signed ? `${which} marked differences` : `${which} ${statistic}`);
  const turn = make("button", "turn", isUp ? "largest first" : "smallest first");
  turn.type = "button";
  turn.addEventListener("click", () => {
    onTurn();
    document.querySelector(".turn").focus(); // the list was made anew
  });
  const line = make("div", "line-of");
  line.append(title, turn);
  if (!listed.length) return [line, make("p", "", shown.signed ? "no difference is marked" : "no head has a value")];
  return [line, makeTable(atlas, listed, statistic, view, onOpen)];
}

function makeTable(atlas, places, statistic, view, onOpen) {
  const views = view === "diff" ? ["diff", "a", "b"] : [view];
  const table = make("table", "numbers");
  const names = { a: atlas.nameOf("a"), b: atlas.nameOf("b"), diff: "difference" };
  const titles = ["head", ...views.map((x) => (view === "diff" ? names[x] : atlas.find(statistic).unit))];
  table.append(makeLine(titles.map((words) => Object.assign(make("th", "", words), { scope: "col" }))));
  for (const place of places) {
    const button = make("button", "link", `L${place.layer} h${place.head}`);
    button.type = "button";
    button.ariaLabel = `L${place.layer} h${place.head}: open layer ${place.layer} head ${place.head}`;
    button.addEventListener("click", () => onOpen(place));
    const first = make("td");
    first.append(button);
    table.append(makeLine([first, ...views.map((x) => make("td", "", showPair(atlas.read(statistic, x, place))))]));
  }
  return table;
}

export function makeLine(cells) {
  const line = make("tr");
  line.append(...cells);
  return line;
}
