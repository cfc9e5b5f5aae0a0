"""Locate an edit by syntax, so that renaming, rewording and reformatting do not lose it.

A fragment matches a run of tokens of the same shape: signs, keywords, built-ins and
numbers are equal; a name matches any name, consistently (one name for one name, with
attributes and keyword arguments counted apart); a text matches any text. Comments, line
breaks, trailing commas and parentheses around a whole expression do not count. A line
"..." in a fragment skips any number of tokens. Among several matches, the one that
shares the most names and texts with the fragment wins; a tie is an error.

Only the tokens that differ between the old and the new fragment are replaced, and names
in them are replaced by the names that they matched.

Next: edits.py
"""

from __future__ import annotations

import builtins
import itertools
import keyword
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path

GAP = "..."
QUOTED = r'"(?:\\.|[^"\\\n])*"'
NUMBER = r"(?P<number>(?:0[xX]|\d|\.\d)(?:[eE][-+]|[\w.])*)"
REST = (
    NUMBER + r"|(?P<name>[^\W\d][\w$]*|\$[\w$]*)"
    r"|(?P<sign>\*\*=?|//=?|[-+*/%@&|^!=<>:]=|->|=>|===|!==|<<|>>|&&|\|\||\?\?|\?\.|\.\.\.|[^\s\w])"
)
SINGLE = QUOTED.replace('"', "'")
TEXTS = {
    ".py": r'(?P<text>(?<!\w)[rbfuRBFU]{0,2}(?:"""[\s\S]*?"""|'
    rf"{QUOTED}|{SINGLE}))",
    ".js": rf"(?P<text>{QUOTED}|{SINGLE}|`(?:\\.|[^`\\])*`"
    r"|(?<=[(,=:\[!&|?{};])\s*/(?![/*])(?:\\.|\[(?:\\.|[^\]\n])*\]|[^/\\\n])+/\w*)",
    ".css": rf"(?P<text>{QUOTED}|{SINGLE})",
    ".html": rf"(?P<text>{QUOTED})",
}
COMMENTS = {
    ".py": r"#[^\n]*",
    ".js": r"//[^\n]*|/\*[\s\S]*?\*/",
    ".css": r"/\*[\s\S]*?\*/",
    ".html": r"<!--[\s\S]*?-->",
}
WORDS = {
    ".py": {*keyword.kwlist, *dir(builtins)},
    ".js": {
        *[
            "async",
            "await",
            "break",
            "case",
            "catch",
            "class",
            "const",
            "continue",
            "default",
            "delete",
            "do",
        ],
        *[
            "else",
            "export",
            "extends",
            "false",
            "finally",
            "for",
            "from",
            "function",
            "if",
            "import",
            "in",
        ],
        *[
            "instanceof",
            "let",
            "new",
            "null",
            "of",
            "return",
            "static",
            "super",
            "switch",
            "this",
            "throw",
        ],
        *["true", "try", "typeof", "undefined", "var", "void", "while", "yield"],
    },
    ".css": set(),
    ".html": set(),
}
OPEN, CLOSE = "([{", ")]}"
BEFORE = {
    *[
        "=",
        "(",
        "[",
        "{",
        ",",
        ":",
        ":=",
        "return",
        "yield",
        "if",
        "elif",
        "while",
        "assert",
        "else",
    ]
}
AFTER = {*[")", "]", "}", ",", ":"]}


class NotLocatedError(Exception):
    """No place, or more than one, fits an edit equally well."""


@dataclass(frozen=True)
class Token:
    """A token, and where it stands: `space` tells attributes and keywords from names."""

    text: str
    kind: str
    start: int
    end: int
    space: str = ""

    @property
    def shape(self) -> str:
        """What must be equal for two tokens to match."""
        return self.text if self.kind == "sign" else f"<{self.kind}{self.space}>"


@cache
def find_pattern(language: str) -> re.Pattern[str]:
    """Return the tokens of a language as one regular expression."""
    parts = (f"(?P<comment>{COMMENTS[language]})", TEXTS[language], REST)
    return re.compile("|".join(parts))


def read_tokens(source: str, language: str) -> list[Token]:
    """Return the tokens that count."""
    found = read_every_token(source, language)
    return drop_optional(found, source) if language == ".py" else found


