import numpy as np


def by_heads_first(x, w, heads):
    """read head by head"""
    blocks = np.split(x @ w.T, heads, axis=1)
    threes = [np.split(block, 3, axis=1) for block in blocks]
    return tuple(np.stack(part) for part in zip(*threes, strict=True))


def q_v_k(x, w, heads):
    """Keys and values are swapped"""
    q, v, k = np.split(x @ w.T, 3, axis=1)
    return tuple(np.stack(np.split(part, heads, axis=1)) for part in (q, k, v))


def strided(x, w, heads):
    """A head takes every H-th column"""
    three = np.split(x @ w.T, 3, axis=1)
    return tuple(np.stack([part[:, h::heads] for h in range(heads)]) for part in three)


def one_view(x, w, heads):
    """mixes up the tokens"""
    d = w.shape[0] // (3 * heads)
    y = np.dot(x, w.T)
    return tuple(np.reshape(y, (3, heads, x.shape[0], d)))


def one_array(x, w, heads):
    """One array of shape (3, H, N, d) is returned"""
    y = (x @ w.T).reshape(len(x), 3, heads, -1)
    return y.transpose(1, 2, 0, 3)


def unsplit(x, w, heads):
    """q, k and v are not split into heads"""
    return tuple(np.split(x @ w.T, 3, axis=1))
