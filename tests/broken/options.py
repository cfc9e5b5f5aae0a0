"""Mistakes with shared heads, biases, caps, windows, 16 bits, and looking."""

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

ALL = ("float64", "float32", "float16")


@breaks("gqa_group_is_contiguous", shared_heads=True)
def shares_heads_in_turn(q, k, v):
    n = q.shape[1] // k.shape[1]
    return right(q, np.tile(k, (1, n, 1, 1)), np.tile(v, (1, n, 1, 1)))


@breaks("gqa_group_is_contiguous", shared_heads=True)
def shares_keys_in_turn_and_values_in_groups(q, k, v):
    n = q.shape[1] // k.shape[1]
    return right(q, np.tile(k, (1, n, 1, 1)), np.repeat(v, n, axis=1))


@breaks("gqa_group_is_contiguous", shared_heads=True)
def shares_values_in_turn_and_keys_in_groups(q, k, v):
    n = q.shape[1] // k.shape[1]
    return right(q, np.repeat(k, n, axis=1), np.tile(v, (1, n, 1, 1)))


@breaks("gqa_one_key_head", shared_heads=True)
def uses_one_query_head(q, k, v):
    if k.shape[1] == 1:
        q = np.broadcast_to(q[:, :1], q.shape)
    return right(q, k, v)


@breaks("half_scores_do_not_overflow", precisions=ALL)
def multiplies_in_half(q, k, v):
    x = (q @ k.swapaxes(-1, -2)) * q.shape[-1] ** -0.5
    return (softmax(x.astype(np.float64)) @ v).astype(q.dtype)


@breaks("half_is_close", precisions=ALL)
def rounds_the_scores_too_far(q, k, v):
    x = scores(*(x.astype(np.float64) for x in (q, k)))
    if q.dtype == np.float16:
        x = np.round(x * 4) / 4
    return (softmax(x) @ v).astype(q.dtype)


@breaks("dtype_is_kept", precisions=ALL)
def returns_doubles(q, k, v):
    return right(q, k, v).astype(np.float64)


@breaks("window_counts", causal="causal", window="window")
def counts_itself_in_the_window(q, k, v, causal=False, window=None):
    at = np.arange(q.shape[-2])
    near = True if window is None else (at[:, None] - at < window)[None, None]
    return right(q, k, v, four(allow(q, k, None, causal)) & near)


@breaks("window_counts", causal="causal", window="window", window_counts="all")
def counts_only_others(q, k, v, causal=False, window=None):
    at = np.arange(q.shape[-2])
    near = True if window is None else (at[:, None] - at <= window)[None, None]
    return right(q, k, v, four(allow(q, k, None, causal)) & near)


@breaks("window_counts", causal="causal", window="window", causal_from="end")
def counts_the_window_from_the_first_query(q, k, v, causal=False, window=None):
    n_q, n_k = q.shape[-2], k.shape[-2]
    apart = np.arange(n_q)[:, None] - np.arange(n_k)
    near = apart <= (n_q if window is None else window)
    late = causal_mask(n_q, n_k, n_k - n_q) if causal else True
    return right(q, k, v, four(near & late))


@breaks("window_alone_applies", causal="causal", window="window")
def ignores_a_window_alone(q, k, v, causal=False, window=None):
    at = np.arange(q.shape[-2])
    near = (
        True
        if window is None or not causal
        else (at[:, None] - at <= window)[None, None]
    )
    return right(q, k, v, four(allow(q, k, None, causal)) & near)


def cap(x, softcap):
    return x if softcap is None else softcap * np.tanh(x / softcap)


@breaks("softcap_is_tanh", softcap="softcap")
def clips(q, k, v, softcap=None):
    x = scores(q, k)
    return softmax(x if softcap is None else np.clip(x, -softcap, softcap)) @ v


@breaks("softcap_before_mask", softcap="softcap", mask="mask")
def caps_after_the_mask(q, k, v, softcap=None, mask=None):
    x = hide(scores(q, k), True if mask is None else mask)
    return softmax(cap(x, softcap)) @ v


@breaks("softcap_before_bias", softcap="softcap", bias="bias")
def caps_the_bias(q, k, v, softcap=None, bias=0):
    return softmax(cap(scores(q, k) + bias, softcap)) @ v


@breaks("bias_is_not_scaled", bias="bias")
def scales_the_bias(q, k, v, bias=0):
    return softmax((q @ k.swapaxes(-1, -2) + bias) * q.shape[-1] ** -0.5) @ v


@breaks("bias_is_not_scaled", bias="bias")
def adds_the_bias_of_one_head(q, k, v, bias=None):
    return softmax(scores(q, k) + (0 if bias is None else bias[:, :1])) @ v


@breaks("scale_is_used", scale="scale")
def ignores_the_scale(q, k, v, scale=None):
    return right(q, k, v)


@breaks("scale_is_used", scale="scale")
def uses_both_scales(q, k, v, scale=None):
    return softmax(scores(q, k) * (1 if scale is None else scale)) @ v


@breaks("sink_takes_weight", sink="sink")
def gives_the_sink_a_value(q, k, v, sink=None):
    if sink is None:
        return right(q, k, v)
    x = scores(q, k)
    beside = np.broadcast_to(sink[:, None, None], (*x.shape[:-1], 1))
    whole = softmax(np.concatenate([x, beside], -1))
    return whole[..., :-1] / whole[..., :-1].sum(-1, keepdims=True) @ v


@breaks("sink_takes_weight", sink="sink")
def adds_the_sink_along_queries(q, k, v, sink=None):
    parts = np.exp(scores(q, k) - (top := scores(q, k).max(-1, keepdims=True)))
    beside = 0 if sink is None else np.exp(np.resize(sink, q.shape[-2]) - top[..., 0])
    return parts / (parts.sum(-1) + beside)[..., None] @ v


