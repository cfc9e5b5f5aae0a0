import numpy as np


def weigh(x):
    e = np.exp(x - np.max(x, axis=1, keepdims=True))
    return e / np.sum(e, axis=1, keepdims=True)


def other_library(scores, mask):
    """The mask is inverted"""
    e = np.where(mask, 0, np.exp(scores - scores.max(1, keepdims=True)))
    total = e.sum(1, keepdims=True)
    return np.divide(e, total, out=np.zeros_like(e), where=total > 0)


def adds_truth(scores, mask):
    """hides nothing"""
    return weigh(scores + mask.astype(float))


def multiplies_truth(scores, mask):
    """a score of 0 still has the weight exp(0)"""
    return weigh(scores * mask.astype(float))


def nan_rows(scores, mask):
    """An empty row is NaN, from −∞ − (−∞) or 0 / 0"""
    masked = scores.copy()
    masked[~mask] = -np.inf
    return weigh(masked)


def big_negative(scores, mask):
    """An empty row gets equal weights, because a large negative number is not −∞"""
    return weigh(np.where(mask, scores, np.finfo(np.float64).min))


def masks_the_weights(scores, mask):
    """the rows no longer sum to 1"""
    return np.where(mask, weigh(scores), 0)


def small_number_in_the_sum(scores, mask):
    """The rows sum to less than 1, because a number is added to the sum"""
    top = np.where(mask, scores, -np.inf).max(1, keepdims=True)
    e = np.where(mask, np.exp(scores - np.where(np.isinf(top), 0, top)), 0)
    return e / (e.sum(1, keepdims=True) + 1e-3)


def no_mask_at_all(scores, mask):
    """The mask is not used"""
    return weigh(scores)
