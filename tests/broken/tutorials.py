"""Mistakes of first attentions: softmax, scale, order, axes."""

import numpy as np

from broken.registry import breaks, causal_mask, hide, right, scores, softmax

CHANCE = np.random.default_rng()


@breaks("it_answers", layout="nd")
def returns_the_weights(q, k, v):
    return softmax(scores(q, k))


@breaks("it_answers")
def returns_a_list(q, k, v):
    return right(q, k, v).tolist()


@breaks("it_answers")
def raises(q, k, v):
    return q @ k @ v


@breaks("it_answers")
def exits(q, k, v):
    raise SystemExit("bye")


@breaks("it_answers")
def is_nan(q, k, v):
    return right(q, k, v) * np.nan


@breaks("dropout_is_off")
def drops_out_always(q, k, v):
    weights = softmax(scores(q, k))
    return weights * (CHANCE.random(weights.shape) < 0.9) / 0.9 @ v


@breaks("inputs_are_left_alone")
def scales_q_in_place(q, k, v):
    q *= q.shape[-1] ** -0.5
    return softmax(q @ k.swapaxes(-1, -2)) @ v


@breaks("inputs_are_left_alone", layout="nd", mask="mask")
def turns_the_mask_around_in_place(q, k, v, mask=None):
    if mask is None:
        return right(q, k, v)
    np.logical_not(mask, out=mask)
    return right(q, k, v, ~mask)


@breaks("softmax_over_keys", layout="nd")
def normalises_columns(q, k, v):
    return softmax(scores(q, k).T).T @ v


@breaks("rows_sum_to_one", layout="nd")
def adds_an_epsilon(q, k, v):
    """The softmax of one of the source documents (S2)."""
    x = scores(q, k)
    parts = np.exp(x - x.max(-1, keepdims=True))
    return parts / (parts.sum(-1, keepdims=True) + 1e-10) @ v


@breaks("softmax_is_stable", layout="nd")
def overflows(q, k, v):
    parts = np.exp(scores(q, k))
    return parts / parts.sum(-1, keepdims=True) @ v


@breaks("scale_is_one_over_root_width", layout="nd")
def forgets_the_scale(q, k, v):
    return softmax(q @ k.T) @ v


@breaks("scale_is_one_over_root_width", layout="nd")
def scales_by_the_width(q, k, v):
    return softmax(q @ k.T / q.shape[-1]) @ v


@breaks("scale_is_one_over_root_width", layout="nd")
def multiplies_by_the_root(q, k, v):
    return softmax(q @ k.T * q.shape[-1] ** 0.5) @ v


@breaks("scale_is_one_over_root_width", layout="nd")
def scales_by_the_length(q, k, v):
    return softmax(q @ k.T / len(k) ** 0.5) @ v


@breaks("scale_is_one_over_root_width", layout="nd")
def scales_twice(q, k, v):
    return softmax(scores(q, k) * q.shape[-1] ** -0.5) @ v


@breaks("scale_ignores_the_values", layout="nd")
def scales_by_the_values(q, k, v):
    return softmax(q @ k.T * v.shape[-1] ** -0.5) @ v


@breaks("keys_answer_queries", layout="nd")
def swaps_q_and_k(q, k, v):
    return softmax(scores(k, q)) @ v if len(q) == len(k) else right(q, k, v)


@breaks("argument_order", layout="nd")
def takes_value_before_key(q, v, k):
    return softmax(scores(q, k)) @ v


@breaks("argument_order", layout="nd")
def averages_the_keys(q, k, v):
    return softmax(scores(q, k)) @ k if k.shape == v.shape else right(q, k, v)


@breaks("lengths_may_differ", layout="nd")
def assumes_one_length(q, k, v):
    n = len(q)
    return softmax((q @ k.T * q.shape[-1] ** -0.5).reshape(n, n)) @ v


@breaks("lengths_may_differ", layout="nd")
def cuts_keys_to_queries(q, k, v):
    n = len(q)
    return softmax(scores(q, k[:n])) @ v[:n]


@breaks("heads_do_not_mix", layout="bn(hd)", heads="heads")
def reshapes_without_transposing(q, k, v, heads=1):
    b, n, _ = q.shape
    q, k, v = (x.reshape(b, heads, x.shape[1], -1) for x in (q, k, v))
    return (softmax(scores(q, k)) @ v).reshape(b, n, -1)


@breaks("heads_do_not_mix")
def joins_heads_wrongly(q, k, v):
    out = softmax(scores(q, k)) @ v
    return out.swapaxes(1, 2).reshape(out.shape)


@breaks("batches_do_not_mix", layout="bnd")
def joins_the_batch(q, k, v):
    rows, keys, values = (x.reshape(-1, x.shape[-1]) for x in (q, k, v))
    return (softmax(scores(rows, keys)) @ values).reshape(*q.shape[:2], -1)


@breaks("order_of_keys_does_not_matter", layout="nd")
def prefers_later_keys(q, k, v):
    ramp = 1e-4 * np.arange(len(k))
    return softmax(scores(q, k) + ramp) @ v


@breaks("weights_are_those_used", layout="nd")
def returns_scores_as_weights(q, k, v):
    return right(q, k, v), scores(q, k)


@breaks("weights_are_those_used", layout="nd", mask="mask")
def returns_dropped_weights(q, k, v, mask=None):
    weights = softmax(hide(scores(q, k), True if mask is None else mask))
    return weights @ v, weights / 0.9


@breaks("one_token", layout="nd")
def squeezes(q, k, v):
    return np.squeeze(right(q, k, v))


@breaks("axes_are_not_confused")
def mixes_batch_and_heads(q, k, v):
    out = right(q, k, v)
    b, h, n, d = out.shape
    return out if b == 1 or h == 1 else out.reshape(h, b, n, d).swapaxes(0, 1)


@breaks("values_of_any_width", layout="nd")
def cuts_values_to_keys(q, k, v):
    out = right(q, k, v)
    return out if v.shape[-1] >= 8 else np.pad(out, ((0, 0), (0, 8 - v.shape[-1])))


@breaks("low_scores_are_as_good", layout="nd")
def seeks_the_largest_from_zero(q, k, v):
    x = scores(q, k)
    parts = np.exp(x - np.maximum(x.max(-1, keepdims=True), 0))
    return parts / parts.sum(-1, keepdims=True) @ v


@breaks("causal_sees_itself", layout="nd", causal="causal")
def hides_the_diagonal(q, k, v, causal=False):
    strictly = causal_mask(len(q), len(k), -1)[0, 0]
    return softmax(hide(scores(q, k), strictly if causal else True)) @ v
