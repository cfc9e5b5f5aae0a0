"""Cases for kernels: blocks, strides, garbage in masked keys, lse, gradients.

Next: run_check.py
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from regard.definition.blocked import merge
from regard.judge.case import Case, Examiner
from regard.judge.difference import Difference, compare_arrays
from regard.judge.inputs import Inputs, NotAskedError
from regard.judge.mask_cases import CAUSAL, HIDES, RIGHT

LENGTHS = (1, 31, 33, 129, 200)  # around common block sizes
WIDTHS = (1, 3, 16, 40, 64, 80, 96, 128, 256, 576)
LONG = 1100
TRUSTED = (*RIGHT, "softmax_is_stable", "low_scores_are_as_good")


def ignore_strides(e: Examiner) -> Difference | None:
    """Pass non-contiguous views of the same numbers."""
    inputs = Inputs(q=e.draw(5), k=e.draw(5), v=e.draw(5))
    return e.compare(replace(inputs, strides=dict.fromkeys("qkv", "columns")))


def take_any_length(e: Examiner) -> Difference | None:
    """Use lengths around powers of two, causal if supported."""
    for n in LENGTHS:
        inputs = Inputs(q=e.draw(n), k=e.draw(n), v=e.draw(n))
        found = e.compare(replace(inputs, causal=e.is_causal))
        if found is not None:
            return replace(found, says=f"{n} tokens: {found.says}")
    return None


def take_any_width(e: Examiner) -> Difference | None:
    """Use heads of unusual widths."""
    if e.subject.convention.projections:
        raise NotAskedError("its heads are those of a module")
    for width in WIDTHS:
        q, k, v = (e.draw(5, width=width) for _ in range(3))
        found = e.compare(Inputs(q=q, k=k, v=v))
        if found is not None:
            return replace(found, says=f"width {width}: {found.says}")
    return None


def match_when_long(e: Examiner) -> Difference | None:
    """Use a long sequence with a random mask."""
    mask = e.rng.random((1, 1, LONG, LONG)) < 0.3
    q, k, v = (e.draw(LONG) for _ in range(3))
    single = "float32" if "float32" in e.subject.precisions else None
    return e.compare(Inputs(q=q, k=k, v=v, mask=mask), precision=single)


def ignore_garbage(e: Examiner) -> Difference | None:
    """Put NaN and infinity into keys and values that are masked for all queries."""
    inputs = Inputs(q=e.draw(4), k=e.draw(4), v=e.draw(4))
    inputs.k[:, :, 3], inputs.v[:, :, 3] = np.nan, np.inf
    mask = (np.arange(4) < 3)[None, None, None]
    return e.compare(replace(inputs, mask=mask))


def repeat_bits(e: Examiner) -> Difference | None:
    """Repeat the same call five times and compare the bits."""
    inputs = Inputs(q=e.draw(130), k=e.draw(130), v=e.draw(130))
    first, *others = (e.ask(inputs).out for _ in range(5))
    found = (compare_arrays(x, first, atol=0, what="a later out") for x in others)
    return next((x for x in found if x is not None), None)


def grow_scores(e: Examiner) -> Difference | None:
    """Use scores that grow along the keys, so the maximum is in the last block."""
    n = 300
    q = np.zeros((1, e.heads, n, e.width))
    k, v = q.copy(), e.draw(n)
    high = min(400, 0.01 / (e.coarseness or 1e-9))
    q[..., 0], k[..., 0] = 1, np.linspace(-high, high, n) * e.width**0.5
    return e.compare(Inputs(q=q, k=k, v=v), atol=1e-3)


def mask_first_blocks(e: Examiner) -> Difference | None:
    """Mask the first 200 keys, so the first blocks are fully masked."""
    n = 300
    mask = (np.arange(n) >= 200)[None, None, None]
    return e.compare(Inputs(q=e.draw(n), k=e.draw(n), v=e.draw(n), mask=mask))


def sum_in_single(e: Examiner) -> Difference | None:
    """Use 5,000 equal keys in 16 bits: a sum in float16 stops at 2,048."""
    n, half = 5000, e.half()
    if e.subject.convention.order == "x" or not e.subject.convention.other_lengths:
        raise NotAskedError("it takes as many keys as queries")
    q, k = e.zeros(1), e.zeros(n)
    inputs = Inputs(q=q, k=k, v=np.ones_like(k))
    if e.subject.convention.always_causal:
        raise NotAskedError("it is always causal")
    return e.compare(inputs, precision=half)


def give_natural_log(e: Examiner) -> Difference | None:
    """Compare lse with log sum exp for small and large scores."""
    inputs = Inputs(q=e.draw(4), k=e.draw(4), v=e.draw(4))
    for size in (1, 40, 1000):
        found = e.compare(replace(inputs, q=size * inputs.q), what="lse")
        if found is not None:
            return found
    return None


def keep_lse_wide(e: Examiner) -> Difference | None:
    """Check that lse is not rounded to 16 bits, which is too few for merging."""
    half = e.half()
    inputs = Inputs(q=e.draw(4), k=e.draw(4), v=e.draw(4))
    found = e.ask(inputs, half).dtypes.get("lse")
    if found is None:
        raise NotAskedError("it returns no lse")
    if found in ("float32", "float64"):
        return None
    return Difference(f"q is {half}, lse is {found}, expected float32.")


def leave_lse_of_empty_rows(e: Examiner) -> Difference | None:
    """Check that lse of a fully masked row is log 0 = -inf."""
    mask = np.asarray([[True, True], [False, False]])[None, None]
    inputs = Inputs(q=e.draw(2), k=e.draw(2), v=e.draw(2), mask=mask)
    return e.compare(inputs, what="lse")


def merge_parts(e: Examiner) -> Difference | None:
    """Merge out and lse of two parts of the keys and compare with the whole."""
    mask = np.tri(4, dtype=bool)[None, None]
    inputs = Inputs(q=e.draw(4), k=e.draw(4), v=e.draw(4), mask=mask)
    parts = []
    for keys in (slice(0, 2), slice(2, 4)):
        k, v = inputs.k[:, :, keys], inputs.v[:, :, keys]
        answer = e.ask(replace(inputs, k=k, v=v, mask=mask[..., keys]))
        if answer.lse is None:
            raise NotAskedError("it returns no lse")
        parts.append((answer.out, answer.lse))
    out, _ = merge(*parts)
    right = e.expect(inputs).out
    found = compare_arrays(out, right, atol=e.room(), what="the merged out")
    return None if found is None else replace(found, arguments=inputs)


def differentiate(e: Examiner, only: str) -> Difference | None:
    """Compare one gradient, plain and causal."""
    inputs = Inputs(q=e.draw(4), k=e.draw(4), v=e.draw(4))
    found = e.compare_gradients(inputs, only=only)
    if found is not None:
        return found
    if not e.is_causal:
        return None
    return e.compare_gradients(replace(inputs, causal=True), only=only)


def differentiate_masked(e: Examiner) -> Difference | None:
    """Compare gradients with a mask: fully masked keys get 0."""
    mask = np.ones((1, 1, 4, 4), bool)
    mask[..., 1] = False
    mask[..., 2, 3] = False
    if "q" not in e.subject.convention.axes_of_mask:
        mask = mask[:, :, :1]
    inputs = Inputs(q=e.draw(4), k=e.draw(4), v=e.draw(4), mask=mask)
    return e.compare_gradients(inputs)


def differentiate_empty(e: Examiner) -> Difference | None:
    """Compare gradients with a fully masked row."""
    mask = np.ones((1, 1, 3, 3), bool)
    mask[..., 1, :] = False
    return e.compare_gradients(Inputs(q=e.draw(3), k=e.draw(3), v=e.draw(3), mask=mask))


def differentiate_shared(e: Examiner) -> Difference | None:
    """Use four heads on two key heads, whose gradients sum over both."""
    q, k, v = e.draw(3, heads=4), e.draw(3, heads=2), e.draw(3, heads=2)
    return e.compare_gradients(Inputs(q=q, k=k, v=v))


def differentiate_far(e: Examiner) -> Difference | None:
    """Compare gradients for dominating scores: small, and never NaN."""
    q, k = e.score([[3000.0, 0, 1], [0, 3000, 0], [-3000, -3000, -3000]])
    return e.compare_gradients(Inputs(q=q, k=k, v=e.draw(3)), atol=1e-3)


KERNEL = (
    Case("strides_do_not_matter",
         "Views give other numbers than copies.",
         "Use the strides of the inputs, or make them contiguous first.",
         "complete", ignore_strides, RIGHT),
    Case("any_length",
         "The last, partial block is lost, or read beyond the end.",
         "Mask keys beyond Nk in the last block with -inf, store only rows below Nq.",
         "complete", take_any_length, (*TRUSTED, *CAUSAL, "one_token")),
    Case("any_width",
         "Widths that are not a power of two fail.",
         "Mask columns beyond D when a tile is loaded; scale by D, not by the tile.",
         "complete", take_any_width, (*TRUSTED, "values_of_any_width")),
    Case("long_masked_matches",
         "A long sequence with a mask is wrong.",
         "Advance the mask together with the keys, block by block.",
         "complete", match_when_long,
         (*TRUSTED, *HIDES, "any_length", "documents_do_not_mix")),
    Case("garbage_in_masked_keys",
         "NaN in masked keys reaches out as 0 · NaN.",
         "Load 0 for masked values; select scores with the mask, do not add it.",
         "kernel", ignore_garbage, (*TRUSTED, *HIDES)),
    Case("same_bits_twice",
         "The same call gives different bits.",
         "Add up blocks in a fixed order, without atomics.",
         "kernel", repeat_bits),
    Case("largest_score_comes_last",
         "Earlier blocks are not rescaled when a larger score follows.",
         "Multiply out and the sum by exp(old max - new max) before adding a block.",
         "complete", grow_scores, (*TRUSTED, "any_length")),
    Case("first_blocks_are_masked",
         "A fully masked first block gives exp(-inf + inf) = NaN.",
         "Subtract 0 while the running maximum is -inf.",
         "complete", mask_first_blocks,
         (*TRUSTED, *HIDES, "any_length", "left_padding_changes_nothing")),
    Case("half_sums_in_single",
         "Sums over many keys are kept in 16 bits.",
         "Accumulate the denominator and out in float32.",
         "kernel", sum_in_single, (*RIGHT, "half_is_close", "lengths_may_differ")),
    Case("lse_is_natural_log",
         "Lse has base 2, lacks the scale, or ignores the mask.",
         "Return max + log(sum), times log(2) if exp2 is used inside.",
         "complete", give_natural_log, RIGHT),
    Case("lse_is_single",
         "Lse is rounded to 16 bits.",
         "Keep lse in float32.",
         "kernel", keep_lse_wide, (*RIGHT, "lse_is_natural_log")),
    Case("empty_row_lse_is_minus_inf",
         "Lse of a fully masked row is not -inf, so parts merge wrongly.",
         "Return -inf where the sum is 0.",
         "complete", leave_lse_of_empty_rows, (*HIDES, "lse_is_natural_log")),
    Case("merge_of_parts_is_whole",
         "Out and lse over parts of the keys do not merge to the whole.",
         "Compute lse from the same logits as out, -inf for fully masked rows.",
         "complete", merge_parts,
         (*HIDES, "lse_is_natural_log", "empty_row_lse_is_minus_inf",
          "lengths_may_differ")),
    Case("gradient_of_q",
         "The gradient of q is wrong.",
         "dQ = scale · dS K, with dS = W · (g Vᵀ - rowsum(out · g)).",
         "complete", lambda e: differentiate(e, "q"), TRUSTED),
    Case("gradient_of_k",
         "The gradient of k is wrong.",
         "dK = scale · dSᵀ Q, summed over every query.",
         "complete", lambda e: differentiate(e, "k"), TRUSTED),
    Case("gradient_of_v",
         "The gradient of v is wrong.",
         "dV = Wᵀ g, with the weights that produced out.",
         "complete", lambda e: differentiate(e, "v"), TRUSTED),
    Case("gradient_under_mask",
         "The backward pass does not apply the mask of the forward pass.",
         "Recompute the weights with the same mask; masked cells have dS = 0.",
         "complete", differentiate_masked,
         (*HIDES, "gradient_of_q", "gradient_of_k", "gradient_of_v")),
    Case("empty_row_grad_finite",
         "A fully masked row makes gradients NaN.",
         "Avoid 0 / 0: divide a row whose sum is 0 by 1.",
         "complete", differentiate_empty,
         (*HIDES, "gradient_under_mask", "empty_row_is_zero")),
    Case("gradient_sums_over_shared_heads",
         "A shared key head gets the gradient of only one of its query heads.",
         "Sum dK and dV over the query heads of a group.",
         "complete", differentiate_shared,
         ("gqa_group_is_contiguous", "gradient_of_k", "gradient_of_v")),
    Case("gradient_of_large_scores",
         "Large scores make gradients NaN.",
         "Recompute weights as exp(scores - lse), never exp(scores) alone.",
         "complete", differentiate_far,
         (*TRUSTED, "gradient_of_q", "gradient_of_k", "gradient_of_v")),
)  # fmt: skip
