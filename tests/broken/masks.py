"""Mistakes with masks and positions."""

import numpy as np

from broken.registry import (
    allow,
    breaks,
    causal_mask,
    four,
    hide,
    right,
    scores,
    softmax,
)


@breaks("mask_makes_no_nan", layout="nd", causal="causal")
def multiplies_by_infinity(q, k, v, causal=False):
    """The causal mask of one of the source documents (S2)."""
    x = scores(q, k)
    if causal:
        x = x + np.triu(np.ones_like(x), 1) * -np.inf
    return softmax(x) @ v


@breaks("mask_makes_no_nan", mask="mask")
def multiplies_a_mask_by_infinity(q, k, v, mask=None):
    x = scores(q, k)
    return softmax(x if mask is None else x + (1 - mask) * -np.inf) @ v


@breaks("true_means_attend", mask="mask")
def inverts_the_mask(q, k, v, mask=None):
    return right(q, k, v, None if mask is None else ~mask)


@breaks("masked_keys_have_no_weight", mask="mask")
def ignores_the_mask(q, k, v, mask=None):
    return right(q, k, v)


@breaks("masked_keys_have_no_weight", mask="mask")
def adds_the_mask(q, k, v, mask=None):
    return softmax(scores(q, k) + (0 if mask is None else mask)) @ v


@breaks("masked_keys_have_no_weight", mask="mask")
def multiplies_scores_by_the_mask(q, k, v, mask=None):
    return softmax(scores(q, k) * (1 if mask is None else mask)) @ v


@breaks("masked_keys_have_no_weight", mask="mask")
def fills_with_a_tiny_number(q, k, v, mask=None):
    return softmax(np.where(True if mask is None else mask, scores(q, k), 1e-9)) @ v


@breaks("mask_before_softmax", mask="mask", causal="causal")
def masks_after_the_softmax(q, k, v, mask=None, causal=False):
    return softmax(scores(q, k)) * allow(q, k, mask, causal) @ v


@breaks("future_never_leaks", layout="nd", causal="causal")
def turns_the_triangle_around(q, k, v, causal=False):
    x = scores(q, k)
    return softmax(hide(x, np.triu(np.ones(x.shape, bool)) if causal else True)) @ v


@breaks("future_never_leaks", layout="nd", causal="causal")
def sees_one_ahead(q, k, v, causal=False):
    ahead = causal_mask(len(q), len(k), 1)[0, 0]
    return softmax(hide(scores(q, k), ahead if causal else True)) @ v


@breaks("future_never_leaks", layout="nd", causal="causal")
def ignores_causal(q, k, v, causal=False):
    return right(q, k, v)


@breaks("empty_row_is_zero", mask="mask")
def makes_empty_rows_nan(q, k, v, mask=None):
    x = hide(scores(q, k), True if mask is None else mask)
    parts = np.exp(x - x.max(-1, keepdims=True))
    return parts / parts.sum(-1, keepdims=True) @ v


@breaks("empty_row_is_zero", mask="mask")
def makes_empty_rows_uniform(q, k, v, mask=None):
    low = np.finfo(q.dtype).min
    return softmax(np.where(True if mask is None else mask, scores(q, k), low)) @ v


@breaks("softmax_is_stable", mask="mask")
def overflows_beside_a_right_mask(q, k, v, mask=None):
    parts = np.exp(hide(scores(q, k), True if mask is None else mask))
    total = parts.sum(-1, keepdims=True)
    return np.divide(parts, total, out=np.zeros_like(parts), where=total != 0) @ v


@breaks("mask_beats_any_score", mask="mask")
def fills_with_minus_ten_thousand(q, k, v, mask=None):
    mask = True if mask is None else mask
    weights = softmax(np.where(mask, scores(q, k), -1e4))
    return np.where(np.any(mask, -1, keepdims=True), weights, 0) @ v


@breaks("finfo_min_is_not_inf", mask="mask", precisions=("float64", "float16"))
def adds_the_smallest_half(q, k, v, mask=None):
    if q.dtype != np.float16:
        return right(q, k, v, mask)
    low = np.float16(0) if mask is None else np.where(mask, 0, np.float16(-65504))
    x = (scores(*(x.astype(np.float32) for x in (q, k))) + low).astype(np.float16)
    parts = np.exp((x - x.max(-1, keepdims=True)).astype(np.float32))
    return (parts / parts.sum(-1, keepdims=True) @ v).astype(np.float16)


