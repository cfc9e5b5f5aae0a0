"""Pairs of prompts for a search over heads: read, check and encode them.

    {"clean": "When Mary and John …, John gave a drink to",
     "corrupted": "When Mary and John …, Mary gave a drink to",
     "answer": " Mary", "wrong": " John"}

A pair is one line of a JSON Lines file. The measure of a run is logit(answer) -
logit(wrong) at its last token. Heads are patched token by token, so both prompts must
have the same number of tokens, and each answer must be one token after them.

Next: search_settings.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from regard.atlas.model import Words
from regard.errors import FileError, OptionError

FIELDS = ("clean", "corrupted", "answer", "wrong")


@dataclass(frozen=True)
class Pair:
    """Two prompts, the token that answers the clean one, and a wrong token."""

    clean: str
    corrupted: str
    answer: str
    wrong: str
    line: int = field(default=0, compare=False)  # in its file, or its place in a list

    @property
    def digest(self) -> str:
        """Identifies the texts."""
        texts = json.dumps([getattr(self, name) for name in FIELDS])
        return blake2b(texts.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class PairShard:
    """Consecutive pairs, which a worker processes at a time."""

    number: int
    places: tuple[Pair, ...]


@dataclass(frozen=True)
class EncodedPair:
    """The tokens of a pair."""

    clean: list[int]
    corrupted: list[int]
    answer: int
    wrong: int


def read_prompt_pairs(source: str | Path | Sequence[Pair]) -> tuple[Pair, ...]:
    """Return the pairs of a JSON Lines file, or of a list, each with its line."""
    if isinstance(source, str | Path):
        found = tuple(read_pair_lines(Path(source)))
    else:
        numbered = enumerate(source, start=1)
        found = tuple(replace(x, line=x.line or i) for i, x in numbered)
    if not found:
        raise OptionError("there are no pairs, expected one in each line of the file.")
    first: dict[Pair, Pair] = {}
    for pair in found:
        if (known := first.setdefault(pair, pair)) is not pair:
            raise OptionError(
                f"pair {pair.line} is a copy of pair {known.line}. Remove it: each "
                "pair counts as one independent sample."
            )
    return found


def read_pair_lines(path: Path) -> Iterator[Pair]:
    """Yield the pair of each line that is not empty."""
    try:
        lines = path.read_text("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}.") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield parse_pair(line, f"{path} line {number}", number)


def parse_pair(text: str, place: str, line: int) -> Pair:
    """Return the pair of a line, or raise FileError with its place."""
    example = json.dumps(dict.fromkeys(FIELDS, "…"), ensure_ascii=False)
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{place} is not JSON ({error}). Write {example}") from error
    texts = found if isinstance(found, dict) else {}
    if missing := [x for x in FIELDS if not isinstance(texts.get(x), str)]:
        raise FileError(f"{place} has no text {', '.join(missing)}. Write {example}")
    return Pair(**{name: texts[name] for name in FIELDS}, line=line)


def digest_pairs(pairs: Sequence[Pair]) -> str:
    """Return a digest of pairs in their order."""
    whole = "".join(pair.digest for pair in pairs)
    return blake2b(whole.encode(), digest_size=16).hexdigest()


def cut_shards(pairs: Sequence[Pair], size: int) -> list[PairShard]:
    """Return shards of `size` consecutive pairs; the last may have fewer."""
    firsts = range(0, len(pairs), size)
    return [PairShard(n, tuple(pairs[at : at + size])) for n, at in enumerate(firsts)]


def encode_pair(pair: Pair, words: Words) -> EncodedPair:
    """Return the tokens of a pair, or raise OptionError with the reason."""
    clean, corrupted = words.encode(pair.clean), words.encode(pair.corrupted)
    if len(clean) != len(corrupted):
        raise OptionError(
            f"clean has {len(clean)} tokens and corrupted {len(corrupted)}, expected "
            "the same number"
        )
    if clean == corrupted:
        raise OptionError("clean and corrupted have the same tokens")
    if not 0 < len(clean) < words.context:
        raise OptionError(
            f"the prompts have {len(clean)} tokens, expected 1 to {words.context - 1}"
        )
    answer, wrong = (
        find_next_token(pair.clean, clean, text, words)
        for text in (pair.answer, pair.wrong)
    )
    if answer == wrong:
        raise OptionError(f"answer and wrong are the same token, {pair.answer!r:.40}")
    return EncodedPair(clean, corrupted, answer, wrong)


def find_next_token(prompt: str, tokens: list[int], text: str, words: Words) -> int:
    """Return the token by which a text continues a prompt.

    The text alone may be encoded otherwise: some tokenizers add a space or a token.
    """
    if not text:
        raise OptionError("answer or wrong is empty, expected a text of one token")
    both = words.encode(prompt + text)
    if both[:-1] == tokens:
        return both[-1]
    count = len(both) - len(tokens) if both[: len(tokens)] == tokens else 0
    told = f"is {count} tokens" if count else "changes the last token"
    hint = "" if text.startswith(" ") else f". Is it {' ' + text!r:.40}?"
    raise OptionError(
        f"{text!r:.40} {told} after the clean prompt, expected one token{hint}"
    )
