import os

import numpy as np

from regard import attention, causal, merge

HOME = os.getpid()


def allow(q, k, q_start, k_start):
    return k_start + np.arange(len(k)) <= q_start + np.arange(len(q))[:, None]


def only_this_shard(q, k, v, out, lse, q_start, k_start):
    """merge it with the out and lse of the shards before"""
    part = attention(q, k, v, allow(q, k, q_start, k_start))
    return part.out, part.lse


def from_zero(q, k, v, out, lse, q_start, k_start):
    """Positions are counted within the shards"""
    part = attention(q, k, v, np.tri(len(q), len(k)) > 0)
    return merge((out, lse), (part.out, part.lse))


def no_mask(q, k, v, out, lse, q_start, k_start):
    """Queries see keys in their future"""
    part = attention(q, k, v)
    return merge((out, lse), (part.out, part.lse))


def halves(q, k, v, out, lse, q_start, k_start):
    """Both parts have the same weight"""
    part = attention(q, k, v, allow(q, k, q_start, k_start))
    return 0.5 * (out + part.out), np.logaddexp(lse, part.lse)


def running_sum(q, k, v, out, lse, q_start, k_start):
    """each is an average over its own keys"""
    part = attention(q, k, v, allow(q, k, q_start, k_start))
    return out + part.out, np.logaddexp(lse, part.lse)


def no_maximum(q, k, v, out, lse, q_start, k_start):
    """A sum of exponentials overflows"""
    scores = q @ k.T / q.shape[1] ** 0.5
    parts = np.exp(scores) * allow(q, k, q_start, k_start)
    total = np.exp(lse) + parts.sum(1)
    new = (np.exp(lse)[:, None] * out + parts @ v) / total[:, None]
    return new, np.log(total)


def formula_without_a_start(q, k, v, out, lse, q_start, k_start):
    """ring_step raised PositionError in line"""
    part = attention(q, k, v, causal(), q_start=None if len(q) != len(k) else 0)
    return merge((out, lse), (part.out, part.lse))


def stops_elsewhere(q, k, v, out, lse, q_start, k_start):
    """A process of the ring stopped"""
    if os.getpid() != HOME:
        os._exit(0)
    part = attention(q, k, v, allow(q, k, q_start, k_start))
    return merge((out, lse), (part.out, part.lse))


def wrong_elsewhere(q, k, v, out, lse, q_start, k_start):
    """Over two processes it differs from one by"""
    part = attention(q, k, v, allow(q, k, q_start, k_start))
    out, lse = merge((out, lse), (part.out, part.lse))
    return out + (os.getpid() != HOME), lse
