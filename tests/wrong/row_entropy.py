import numpy as np

from regard import attention, causal


def whole_matrix(q, k):
    """let attention work in tiles"""
    p = attention(q, k, k, causal(), see=("weights",)).weights
    return -np.sum(p * np.log(np.where(p > 0, p, 1)), axis=-1)


def unscaled(q, k):
    """The scale is missing"""
    seen = attention(q, k, k, causal(), block=64)
    return seen.lse - (q * seen.out).sum(-1)


def plus(q, k):
    """The sign is wrong"""
    seen = attention(q, k, k, causal())
    return seen.lse + (q * seen.out).sum(-1) / q.shape[-1] ** 0.5


def sum_of_p_log_p(q, k):
    """an entropy is never below 0"""
    seen = attention(q, k, k, causal(), block=64)
    return (q * seen.out).sum(-1) / q.shape[-1] ** 0.5 - seen.lse


def in_bits(q, k):
    """This is the entropy in bits"""
    p = attention(q, k, k, causal(), see=("weights",)).weights
    return -np.sum(p * np.log2(np.where(p > 0, p, 1)), axis=-1)


def sees_the_future(q, k):
    """pass causal() as the mask"""
    seen = attention(q, k, k, block=64)
    return seen.lse - (q * seen.out).sum(-1) / q.shape[-1] ** 0.5


def query_as_value(q, k):
    """The values are the queries"""
    seen = attention(q, k, q, causal())
    return seen.lse - (q * seen.out).sum(-1) / q.shape[-1] ** 0.5


def whole_product(q, k):
    """has shape"""
    seen = attention(q, k, k, causal())
    return seen.lse - q @ seen.out.T / q.shape[-1] ** 0.5


def log_of_zero(q, k):
    """A weight of 0 makes 0 · log 0"""
    p = attention(q, k, k, causal(), see=("weights",)).weights
    return -np.sum(p * np.log(p), axis=-1)
