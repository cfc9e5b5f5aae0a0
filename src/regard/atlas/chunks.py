"""Cut documents into chunks: the token sequences that the model runs on.

    alone     each document is cut into chunks of `length`; the first `pieces` are used
    packed    the documents of a shard are concatenated and cut into chunks of `length`;
              tokens may attend to earlier documents in their chunk

A batch holds chunks of equal length only, so there is no padding.

Next: worker.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from regard.atlas.corpus import Document, Shard, read_shard
from regard.atlas.model import Words
from regard.atlas.settings import Settings

CHARACTERS = 32  # generous upper estimate for one token
SLACK = 16  # tokens that cutting the text may have changed
KILLER = "it ended its process, again and again"


@dataclass(frozen=True)
class Chunk:
    """A sequence of tokens that the model runs on."""

    document: int  # number in the corpus; if packed, of the shard's first document
    number: int
    tokens: tuple[int, ...]
    owners: tuple[str, ...]  # digests of the documents that the tokens come from


def cut_shard(
    shard: Shard, plan: Settings, words: Words, skip: Collection[str] = ()
) -> tuple[list[Chunk], dict[str, str]]:
    """Return the chunks of a shard, and the reason for each digest set aside."""
    texts: list[tuple[int, str, list[int]]] = []
    aside: dict[str, str] = {}
    first = shard.number * plan.shard
    length = min(plan.length, words.context)
    pairs = zip(shard.places, read_shard(shard), strict=True)
    for number, (place, found) in enumerate(pairs, start=first):
        if not isinstance(found, Document):
            aside[place.digest] = found[1]
        elif place.digest in skip:
            aside[place.digest] = KILLER
        else:
            try:
                tokens = encode_document(found.text, plan, words, length)
                texts.append((number, place.digest, tokens))
            except Exception as error:  # noqa: BLE001 (any error becomes the reason)
                aside[place.digest] = explain_error(error)
    if plan.packed:
        return list(pack_documents(texts, length, first)), aside
    pieces = []
    for number, owner, tokens in texts:
        cuts = range(0, len(tokens) - 1, length)[: plan.pieces]
        for n, at in enumerate(cuts):
            pieces.append(Chunk(number, n, tuple(tokens[at : at + length]), (owner,)))
    return pieces, aside


def encode_document(text: str, plan: Settings, words: Words, length: int) -> list[int]:
    """Return the tokens of a text that are used, encoding only a prefix if possible."""
    most = length * plan.pieces
    far = len(text) if plan.packed else most * CHARACTERS
    some = words.encode(text[:far])
    if len(some) < most + SLACK and len(text) > far:
        some = words.encode(text)
    if len(some) < 2:
        raise ValueError("it has fewer than two tokens")
    return some if plan.packed else some[:most]  # truncated to the tokens used


def pack_documents(
    texts: Sequence[tuple[int, str, list[int]]], length: int, first: int
) -> Iterator[Chunk]:
    """Concatenate the tokens of all documents and yield chunks of `length`."""
    row = [(token, owner) for _, owner, tokens in texts for token in tokens]
    for n, at in enumerate(range(0, len(row) - 1, length)):
        tokens, owners = zip(*row[at : at + length], strict=True)
        yield Chunk(first, n, tokens, tuple(dict.fromkeys(owners)))


def batch_pieces(pieces: Sequence[Chunk], size: int) -> Iterator[list[Chunk]]:
    """Yield batches of at most `size` chunks of equal length."""
    by_length: dict[int, list[Chunk]] = {}
    for piece in pieces:
        by_length.setdefault(len(piece.tokens), []).append(piece)
    for length in sorted(by_length):
        same = by_length[length]
        yield from (same[i : i + size] for i in range(0, len(same), size))


def explain_error(error: Exception) -> str:
    """Return the type and message of an error in one line."""
    words = f"{type(error).__name__}: {error}".splitlines()
    return words[0][:200]
