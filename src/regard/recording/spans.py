"""Find the tokens of a section of a text: a question, a document, a chat message.

    text        Be brief. Why is the sky blue?       sections  {"question": (10, 30)}
    tokens      Be| brief|.| Why| is| the| sky| blue|?         question 3:9

A section is a range of characters, a substring of the text, or a chat message, whose
content is searched in the text that the chat template produced. A token belongs to a
section if more than half of its characters do. Tokens after the text form the span
"generated".

Next: seen.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regard.errors import OptionError

Offsets = Sequence[tuple[int, int]]  # first character of each token, and one past last


@dataclass(frozen=True)
class Span:
    """A named range of tokens, start … stop - 1."""

    name: str
    start: int
    stop: int

    @property
    def slice(self) -> slice:
        """The span as a slice: weights[..., span.slice]."""
        return slice(self.start, self.stop)

    def __iter__(self) -> Iterator[int]:
        """Yield start and stop, the form that statistics take."""
        return iter((self.start, self.stop))

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.name} {self.start}:{self.stop}"


def find_spans(sections: Any, text: str, offsets: Offsets, n: int) -> tuple[Span, ...]:
    """Return the span of each section of a text; the sequence has n tokens."""
    if len(offsets) > n:
        raise OptionError(
            f"there are offsets for {len(offsets)} tokens, but the sequence has {n}. "
            "Pass the offsets of this sequence, without padding."
        )
    found = [
        find_tokens(name, start, stop, offsets)
        for name, (start, stop) in list_sections(sections, text)
    ]
    if len(offsets) < n:
        found.append(Span("generated", len(offsets), n))
    return tuple(found)


def list_sections(sections: Any, text: str) -> Iterable[tuple[str, tuple[int, int]]]:
    """Yield the name and the range of characters of each section."""
    if isinstance(sections, Mapping):
        named = list(sections.items())
    elif isinstance(sections, Sequence) and not isinstance(sections, str):
        named = [name_section(i, x) for i, x in enumerate(sections)]
    else:
        raise OptionError(
            f"sections is a {type(sections).__name__}, expected a mapping from names "
            "to ranges of characters or to texts, a list of texts, or the messages of "
            'a chat. Write seen.spans({"question": (10, 52)}, …).'
        )
    at = 0
    for name, section in named:
        if isinstance(section, str):
            piece = section.strip()  # as chat templates do
            start = text.find(piece, at)
            if start < 0 or not piece:
                raise OptionError(
                    f"section {name!r}, {section!r:.60}, does not occur in the text "
                    f"after character {at}. Pass the text that was tokenized, and the "
                    "sections in the same order."
                )
            at = start + len(piece)
            yield str(name), (start, at)
        else:
            yield str(name), read_range(name, section, len(text))


def name_section(i: int, section: Any) -> tuple[str, Any]:
    """Return (name, content) of a list item; the name is its index and any role."""
    if isinstance(section, Mapping):
        return f"{i} {section.get('role', '')}".strip(), section.get("content")
    return str(i), section


def read_range(name: str, section: Any, n: int) -> tuple[int, int]:
    """Return a range of characters, or raise OptionError."""
    try:
        start, stop = section
        if 0 <= start < stop <= n:
            return int(start), int(stop)
    except (TypeError, ValueError):
        pass
    raise OptionError(
        f"section {name!r} is {section!r:.60}, expected a string, or a range of "
        f"characters (first, one past the last) within 0 to {n}."
    )


def find_tokens(name: str, start: int, stop: int, offsets: Offsets) -> Span:
    """Return the tokens with more than half of their characters in a range."""
    inside = [
        i
        for i, (a, b) in enumerate(offsets)
        if 2 * (min(b, stop) - max(a, start)) > b - a > 0
    ]
    if not inside:
        raise OptionError(
            f"section {name!r} contains no token: it is characters {start} to {stop}, "
            f"and the {len(offsets)} tokens end at character "
            f"{max((b for _, b in offsets), default=0)}."
        )
    return Span(name, inside[0], inside[-1] + 1)
