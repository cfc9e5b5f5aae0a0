"""The lists of deliberate errors, and how one is made in the source.

A list reads like a diff: "== file", then for each edit "# name", lines that stay (" "),
go ("-") and come ("+"), and " ..." for what is skipped. Lines may be parts of lines.

    == definition/attention.py
    # drop the scale
    -q * call.scale
    +q

"tests: a b" names the tests that run, tests/test_a.py and tests/test_b.py: at the top of a
list for all of its files, after a file for that file.

Next: run.py
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from .locate import (
    CLOSE,
    OPEN,
    NotLocatedError,
    Place,
    Source,
    Token,
    choose,
    read_every_token,
    read_fragment,
)

HERE = Path(__file__).parent
PACKAGE = HERE.parent.parent / "src" / "regard"
KNOWN = 0.5  # the share of equal names by which code is known again in another file


@dataclass(frozen=True)
class Edit:
    """One deliberate error: a fragment of a file, and what it becomes."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()

    @property
    def test_files(self) -> list[Path]:
        """The files of tests that must see it."""
        paths = (HERE.parent / name for name in self.tests)
        return [path.with_name(f"test_{path.name}.py") for path in paths]

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


def read_list(text: str) -> list[Edit]:
    """Return the edits of one list."""
    found: list[Edit] = []
    file, name = "", ""
    usual: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    lines: list[str] = []
    for line in [*text.splitlines(), "=="]:
        if line[:2] in {"==", "# "} and name:
            old, new = (
                "".join(f"{x[1:]}\n" for x in lines if x[0] in kind)
                for kind in (" -", " +")
            )
            found.append(Edit(name, file, old.rstrip("\n"), new.rstrip("\n"), tests))
            name, lines = "", []
        if line.startswith("=="):
            file, tests = line[2:].strip(), usual
        elif line.startswith("# "):
            name = line[2:]
        elif line.startswith("tests:"):
            tests = tuple(line.split()[1:])
            usual = usual if file else tests
        elif name and line:
            if line[0] not in " -+":
                raise ValueError(
                    f"{file}: {name}: a line begins with {line[0]!r}, expected ' ', '-' or '+'"
                )
            lines.append(line)
    return found


@cache
def read_lists() -> tuple[Edit, ...]:
    """Return the edits of all lists."""
    return tuple(
        x
        for path in sorted(HERE.glob("*.diff"))
        for x in read_list(path.read_text("utf-8"))
    )


@cache
def read_sources() -> dict[str, Source]:
    """Return every file of the package that can be edited."""
    paths = (
        x
        for x in sorted(PACKAGE.rglob("*"))
        if x.suffix in {".py", ".js", ".css", ".html"}
    )
    names = {path.relative_to(PACKAGE).as_posix(): path for path in paths}
    return {
        name: Source.read(name, path.read_text("utf-8")) for name, path in names.items()
    }


def locate(edit: Edit, sources: dict[str, Source]) -> Place:
    """Return where an edit is made: in its file, or where that code has been moved to."""
    language = Path(edit.file).suffix
    fragment = read_fragment(edit.old, language)
    near = edit.file.split("/")[0]
    for belongs, least in (
        (lambda path: path == edit.file, 0),
        (lambda path: path.startswith(near) and path.endswith(language), KNOWN),
        (lambda path: path.endswith(language), KNOWN),
    ):
        where = [source for path, source in sources.items() if belongs(path)]
        places = [place for source in where for place in fragment.find(source)]
        if found := [place for place in places if place.score >= least]:
            return choose(found, str(edit))
    raise NotLocatedError(f"{edit}: nothing in the source has this syntax")


def follow_files(edits: tuple[Edit, ...], sources: dict[str, Source]) -> list[Edit]:
    """Return the edits, those of a file that is gone in the file that they fit best."""
    gone = {x.file for x in edits} - {*sources}
    homes = {file: find_home(file, sources, edits) for file in gone}
    return [replace(x, file=homes.get(x.file, x.file)) for x in edits]


