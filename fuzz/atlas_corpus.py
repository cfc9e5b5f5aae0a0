"""Hunt: the files of a corpus, by kind, from their first byte on.

    bytes ─▶ a file of text, JSON lines, Parquet or Arrow ─▶ plan_corpus ─▶ read_shard

What was found must be found again, each text under its digest.

Next: atlas_result.py
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from damage import damage_bytes, damage_text
from hunt import Target, main

from regard.atlas.corpus import Document, plan_corpus, read_shard

KINDS = (".txt", ".jsonl", ".parquet", ".arrow")
WORDS: tuple[str, ...] = ('{"text": "', '"}', "\n", "\r\n", "\ufeff", "\\ud800", "NaN")
WORDS += (
    '{"text": ',
    "[",
    "{" * 500,
    '"text"',
    ": ",
    "1e999",
    "null",
    "\x00",
    "é",
    " ",
)


def check(data: bytes) -> None:
    """Plan a corpus of one file, and read every document again."""
    kind = KINDS[data[0] % len(KINDS)] if data else ".txt"
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / f"file{kind}"
        file.write_bytes(data[1:])
        corpus = plan_corpus([file], Path(name) / "manifest", shard=3)
        for number in range(corpus.shards):
            for found in read_shard(corpus.shard(number)):
                assert isinstance(found, Document), found
                found.text.encode()


def damage(rng: random.Random, data: bytes) -> bytes:
    """Change words or bytes, but for the one that says the kind."""
    if rng.random() < 0.5 or data[:1] in (b"\x02", b"\x03"):
        return data[:1] + damage_bytes(rng, data[1:])
    text = damage_text(rng, data[1:].decode("utf-8", "surrogateescape"), WORDS)
    return data[:1] + text.encode("utf-8", "surrogateescape")


TARGET = Target("atlas_corpus", check, damage)
if __name__ == "__main__":
    main(TARGET)
