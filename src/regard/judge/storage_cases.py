"""Cases about storage: packed sequences, pages, caches that are written in place.

Queries are 0, so all keys of a sequence have the same weight, and out is the mean of
its values, whatever the scale. Every sequence has values of its own size, and memory
that no sequence owns holds 50 or NaN. A key that is read from elsewhere, or is left
out, changes the mean.

Next: suggest_option.py
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from regard.judge.case import GATES, Case, Examiner
from regard.judge.difference import Difference, compare_arrays
from regard.judge.inputs import END, Inputs, NotAskedError

Lengths = tuple[tuple[int, int], ...]  # Nq and Nk of each sequence
BLOCKS = (1, 63, 17, 64, 65, 130, 2)  # around common block sizes


def draw_stored(e: Examiner, lengths: Lengths) -> Inputs:
    """Return queries of 0, and values that tell every key of every sequence apart."""
    n_q, n_k = (max(n) for n in zip(*lengths, strict=True))
    batch, heads = len(lengths), e.heads
    v = e.draw(n_k, batch=batch) / 4 + np.arange(batch)[:, None, None, None]
    v = v + np.arange(n_k)[:, None] % 8
    q, k = e.zeros(n_q, batch=batch), e.draw(n_k, batch=batch, heads=heads)
    return Inputs(q=q, k=k, v=v, lengths=lengths)


def compare_stored(
    e: Examiner, lengths: Lengths, *, strange: float = 50, full: bool = False
) -> Difference | None:
    """Compare out for sequences of these lengths."""
    inputs = draw_stored(e, lengths)
    return e.compare(replace(inputs, strange=strange, full=full), atol=1e-3)


def keep_packed_apart(e: Examiner) -> Difference | None:
    """Pack three sequences, the longest last."""
    return compare_stored(e, ((3, 3), (1, 1), (5, 5)))


def pack_other_lengths(e: Examiner) -> Difference | None:
    """Pack sequences with fewer queries than keys, or more."""
    if e.subject.convention.always_causal:
        raise NotAskedError("it is always causal")
    return compare_stored(e, ((1, 4), (3, 2), (2, 5)))


def align_packed(e: Examiner) -> Difference | None:
    """Count causal positions from the start of each sequence, or from its end."""
    if not e.is_causal:
        raise NotAskedError("it has no causal argument")
    inputs = replace(draw_stored(e, ((3, 3), (4, 4), (2, 2))), causal=True)
    found = e.compare(inputs, atol=1e-3)
    end = e.subject.convention.causal_from
    if found or end is None or e.subject.convention.storage.cu_k is None:  # type: ignore[union-attr]
        return found
    inputs = replace(draw_stored(e, ((2, 5), (1, 3), (3, 4))), causal=True)
    return e.compare(replace(inputs, q_start=END if end == "end" else 0), atol=1e-3)


def skip_empty(e: Examiner) -> Difference | None:
    """Pack sequences without tokens between others."""
    return compare_stored(e, ((2, 2), (0, 0), (3, 3), (0, 0)))


def end_blocks(e: Examiner) -> Difference | None:
    """Pack sequences that end just before, at, and after the end of a block."""
    return compare_stored(e, tuple((n, n) for n in BLOCKS))


def follow_table(e: Examiner) -> Difference | None:
    """Use full pages in an arbitrary order, those of two sequences mixed."""
    size = e.subject.convention.storage.page  # type: ignore[union-attr]
    return compare_stored(e, ((1, 3 * size), (1, 3 * size)))


def end_in_page(e: Examiner) -> Difference | None:
    """Use sequences of equal length that end inside a page."""
    size = e.subject.convention.storage.page  # type: ignore[union-attr]
    return compare_stored(e, ((1, size + 1), (1, size + 1)))


def end_each(e: Examiner) -> Difference | None:
    """Use sequences of different lengths, the longest neither first nor last."""
    size = e.subject.convention.storage.page  # type: ignore[union-attr]
    return compare_stored(e, ((1, 2), (1, 3 * size - 1), (1, size)))


def leave_strange_pages(e: Examiner) -> Difference | None:
    """Put NaN into pages and slots that belong to no sequence."""
    return compare_stored(e, ((1, 2), (1, 9)), strange=np.nan)


def see_new(e: Examiner) -> Difference | None:
    """Use two stored keys and one new key for each sequence."""
    return compare_stored(e, ((1, 3), (1, 3)))


def write_cache(e: Examiner) -> Difference | None:
    """Compare the caches after the call: the new keys are added, all else is kept."""
    inputs = draw_stored(e, ((2, 5), (2, 5)))
    written = e.ask(inputs).caches
    expected = e.subject.form.fill_caches(e.round(inputs), new=True)  # type: ignore[union-attr]
    for name, x, y in zip(("k_cache", "v_cache"), written, expected, strict=True):
        found = compare_arrays(x, y, atol=e.room(), what=name)
        if found is not None:
            return replace(found, arguments=inputs)
    return None


def forget_stale(e: Examiner) -> Difference | None:
    """Compare two calls that differ only in what the cache holds after the new keys."""
    inputs = draw_stored(e, ((1, 4), (1, 4)))
    other = e.ask(replace(inputs, strange=-7)).out
    found = compare_arrays(e.ask(inputs).out, other, atol=e.room(1e-3))
    return None if found is None else replace(found, arguments=inputs)


def place_each(e: Examiner) -> Difference | None:
    """Use caches that are filled to different lengths."""
    return compare_stored(e, ((1, 2), (1, 5), (1, 3)))


def fill_cache(e: Examiner) -> Difference | None:
    """Start with an empty cache, and end with one that is full."""
    for lengths in (((3, 3), (3, 3)), ((1, 1), (1, 1)), ((1, 4), (1, 4))):
        found = compare_stored(e, lengths, full=True)
        if found is not None:
            return found
    return None


def leave_nan_in_cache(e: Examiner) -> Difference | None:
    """Put NaN into the cache after the new keys."""
    return compare_stored(e, ((1, 2), (1, 5)), strange=np.nan)


STORED = (
    Case("packed_sequences_do_not_mix",
         "Tokens attend to other sequences of the pack, or miss some of their own.",
         "Let sequence b attend to keys cu_seqlens_k[b] to cu_seqlens_k[b + 1].",
         "basic", keep_packed_apart, GATES, "varlen"),
    Case("packed_keys_have_own_lengths",
         "Keys are read at the offsets of the queries.",
         "Use cu_seqlens_k for keys and values, cu_seqlens_q for queries and out.",
         "complete", pack_other_lengths,
         (*GATES, "packed_sequences_do_not_mix"), "varlen"),
    Case("packed_causal_counts_from_each",
         "Causal positions are counted from the start of the pack.",
         "Subtract cu_seqlens_q[b] from rows and cu_seqlens_k[b] from keys first.",
         "complete", align_packed,
         (*GATES, "packed_sequences_do_not_mix", "packed_keys_have_own_lengths"),
         "varlen"),
    Case("packed_sequence_may_be_empty",
         "A sequence of length 0 disturbs those after it.",
         "Return early if cu_seqlens[b] == cu_seqlens[b + 1]; do not skip the offset.",
         "kernel", skip_empty, (*GATES, "packed_sequences_do_not_mix"), "varlen"),
    Case("packed_blocks_end_with_sequence",
         "The last block of a sequence reads tokens of the next one.",
         "Mask keys at or after cu_seqlens_k[b + 1], not only after the last of all.",
         "kernel", end_blocks, (*GATES, "packed_sequences_do_not_mix"), "varlen"),
    Case("pages_follow_the_table",
         "Pages are read in their order in memory, or from another request's row.",
         "Read key j of sequence b from page table[b, j // size], slot j % size.",
         "basic", follow_table, GATES, "paged"),
    Case("last_page_may_be_partial",
         "Slots after the last key of a page are read.",
         "Mask keys at or after the length of the sequence.",
         "basic", end_in_page, (*GATES, "pages_follow_the_table"), "paged"),
    Case("pages_end_with_each_sequence",
         "The length of one sequence is used for another.",
         "Read the length of sequence b from lengths[b].",
         "complete", end_each,
         (*GATES, "pages_follow_the_table", "last_page_may_be_partial"), "paged"),
    Case("unused_pages_are_not_read",
         "NaN in slots that no sequence owns reaches out as 0 · NaN.",
         "Load 0 for keys and values after the end; do not only mask the scores.",
         "kernel", leave_strange_pages,
         (*GATES, "pages_end_with_each_sequence"), "paged"),
    Case("stale_cache_is_not_read",
         "What the cache holds after the new keys is read, as of an earlier request.",
         "Attend to the first lengths[b] + new keys only.",
         "basic", forget_stale, (*GATES, "cache_is_written_in_place"), "cache"),
    Case("new_keys_are_seen",
         "The new tokens do not attend to their own keys.",
         "Write the new keys and values first, then attend to lengths[b] + new keys.",
         "basic", see_new,
         (*GATES, "cache_is_written_in_place", "stale_cache_is_not_read"), "cache"),
    Case("cache_is_written_in_place",
         "The cache does not hold the new keys at their place, or lost others.",
         "Write new token i of sequence b to slot lengths[b] + i, and nothing else.",
         "basic", write_cache, GATES, "cache"),
    Case("cache_positions_of_each",
         "The position of one sequence is used for another.",
         "Read the position of sequence b from lengths[b].",
         "complete", place_each,
         (*GATES, "stale_cache_is_not_read", "new_keys_are_seen"), "cache"),
    Case("cache_from_empty_to_full",
         "An empty or a full cache is wrong.",
         "Treat a length of 0 like any other; the last slot may be written and read.",
         "complete", fill_cache,
         (*GATES, "stale_cache_is_not_read", "new_keys_are_seen"), "cache"),
    Case("nan_in_cache_is_not_read",
         "NaN after the new keys reaches out as 0 · NaN.",
         "Load 0 for keys and values after the end; do not only mask the scores.",
         "kernel", leave_nan_in_cache,
         (*GATES, "cache_positions_of_each"), "cache"),
)  # fmt: skip
