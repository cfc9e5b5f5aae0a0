"""Cases about values: large scores, dtypes, scales of any sign, NaN, gradients.

    scores L + δ     L from -30,000 to 30,000, δ a few units: only δ matters
    NaN in a query   its row of out must be NaN, and no other row

Next: kernel_cases.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from regard.judge.calls import AttentionCall, ask_calls, draw_asked, fit_call
from regard.judge.case import Case, Examiner
from regard.judge.difference import Difference, compare_arrays
from regard.judge.inputs import NotAskedError
from regard.judge.mask_cases import CAUSAL, HIDES, RIGHT
from regard.judge.size_cases import (
    APART,
    LONGEST,
    SHOWN,
    SIZED,
    add_causal,
    cover_sizes,
)

LEVELS_OF_SCORES = ((20, 50, 90, 200, 600, 1000), (2000, 5000, 10_000, 30_000))
KEYS = 12
SHORT = 512  # maximum number of tokens in most gradient checks


def tell_large_scores_apart(e: Examiner) -> Difference | None:
    """Use rows of scores that are large, of either sign, and differ by a few units."""
    single = e.subject.precisions[0] != "float64"
    narrow = e.subject.precisions[0] == "float16"
    width = e.width if e.subject.convention.projections else 16
    if width < 2:
        raise NotAskedError("it needs heads at least 2 wide")
    for levels in LEVELS_OF_SCORES:
        high = [n for n in levels if not narrow or n <= 10_000]
        step = max(1, 64 * e.coarseness * max(high))  # differences that it can tell
        rows = np.asarray([s * n for n in high for s in (1, -1)])[:KEYS]
        n = len(rows)
        call = AttentionCall(n_q=n, n_k=KEYS, width=width, columns=width)
        inputs = draw_asked(e, fit_call(e, call))
        q, k = (np.zeros_like(x) for x in (inputs.q, inputs.k))
        n, m = q.shape[2], k.shape[2]
        slope = e.rng.choice([-1, 0.5, 1], q.shape[:3])
        q[..., 0], q[..., 1] = np.resize(rows, n) * width**0.5, slope * width**0.5
        k[..., 0], k[..., 1] = 1, e.rng.integers(-8, 9, (*k.shape[:2], m)) * step / 4
        inputs = replace(inputs, q=q, k=k)
        room = 4e-6 * max(high) if single else 1e-8
        found = e.compare_all(inputs, parts=("out",), atol=room)
        if found is not None:
            return replace(found, says=f"scores of ±{min(high)} or more: {found.says}")
    return None


def keep_large_values(e: Examiner) -> Difference | None:
    """Use values from 1e-6 to 1e6, and 0: out has the same magnitude."""
    inputs = draw_asked(e, fit_call(e, AttentionCall(n_q=7, n_k=7)))
    half = e.subject.precisions[0] == "float16"  # 1e-6 is subnormal in float16
    narrow = half or "float16" in e.subject.computes[e.subject.precisions[0]]
    for size in (1e-3 if half else 1e-6, 1e-2, 50.0, 500.0, 30_000.0, 1e6):
        if narrow and size > 30_000:
            continue
        v = np.copysign(size * (1 + np.abs(inputs.v) / 16), inputs.v)
        v[:, :, 2] = 0
        right = replace(inputs, v=v)
        yours, expected = e.ask(right).out / size, e.expect(right).out / size
        what = f"out / {size:g}"
        found = compare_arrays(yours, expected, atol=e.room(), what=what)
        if found is not None:
            return replace(found, arguments=right)
    return None


def take_any_scale(e: Examiner) -> Difference | None:
    """Use scales of 0, below 0 and above 1: `scale or default` loses the 0."""
    scales = (0.0, -0.5, 1.0, 2.0, 1e-3, -3.0)
    calls = [AttentionCall(n_q=5, n_k=5, scale=x) for x in scales]
    masked = [replace(x, mask="cells") for x in calls]
    return ask_calls(e, (*calls, *masked), about="scale")


def agree_in_every_precision(e: Examiner) -> Difference | None:
    """Repeat the same calls in every supported dtype."""
    many = (
        AttentionCall(heads=3, n_q=5, n_k=7, width=64, columns=64),
        AttentionCall(n_q=1, n_k=40, width=16),
        AttentionCall(heads=33, batch=1, n_q=2, n_k=4, width=32, columns=128),
        AttentionCall(batch=33, heads=1, n_q=2, n_k=3, width=130, columns=64),
        AttentionCall(n_q=66, n_k=66, width=16, columns=16),
        AttentionCall(n_k=300),
        AttentionCall(n_q=300, columns=4),
        AttentionCall(n_q=2, n_k=2, columns=256),
    )
    return ask_calls(e, add_causal(vary_precision(e, many)))


def vary_precision(
    e: Examiner, calls: Sequence[AttentionCall]
) -> Iterator[AttentionCall]:
    """Yield each call in every dtype."""
    for precision in e.subject.offered:
        yield from (replace(x, precision=precision) for x in calls)


def mask_in_every_precision(e: Examiner) -> Difference | None:
    """Use masks in every supported dtype."""
    many = (
        AttentionCall(heads=33, batch=1, n_q=5, n_k=7),
        AttentionCall(batch=33, heads=1, n_q=5, n_k=5),
        AttentionCall(n_q=130, n_k=33),
        AttentionCall(n_q=33, n_k=130),
    )
    masked = [replace(x, mask="cells") for x in many]
    return ask_calls(e, vary_precision(e, masked), about="mask")


def show_nan(e: Examiner) -> Difference | None:
    """Put NaN into one query, key or value: out is NaN where it depends on it."""
    if e.subject.convention.projections:
        raise NotAskedError("its matrices spread NaN to every row")
    for name, where in (("q", (-1, -1, 1)), ("k", (-1, -1, 2)), ("v", (-1, -1, 2, 0))):
        inputs = draw_asked(e, fit_call(e, AttentionCall(n_q=4, n_k=4)))
        getattr(inputs, name)[where] = np.nan
        found = e.compare_all(inputs, parts=("out", "lse"))
        if found is not None:
            return replace(found, says=f"NaN in {name}: {found.says}")
    return None


def differentiate_all_sizes(e: Examiner) -> Difference | None:
    """Compare gradients for many heads, batches, tokens and widths; causal, masked."""
    large = (
        *LONGEST,
        AttentionCall(n_q=1, n_k=33),
        AttentionCall(n_q=70, n_k=70, batch=1),
    )
    short = [x for x in large if max(x.n_q, x.n_k) <= SHORT]
    masked = (replace(x, mask="cells") for x in short)
    covered = (x for x in cover_sizes() if max(x.n_q, x.n_k) <= SHORT)
    calls = (*large, *add_causal(short), *masked, *covered)
    return ask_calls(e, (replace(x, backward="") for x in calls), about="backward")


def differentiate_in_every_precision(e: Examiner) -> Difference | None:
    """Compare gradients in every supported dtype, also causal if supported."""
    many = (
        AttentionCall(heads=3, n_q=5, n_k=5, width=16, columns=16),
        AttentionCall(heads=3, n_q=5, n_k=5, width=16, columns=16, causal=True),
        AttentionCall(n_k=130),
        AttentionCall(n_q=130),
        AttentionCall(heads=33, n_q=2, n_k=2),
        AttentionCall(batch=33, n_q=2, n_k=2),
        AttentionCall(width=130, columns=130),
    )
    back = [replace(x, backward="") for x in many]
    return ask_calls(e, vary_precision(e, back), about="backward")


VALUES = (
    Case("large_scores_differ",
         "Large scores are capped, clipped or rounded until they are equal.",
         "Do not limit scores; subtract the maximum of each row before exp.",
         "complete", tell_large_scores_apart,
         (*RIGHT, *APART, "softmax_is_stable", "low_scores_are_as_good")),
    Case("values_of_any_size",
         "Large or small values are clipped, or lost.",
         "Average the values as they are.",
         "complete", keep_large_values, (*RIGHT, *APART, "values_of_any_width")),
    Case("scale_of_any_sign",
         "A scale of 0 or below is ignored.",
         "Write `if scale is None`, not `scale or default`; look for abs and sqrt.",
         "complete", take_any_scale, (*RIGHT, *HIDES, *SHOWN, "scale_is_used")),
    Case("precisions_agree",
         "Arrays of one dtype give other results than the rest.",
         "Look for a branch on the dtype that is named.",
         "complete", agree_in_every_precision,
         (*SIZED, *CAUSAL, *APART, *SHOWN, "half_is_close", "any_length",
          "largest_score_comes_last", "any_width",
          "half_scores_do_not_overflow", "values_of_any_width", "dtype_is_kept",
          "decode_weighs_keys", "many_heads", "many_batches", "wide_values")),
    Case("masked_precisions_agree",
         "With a mask, arrays of one dtype give other results than the rest.",
         "Look for a branch on the dtype that is named.",
         "complete", mask_in_every_precision,
         (*HIDES, *SHOWN, "precisions_agree", "first_blocks_are_masked",
          "mask_per_head", "mask_per_sequence", "documents_do_not_mix")),
    Case("nan_is_not_hidden",
         "NaN in q, k or v gives an ordinary number, so the error goes unnoticed.",
         "Set rows to 0 only where the mask hides all keys, never where out is NaN.",
         "kernel", show_nan, (*RIGHT, *SHOWN, "softmax_is_stable")),
    Case("gradient_precisions_agree",
         "Gradients of one dtype are wrong.",
         "Look for a branch on the dtype that is named, in the backward pass.",
         "complete", differentiate_in_every_precision,
         ("precisions_agree", "gradients_of_any_size")),
    Case("gradients_of_any_size",
         "Gradients are wrong for some size.",
         "Look for a branch on the size that is named, in the backward pass.",
         "complete", differentiate_all_sizes,
         (*SIZED, *CAUSAL, *APART, "gradient_of_q",
          "gradient_of_k", "gradient_of_v", "gradient_under_mask",
          "gradient_sums_over_shared_heads", "sizes_together", "masks_of_any_size")),
)  # fmt: skip