@breaks("mask_per_head", mask="mask")
def uses_the_first_heads_mask(q, k, v, mask=None):
    return right(q, k, v, None if mask is None else mask[:, :1])


@breaks("mask_per_sequence", mask="mask")
def uses_the_first_sequences_mask(q, k, v, mask=None):
    return right(q, k, v, None if mask is None else mask[:1])


@breaks("mask_per_sequence", mask="mask", mask_axes="bk")
def reads_padding_as_rows(q, k, v, mask=None):
    if mask is None or len(mask) != q.shape[-2]:
        return right(q, k, v, None if mask is None else mask[:, None, None])
    return right(q, k, v, mask[None, None])


@breaks("mask_and_causal_compose", mask="mask", causal="causal")
def drops_causal_for_a_mask(q, k, v, mask=None, causal=False):
    return right(q, k, v, mask, causal and mask is None)


@breaks("mask_and_causal_compose", mask="mask", causal="causal")
def drops_a_mask_for_causal(q, k, v, mask=None, causal=False):
    return right(q, k, v, None if causal else mask, causal)


@breaks("documents_do_not_mix", mask="mask")
def hides_only_from_the_first_row(q, k, v, mask=None):
    """Right for triangles and padding; packed documents leak backwards."""
    if mask is not None and q.shape[-2] > 4:
        mask = mask | np.tri(q.shape[-2], dtype=bool) & mask.any(-2, keepdims=True)
    return right(q, k, v, mask)


@breaks("left_padding_changes_nothing", mask="mask")
def gives_padding_some_weight(q, k, v, mask=None):
    if mask is None or not (mask[..., :1, :] == mask).all():
        return right(q, k, v, mask)
    lengths = mask.sum(-1, keepdims=True)  # takes padding to be on the right
    return right(q, k, v, np.broadcast_to(np.arange(k.shape[-2]) < lengths, mask.shape))


@breaks("causal_alignment", causal="causal", causal_from="end")
def stands_at_the_start(q, k, v, causal=False):
    allowed = causal_mask(q.shape[-2], k.shape[-2], k.shape[-2] - 1)
    if q.shape[-2] > 1:  # one query is handled as it should be
        allowed = causal_mask(q.shape[-2], k.shape[-2])
    return right(q, k, v, allowed if causal else None)


@breaks("causal_alignment", causal="causal", causal_from="start")
def stands_at_the_end(q, k, v, causal=False):
    late = k.shape[-2] - q.shape[-2]
    return right(
        q, k, v, causal_mask(q.shape[-2], k.shape[-2], late) if causal else None
    )


@breaks("decode_one_token_sees_all", causal="causal", causal_from="end")
def decodes_with_the_first_key(q, k, v, causal=False):
    late = k.shape[-2] - q.shape[-2] if q.shape[-2] > 1 else 0
    return right(
        q, k, v, causal_mask(q.shape[-2], k.shape[-2], late) if causal else None
    )


@breaks("chunked_prefill_equals_full", causal="causal", q_start="q_start")
def starts_every_chunk_at_an_even_place(q, k, v, causal=False, q_start=0):
    start = q_start if q.shape[-2] == 2 or q_start < 4 else q_start - 1
    start = 3 if q.shape[-2] == 1 and k.shape[-2] == 4 else start
    mask = causal_mask(q.shape[-2], k.shape[-2], start)
    return right(q, k, v, mask if causal else None)


@breaks("float_mask_is_not_added", mask="mask")
def adds_float_masks(q, k, v, mask=None):
    if mask is not None and mask.dtype == bool:
        return right(q, k, v, mask)
    return softmax(scores(q, k) + (0 if mask is None else mask)) @ v


@breaks("int_mask_is_not_added", mask="mask")
def adds_integer_masks(q, k, v, mask=None):
    if mask is not None and mask.dtype.kind != "i":
        return right(q, k, v, mask > 0)
    return softmax(scores(q, k) + (0 if mask is None else mask)) @ v


@breaks("padding_mask_is_not_rows", mask="mask")
def broadcasts_any_mask(q, k, v, mask=None):
    return right(q, k, v, None if mask is None else four(mask) != 0)
