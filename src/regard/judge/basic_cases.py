"""Basic cases, for code such as a tutorial's: softmax, scale, argument order, masks.

Next: mask_cases.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from regard.judge.case import (
    FAR,
    GATES,
    SMALL,
    Case,
    Examiner,
    find_wrong_weight,
    inverse_sqrt,
)
from regard.judge.difference import Difference, compare_arrays
from regard.judge.inputs import BITS, CallFailedError, Inputs, NotAskedError
from regard.judge.observe_convention import compare_causal

EVEN = (*GATES, "equal_scores_equal_weights")
APART = (*EVEN, "heads_do_not_mix", "batches_do_not_mix")
ORDERED = (*APART, "keys_answer_queries", "argument_order")
MASKED = (*ORDERED, "softmax_over_keys", "mask_makes_no_nan")


def answer_at_all(e: Examiner) -> Difference | None:
    """Use three ordinary tokens: out must have the right shape and be finite."""
    inputs = Inputs(q=e.draw(3) / 2, k=e.draw(3) / 2, v=e.draw(3))
    out = e.ask(inputs).out
    if np.isfinite(out).all():
        return None
    right = e.expect(inputs).out
    return compare_arrays(np.where(np.isfinite(out), right, out), right)


def answer_the_same(e: Examiner) -> Difference | None:
    """Repeat the same call three times."""
    inputs = Inputs(q=e.draw(4), k=e.draw(4), v=e.draw(4))
    first, *others = (e.ask(inputs).out for _ in range(3))
    found = (
        compare_arrays(x, first, atol=e.room(1e-5), what="the second out")
        for x in others
    )
    return next((x for x in found if x is not None), None)


def leave_inputs_alone(e: Examiner) -> Difference | None:
    """Compare the arguments before and after the call."""
    inputs = Inputs(q=e.draw(3), k=e.draw(3), v=e.draw(3))
    mask = np.tri(3, dtype=bool)[None, None]
    for each in (inputs, replace(inputs, mask=mask), replace(inputs, causal=True)):
        try:
            changed = e.ask(each).changed
        except (NotAskedError, CallFailedError):  # other cases report these
            continue
        if changed:
            names = " and ".join(changed)
            return Difference(f"the call changed {names}.")
    return None


def weigh_evenly(e: Examiner) -> Difference | None:
    """Use scores of 0: without a mask, all keys have the same weight."""
    if e.subject.declared.always_causal or e.heads > 1:  # other cases ask this
        raise NotAskedError("it is always causal, or has several heads")
    return e.compare(Inputs(q=e.zeros(3), k=e.unit(3), v=e.unit(3)), atol=1e-3)


def normalise_over_keys(e: Examiner) -> Difference | None:
    """Use symmetric scores whose weights are not symmetric."""
    q, k = e.score([[FAR, FAR], [FAR, 0]])
    return e.compare(Inputs(q=q, k=k, v=e.unit(2)), atol=1e-3)


def sum_to_one(e: Examiner) -> Difference | None:
    """Use equal scores far below 0 and values of 1, whose average is 1."""
    q, k = e.score(np.full((3, 3), -60.0))
    out = e.ask(Inputs(q=q, k=k, v=np.ones_like(k))).out
    room = 1e-12 if e.bits == BITS["float64"] else min(e.room(), 2.0 ** (5 - e.bits))
    found = compare_arrays(out, np.ones_like(out), atol=room)
    if found is None or not np.isfinite(out).all():
        return found
    worst = float(out.ravel()[np.argmax(np.abs(out - 1))] - 1)
    sign = "+" if worst > 0 else "-"
    says = f"values of 1 average to 1 {sign} {abs(worst):.1e}; {found.says}"
    return replace(found, says=says)


def stay_finite(e: Examiner) -> Difference | None:
    """Use scores of 4,000, whose exp overflows."""
    q, k = e.score([[0, 4000], [4000, 0]])
    return e.compare(Inputs(q=q, k=k, v=e.unit(2)), atol=1e-3)


def scale_scores(e: Examiner) -> Difference | None:
    """Use two tokens that attend to themselves; how much depends on the scale."""
    score = 1.5 / inverse_sqrt(e.width)
    q, k = e.score([[score, 0], [0, score]])
    inputs = Inputs(q=q, k=k, v=e.unit(2))
    found = e.compare(inputs, atol=2e-3)
    if found is None:
        return None
    d, near = e.width, ""
    yours = e.ask(inputs).out
    for words, factor in (("1", 1.0), ("1 / D", 1 / d), ("sqrt(D)", d**0.5)):
        other = e.expect(replace(inputs, scale=factor)).out
        if compare_arrays(yours, other, atol=e.room(1e-3)) is None:
            near = f" It is what a scale of {words} gives (D = {d})."
    return replace(found, says=found.says + near)


def scale_by_keys(e: Examiner) -> Difference | None:
    """Use values twice as wide as keys."""
    score = 1.5 / inverse_sqrt(e.width)
    q, k = e.score([[score, 0], [0, score]])
    wide = e.draw(2, width=2 * e.width)
    try:
        return e.compare(Inputs(q=q, k=k, v=wide), atol=2e-3)
    except CallFailedError:  # reported by another case, values_of_any_width
        raise NotAskedError("it takes no values of another width") from None


def answer_queries(e: Examiner) -> Difference | None:
    """Let each query attend to the next key; swapped, it would be the previous one."""
    q, k = e.score(FAR * np.roll(np.eye(3), 1, axis=1))
    return e.compare(Inputs(q=q, k=k, v=k), atol=1e-3)


def gather_values(e: Examiner) -> Difference | None:
    """Let each query attend to its own key, so out is v."""
    q, k = e.score(FAR * np.eye(3))
    return e.compare(Inputs(q=q, k=k, v=e.draw(3)), atol=1e-3)


def take_other_lengths(e: Examiner) -> Difference | None:
    """Use two queries and five keys, then five queries and two keys."""
    words = e.subject.convention
    late = words.always_causal and words.causal_from == "end"
    for n_q, n_k in ((2, 5), (5, 2))[: 1 if late else 2]:
        inputs = Inputs(q=e.zeros(n_q), k=e.draw(n_k), v=e.draw(n_k))
        found = e.compare(inputs, atol=1e-3)
        if found is not None:
            return found
    return None


def keep_heads_apart(e: Examiner) -> Difference | None:
    """Use a constant value per head: averaging within a head keeps it."""
    n = e.heads if e.heads > 1 else 2
    v = np.broadcast_to(np.arange(1.0, n + 1)[:, None, None], (1, n, 3, e.width))
    inputs = Inputs(q=e.zeros(3, heads=n), k=v.copy(), v=v.copy())
    return e.compare(inputs, atol=1e-3)


def keep_batches_apart(e: Examiner) -> Difference | None:
    """Use a constant value per sequence: averaging within a sequence keeps it."""
    v = np.broadcast_to(
        np.arange(1.0, 3)[:, None, None, None], (2, e.heads, 3, e.width)
    )
    inputs = Inputs(q=e.zeros(3, batch=2), k=v.copy(), v=v.copy())
    return e.compare(inputs, atol=1e-3)


def ignore_order(e: Examiner) -> Difference | None:
    """Permute keys and values together: out does not change without a mask."""
    if e.subject.convention.always_causal:
        raise NotAskedError("it is always causal, so the order matters")
    q, k, v = e.draw(3), e.draw(3), e.draw(3)
    order = [2, 0, 1]
    first = e.ask(Inputs(q=q, k=k, v=v)).out
    second = e.ask(Inputs(q=q, k=k[:, :, order], v=v[:, :, order])).out
    room = max(1e-8, min(e.room(), 2.0 ** (7 - e.bits)))  # only sums are reordered
    return compare_arrays(second, first, atol=room, what="reordered out")


def make_masked_inputs(e: Examiner, n: int) -> Iterator[tuple[str, Inputs]]:
    """Yield inputs with a mask and inputs with causal, if the subject has them."""
    plain = Inputs(q=e.zeros(n), k=e.zeros(n), v=e.unit(n))
    mask = np.tri(n, dtype=bool)[None, None]
    mask = mask ^ (np.arange(n)[:, None] == n - 1) & (np.arange(n) == 0)
    words = e.subject.convention
    if words.mask is not None and "q" in words.axes_of_mask:
        yield "mask", replace(plain, mask=mask)
    if words.causal is not None or words.always_causal:
        yield "causal", replace(plain, causal=True)
    if words.mask is not None and "q" not in words.axes_of_mask:
        row = np.arange(n)[None, None, None] < n - 1
        yield "mask", replace(plain, mask=row)


def require_masked_inputs(
    e: Examiner, n: int, *only: str
) -> Iterator[tuple[str, Inputs]]:
    """Yield those of the given kinds; raise NotAskedError if there are none."""
    found = [
        (name, inputs) for name, inputs in make_masked_inputs(e, n) if name in only
    ]
    if not found:
        raise NotAskedError(f"it has no {' or '.join(only)} argument")
    yield from found


def hide_without_nan(e: Examiner) -> Difference | None:
    """Check that rows with at least one unmasked key are not NaN."""
    for name, inputs in require_masked_inputs(e, 3, "mask", "causal"):
        weights = e.read_weights(inputs)
        rows = slice(0, 2) if name == "causal" else slice(None)
        right = e.expect(inputs).weights
        wrong = np.isnan(weights[..., rows, :])
        says = f"with a {name}, the weight of {{place}} is NaN."
        found = find_wrong_weight(
            weights[..., rows, :], wrong, right[..., rows, :], says, inputs
        )
        if found is not None:
            return found
    return None


def read_polarity(e: Examiner) -> Difference | None:
    """Check whether keys marked True or keys marked False get the weight."""
    for _, inputs in require_masked_inputs(e, 3, "mask"):
        weights, right = e.read_weights(inputs), e.expect(inputs).weights
        sees, hides = right > 0, right == 0
        split = sees.any(-1) & hides.any(-1)
        on_hidden = np.where(hides, weights, 0).sum(-1) > SMALL
        on_seen = np.where(sees, weights, 0).sum(-1) > SMALL
        wrong = (split & on_hidden & ~on_seen)[..., None] & hides
        says = "unmasked keys have no weight, but {place}, which is masked, has."
        found = find_wrong_weight(weights, wrong, right, says, inputs)
        if found is not None:
            return found
    return None


def hide_keys(e: Examiner) -> Difference | None:
    """Check that masked keys have no weight."""
    for _, inputs in require_masked_inputs(e, 3, "mask"):
        weights, right = e.read_weights(inputs), e.expect(inputs).weights
        on_seen = np.where(right > 0, weights, 0).sum(-1, keepdims=True) > SMALL
        wrong = (right == 0) & (np.abs(weights) > SMALL) & on_seen
        says = "{place} is masked, but has the weight {weight}."
        found = find_wrong_weight(weights, wrong, right, says, inputs)
        if found is not None:
            return found
    return None


def hide_before_softmax(e: Examiner) -> Difference | None:
    """Check that rows sum to 1 with a mask."""
    for name, inputs in require_masked_inputs(e, 3, "mask", "causal"):
        weights, right = e.read_weights(inputs), e.expect(inputs).weights
        total = weights.sum(-1, keepdims=True)
        few = (total < 1 - 1e-3) & (total > SMALL)
        says = f"with a {name}, the weights in the row of {{place}} sum to less than 1."
        found = find_wrong_weight(weights, few & (right > 0), right, says, inputs)
        if found is not None:
            return found
    return None


def hide_future(e: Examiner) -> Difference | None:
    """Check that causal attention puts no weight on keys after the query."""
    for _, inputs in require_masked_inputs(e, 3, "causal"):
        weights, right = e.read_weights(inputs), e.expect(inputs).weights
        wrong = (right == 0) & (np.abs(weights) > SMALL)
        says = "{place} is in the future, but has the weight {weight}."
        return find_wrong_weight(weights, wrong, right, says, inputs)
    return None


def see_itself(e: Examiner) -> Difference | None:
    """Check that causal attention puts weight on the query itself and the past."""
    for _, inputs in require_masked_inputs(e, 3, "causal"):
        weights, right = e.read_weights(inputs), e.expect(inputs).weights
        wrong = (right > 0) & ~(np.abs(weights) > SMALL)
        says = "{place} is allowed, but has the weight {weight}."
        return find_wrong_weight(weights, wrong, right, says, inputs)
    return None


def show_what_was_used(e: Examiner) -> Difference | None:
    """Check that the returned weights times the values are out."""
    inputs = Inputs(q=e.draw(3), k=e.draw(3), v=e.draw(3))
    if e.subject.convention.look:
        inputs = replace(inputs, look=True)
    answer = e.ask(inputs)
    if answer.weights is None:
        raise NotAskedError("it returns no weights")
    if answer.weights.shape[1] != inputs.q.shape[1]:
        raise NotAskedError("its weights are averaged over the heads")
    return compare_arrays(answer.out, answer.weights @ inputs.v, atol=e.room(1e-4))


BASIC = (
    Case("it_answers",
         "It fails, or does not return an array of the right shape.",
         "Return out with the axes of q and the width of v, as an array of its library;"
         " or declare another layout, library, device or precisions.",
         "basic", answer_at_all, ()),
    Case("dropout_is_off",
         "The same call gives different results: something is still random.",
         "Apply dropout only in training, F.dropout(w, p, self.training).",
         "basic", answer_the_same, ("it_answers",)),
    Case("inputs_are_left_alone",
         "The call changes its arguments.",
         "Write q * scale, not q *= scale; np.where or masked_fill, not x[~mask] = ….",
         "basic", leave_inputs_alone),
    Case("causal_as_declared",
         "It is always causal, or never; other cases are asked as if it were declared.",
         "Declare it if it is intended, else look for a mask that is always on.",
         "basic", compare_causal),
    Case("equal_scores_equal_weights",
         "Keys with equal scores differ in weight, or the weights do not sum to 1.",
         "Look for a mask or a bias that is always on, or another axis of the softmax.",
         "basic", weigh_evenly),
    Case("softmax_over_keys",
         "The softmax runs over the queries instead of the keys.",
         "Normalise the last axis of the scores (…, Nq, Nk): axis=-1, keepdims=True.",
         "basic", normalise_over_keys, ORDERED),
    Case("rows_sum_to_one",
         "Weights do not sum to 1, as if something were added to the denominator.",
         "Subtract the maximum of each row before exp; divide by the sum alone,"
         " without an epsilon.",
         "basic", sum_to_one, ORDERED),
    Case("softmax_is_stable",
         "Large scores overflow exp, and the row is NaN.",
         "Subtract the maximum of each row before exp.",
         "basic", stay_finite, ORDERED),
    Case("scale_is_one_over_root_width",
         "Scores are not multiplied by 1 / sqrt(D), where D is the width of one head.",
         "Multiply q kᵀ by q.shape[-1] ** -0.5, after the heads are split, once.",
         "basic", scale_scores, ORDERED),
    Case("scale_ignores_the_values",
         "The scale is taken from the width of the values.",
         "Take D from k.shape[-1], not from v.shape[-1].",
         "basic", scale_by_keys, (*ORDERED, "scale_is_one_over_root_width")),
    Case("keys_answer_queries",
         "q and k are swapped: rows are keys, or the weights are transposed.",
         "Compute q @ kᵀ, rows are queries; look for swapped projections of q and k.",
         "basic", answer_queries, APART),
    Case("argument_order",
         "k and v are swapped, or something other than v is averaged.",
         'Return weights @ v, with the third argument as v; or declare order="qvk".',
         "basic", gather_values, (*APART, "keys_answer_queries")),
    Case("lengths_may_differ",
         "It assumes as many keys as queries, so cross-attention is wrong.",
         "Take Nk from k.shape and Nq from q.shape.",
         "basic", take_other_lengths, (*ORDERED, "softmax_over_keys")),
    Case("heads_do_not_mix",
         "Heads are mixed: they were split by a reshape without a transpose.",
         "Split (B, N, H·D) into (B, N, H, D) first, then swap axes to (B, H, N, D).",
         "basic", keep_heads_apart, EVEN),
    Case("batches_do_not_mix",
         "Sequences of a batch are mixed.",
         "Transpose only the last two axes of k, swapaxes(-1, -2), never k.T.",
         "basic", keep_batches_apart, EVEN),
    Case("order_of_keys_does_not_matter",
         "Without a mask, out depends on the order of the keys.",
         "Leave positions to the inputs or a bias; look for a mask that is always on.",
         "basic", ignore_order, ORDERED),
    Case("mask_makes_no_nan",
         "A mask gives NaN for unmasked keys, as 0 · -inf does.",
         "Use np.where(mask, scores, -np.inf); never multiply a mask by -inf.",
         "basic", hide_without_nan, ORDERED),
    Case("true_means_attend",
         "The mask is inverted: keys that are allowed are hidden.",
         'Hide where the mask is False; or declare true_means="hide" if intended.',
         "basic", read_polarity, MASKED),
    Case("masked_keys_have_no_weight",
         "Masked keys keep some weight: the mask is ignored, added or multiplied.",
         "Set masked scores to -inf before the softmax.",
         "basic", hide_keys, (*MASKED, "true_means_attend")),
    Case("mask_before_softmax",
         "Weights are masked after the softmax, so rows no longer sum to 1.",
         "Mask the scores before the softmax, or divide by the row sums again.",
         "basic", hide_before_softmax, MASKED),
    Case("future_never_leaks",
         "With causal, a query attends to keys after itself.",
         "Hide keys k > q: np.triu(…, 1) marks the forbidden keys.",
         "basic", hide_future, MASKED),
    Case("causal_sees_itself",
         "With causal, a query does not attend to itself or to its past.",
         "Allow keys k <= q, including the diagonal: np.tri(n) marks the allowed keys.",
         "basic", see_itself, (*MASKED, "future_never_leaks")),
    Case("weights_are_those_used",
         "The returned weights are not those that produced out.",
         "Return the weights after mask and softmax, before dropout, for every head.",
         "basic", show_what_was_used, ORDERED),
)  # fmt: skip
