import numpy as np


def straight_to_the_shape(x, heads):
    """The shape is right, but each head holds whole tokens instead of a part of each"""
    n, width = x.shape
    return np.reshape(x, (heads, n, width // heads))


def strided(x, heads):
    """Each head takes every H-th number"""
    return np.stack([x[:, h::heads] for h in range(heads)])


def forgets_to_swap(x, heads):
    """The tokens are still in front"""
    return np.array([np.split(token, heads) for token in x])


def transposes_each(x, heads):
    """The tokens are the last axis"""
    return np.stack([part.T for part in np.split(x, heads, axis=1)])


def splits_the_tokens(x, heads):
    """The width is not split"""
    return x[None]


def heads_backwards(x, heads):
    """The heads are in reverse order"""
    return np.stack(np.split(x, heads, axis=1)[::-1])
