/* The web worker that runs Python: Pyodide, NumPy, and the grading modules.

   All files are loaded relative to this one, so the site works at any URL.

   Next: answers.js */

const MISSING = "Python is missing: put Pyodide and its NumPy wheel into the folder pyodide/ next to index.html.";
const NO_NUMPY = "NumPy did not load: the network failed, or the file pyodide/numpy-….whl of this site is missing or damaged. Reload the page. If that does not help, the site has to be built again: regard learn --build.";
const FOLDER = "/regard";

const find = (name) => new URL(name, import.meta.url);

async function start() {
  // asked for at once; what fails is reported where it is awaited
  const [source, loader] = [fetch(find("regard.zip")), import(find("pyodide/pyodide.mjs").href)];
  for (const asked of [source, loader]) asked.catch(() => {});
  const lock = await fetch(find("pyodide/pyodide-lock.json"));
  if (!lock.ok) return { kind: "failed", sentence: MISSING };
  const { loadPyodide } = await loader;
  const pyodide = await loadPyodide({
    indexURL: find("pyodide/").href,
    packageBaseUrl: find("pyodide/").href,
    lockFileContents: await lock.text(),
    packages: ["numpy"],
    stdin: () => null,
    stdout() {},
    stderr() {},
  });
  if (!pyodide.loadedPackages.numpy) return { kind: "failed", sentence: NO_NUMPY };
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

const { pyodide, ...started } = await start().catch((error) => ({ kind: "failed", sentence: `Python did not start: ${error.message}. Reload the page to try again.` }));
postMessage(started);
if (pyodide) warm(pyodide);
