import numpy as np


def look(q, k, v, d=None):
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(d or q.shape[-1])
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def tiled(q, k, v):
    """use np.repeat and not np.tile"""
    times = len(q) // len(k)
    return look(q, np.tile(k, (times, 1, 1)), np.tile(v, (times, 1, 1)))


def one_for_all(q, k, v):
    """All query heads use the first key head"""
    return look(q, k[0], v[0])


def half_tiled(q, k, v):
    """The keys are shared by groups, but the values are assigned as h % Hk"""
    times = len(q) // len(k)
    return look(q, np.repeat(k, times, 0), np.concatenate([v] * times))


def scaled_by_values(q, k, v):
    """The scores are divided by the square root of dv, the width of the values"""
    times = len(q) // len(k)
    k, v = np.repeat(k, times, 0), np.repeat(v, times, 0)
    return look(q, k, v, d=v.shape[2])


def not_shared(q, k, v):
    """grouped_attention raised ValueError in line"""
    return np.stack([look(*qkv) for qkv in zip(q, k, v, strict=True)])


def divided_by_key_heads(q, k, v):
    """Head h uses key head h // Hk, which runs out of range"""
    return np.stack([look(q[h], k[h // len(k)], v[h // len(k)]) for h in range(len(q))])


def averaged_keys(q, k, v):
    """All query heads use the mean of the key heads"""
    return look(q, k.mean(0), v.mean(0))
