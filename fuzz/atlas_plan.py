"""Hunt: plans of an atlas, as TOML, and what a folder says of itself, as JSON.

    bytes ─▶ read_plan ─▶ a Plan, which comes back from what is kept of it
          ─▶ read_about ─▶ the same

Next: atlas_corpus.py
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

from damage import damage_words
from hunt import Target, main

from regard.atlas.settings import Settings, read_about, read_plan, write_about
from regard.errors import RegardError

WORDS: tuple[str, ...] = ("model = ", "corpus = ", "statistics = ", "length = ", "\n")
WORDS += ("until_interval = ", "packed = true", "[plan]", "'", '"""', "[]", "{}", "nan")
WORDS += ("inf", "-1", "1e999", "9" * 5000, "2026-01-01", "\x00", "é", "[" * 300, "=")
WORDS += (
    '{"plan": ',
    "}",
    ": ",
    "null",
    "true",
    '"x"',
    ",",
    "a.b.c = 1\n",
    "tokens = ",
)


def check(data: bytes) -> None:
    """Read a plan, and a folder's own words."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "plan.toml"
        path.write_bytes(data)
        with suppress(RegardError):
            compare(read_about(path)[0], path)
        compare(read_plan(path), path)


def compare(plan: Settings, path: Path) -> None:
    """Hold a plan against what is kept of it."""
    path.write_text(write_about(plan, "x"), "utf-8")
    assert read_about(path)[0] == plan


TARGET = Target("atlas_plan", check, damage_words(WORDS), longest=2**13)
if __name__ == "__main__":
    main(TARGET)
