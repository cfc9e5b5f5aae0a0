"""Grade a learner's file or notebook in a separate process.

    found = attempt(read_exercise("softmax"), Path("regard-exercises/softmax.py"))
    found.passed, found.sentence, found.drawn, found.printed

An endless loop, a sys.exit or a crash affects only that process. If a file cannot be
run, the message names the line.

Next: workspace.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from regard.errors import FileError
from regard.learn.exercise import Exercise, Function, read_exercise
from regard.learn.grade import Grade, grade, locate_error

CALL, WHOLE = 10.0, 30.0  # seconds for one call of the function, and in total
PRINTED = 2000  # maximum number of characters shown of the output of a file
LINE = 400  # maximum number of characters shown of a line of the file
MEMORY = 2**31  # bytes that a learner's code may allocate


@dataclass(frozen=True)
class Attempt:
    """The result of grading a file."""

    exercise: str
    passed: bool
    sentence: str
    mistake: str = ""
    call: str = ""  # the smallest failing call, as code
    drawn: str = ""  # the smallest failing call and the heatmaps
    printed: str = ""  # output of the learner's code


def attempt(
    exercise: Exercise,
    path: Path,
    *,
    color: bool = False,
    width: int = 80,
    limits: tuple[float, float] = (CALL, WHOLE),
) -> Attempt:
    """Grade a file; limits: seconds for one call of the function, and in total."""
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
        # -P: files next to the learner's must not shadow NumPy
        command = [
            sys.executable,
            "-P",
            "-m",
            "regard.learn.grade_file",
            json.dumps(job),
        ]
        ended, heard = run_program(command, whole)
        printed = clean_output(heard)
        said = f"It took more than {whole:g} seconds: is there an endless loop?"
        if ended and kept.exists():
            return Attempt(**json.loads(kept.read_text("utf-8")), printed=printed)
        if ended:
            said = "Python ended before the function was graded: is there an exit()?"
        return Attempt(exercise.name, passed=False, sentence=said, printed=printed)


def run_program(command: list[str], seconds: float) -> tuple[bool, bytes]:
    """Run a program; return whether it ended in time, and the start of its output."""
    process = subprocess.Popen(  # noqa: S603 (our own interpreter)
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    heard = bytearray()

    def listen(pipe: IO[bytes]) -> None:
        with pipe:
            while piece := pipe.read1(2**16):  # type: ignore[attr-defined]
                heard.extend(piece[: 4 * PRINTED - len(heard)])  # drops the rest

    ear = threading.Thread(target=listen, args=(process.stdout,), daemon=True)
    ear.start()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False, bytes(heard)
    finally:
        process.kill()
        process.wait()
        ear.join(1)  # child processes may keep the pipe open
    return True, bytes(heard)


def clean_output(printed: bytes) -> str:
    """Return the output of a file, shortened, without control characters."""
    text = printed.decode("utf-8", errors="replace")
    safe = "".join(c for c in text if c.isprintable() or c in "\n\t")
    return safe if len(safe) <= PRINTED else safe[:PRINTED] + "\n…"


def join_to_line(text: str) -> str:
    """Return a text as one printable line, shortened."""
    line = "".join(c for c in " ".join(text.split()) if c.isprintable())
    return line if len(line) <= LINE else line[:LINE] + "…"


def load_function(path: Path, name: str) -> Function:
    """Run a learner's file or notebook and return the function of this name."""
    if path.suffix == ".ipynb" and path.exists():
        from regard.learn.notebook_file import load_from_notebook  # noqa: PLC0415

        return load_from_notebook(path, name, run_source)  # type: ignore[no-any-return]
    module = ModuleType("__regard_exercise__")
    module.__file__ = str(path)
    try:
        source = path.read_text(encoding="utf-8-sig")  # with or without a BOM
    except FileNotFoundError:
        how = f"regard learn open {path.stem}"
        raise FileError(f"{path.name} does not exist yet: {how} creates it.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path.name} cannot be read: {error}.") from None
    run_source(source, str(path), module)
    found = getattr(module, name, None)
    if not callable(found):
        raise FileError(
            f"there is no function {name} in {path.name}: write def {name}."
        )
    return found  # type: ignore[no-any-return]


def run_source(source: str, place: str, module: ModuleType) -> None:
    """Run a learner's code in a module; raise a FileError that names the line."""
    try:
        code = compile(source, place, "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        text = join_to_line(getattr(error, "text", "") or "")
        line = f"line {getattr(error, 'lineno', '?')} ({text})"
        reason = join_to_line(str(getattr(error, "msg", error)))
        raise FileError(f"Python cannot read {line}: {reason}.") from None
    try:
        exec(code, module.__dict__)  # noqa: S102
    except BaseException as error:  # noqa: BLE001 (it may call sys.exit)
        told = join_to_line(locate_error(error, place))
        raise FileError(f"The file raised {told}") from None


def grade_file(exercise: Exercise, path: Path, limit: float) -> Grade:
    """Grade the function in a file; a file that cannot be run is wrong."""
    try:
        fn = load_function(path, exercise.function)
    except FileError as error:
        return Grade(exercise.name, passed=False, sentence=str(error))
    return grade(exercise, fn, limit=limit)


def limit_memory(size: int) -> None:
    """Limit further memory of this process to size bytes, on Linux only."""
    state = Path("/proc/self/statm")
    if sys.platform == "linux" and state.exists():
        import resource  # noqa: PLC0415 (Unix only)

        limit = int(state.read_text("ascii").split()[0]) * resource.getpagesize() + size
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def main(job: dict[str, Any]) -> None:
    """Grade the file of a job and write the result to a file."""
    exercise = read_exercise(Path(job["exercise"]))
    if not exercise.extra:  # torch reserves far more than it uses
        limit_memory(MEMORY)
    sys.path.append(str(Path(job["path"]).parent))  # last, so it shadows nothing
    found = grade_file(exercise, Path(job["path"]), job["limit"])
    told = {
        "exercise": found.exercise,
        "passed": found.passed,
        "sentence": found.sentence,
        "mistake": found.mistake,
        "call": found.call,
        "drawn": found.draw(color=job["color"], width=job["width"]),
    }
    Path(job["kept"]).write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
