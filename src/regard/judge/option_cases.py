"""Cases about options: shared heads, bias, softcap, window, 16 bits, projections.

Next: kernel_cases.py
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from regard.judge.case import FAR, GATES, SMALL, Case, Examiner, find_wrong_weight
from regard.judge.difference import Difference, compare_arrays
from regard.judge.inputs import Inputs, NotAskedError, compute_expected
from regard.judge.mask_cases import CAUSAL, HIDES, RIGHT, ask_nothing


def stay_with_low_scores(e: Examiner) -> Difference | None:
    """Use scores that are all far below 0: only their differences matter."""
    q, k = e.score([[-4000.0, -4080.0], [-4080.0, -4000.0]])
    return e.compare(Inputs(q=q, k=k, v=e.unit(2)), atol=1e-3)


def scale_before_product(e: Examiner) -> Difference | None:
    """Make q kᵀ overflow float16 (65,504) before it is scaled, but not after."""
    half, n = e.half(), e.width
    level = (2.2 * 65504 / n) ** 0.5
    x = np.full((1, e.heads, 2, n), level)
    if level**2 * n**0.5 > 65504:
        raise NotAskedError("its heads are too narrow for this")
    return e.compare(Inputs(q=x, k=x, v=e.draw(2)), precision=half)


def match_in_half(e: Examiner) -> Difference | None:
    """Check that 16-bit errors are only those of rounding the inputs and out."""
    half = e.half()
    inputs = Inputs(q=e.draw(8), k=e.draw(8), v=e.draw(8))
    return e.compare(inputs, precision=half)


def keep_dtype(e: Examiner) -> Difference | None:
    """Check that out has the dtype of q."""
    for precision in e.subject.offered:
        inputs = Inputs(q=e.draw(2), k=e.draw(2), v=e.draw(2))
        found = e.ask(inputs, precision).dtypes["out"]
        if found != precision:
            return Difference(f"q is {precision}, out is {found}.", arguments=inputs)
    return None


def share_in_groups(e: Examiner) -> Difference | None:
    """Use four heads on two key heads: each needs the right keys and values."""
    q, k = e.zeros(3, heads=4), e.zeros(3, heads=2)
    # Key head 0 selects the first key, key head 1 the last.
    q[..., 0], k[:, 0, 0, 0], k[:, 1, 2, 0] = FAR, 1, 1
    v = np.asarray([1.0, 2.0])[None, :, None, None] * e.draw(3, heads=1)
    return e.compare(Inputs(q=q, k=k, v=v), atol=1e-3)


def share_one(e: Examiner) -> Difference | None:
    """Use four heads on one key head, with random keys."""
    inputs = Inputs(q=e.draw(3, heads=4), k=e.draw(3, heads=1), v=e.draw(3, heads=1))
    return e.compare(inputs)


def count_window(e: Examiner) -> Difference | None:
    """Use five tokens and a window of one earlier token; then only the last query."""
    inputs = Inputs(q=e.zeros(5), k=e.zeros(5), v=e.unit(5), window=1, causal=True)
    words = e.subject.convention
    if not e.is_causal:
        raise NotAskedError("it has no causal argument")
    found = e.compare(inputs, atol=1e-3)
    late = words.q_start or words.causal_from == "end"
    if found or not (late and words.other_lengths and words.order != "x"):
        return found
    return e.compare(replace(inputs, q=e.zeros(1), q_start=4), atol=1e-3)


def apply_window_alone(e: Examiner) -> Difference | None:
    """Check that a window applies without causal."""
    if e.subject.convention.always_causal:
        raise NotAskedError("it is always causal")
    inputs = Inputs(q=e.zeros(5), k=e.zeros(5), v=e.unit(5), window=1)
    weights = e.read_weights(inputs)
    right = np.asarray(compute_expected(inputs).weights)
    before = np.arange(5) < np.arange(5)[:, None] - 1
    wrong = before & (np.abs(weights) > SMALL)
    says = "{place} is before the window, but has the weight {weight}."
    return find_wrong_weight(weights, wrong, right, says, inputs)


def cap_scores(e: Examiner) -> Difference | None:
    """Use a softcap alone."""
    q, k = e.score(np.asarray([[4.0, 2.0], [-2.0, -4.0]]) * e.width**0.5)
    return e.compare(Inputs(q=q, k=k, v=e.unit(2), softcap=4.0))


def cap_before_mask(e: Examiner) -> Difference | None:
    """Use a softcap and a mask: -inf must not become -cap."""
    inputs = Inputs(q=e.zeros(3), k=e.zeros(3), v=e.unit(3), softcap=1.0)
    try:
        return e.compare(
            replace(inputs, mask=np.tri(3, dtype=bool)[None, None]), atol=1e-3
        )
    except NotAskedError:
        return e.compare(replace(inputs, causal=True), atol=1e-3)


def cap_before_bias(e: Examiner) -> Difference | None:
    """Use a bias larger than the softcap: the bias is not capped."""
    bias = np.asarray([[0.0, 3.0], [-3.0, 0.0]])[None, None]
    inputs = Inputs(q=e.zeros(2), k=e.zeros(2), v=e.unit(2), softcap=1.0, bias=bias)
    return e.compare(inputs, atol=1e-3)


def add_bias(e: Examiner) -> Difference | None:
    """Use scores of 0 and a bias per head: the weights are softmax(bias)."""
    n = e.several
    own = n if "h" in e.subject.convention.axes_of_mask else 1
    bias = np.arange(1.0, own + 1)[:, None, None] * [[0.0, 1.0], [-2.0, 0.5]]
    q, k, v = e.zeros(2, heads=n), e.zeros(2, heads=n), e.unit(2, heads=n)
    return e.compare(Inputs(q=q, k=k, v=v, bias=bias[None]), atol=1e-3)


def use_scale(e: Examiner) -> Difference | None:
    """Check that a given scale replaces 1 / sqrt(D)."""
    q, k = e.score([[2.0, 0.0], [0.0, 2.0]])
    return e.compare(Inputs(q=q, k=k, v=e.unit(2), scale=0.7), atol=1e-3)


def take_sink(e: Examiner) -> Difference | None:
    """Use a sink, which takes weight from every row of its head and adds no value."""
    n = e.several
    q, k, v = e.zeros(3, heads=n), e.zeros(3, heads=n), e.unit(3, heads=n)
    inputs = Inputs(q=q, k=k, v=v, sink=np.linspace(0.5, 1.5, n))
    return e.compare(inputs, atol=1e-3)


def look_twice(e: Examiner) -> Difference | None:
    """Compare out with and without weights: plain, masked, causal, fully masked."""
    plain = Inputs(q=e.draw(4), k=e.draw(4), v=e.draw(4), look=False)
    mask = np.tri(4, dtype=bool)[None, None]
    asked, empty = 0, replace(ask_nothing(e), look=False)
    hidden = (replace(plain, mask=mask), replace(plain, causal=True), empty)
    for each in (plain, *hidden):
        try:
            without, seen = e.ask(each).out, e.ask(replace(each, look=True)).out
        except NotAskedError:
            continue
        asked += 1
        found = compare_arrays(
            seen, without, atol=e.room(1e-4), what="out with weights"
        )
        if found is not None:
            return replace(found, arguments=each)
    if not asked:
        raise NotAskedError("it has no flag that requests the weights")
    return None


def show_weights(e: Examiner) -> Difference | None:
    """Compare the returned weights, with causal or a mask if supported."""
    inputs = Inputs(q=e.draw(4), k=e.draw(4), v=e.draw(4))
    words = e.subject.convention
    if words.look:
        inputs = replace(inputs, look=True)
    masked = words.mask is not None and "q" in words.axes_of_mask
    return e.compare(replace(inputs, causal=e.is_causal or masked), what="weights")


def take_other_widths(e: Examiner) -> Difference | None:
    """Use values narrower and wider than keys."""
    for width in (1, e.width // 2, 2 * e.width):
        inputs = Inputs(q=e.draw(3), k=e.draw(3), v=e.draw(3, width=width))
        found = e.compare(inputs)
        if found is not None:
            return found
    return None


def take_one_token(e: Examiner) -> Difference | None:
    """Use one query and one key."""
    return e.compare(Inputs(q=e.draw(1), k=e.draw(1), v=e.draw(1)))


def keep_axes(e: Examiner) -> Difference | None:
    """Use different sizes for batch, heads, tokens and width."""
    n = e.heads if e.heads > 1 else 3
    axes = e.subject.convention.layout
    batch, heads = 2 if "b" in axes else 1, n if "h" in axes or e.heads > 1 else 1
    if batch == heads == 1:
        raise NotAskedError("it has one sequence and one head")
    q, k, v = (e.draw(4, batch=batch, heads=heads) for _ in range(3))
    return e.compare(Inputs(q=q, k=k, v=v))


def project_out(e: Examiner) -> Difference | None:
    """Use an output matrix that reverses the columns."""
    where = e.subject.convention.projections
    if where is None or where.out is None:
        raise NotAskedError("it has no output projection")
    return e.compare(Inputs(q=e.zeros(2), k=e.zeros(2), v=e.draw(2), written="turned"))


def project_with_biases(e: Examiner) -> Difference | None:
    """Use projection biases that are not 0."""
    if e.subject.convention.projections is None:
        raise NotAskedError("it projects nothing")
    return e.compare(Inputs(q=e.draw(2), k=e.draw(2), v=e.draw(2), written="biased"))


OPTIONS = (
    Case("low_scores_are_as_good",
         "Scores far below 0 give 0 or NaN: the running maximum started at 0.",
         "Start the running maximum at -inf, and subtract it from every score.",
         "complete", stay_with_low_scores, (*GATES, "softmax_is_stable")),
    Case("one_token",
         "With one query and one key, an axis is lost.",
         "Do not squeeze; index axes from the end.",
         "complete", take_one_token, RIGHT),
    Case("axes_are_not_confused",
         "The batch, head and token axes are swapped somewhere.",
         "Name the axes, and transpose before every reshape that joins two of them.",
         "complete", keep_axes, (*RIGHT, "heads_do_not_mix", "batches_do_not_mix")),
    Case("values_of_any_width",
         "Values of another width than the keys fail.",
         "Take the width of out from v, and the width in the scale from k.",
         "complete", take_other_widths,
         (*RIGHT, "one_token", "scale_ignores_the_values")),
    Case("half_scores_do_not_overflow",
         "In 16 bits q kᵀ overflows before it is scaled.",
         "Scale q first, or compute the scores in float32.",
         "complete", scale_before_product, RIGHT),
    Case("half_is_close",
         "In 16 bits the error is larger than rounding explains.",
         "Compute scores, softmax and the average in float32; round only out.",
         "complete", match_in_half, (*RIGHT, "half_scores_do_not_overflow")),
    Case("dtype_is_kept",
         "Out has another dtype than q.",
         "Return out in the dtype of q.",
         "complete", keep_dtype),
    Case("gqa_group_is_contiguous",
         "Heads share keys as h % Hk instead of in groups, h // (H / Hk).",
         "Repeat each key head, repeat_interleave or np.repeat; do not tile.",
         "complete", share_in_groups, RIGHT),
    Case("gqa_one_key_head",
         "One key head for all query heads fails.",
         "Let k and v broadcast over the heads of q.",
         "complete", share_one, (*RIGHT, "gqa_group_is_contiguous")),
    Case("window_counts",
         "The window is one token too wide or too narrow.",
         'Declare whether it includes the query: window_counts="others" or "all".',
         "complete", count_window, (*CAUSAL, "decode_one_token_sees_all")),
    Case("window_alone_applies",
         "A window without causal or a mask is ignored.",
         "Apply the window in every code path.",
         "complete", apply_window_alone, (*CAUSAL, "window_counts")),
    Case("softcap_is_tanh",
         "The softcap is not cap · tanh(scores / cap) of the scaled scores.",
         "Scale first, then cap.",
         "complete", cap_scores, RIGHT),
    Case("softcap_before_mask",
         "The cap is applied after the mask and turns -inf into -cap.",
         "Cap the scores, then mask.",
         "complete", cap_before_mask, (*RIGHT, *HIDES, "softcap_is_tanh")),
    Case("softcap_before_bias",
         "The bias is capped with the scores.",
         "Cap the scores, then add the bias.",
         "complete", cap_before_bias,
         (*RIGHT, "softcap_is_tanh", "bias_is_not_scaled")),
    Case("bias_is_not_scaled",
         "The bias is scaled with the scores, or not added exactly once.",
         "Scale the scores, then add the bias.",
         "complete", add_bias, (*GATES, "softmax_over_keys", "rows_sum_to_one")),
    Case("scale_is_used",
         "A given scale is ignored, or multiplied by the default.",
         "Use scale instead of 1 / sqrt(D).",
         "complete", use_scale, (*GATES, "softmax_over_keys")),
    Case("sink_takes_weight",
         "The sink is not added to the denominator.",
         "Divide by exp(sink) + sum exp(scores).",
         "complete", take_sink, (*GATES, "rows_sum_to_one")),
    Case("looking_changes_nothing",
         "Requesting the weights changes out, or drops the mask.",
         "Compute out the same way, whether or not the weights are returned.",
         "complete", look_twice),
    Case("weights_are_shown_as_defined",
         "The returned weights are not the softmax of the masked scores.",
         "Return the result of the softmax, before dropout.",
         "complete", show_weights,
         (*RIGHT, *HIDES, *CAUSAL, "weights_are_those_used")),
    Case("output_projection_applies",
         "The output matrix is not applied to the concatenated heads.",
         "Concatenate the heads, then multiply by Wo.",
         "complete", project_out, (*GATES, "heads_do_not_mix")),
    Case("projection_biases_apply",
         "Biases of the projections are dropped, or added in the wrong place.",
         "Add them to q, k and v before the heads are split.",
         "complete", project_with_biases, RIGHT),
)  # fmt: skip
