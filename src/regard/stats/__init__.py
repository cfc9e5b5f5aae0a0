"""Exact statistics of a record's attention, without storing its matrix.

    entropy(record)                        one kernel call
    received(record)                       mass on each key: one kernel call
    walk(record, TopK(8), LargestLogit())  statistics that need every weight, by tile

A walk needs torch; everything else also runs on the plain definition.

Next: rows.py
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.stats.cells import cells, induction, offset
from regard.stats.columns import mean_received, received
from regard.stats.plan import make_plan
from regard.stats.registry import Badge, Statistic, register, registered, unregister
from regard.stats.rows import (
    entropy,
    masked_mass,
    mass,
    mean_distance,
    mean_position,
    span_mass,
    span_pairs,
)

if TYPE_CHECKING:
    import regard.stats.published as published  # noqa: PLR0402
    from regard.stats.attention_flow import maximize_flow
    from regard.stats.pooled import PooledMap
    from regard.stats.pyramid import Pyramid
    from regard.stats.reducer import Reducer
    from regard.stats.reducer_check import check_reducer
    from regard.stats.reducers import (
        ColumnMax,
        ColumnSums,
        Entropy,
        LargestLogit,
        OffsetProfile,
        RowSums,
    )
    from regard.stats.rollout import roll_out
    from regard.stats.strongest import TopK
    from regard.stats.tile import read_tile
    from regard.stats.tile_walk import walk

__all__ = [
    "Badge",
    "ColumnMax",
    "ColumnSums",
    "Entropy",
    "LargestLogit",
    "OffsetProfile",
    "PooledMap",
    "Pyramid",
    "Reducer",
    "RowSums",
    "Statistic",
    "TopK",
    "cells",
    "check_reducer",
    "entropy",
    "induction",
    "make_plan",
    "masked_mass",
    "mass",
    "maximize_flow",
    "mean_distance",
    "mean_position",
    "mean_received",
    "offset",
    "published",
    "read_tile",
    "received",
    "register",
    "registered",
    "roll_out",
    "span_mass",
    "span_pairs",
    "unregister",
    "walk",
]


LATER = dict.fromkeys(
    ("ColumnMax", "ColumnSums", "Entropy", "LargestLogit", "OffsetProfile", "RowSums"),
    "reducers",
) | {
    "PooledMap": "pooled",
    "Pyramid": "pyramid",
    "Reducer": "reducer",
    "TopK": "strongest",
    "check_reducer": "reducer_check",
    "maximize_flow": "attention_flow",
    "published": "published",
    "read_tile": "tile",
    "roll_out": "rollout",
    "walk": "tile_walk",
}


def __getattr__(name: str) -> Any:
    """Import the names that need torch on first use."""
    if name not in LATER:
        raise AttributeError(f"module 'regard.stats' has no attribute '{name}'")
    try:
        found = import_module(f"regard.stats.{LATER[name]}")
    except ModuleNotFoundError as missing:
        raise ImportError(
            f'regard.stats.{name} needs {missing.name}: pip install "regard[torch]"'
        ) from missing
    return getattr(found, name, found)
