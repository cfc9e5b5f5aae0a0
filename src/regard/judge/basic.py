"""The cases of a first attention, such as a tutorial's: softmax, scale, order, masks.

Next: masking.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from regard.judge.case import FAR, GATES, SMALL, Case, Examiner, judge_weights, root
from regard.judge.difference import Difference, compare
from regard.judge.inputs import Inputs, NotAskedError, TroubleError

APART = (*GATES, "heads_do_not_mix", "batches_do_not_mix")
ORDERED = (*APART, "argument_order")
MASKED = (*ORDERED, "mask_makes_no_nan")


def answer_at_all(e: Examiner) -> Difference | None:
    """Three tokens, nothing special: an array of the right shape, and numbers."""
    inputs = Inputs(q=e.draw(3) / 2, k=e.draw(3) / 2, v=e.draw(3))
    out = e.ask(inputs).out
    if np.isfinite(out).all():
        return None
    right = e.expect(inputs).out
    return compare(np.where(np.isfinite(out), right, out), right)


def answer_the_same(e: Examiner) -> Difference | None:
    """The same call three times."""
    inputs = Inputs(q=e.draw(4), k=e.draw(4), v=e.draw(4))
    first, *others = (e.ask(inputs).out for _ in range(3))
    found = (
        compare(x, first, atol=e.room(1e-5), what="the second out") for x in others
    )
    return next((x for x in found if x is not None), None)


def leave_inputs_alone(e: Examiner) -> Difference | None:
    """The arrays that were handed over, looked at afterwards."""
    inputs = Inputs(q=e.draw(3), k=e.draw(3), v=e.draw(3))
    mask = np.tri(3, dtype=bool)[None, None]
    for each in (inputs, replace(inputs, mask=mask), replace(inputs, causal=True)):
        try:
            changed = e.ask(each).changed
        except (NotAskedError, TroubleError):  # other cases tell of these
            continue
        if changed:
            names = " and ".join(changed)
            return Difference(f"{names} is not what it was before the call.")
    return None


def normalise_over_keys(e: Examiner) -> Difference | None:
    """Scores that are symmetric, with weights that are not."""
    q, k = e.score([[FAR, FAR], [FAR, 0]])
    return e.compare(Inputs(q=q, k=k, v=e.unit(2)), atol=1e-3)


def sum_to_one(e: Examiner) -> Difference | None:
    """Equal scores far below 0, values of 1: any average of them is 1."""
    q, k = e.score(np.full((3, 3), -60.0))
    out = e.ask(Inputs(q=q, k=k, v=np.ones_like(k))).out
    exact = e.subject.precisions[0] == "float64"
    found = compare(out, np.ones_like(out), atol=1e-12 if exact else e.room())
    if found is None:
        return None
    short = f"{1 - out.min():.1e}"
    return replace(found, says=f"values of 1 average to 1 - {short}; {found.says}")


def stay_finite(e: Examiner) -> Difference | None:
    """Scores of 4,000, whose exp no number holds."""
    q, k = e.score([[0, 4000], [4000, 0]])
    return e.compare(Inputs(q=q, k=k, v=e.unit(2)), atol=1e-3)


def scale_scores(e: Examiner) -> Difference | None:
    """Two tokens that prefer themselves, as much as the scale says."""
    score = 1.5 / root(e.width)
    q, k = e.score([[score, 0], [0, score]])
    inputs = Inputs(q=q, k=k, v=e.unit(2))
    found = e.compare(inputs, atol=2e-3)
    if found is None:
        return None
    d, near = e.width, ""
    yours = e.ask(inputs).out
    for words, factor in (("1", 1.0), ("1 / D", 1 / d), ("sqrt(D)", d**0.5)):
        other = e.expect(replace(inputs, scale=factor)).out
        if compare(yours, other, atol=e.room(1e-3)) is None:
            near = f" It is what a scale of {words} gives (D = {d})."
    return replace(found, says=found.says + near)


def scale_by_keys(e: Examiner) -> Difference | None:
    """Values twice as wide as keys."""
    score = 1.5 / root(e.width)
    q, k = e.score([[score, 0], [0, score]])
    wide = e.draw(2, width=2 * e.width)
    try:
        return e.compare(Inputs(q=q, k=k, v=wide), atol=2e-3)
    except TroubleError:  # that is another case, values_of_any_width
        raise NotAskedError("it takes no values of another width") from None


def answer_queries(e: Examiner) -> Difference | None:
    """Each query looks at the key after it; exchanged, at the one before."""
    q, k = e.score(FAR * np.roll(np.eye(3), 1, axis=1))
    return e.compare(Inputs(q=q, k=k, v=k), atol=1e-3)


def gather_values(e: Examiner) -> Difference | None:
    """Each query looks at its own key, and gets its value."""
    q, k = e.score(FAR * np.eye(3))
    return e.compare(Inputs(q=q, k=k, v=e.draw(3)), atol=1e-3)


def take_other_lengths(e: Examiner) -> Difference | None:
    """Two queries, five keys, and the other way round."""
    for n_q, n_k in ((2, 5), (5, 2)):
        inputs = Inputs(q=e.zeros(n_q), k=e.draw(n_k), v=e.draw(n_k))
        found = e.compare(inputs, atol=1e-3)
        if found is not None:
            return found
    return None


def keep_heads_apart(e: Examiner) -> Difference | None:
    """Heads of constant values: an average within a head keeps them."""
    n = e.heads if e.heads > 1 else 2
    v = np.broadcast_to(np.arange(1.0, n + 1)[:, None, None], (1, n, 3, e.width))
    inputs = Inputs(q=e.zeros(3, heads=n), k=v.copy(), v=v.copy())
    return e.compare(inputs, atol=1e-3)


def keep_batches_apart(e: Examiner) -> Difference | None:
    """Batches of constant values: an average within a batch keeps them."""
    v = np.broadcast_to(
        np.arange(1.0, 3)[:, None, None, None], (2, e.heads, 3, e.width)
    )
    inputs = Inputs(q=e.zeros(3, batch=2), k=v.copy(), v=v.copy())
    return e.compare(inputs, atol=1e-3)


def ignore_order(e: Examiner) -> Difference | None:
    """Keys and values in another order, together: nothing changes without a mask."""
    if e.subject.convention.always_causal:
        raise NotAskedError("it is always causal, so the order counts")
    q, k, v = e.draw(3), e.draw(3), e.draw(3)
    order = [2, 0, 1]
    first = e.ask(Inputs(q=q, k=k, v=v)).out
    second = e.ask(Inputs(q=q, k=k[:, :, order], v=v[:, :, order])).out
    return compare(
        second, first, atol=10 * e.room(), what="out, keys in another order,"
    )


def ways(e: Examiner, n: int) -> Iterator[tuple[str, Inputs]]:
    """Yield questions that hide something: by a mask, and by causal, if there are."""
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


def ask_ways(e: Examiner, n: int, *only: str) -> Iterator[tuple[str, Inputs]]:
    """Yield the same, or do not ask if there is no such argument."""
    found = [(name, inputs) for name, inputs in ways(e, n) if name in only]
    if not found:
        raise NotAskedError(f"it has no {' or '.join(only)} argument")
    yield from found


def hide_without_nan(e: Examiner) -> Difference | None:
    """Rows that may see something must be numbers."""
    for name, inputs in ask_ways(e, 3, "mask", "causal"):
        weights = e.read_weights(inputs)
        rows = slice(0, 2) if name == "causal" else slice(None)
        right = e.expect(inputs).weights
        wrong = np.isnan(weights[..., rows, :])
        says = f"with a {name}, the weight of {{place}} is NaN."
        found = judge_weights(
            weights[..., rows, :], wrong, right[..., rows, :], says, inputs
        )
        if found is not None:
            return found
    return None


def read_polarity(e: Examiner) -> Difference | None:
    """Which of two sets of keys is seen, those of True or those of False."""
    for _, inputs in ask_ways(e, 3, "mask"):
        weights, right = e.read_weights(inputs), e.expect(inputs).weights
        sees, hides = right > 0, right == 0
        split = sees.any(-1) & hides.any(-1)
        on_hidden = np.where(hides, weights, 0).sum(-1) > SMALL
        on_seen = np.where(sees, weights, 0).sum(-1) > SMALL
        wrong = (split & on_hidden & ~on_seen)[..., None] & hides
        says = "keys that may be seen have no weight, {place}, which may not, has."
        found = judge_weights(weights, wrong, right, says, inputs)
        if found is not None:
            return found
    return None


def hide_keys(e: Examiner) -> Difference | None:
    """No weight where the mask forbids."""
    for _, inputs in ask_ways(e, 3, "mask"):
        weights, right = e.read_weights(inputs), e.expect(inputs).weights
        on_seen = np.where(right > 0, weights, 0).sum(-1, keepdims=True) > SMALL
        wrong = (right == 0) & (np.abs(weights) > SMALL) & on_seen
        says = "{place} is masked, and has the weight {weight}."
        found = judge_weights(weights, wrong, right, says, inputs)
        if found is not None:
            return found
    return None


def hide_before_softmax(e: Examiner) -> Difference | None:
    """Rows under a mask still sum to 1."""
    for name, inputs in ask_ways(e, 3, "mask", "causal"):
        weights, right = e.read_weights(inputs), e.expect(inputs).weights
        total = weights.sum(-1, keepdims=True)
        few = (total < 1 - 1e-3) & (total > SMALL)
        says = (
            f"with a {name}, the weights of {{place}} and its row sum to less than 1."
        )
        found = judge_weights(weights, few & (right > 0), right, says, inputs)
        if found is not None:
            return found
    return None


def hide_future(e: Examiner) -> Difference | None:
    """Causal: no weight on keys after the query."""
    for _, inputs in ask_ways(e, 3, "causal"):
        weights, right = e.read_weights(inputs), e.expect(inputs).weights
        wrong = (right == 0) & (np.abs(weights) > SMALL)
        says = "{place} is in the future, and has the weight {weight}."
        return judge_weights(weights, wrong, right, says, inputs)
    return None


def see_itself(e: Examiner) -> Difference | None:
    """Causal: weight on the query itself and on what was before it."""
    for _, inputs in ask_ways(e, 3, "causal"):
        weights, right = e.read_weights(inputs), e.expect(inputs).weights
        wrong = (right > 0) & ~(np.abs(weights) > SMALL)
        says = "{place} may be seen, and has the weight {weight}."
        return judge_weights(weights, wrong, right, says, inputs)
    return None


def show_what_was_used(e: Examiner) -> Difference | None:
    """The weights that are returned, times the values, are out."""
    inputs = Inputs(q=e.draw(3), k=e.draw(3), v=e.draw(3))
    if e.subject.convention.look:
        inputs = replace(inputs, look=True)
    answer = e.ask(inputs)
    if answer.weights is None:
        raise NotAskedError("it returns no weights")
    if answer.weights.shape[1] != inputs.q.shape[1]:
        raise NotAskedError("its weights are averaged over the heads")
    return compare(answer.out, answer.weights @ inputs.v, atol=e.room(1e-4))


BASIC = (
    Case("it_answers",
         "It does not answer at all, or not with an array of the right shape.",
         "Return out with the axes of q and the width of v, as an array of its library;"
         " or declare another layout, library or precisions in the convention.",
         "basic", answer_at_all, ()),
    Case("dropout_is_off",
         "The same call gives another answer: something random is left on.",
         "Apply dropout only in training, F.dropout(w, p, self.training).",
         "basic", answer_the_same, ("it_answers",)),
    Case("inputs_are_left_alone",
         "The call changes the arrays that it was given.",
         "Write q * scale, not q *= scale; np.where or masked_fill, not x[~mask] = ….",
         "basic", leave_inputs_alone),
    Case("softmax_over_keys",
         "The softmax runs over the queries instead of the keys.",
         "Normalise the last axis of the scores (…, Nq, Nk): axis=-1, keepdims=True.",
         "basic", normalise_over_keys, ORDERED),
    Case("rows_sum_to_one",
         "Weights do not sum to 1, as if something were added to the denominator.",
         "Subtract the largest score of each row before exp; divide by the sum alone,"
         " without an epsilon.",
         "basic", sum_to_one, ORDERED),
    Case("softmax_is_stable",
         "Large scores overflow exp, and the row is NaN.",
         "Subtract the largest score of each row before exp.",
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
         "q and k are exchanged: rows are keys, or the weights are transposed.",
         "Compute q @ kᵀ, rows are queries; look for swapped projections of q and k.",
         "basic", answer_queries, APART),
    Case("argument_order",
         "k and v are exchanged, or what is averaged is not v.",
         'Average the third argument, weights @ v; declare order="qvk" if it is meant.',
         "basic", gather_values, APART),
    Case("lengths_may_differ",
         "As many keys as queries are assumed, so cross-attention is wrong.",
         "Take Nk from k.shape and Nq from q.shape.",
         "basic", take_other_lengths, (*ORDERED, "softmax_over_keys")),
    Case("heads_do_not_mix",
         "Heads see each other: they were split by a reshape without a transpose.",
         "Split (B, N, H·D) into (B, N, H, D) first, then swap axes to (B, H, N, D).",
         "basic", keep_heads_apart),
    Case("batches_do_not_mix",
         "Sequences of a batch see each other.",
         "Transpose only the last two axes of k, swapaxes(-1, -2), never k.T.",
         "basic", keep_batches_apart),
    Case("order_of_keys_does_not_matter",
         "Without a mask, out depends on the order of the keys.",
         "Leave positions to the inputs or to a bias; look for a mask that stays on.",
         "basic", ignore_order, (*ORDERED, "keys_answer_queries")),
    Case("mask_makes_no_nan",
         "A mask makes NaN of cells that may be seen, as 0 · -inf does.",
         "Select, np.where(mask, scores, -np.inf); never multiply a mask by -inf.",
         "basic", hide_without_nan, ORDERED),
    Case("true_means_attend",
         "The mask is read the other way round: what may be seen is hidden.",
         'Hide where the mask is False; or declare true_means="hide" if it is meant.',
         "basic", read_polarity, MASKED),
    Case("masked_keys_have_no_weight",
         "Masked keys keep some weight: the mask is ignored, added or multiplied.",
         "Put -inf where the mask forbids, before the softmax.",
         "basic", hide_keys, (*MASKED, "true_means_attend")),
    Case("mask_before_softmax",
         "Weights are masked after the softmax, so rows no longer sum to 1.",
         "Mask the scores before the softmax, or divide by the row sums again.",
         "basic", hide_before_softmax, MASKED),
    Case("future_never_leaks",
         "A causal row sees keys after itself.",
         "Hide keys k > q: np.triu(…, 1) is what is forbidden.",
         "basic", hide_future, MASKED),
    Case("causal_sees_itself",
         "A causal row does not see itself, or not its past.",
         "Allow keys k <= q, the diagonal among them: np.tri(n) is what is allowed.",
         "basic", see_itself, (*MASKED, "future_never_leaks")),
    Case("weights_are_those_used",
         "The weights that are returned are not those that made out.",
         "Return the weights after mask and softmax, before dropout, for every head.",
         "basic", show_what_was_used, ORDERED),
)  # fmt: skip
