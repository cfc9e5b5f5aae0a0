"""Cases about masks and positions: fully masked rows, padding, chunked prefill.

Next: option_cases.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from regard.judge.case import FAR, GATES, Case, Examiner
from regard.judge.difference import Difference, compare_arrays
from regard.judge.inputs import CallFailedError, Inputs, NotAskedError

RIGHT = (
    *GATES,
    "scale_is_one_over_root_width",
    "softmax_over_keys",
    "keys_answer_queries",
    "argument_order",
    "rows_sum_to_one",
    "order_of_keys_does_not_matter",
)
HIDES = (
    *GATES,
    "mask_makes_no_nan",
    "true_means_attend",
    "masked_keys_have_no_weight",
    "mask_before_softmax",
)
CAUSAL = (
    *GATES,
    "mask_makes_no_nan",
    "mask_before_softmax",
    "future_never_leaks",
    "causal_sees_itself",
)


def ask_nothing(e: Examiner) -> Inputs:
    """Return inputs of two queries, the second of which is fully masked."""
    q, k = e.score([[FAR, 0], [FAR, 0]])
    mask = np.asarray([[True, True], [False, False]])[None, None]
    if "q" not in e.subject.convention.axes_of_mask:  # mask a whole sequence instead
        q = k = e.zeros(3, batch=2)
        mask = np.asarray([[True] * 3, [False] * 3])[:, None, None]
    return Inputs(q=q, k=k, v=np.ones_like(k), mask=mask)


def leave_empty_rows(e: Examiner) -> Difference | None:
    """Check that a fully masked row is 0 and does not affect other rows."""
    return e.compare(ask_nothing(e), atol=1e-3)


def hide_by_more(e: Examiner) -> Difference | None:
    """Use a score of -30,000 for the allowed key and 0 for the masked key."""
    if e.subject.precisions[0] == "float16":
        raise NotAskedError("it has no precision that holds such scores")
    q, k = e.score([[-3e4 * e.width**0.5, 0.0]] * 2)
    mask = np.asarray([[True, False]])[None, None]
    return e.compare(Inputs(q=q, k=k, v=e.unit(2), mask=mask), atol=1e-3)


def hide_in_half(e: Examiner) -> Difference | None:
    """Use a mask and a fully masked row in 16 bits: finite fillers overflow."""
    half = e.half()
    q, k = e.score([[-200.0, 0.0], [-200.0, -200.0]])
    mask = np.asarray([[True, False], [False, False]])[None, None]
    return e.compare(Inputs(q=q, k=k, v=e.draw(2), mask=mask), precision=half)


def mask_heads(e: Examiner) -> Difference | None:
    """Use a different mask for each of two heads."""
    n = max(2, e.heads)
    mask = np.ones((1, n, 3, 3), bool)
    mask[:, 0, :, 1:] = False
    mask[:, 1, :, :2] = False
    q, k = e.zeros(3, heads=n), e.zeros(3, heads=n)
    return e.compare(Inputs(q=q, k=k, v=e.unit(3, heads=n), mask=mask), atol=1e-3)


def mask_batches(e: Examiner) -> Difference | None:
    """Use three sequences of different lengths, with B = Nq = 3."""
    mask = (np.arange(3) < np.arange(1, 4)[:, None])[:, None, None]
    q, k = e.zeros(3, batch=3), e.zeros(3, batch=3)
    inputs = Inputs(q=q, k=k, v=e.unit(3, batch=3), mask=mask)
    return e.compare(inputs, atol=1e-3)


def combine_masks(e: Examiner) -> Difference | None:
    """Use a mask and causal together: both apply."""
    words = e.subject.convention
    if words.mask is None or not (words.causal or words.always_causal):
        raise NotAskedError("it has no mask and causal arguments")
    mask = (np.arange(3) > 0)[None, None, None] | (np.arange(3) == 0)[:, None]
    if "q" not in words.axes_of_mask:
        mask = (np.arange(3) < 2)[None, None, None]
    inputs = Inputs(q=e.zeros(3), k=e.zeros(3), v=e.unit(3), mask=mask, causal=True)
    return e.compare(inputs, atol=1e-3)


def keep_documents_apart(e: Examiner) -> Difference | None:
    """Pack two documents into one sequence, separated by a mask."""
    ids = np.asarray([0, 0, 1, 1, 1])
    mask = (ids[:, None] == ids)[None, None]
    return e.compare(Inputs(q=e.draw(5), k=e.draw(5), v=e.draw(5), mask=mask))


def pad_on_the_left(e: Examiner) -> Difference | None:
    """Compare three tokens alone and after two masked padding tokens."""
    inputs = Inputs(q=e.draw(5), k=e.draw(5), v=e.draw(5))
    mask = (np.arange(5) >= 2)[None, None, None]
    padded = e.ask(replace(inputs, mask=mask)).out[:, :, 2:]
    alone = {name: getattr(inputs, name)[:, :, 2:] for name in "qkv"}
    right = e.ask(replace(inputs, **alone)).out
    return compare_arrays(
        padded, right, atol=e.room(1e-6), what="out of the padded call"
    )


def stand_aligned(e: Examiner) -> Difference | None:
    """Use two causal queries and four keys, aligned as declared."""
    words = e.subject.convention
    if not e.is_causal:
        raise NotAskedError("it has no causal argument")
    start = 0 if words.causal_from == "start" else 2
    inputs = Inputs(q=e.zeros(2), k=e.zeros(4), v=e.unit(4))
    return e.compare(replace(inputs, causal=True, q_start=start), atol=1e-3)


def decode_one(e: Examiner) -> Difference | None:
    """Use one causal query at the end of four keys: it attends to all of them."""
    words = e.subject.convention
    if not e.is_causal:
        raise NotAskedError("it has no causal argument")
    if words.causal_from == "start" and not words.q_start:
        raise NotAskedError("it declares that row 0 is aligned with key 0")
    inputs = Inputs(q=e.zeros(1), k=e.zeros(4), v=e.unit(4))
    return e.compare(replace(inputs, causal=True, q_start=3), atol=1e-3)


def prefill_in_chunks(e: Examiner) -> Difference | None:
    """Compare five tokens at once with chunks of two, two and one."""
    words = e.subject.convention
    if not (words.causal or words.always_causal) or (
        words.causal_from != "end" and not words.q_start
    ):
        raise NotAskedError("it cannot express a chunk that does not start at key 0")
    inputs = Inputs(q=e.draw(5), k=e.draw(5), v=e.draw(5), causal=True)
    whole = e.ask(inputs).out
    for first, stop in ((0, 2), (2, 4), (4, 5)):
        chunk = replace(
            inputs,
            q=inputs.q[:, :, first:stop],
            k=inputs.k[:, :, :stop],
            v=inputs.v[:, :, :stop],
            q_start=first,
        )
        part = compare_arrays(
            e.ask(chunk).out,
            whole[:, :, first:stop],
            atol=e.room(1e-4),
            what=f"out of the chunk from {first}",
        )
        if part is not None:
            return replace(part, arguments=chunk)
    return None


def accept_refusal(e: Examiner, literal: Any, right: Inputs) -> Difference | None:
    """Pass an unusual mask: both an error and the intended result are right."""
    try:
        yours = e.ask(replace(right, mask=None, literal=literal)).out
    except CallFailedError:
        return None
    return compare_arrays(yours, e.expect(right).out, atol=e.room(1e-3))


def check_unusual_mask(e: Examiner, dtype: Any) -> Difference | None:
    """Use a mask of zeros and ones that is not bool."""
    words = e.subject.convention
    if words.true_means == "added" or (words.float_mask and dtype == np.float64):
        raise NotAskedError("it declares that numbers in a mask are added")
    if words.mask is None or words.axes_of_mask[-2:] != "qk":
        raise NotAskedError("it has no mask of (Nq, Nk)")
    mask = np.tri(3, dtype=bool)
    says = mask if words.true_means == "attend" else ~mask
    right = Inputs(q=e.zeros(3), k=e.zeros(3), v=e.unit(3), mask=mask[None, None])
    shape = (1,) * (len(words.axes_of_mask) - 2) + (3, 3)
    if "h" in words.axes_of_mask and e.heads > 1:
        raise NotAskedError("its heads are those of a module")
    if dtype == np.float64:
        dtype = e.subject.precisions[0].replace("bfloat16", "float32")
    return accept_refusal(e, says.astype(dtype).reshape(shape), right)


def take_float_mask(e: Examiner) -> Difference | None:
    """Use a mask of 0.0 and 1.0."""
    return check_unusual_mask(e, np.float64)


def take_int_mask(e: Examiner) -> Difference | None:
    """Use a mask of the integers 0 and 1."""
    return check_unusual_mask(e, np.int64)


def take_padding_mask(e: Examiner) -> Difference | None:
    """Pass a mask (B, Nk) with B = Nq: it must not be read as (Nq, Nk)."""
    words = e.subject.convention
    if words.mask is None or words.axes_of_mask != "bhqk" or words.projections:
        raise NotAskedError("it has no mask of (B, H, Nq, Nk)")
    valid = np.arange(3) < np.arange(1, 4)[:, None]
    q, k = e.zeros(3, batch=3), e.zeros(3, batch=3)
    inputs = Inputs(q=q, k=k, v=e.unit(3, batch=3), mask=valid[:, None, None])
    if words.true_means == "added":
        return accept_refusal(e, np.where(valid, 0.0, -np.inf), inputs)
    return accept_refusal(e, valid if words.true_means == "attend" else ~valid, inputs)


MASKING = (
    Case("empty_row_is_zero",
         "A fully masked query gets NaN, or an average of masked values.",
         "For a fully masked row, return weights and out of 0, not softmax of -inf.",
         "complete", leave_empty_rows, HIDES),
    Case("mask_beats_any_score",
         "With a finite filler such as -1e4, masked keys win against low scores.",
         "Set masked scores to -inf, not to a large negative number.",
         "complete", hide_by_more, (*HIDES, "softmax_is_stable")),
    Case("finfo_min_is_not_inf",
         "In 16 bits the filler overflows, or a fully masked row becomes uniform.",
         "Compute the scores in float32, mask with -inf; return 0 for masked rows.",
         "complete", hide_in_half, (*HIDES, "empty_row_is_zero", "half_is_close")),
    Case("mask_per_head",
         "A mask of one head is used for another.",
         "Broadcast the mask as (B, H, Nq, Nk).",
         "complete", mask_heads, (*HIDES, "heads_do_not_mix")),
    Case("mask_per_sequence",
         "The padding of one sequence is used for another.",
         "Broadcast a padding mask as (B, 1, 1, Nk).",
         "complete", mask_batches, (*HIDES, "batches_do_not_mix")),
    Case("mask_and_causal_compose",
         "If both are given, the mask or causal is dropped.",
         "Combine both, mask & causal, before the softmax.",
         "complete", combine_masks, (*HIDES, *CAUSAL)),
    Case("documents_do_not_mix",
         "Documents packed into one sequence attend to each other.",
         "Apply the mask in every code path, also without causal.",
         "complete", keep_documents_apart,
         (*HIDES, *RIGHT)),
    Case("left_padding_changes_nothing",
         "Padding on the left changes the tokens after it.",
         "Give padding no weight, and count positions from the first real token.",
         "complete", pad_on_the_left, HIDES),
    Case("causal_alignment",
         "With fewer queries than keys, the causal mask is not aligned as declared.",
         "Let query i attend to keys <= q_start + i; declare causal_from or q_start.",
         "complete", stand_aligned, (*CAUSAL, "lengths_may_differ")),
    Case("decode_one_token_sees_all",
         "A single query after a KV cache attends only to the first key.",
         "Shift the causal mask by Nk - Nq, or leave it out for one query.",
         "complete", decode_one, (*CAUSAL, "lengths_may_differ")),
    Case("chunked_prefill_equals_full",
         "A prompt processed in chunks gives other results than at once.",
         "Count queries from the start of the chunk, not from 0.",
         "complete", prefill_in_chunks,
         (*CAUSAL, "causal_alignment", "decode_one_token_sees_all")),
    Case("float_mask_is_not_added",
         "A mask of 0.0 and 1.0 is added to the scores and hides nothing.",
         "Reject masks that are not bool, or declare float_mask=True and document it.",
         "complete", take_float_mask, HIDES),
    Case("int_mask_is_not_added",
         "A mask of integers is neither rejected nor applied.",
         "Reject masks that are not bool, or convert them with mask != 0.",
         "complete", take_int_mask, HIDES),
    Case("padding_mask_is_not_rows",
         "A padding mask (B, Nk) is read as (Nq, Nk) when B = Nq.",
         "Reject a mask of two axes in a batched call, or read it as (B, 1, 1, Nk).",
         "kernel", take_padding_mask, (*HIDES, "mask_per_sequence")),
)  # fmt: skip
