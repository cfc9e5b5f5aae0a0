import numpy as np


def not_scaled(q, k):
    """divide them by the root of the width"""
    return np.einsum("nd,md->nm", q, k)


def no_root(q, k):
    """divides by d itself"""
    return (q @ k.T) / k.shape[1]


def scales_both(q, k):
    """or twice by its root"""
    d = q.shape[1]
    return (q / d**0.5) @ (k / d**0.5).T


def wrong_direction(q, k):
    """multiplies by the root of d"""
    return q @ k.T * q.shape[1] ** 0.5


def len_of_k(q, k):
    """by the root of the number of keys"""
    return q @ k.T / len(k) ** 0.5


def len_of_q(q, k):
    """len(q) counts rows"""
    return q @ k.T / np.sqrt(len(q))


def square(q, k):
    """That divides by the square of d"""
    return q @ k.T / q.shape[1] ** 2


def integer_root(q, k):
    """The root of d is rounded up to an integer"""
    return q @ k.T / (int(np.sqrt(q.shape[1])) + 1)
