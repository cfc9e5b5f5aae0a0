"""The plan of a search over pairs: everything that decides its numbers.

    folder/about.json    the plan, and a fingerprint of the model

A folder holds the results of one plan, and another one is refused.

Next: search_worker.py
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from regard.atlas.settings import (
    PRECISIONS,
    check_count,
    explain_other_model,
    fingerprint,
)
from regard.atomic_file import write_atomically
from regard.errors import FileError, OptionError


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """The plan of a search."""

    worker: ClassVar[str] = "regard.atlas.search_worker:SearchWorker"
    item: ClassVar[str] = "pair"
    model: str  # a GGUF file, a folder, a name in the cache, or module:function
    pairs: str  # their digest
    count: int  # of pairs
    batch: int = 16  # heads in one forward pass
    precision: str = "float32"
    device: str = "cpu"
    shard: int = 4  # pairs per file of results

    def __post_init__(self) -> None:
        for name in ("count", "batch", "shard"):
            check_count(name, getattr(self, name))
        if self.precision not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise OptionError(
                f"precision={self.precision!r:.40}, expected one of {known}."
            )


def begin_search(folder: Path, plan: SearchSettings) -> None:
    """Write the plan into a new folder, or raise if the folder has another one."""
    path, weights = folder / "about.json", fingerprint(plan.model)
    if not path.exists():
        with write_atomically(path) as new:
            about = {"version": 1, "plan": asdict(plan), "weights": weights}
            new.write_text(json.dumps(about, indent=1), "utf-8")
        return
    known, theirs = read_search_plan(folder)
    if known.pairs != plan.pairs:
        raise OptionError(
            f"{folder} holds a search over {known.count} other pairs, given "
            f"{plan.count}. Give the file it began with, or choose another folder."
        )
    for name, mine in asdict(plan).items():
        if mine != (old := getattr(known, name)):
            raise OptionError(
                f"{folder} holds a search with {name}={old!r}, given {mine!r}. Give "
                "the same, or choose another folder."
            )
    if weights != theirs:
        raise OptionError(explain_other_model(plan.model, folder))


def read_search_plan(folder: Path) -> tuple[SearchSettings, str]:
    """Return the plan of a folder, and the fingerprint of its model."""
    try:
        about: Any = json.loads((folder / "about.json").read_text("utf-8"))
        return SearchSettings(**about["plan"]), str(about["weights"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = ascii(str(error))
        raise FileError(f"{folder} holds no search over pairs: {why:.200}") from error
