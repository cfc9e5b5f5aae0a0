"""Published scores that rank the keys of a KV cache: which of them to keep.

    h2o      Σ_i A[i, j], all queries                                 Zhang et al. 2023
    snapkv   Σ over the last queries of A[i, j], then a mean of neighbours     Li 2024
    tova     mean over heads of the last row                          Oren et al. 2024
    kvzip    max over a repetition of the context and a group         Kim et al. 2025

All scores are computed from the full cache, before any key is evicted.

Next: published.py
"""

from __future__ import annotations

import numpy as np
import torch

from regard.arrays import to_numpy
from regard.errors import OptionError
from regard.recording.record import Record
from regard.stats.columns import cut_rows, received
from regard.stats.features import mark_spans, read_span
from regard.stats.head_scores import count_after
from regard.stats.named_array import NamedArray
from regard.stats.nonfinite import mark_nonfinite
from regard.stats.over_queries import Numbers, to_float64
from regard.stats.reducers import ColumnMax
from regard.stats.rows import divide_quietly
from regard.stats.text_scores import Span
from regard.stats.tile_walk import walk

__all__ = ["h2o", "kvzip", "observed_attention", "snapkv", "snapkv_grouped", "tova"]


def h2o(record: Record) -> NamedArray:
    """Return the sum of the weights on each key over all queries, (H, Nk).

    Σ_i A[i, j], the accumulated attention score of Zhang et al. 2023 ("H2O: Heavy-
    Hitter Oracle"), for each head separately.
    """
    return received(record)


def observed_attention(record: Record) -> NamedArray:
    """Return the mass on each key divided by T - j, mean over the group, (groups, Nk).

    Σ_i A[i, j] / (T - j), where T - j is the number of queries at or after key j, as in
    ObservedAttentionPress, the H2O of kvpress. `mean_received` divides by the number of
    queries that may attend to the key.
    """
    found = divide_quietly(to_float64(received(record)), count_after(record))
    how = "C: received / (T - j)"
    named = NamedArray(found, ("head", "key"), how)
    return named.share(record.k.shape[0], "mean")


def snapkv(record: Record, *, last: int = 64, pool: int = 5) -> NamedArray:
    """Return the scores of the keys before the last queries, (H, Nk - last).

    Σ over the last queries of A[i, j] for each query head, then average pooling over
    `pool` keys with zero padding (Li et al. 2024, "SnapKV", and their code).
    """
    scores = sum_window(record, last, pool)
    how = f"C: sum over the last {last} queries, pooled over {pool} keys"
    return NamedArray(pool_keys(to_float64(scores), last, pool), ("head", "key"), how)


def snapkv_grouped(record: Record, *, last: int = 64, pool: int = 5) -> NamedArray:
    """Return SnapKV scores per key head, (groups, Nk - last), as kvpress does.

    The mean over the last queries and the query heads of a group replaces the sum; the
    pooling is the same.
    """
    scores = sum_window(record, last, pool).share(record.k.shape[0], "mean")
    how = f"C: mean over the last {last} queries and the group, pooled over {pool} keys"
    return NamedArray(
        pool_keys(to_float64(scores) / last, last, pool), ("group", "key"), how
    )


def sum_window(record: Record, last: int, pool: int) -> NamedArray:
    """Return the mass on each key from the last queries, (H, Nk)."""
    n_q, n = record.q.shape[1], record.k.shape[1]
    if not 0 < last < n or last > n_q or pool < 1 or pool % 2 == 0:
        raise OptionError(
            f"last={last} and pool={pool} for {n_q} queries and {n} keys, expected "
            "some of these queries, fewer queries than keys, and an odd pool."
        )
    return received(record, rows=slice(-last, None))


def pool_keys(scores: Numbers, last: int, pool: int) -> Numbers:
    """Return the scores averaged over neighbouring keys, without the last keys."""
    some = torch.as_tensor(scores[:, : scores.shape[1] - last])
    pooled = torch.nn.functional.avg_pool1d(some, pool, 1, pool // 2)
    return pooled.numpy()  # type: ignore[no-any-return]


def tova(record: Record) -> NamedArray:
    """Return the last query's weight on each key, averaged over all heads, (Nk,).

    As in the code of Oren et al. 2024 ("Transformers are Multi-State RNNs"), which
    averages the last row over the heads of a layer.
    """
    weights = mark_nonfinite(record).weights(slice(-1, None))  # (H, 1, Nk)
    values = torch.as_tensor(weights).detach().cpu().double().mean((0, 1)).numpy()
    return NamedArray(values, ("key",), "last row, mean over heads")


def kvzip(record: Record, context: Span) -> NamedArray:
    """Return the importance of each key of a context, (groups, keys of the context).

    The largest weight on the key over all queries of a second input and all query heads
    of a group. The second input makes the model repeat its context: "Repeat the
    previous context:", then the context again (Kim et al. 2025, "KVzip", Section 3 and
    the pseudocode of Appendix A, for a context of one chunk).

    record: the context and the second input in one sequence
    context: the span of the context; all later queries count
    """
    first, last = read_span(context)
    rows = np.flatnonzero(to_numpy(record.q_positions) >= last)
    keys = mark_spans([(first, last)], record.k_positions)[:, 0]
    if not rows.size or not keys.any():
        raise OptionError(
            f"{record.name} has {rows.size} queries after the context {(first, last)} "
            f"and {keys.sum()} keys in it, expected at least one of each: the record "
            "of a prompt that repeats its context."
        )
    (found,) = walk(cut_rows(record, rows), ColumnMax())
    how = f"{found.how} after position {last - 1}"
    named = NamedArray(to_float64(found)[:, keys], ("head", "key"), how)
    return named.share(record.k.shape[0], "max")
