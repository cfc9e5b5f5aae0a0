"""The output of every head of a record, before the output projection.

    z[h, i] = sum over keys j of  weights[h, i, j] v[h // group, j]

A sink takes a share of the weights and adds nothing. The weights are computed a strip
of rows at a time, so memory is linear in the length.

Next: ../ablate/replacement.py
"""

from __future__ import annotations

from regard.arrays import Array, namespace
from regard.errors import OptionError
from regard.recording.record import Record

CELLS = 2**22  # weights of a strip, of all heads


def expect_values(record: Record) -> Array:
    """Return the values of a record, (Hk, Nk, Dv), or raise if it has none."""
    if record.v is None:
        raise OptionError(
            f"{record.name} was recorded without values, so what its heads output is "
            'not known. Record with regard.watch(model, keep="qkv"), without dropout.'
        )
    return record.v


def compute_outputs(record: Record) -> Array:
    """Return the output of every head and query, (H, Nq, Dv)."""
    v = expect_values(record)
    heads, n_q, n_k = record.shape
    xp, step = namespace(v=v), max(1, CELLS // max(1, heads * n_k))
    strips = []
    for first in range(0, max(1, n_q), step):
        weights = record.weights(slice(first, first + step))
        grouped = xp.reshape(weights, (v.shape[0], -1, *weights.shape[1:]))
        values = xp.astype(v, weights.dtype, copy=False)[:, None, ...]
        strips.append(grouped @ values)  # (Hk, group, rows, Dv)
    z = xp.concat(strips, axis=2)
    return xp.astype(xp.reshape(z, (heads, n_q, v.shape[2])), v.dtype, copy=False)
