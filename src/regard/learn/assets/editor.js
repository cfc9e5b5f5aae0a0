/* A text area for Python code: Tab indents, Enter keeps the indent, Backspace removes one.

   After Escape, Tab leaves the editor, so that there is no keyboard trap.

   Next: python.js */

const INDENT = "    ";

export function attachEditor(area, lines, { onChange, onCheck, onRun }) {
  let leaving = false;

  function changed() {
    number();
    onChange(area.value);
  }

  function number() {
    const count = area.value.split("\n").length;
    lines.textContent = Array.from({ length: count }, (_, at) => at + 1).join("\n");
    lines.scrollTop = area.scrollTop;
  }

  area.addEventListener("input", changed);
  area.addEventListener("scroll", () => (lines.scrollTop = area.scrollTop));
  area.addEventListener("blur", () => (leaving = false));
  area.addEventListener("keydown", (event) => {
    const { key, shiftKey, ctrlKey, metaKey, altKey } = event;
    if (event.isComposing || altKey) return;
    if (key === "Escape") leaving = true;
    else if (key === "Enter" && (ctrlKey || metaKey)) act(event, onCheck);
    else if (key === "Enter" && shiftKey) act(event, onRun);
    else if (ctrlKey || metaKey) return;
    else if (key === "Enter") act(event, () => breakLine(area));
    else if (key === "Backspace" && isIndented(area)) act(event, () => indent(area, true));
    else if (key === "Tab" && !leaving) act(event, () => indent(area, shiftKey));
    else if (key !== "Shift" && key !== "Tab") leaving = false;
  });

  return {
    set(text) {
      area.value = text;
      area.scrollTop = 0;
      number();
    },
  };
}

function act(event, what) {
  event.preventDefault();
  what();
}

/* Replace the selection so that Ctrl-Z can undo it. */
function insert(area, text) {
  const done = text ? document.execCommand("insertText", false, text) : document.execCommand("delete");
  if (done) return;
  area.setRangeText(text, area.selectionStart, area.selectionEnd, "end");
  area.dispatchEvent(new Event("input"));
}

function breakLine(area) {
  const before = area.value.slice(0, area.selectionStart);
  const line = before.slice(before.lastIndexOf("\n") + 1);
  const deeper = /:\s*(#.*)?$/.test(line) ? INDENT : "";
  insert(area, `\n${line.match(/^ */)[0]}${deeper}`);
}

/* Return whether there are only spaces, a whole indent of them, before the caret. */
function isIndented({ selectionStart: from, selectionEnd: to, value }) {
  const before = value.slice(value.lastIndexOf("\n", from - 1) + 1, from);
  return from === to && /^( {4})+$/.test(before);
}

function indent(area, back) {
  const { selectionStart: from, selectionEnd: to, value } = area;
  if (from === to && !back) {
    const column = from - (value.lastIndexOf("\n", from - 1) + 1);
    insert(area, INDENT.slice(column % INDENT.length));
    return;
  }
  const start = value.lastIndexOf("\n", from - 1) + 1;
  const lines = value.slice(start, to).split("\n");
  const moved = lines.map((line) => (back ? line.replace(/^ {1,4}/, "") : line && INDENT + line));
  const first = moved[0].length - lines[0].length;
  const all = moved.join("\n");
  if (all === value.slice(start, to)) return;
  area.setSelectionRange(start, to);
  insert(area, all);
  if (from === to) area.setSelectionRange(Math.max(start, from + first), Math.max(start, from + first));
  else area.setSelectionRange(start, start + all.length);
}
