"""Statistics with a name, each under its published definition.

    A[i, j]       weight of query i on key j of one head, T queries and keys
    scores        one number for each head, or for each key, as their authors have it

They differ in what seems a detail: a mean or a sum, over which rows, before or after
the heads of a group are put together. Each says it, and is tested against its formula
written out on the whole matrix. Names are those of the papers; a score is a mass, not
what caused an answer: knock the head out (lens/intervene.py) before saying so.

Next: table.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from regard.arrays import to_numpy
from regard.errors import OptionError
from regard.masks.patterns import causal, same, window
from regard.record import Record
from regard.stats.cells import induction, offset
from regard.stats.columns import mean_received, received
from regard.stats.features import read_span
from regard.stats.named import Named, Reduction
from regard.stats.reducers import ColumnMax, LargestLogit
from regard.stats.rows import divide, masked_mass, span_mass, span_pairs
from regard.stats.strongest import TopK
from regard.stats.walk import read_heads, walk

Numbers = np.ndarray[Any, np.dtype[Any]]
Span = Iterable[int]  # first position, one past the last; as seen.spans finds them


def take(named: Named) -> Numbers:
    """Return the numbers of a statistic in float64."""
    return to_numpy(named.values).astype("float64")


def sink_rate(record: Record, *, key: int = 0) -> Named:
    """Return how much the queries that may see a key give it, in the mean, (H,).

    α_k = Σ_i A[i, k] / (T - k); heads with α_0 > 0.3 are counted as sinks
    (Gu et al. 2024, "When Attention Sink Emerges in Language Models").
    """
    n = record.k.shape[1]
    if not 0 <= key < n:
        raise OptionError(
            f"key={key}: {record.name} has {n} keys, expected one of them, from 0 on."
        )
    values = take(mean_received(record))[:, key]
    return Named(values, ("head",), f"C: mean over queries that may see key {key}")


def previous_token(record: Record) -> Named:
    """Return the mean weight on the token before, over queries that have one, (H,)."""
    return mean_of(offset(record, 1))


def induction_score(record: Record, tokens: Sequence[int]) -> Named:
    """Return the mean weight on the key after the last earlier same token, (H,).

    Over the queries that have one (Olsson et al. 2022, "In-context Learning and
    Induction Heads", on any text instead of repeated random tokens).
    """
    return mean_of(induction(record, tokens))


def duplicate_token(record: Record, tokens: Sequence[int]) -> Named:
    """Return the share of the weight on earlier tokens that are the same, (H,).

    Σ A·P / Σ A with P[i, j] = (token_i == token_j and j < i)
    (the head detector of TransformerLens, error measure "mul").
    """
    ids = np.asarray(tokens)
    mass = take(masked_mass(record, same(ids) & causal() & ~window(0)))
    whole = take(masked_mass(record, window(len(ids), len(ids))))
    how = "M: mass on earlier equal tokens over all mass"
    return Named(divide(mass.sum(1), whole.sum(1)), ("head",), how)


def retrieval_score(record: Record, tokens: Sequence[int], needle: Span) -> Named:
    """Return the share of a needle that each head copied, (H,).

    At each query the strongest key counts if it is in the needle and its token is the
    one that comes next; distinct tokens found over distinct tokens of the needle
    (Wu et al. 2024, "Retrieval Head Mechanistically Explains Long-Context Factuality").
    """
    first, last = read_span(needle)
    ids, rows = np.asarray(tokens), to_numpy(record.q_positions)
    if not first < last <= len(ids) or rows.max(initial=-1) >= len(ids):
        raise OptionError(
            f"needle={(first, last)} in {len(ids)} tokens for queries up to "
            f"{rows.max(initial=-1)}, expected the tokens of the whole sequence, at "
            "least one of them in the needle."
        )
    (strongest,) = walk(record, TopK(1))
    index = to_numpy(strongest.index.values)[..., 0]  # (H, Nq)
    keys = to_numpy(record.k_positions)
    wanted = {int(x) for x in ids[first:last]}
    scores = np.zeros(record.heads)
    following = np.append(ids[1:], -1)[rows]
    for h, row in enumerate(index):
        at = np.append(keys, -1)[row]  # -1 is no key
        hit = (at >= first) & (at < last)
        hit &= ids[np.where(hit, at, 0)] == following
        scores[h] = len({int(x) for x in following[hit]} & wanted) / len(wanted)
    return Named(scores, ("head",), "walk: top 1; distinct needle tokens copied")


def lookback_ratio(record: Record, context: int) -> Named:
    """Return, for each new token, how much of its look goes back, (H, new tokens).

    mean over the context of A / (that + mean over the new tokens), where the new ones
    are those from `context` up to the query itself
    (Chuang et al. 2024, "Lookback Lens").
    """
    if context < 1:
        raise OptionError(f"context={context}, expected at least 1 token before.")
    rows = to_numpy(record.q_positions)
    new = rows >= context
    spans = [(0, context), (context, int(rows.max(initial=context)) + 1)]
    mass = take(span_mass(record, spans))[:, new]  # (H, new, 2)
    back = mass[..., 0] / context
    ahead = mass[..., 1] / (rows[new] - context + 1)
    how = "R: mean weight on the context over the sum of both means"
    return Named(divide(back, back + ahead), ("head", "query"), how)


def attention_tracker(record: Record, instruction: Span, data: Span) -> Named:
    """Return what the last token gives an instruction, of both, (H,).

    mass on the instruction / (mass on the instruction + mass on the data)
    (Hung et al. 2024, "Attention Tracker: Detecting Prompt Injection Attacks").
    """
    if not record.q.shape[1]:
        raise OptionError(f"{record.name} has no queries, so none of them is the last.")
    mass = take(span_mass(record, [instruction, data]))[:, -1]
    how = "R: last query, two spans"
    return Named(divide(mass[:, 0], mass.sum(-1)), ("head",), how)


def rerank_score(record: Record, query: Span, documents: Sequence[Span]) -> Named:
    """Return what the tokens of a question give each document, (H, documents).

    Σ over the document's tokens of the mean over the question's tokens of A. The
    authors add up all heads and layers, and take away the same for a question without
    content, "N/A", token by token
    (Chen et al. 2024, "Attention in Large Language Models Yields Efficient Zero-Shot
    Re-Rankers").
    """
    found = span_pairs(record, [query], documents, per="query")
    how = "R: mean over the question of the mass on a document"
    return Named(take(found)[:, 0], ("head", "document"), how)


def h2o(record: Record) -> Named:
    """Return what each key received from all queries, (H, Nk), a sum.

    Σ_i A[i, j] (Zhang et al. 2023, "H2O: Heavy-Hitter Oracle"); kvpress divides by the
    number of queries that may see the key: mean_received.
    """
    return received(record)


def snapkv(record: Record, *, last: int = 64, pool: int = 5) -> Named:
    """Return the score of the keys before the last queries, (groups, Nk - last).

    mean over the last queries of A, mean over the query heads of a group, then a mean
    over `pool` keys with zeros outside (Li et al. 2024, "SnapKV", as in kvpress).
    """
    n_q, n = record.q.shape[1], record.k.shape[1]
    if not 0 < last < n or last > n_q or pool < 1 or pool % 2 == 0:
        raise OptionError(
            f"last={last} and pool={pool} for {n_q} queries and {n} keys, expected "
            "some of these queries, fewer queries than keys, and an odd pool."
        )
    found = received(record, rows=slice(-last, None)).share(record.k.shape[0], "mean")
    scores = torch.as_tensor(take(found)[:, : n - last] / last)
    pooled = torch.nn.functional.avg_pool1d(scores, pool, 1, pool // 2)
    how = f"C: mean over the last {last} queries and the group, pooled over {pool} keys"
    return Named(pooled.numpy(), ("group", "key"), how)


def tova(record: Record) -> Named:
    """Return what the last query gives each key, in the mean of all heads, (Nk,).

    (Oren et al. 2024, "Transformers are Multi-State RNNs")
    """
    weights = torch.as_tensor(record.weights(slice(-1, None)))  # (H, 1, Nk)
    values = weights.detach().double().mean((0, 1)).numpy()
    return Named(values, ("key",), "last row, mean over heads")


def kvzip(record: Record, *, reduction: Reduction = "max") -> Named:
    """Return the largest weight that any query gives each key, (groups, Nk).

    max over queries and over the query heads of a group, of a pass in which the model
    repeats its context (Kim et al. 2025, "KVzip", as in kvpress).
    """
    (found,) = walk(record, ColumnMax())
    shared: Named = found.share(record.k.shape[0], reduction)
    return shared


def laplacian_diagonal(record: Record) -> Named:
    """Return the eigenvalues of the attention's Laplacian, (H, T), by key.

    L = D - A is triangular, so they are its diagonal, D[j, j] - A[j, j], with
    D[j, j] = Σ_i A[i, j] / (T - j)
    (Binkowski et al. 2025, "Hallucination Detection in LLMs Using Spectral Features of
    Attention Maps").
    """
    places = to_numpy(record.q_positions), to_numpy(record.k_positions)
    if not np.array_equal(*places):
        raise OptionError(
            f"{record.name} has {len(places[0])} queries and {len(places[1])} keys, "
            "expected the same tokens: a sequence that looks at itself."
        )
    values = take(mean_received(record)) - take(offset(record, 0))
    return Named(values, ("head", "key"), "C and D: mean received - diagonal")


def alignment(record: Record, heads: Sequence[int]) -> Named:
    """Return whole rows of a few heads, (heads, Nq, Nk), as Whisper aligns words.

    (Radford et al. 2022; a list of such heads belongs to each of its models.)
    """
    chosen = read_heads(record, heads)
    if not chosen:
        raise OptionError("an empty list of heads, expected numbers such as [3, 5].")
    rows = [to_numpy(record.weights(heads=slice(h, h + 1))) for h in chosen]
    axes = ("head", "query", "key")
    return Named(np.concatenate(rows), axes, "whole rows of chosen heads")


def largest_logit(record: Record) -> Named:
    """Return the largest logit of each head, (H,), for a monitor of training.

    max over i, j of the scaled score (Kimi Team 2025, QK-Clip; no sink, before any
    softmax).
    """
    (found,) = walk(record, LargestLogit())
    return max_of(found)


def max_of(named: Named) -> Named:
    """Return the largest of all queries, (H,); NaN if none has one."""
    top = take(named).max(1, initial=-np.inf)
    top = np.where(top == -np.inf, np.nan, top)
    return Named(top, ("head",), f"{named.how}; max over queries")


def mean_of(named: Named) -> Named:
    """Return the mean over the queries that have the cell, (H,)."""
    values = take(named)
    there = ~np.isnan(values)
    total = np.where(there, values, 0).sum(1)
    count = there.sum(1)
    mean = np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0)
    return Named(mean, ("head",), f"{named.how}; mean over queries that have it")
