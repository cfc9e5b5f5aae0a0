"""One call: its sizes, options, strides and values, from which its inputs are drawn.

    call = AttentionCall(n_q=1, n_k=256, heads=4, shared=2, causal=True, seed=7)
    ask_call(e, call)       None if the answer is right, else the Difference

A call is small, can be compared, changed and written as code, and gives the same
inputs each time. Lists of calls are cases; search.py draws and shrinks them.

Next: size_cases.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from regard.judge.case import Examiner
from regard.judge.difference import Difference
from regard.judge.inputs import CallFailedError, Inputs, NotAskedError
from regard.judge.mask_cases import CAUSAL, HIDES

ROWS = 12  # from this many rows on, some are set to 0 or made equal
FEW_SHAPES = 3  # for a library that compiles every shape
CELLS = 12_000  # maximum number of scores per call, if Nq must equal Nk
EMPTY = ("empty_row_is_zero", "finfo_min_is_not_inf", "empty_row_lse_is_minus_inf")
EMPTY_ROWS = (*EMPTY, "empty_rows_of_any_size", "empty_row_grad_finite")
ENOUGH = 5  # calls that are refused before the rest of a list is not tried
AIM = 8.0  # the score of the key that a query is aimed at
SIZES = {"batch": "B", "heads": "H", "n_q": "Nq", "n_k": "Nk", "width": "D"}
SIZES["columns"] = "Dv"
PARTS = {  # of an answer, and the cases about it
    "out": (),
    "weights": ("weights_are_those_used", "weights_are_shown_as_defined"),
    "lse": ("lse_is_natural_log", "merge_of_parts_is_whole"),
}
DOUBTS = {  # option of a call: cases of which none may have failed
    "shared": ("gqa_group_is_contiguous", "gqa_one_key_head", "groups_of_any_size"),
    "causal": (*CAUSAL, "causal_alignment", "decode_one_token_sees_all"),
    "mask": (*HIDES, "mask_per_head", "mask_per_sequence", "mask_and_causal_compose",
             "documents_do_not_mix", "left_padding_changes_nothing",
             "first_blocks_are_masked", "long_masked_matches", "masks_of_any_size"),
    "bias": ("bias_is_not_scaled",),
    "window": ("window_counts",),
    "softcap": ("softcap_is_tanh", "softcap_before_mask", "softcap_before_bias"),
    "sink": ("sink_takes_weight",),
    "scale": ("scale_is_used", "scale_of_any_sign"),
    "strides": ("strides_do_not_matter", "strides_of_each_argument"),
    "precision": ("half_is_close", "half_scores_do_not_overflow", "precisions_agree",
                  "half_sums_in_single", "masked_precisions_agree"),
    "backward": ("gradient_of_q", "gradient_of_k", "gradient_of_v",
                 "gradient_under_mask", "gradient_of_large_scores"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The sizes of a call and its options, as far as the convention has them."""

    batch: int = 2
    heads: int = 2
    shared: int = 0  # heads of k and v; 0: as many as of q
    n_q: int = 3
    n_k: int = 3
    width: int = 8
    columns: int = 8
    causal: bool = False
    mask: str = ""  # "cells": random, no empty row; "rows": every third row is empty
    bias: bool = False
    one: str = ""  # axes of mask and bias that have size 1, of "bhq"
    window: int | None = None
    softcap: float | None = None
    sink: bool = False
    scale: float | None = None
    strides: tuple[tuple[str, str], ...] = ()  # of q, k, v, mask and bias
    values: str = "ties"  # some rows are 0 or equal; "aimed": each query has a key
    precision: str = ""  # default: the best
    backward: str | None = None  # compare gradients, see Torch.differentiate
    only: str = "qkv"  # those that require a gradient
    seed: int = 0

    def __str__(self) -> str:
        said = [f"{name} = {getattr(self, x)}" for x, name in SIZES.items()]
        for name, value in self.options().items():
            said.append(name if value is True else f"{name} = {value}")
        return ", ".join(said)

    def options(self) -> dict[str, Any]:
        """Return the options that are not the default."""
        own = (x for x in fields(self) if x.name not in ("seed", "values", *SIZES))
        given = {x.name: (getattr(self, x.name), x.default) for x in own}
        return {n: x for n, (x, default) in given.items() if x != default}


