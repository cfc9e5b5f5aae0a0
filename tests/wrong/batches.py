import numpy as np


def weigh(x, axis=-1):
    e = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return e / np.sum(e, axis=axis, keepdims=True)


def transposes_all(q, k, v):
    """T reverses all axes, including the batch"""
    return weigh(q @ k.T / np.sqrt(q.shape[-1])) @ v


def transpose_of_three(q, k, v):
    """works for three axes only"""
    return weigh(q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])) @ v


def flattens(q, k, v):
    """The sequences of a batch see each other"""
    d, e = q.shape[-1], v.shape[-1]
    out = weigh(q.reshape(-1, d) @ k.reshape(-1, d).T / d**0.5) @ v.reshape(-1, e)
    return out.reshape(*q.shape[:-1], e)


def length_as_width(q, k, v):
    """the width is q.shape[-1]"""
    d = q.shape[1]
    return weigh(q @ k.swapaxes(-2, -1) / d**0.5) @ v


def sums_over_queries(q, k, v):
    """Your softmax runs over the queries"""
    return weigh(q @ k.swapaxes(-2, -1) / q.shape[-1] ** 0.5, axis=-2) @ v


def first_axis(q, k, v):
    """Your softmax runs over the first axis"""
    return weigh(q @ k.swapaxes(-2, -1) / q.shape[-1] ** 0.5, axis=0) @ v


def counted_from_the_front(q, k, v):
    """count from the end"""
    return weigh(q @ np.swapaxes(k, 1, 2) / q.shape[-1] ** 0.5, axis=2) @ v


def only_the_first(q, k, v):
    """Only the first sequence of the batch is computed"""
    while q.ndim > 2:
        q, k, v = q[0], k[0], v[0]
    return weigh(q @ k.T / q.shape[-1] ** 0.5) @ v


def same_weights_for_all(q, k, v):
    """All sequences of the batch share the same weights, from the mean"""
    scores = q @ k.swapaxes(-2, -1) / q.shape[-1] ** 0.5
    while scores.ndim > 2:
        scores = scores.mean(0)
    return weigh(scores) @ v
