"""What attention did: exact statistics of a record, without its matrix.

    entropy(record)                        one call of the kernel
    received(record)                       what each key received: one more
    walk(record, TopK(8), LargestLogit())  what needs every weight, tile by tile

A walk needs torch; everything else also runs on the plain definition.

Next: rows.py
"""

from typing import Any

from regard.stats.cells import cells, induction, offset
from regard.stats.columns import mean_received, received
from regard.stats.plan import make_plan
from regard.stats.rows import (
    entropy,
    masked_mass,
    mass,
    mean_distance,
    mean_position,
    span_mass,
    span_pairs,
)

try:
    import regard.stats.presets as presets  # noqa: PLR0402
    from regard.stats.pooled import PooledMap
    from regard.stats.pyramid import Pyramid
    from regard.stats.reducer import Reducer
    from regard.stats.reducers import (
        ColumnMax,
        ColumnSums,
        Entropy,
        LargestLogit,
        OffsetProfile,
        RowSums,
    )
    from regard.stats.strongest import TopK
    from regard.stats.tile import read_tile
    from regard.stats.trial import check_reducer
    from regard.stats.walk import walk
except ModuleNotFoundError as missing:
    if missing.name != "torch":
        raise

__all__ = [
    "ColumnMax",
    "ColumnSums",
    "Entropy",
    "LargestLogit",
    "OffsetProfile",
    "PooledMap",
    "Pyramid",
    "Reducer",
    "RowSums",
    "TopK",
    "cells",
    "check_reducer",
    "entropy",
    "induction",
    "make_plan",
    "masked_mass",
    "mass",
    "mean_distance",
    "mean_position",
    "mean_received",
    "offset",
    "presets",
    "read_tile",
    "received",
    "span_mass",
    "span_pairs",
    "walk",
]


def __getattr__(name: str) -> Any:
    """Say what is missing where only the plain definition is there."""
    if name in __all__:
        raise ImportError(
            f'regard.stats.{name} needs torch: pip install "regard[torch]"'
        )
    raise AttributeError(f"module 'regard.stats' has no attribute '{name}'")
