"""A learner's file, graded in a process of its own.

    found = attempt(read_exercise("softmax"), Path("regard-exercises/softmax.py"))
    found.passed, found.sentence, found.drawn, found.printed

An endless loop, a sys.exit or a crash ends that process and nothing else. A file that
cannot be run at all is told in one sentence, with its line.

Next: runner.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from regard.errors import FileError
from regard.learn.exercise import Exercise, Function, read_exercise
from regard.learn.grade import Grade, grade, locate

CALL, WHOLE = 10.0, 30.0  # seconds for a call of the function, and for all
PRINTED = 2000  # characters that are shown of what a file prints


@dataclass(frozen=True)
class Attempt:
    """What came of grading a file."""

    exercise: str
    passed: bool
    sentence: str
    mistake: str = ""
    drawn: str = ""  # the smallest call, and the maps
    printed: str = ""  # by the learner's own code


def attempt(
    exercise: Exercise,
    path: Path,
    *,
    color: bool = False,
    width: int = 80,
    limits: tuple[float, float] = (CALL, WHOLE),
) -> Attempt:
    """Grade a file; limits: seconds for a call of the function, and for all."""
    whole = limits[1] * exercise.patience
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "grade.json"
        job = {
            "exercise": str(exercise.path.resolve()),
            "path": str(path.resolve()),
            "kept": str(kept),
            "limit": limits[0],
            "color": color,
            "width": width,
        }
        # -P: files beside the learner's must not hide NumPy
        command = [sys.executable, "-P", "-m", "regard.learn.attempt", json.dumps(job)]
        try:
            done = subprocess.run(  # noqa: S603 (our own interpreter)
                command,
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=whole,
            )
        except subprocess.TimeoutExpired as late:
            said = f"It took more than {whole:g} seconds: is there an endless loop?"
            printed = clean(late.stdout)
            return Attempt(exercise.name, passed=False, sentence=said, printed=printed)
        printed = clean(done.stdout)
        if not kept.exists():
            said = "Python ended before the function was graded: is there an exit()?"
            return Attempt(exercise.name, passed=False, sentence=said, printed=printed)
        return Attempt(**json.loads(kept.read_text("utf-8")), printed=printed)


def clean(printed: bytes | None) -> str:
    """Return what a file printed, shortened, without what could steer a terminal."""
    text = (printed or b"").decode("utf-8", errors="replace")
    safe = "".join(c for c in text if c.isprintable() or c in "\n\t")
    return safe if len(safe) <= PRINTED else safe[:PRINTED] + "\n…"


def load_function(path: Path, name: str) -> Function:
    """Run a learner's file and return the function of this name."""
    module = ModuleType("__regard_exercise__")
    module.__file__ = str(path)
    try:
        source = path.read_text(encoding="utf-8")
        code = compile(source, str(path), "exec")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path.name} cannot be read: {error}.") from None
    except (SyntaxError, ValueError) as error:
        text = (getattr(error, "text", "") or "").strip()
        line = f"line {getattr(error, 'lineno', '?')} ({text})"
        reason = getattr(error, "msg", error)
        raise FileError(f"Python cannot read {line}: {reason}.") from None
    try:
        exec(code, module.__dict__)  # noqa: S102
    except BaseException as error:  # noqa: BLE001 (a file may even exit)
        raise FileError(f"The file raised {locate(error, str(path))}") from None
    found = getattr(module, name, None)
    if not callable(found):
        raise FileError(
            f"there is no function {name} in {path.name}: write def {name}."
        )
    return found  # type: ignore[no-any-return]


def grade_file(exercise: Exercise, path: Path, limit: float) -> Grade:
    """Grade the function in a file; a file that cannot be run is graded wrong."""
    try:
        fn = load_function(path, exercise.function)
    except FileError as error:
        return Grade(exercise.name, passed=False, sentence=str(error))
    return grade(exercise, fn, limit=limit)


def main(job: dict[str, Any]) -> None:
    """Do what a command line asks for, and keep the grade in a file."""
    exercise = read_exercise(Path(job["exercise"]))
    sys.path.append(str(Path(job["path"]).parent))  # last: it may hide nothing
    found = grade_file(exercise, Path(job["path"]), job["limit"])
    told = {
        "exercise": found.exercise,
        "passed": found.passed,
        "sentence": found.sentence,
        "mistake": found.mistake,
        "drawn": found.draw(color=job["color"], width=job["width"]),
    }
    Path(job["kept"]).write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
