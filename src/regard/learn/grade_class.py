"""Grade the submissions of a class: every learner, every exercise, and what is missing.

    report = grade_folder(Path("submissions"))      submissions/ada/softmax.ipynb, …
    report = grade_submissions(json_text)           the same, from a learning platform
    print(report.summarize())
    report.to_json(), report.to_csv()

One row per learner and exercise has a status:

    right, wrong    graded               unwritten    the stub was handed in
    missing         nothing handed in    misnamed     a file that is no exercise
    unassigned      a file of an exercise that was not assigned; not graded

The files run in separate processes, several at a time. The JSON is described in
docs/learn.md.

Next: plugin.py
"""

from __future__ import annotations

import csv
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from io import StringIO
from pathlib import Path
from typing import Any

from regard.errors import FileError
from regard.learn.exercise import Exercise
from regard.learn.grade_file import Attempt, attempt
from regard.learn.notebook_file import read_code_cells
from regard.learn.submissions import Submission, open_submissions

FORMAT = "regard-learn-1"
SUFFIXES = (".py", ".ipynb")
LARGE = 2**20  # bytes of a misnamed file that are searched for a function


@dataclass(frozen=True)
class ResultRow:
    """The result of one learner in one exercise, or of one misnamed file."""

    learner: str
    exercise: str
    status: str  # right, wrong, unwritten, missing, misnamed or unassigned
    mistake: str = ""
    sentence: str = ""
    call: str = ""
    file: str = ""


@dataclass(frozen=True)
class ClassReport:
    """The results of a class."""

    rows: tuple[ResultRow, ...]

    def count(self, part: str) -> dict[str, dict[str, Any]]:
        """Return how many are right, and of how many, by learner or by exercise."""
        named = [row for row in self.rows if is_due(row)]
        pairs: dict[str, dict[tuple[str, str], list[str]]] = {}
        for row in named:
            found = pairs.setdefault(getattr(row, part), {})
            found.setdefault((row.learner, row.exercise), []).append(row.status)
        return {
            name: {
                "right": sum("right" in statuses for statuses in found.values()),
                "of": len(found),
            }
            for name, found in pairs.items()
        }

    def count_mistakes(self) -> dict[str, dict[str, int]]:
        """Return how often each message was given, by exercise."""
        found: dict[str, Counter[str]] = {}
        for row in self.rows:
            if row.status == "wrong":
                found.setdefault(row.exercise, Counter())[row.sentence] += 1
        return {name: dict(counts.most_common()) for name, counts in found.items()}

    def summarize(self) -> str:
        """Return the results per learner and per exercise as text."""
        lines: list[str] = []
        for part in ("learner", "exercise"):
            counts = self.count(part)
            width = max([len(part), *(len(name or "–") for name in counts)])
            lines += [f"{part:{width}}  right"]
            for name, found in counts.items():
                share = f"{found['right']} of {found['of']}"
                lines.append(
                    f"{name or '–':{width}}  {share}{self.explain(part, name)}"
                )
            lines.append("")
        misnamed = [row for row in self.rows if row.status == "misnamed"]
        lines += [f"{row.file}: {row.sentence}" for row in misnamed]
        unassigned = Counter(
            row.exercise for row in self.rows if row.status == "unassigned"
        )
        if unassigned:
            names = ", ".join(f"{name} ({n})" for name, n in unassigned.items())
            lines.append(f"not graded, because it was not assigned: {names}")
        return "\n".join(lines).rstrip() + "\n"

    def explain(self, part: str, name: str) -> str:
        """Return what is missing of a learner, or the commonest message."""
        mine = [row for row in self.rows if getattr(row, part) == name]
        if part == "learner":
            absent = [row.exercise for row in mine if row.status == "missing"]
            return f"   missing: {', '.join(absent)}" if absent else ""
        counts = self.count_mistakes().get(name)
        if not counts:
            return ""
        sentence, times = next(iter(counts.items()))
        short = sentence if len(sentence) <= 60 else f"{sentence[:59]}…"
        return f"   {times}× {short}"

    def to_json(self) -> str:
        """Return all rows and both summaries as JSON."""
        mistakes = self.count_mistakes()
        exercises = {
            name: found | {"messages": mistakes.get(name, {})}
            for name, found in self.count("exercise").items()
        }
        told = {
            "format": FORMAT,
            "results": [asdict(row) for row in self.rows],
            "learners": self.count("learner"),
            "exercises": exercises,
        }
        return json.dumps(told, indent=1, ensure_ascii=False)

    def to_csv(self) -> str:
        """Return all rows as CSV, safe for spreadsheets."""
        out = StringIO(newline="")
        writer = csv.writer(out)
        writer.writerow([x.name for x in fields(ResultRow)])
        writer.writerows([map(make_safe, asdict(row).values()) for row in self.rows])
        return out.getvalue()


