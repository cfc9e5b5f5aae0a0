"""What `regard.sources` returns: mass and effect of each document, as table or page.

    print(found)                   a table of the answer, and of each of its sentences
    found.answer.effect            (effect of document 0, of document 1, …)
    found.warn(found.answer)       "" if mass and effect name the same document
    found.page("why.html")         answer and documents side by side

Next: page.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.atomic_file import write_atomically
from regard.attribution.page import write_sources_page
from regard.display import Displayed
from regard.recording.spans import Span

LONG = 60  # characters of a text in the table


@dataclass(frozen=True)
class SourceDocument:
    """A document of the prompt."""

    name: str
    text: str
    span: Span  # its tokens in the prompt


@dataclass(frozen=True, kw_only=True)
class AnswerPart:
    """The answer or one of its sentences; tuples have one entry per document."""

    text: str
    tokens: tuple[int, int]  # of the answer: first, one past the last
    mass: tuple[float, ...]
    effect: tuple[float, ...] | None  # nats lost if it is hidden; None: a recording
    logprob: float | None  # with all documents

    @property
    def most_mass(self) -> int:
        """The number of the document with the largest mass."""
        return max(range(len(self.mass)), key=self.mass.__getitem__)

    @property
    def most_effect(self) -> int | None:
        """The number of the document with the largest effect."""
        if self.effect is None:
            return None
        return max(range(len(self.effect)), key=self.effect.__getitem__)


@dataclass(frozen=True, kw_only=True)
class Sources(Displayed):
    """What each document contributes to an answer."""

    documents: tuple[SourceDocument, ...]
    answer: AnswerPart
    sentences: tuple[AnswerPart, ...]
    passes: int  # sequences that were read to measure the effects; 0: a recording

    @property
    def parts(self) -> tuple[AnswerPart, ...]:
        """The answer, and its sentences if there are several."""
        return (self.answer, *(self.sentences if len(self.sentences) > 1 else ()))

    def warn(self, part: AnswerPart) -> str:
        """Return what a reader must know of a part, "" if mass and effect agree."""
        if part.effect is None or part.most_effect is None:
            return ""
        looked, used = part.most_mass, part.most_effect
        name = self.documents[used].name
        if part.effect[used] <= 0:
            return "no document has a positive effect: the model knew it, or guessed."
        if looked != used:
            other = self.documents[looked].name
            return (
                f"document {other} has the largest mass, but document {name} the "
                "largest effect. Trust the effect."
            )
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Return everything as lists and dictionaries, for JSON."""

        def describe(part: AnswerPart) -> dict[str, Any]:
            return {
                "text": part.text,
                "tokens": list(part.tokens),
                "mass": list(part.mass),
                "effect": None if part.effect is None else list(part.effect),
                "logprob": part.logprob,
                "warning": self.warn(part),
            }

        return {
            "documents": [{"name": x.name, "text": x.text} for x in self.documents],
            "answer": describe(self.answer),
            "sentences": [describe(x) for x in self.sentences],
            "passes": self.passes,
        }

    def page(self, path: str | Path) -> None:
        """Write an HTML file: the answer and the documents, coloured by effect."""
        path = Path(path)
        with write_atomically(path) as new:
            new.write_bytes(write_sources_page(self.to_dict()))

    def __str__(self) -> str:
        lines = []
        for i, part in enumerate(self.parts):
            lines += [*self.list_lines(part, f"sentence {i}" if i else "answer"), ""]
        if self.answer.effect is None:
            return "\n".join([*lines, "no effects: a recording has no model to run."])
        about = (
            f"effect: nats by which the log-probability falls if the document is "
            f"hidden; {self.passes} forward passes"
        )
        return "\n".join([*lines, about])

    def list_lines(self, part: AnswerPart, title: str) -> Iterator[str]:
        """Yield the lines of a part."""
        log = "" if part.logprob is None else f"   log-probability {part.logprob:.2f}"
        yield f'{title}: "{shorten(part.text)}"{log}'
        names = [shorten(x.name, 24) for x in self.documents]
        width = max(8, *map(len, names))
        yield f"{'document':{width}}   mass  effect"
        for i, name in enumerate(names):
            effect = "      -" if part.effect is None else f"{part.effect[i]:7.2f}"
            text = shorten(self.documents[i].text, 40)
            yield f"{name:{width}} {part.mass[i]:6.3f} {effect}   {text}"
        if warning := self.warn(part):
            yield f"warning: {warning}"


def shorten(text: str, most: int = LONG) -> str:
    """Return a text on one line of printable characters, cut if it is long."""
    line = "".join(c for c in " ".join(text.split()) if c.isprintable())
    return line if len(line) <= most else f"{line[: most - 1]}…"
