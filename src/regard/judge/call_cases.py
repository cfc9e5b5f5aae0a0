"""Cases about combinations: strides, gradients, and options with sizes and each other.

Kernels fail where two or three conditions meet: one query and shared heads and many
keys, the gradient of q with a window, v stored in another order than k. Each case here
is a list of calls; the last one draws calls at random, see search.py.

Next: search.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

from regard.judge.calls import (
    EMPTY,
    AttentionCall,
    ask_call,
    ask_calls,
    draw_asked,
    fit_call,
)
from regard.judge.case import Case, Examiner
from regard.judge.difference import Difference, compare_arrays
from regard.judge.inputs import CallFailedError, NotAskedError
from regard.judge.mask_cases import CAUSAL, RIGHT
from regard.judge.search import Search
from regard.judge.size_cases import APART, SIZED, TOKENS

OPTIONS: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"causal": True, "window": 3},
    {"mask": "cells"},
    {"bias": True},
    {"scale": 0.4},
    {"softcap": 1.5},
    {"sink": True},
    {"heads": 6, "shared": 2},
)
LARGE: tuple[dict[str, Any], ...] = (
    {"n_q": 1, "n_k": 256},
    {"n_q": 1, "n_k": 1024},
    {"n_q": 1, "n_k": 7},
    {"n_q": 70, "n_k": 200},
    {"n_q": 130, "n_k": 130},
    {"n_q": 40, "n_k": 17},
    {"n_q": 300, "n_k": 300, "batch": 1, "heads": 2},
    {"width": 64, "columns": 64},
    {"width": 96, "columns": 96},
    {"width": 128, "columns": 128},
    {"width": 160, "columns": 160, "n_k": 70},
    {"columns": 24},
    {"batch": 5, "heads": 6},
)
GRID = ((16, 33), (65, 8), (3, 200), (520, 1), (1, 1030), (64, 65))  # B and H
WIDE = (1, 7, 16, 24, 40, 64, 80, 96, 112, 128, 136, 192, 256, 320)
STRIDES = ("swapped", "part", "grown", "columns", "expanded")
UNROUNDED = 112  # 1 / sqrt(112) is 2.5e-3 from the nearest bfloat16
SCALE_ERROR = 1e-3
SEVERAL = AttentionCall(n_q=6, n_k=6, heads=4)
MIXED = (*RIGHT, *APART, "softmax_is_stable")
DERIVED = (
    *(*MIXED, "gradient_of_q", "gradient_of_k", "gradient_of_v"),
    *("gradient_under_mask", "gradient_sums_over_shared_heads"),
)


def give_own_strides(e: Examiner) -> Difference | None:
    """Pass one of q, k, v, mask and bias with other strides than the rest."""
    if not e.subject.library.strided:
        raise NotAskedError("arrays of this library have no strides")

    def calls() -> Iterator[AttentionCall]:
        for how in STRIDES:
            for name in ("q", "k", "v", "qkv", "kv", "mask", "bias"):
                names = (name,) if name in ("mask", "bias") else tuple(name)
                call = replace(SEVERAL, strides=tuple((x, how) for x in names))
                yield replace(
                    call, mask="cells" * (name == "mask"), bias=name == "bias"
                )
                yield replace(call, n_q=1, n_k=130, shared=2)
                yield replace(call, backward="")

    return ask_calls(e, calls())


def use_gradients(e: Examiner) -> Difference | None:
    """Differentiate as training code does: expanded, twice, only some of q, k, v."""
    uses = [("ones", "qkv"), ("swapped", "qkv"), ("twice", "qkv")]
    uses += [("", only) for only in ("q", "k", "v", "qk", "qv", "kv")]
    sizes: tuple[dict[str, Any], ...] = ({}, {"shared": 2}, {"n_q": 70, "n_k": 70})
    sizes = (*sizes, {"causal": True}, {"n_q": 1, "n_k": 70})
    return ask_calls(
        e,
        (
            replace(SEVERAL, backward=how, only=only, **size)
            for how, only in uses
            for size in sizes
        ),
        about="backward",
    )


def pair_options(backward: str | None) -> Iterator[AttentionCall]:
    """Yield calls with each option alone, and with each pair of options and sizes."""
    parts = (*OPTIONS, *LARGE)
    for pair in (*combinations(parts, 1), *combinations(parts, 2)):
        merged = {name: x for part in pair for name, x in part.items()}
        yield replace(AttentionCall(backward=backward, seed=len(merged)), **merged)


def combine_options(e: Examiner) -> Difference | None:
    """Use every pair of options and sizes, and three for one query."""
    found = ask_calls(e, pair_options(None))
    if found is not None:
        return found
    decode: tuple[dict[str, Any], ...]
    decode = ({}, {"causal": True}, {"heads": 8, "shared": 2, "causal": True})
    calls = (AttentionCall(n_q=1, n_k=n, **x) for n in TOKENS for x in decode)
    wide = (
        AttentionCall(n_q=3, n_k=n, width=d, columns=d) for d in WIDE for n in (65, 130)
    )
    return ask_calls(e, (*calls, *wide))


def combine_gradients(e: Examiner) -> Difference | None:
    """Compare gradients for every pair of options and sizes."""
    long = {"n_q": 300, "n_k": 300, "batch": 1, "heads": 2, "backward": ""}
    calls = (AttentionCall(**{**long, **x}) for x in OPTIONS)
    return ask_calls(e, (*pair_options(""), *calls), about="backward")


def fill_grid(e: Examiner) -> Difference | None:
    """Use more than 512 pairs of a sequence and a head."""
    return ask_calls(e, (AttentionCall(batch=b, heads=h) for b, h in GRID))


def empty_rows(e: Examiner) -> Difference | None:
    """Use masks with empty rows in all sizes, and more causal queries than keys."""
    sizes = ((4, 7), (7, 70), (1, 130), (130, 300), (3, 1024))
    masked = [AttentionCall(n_q=n, n_k=m, mask="rows") for n, m in sizes]
    combined = [replace(masked[1], **x) for x in OPTIONS if "mask" not in x]
    late = [AttentionCall(n_q=n, n_k=m, causal=True) for m, n in (*sizes, (1, 4))]
    ends = e.subject.convention.causal_from == "end"
    if e.subject.convention.mask is None and not (e.is_causal and ends):
        raise NotAskedError("it has no mask argument")
    return ask_calls(e, (*masked, *combined, *late))


def have_no_keys(e: Examiner) -> Difference | None:
    """Use no keys: out is 0, lse is -inf; an error is right as well."""
    if e.subject.convention.projections or e.subject.convention.storage:
        raise NotAskedError("its keys are not an argument")
    return ask_calls(
        e,
        (
            AttentionCall(n_k=0),
            AttentionCall(n_q=1, n_k=0),
            AttentionCall(n_k=0, heads=4),
        ),
    )


def broadcast_masks(e: Examiner) -> Difference | None:
    """Pass masks and biases with axes of size 1; an error is right as well."""
    options: tuple[dict[str, Any], ...] = ({"mask": "cells"}, {"bias": True})
    axes = ("b", "h", "bh", "hq", "bhq", "q")
    return ask_calls(
        e,
        (
            AttentionCall(batch=3, n_q=n, n_k=n + 1, one=one, **option)
            for option in options
            for one in axes
            for n in (1, 4, 130)
        ),
    )


def call_again(e: Examiner) -> Difference | None:
    """Repeat calls with other numbers: the first result must not change."""
    sizes: tuple[dict[str, Any], ...] = (
        {},
        {"n_q": 1, "n_k": 7},
        {"n_q": 1, "n_k": 130},
        {"n_q": 130, "n_k": 130},
    )
    seen = []
    for size in sizes:
        for option in ({}, *OPTIONS):
            call = fit_call(e, replace(AttentionCall(**{**size, **option}), seed=1))
            if call in seen:
                continue
            seen.append(call)
            try:
                first = e.ask(draw_asked(e, call))
                again = ask_call(e, replace(call, seed=2))
            except (NotAskedError, CallFailedError):
                continue
            if again is not None:
                return replace(again, says=f"the second of two calls, {again.says}")
            assert first.reread is not None
            kept = first.reread()
            for what in ("out", "lse"):
                x, y = getattr(kept, what), getattr(first, what)
                found = x is not None and compare_arrays(x, y, atol=0, what=what)
                if found:
                    return replace(found, says=f"after a second call, {found.says}")
    return None


def round_no_scale(e: Examiner) -> Difference | None:
    """Fit the scale of 16-bit calls to many rows: rounding of numbers averages out."""
    for precision in {"bfloat16", "float16"} & set(e.subject.offered):
        call = AttentionCall(
            n_q=256, n_k=2, heads=8, width=UNROUNDED, columns=UNROUNDED
        )
        call = replace(fit_call(e, call), precision=precision, n_q=256)
        inputs = draw_asked(e, call)
        factor = call.width**-0.5
        apart = e.ask(inputs, precision).out - e.expect(inputs, precision).out
        step = replace(inputs, scale=factor * 1.001)
        slope = (e.expect(step, precision).out - e.expect(inputs, precision).out) / 1e-3
        error = float((apart * slope).sum() / (slope**2).sum())
        if abs(error) > SCALE_ERROR:
            says = f"{precision}, D = {call.width}: the scale is wrong by {error:.1e}."
            return Difference(says, arguments=inputs)
    return None


CALLS = (
    Case("heads_and_batches_together",
         "With many sequences and heads, some are lost.",
         "Launch B · H blocks; look for a limit of the grid, or of an index.",
         "complete", fill_grid, (*MIXED, "sizes_together")),
    Case("empty_rows_of_any_size",
         "Fully masked rows are wrong for some sizes, or with more queries than keys.",
         "Return 0, and lse of -inf, for every row without a key, in every branch.",
         "complete", empty_rows, (*MIXED, *CAUSAL, *EMPTY, "causal_alignment")),
    Case("options_combine",
         "Two options, or an option and a size, are wrong together.",
         "Look for a branch on what is named, or an option that it does not pass on.",
         "complete", combine_options,
         (*MIXED, *SIZED, "sizes_together", "options_of_any_size")),
    Case("strides_of_each_argument",
         "The strides or the offset of one array are used for another, or assumed.",
         "Pass every stride of q, k, v, mask and bias; start at their own offsets.",
         "complete", give_own_strides,
         (*MIXED, "strides_do_not_matter", "options_combine")),
    Case("calls_do_not_interfere",
         "A call changes the result of an earlier one, or uses something of it.",
         "Allocate out in every call; look for buffers and caches kept by shape.",
         "complete", call_again, (*MIXED, "options_combine")),
    Case("no_keys",
         "Without keys, out is not 0.",
         "Return 0, and lse of -inf, if Nk is 0; or raise an error.",
         "complete", have_no_keys, (*MIXED, *EMPTY, "options_combine")),
    Case("masks_are_broadcast",
         "A mask or bias with an axis of size 1 is read beyond that axis.",
         "Use stride 0 for axes of size 1; or raise an error.",
         "complete", broadcast_masks, (*MIXED, "mask_per_head", "mask_per_sequence",
          "options_combine")),
    Case("scale_is_not_rounded",
         "In 16 bits the scale is rounded, which changes all scores in one direction.",
         "Keep the scale in float32, or as a Python number.",
         "complete", round_no_scale,
         (*MIXED, "half_is_close", "precisions_agree", "options_combine")),
    Case("gradients_of_any_use",
         "Gradients depend on how they are requested.",
         "Use the strides of the gradient of out; compute each of dq, dk and dv as if"
         " alone; do not change what was saved.",
         "complete", use_gradients, (*DERIVED, "strides_of_each_argument")),
    Case("gradients_of_options",
         "The backward pass lacks an option of the forward pass, or fails for a size.",
         "Pass every option on to the backward pass.",
         "complete", combine_gradients,
         (*DERIVED, "gradients_of_any_size", "options_combine")),
    Case("random_calls",
         "A call that was drawn at random is wrong; it is made as small as possible.",
         "Run the code below, and look for a branch on what it has in common.",
         "complete", lambda e: Search().ask(e),
         (*DERIVED, "strides_of_each_argument", "options_combine",
          "masks_are_broadcast", "gradients_of_any_use", "gradients_of_options")),
)  # fmt: skip
