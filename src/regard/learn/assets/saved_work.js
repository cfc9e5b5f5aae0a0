/* Save all work to a file, and open it in another browser.

     saveWork(notes)                   downloads regard-work.json
     readWork(text, exercises)         the work of this course in such a file; throws a sentence

     { "format": "regard-learn-work-1", "exercises": { "softmax": { "code", "hints", "solved", "before" } } }

   `regard learn grade` reads the same file.

   Next: course.js */

export const FILE = "regard-work.json";
const FORMAT = "regard-learn-work-1";
const KINDS = { code: "string", before: "string", hints: "number", solved: "boolean" };

export function saveWork({ exercises }) {
  const text = JSON.stringify({ format: FORMAT, exercises }, null, 1);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = FILE;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // slow browsers read it later
}

export function readWork(text, exercises) {
  const told = parse(text);
  if (told?.format !== FORMAT || typeof told.exercises !== "object") {
    throw new Error(`That is not saved work: choose a ${FILE} that this page saved.`);
  }
  const known = exercises.filter(({ name }) => Object.hasOwn(told.exercises ?? {}, name));
  if (!known.length) throw new Error("That file has no work on the exercises of this course.");
  return new Map(known.map((exercise) => [exercise, pick(told.exercises[exercise.name])]));
}

/* Return the exercises whose code would be lost if work was opened. */
export function findConflicts(work, notes) {
  return [...work].filter(([exercise, { code }]) => {
    const mine = notes.of(exercise).code;
    return mine !== undefined && mine !== code;
  });
}

/* Return what is known of an exercise in both; the code is that of the file. */
export function joinWork(mine, theirs) {
  const hints = Math.max(mine.hints ?? 0, theirs.hints ?? 0);
  return { ...theirs, hints, solved: mine.solved || theirs.solved };
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/* Return the parts of the right type. */
function pick(one) {
  return Object.fromEntries(Object.entries(one ?? {}).filter(([name, value]) => typeof value === KINDS[name]));
}
