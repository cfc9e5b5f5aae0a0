"""Published scores that classify heads: one number for each head, or for each key.

    A[i, j]   weight of query i on key j in one head; T tokens, positions from 0

    sink_rate             Σ_{i≥k} A[i, k] / (T - k)                     Gu et al. 2024
    previous_token        mean of A[i, i-1]                             TransformerLens
    prefix_matching       mean of A[i, j+1] over j < i of the same token    Olsson 2022
    duplicate_token       Σ A·P / Σ A, P: earlier same tokens           TransformerLens
    laplacian_diagonal    Σ_i A[i, j] / (T - j) - A[j, j]               Binkowski 2025
    largest_logit         max of scale q_i · k_j                        Kimi Team 2025

T - k is the number of queries at or after key k, whether or not a mask lets them attend
to it. The `visible_…` variants divide by the number of queries that may attend to the
key, which is much smaller in a layer with a window.

Next: text_scores.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from regard.arrays import constant, namespace, to_numpy
from regard.errors import OptionError
from regard.masks.patterns import causal, same, window
from regard.recording.record import Record
from regard.stats.cells import induction, offset, weigh_pairs
from regard.stats.columns import mean_received, received
from regard.stats.named_array import NamedArray
from regard.stats.nonfinite import mark_nonfinite
from regard.stats.over_queries import Numbers, find_missing, max_of, mean_of, to_float64
from regard.stats.reducers import LargestLogit
from regard.stats.rows import divide_quietly, masked_mass, mass
from regard.stats.tile_walk import walk

__all__ = [
    "duplicate_token",
    "induction_score",
    "laplacian_diagonal",
    "largest_logit",
    "largest_softmax_logit",
    "prefix_matching",
    "previous_token",
    "previous_token_share",
    "sink_rate",
    "visible_laplacian_diagonal",
    "visible_sink_rate",
]


def sink_rate(record: Record, *, key: int = 0) -> NamedArray:
    """Return the importance score of a key, (H,): α_k of Gu et al. 2024.

    α_k = Σ_{i≥k} A[i, k] / (T - k): the weight on key k, averaged over all queries at
    or after it. A query whose window excludes the key counts as 0. The paper calls
    a head a sink if α_0 > 0.3 ("When Attention Sink Emerges in Language Models").
    If the record has generated rows only, the average is over these.
    """
    check_key(record, key)
    first = to_numpy(record.k_positions)[key]
    rows = np.flatnonzero(to_numpy(record.q_positions) >= first)
    weights = to_numpy(weigh_pairs(record, rows, np.full(rows.size, key)))
    values = divide_quietly(
        weights.astype("float64").sum(1), np.full(1, float(rows.size))
    )
    return NamedArray(
        values, ("head",), f"D: mean over the {rows.size} queries from {key}"
    )


def visible_sink_rate(record: Record, *, key: int = 0) -> NamedArray:
    """Return the weight on a key, averaged over queries that may attend to it, (H,).

    A variant of `sink_rate` for layers with a window, where α_k decreases with T.
    """
    check_key(record, key)
    values = to_float64(mean_received(record))[:, key]
    return NamedArray(values, ("head",), f"C: mean over queries that may see key {key}")


def previous_token(record: Record) -> NamedArray:
    """Return the mean weight on the previous token, (H,).

    The mean of the diagonal below the main one, A[i, i-1], over the T - 1 queries that
    have a previous token, as in the tutorials of TransformerLens.
    """
    return mean_of(offset(record, 1))


def previous_token_share(record: Record) -> NamedArray:
    """Return the share of the weight that is on the previous token, (H,).

    Σ A·P / Σ A with P[i, j] = (j == i - 1): `detect_head` of TransformerLens with
    "previous_token_head" and its default error measure, "mul". Unlike in
    `previous_token`, the denominator includes the first query.
    """
    found = offset(record, 1)
    total = np.where(find_missing(found), 0, to_float64(found)).sum(1)
    how = f"{found.how}; sum over the whole mass"
    return NamedArray(divide_quietly(total, sum_mass(record)), ("head",), how)


def induction_score(record: Record, tokens: Sequence[int]) -> NamedArray:
    """Return the mean weight on the key after the last earlier equal token, (H,).

    The mean of A[i, j+1], j the last position before i with token_j == token_i, over
    the queries that have one. On random tokens repeated once it is the mean of the
    induction stripe, like `prefix_matching`; with more repeats, or on natural text,
    only the last occurrence counts here.
    """
    return mean_of(induction(record, tokens))


def prefix_matching(record: Record, tokens: Sequence[int]) -> NamedArray:
    """Return the prefix matching score, (H,), of Olsson et al. 2022.

    The mean of all A[i, j+1] with j < i and token_j == token_i: from each token to its
    successor in every earlier repeat ("In-context Learning and Induction Heads"). The
    paper uses 25 random tokens, repeated four times.
    """
    ids, at = np.asarray(tokens), to_numpy(record.q_positions)
    if at.max(initial=-1) >= ids.size:
        raise OptionError(
            f"{record.name}: {ids.size} tokens, and a query at position {at.max()}; "
            "expected the tokens of the whole sequence."
        )
    before = np.append(ids.min(initial=0) - 1, ids[:-1])  # the token before each key
    entries = count_entries(ids, to_numpy(record.k_positions))[at]
    mask = same(ids, before) & causal()
    sums = to_float64(masked_mass(record, mask))[:, entries > 0].sum(1)
    how = "M: mass on what followed earlier same tokens; mean over the entries"
    return NamedArray(
        divide_quietly(sums, np.full(1, float(entries.sum()))), ("head",), how
    )


def duplicate_token(record: Record, tokens: Sequence[int]) -> NamedArray:
    """Return the share of the weight that is on earlier equal tokens, (H,).

    Σ A·P / Σ A with P[i, j] = (token_i == token_j and j < i): `detect_head` of
    TransformerLens with "duplicate_token_head" and its error measure "mul".
    """
    found = to_float64(
        masked_mass(record, same(np.asarray(tokens)) & causal() & ~window(0))
    )
    how = "M: mass on earlier equal tokens over all mass"
    return NamedArray(divide_quietly(found.sum(1), sum_mass(record)), ("head",), how)


def laplacian_diagonal(record: Record) -> NamedArray:
    """Return the diagonal of the attention's Laplacian, (H, T), by key.

    L = D - A with D[j, j] = Σ_i A[i, j] / (T - j). If attention is causal, L is
    triangular and its diagonal holds its eigenvalues, of which the authors use the
    largest (Binkowski et al. 2025, "Hallucination Detection in LLMs Using Spectral
    Features of Attention Maps"). Their released code differs from the paper: it uses
    the diagonal of the next layer for the edges of a token to itself.
    """
    check_square(record)
    degree = divide_quietly(to_float64(received(record)), count_after(record))
    values = degree - to_float64(offset(record, 0))
    return NamedArray(values, ("head", "key"), "C and D: received / (T - j) - diagonal")


def visible_laplacian_diagonal(record: Record) -> NamedArray:
    """Return the same, with D[j, j] over queries that may attend to key j, (H, T)."""
    check_square(record)
    values = to_float64(mean_received(record)) - to_float64(offset(record, 0))
    return NamedArray(values, ("head", "key"), "C and D: mean received - diagonal")


def largest_logit(record: Record) -> NamedArray:
    """Return the largest attention logit of each head, (H,): S_max of QK-Clip.

    S_max = max over i, j of q_i · k_j / √d (Kimi Team 2025, "Kimi K2: Open Agentic
    Intelligence"), with the record's scale in place of 1 / √d: before a softcap, which
    would hide its growth, and without a bias. Masked pairs do not count. For a batch,
    take the largest of its sequences.
    """
    record = mark_nonfinite(record)
    bias = record.bias
    if bias is not None:  # cells with a bias of -inf stay masked
        hidden = bias == -math.inf
        bias = namespace(x=bias).where(hidden, bias, constant(0, bias))
    (found,) = walk(replace(record, softcap=None, bias=bias), LargestLogit())
    return max_of(found)


def largest_softmax_logit(record: Record) -> NamedArray:
    """Return the largest input of the softmax, (H,): after the softcap and the bias.

    The column "logit" of `seen.table()`.
    """
    (found,) = walk(record, LargestLogit())
    return max_of(found)


def check_key(record: Record, key: int) -> None:
    """Raise OptionError if the record has no key with this index."""
    n = record.k.shape[1]
    if not 0 <= key < n:
        raise OptionError(
            f"key={key}: {record.name} has {n} keys, expected one of them, from 0 on."
        )


def check_square(record: Record) -> None:
    """Raise OptionError unless queries and keys are the same tokens."""
    places = to_numpy(record.q_positions), to_numpy(record.k_positions)
    if not np.array_equal(*places):
        raise OptionError(
            f"{record.name} has {len(places[0])} queries and {len(places[1])} keys, "
            "expected the same tokens: a sequence that looks at itself."
        )


def count_after(record: Record) -> Numbers:
    """Return the number of queries at or after each key, (Nk,): T - j."""
    q, k = np.sort(to_numpy(record.q_positions)), to_numpy(record.k_positions)
    return (q.size - np.searchsorted(q, k)).astype("float64")


def count_entries(ids: Numbers, keys: Numbers) -> Numbers:
    """Count, for each token, the earlier equal tokens whose successor is a key."""
    there, seen = set(keys.tolist()), dict[int, int]()
    counts = []
    for at, token in enumerate(ids.tolist()):
        counts.append(seen.get(token, 0))
        seen[token] = seen.get(token, 0) + (at + 1 in there)
    return np.asarray(counts, dtype=np.int64)


def sum_mass(record: Record) -> Numbers:
    """Return the sum of all weights of each head, (H,)."""
    whole = mass(record, np.ones((record.k.shape[1], 1)))
    total: Numbers = to_float64(whole)[..., 0].sum(1)
    return total
