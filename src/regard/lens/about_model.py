"""What a recording notes of its model: the name it was loaded under, and its rank.

Next: watch.py
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

DIGITS = 40  # of the folder of a snapshot, which is no name


def describe_model(model: Any) -> dict[str, Any]:
    """Return the title of a model, and which of several processes this is, if known."""
    name = str(getattr(model, "name_or_path", "")).rstrip("/").rpartition("/")[2]
    name = name.removesuffix(".gguf")
    found: dict[str, Any] = {"title": name} if 0 < len(name) < DIGITS else {}
    if dist.is_available() and dist.is_initialized():
        found["rank"] = [dist.get_rank(), dist.get_world_size()]
    return found
