"""Statistics of each query's weights, without storing them.

    mass            sum_j w_ij F_j                          [R] the kernel with V := F
    entropy         - sum_j w_ij log w_ij                   [H] the kernel with V := K
    masked_mass     sum of w_ij over a mask's cells         [M] exp(lse' - lse)

w_ij is exp(logits_ij - lse_i). As its log, scale q_i · k_j - lse_i, is linear in k,

    - sum_j w_ij log w_ij = lse_i sum_j w_ij - scale q_i · (sum_j w_ij k_j)

also holds with a sink, which takes mass but is not a key. With a softcap or a bias,
logits are not linear in k, and the entropy is computed from strips of the weights.

Each statistic has an `ask_…` function, which returns a request that a plan can combine
with others, and one that computes it directly. The mean of a query without keys is NaN
and marked as missing (named_array.py). Other NaN come from the record (nonfinite.py).

Next: columns.py
"""

from __future__ import annotations

import math
from typing import Literal

from regard.arrays import Array, constant, convert, namespace, to_numpy
from regard.errors import MaskError, OptionError
from regard.masks.algebra import Mask
from regard.recording.record import Record
from regard.stats.features import Spans, mark_spans, read_features
from regard.stats.kernel_pass import RowMeasure, has_kernels
from regard.stats.named_array import NamedArray
from regard.stats.nonfinite import mark_nonfinite
from regard.stats.plan import Ask, DirectAsk, Finish, answer_one
from regard.stats.replay import to_compute_dtype

Per = Literal["sum", "query", "cell"]
CELLS = 2**22  # in a strip of weights
STRIPS = 4.0  # approximate cost of all strips, in forward calls


def mass(record: Record, features: Array) -> NamedArray:
    """Return the mass of each query on features of the keys, (H, Nq, F).

    features: (Nk, F), or (Hk or H, Nk, F); booleans select keys
    """
    return answer_one(ask_mass(record, features))


def ask_mass(record: Record, features: Array) -> Ask:
    """Return a request for the mass on features of the keys."""
    values = read_features(record, features, *record.k.shape[:2])
    axes, how = ("head", "query", "feature"), "R: the kernel with V := features"
    return ask(record, values, lambda sums, _: NamedArray(sums, axes, how))


def span_mass(record: Record, spans: Spans) -> NamedArray:
    """Return the mass of each query on each span of positions, (H, Nq, spans)."""
    return answer_one(ask_span_mass(record, spans))


def ask_span_mass(record: Record, spans: Spans) -> Ask:
    """Return a request for the mass on spans (first, last), last not included."""
    values = mark_keys(record, spans)
    axes, how = ("head", "query", "span"), "R: the kernel with V := spans of keys"
    return ask(record, values, lambda sums, _: NamedArray(sums, axes, how))


def span_pairs(record: Record, queries: Spans, keys: Spans, *, per: Per) -> NamedArray:
    """Return the mass from spans of queries to spans of keys, (H, spans, spans).

    per: "sum", the total; "query", the mean over the queries of a span; "cell", the
    mean over all cells of both spans, masked or not
    """
    return answer_one(ask_span_pairs(record, queries, keys, per=per))


def ask_span_pairs(record: Record, queries: Spans, keys: Spans, *, per: Per) -> Ask:
    """Return a request for the mass from spans of queries to spans of keys."""
    if per not in ("sum", "query", "cell"):
        raise OptionError(f'per={per!r}, expected "sum", "query" or "cell".')
    values = mark_keys(record, keys)
    xp, rows = namespace(q=record.q), mark_spans(queries, record.q_positions)
    of = xp.astype(convert(rows, record.q), values.dtype)  # (Nq, query spans)
    n_rows, n_keys = xp.sum(of, axis=0)[:, None], xp.sum(values[0, ...], axis=0)
    one = constant(1, values)
    divisor = {"sum": one, "query": n_rows, "cell": n_rows * n_keys}[per]
    axes = ("head", "query span", "key span")
    how = f"R: the kernel with V := spans of keys; per {per}"

    def finish(sums: Array, _: Array) -> NamedArray:
        lost = xp.isnan(sums)  # NaN must not reach other spans
        found = xp.matmul(of.T, xp.where(lost, constant(0, sums), sums))
        reached = xp.matmul(of.T, xp.astype(lost, of.dtype)) > 0
        found = xp.where(reached, constant(math.nan, sums), found)
        return NamedArray(divide_quietly(found, divisor), axes, how)

    return ask(record, values, finish)


def entropy(record: Record) -> NamedArray:
    """Return the entropy of each query's weights over the keys, in nats, (H, Nq)."""
    return answer_one(ask_entropy(record))


