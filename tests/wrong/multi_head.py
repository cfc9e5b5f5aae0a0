import numpy as np

from regard import attention


def look(q, k, v, scale=None):
    d = q.shape[-1] if scale is None else scale
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(d)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def without_the_last_matrix(x, wq, wk, wv, wo, heads):
    """The heads are concatenated, but not mixed"""
    parts = [np.split(x @ w.T, heads, axis=1) for w in (wq, wk, wv)]
    return np.concatenate([look(*qkv) for qkv in zip(*parts, strict=True)], axis=1)


def flattened(x, wq, wk, wv, wo, heads):
    """joined by a reshape alone"""
    parts = [np.stack(np.split(x @ w.T, heads, axis=1)) for w in (wq, wk, wv)]
    return np.reshape(look(*parts), (x.shape[0], -1)) @ wo.T


def scaled_too_much(x, wq, wk, wv, wo, heads):
    """a head is only d wide"""
    parts = [np.split(x @ w.T, heads, axis=1) for w in (wq, wk, wv)]
    done = [look(*qkv, scale=wq.shape[0]) for qkv in zip(*parts, strict=True)]
    return np.concatenate(done, axis=1) @ wo.T


def never_split(x, wq, wk, wv, wo, heads):
    """This is one wide head"""
    return look(x @ wq.T, x @ wk.T, x @ wv.T) @ wo.T


def heads_added(x, wq, wk, wv, wo, heads):
    """The heads are added up, so that (N, d) is left"""
    parts = [np.split(x @ w.T, heads, axis=1) for w in (wq, wk, wv)]
    return sum(look(*qkv) for qkv in zip(*parts, strict=True)) @ wo.T


def record_instead_of_out(x, wq, wk, wv, wo, heads):
    """multi_head raised CallError in line"""
    parts = [np.stack(np.split(x @ w.T, heads, axis=1)) for w in (wq, wk, wv)]
    return attention(*parts) @ wo.T


def as_they_are_stored(x, wq, wk, wv, wo, heads):
    """The matrices are not transposed"""
    parts = [np.split(x @ w, heads, axis=1) for w in (wq, wk, wv)]
    done = [look(*qkv) for qkv in zip(*parts, strict=True)]
    return np.concatenate(done, axis=1) @ wo


def divides_before_attention(x, wq, wk, wv, wo, heads):
    """divided twice by the root of d"""
    parts = [np.stack(np.split(x @ w.T, heads, axis=1)) for w in (wq, wk, wv)]
    q, k, v = parts
    out = attention(q / np.sqrt(q.shape[2]), k, v).out
    return np.concatenate(list(out), axis=1) @ wo.T


def never_swaps(x, wq, wk, wv, wo, heads):
    """The heads of a token attend to each other"""
    q, k, v = ((x @ w.T).reshape(len(x), heads, -1) for w in (wq, wk, wv))
    return attention(q, k, v).out.reshape(len(x), -1) @ wo.T
