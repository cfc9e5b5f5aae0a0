import numpy as np


def weigh(x):
    e = np.exp(x - np.max(x, axis=1, keepdims=True))
    return e / np.sum(e, axis=1, keepdims=True)


def bare(q, k, v):
    """The scores are not scaled"""
    return weigh(np.dot(q, k.T)).dot(v)


def width_of_the_values(q, k, v):
    """scales by the width of the values"""
    d_v = v.shape[1]
    return weigh(q @ k.T / d_v**0.5) @ v


def unstable(q, k, v):
    """exp of a large score is infinite, or all of a row are 0, and the output is NaN"""
    e = np.exp(q @ k.T / q.shape[1] ** 0.5)
    return (e / e.sum(1, keepdims=True)) @ v


def columns(q, k, v):
    """it must run over the keys, axis=-1"""
    return weigh(k @ q.T / q.shape[1] ** 0.5).T @ v


def no_softmax(q, k, v):
    """The scores are used as weights"""
    return (q @ k.T / q.shape[1] ** 0.5) @ v


def keys_as_values(q, k, v):
    """That averages the keys"""
    return weigh(q @ k.T / q.shape[1] ** 0.5) @ k


def stops_at_the_weights(q, k, v):
    """Those are the weights"""
    scores = q @ k.T / q.shape[1] ** 0.5
    return weigh(scores)


def takes_the_best(q, k, v):
    """only the value of the best key"""
    scores = q @ k.T
    return np.array([v[row.argmax()] for row in scores])


def returns_both(q, k, v):
    """Both the output and the weights are returned"""
    w = weigh(q @ k.T / q.shape[1] ** 0.5)
    return w @ v, w


def wrong_product(q, k, v):
    """attend raised ValueError in line"""
    w = weigh(q @ k.T / q.shape[1] ** 0.5)
    return np.stack([w[:, :1] * 0.5, w[:, :1], np.ones((9, 1))])


def same_width_assumed(q, k, v):
    """The output has the width of q"""
    return np.zeros(q.shape) + (weigh(q @ k.T / q.shape[1] ** 0.5) @ v)[:, :1]
