"""Kernels that store tokens packed, in pages or in a cache, each with one mistake."""

from itertools import pairwise

import numpy as np

from broken.registry import breaks, hide, right, scores, softmax
from regard.judge.storage import Storage

VARLEN = {
    "layout": "bnhd",
    "causal": "causal",
    "causal_from": "end",
    "storage": Storage(kind="varlen", cu_q="cu_q", cu_k="cu_k"),
}
PAGED = {
    "layout": "bnhd",
    "storage": Storage(kind="paged", table="table", lengths="lengths"),
}
CACHE = {
    "layout": "bnhd",
    "storage": Storage(kind="cache", lengths="lengths", k="k", v="v"),
}


def attend(q, k, v, causal=False):
    """Attend within one sequence, (N, H, D); causal from the end; 0 without keys."""
    q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))
    if not k.shape[1]:
        return np.zeros((q.shape[1], len(q), v.shape[-1]), q.dtype)
    if not causal:
        return right(q, k, v).swapaxes(0, 1)
    n, m = q.shape[1], k.shape[1]
    seen = np.arange(m) <= np.arange(n)[:, None] + m - n
    wide = [x.astype(np.promote_types(x.dtype, np.float32)) for x in (q, k, v)]
    out = softmax(hide(scores(*wide[:2]), seen)) @ wide[2]
    return out.astype(q.dtype).swapaxes(0, 1)


def ranges(cu):
    return [slice(*pair) for pair in pairwise(cu)]


def packed(q, k, v, cu_q, cu_k, causal=False):
    """The same without a mistake."""
    out = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    for rows, keys in zip(ranges(cu_q), ranges(cu_k), strict=True):
        out[rows] = attend(q[rows], k[keys], v[keys], causal)
    return out


@breaks("packed_sequences_do_not_mix", **VARLEN)
def ignores_the_offsets(q, k, v, cu_q, cu_k, causal=False):
    return attend(q, k, v, causal)


@breaks("packed_sequences_do_not_mix", **VARLEN)
def takes_all_for_as_long_as_the_first(q, k, v, cu_q, cu_k, causal=False):
    out = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    for first in cu_k[:-1]:
        keys = slice(first, first + cu_k[1])
        out[keys] = attend(q[keys], k[keys], v[keys], causal)
    return out


@breaks("packed_sequences_do_not_mix", **VARLEN)
def reads_one_past_the_end(q, k, v, cu_q, cu_k, causal=False):
    out = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    for rows, keys in zip(ranges(cu_q), ranges(cu_k), strict=True):
        more = slice(keys.start, keys.stop + 1)
        out[rows] = attend(q[rows], k[more], v[more], causal)
    return out


@breaks("packed_keys_have_own_lengths", **VARLEN)
def reads_keys_at_the_queries(q, k, v, cu_q, cu_k, causal=False):
    cu = np.minimum(cu_q, len(k))
    return packed(q, k, v, cu_q, cu, causal)


@breaks("packed_causal_counts_from_each", **VARLEN)
def counts_rows_from_the_pack(q, k, v, cu_q, cu_k, causal=False):
    if not causal:
        return packed(q, k, v, cu_q, cu_k)
    out = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    for rows, keys in zip(ranges(cu_q), ranges(cu_k), strict=True):
        for i in range(rows.start, rows.stop):  # should be i - rows.start
            some = slice(keys.start, min(keys.start + i + 1, keys.stop))
            out[i : i + 1] = attend(q[i : i + 1], k[some], v[some])
    return out


@breaks("packed_causal_counts_from_each", **VARLEN)
def aligns_with_the_first_key(q, k, v, cu_q, cu_k, causal=False):
    out = packed(q, k, v, cu_q, cu_k)
    for rows, keys in zip(ranges(cu_q), ranges(cu_k), strict=True):
        for i in range((rows.stop - rows.start) * causal):
            some = slice(keys.start, min(keys.start + i + 1, keys.stop))
            at = slice(rows.start + i, rows.start + i + 1)
            out[at] = attend(q[at], k[some], v[some])
    return out


@breaks("packed_sequence_may_be_empty", **VARLEN)
def loses_the_place_of_empty_sequences(q, k, v, cu_q, cu_k, causal=False):
    rows = [x for x in ranges(cu_q) if x.stop > x.start]
    out = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    for one, keys in zip(rows, ranges(cu_k), strict=False):
        out[one] = attend(q[one], k[keys], v[keys], causal)
    return out


