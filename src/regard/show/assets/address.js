/* Where the state of a page is kept as text, so that a link or a notebook reopens it.

     HashAddress    after the # of the address bar
     HeldAddress    in a notebook's cell: the address bar is not ours

   Next: page.js */

export class HashAddress {
  read() {
    this.known = window.location.hash.slice(1);
    return this.known;
  }

  /* Put a state in the place of the last one, unless the reader is on the way elsewhere. */
  keep(text) {
    if (window.location.hash.slice(1) !== this.known) return;
    window.history.replaceState(null, "", `#${text}`);
    this.read();
  }

  /* Go to a state, so that "back" leads here again. */
  go(text) {
    window.location.hash = `#${text}`;
  }

  get link() {
    return window.location.href;
  }

  onChange(act) {
    window.addEventListener("hashchange", act);
  }
}

export class HeldAddress {
  constructor(text, onKeep) {
    Object.assign(this, { text, onKeep });
  }

  read() {
    return this.text;
  }

  keep(text) {
    this.text = text;
    this.onKeep(text);
  }

  go(text) {
    this.keep(text);
    this.act();
  }

  get link() {
    return `#${this.text}`;
  }

  onChange(act) {
    this.act = act;
  }
}