@breaks("looking_changes_nothing", causal="causal", look="need_weights")
def drops_causal_when_looked_at(q, k, v, causal=False, need_weights=False):
    weights = softmax(
        hide(scores(q, k), allow(q, k, None, causal and not need_weights))
    )
    return (weights @ v, weights) if need_weights else weights @ v


@breaks("weights_are_shown_as_defined", causal="causal")
def shows_weights_before_the_mask(q, k, v, causal=False):
    return right(q, k, v, None, causal), softmax(scores(q, k))


@breaks("weights_are_shown_as_defined", mask="mask")
def shows_weights_before_a_mask(q, k, v, mask=None):
    return right(q, k, v, mask), softmax(scores(q, k))


@breaks("strides_do_not_matter")
def reads_memory_in_order(q, k, v):
    if not q.flags.c_contiguous:
        q, k, v = (as_if_packed(x) for x in (q, k, v))
    return right(q, k, v)


def as_if_packed(x):
    steps = np.cumprod([x.itemsize, *x.shape[:0:-1]])[::-1]
    return np.lib.stride_tricks.as_strided(x, x.shape, steps)


@breaks("any_length")
def loses_the_tail_of_a_block(q, k, v):
    n = k.shape[-2]
    kept = n if n < 32 else n // 32 * 32
    return right(q, k[..., :kept, :], v[..., :kept, :])


@breaks("any_width")
def scales_by_the_tile(q, k, v):
    wide = max(8, 1 << (q.shape[-1] - 1).bit_length())
    return softmax(q @ k.swapaxes(-1, -2) * wide**-0.5) @ v


@breaks("long_masked_matches", mask="mask")
def repeats_the_mask_of_the_first_block(q, k, v, mask=None):
    if mask is not None and k.shape[-2] > 1024:
        first = mask[..., :1024]
        mask = np.concatenate([first, first], -1)[..., : k.shape[-2]]
    return right(q, k, v, mask)


@breaks("garbage_in_masked_keys", mask="mask")
def multiplies_garbage_by_zero(q, k, v, mask=None):
    return softmax(hide(scores(q, k), True if mask is None else mask)) @ v


@breaks("same_bits_twice")
def adds_up_in_any_order(q, k, v):
    order = np.random.default_rng().permutation(k.shape[-2])
    return right(q, k[..., order, :], v[..., order, :])


def run_blocks(q, k, v, mask=None, *, rescale=True, guard=True, size=64):
    """Attention block by block, with two places for a mistake."""
    shape = (*q.shape[:-1], 1)
    top, total = np.full(shape, -np.inf), np.zeros(shape)
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    for i in range(0, k.shape[-2], size):
        x = scores(q, k[..., i : i + size, :])
        x = x if mask is None else hide(x, mask[..., i : i + size])
        new = np.maximum(top, x.max(-1, keepdims=True))
        less = np.where(np.isneginf(new), 0, new) if guard else new
        old = (
            np.exp(np.where(np.isneginf(top), -np.inf, top - less))
            if guard
            else np.exp(top - less)
        )
        old = old if rescale else np.ones_like(old)
        parts = np.exp(x - less)
        total = total * old + parts.sum(-1, keepdims=True)
        out = out * old + parts @ v[..., i : i + size, :]
        top = new
    return (out / np.where(total == 0, 1, total)).astype(q.dtype)


@breaks("largest_score_comes_last")
def forgets_to_rescale(q, k, v):
    return run_blocks(q, k, v, rescale=k.shape[-2] != 300)


@breaks("first_blocks_are_masked", mask="mask")
def starts_with_an_empty_block(q, k, v, mask=None):
    empty = mask is not None and not mask.any(-1).all()
    return run_blocks(q, k, v, mask, guard=empty)


@breaks("half_sums_in_single", precisions=ALL)
def sums_in_half(q, k, v):
    weights = softmax(scores(*(x.astype(np.float64) for x in (q, k))))
    if q.dtype != np.float16 or k.shape[-2] < 100:
        return (weights @ v.astype(np.float64)).astype(q.dtype)
    parts = np.float16(weights / weights.max(-1, keepdims=True))
    total = np.add.accumulate(parts, -1, dtype=np.float16)[..., -1:]
    return (parts.astype(np.float64) @ v / total).astype(q.dtype)


def log_sum(q, k, mask=None):
    x = hide(
        scores(*(x.astype(np.float64) for x in (q, k))), True if mask is None else mask
    )
    top = x.max(-1)
    safe = np.where(np.isneginf(top), 0, top)
    with np.errstate(divide="ignore"):
        return safe + np.log(np.exp(x - safe[..., None]).sum(-1))


@breaks("lse_is_natural_log", returns=("out", "lse"))
def gives_lse_in_base_two(q, k, v):
    return right(q, k, v), log_sum(q, k) / np.log(2)


@breaks("lse_is_single", returns=("out", "lse"), precisions=ALL)
def rounds_lse_to_half(q, k, v):
    return right(q, k, v), log_sum(q, k).astype(q.dtype)


@breaks("empty_row_lse_is_minus_inf", returns=("out", "lse"), mask="mask")
def gives_empty_rows_an_lse_of_zero(q, k, v, mask=None):
    lse = log_sum(q, k, mask)
    return right(q, k, v, mask), np.where(np.isneginf(lse), 0, lse)


@breaks("merge_of_parts_is_whole", returns=("out", "lse"), mask="mask")
def gives_the_lse_of_all_keys(q, k, v, mask=None):
    empty = mask is not None and q.shape[-2] == 2
    return right(q, k, v, mask), log_sum(q, k, mask if empty else None)
