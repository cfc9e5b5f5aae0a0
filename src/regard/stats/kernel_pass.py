"""A call of the kernels for GPUs that answers everything that is asked of one side.

    RowMeasure("entropy")                 a number of each query, as the kernel finds it
    RowMeasure("picked", targets)         its weight on one key, by column; -1: none

Features are summed as in replay.py. A plan does not know which of the two it runs.

Next: plan.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from regard.arrays import Array, convert
from regard.kernels.available import can_run
from regard.masks.algebra import Mask
from regard.masks.patterns import array
from regard.recording.record import Record
from regard.stats.mask_layout import read_mask_layout


@dataclass(frozen=True, eq=False)
class RowMeasure:
    """A number of each query that a pass over the weights finds by itself."""

    name: Literal["entropy", "largest_logit", "picked"]
    targets: np.ndarray[Any, np.dtype[Any]] | None = None  # (Nq,), of "picked"


@dataclass(frozen=True, eq=False)
class KernelPass:
    """One pass over the weights of a record."""

    record: Record
    side: Literal["rows", "columns"]
    within: Mask | None = None

    def answer(
        self, wanted: Sequence[Array | RowMeasure | None]
    ) -> tuple[Array, Array]:
        """Return what is wanted, (H, N, columns), and the sums of the weights, (H, N).

        wanted: features (1 or heads, N, F), and measures of one column each
        """
        import torch  # noqa: PLC0415

        from regard.kernels.run_kernels import run_columns, run_rows  # noqa: PLC0415

        call, heads = read_kernel_input(self.record, self.within), self.record.heads
        blocks = [x for x in wanted if x is not None and not isinstance(x, RowMeasure)]
        lead = max((len(x) for x in blocks), default=1)
        shared = [x.repeat_interleave(lead // len(x), 0) for x in blocks]
        features = torch.cat(shared, -1) if blocks else None
        if self.side == "columns":
            found: Any = run_columns(call, features)
            return found.sums, found.total
        measures = [x for x in wanted if isinstance(x, RowMeasure)]
        picks = [x.targets for x in measures if x.targets is not None]
        targets = convert(np.stack(picks, 1), call.q) if picks else None
        found = run_rows(call, features, targets)
        sums, picked = iter(found.sums.split(1, -1)), iter(found.picked.split(1, -1))
        columns = [found.total.new_empty(heads, call.q.shape[1], 0)]
        for x in wanted:
            if not isinstance(x, RowMeasure):
                columns += [next(sums) for _ in range(0 if x is None else x.shape[-1])]
            elif x.targets is not None:
                columns.append(next(picked))
            else:
                columns.append(getattr(found, x.name)[..., None])
        return torch.cat(columns, -1), found.total


def has_kernels(record: Record) -> bool:
    """Return whether the kernels compute the statistics of a record."""
    return can_run(record.q, record.k)


def read_kernel_input(record: Record, within: Mask | None = None) -> Any:
    """Return a record as the kernels read it: its mask by row and column."""
    from regard.kernels.run_kernels import KernelInput  # noqa: PLC0415

    lies, q = read_mask_layout(record, within), record.q
    mask = lies.mask
    return KernelInput(
        q=q,
        k=record.k,
        lse=convert(record.lse, q),
        scale=record.scale,
        softcap=record.softcap,
        bias=None if record.bias is None else convert(record.bias, q),
        mask=mask if mask is None or isinstance(mask, Mask) else array(mask),
        start=lies.start,
    )
