/* Controls the Python worker: one request at a time, terminated on timeout.

     python.ask("check", "course/softmax.py", text)   the result, or { trouble }
     python.stop("Stopped.")                           terminate it and start another

   A worker from a blob inherits the page's Content-Security-Policy, so it cannot reach other hosts.

   Next: worker.js */

const LIMIT = 20; // seconds for a check
const START = `import ${JSON.stringify(new URL("worker.js", import.meta.url).href)};`;

export class Python {
  constructor(onState) {
    this.onState = onState;
    this.job = null; // { message, tell }
    this.start();
  }

  get busy() {
    return this.job !== null;
  }

  start() {
    this.ready = false;
    this.broken = null;
    this.onState("loading", "Python is loading …");
    const address = URL.createObjectURL(new Blob([START], { type: "text/javascript" }));
    const worker = new Worker(address, { type: "module" });
    this.worker = worker;
    worker.addEventListener("message", ({ data }) => {
      if (worker === this.worker) this.hear(data); // ignores terminated workers
    });
    worker.addEventListener("error", (event) => {
      event.preventDefault();
      if (worker === this.worker) this.hear({ kind: "failed", sentence: `Python did not start: ${event.message}` });
    });
  }

  ask(kind, place, text) {
    if (this.broken) return Promise.resolve({ trouble: this.broken });
    return new Promise((tell) => {
      this.job = { message: { kind, place, text }, tell };
      if (this.ready) this.send();
    });
  }

  send() {
    const said = `It did not answer within ${LIMIT} seconds: is there an endless loop?`;
    this.timer = setTimeout(() => this.stop(said), 1000 * LIMIT);
    this.worker.postMessage(this.job.message);
  }

  stop(sentence) {
    const began = this.ready;
    if (began) this.worker.terminate();
    this.finish({ trouble: sentence });
    if (began) this.start();
  }

  finish(found) {
    clearTimeout(this.timer);
    const { job } = this;
    this.job = null;
    job?.tell(found);
  }

  hear({ kind, sentence, found }) {
    if (kind === "ready") {
      this.ready = true;
      this.onState("ready", sentence);
      if (this.job) this.send();
    } else if (kind === "found") this.finish(found);
    else if (kind === "lost") this.stop(sentence);
    else {
      this.broken = sentence;
      this.onState("failed", sentence);
      this.finish({ trouble: sentence });
    }
  }
}