def ask_entropy(record: Record) -> Ask | DirectAsk:
    """Return a request for the entropy of the rows."""
    if has_kernels(record):
        return ask_measure(record, "entropy")
    record = mark_nonfinite(record)
    if record.softcap is not None or record.bias is not None:
        why = "a softcap" if record.bias is None else "a bias"
        how = f"strips of the weights, as {why} makes logits not linear in k"
        return DirectAsk(
            what=f"{record.name}: {how}",
            cost=STRIPS,
            compute=lambda: NamedArray(walk_entropy(record), ("head", "query"), how),
        )
    xp, (q, k) = namespace(q=record.q), to_compute_dtype(record)
    lse = xp.where(record.lse == -math.inf, constant(0, record.lse), record.lse)

    def finish(sums: Array, total: Array) -> NamedArray:
        values = lse * total - record.scale * xp.sum(q * sums, axis=-1)
        return NamedArray(lift(values), ("head", "query"), "H: the kernel with V := K")

    return ask(record, k, finish)


def walk_entropy(record: Record) -> Array:
    """Return the entropy, computed from the weights in strips of rows."""
    xp, n_q = namespace(q=record.q), record.q.shape[1]
    step = max(1, CELLS // max(1, record.heads * record.k.shape[1]))
    strips = [constant(0, record.lse, (record.heads, 0))]
    for first in range(0, n_q, step):
        w = record.weights(slice(first, first + step))
        seen = xp.where(w <= 0, constant(1, w), w)  # 0 log 0 is 0, NaN stays NaN
        strips.append(lift(-xp.sum(seen * xp.log(seen), axis=-1)))
    return xp.concat(strips, axis=1)


def mean_position(record: Record) -> NamedArray:
    """Return the mean key position under each query's weights, (H, Nq)."""
    return answer_one(ask_mean_position(record))


def ask_mean_position(record: Record) -> Ask:
    """Return a request for the mean position of the keys."""
    values, middle = centre_positions(record)

    def finish(sums: Array, total: Array) -> NamedArray:
        mean = divide_quietly(sums[..., 0], total) + middle
        how = "R: the kernel with V := positions"
        return NamedArray(mean, ("head", "query"), how, missing=total == 0)

    return ask(record, values, finish)


def mean_distance(record: Record) -> NamedArray:
    """Return the mean signed distance q - k under each query's weights, (H, Nq).

    The error is that of the positions: in float32, 1e-7 of the length of the text.
    """
    return answer_one(ask_mean_distance(record))


def ask_mean_distance(record: Record) -> Ask:
    """Return a request for the mean of q - k."""
    values, middle = centre_positions(record)
    xp, at = namespace(q=record.q), to_numpy(record.q_positions) - middle
    at = xp.astype(convert(at, record.q), values.dtype)

    def finish(sums: Array, total: Array) -> NamedArray:
        mean = at - divide_quietly(sums[..., 0], total)
        how = "R: the kernel with V := positions"
        return NamedArray(mean, ("head", "query"), how, missing=total == 0)

    return ask(record, values, finish)


def masked_mass(record: Record, mask: Mask) -> NamedArray:
    """Return the mass of each query on the keys that a mask allows, (H, Nq).

    mask: a formula of positions, such as window(127) or keys(0, 4); cells that the
    record's mask forbids have no mass
    """
    return answer_one(ask_masked_mass(record, mask))


def ask_masked_mass(record: Record, mask: Mask) -> Ask:
    """Return a request for the mass on the keys that a mask allows."""
    if not isinstance(mask, Mask):
        raise MaskError(
            f"mask is a {type(mask).__name__}, expected a formula such as window(127). "
            "Write regard.masks.array(x) for an array."
        )
    how = f"M: exp(lse' - lse), the kernel within {mask!r}"
    return Ask(
        record=mark_nonfinite(record),
        side="rows",
        features=None,
        finish=lambda _, total: NamedArray(total, ("head", "query"), how),
        within=mask,
    )


def ask(record: Record, values: Array, finish: Finish) -> Ask:
    """Return a request for sums over the keys."""
    marked = mark_nonfinite(record)
    return Ask(record=marked, side="rows", features=values, finish=finish)


def ask_measure(record: Record, name: Literal["entropy", "largest_logit"]) -> Ask:
    """Return a request for a number of each query; only for records on a GPU."""
    how = f"a kernel over all weights: {name}"

    def finish(sums: Array, _: Array) -> NamedArray:
        return NamedArray(sums[..., 0], ("head", "query"), how)

    return Ask(
        record=mark_nonfinite(record),
        side="rows",
        features=RowMeasure(name),
        finish=finish,
    )


def mark_keys(record: Record, spans: Spans) -> Array:
    """Return the keys of each span as features."""
    marks = mark_spans(spans, record.k_positions)
    return read_features(record, marks, *record.k.shape[:2])


def centre_positions(record: Record) -> tuple[Array, int]:
    """Return key positions relative to their mean, to reduce rounding, and the mean."""
    at = to_numpy(record.k_positions)
    middle = int(at.mean()) if at.size else 0
    values = (at - middle).astype("float64")[:, None]
    return read_features(record, values, *record.k.shape[:2]), middle


def lift(x: Array) -> Array:
    """Replace negative values, which come from rounding, by 0; keep NaN."""
    return namespace(x=x).where(x < 0, constant(0, x), x)


def divide_quietly(x: Array, y: Array) -> Array:
    """Return x / y, with NaN where y is 0, without a warning."""
    xp = namespace(x=x)
    none = y == 0
    nan = constant(math.nan, x)
    return xp.where(none, nan, x / xp.where(none, constant(1, y), y))