def fit_sizes(e: Examiner, sizes: AttentionCall) -> AttentionCall:
    """Return the nearest sizes that the convention allows."""
    words, given = e.subject.convention, sizes
    if words.projections:
        wide = e.subject.form.sizes[0]  # type: ignore[union-attr]
        batch = min(sizes.batch, wide)
        n_q, n_k = (min(n, wide // batch) for n in (sizes.n_q, sizes.n_k))
        given = replace(sizes, batch=batch, heads=e.heads, shared=0, n_q=n_q, n_k=n_k)
        given = replace(given, width=e.width, columns=e.width)
    elif "h" not in words.layout:
        given = replace(given, heads=1, shared=0)
    if "b" not in words.layout:
        given = replace(given, batch=1)
    if not words.other_widths:
        given = replace(given, columns=given.width)
    placed = words.causal_from is not None or words.q_start is not None
    if (
        not words.other_lengths
        or words.order == "x"
        or (words.always_causal and not placed)
    ):
        n = min(max(given.n_q, given.n_k), int((CELLS // given.batch) ** 0.5))
        given = replace(given, n_q=n, n_k=n)
    elif words.always_causal and given.n_q > given.n_k:
        given = replace(given, n_q=given.n_k, n_k=given.n_q)
    return given


def thin(e: Examiner, many: Iterable[AttentionCall]) -> list[AttentionCall]:
    """Return a few of many sizes if the library compiles every shape, else all."""
    found = list(many)
    if not e.subject.library.compiles:
        return found
    return found[:: -(-len(found) // FEW_SHAPES)]


def fit_call(e: Examiner, call: AttentionCall, about: str = "") -> AttentionCall:
    """Return the call without what the convention lacks or a failed case doubts.

    about: an option that is kept, so that it is said to be missing
    """
    words, doubted = e.subject.convention, e.subject.doubted
    call = fit_sizes(e, call)
    added = words.mask and (words.float_mask or words.true_means == "added")
    arguments = {
        "shared": words.shared_heads,
        "causal": e.is_causal,
        "bias": words.bias or added,
        "precision": True,
        "strides": e.subject.library.strided and not words.projections,
        "backward": words.gradients is not False and words.library != "numpy",
    }
    off: dict[str, Any] = {
        name: AttentionCall.__dataclass_fields__[name].default
        for name, cases in DOUBTS.items()
        if name != about
        and not (
            arguments.get(name, getattr(words, name, None))
            and doubted.isdisjoint(cases)
        )
    }
    call = replace(call, **off)
    if call.precision not in e.subject.offered:
        call = replace(call, precision="")
    if not doubted.isdisjoint(EMPTY_ROWS) or "q" not in words.axes_of_mask:
        call = replace(call, mask=call.mask and "cells")
    first = words.layout[0] == words.axes_of_mask[0] == "b"
    if call.strides and (call.backward is not None or not first or words.storage):
        kept = tuple(x for x in call.strides if x[1] != "expanded")
        call = replace(call, strides=kept)
    if words.library == "jax" and call.backward:
        call = replace(call, backward="")
    call = replace(call, causal=find_start(e, call) is not None)
    return call if call.causal else replace(call, window=None)


def find_start(e: Examiner, call: AttentionCall) -> int | None:
    """Return the position of the first query of a causal call; None: not causal."""
    words, late = e.subject.convention, call.n_k - call.n_q
    if not (call.causal or words.always_causal) or call.n_k == 0:
        return None
    if words.causal_from == "start" and not words.q_start:
        return 0 if call.n_q > 1 or call.n_k == 1 else None
    if late == 0 or words.causal_from == "end" or words.q_start:
        allowed = late >= 0 or e.subject.doubted.isdisjoint(EMPTY_ROWS)
        return late if allowed and (late >= 0 or not words.q_start) else None
    return None


def draw_asked(e: Examiner, call: AttentionCall) -> Inputs:
    """Return the inputs of a call that fits; `write_repeated` writes it as code."""
    rng, axes = np.random.default_rng(call.seed), e.subject.convention.axes_of_mask
    shared = call.shared or call.heads
    q = rng.normal(size=(call.batch, call.heads, call.n_q, call.width))
    k = rng.normal(size=(call.batch, shared, call.n_k, call.width))
    v = rng.normal(size=(call.batch, shared, call.n_k, call.columns))
    strides = dict(call.strides)
    for x in (q, k, v):
        if call.values == "ties" and x.size >= ROWS * x.shape[-1] > 0:
            x[-1, -1, x.shape[2] // 2] = 0
            x[-1, 0, -1] = x[-1, 0, 0]
    if call.values == "aimed" and call.n_k:
        near = k.repeat(call.heads // shared, 1)[:, :, aim_queries(call)]
        size = np.maximum((near**2).sum(-1, keepdims=True), call.width / 2)
        q = near * AIM * call.width**0.5 / size
    inputs = Inputs(q=q, k=k, v=v, scale=call.scale, softcap=call.softcap)
    start = find_start(e, call)
    if start is not None:
        inputs = replace(inputs, causal=True, q_start=start, window=call.window)
    sizes = zip("bhqk", inputs.shape, strict=True)
    shape = [n if a in axes and a not in call.one else 1 for a, n in sizes]
    found = draw_masks(rng, call, shape, start or 0)
    for name, x in {"q": inputs.q, "k": k, "v": v, **found}.items():
        if strides.get(name) == "expanded":
            x[:] = x[:1]
    inputs = replace(inputs, strides=strides, narrow=bool(call.one), **found)
    return replace(inputs, backward=call.backward or "", only=call.only)


def draw_masks(
    rng: np.random.Generator, call: AttentionCall, shape: Sequence[int], start: int
) -> dict[str, Any]:
    """Return the mask, the bias and the sink of a call, as far as it has them."""
    found: dict[str, Any] = {}
    if call.mask and call.n_k:
        mask = rng.random(shape) < 0.6
        rows = np.arange(shape[2])
        keys = np.clip(rows + start, 0, call.n_k - 1)
        mask[:, :, rows, keys if shape[2] > 1 else 0] = True
        if call.mask == "rows" and shape[2] == call.n_q:
            mask[:, :, ::3] = False
        found["mask"] = mask
    if call.bias:
        found["bias"] = rng.normal(size=shape)
    if call.sink:
        found["sink"] = rng.normal(size=call.heads)
    return found


def aim_queries(call: AttentionCall) -> Any:
    """Return the key that each query is aimed at: the last, the first, or near one."""
    return np.arange(call.n_q) * -7 % call.n_k - 1


def ask_call(e: Examiner, call: AttentionCall) -> Difference | None:
    """Compare the answer to a call: gradients, or all parts, the dtype and q, k, v."""
    inputs, precision = (
        draw_asked(e, call),
        call.precision or e.subject.precisions[0],
    )
    e = replace(e, rng=np.random.default_rng(call.seed + 1))  # of the gradient of out
    try:
        if call.backward is not None:
            found = e.compare_gradients(inputs, precision=precision)
        else:
            yours = e.ask(inputs, precision)
            doubted = e.subject.doubted
            parts = tuple(x for x, cases in PARTS.items() if doubted.isdisjoint(cases))
            found = e.compare_answer(yours, inputs, parts=parts, precision=precision)
            if yours.changed and "inputs_are_left_alone" not in doubted:
                found = Difference(f"the call changed {' and '.join(yours.changed)}.")
    except CallFailedError as trouble:
        said = call.options()
        if call.n_k == 0 or len(said) > 1 or not said.keys().isdisjoint(REFUSED):
            raise NotAskedError(f"it refuses a call: {trouble}") from None
        found = Difference(str(trouble))
    if found is None:
        return None
    return replace(found, says=f"{call}: {found.says}", arguments=inputs, call=call)


REFUSED = ("one", "strides")  # options that may be refused even alone


def ask_calls(
    e: Examiner, calls: Iterable[AttentionCall], *, about: str = ""
) -> Difference | None:
    """Ask calls, as far as they fit, up to the first difference."""
    asked, refused = set(), 0
    why = NotAskedError("its convention excludes these calls")
    for call in thin(e, calls):
        fitted = fit_call(e, call, about)
        if fitted in asked:
            continue
        asked.add(fitted)
        try:
            found = ask_call(e, fitted)
        except NotAskedError as reason:
            asked.discard(fitted)
            why, refused = reason, refused + 1
            if about and refused == ENOUGH and not asked:
                raise
            continue
        if found is not None:
            return found
    if not asked:
        raise why
    return None
