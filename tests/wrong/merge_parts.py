import numpy as np


def halves(out_a, lse_a, out_b, lse_b):
    """Both parts have the same weight"""
    return 0.5 * out_a + 0.5 * out_b, np.logaddexp(lse_a, lse_b)


def by_logarithms(out_a, lse_a, out_b, lse_b):
    """which is a logarithm"""
    with np.errstate(all="ignore"):
        share = (lse_a / (lse_a + lse_b))[:, None]
        return share * out_a + (1 - share) * out_b, np.logaddexp(lse_a, lse_b)


def sums_the_logs(out_a, lse_a, out_b, lse_b):
    """The two lse are added"""
    top = np.maximum(lse_a, lse_b)
    top = np.where(np.isfinite(top), top, 0)
    a, b = np.exp(lse_a - top)[:, None], np.exp(lse_b - top)[:, None]
    return (a * out_a + b * out_b) / np.maximum(a + b, 1e-300), lse_a + lse_b


def naive(out_a, lse_a, out_b, lse_b):
    """exp of a large lse is infinite, or both are 0, and the division gives NaN"""
    with np.errstate(all="ignore"):
        a, b = np.exp(lse_a), np.exp(lse_b)
        out = (a[:, None] * out_a + b[:, None] * out_b) / (a + b)[:, None]
        return out, np.log(a + b)


def two_empty_parts(out_a, lse_a, out_b, lse_b):
    """A query without unmasked keys in either part becomes NaN, because -inf minus"""
    lse = np.logaddexp(lse_a, lse_b)
    with np.errstate(all="ignore"):
        share = np.exp(lse_a - lse)[:, None]
        other = np.exp(lse_b - lse)[:, None]
    top = np.where(lse == -np.inf, np.nan, lse)
    return share * out_a + other * out_b, top


def just_adds(out_a, lse_a, out_b, lse_b):
    """The outputs are added"""
    return out_a + out_b, np.logaddexp(lse_a, lse_b)


def base_two(out_a, lse_a, out_b, lse_b):
    """These are powers of 2"""
    lse = np.logaddexp2(lse_a, lse_b)
    safe = np.where(np.isfinite(lse), lse, 0)
    a, b = np.exp2(lse_a - safe)[:, None], np.exp2(lse_b - safe)[:, None]
    return a * out_a + b * out_b, lse


def larger_wins(out_a, lse_a, out_b, lse_b):
    """Only the part with the larger lse is kept"""
    first = lse_a > lse_b
    return np.where(first[:, None], out_a, out_b), np.maximum(lse_a, lse_b)
