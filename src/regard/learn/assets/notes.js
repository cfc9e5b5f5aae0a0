/* The learner's code and progress, in localStorage under the URL of the site.

     notes.of(exercise)    { code, before, hints, solved }, all optional

   Next: saved_work.js */

const PLACE = `regard-learn ${new URL("./", location.href).pathname}`;

export class Notes {
  constructor() {
    this.kept = read();
    this.stored = true; // false if the browser refuses to store them
  }

  of({ name }) {
    return this.kept.exercises?.[name] ?? {};
  }

  change(exercise, changes) {
    this.kept = { ...this.kept, ...read() }; // another tab may have written
    const exercises = { ...this.kept.exercises, [exercise.name]: { ...this.of(exercise), ...changes } };
    this.write({ exercises });
  }

  get exercises() {
    return this.kept.exercises ?? {};
  }

  get at() {
    return this.kept.at;
  }

  set at(name) {
    this.write({ at: name });
  }

  get theme() {
    return this.kept.theme;
  }

  set theme(name) {
    this.write({ theme: name });
  }

  write(changes) {
    this.kept = { ...this.kept, ...read(), ...changes };
    try {
      localStorage.setItem(PLACE, JSON.stringify(this.kept));
      this.stored = true;
    } catch {
      this.stored = false; // localStorage is disabled or full; the notes last until the page is closed
    }
  }
}

function read() {
  try {
    return JSON.parse(localStorage.getItem(PLACE)) ?? {};
  } catch {
    return {};
  }
}