def read_every_token(source: str, language: str) -> list[Token]:
    """Return the tokens of a source, without comments."""
    found: list[Token] = []
    for match in find_pattern(language).finditer(source):
        kind, text = str(match.lastgroup), match.group()
        start, end, space = match.start(), match.end(), ""
        if kind == "comment":
            continue
        if kind == "text":  # texts that stand side by side are one
            start += len(text) - len(text.lstrip())
            if found and found[-1].kind == "text" and language == ".py":
                start = found.pop().start
            text = source[start:end]
        if kind == "name":
            after = bool(found) and found[-1].text in {".", "?."}
            if text in WORDS[language] and not after:
                kind = "sign"
            elif after:
                space = "."
            elif re.match(r"=(?!=)", source[end:]) and language == ".py":
                space = "="
        kind = "sign" if kind == "number" else kind
        found.append(Token(text, kind, start, end, space))
    return found


def drop_optional(tokens: list[Token], source: str) -> list[Token]:
    """Drop trailing commas, and parentheses that only hold a line together."""
    dropped: set[int] = set()
    opened: list[tuple[int, bool]] = []
    for i, token in enumerate(tokens):
        after = tokens[i + 1].text if i + 1 < len(tokens) else ""
        if token.text == "," and after and after in CLOSE:
            dropped.add(i)
        elif token.text == "," and opened:
            opened[-1] = (opened[-1][0], True)  # a tuple
        elif token.kind == "sign" and token.text in OPEN:
            opened.append((i, False))
        elif token.kind == "sign" and token.text in CLOSE and opened:
            start, several = opened.pop()
            before = tokens[start - 1] if start else None
            gap = source[token.end : tokens[i + 1].start] if after else "\n"
            held = before is not None and before.text in BEFORE
            ends = after in AFTER or "\n" in gap
            called = before is not None and (
                before.kind != "sign" or before.text in CLOSE
            )
            if token.text == ")" and i - 1 in dropped and not (several or called):
                dropped.remove(i - 1)  # (x,) is a tuple
            elif token.text == ")" and held and ends and not several:
                dropped |= {start, i}
    return [token for i, token in enumerate(tokens) if i not in dropped]


@dataclass(frozen=True)
class Source:
    """A file of the source: its path, text and tokens."""

    path: str
    text: str
    tokens: list[Token] = field(repr=False)
    shapes: str = field(repr=False)
    starts: dict[int, int] = field(repr=False)

    @classmethod
    def read(cls, path: str, text: str) -> Source:
        tokens = read_tokens(text, Path(path).suffix)
        ends = itertools.accumulate((len(x.shape) + 1 for x in tokens), initial=1)
        starts = {at: i for i, at in enumerate(ends)}
        return cls(path, text, tokens, join_shapes(tokens), starts)

    def find(self, shapes: str) -> Iterator[int]:
        """Yield where a run of tokens of these shapes begins."""
        at = -1
        while (at := self.shapes.find(shapes, at + 1)) >= 0:
            yield self.starts[at + 1]


def join_shapes(tokens: list[Token]) -> str:
    return "\0" + "".join(f"{x.shape}\0" for x in tokens)


@dataclass(frozen=True)
class Place:
    """Where a fragment matches: a token of the file for each of its tokens."""

    source: Source = field(repr=False)
    at: tuple[int, ...]  # one for each token of the fragment, gaps left out
    names: dict[tuple[str, str], str]
    score: float

    def rename(self, token: Token) -> str:
        """Return what a token of the fragment is called here."""
        if token.kind == "text":
            return rename_placeholders(
                token.text, lambda *name: self.names.get(name, name[1])
            )
        spaces = [".", "="] if token.space == "." else [token.space, "", "="]
        found = (
            self.names[space, token.text]
            for space in spaces
            if (space, token.text) in self.names
        )
        return next(found, token.text) if token.kind == "name" else token.text


