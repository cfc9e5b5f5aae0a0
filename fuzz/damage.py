"""Damage: one random change to bytes, to a text of words, or to a tree of JSON.

    damage_bytes(rng, data)              a bit, a number, a piece gone, doubled or moved
    damage_text(rng, text, words)        a word of the language in the wrong place
    damage_words(words)                  the same to its bytes, now and then to any byte
    damage_tree(rng, tree)               a value of another kind, gone, or elsewhere

A change that knows the form of its input comes further: most random bytes are refused
by the first line of a parser, a header with an odd number in it is not.

Next: recording/file.py
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

NUMBERS: tuple[int, ...] = ()
NUMBERS += (0, 1, 2, 3, 7, 8, 31, 32, 64, 127, 255, 256, 2**15, 2**16, 2**20, 2**31 - 1)
NUMBERS += (2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
TEXTS = ("", "a", "0", "\x00", "\x1b[2J", "\u202e", "é", "\ud800", "../x", "/", "%s")
ODD: tuple[Any, ...] = (None, True, False, -1, 0.5, -0.0, 1e308, 1e-320, float("nan"))
ODD += (float("inf"), *NUMBERS, -(2**63), 10**30, *TEXTS, "x" * 5000, [], {}, [0], [[]])


def damage_bytes(rng: random.Random, data: bytes) -> bytes:
    """Change a few bytes."""
    at, size = rng.randint(0, len(data)), rng.choice((1, 1, 2, 4, 8, 32))
    before, piece, after = data[:at], data[at : at + size], data[at + size :]
    width = rng.choice((1, 2, 4, 8))
    number = (rng.choice(NUMBERS) % 256**width).to_bytes(width, "little")
    new = (
        bytes([piece[0] ^ 1 << rng.randrange(8)]) + piece[1:] if piece else b"",
        b"",
        piece + piece,
        rng.randbytes(size),
        data[(other := rng.randint(0, len(data))) : other + size] + piece,
        number + piece[width:],
        number,
    )
    if rng.random() < 0.05:  # cut off
        return before
    return before + rng.choice(new) + after


def damage_text(rng: random.Random, text: str, words: Sequence[str]) -> str:
    """Put a word in, take a piece out, or put it elsewhere."""
    at, other = rng.randint(0, len(text)), rng.randint(0, len(text))
    size = rng.choice((0, 0, 1, 2, 5, 20))
    piece = text[other : other + rng.choice((1, 3, 10, 40))]
    new = rng.choice((rng.choice(words), rng.choice(words), piece, "", chr(at)))
    return text[:at] + new + text[at + size :]


def damage_words(
    words: Sequence[str], coding: str = "utf-8", errors: str = "surrogateescape"
) -> Callable[[random.Random, bytes], bytes]:
    """Return how to change the bytes of a text of such words."""

    def damage(rng: random.Random, data: bytes) -> bytes:
        if rng.random() < 0.2:
            return damage_bytes(rng, data)
        text = damage_text(rng, data.decode(coding, errors), words)
        return text.encode(coding, errors)

    return damage


def damage_tree(rng: random.Random, tree: Any, more: Sequence[Any] = ()) -> Any:
    """Change one place of a tree of JSON; `more` are values that it knows."""
    tree = copy.deepcopy(tree)
    places = list(walk(tree))
    if not places:
        return rng.choice(ODD)
    table, key = rng.choice(places)
    act = rng.choice(("odd", "odd", "near", "known", "copy", "gone", "add", "nest"))
    if act == "gone":
        del table[key]
    elif act == "near" and type(table[key]) is int:
        table[key] += rng.choice((-1, 1, 7, -table[key], table[key]))
    elif act == "known" and more:
        table[key] = copy.deepcopy(rng.choice(more))
    elif act == "copy":
        source, where = rng.choice(places)
        table[key] = copy.deepcopy(source[where])
    elif act == "add" and isinstance(table, list):
        table.insert(key, copy.deepcopy(table[key]))
    elif act == "add":
        table[rng.choice([*map(str, more), "x", *TEXTS])] = table[key]
    elif act == "nest":
        table[key] = rng.choice(([table[key]], {"a": table[key]}))
    else:
        table[key] = rng.choice(ODD)
    return tree


def walk(tree: Any) -> Any:
    """Yield every place of a tree, as a table and a key of it."""
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, inner in list(items):
            yield tree, key
            yield from walk(inner)


def read_tree(text: str | bytes) -> Any:
    """Return the JSON in a text; None if there is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
