import numpy as np


def turns(p, d):
    return p[:, None] / np.power(10_000, 2 * np.arange(d // 2) / d)


def concatenated(n, d):
    """All sines come first"""
    t = turns(np.arange(n), d)
    return np.hstack([np.sin(t), np.cos(t)])


def counts_like_people(n, d):
    """The positions count from 1"""
    t = turns(np.arange(1, n + 1), d)
    return np.dstack([np.sin(t), np.cos(t)]).reshape(n, d)


def cos_then_sin(n, d):
    """Sine and cosine are swapped"""
    t = turns(np.arange(n), d)
    return np.dstack([np.cos(t), np.sin(t)]).reshape(n, d)


def forgets_the_two(n, d):
    """The frequencies decrease too slowly"""
    out = np.empty((n, d))
    for p in range(n):
        for i in range(d // 2):
            out[p, 2 * i] = np.sin(p / 10_000 ** (i / d))
            out[p, 2 * i + 1] = np.cos(p / 10_000 ** (i / d))
    return out


def column_by_column(n, d):
    """the exponent belongs to the pair"""
    out = np.empty((n, d))
    for i in range(d):
        wave = np.cos if i % 2 else np.sin
        out[:, i] = wave(np.arange(n) / 10_000 ** (i / d))
    return out


def grows(n, d):
    """The frequencies increase instead of decreasing"""
    t = np.outer(np.arange(n), 10_000 ** (2 * np.arange(d // 2) / d))
    return np.dstack([np.sin(t), np.cos(t)]).reshape(n, d)


def only_sines(n, d):
    """There are sines in all columns"""
    t = turns(np.arange(n), d)
    return np.dstack([np.sin(t), np.sin(t)]).reshape(n, d)