@dataclass(frozen=True)
class Fragment:
    """A piece of source with gaps, split into runs of tokens."""

    text: str
    parts: list[list[Token]]

    @cached_property
    def shapes(self) -> list[str]:
        return [join_shapes(part) for part in self.parts]

    @cached_property
    def tokens(self) -> list[Token]:
        return [token for part in self.parts for token in part]

    def find(self, source: Source) -> Iterator[Place]:
        """Yield every place of a file where the fragment matches."""
        found = []
        for shapes in self.shapes:
            found.append([*source.find(shapes)])
            if not found[-1]:
                return
        best: dict[int, Place] = {}  # by the last run: the nearest of the others
        for starts in walk_starts(found, [len(part) for part in self.parts]):
            at = tuple(
                i + start
                for start, part in zip(starts, self.parts, strict=True)
                for i in range(len(part))
            )
            names = unify(self.tokens, [source.tokens[i] for i in at])
            if names is None:
                continue
            place = Place(
                source, at, names, score(self.tokens, [source.tokens[i] for i in at])
            )
            if starts[-1] not in best or best[starts[-1]].score <= place.score:
                best[starts[-1]] = place
        yield from best.values()


@cache
def read_fragment(text: str, language: str) -> Fragment:
    """Return the runs of tokens between the gaps of a fragment."""
    parts, at = [], 0
    for piece in re.split(rf"(?m)^([ ]*{re.escape(GAP)}[ ]*\n?)", text):
        if piece.strip() != GAP and piece.strip():
            tokens = read_tokens(piece, language)
            parts.append(
                [replace(x, start=x.start + at, end=x.end + at) for x in tokens]
            )
        at += len(piece)
    return Fragment(text, parts)


def walk_starts(found: list[list[int]], sizes: list[int]) -> Iterator[tuple[int, ...]]:
    """Yield every choice of one start for each run, in order; the last gap is the shortest."""
    if len(found) == 1:
        yield from ((start,) for start in found[0])
        return
    for first in found[0]:
        later = [[x for x in found[1] if x >= first + sizes[0]], *found[2:]]
        for rest in walk_starts(later, sizes[1:]):
            yield (first, *rest)


def unify(
    pattern: list[Token], tokens: list[Token]
) -> dict[tuple[str, str], str] | None:
    """Return what each name of the pattern is called, or None if that is inconsistent."""
    names: dict[tuple[str, str], str] = {}
    for ours, theirs in zip(pattern, tokens, strict=True):
        if (
            ours.kind == "name"
            and names.setdefault((ours.space, ours.text), theirs.text) != theirs.text
        ):
            return None
    for space in ("", ".", "="):
        called = [there for (where, _), there in names.items() if where == space]
        if len({*called}) != len(called):
            return None
    for ours, theirs in zip(pattern, tokens, strict=True):
        if ours.kind == "text":  # placeholders of f-strings, where they correspond
            pair = [list_placeholders(x.text) for x in (ours, theirs)]
            if len(pair[0]) == len(pair[1]):
                for name, (_, there) in zip(*pair, strict=True):
                    names.setdefault(name, there)
    return names


def list_placeholders(text: str) -> list[tuple[str, str]]:
    """Return the names inside the braces of an f-string, attributes marked."""
    found: list[tuple[str, str]] = []
    rename_placeholders(text, lambda *name: found.append(name) or name[1])  # type: ignore[func-returns-value]
    return found


def rename_placeholders(text: str, rename: Callable[[str, str], str]) -> str:
    """Return an f-string with the names inside its braces renamed; other texts unchanged."""
    if not re.match(r"\w*[fF]\w*[\"']", text):
        return text
    return re.sub(
        r"\{[^{}]*\}",
        lambda braces: re.sub(
            r"(?<![!\w])(\.?)([^\W\d]\w*)",
            lambda x: x[1] + rename(x[1], x[2]),
            braces[0],
        ),
        text,
    )


def score(pattern: list[Token], tokens: list[Token]) -> float:
    """Return the share of names and texts that are the same."""
    pairs = [
        (a.text, b.text)
        for a, b in zip(pattern, tokens, strict=True)
        if a.kind != "sign"
    ]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else 1.0


def choose(places: list[Place], what: str) -> Place:
    """Return the place that shares the most names, if there is one."""
    top = max(place.score for place in places)
    best = [place for place in places if place.score == top]
    if len(best) > 1:
        lines = [
            f"{x.source.path}:{x.source.text.count(chr(10), 0, x.source.tokens[x.at[-1]].start) + 1}"
            for x in best
        ]
        raise NotLocatedError(
            f"{what}: {len(best)} places fit equally well: {', '.join(lines)}"
        )
    return best[0]