def find_home(file: str, sources: dict[str, Source], edits: tuple[Edit, ...]) -> str:
    """Return the file that the edits of a file that is gone fit best."""
    votes: dict[str, float] = defaultdict(float)
    language = Path(file).suffix
    for edit in edits:
        if edit.file == file:
            fragment = read_fragment(edit.old, language)
            for path, source in sources.items():
                if path.endswith(language):
                    places = fragment.find(source)
                    votes[path] += max((x.score for x in places), default=0)
    best = sorted(votes, key=lambda path: -votes[path])
    if (
        not best
        or votes[best[0]] == 0
        or (len(best) > 1 and votes[best[0]] == votes[best[1]])
    ):
        raise NotLocatedError(f"{file} is gone, and no other file fits its edits best")
    return best[0]


def apply(edit: Edit, place: Place) -> str:
    """Return the text of the file with the edit made."""
    text = place.source.text
    start, stop, made = change(edit, place)
    made = " " * is_joined(text[:start], made) + made
    made += " " * is_joined(made or text[:start], text[stop:])
    if (
        edit.file.endswith(".py")
        and not made.strip()
        and not compiles(text[:start] + text[stop:])
    ):
        made = "pass"
    return text[:start] + made + text[stop:]


def change(edit: Edit, place: Place) -> tuple[int, int, str]:
    """Return the range of the file that changes, and what comes there."""
    text, tokens = place.source.text, place.source.tokens
    old, new = (read_fragment(x, Path(edit.file).suffix) for x in (edit.old, edit.new))
    before, after = old.tokens, new.tokens
    first = count_equal(before, after)
    last = count_equal(before[first:][::-1], after[first:][::-1])
    gone, come = before[first : len(before) - last], after[first : len(after) - last]
    made = render(new.text, come, place) if come else ""
    if gone:
        at = place.at[first : len(before) - last]
        start, stop = balance(text, tokens[at[0]].start, tokens[at[-1]].end, gone)
    elif first:
        start = stop = tokens[place.at[first - 1]].end
        made = (
            new.text[after[first - 1].end : come[0].start] + made
        )  # with its line break
    else:
        start = stop = tokens[place.at[0]].start
    indent = count_indent(text, start) - (
        count_indent(new.text, come[0].start) if come else 0
    )
    made = re.sub(r"\n +", lambda x: "\n" + " " * max(0, len(x[0]) - 1 + indent), made)
    return start, stop, made


def is_joined(left: str, right: str) -> bool:
    """Return whether two sources would become one word, side by side."""
    return bool(re.search(r"\w$", left) and re.match(r"\w", right))


def count_equal(left: list[Token], right: list[Token]) -> int:
    """Return how many tokens two lists begin with alike."""
    same = (a.text == b.text for a, b in zip(left, right, strict=False))
    return next((i for i, x in enumerate(same) if not x), min(len(left), len(right)))


def count_indent(text: str, at: int) -> int:
    """Return the indentation of the line that a place is on."""
    line = text[text.rfind("\n", 0, at) + 1 :]
    return len(line) - len(line.lstrip(" "))


def balance(text: str, start: int, stop: int, tokens: list[Token]) -> tuple[int, int]:
    """Widen a range by the parentheses that hold its lines together."""
    wanted = sum(
        (x.text in OPEN) - (x.text in CLOSE) for x in tokens if x.kind == "sign"
    )
    every = read_every_token(text[start:stop], ".py")
    extra = (
        sum((x.text in OPEN) - (x.text in CLOSE) for x in every if x.kind == "sign")
        - wanted
    )
    for _ in range(extra):
        if match := re.match(r"[\s,]*\)", text[stop:]):
            stop += match.end()
    for _ in range(-extra):
        if match := re.search(r"\(\s*$", text[:start]):
            start = match.start()
    return start, stop


def render(text: str, tokens: list[Token], place: Place) -> str:
    """Return the source of tokens of a fragment, with the names of the place."""
    made, at = "", tokens[0].start
    for token in tokens:
        made += text[at : token.start] + place.rename(token)
        at = token.end
    return made


def compiles(text: str) -> bool:
    """Return whether a Python source has no syntax error."""
    try:
        compile(text, "edited", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True