def make_safe(text: str) -> str:
    """Quote text that a spreadsheet would evaluate as a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def grade_folder(
    folder: Path,
    course: Mapping[str, Exercise],
    *,
    assigned: Sequence[str] = (),
    learners: Iterable[str] = (),
) -> ClassReport:
    """Grade a folder per learner, the files of one learner, a zip, or saved work.

    assigned: names of exercises; by default, those that somebody handed in
    learners: names that get rows even without a folder
    """
    if not folder.exists():
        raise FileError(
            f"there is no folder {folder}, expected one with a folder per learner."
        )
    with open_submissions(folder) as handed:
        known = [*learners, *handed.learners]
        return grade_all(handed.files, course, assigned, known)


def grade_submissions(text: str, course: Mapping[str, Exercise]) -> ClassReport:
    """Grade the submissions in a JSON text, as described in docs/learn.md."""
    told = read_request(text)
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for i, one in enumerate(told["submissions"]):
            suffix = ".ipynb" if "notebook" in one else ".py"
            place = Path(folder) / str(i)
            place.mkdir()
            name = re.sub(r"[^\w.-]", "_", one["exercise"])[:80]
            path = place / f"{name}{suffix}"
            code = json.dumps(one["notebook"]) if "notebook" in one else one["source"]
            path.write_text(code, encoding="utf-8", errors="surrogatepass")
            files.append(Submission(one["learner"], path, f"{one['exercise']}{suffix}"))
        learners = told.get("learners", [])
        return grade_all(files, course, told.get("exercises", ()), learners)


def read_request(text: str) -> dict[str, Any]:
    """Return submissions as a dict; raise a FileError if a part is missing."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"the submissions are not JSON: {error}.") from None
    found = told.get("format") if isinstance(told, dict) else None
    if found != FORMAT:
        raise FileError(f'"format" is {json.dumps(found)}, expected "{FORMAT}".')
    if not isinstance(told.get("submissions"), list):
        raise FileError('"submissions" is missing, expected a list.')
    for name in ("learners", "exercises"):
        given = told.get(name, [])
        if not isinstance(given, list) or not all(isinstance(x, str) for x in given):
            raise FileError(f'"{name}" is not a list of names.')
    for i, one in enumerate(told["submissions"]):
        code = isinstance(one, dict) and ("notebook" in one or is_text(one, "source"))
        if not code or not is_text(one, "learner") or not is_text(one, "exercise"):
            raise FileError(
                f'submission {i} needs texts "learner", "exercise" and "source", or a '
                '"notebook" instead of the last.'
            )
    return told  # type: ignore[no-any-return]


def is_text(one: Mapping[str, Any], name: str) -> bool:
    """Return whether a part of a submission is a text."""
    return isinstance(one.get(name), str)


def grade_all(
    files: Iterable[Submission],
    course: Mapping[str, Exercise],
    assigned: Sequence[str],
    learners: Iterable[str],
) -> ClassReport:
    """Grade files, several at a time; add rows for what is missing or misnamed."""
    for name in assigned:
        if name not in course:
            raise FileError(
                f'no exercise "{name}", expected one of {", ".join(course)}.'
            )
    graded, rows = [], []
    for one in files:
        wanted = one.path.suffix in SUFFIXES and one.path.stem in course
        if wanted and (not assigned or one.path.stem in assigned):
            graded.append(one)
        else:
            rows.append(refuse_file(one, course))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda one: attempt(course[one.path.stem], one.path), graded)
        pairs = zip(graded, found, strict=True)
        rows += [make_row(one, result) for one, result in pairs]
    handed = {(row.learner, row.exercise) for row in rows if is_due(row)}
    due = [x for x in course if x in (assigned or {name for _, name in handed})]
    everyone = {
        *learners,
        *(row.learner for row in rows if row.learner or row.exercise),
    }
    rows += [
        ResultRow(learner, name, "missing", sentence="Nothing was handed in.")
        for learner in everyone
        for name in due
        if (learner, name) not in handed
    ]
    order = {name: i for i, name in enumerate(course)}
    rows.sort(key=lambda x: (x.learner, order.get(x.exercise, len(order)), x.file))
    return ClassReport(tuple(rows))


def is_due(row: ResultRow) -> bool:
    """Return whether a row is of an assigned exercise."""
    return row.status not in ("misnamed", "unassigned")


def refuse_file(one: Submission, course: Mapping[str, Exercise]) -> ResultRow:
    """Return the row of a file that is not graded."""
    said, name = explain_name(one.path, course), one.path.stem
    if one.path.suffix in SUFFIXES and name in course:
        return ResultRow(one.learner, name, "unassigned", sentence=said, file=one.file)
    return ResultRow(one.learner, "", "misnamed", sentence=said, file=one.file)


def make_row(one: Submission, found: Attempt) -> ResultRow:
    """Return the row of a graded file."""
    status = "right" if found.passed else "wrong"
    if found.sentence.endswith("is not written yet."):
        status = "unwritten"
    said = found.mistake, found.sentence, found.call
    return ResultRow(one.learner, found.exercise, status, *said, file=one.file)


def explain_name(path: Path, course: Mapping[str, Exercise]) -> str:
    """Return why a file was not graded, and what to name it."""
    if path.suffix in SUFFIXES and path.stem in course:
        return f"{path.stem} is not one of the assigned exercises; it is not graded."
    functions = {x.function: x.name for x in course.values()}
    defined = [functions[x] for x in list_functions(path) if x in functions]
    stem = path.name.partition(".")[0].lower()
    near = defined or get_close_matches(stem, course, n=1, cutoff=0.7)
    near = near or [x for x in course if stem.startswith(x)][-1:]
    suffix = path.suffix if path.suffix in SUFFIXES else ".py"
    if len(set(near)) == 1:
        return f"this is not the name of an exercise; expected {near[0]}{suffix}?"
    return "this is not the name of an exercise; it is not graded."


def list_functions(path: Path) -> list[str]:
    """Return the functions that a misnamed file defines, without running it."""
    try:
        if path.suffix == ".ipynb":
            text = "\n".join(read_code_cells(path))
        else:
            with path.open("rb") as file:
                text = file.read(LARGE).decode("utf-8", errors="replace")
    except (OSError, FileError):
        return []
    return re.findall(r"^def (\w+)\(", text, re.MULTILINE)
