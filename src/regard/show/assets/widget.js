/* The page in a cell of a notebook: questions go to Python as messages (widget.py).

   Next: address.js */

import { HeldAddress } from "./address.js";
import { Page } from "./page.js";

class MessageSource {
  constructor(model) {
    this.model = model;
    this.waiting = new Map(); // number of a question -> who waits
    this.asked = 0;
    this.listen = (content, buffers) => this.hear(content, buffers);
    model.on("msg:custom", this.listen);
  }

  close() {
    this.model.off("msg:custom", this.listen);
  }

  hear({ id, error, text }, buffers) {
    const waiting = this.waiting.get(id);
    if (!waiting) return; // another view of the cell has asked
    this.waiting.delete(id);
    if (error) waiting.reject(new Error(error));
    else if (buffers.length) waiting.resolve({ ...JSON.parse(text), codes: new Uint16Array(copyBytes(buffers[0])) });
    else waiting.resolve(JSON.parse(text));
  }

  ask(name, place = {}, signal = undefined) {
    const id = `${this.asked++} ${Math.random()}`;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      signal?.addEventListener("abort", () => {
        this.waiting.delete(id);
        reject(signal.reason);
      });
      this.model.send({ id, name, place });
    });
  }

  meta() {
    return this.ask("meta");
  }

  table() {
    return this.ask("table");
  }

  row(place) {
    return this.ask("row", place);
  }

  column(place) {
    return this.ask("column", place);
  }

  tile(place, signal) {
    return this.ask("tile", place, signal);
  }

  text(selection, signal) {
    return this.ask("text", selection, signal);
  }

  sound(heads, signal) {
    return this.ask("sound", heads, signal);
  }

  gallery(place) {
    return this.ask("gallery", place);
  }
}

/* A buffer of its own: a message's may start at an odd byte. */
function copyBytes(view) {
  return view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
}

function render({ model, el }) {
  const root = document.createElement("div");
  root.className = "regard cell";
  root.dataset.view = "wait";
  root.tabIndex = -1; // so that it hears keys
  root.style.height = `${model.get("height")}px`;
  root.innerHTML = model.get("body"); // our own index.html
  for (const element of root.querySelectorAll("[id], [aria-controls]")) {
    element.removeAttribute("id"); // a notebook may show several maps
    element.removeAttribute("aria-controls");
  }
  el.append(root);
  const source = new MessageSource(model);
  const address = new HeldAddress(model.get("address"), (text) => {
    model.set("address", text);
    model.save_changes();
  });
  model.on("change:address", () => {
    if (model.get("address") === address.text) return; // it is what we said
    address.text = model.get("address");
    address.act?.();
  });
  new Page(root, source, address).start();
  return () => source.close();
}

export default { render };
