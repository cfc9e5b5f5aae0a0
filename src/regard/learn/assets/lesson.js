/* The page of the course: shows the open exercise and handles the buttons.

     #softmax    the URL fragment names the exercise
     notes       the learner's code and progress, in localStorage
     python      the worker that runs and grades the code

   Next: notes.js */

import { drawAnswers } from "./answers.js";
import { listExercises, make, quote } from "./course.js";
import { attachEditor } from "./editor.js";
import { Notes } from "./notes.js";
import { Python } from "./python.js";
import { FILE, findConflicts, joinWork, readWork, saveWork } from "./saved_work.js";

const part = Object.fromEntries([...document.querySelectorAll("[data-at]")].map((x) => [x.dataset.at, x]));
part.unserved.remove();
window.name = "course"; // links of the lessons, which open in a tab of their own, come back to this one
const notes = new Notes();
const python = new Python(showState); // first: it takes longest
const exercises = await readExercises();
const editor = attachEditor(part.code, part.lines, { onChange: keep, onCheck: check, onRun: run });
let open = null; // the current exercise
let shown = null; // the last grade, redrawn when the theme changes

async function readExercises() {
  const answer = await fetch("exercises.json");
  if (!answer.ok) throw new Error(`exercises.json: ${answer.status}`);
  return answer.json();
}

/* ---- navigation */

function go() {
  const name = decodeURIComponent(location.hash.slice(1)) || notes.at;
  open = exercises.find((x) => x.name === name) ?? exercises[0];
  notes.at = open.name;
  for (const text of part.lessons.querySelectorAll("[data-lesson]")) {
    text.hidden = text.dataset.lesson !== open.name;
  }
  const number = exercises.indexOf(open) + 1;
  part.title.textContent = `${number}. ${open.title}`;
  document.title = `${open.title} – learn attention by writing it`;
  part.facts.replaceChildren(...tellFacts(open));
  part.note.hidden = part.command.hidden = !open.extra;
  part.command.textContent = `pip install "regard[torch]"\nregard learn open ${open.name}`;
  part.work.hidden = open.extra !== "";
  editor.set(notes.of(open).code ?? open.stub);
  say("", "");
  if (notes.of(open).solved) part.more.append(...tellNext()); // they come back, and go on
  tell("");
  showHints();
  showReset();
  showList();
}

function tellFacts({ minutes, needs }) {
  const before = exercises.filter((x) => needs.includes(x.name));
  return [`about ${minutes} minutes`, ...before.flatMap((x, at) => [at ? ", " : " · after ", link(x, x.title)])];
}

function link({ name }, text) {
  const made = make("a", text);
  made.href = `#${encodeURIComponent(name)}`;
  return made;
}

function showList() {
  const solved = exercises.filter((x) => notes.of(x).solved).length;
  part.bar.max = exercises.length;
  part.bar.value = solved;
  part.done.textContent = `${solved} of ${exercises.length} solved`;
  listExercises(part.list, exercises, { notes, open });
}

/* ---- buttons */

function keep(code) {
  notes.change(open, { code: code === open.stub ? undefined : code });
  if (!notes.stored) tell("This browser stores nothing: save your work to a file before you close the page.");
  showReset();
}

async function check() {
  const found = await ask("check");
  if (!found) return;
  if (found.passed) notes.change(open, { solved: true });
  say(found.passed ? "right" : "wrong", found.sentence);
  shown = found;
  showMore();
  scrollToVerdict();
  showList();
}

async function run() {
  const found = await ask("run");
  if (!found) return;
  say("ran", found.sentence);
  shown = found;
  showMore();
  scrollToVerdict();
}

/* Return the result from Python, or null if there is none. */
async function ask(kind) {
  if (python.busy || open.extra) return null;
  const exercise = open;
  say("wait", python.ready ? "Running …" : "Python is still loading; your code will run then.");
  showBusy(true);
  const found = await python.ask(kind, open.place, part.code.value);
  showBusy(false);
  if (open !== exercise) return null; // another exercise was opened
  if (!found.trouble) return found;
  say("wrong", found.trouble);
  return null;
}

function showBusy(busy) {
  part.check.disabled = part.run.disabled = busy;
  part.stop.disabled = !busy;
}

