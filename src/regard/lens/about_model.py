"""What a recording notes of its model: its name, its rank, and untested libraries.

Next: watch.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from regard.recording.evidence import Covered

# the newest releases that the tests have run with: what they pin, says test_project.py
TESTED = {"torch": "2.15", "transformers": "5.23"}
DIGITS = 40  # of the folder of a snapshot, which is no name


def describe_model(model: Any) -> dict[str, Any]:
    """Return the title of a model, and which of several processes this is, if known."""
    name = str(getattr(model, "name_or_path", "")).rstrip("/").rpartition("/")[2]
    name = name.removesuffix(".gguf")
    found: dict[str, Any] = {"title": name} if 0 < len(name) < DIGITS else {}
    if dist.is_available() and dist.is_initialized():
        found["rank"] = [dist.get_rank(), dist.get_world_size()]
    return found


def list_untested() -> Iterator[Covered]:
    """Yield a line for each library that is newer than those that were tested."""
    for name, newest in TESTED.items():
        found = getattr(sys.modules.get(name), "__version__", "0")
        if parse_version(found) > parse_version(newest):
            note = f"{name} {found} is newer than {newest}, the newest tested version"
            says = f"{note}: run regard doctor"
            yield Covered(name=name, via="", note=says, attention=False)


def parse_version(text: str) -> list[int]:
    """Return the major and the minor version."""
    return [int(x) for x in re.findall(r"\d+", text)[:2]]
