"""Any mask, and fully masked rows

A mask is a boolean table of the same shape as the scores. Here True means *may attend*.
(In some libraries it means the opposite. An inverted mask gives no error, only wrong
numbers.)

    weights[i, j] = exp(scores[i, j]) / Σ over seen keys,   0 where mask[i, j] is False

## Empty rows

A row of the mask may be all False, for example for padding. All its scores are then
−∞, the largest is −∞ too, and −∞ − (−∞) is NaN. One such row spoils all gradients of
the training. Equal weights are wrong, too: a large negative number in place of −∞
gives them, and lets the token read what it must not see. The weights of an empty row
are 0.

For example the scores [[0, 0, 5]] with the mask [[True, True, False]] give [[0.5,
0.5, 0]], and with [[False, False, False]] they give [[0, 0, 0]].

Write `masked_weights(scores, mask)`, both of shape (N, M).

Next: batches.py
"""

import numpy as np

NAME = "masked_weights"
MINUTES = 12
NEEDS = ("causal_mask",)
EXTRA = ""
STUB = '''import numpy as np


def masked_weights(scores, mask):
    """Return the weights (N, M) of scores (N, M) where mask (N, M) is True, else 0."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Start as for the causal mask: np.where(mask, scores, -np.inf), then softmax.",
    "In an empty row the largest score is -inf: replace it by 0 before you subtract "
    "it, and all exp of the row are 0.",
    "Its sum is 0 too, and 0 / 0 is NaN: divide by np.where(total == 0, 1, total).",
)


def spec(scores, mask):
    weights = np.zeros(scores.shape)
    for i in range(len(scores)):
        seen = [j for j in range(scores.shape[1]) if mask[i, j]]
        if seen:
            largest = max(scores[i, j] for j in seen)
            total = sum(np.exp(scores[i, j] - largest) for j in seen)
            for j in seen:
                weights[i, j] = np.exp(scores[i, j] - largest) / total
    return weights


def softmax(scores):
    parts = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return parts / parts.sum(axis=-1, keepdims=True)


def reference(scores, mask):
    logits = np.where(mask, scores, -np.inf)
    largest = logits.max(axis=-1, keepdims=True)
    parts = np.exp(logits - np.where(largest == -np.inf, 0, largest))
    total = parts.sum(axis=-1, keepdims=True)
    return parts / np.where(total == 0, 1, total)


def draw(rng):
    for n, m in ((1, 2), (1, 3), (2, 3), (3, 2), (4, 5)):
        mask = rng.random((n, m)) < 0.6
        mask[:, 0], mask[:, -1] = True, False  # neither empty nor full
        yield rng.normal(size=(n, m)).round(2) + 1.005, mask
    yield np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), np.tri(3, 2, -1) > 0
    yield rng.normal(size=(4, 4)).round(1) - 1000, np.eye(4)[[1, 3, 0, 2]] > 0
    yield rng.normal(size=(3, 4)).round(1), np.zeros((3, 4), bool)
    for n, m, shift, size in (
        (18, 1, 0, 0.01),
        (18, 2, 0, 0.01),
        (2, 18, 0, 1),
        (18, 18, 0, 20),
        (18, 18, -1000, 1),
        (18, 18, -4e9, 1),
    ):
        yield rng.normal(size=(n, m)) * size + shift, rng.random((n, m)) < 0.6


def mistake_inverted(scores, mask):
    """The mask is inverted: True means may attend, so the score is -inf where it is
    False."""
    return reference(scores, ~mask)


def mistake_added(scores, mask):
    """The mask is added to the scores as 0 and 1, which hides nothing: use np.where to
    set scores to -inf where it is False."""
    return softmax(scores + mask)


def mistake_multiplied(scores, mask):
    """The scores are multiplied by the mask, and a score of 0 still has the weight
    exp(0): use np.where to set scores to -inf where the mask is False."""
    return softmax(scores * mask)


def mistake_empty_is_nan(scores, mask):
    """An empty row is NaN, from −∞ − (−∞) or 0 / 0: its weights must be 0, so handle
    its largest score and its sum separately."""
    return softmax(np.where(mask, scores, -np.inf))


def mistake_empty_is_uniform(scores, mask):
    """An empty row gets equal weights, because a large negative number is not −∞: its
    weights must be 0."""
    return softmax(np.where(mask, scores, -1e9))


def mistake_no_division(scores, mask):
    """The weights are masked after the softmax and the rows no longer sum to 1: set
    scores to -inf before it."""
    return softmax(scores) * mask


def mistake_no_mask(scores, mask):
    """The mask is not used: set scores to -inf where it is False."""
    return softmax(scores)


def mistake_epsilon(scores, mask):
    """The rows sum to less than 1, because a number is added to the sum: only an empty
    row needs another divisor, and any will do there."""
    total = np.where(mask, np.exp(scores - hide(scores, mask)), 0).sum(
        -1, keepdims=True
    )
    return reference(scores, mask) * total / (total + 1e-3)


def hide(scores, mask):  # the largest visible score of each row, or 0
    largest = np.where(mask, scores, -np.inf).max(axis=-1, keepdims=True)
    return np.where(largest == -np.inf, 0, largest)


def mistake_overflow(scores, mask):
    """exp of a large score is infinite, or all of a row are 0, and the division
    gives NaN: subtract the largest visible score of each row before exp."""
    parts = np.where(mask, np.exp(scores), 0)
    total = parts.sum(axis=-1, keepdims=True)
    return parts / np.where(mask.any(axis=-1, keepdims=True), total, 1)


def mistake_equal_weights(scores, mask):
    """All visible keys have the same weight: it comes from the softmax of their
    scores."""
    return mask / np.maximum(mask.sum(axis=-1, keepdims=True), 1)
