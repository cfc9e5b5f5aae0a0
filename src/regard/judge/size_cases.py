"""Cases about sizes: many heads, batches, tokens and columns, alone and together.

A kernel that is right for three tokens may be wrong for head 8, row 1,024, a width of
64 or a single query. Every size below is used at least once along every axis, with the
remaining axes small, so that calls are cheap:

    B = 1, H = 130, Nq = 3, Nk = 2        B = 2, H = 1, Nq = 4200, Nk = 3        …

Next: value_cases.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

from regard.judge.calls import AttentionCall, ask_calls
from regard.judge.case import Case, Examiner
from regard.judge.difference import Difference
from regard.judge.inputs import NotAskedError
from regard.judge.mask_cases import CAUSAL, HIDES, RIGHT

TOKENS = (
    *range(1, 18), 24, 31, 32, 33, 40, 48, 63, 64, 65, 96, 100, 127, 128, 129, 192,
    200, 255, 256, 257, 300, 384, 500, 511, 512, 513, 1000, 1024, 1025, 2048,
    4096, 4200,
)  # fmt: skip
WIDTHS = (
    *range(1, 10), 12, 16, 20, 24, 32, 40, 48, 56, 64, 65, 72, 80, 96, 100, 112, 128,
    160, 192, 200, 256, 257, 320, 384, 512, 520, 576,
)  # fmt: skip
MANY = (*range(1, 18), 20, 24, 25, 32, 33, 40, 48, 56, 64, 67, 80, 96, 100, 128, 130)
FEW = (1, 2, 3, 5, 4, 7, 8, 6, 9)
SHARED = (
    (2, 1), (4, 2), (6, 3), (8, 2), (12, 4), (16, 2), (32, 8), (40, 8), (65, 5),
    (48, 8), (12, 2), (28, 4), (14, 2), (32, 1), (71, 1), (48, 2), (9, 3), (20, 2),
)  # fmt: skip
SIZED = (
    *RIGHT,
    "softmax_is_stable",
    "one_token",
    "lengths_may_differ",
    "large_scores_differ",
    "values_of_any_size",
    "causal_alignment",
    "chunked_prefill_equals_full",
)
SHOWN = (  # cases of the other parts that are compared
    "weights_are_shown_as_defined",
    "lse_is_natural_log",
    "merge_of_parts_is_whole",
)
APART = ("heads_do_not_mix", "batches_do_not_mix", "axes_are_not_confused")


LONGEST = (
    AttentionCall(heads=130, batch=1, n_k=5),
    AttentionCall(batch=130, heads=1, n_k=5),
    AttentionCall(n_q=4200, n_k=3, batch=1, width=2, columns=2),
    AttentionCall(n_q=3, n_k=4200, heads=1, width=2, columns=2),
    AttentionCall(n_q=2, width=576, columns=576),
)
ALL: dict[str, Any] = {  # every option
    "causal": True, "window": 3, "bias": True, "softcap": 1.5, "sink": True,
    "scale": 0.4,
}  # fmt: skip


def cover_sizes(step: int = 1) -> Iterator[AttentionCall]:
    """Yield sizes in which every token count, head count and width occurs.

    Many queries are paired with few keys and vice versa; likewise batches with heads,
    and the widths of keys with those of values.
    """
    few, two = cycle(FEW), cycle(((1, 2), (2, 1), (2, 2)))
    for n_q, n_k in pair_sizes(TOKENS, step):
        (batch, heads), d = next(two), 2 + next(few) % 2
        sizes = AttentionCall(batch=batch, heads=heads, n_q=n_q, n_k=n_k)
        yield replace(sizes, width=d, columns=1 + d % 3)
    for batch, heads in pair_sizes(MANY, step):
        sizes = AttentionCall(batch=batch, heads=heads, n_q=1 + next(few) % 3, n_k=3)
        yield replace(sizes, width=2 + next(few) % 3, columns=2)
    for width, columns in pair_sizes(WIDTHS, step):
        (batch, heads), n = next(two), next(few)
        sizes = AttentionCall(batch=batch, heads=heads, n_q=1 + n % 4, n_k=2 + n % 3)
        yield replace(sizes, width=width, columns=columns)


def pair_sizes(sizes: Sequence[int], step: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of small and large sizes; each size occurs twice."""
    yield from list(zip(sizes, sizes[::-1], strict=True))[::step]


def add_causal(calls: Iterable[AttentionCall]) -> Iterator[AttentionCall]:
    """Yield each call, plain and, without rows that would be empty, causal."""
    for call in calls:
        yield call
        if call.n_q <= call.n_k:
            yield replace(call, causal=True)


def decode_unequal(e: Examiner) -> Difference | None:
    """Use one query with different keys and values."""
    calls = (AttentionCall(n_q=1, n_k=n) for n in (2, 3, 7, 40, 130, 600))
    return ask_calls(e, add_causal(calls))


def take_many_heads(e: Examiner) -> Difference | None:
    """Use up to 130 heads."""
    if "h" not in e.subject.convention.layout or e.subject.convention.projections:
        raise NotAskedError("it has no axis for heads")
    return ask_calls(
        e, add_causal(AttentionCall(heads=n, n_k=4) for n in (5, 16, 67, 130))
    )


def take_many_batches(e: Examiner) -> Difference | None:
    """Use up to 130 sequences."""
    if "b" not in e.subject.convention.layout:
        raise NotAskedError("it has no axis for batches")
    return ask_calls(
        e, add_causal(AttentionCall(batch=n, n_k=4) for n in (5, 16, 67, 130))
    )


