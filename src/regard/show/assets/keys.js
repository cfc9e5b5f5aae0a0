/* What the keys do; the table in index.html says the same to the reader.

   Next: panel.js */

/* Act on a key, unless something that is typed into has it. */
export function press(page, event) {
  if (event.ctrlKey || event.metaKey || event.altKey || page.part.help.open) return;
  if (event.target.closest("input, select, textarea")) return;
  const keys = { map: keysOfMap, text: keysOfText }[page.root.dataset.view];
  const act = keysAnywhere(page)[event.key] ?? keys?.(page, event)[event.key];
  if (!act) return;
  event.preventDefault();
  act();
}

function keysAnywhere(page) {
  return {
    "?": () => page.part.help.showModal(),
    t: () => page.turnTheme(),
  };
}

function keysOfText({ text, part, root }, { shiftKey, target }) {
  const keys = {
    a: () => text.turn("show", ["attended", "attending"]),
    h: () => text.turnWhich(),
    l: () => text.turn("scale", ["log", "linear"]),
    c: () => text.turnPair(),
    y: () => text.copyText(),
    m: () => text.turn("mix", ["mean", "max"]),
    v: () => text.openMap(),
    "[": () => text.step("head", -1),
    "]": () => text.step("head", 1),
    "{": () => text.step("layer", -1),
    "}": () => text.step("layer", 1),
  };
  if (target !== part.reading && target !== root) return keys; // a button has its own Enter
  return {
    ...keys,
    ArrowLeft: () => text.move(-1, shiftKey),
    ArrowRight: () => text.move(1, shiftKey),
    ArrowUp: () => text.moveLine(-1, shiftKey),
    ArrowDown: () => text.moveLine(1, shiftKey),
    PageUp: () => text.moveLine(-text.linesInSight, shiftKey),
    PageDown: () => text.moveLine(text.linesInSight, shiftKey),
    Home: () => text.move(-Infinity, shiftKey),
    End: () => text.move(Infinity, shiftKey),
    Enter: () => text.openMap(),
    Escape: () => text.move(0, false),
  };
}

function keysOfMap(page, { shiftKey, target }) {
  const { plane, part } = page;
  const keys = {
    "+": () => plane.zoomBy(1.5),
    "=": () => plane.zoomBy(1.5),
    "-": () => plane.zoomBy(1 / 1.5),
    0: () => plane.fit(),
    d: () => page.goToDiagonal(),
    m: () => page.set({ how: page.at.how === "max" ? "mass" : "max" }),
    c: () => page.turnCompare(),
    "[": () => page.stepHead(-1),
    "]": () => page.stepHead(1),
    "{": () => page.stepLayer(-1),
    "}": () => page.stepLayer(1),
    v: () => page.openText(),
    "/": () => part.sought.select(),
    g: () => {
      part.sought.value = "#";
      part.sought.focus();
    },
    Escape: () => page.panel.unpin() || page.goHome(),
  };
  if (target !== part.plane && target !== page.root) return keys; // a button has its own Enter
  return {
    ...keys,
    ArrowLeft: () => plane.moveCursor(0, -1, shiftKey),
    ArrowRight: () => plane.moveCursor(0, 1, shiftKey),
    ArrowUp: () => plane.moveCursor(-1, 0, shiftKey),
    ArrowDown: () => plane.moveCursor(1, 0, shiftKey),
    Enter: () => plane.cursor && page.panel.pin(plane.cursor, shiftKey),
  };
}
