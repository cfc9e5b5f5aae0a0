/* The web worker that runs Python: Pyodide, NumPy, and the grading modules.

   All files are loaded relative to this one, so the site works at any URL.

   Next: answers.js */

const MISSING = "Python is missing: put Pyodide and its NumPy wheel into the folder pyodide/ next to index.html.";
const FOLDER = "/regard";

const find = (name) => new URL(name, import.meta.url);

async function start() {
  const lock = await fetch(find("pyodide/pyodide-lock.json"));
  if (!lock.ok) return { kind: "failed", sentence: MISSING };
  const { loadPyodide } = await import(find("pyodide/pyodide.mjs").href);
  const source = fetch(find("regard.zip")); // downloads in parallel
  const pyodide = await loadPyodide({ indexURL: find("pyodide/").href, packages: ["numpy"], stdin: () => null, stdout() {}, stderr() {} });
  pyodide.unpackArchive(await (await source).arrayBuffer(), "zip", { extractDir: FOLDER });
  pyodide.globals.set("folder", FOLDER);
  const versions = pyodide.runPython(`
    import sys
    sys.path.insert(0, folder)
    import numpy
    f"Python {sys.version.split()[0]} and NumPy {numpy.__version__} are ready."
  `);
  const { grade_text, run_text } = pyodide.pyimport("regard.learn.in_browser");
  const DOES = { check: grade_text, run: run_text };
  self.addEventListener("message", ({ data: { kind, place, text } }) => {
    try {
      postMessage({ kind: "found", found: JSON.parse(DOES[kind](`${FOLDER}/${place}`, text)) });
    } catch (error) {
      const last = String(error.message).trim().split("\n").at(-1);
      postMessage({ kind: "lost", sentence: `Python crashed and is restarting: ${last}` });
    }
  });
  return { kind: "ready", sentence: versions, pyodide };
}

/* Run the slow first call before the learner needs it. */
function warm(pyodide) {
  pyodide.runPython("import regard; regard.attention(*3 * [numpy.ones((1, 1))])");
}

const { pyodide, ...started } = await start().catch((error) => ({ kind: "failed", sentence: `Python did not start: ${error.message}` }));
postMessage(started);
if (pyodide) warm(pyodide);
