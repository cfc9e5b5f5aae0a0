"""`regard learn`: the course in a terminal, with a folder of the learner's files.

    desk = Workspace(Path("regard-exercises"))
    desk.list()                 what is solved, what comes next
    desk.open("softmax")        write the stub to softmax.py unless it exists
    desk.watch("softmax")       grade on every save; open the next when it is right
    desk.hint("softmax")        one more hint each time

progress.json in that folder records what is solved. A file is watched by polling its
modification time and size four times a second, which also works over ssh.

Next: notebook.py
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from difflib import get_close_matches
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.errors import FileError, OptionError
from regard.learn.exercise import FOLDER, Exercise, list_exercises
from regard.learn.grade_file import Attempt, attempt
from regard.learn.lessons import find_lesson

LINE = 88  # maximum width of text
PAUSE = 0.25  # seconds between two checks of a file
EXTRAS = {"torch": "torch", "model": "torch, SmolLM2"}
KEYS = "Enter one of: hint, next, list, reset, quit."


class Progress:
    """A learner's progress, stored in a JSON file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.solved: list[str] = []
        self.hints: dict[str, int] = {}  # number of hints shown, by exercise
        self.tries: dict[str, int] = {}
        self.current = ""
        if path.exists():
            self.read()

    def read(self) -> None:
        """Load the file; raise a FileError if it is damaged."""
        try:
            told = json.loads(self.path.read_text(encoding="utf-8"))
            self.solved = [str(name) for name in told["solved"]]
            self.hints = {str(k): int(n) for k, n in told["hints"].items()}
            self.tries = {str(k): int(n) for k, n in told["tries"].items()}
            self.current = str(told["current"])
        except Exception as error:  # noqa: BLE001 (the file may contain anything)
            raise FileError(
                f"{self.path} cannot be read ({type(error).__name__}: {error}). Remove "
                "it to start over; your solutions are in separate files."
            ) from None

    def save(self) -> None:
        """Write the file atomically."""
        kept = ("solved", "hints", "tries", "current")
        told = json.dumps({name: getattr(self, name) for name in kept}, indent=1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(told + "\n", encoding="utf-8")
        part.replace(self.path)


class PipeConsole(Console):
    """A console that raises BrokenPipeError; rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704 (called from an except block)


class Workspace:
    """The course and the folder with the learner's files."""

    def __init__(
        self,
        folder: Path,
        *,
        course: Path | None = None,
        console: Console | None = None,
    ) -> None:
        self.folder = folder
        self.exercises = {x.name: x for x in list_exercises(course)}
        self.progress = Progress(folder / "progress.json")
        self.console = console or PipeConsole(highlight=False)

    def say(self, text: str = "", style: str = "") -> None:
        """Print text, wrapped between words."""
        wide = min(LINE, self.console.width)
        self.console.print(Text(text, style), width=wide)

    def find(self, name: str | None = None) -> Exercise:
        """Return an exercise by name or number; by default, the current one."""
        if name is None:
            current = self.progress.current
            if current in self.exercises and current not in self.progress.solved:
                return self.exercises[current]
            left = [x for x in self.exercises if x not in self.progress.solved]
            return self.exercises[(left or list(self.exercises))[0]]
        numbered = dict(enumerate(self.exercises.values(), 1))
        if name.isdecimal() and len(name) < 9 and int(name) in numbered:
            return numbered[int(name)]
        if name not in self.exercises:
            near = get_close_matches(name, self.exercises, n=1)
            known = f"expected one of {', '.join(self.exercises)}."
            meant = f"did you mean {near[0]}?" if near else known
            raise OptionError(f'no exercise "{name}"; {meant}')
        return self.exercises[name]

    def path(self, exercise: Exercise) -> Path:
        """Return the path of the learner's file for an exercise."""
        return self.folder / f"{exercise.name}.py"

    def list(self) -> None:
        """Print the list of exercises with the progress."""
        table = Table("", "exercise", "what", "minutes", box=None)
        current = self.find().name
        for i, (name, exercise) in enumerate(self.exercises.items(), 1):
            solved = name in self.progress.solved
            mark = "✓" if solved else "→" if name == current else str(i)
            style = "green" if solved else "bold" if name == current else ""
            needs = EXTRAS.get(exercise.extra)
            what = f"{exercise.title} ({needs})" if needs else exercise.title
            table.add_row(mark, name, what, str(exercise.minutes), style=style)
        self.console.print(table)
        exercises = self.exercises.values()
        left = [x.minutes for x in exercises if x.name not in self.progress.solved]
        count = f"{len(exercises) - len(left)} of {len(exercises)} solved"
        self.say(f"\n{count}, about {sum(left)} minutes left.")
        if left:
            self.say("Continue with: regard learn watch")

    def open(self, name: str | None = None) -> Exercise:
        """Write the stub unless the file exists, and print the text."""
        exercise = self.find(name)
        path = self.path(exercise)
        self.progress.current = exercise.name
        self.progress.save()
        if not path.exists():
            path.write_text(exercise.stub, encoding="utf-8")
        number = list(self.exercises).index(exercise.name) + 1
        self.say(f"\n{number}. {exercise.title}", "bold")
        self.say(f"about {exercise.minutes} minutes\n", "dim")
        self.say(join_lines(exercise.text))
        missing = [x for x in exercise.needs if x not in self.progress.solved]
        if missing:
            self.say(f"\nIt builds on {', '.join(missing)}.", "dim")
        if exercise.extra:
            self.say(f"\nIt needs {EXTRAS[exercise.extra]}.", "dim")
        lesson = find_lesson(exercise.name)
        if lesson is not None and exercise.path.parent == FOLDER:
            where = Text(f"\nLesson {lesson.title}: {lesson.path}", "dim")
            self.console.print(where, soft_wrap=True)  # a path is copied as one line
        self.say(f"\nYour file: {path}", "bold")
        return exercise

    def grade(self, exercise: Exercise) -> Attempt:
        """Grade the learner's file, print the result and record the progress."""
        color = self.console.is_terminal and self.console.color_system == "truecolor"
        width = min(100, self.console.width)
        found = attempt(exercise, self.path(exercise), color=color, width=width)
        if found.printed:
            self.say(f"{found.printed.rstrip()}\n", "dim")
        if found.passed:
            self.say("✓ Right.", "bold green")
        elif found.sentence.endswith("is not written yet."):
            self.say(found.sentence)
        else:
            self.say(f"✗ {found.sentence}", "bold red")
        if found.drawn:
            drawn = Text.from_ansi(found.drawn)
            self.console.print(Text("\n"), drawn, sep="", soft_wrap=True)
        tries = self.progress.tries
        tries[exercise.name] = tries.get(exercise.name, 0) + 1
        if found.passed and exercise.name not in self.progress.solved:
            self.progress.solved.append(exercise.name)
        self.progress.save()
        return found

    def hint(self, name: str | None = None) -> None:
        """Print the hints shown so far and the next one."""
        exercise = self.find(name)
        told = min(3, max(1, self.progress.hints.get(exercise.name, 0) + 1))
        self.progress.hints[exercise.name] = told
        self.progress.save()
        for i, text in enumerate(exercise.hints[:told], 1):
            self.say(f"Hint {i} of 3 for {exercise.name}: {text}")

    def reset(self, name: str | None = None) -> None:
        """Restore the stub; keep a copy of the learner's file next to it."""
        exercise = self.find(name)
        path = self.path(exercise)
        if path.exists() and path.read_bytes() != exercise.stub.encode():
            names = (path.with_suffix(f".old{n or ''}") for n in count())
            old = next(x for x in names if not x.exists())
            path.replace(old)
            self.say(f"Your code is now in {old}.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(exercise.stub, encoding="utf-8")
        if exercise.name in self.progress.solved:
            self.progress.solved.remove(exercise.name)
        self.progress.hints.pop(exercise.name, None)
        self.progress.save()
        self.say(f"{path} is the stub again.")

    def follow(self, exercise: Exercise) -> Exercise | None:
        """Return the next unsolved exercise after this one, or None."""
        names = list(self.exercises)
        at = names.index(exercise.name) + 1
        for name in (*names[at:], *names[:at]):
            if name not in self.progress.solved and name != exercise.name:
                return self.exercises[name]
        return None

    def next(self) -> None:
        """Open the exercise after the current one."""
        following = self.follow(self.find())
        if following is None:
            self.say("There is none left.")
        else:
            self.open(following.name)

    def watch(
        self,
        name: str | None = None,
        *,
        listen: Callable[[], Callable[[], str | None]] | None = None,
    ) -> None:
        """Grade on every save and open the next exercise; "quit" or Ctrl-C ends."""
        hear = (listen or listen_to_keys)()
        exercise: Exercise | None = self.open(name)
        self.say(f"{KEYS} Saving the file grades it.\n", "dim")
        seen: Any = None
        while exercise is not None:
            stamp = read_stamp(self.path(exercise))
            word = hear()
            if stamp is not None and stamp != seen:
                if self.grade(exercise).passed:
                    exercise, seen = self.celebrate(exercise), None
                    continue
                self.say(f"\nWatching {self.path(exercise)}. {KEYS}\n", "dim")
                seen = stamp
            if word == "quit":
                break
            exercise, seen = self.obey(word, exercise, seen)
            time.sleep(PAUSE)
        if exercise is None:
            self.say("That was the last one.", "bold green")

    def obey(
        self, word: str | None, exercise: Exercise, seen: Any
    ) -> tuple[Exercise, Any]:
        """Run a typed command; return the exercise and the stamp to watch."""
        if word == "hint":
            self.hint(exercise.name)
        elif word == "list":
            self.list()
        elif word == "reset":
            self.reset(exercise.name)
            seen = read_stamp(self.path(exercise))
        elif word == "next":
            following = self.follow(exercise)
            if following is not None:
                return self.open(following.name), None
            self.say("There is none left.")
        elif word:
            self.say(KEYS)
        return exercise, seen

    def celebrate(self, exercise: Exercise) -> Exercise | None:
        """Show the reference solution and open the next exercise."""
        self.say("\nThis is how we would write it:\n")
        self.say(exercise.solution)
        following = self.follow(exercise)
        return None if following is None else self.open(following.name)


def join_lines(text: str) -> str:
    """Join the lines of each paragraph; keep indented blocks, strip heading marks."""
    parts = [x.removeprefix("## ") for x in text.split("\n\n")]
    return "\n\n".join(
        x if x.startswith((" ", "-")) else " ".join(x.split("\n")) for x in parts
    )


def read_stamp(path: Path) -> tuple[int, int] | None:
    """Return the modification time and size of a file; None if it does not exist."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size


def listen_to_keys() -> Callable[[], str | None]:
    """Read lines in a thread; return a function that returns the next one or None."""
    typed: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            typed.put(line.strip().lower())

    if os.isatty(0):
        threading.Thread(target=read, daemon=True).start()

    def hear() -> str | None:
        return None if typed.empty() else typed.get()

    return hear
