"""The files that learners handed in: in folders, in zips, and saved by the web site.

    with open_submissions(Path("submissions")) as handed:
        for one in handed.files:
            one.learner, one.path, one.file

    ada/softmax.py                  a file or notebook of an exercise
    ada/regard-work.json            saved by the site: one file for each exercise in it
    ada/work.zip, ada.zip           the files in it

Of a file that is not in a folder the learner is "", but ada.zip and ada.json are files
of ada. Zips and saved work are unpacked into a temporary folder.

Next: grade_class.py
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import BadZipFile, ZipFile

from regard.errors import FileError

SAVED = "regard-learn-work-1"  # format of the site's files; assets/notes.js writes it
SKIPPED = ("progress.json",)  # written by regard learn
LARGE = 2**27  # bytes that are read of saved work, and of all files of a zip
MANY = 10_000  # files that are read of a zip
DEPTH = 1  # zips in a folder are unpacked, zips in these are not


@dataclass(frozen=True)
class Submission:
    """A file that a learner handed in."""

    learner: str
    path: Path
    file: str  # as shown in the report


@dataclass(frozen=True)
class Submissions:
    """All files that were handed in, and the learners who have a folder."""

    files: tuple[Submission, ...]
    learners: tuple[str, ...]


@contextmanager
def open_submissions(place: Path) -> Iterator[Submissions]:
    """Read a folder, a zip or saved work; unpacked files exist within the context."""
    with tempfile.TemporaryDirectory() as spare:
        folder, learners = place, list[str]()
        if place.suffix.lower() == ".zip" and place.is_file():
            folder = unzip_class(place, Path(spare))
        if folder.is_dir():
            learners = [x.name for x in folder.iterdir() if x.is_dir() and is_shown(x)]
            found = list_submissions(folder, Path(spare), DEPTH)
        else:
            found = unpack_file(Submission("", place, place.name), Path(spare), DEPTH)
        yield Submissions(tuple(found), tuple(sorted(learners)))


def is_request(place: Path) -> bool:
    """Return whether a path is JSON of a learning platform, not files of learners."""
    if not place.is_file() or place.suffix.lower() == ".zip":
        return False
    return read_saved_work(place) is None


def unzip_class(path: Path, spare: Path) -> Path:
    """Unpack a zip with a folder per learner, or with one folder around these."""
    inside = spare / path.stem
    inside.mkdir()
    unzip_file(path, inside)
    shown = [x for x in inside.iterdir() if is_shown(x)]
    around = len(shown) == 1 and any(map(Path.is_dir, shown[0].glob("[!._]*")))
    return shown[0] if around else inside


def list_submissions(folder: Path, spare: Path, depth: int) -> Iterator[Submission]:
    """Yield the files of all learners, except those that tools write."""
    for place, folders, names in os.walk(folder):  # does not follow links
        folders[:] = sorted(x for x in folders if is_shown(Path(x)))
        for name in sorted(names):
            path = Path(place) / name
            if is_shown(path) and name not in SKIPPED and ".old" not in path.suffix:
                inner = path.relative_to(folder)
                learner = inner.parts[0] if len(inner.parts) > 1 else ""
                one = Submission(learner, path, inner.as_posix())
                yield from unpack_file(one, spare, depth)


def is_shown(path: Path) -> bool:
    """Return whether a name belongs to a learner, not to a tool."""
    return not path.name.startswith((".", "__"))


def unpack_file(one: Submission, spare: Path, depth: int) -> Iterator[Submission]:
    """Yield a file, or the files in it if it is saved work or, to a depth, a zip."""
    learner = one.learner or one.path.stem
    if one.path.suffix.lower() == ".zip" and depth > 0:
        inside = Path(tempfile.mkdtemp(dir=spare))
        try:
            unzip_file(one.path, inside)
        except FileError:
            yield one  # reported as misnamed
            return
        for inner in list_submissions(inside, spare, depth - 1):
            yield Submission(learner, inner.path, f"{one.file}/{inner.file}")
    elif work := read_saved_work(one.path):
        inside = Path(tempfile.mkdtemp(dir=spare))
        for name, source in work.items():
            path = inside / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:80]}.py"
            path.write_text(source, encoding="utf-8", errors="surrogatepass")
            yield Submission(learner, path, f"{one.file}/{path.name}")
    else:
        yield one


def unzip_file(path: Path, folder: Path) -> None:
    """Unpack the files of a zip, which may neither leave the folder nor be huge."""
    try:
        with ZipFile(path) as file:
            entries = file.infolist()
            size = sum(x.file_size for x in entries)
            if size > LARGE or len(entries) > MANY:
                raise FileError(
                    f"{path.name} has {len(entries)} files of {size} bytes, expected "
                    f"at most {MANY} files of {LARGE} bytes: unzip it yourself."
                )
            for entry in entries:
                parts = PurePosixPath(entry.filename.replace("\\", "/")).parts
                safe = [x.replace(":", "_") for x in parts if x not in ("..", "/")]
                target = folder.joinpath(*safe)
                if entry.is_dir():  # a learner who handed in nothing may have one
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read(entry))
    except (BadZipFile, OSError, RuntimeError, NotImplementedError, EOFError) as error:
        raise FileError(f"{path.name} cannot be unzipped: {error}.") from None


def read_saved_work(path: Path) -> dict[str, str] | None:
    """Return the code of each exercise in a file saved by the site, or None."""
    if path.suffix.lower() != ".json" or path.stat().st_size > LARGE:
        return None
    try:
        told = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(told, dict) or told.get("format") != SAVED:
        return None
    exercises = told.get("exercises")
    found = exercises.items() if isinstance(exercises, dict) else ()
    return {name: one["code"] for name, one in found if has_code(one)}


def has_code(one: Any) -> bool:
    """Return whether an exercise of saved work was begun."""
    return isinstance(one, dict) and isinstance(one.get("code"), str)
