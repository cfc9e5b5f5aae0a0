/* The list of exercises: which are solved, started, open.

   Next: editor.js */

/* Return an element with children; strings become text nodes, never markup. */
export function make(tag, ...inside) {
  const made = document.createElement(tag);
  made.append(...inside);
  return made;
}

/* Return a code block that can be scrolled with the keyboard. */
export function quote(text) {
  const made = make("pre", text);
  made.tabIndex = 0;
  return made;
}

export function listExercises(list, exercises, { notes, open }) {
  list.replaceChildren(...exercises.map((exercise) => listOne(exercise, notes.of(exercise), exercise === open)));
  const current = list.querySelector("[aria-current]");
  const [box, room] = [current.getBoundingClientRect(), list.parentElement.getBoundingClientRect()];
  if (box.top < room.top || box.bottom > room.bottom) current.scrollIntoView({ block: "center" });
}

function tellState({ extra }, solved, code) {
  if (solved) return ["✓", "solved"];
  if (extra) return ["↗", "needs Python with PyTorch"];
  return code === undefined ? ["", ""] : ["…", "started"];
}

function listOne(exercise, { solved, code }, isOpen) {
  const link = make("a", exercise.title);
  link.href = `#${encodeURIComponent(exercise.name)}`;
  if (isOpen) link.setAttribute("aria-current", "page");
  const [sign, words] = tellState(exercise, solved, code);
  const mark = make("span", sign);
  mark.className = "mark";
  mark.title = words;
  mark.setAttribute("aria-hidden", "true");
  const item = make("li", mark, link);
  item.dataset.name = exercise.name;
  item.dataset.state = words;
  if (words) {
    const said = make("span", ` (${words})`);
    said.className = "unseen";
    link.append(said);
  }
  return item;
}