@breaks("packed_blocks_end_with_sequence", **VARLEN)
def masks_only_the_first_block(q, k, v, cu_q, cu_k, causal=False):
    out = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    for rows, keys in zip(ranges(cu_q), ranges(cu_k), strict=True):
        n = keys.stop - keys.start
        read = -(-n // 64) * 64 if n > 64 else n  # the second block, to its end
        some = slice(keys.start, min(len(k), keys.start + read))
        out[rows] = attend(q[rows], k[some], v[some], causal)
    return out


def paged(q, k_cache, v_cache, table, lengths):
    """The same without a mistake."""
    found = []
    for one, pages, n in zip(q, table, lengths, strict=True):
        k, v = (x[pages].reshape(-1, *x.shape[2:])[:n] for x in (k_cache, v_cache))
        found.append(attend(one, k, v))
    return np.stack(found)


@breaks("pages_follow_the_table", **PAGED)
def reads_pages_in_order(q, k_cache, v_cache, table, lengths):
    order = np.arange(table.size).reshape(table.shape)
    return paged(q, k_cache, v_cache, order, lengths)


@breaks("pages_follow_the_table", **PAGED)
def reads_the_pages_of_another_request(q, k_cache, v_cache, table, lengths):
    return paged(q, k_cache, v_cache, table[[0] * len(table)], lengths)


@breaks("last_page_may_be_partial", **PAGED)
def reads_whole_pages(q, k_cache, v_cache, table, lengths):
    size = k_cache.shape[1]
    return paged(q, k_cache, v_cache, table, -(-lengths // size) * size)


@breaks("pages_end_with_each_sequence", **PAGED)
def reads_as_far_as_the_longest(q, k_cache, v_cache, table, lengths):
    return paged(q, k_cache, v_cache, table, [max(lengths)] * len(lengths))


@breaks("unused_pages_are_not_read", **PAGED)
def hides_only_the_scores(q, k_cache, v_cache, table, lengths):
    found = []
    for one, pages, n in zip(q, table, lengths, strict=True):
        k, v = (x[pages].reshape(-1, *x.shape[2:]) for x in (k_cache, v_cache))
        wide = [x.swapaxes(0, 1).astype(np.float64) for x in (one, k, v)]
        seen = np.arange(len(k)) < n
        out = softmax(hide(scores(*wide[:2]), seen)) @ wide[2]
        found.append(out.swapaxes(0, 1).astype(q.dtype))
    return np.stack(found)


def cached(q, k_cache, v_cache, k, v, lengths):
    """The same without a mistake."""
    found = []
    for b, n in enumerate(lengths):
        m = n + k.shape[1]
        k_cache[b, n:m], v_cache[b, n:m] = k[b], v[b]
        found.append(attend(q[b], k_cache[b, :m], v_cache[b, :m]))
    return np.stack(found)


@breaks("cache_is_written_in_place", **CACHE)
def never_writes(q, k_cache, v_cache, k, v, lengths):
    return cached(q, k_cache.copy(), v_cache.copy(), k, v, lengths)


@breaks("cache_is_written_in_place", **CACHE)
def writes_one_late(q, k_cache, v_cache, k, v, lengths):
    out = cached(q, k_cache.copy(), v_cache.copy(), k, v, lengths)
    for b, n in enumerate(lengths):
        m = n + 1 + k.shape[1]
        k_cache[b, n + 1 : m], v_cache[b, n + 1 : m] = k[b], v[b]
    return out


@breaks("cache_is_written_in_place", **CACHE)
def writes_values_as_keys(q, k_cache, v_cache, k, v, lengths):
    out = cached(q, k_cache.copy(), v_cache.copy(), k, v, lengths)
    cached(q, k_cache, v_cache, v, v, lengths)
    return out


@breaks("cache_is_written_in_place", **CACHE)
def clears_the_rest(q, k_cache, v_cache, k, v, lengths):
    out = cached(q, k_cache, v_cache, k, v, lengths)
    for b, n in enumerate(lengths):
        v_cache[b, n + k.shape[1] :] = 0
    return out


@breaks("stale_cache_is_not_read", **CACHE)
def attends_to_the_whole_cache(q, k_cache, v_cache, k, v, lengths):
    cached(q, k_cache, v_cache, k, v, lengths)
    pairs = zip(q, k_cache, v_cache, strict=True)
    return np.stack([attend(*each) for each in pairs])


@breaks("new_keys_are_seen", **CACHE)
def attends_before_it_writes(q, k_cache, v_cache, k, v, lengths):
    found = [
        attend(q[b], k_cache[b, :n], v_cache[b, :n]) for b, n in enumerate(lengths)
    ]
    cached(q, k_cache, v_cache, k, v, lengths)
    return np.stack(found)


@breaks("cache_positions_of_each", **CACHE)
def takes_the_first_position_for_all(q, k_cache, v_cache, k, v, lengths):
    return cached(q, k_cache, v_cache, k, v, [lengths[0]] * len(lengths))


@breaks("cache_from_empty_to_full", **CACHE)
def never_reads_the_last_slot(q, k_cache, v_cache, k, v, lengths):
    cached(q, k_cache, v_cache, k, v, lengths)
    found = []
    for b, n in enumerate(lengths):
        m = min(n + k.shape[1], k_cache.shape[1] - 1)
        found.append(attend(q[b], k_cache[b, :m], v_cache[b, :m]))
    return np.stack(found)


@breaks("nan_in_cache_is_not_read", **CACHE)
def hides_only_the_scores_of_a_cache(q, k_cache, v_cache, k, v, lengths):
    cached(q, k_cache, v_cache, k, v, lengths)
    pages = np.arange(len(q))[:, None]
    return hides_only_the_scores(q, k_cache, v_cache, pages, lengths + k.shape[1])