function hint() {
  notes.change(open, { hints: Math.min((notes.of(open).hints ?? 0) + 1, open.hints.length) });
  showHints();
}

function showHints() {
  const count = notes.of(open).hints ?? 0;
  part.hint.textContent = `Hint (${count} of ${open.hints.length} seen)`;
  part.hint.disabled = count === open.hints.length;
  part.hints.replaceChildren();
  if (!count) return;
  part.hints.append(make("h3", "Hints"), make("ol", ...open.hints.slice(0, count).map((x) => make("li", x))));
}

/* Restore the stub; a second click restores the learner's code. */
function reset() {
  const undo = canUndo();
  const written = part.code.value;
  editor.set(undo ? notes.of(open).before : open.stub);
  notes.change(open, { before: undo ? undefined : written });
  keep(part.code.value);
  say("", "");
}

function canUndo() {
  return notes.of(open).before !== undefined && part.code.value === open.stub;
}

function showReset() {
  part.reset.textContent = canUndo() ? "Undo reset" : "Reset";
}

/* ---- work in a file */

function save() {
  saveWork(notes);
  tell(`Saved as ${FILE}, in your downloads. Open it on another computer, or hand it in.`);
}

async function openWork() {
  const [file] = part.file.files;
  part.file.value = ""; // so that the same file can be chosen again
  try {
    const work = readWork(await file.text(), exercises);
    const titles = findConflicts(work, notes).map(([{ title }]) => title);
    if (titles.length && !confirm(`This replaces your code of: ${titles.join("; ")}.`)) return;
    for (const [exercise, one] of work) notes.change(exercise, joinWork(notes.of(exercise), one));
    go();
    tell(`Opened ${file.name}: ${work.size} ${work.size === 1 ? "exercise" : "exercises"}.`);
  } catch (error) {
    tell(error.message);
  }
}

function tell(sentence) {
  part.told.textContent = sentence;
}

/* ---- output */

function say(kind, sentence) {
  part.verdict.dataset.kind = kind;
  part.verdict.textContent = sentence;
  part.more.replaceChildren();
  shown = null;
}

/* On a phone the editor and the buttons fill the window. */
function scrollToVerdict() {
  const { bottom } = part.verdict.getBoundingClientRect();
  if (bottom > 0.8 * innerHeight) part.verdict.scrollIntoView({ block: "center" });
}

function showMore() {
  if (!shown) return;
  part.more.replaceChildren();
  const { passed, call, printed } = shown;
  if (passed) part.more.append(...tellNext());
  if (shown.yours) part.more.append(drawAnswers(shown, { atol: open.atol, dark: isDark() }));
  if (call) part.more.append(make("h3", "The smallest call that shows it"), quote(call));
  if (printed) part.more.append(make("h3", "It printed"), quote(printed));
}

function tellNext() {
  const solution = make("details", make("summary", "How we would write it"), quote(open.solution));
  const next = exercises[exercises.indexOf(open) + 1];
  if (!next) return [solution];
  return [make("p", link(next, `Next: ${next.title}`)), solution];
}

function showState(state, sentence) {
  part.state.dataset.state = state;
  part.state.textContent = sentence;
}

function isDark() {
  return document.documentElement.dataset.theme === "dark";
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  part.theme.textContent = theme === "dark" ? "light" : "dark";
  showMore();
}

part.check.addEventListener("click", check);
part.run.addEventListener("click", run);
part.stop.addEventListener("click", () => python.stop("Stopped. Your code is unchanged."));
part.hint.addEventListener("click", hint);
part.reset.addEventListener("click", reset);
part.save.addEventListener("click", save);
part.open.addEventListener("click", () => part.file.click());
part.file.addEventListener("change", openWork);
part.theme.addEventListener("click", () => {
  notes.theme = isDark() ? "light" : "dark";
  setTheme(notes.theme);
});
addEventListener("hashchange", () => {
  if (python.busy) python.stop("");
  go();
  part.title.focus(); // so that screen readers announce the new title
});
const dark = matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => setTheme(notes.theme ?? (dark.matches ? "dark" : "light")));

setTheme(notes.theme ?? (dark.matches ? "dark" : "light"));
go();
