"""An array with the names of its axes and a description of how it was computed.

    entropy(record)      axes ("head", "query")
    received(record)     axes ("head", "key")

Statistics are per query head. A statistic of a shared key head is a reduction over the
query heads of its group; the reduction must be named, as there is no default.

A NaN marked in `missing` means that there is no value: the first token has no previous
token. Any other NaN is a result of the computation; reductions must not drop it.

Next: rows.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from regard.arrays import Array, namespace, to_numpy
from regard.errors import OptionError

Reduction = Literal["mean", "max", "sum"]


@dataclass(frozen=True, eq=False)
class NamedArray:
    """The values of one statistic."""

    values: Array
    axes: tuple[str, ...]  # of "head", "query", "key", "feature", …
    how: str  # the identity, and what ran: "H: the kernel with V := K"
    missing: Array | None = None  # bool, shaped like values; None: no value is missing

    def share(self, n_shared: int, reduction: Reduction) -> NamedArray:
        """Return one value for each shared key head, reduced over its query heads."""
        heads = self.values.shape[0]
        if self.axes[0] != "head" or n_shared < 1 or heads % n_shared:
            raise OptionError(
                f"axes {self.axes} with {heads} in front cannot be shared by "
                f"{n_shared}, expected heads in front, a multiple of it."
            )
        if reduction not in ("mean", "max", "sum"):
            raise OptionError(f'{reduction!r}, expected "mean", "max" or "sum".')
        xp = namespace(values=self.values)
        shape = (n_shared, heads // n_shared, *self.values.shape[1:])
        values = getattr(xp, reduction)(xp.reshape(self.values, shape), axis=1)
        how = f"{self.how}; {reduction} over {shape[1]} query heads"
        missing = self.missing
        if missing is not None:
            missing = xp.any(xp.reshape(missing, shape), axis=1)
        axes = ("group", *self.axes[1:])
        return NamedArray(values, axes, how, missing)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Return the values as a NumPy array."""
        values = to_numpy(self.values)
        return np.asarray(values, dtype=dtype, copy=copy)