def take_wide_values(e: Examiner) -> Difference | None:
    """Use up to 576 columns in the values, and in all three."""
    wide = (64, 128, 256, 576)
    apart = [AttentionCall(columns=n, n_k=4) for n in wide]
    return ask_calls(
        e, add_causal([*apart, *(AttentionCall(width=n, columns=n) for n in wide)])
    )


def take_all_sizes(e: Examiner) -> Difference | None:
    """Use every size of every axis."""
    return ask_calls(e, add_causal(cover_sizes()))


def take_many_tokens(e: Examiner) -> Difference | None:
    """Use several blocks of queries and keys, with and without a partial block."""
    lengths = ((64, 64), (96, 130), (128, 128), (257, 255), (256, 512), (530, 530))
    calls = (AttentionCall(n_q=n, n_k=m, batch=1, heads=1) for n, m in lengths)
    return ask_calls(e, add_causal(calls))


def mask_all_sizes(e: Examiner) -> Difference | None:
    """Use random masks of all sizes, also with causal if supported."""
    many = [AttentionCall(n_q=130, n_k=130, batch=1), *LONGEST, *cover_sizes(4)]
    masked = (replace(x, mask="cells") for x in many)
    return ask_calls(e, add_causal(masked), about="mask")


def take_all_options(e: Examiner) -> Difference | None:
    """Use all options at once, in all sizes."""
    words = e.subject.convention
    options = (words.bias, words.softcap, words.sink, words.scale, words.window)
    if not (any(options) or words.float_mask):
        raise NotAskedError("it has no options")
    return ask_calls(e, (replace(x, **ALL) for x in (*LONGEST, *cover_sizes(4))))


def share_many(e: Examiner) -> Difference | None:
    """Use groups of heads as in real models, with one query and with several."""

    def calls() -> Iterator[AttentionCall]:
        for i, (heads, shared) in enumerate(SHARED):
            sizes = AttentionCall(
                heads=heads, shared=shared, batch=1 + i % 3, n_q=1 + i // 2
            )
            call = replace(sizes, n_k=4 + i % 3, width=3 + i)
            yield from (call, replace(call, **ALL), replace(call, mask="cells"))
            yield replace(call, n_q=1, n_k=130, causal=True)

    return ask_calls(e, calls(), about="shared")


SIZES = (
    Case("decode_weighs_keys",
         "For a single query, the values are averaged without its scores.",
         "Compute scores and softmax for one query as for many.",
         "complete", decode_unequal,
         (*SIZED, *CAUSAL, "decode_one_token_sees_all", "any_length")),
    Case("many_heads",
         "Heads beyond the first few are lost, or are copies of others.",
         "Loop, or launch blocks, over all H heads; index q, k and v by the same head.",
         "complete", take_many_heads, (*SIZED, *CAUSAL, *APART)),
    Case("many_batches",
         "Sequences beyond the first few are lost, or are copies of others.",
         "Loop, or launch blocks, over all B sequences.",
         "complete", take_many_batches, (*SIZED, *CAUSAL, *APART)),
    Case("wide_values",
         "Columns of wide values are lost.",
         "Take Dv from v.shape, and store every column; loop over tiles of columns.",
         "complete", take_wide_values,
         (*SIZED, *CAUSAL, "scale_ignores_the_values", "values_of_any_width",
          "any_width")),
    Case("many_tokens",
         "Sequences of several blocks are wrong.",
         "For every block of queries, visit every block of keys, including the last.",
         "complete", take_many_tokens, (*SIZED, *CAUSAL, *SHOWN, "any_length")),
    Case("sizes_together",
         "Some sizes give wrong results.",
         "Look for a branch on the size that is named, or a constant in its place.",
         "complete", take_all_sizes,
         (*SIZED, *CAUSAL, *APART, *SHOWN, "decode_weighs_keys", "many_heads",
          "many_batches", "wide_values", "any_length", "any_width",
          "largest_score_comes_last")),
    Case("masks_of_any_size",
         "For some sizes, the mask is read at the wrong index.",
         "Index the mask by batch, head, query and key, with stride 0 for size 1.",
         "complete", mask_all_sizes,
         (*SIZED, *CAUSAL, *HIDES, *APART, "mask_per_head", "mask_per_sequence",
          "mask_and_causal_compose", "sizes_together", *SHOWN,
          "long_masked_matches")),
    Case("groups_of_any_size",
         "Heads share the wrong keys in larger groups, or for one query.",
         "Let head h use key head h // (H // Hk), with both counts from the shapes.",
         "complete", share_many,
         (*SIZED, *CAUSAL, *HIDES, *APART, *SHOWN, "sizes_together",
          "gqa_group_is_contiguous",
          "gqa_one_key_head", "many_heads", "decode_weighs_keys", "mask_per_head",
          "mask_per_sequence", "mask_and_causal_compose")),
    Case("options_of_any_size",
         "Bias, softcap, sink, scale or window are wrong for some sizes.",
         "Index each option by its own axes; apply it in every branch.",
         "complete", take_all_options,
         (*SIZED, *CAUSAL, *APART, "bias_is_not_scaled", "softcap_is_tanh",
          "softcap_before_mask", "softcap_before_bias", "scale_is_used",
          "sink_takes_weight", "window_counts", "mask_and_causal_compose",
          "sizes_together")),
)  # fmt: skip
