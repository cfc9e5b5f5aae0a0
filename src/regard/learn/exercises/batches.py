"""Batches: many sequences at once

A batch is a stack of sequences of the same length, with one more axis in front: q is
(B, N, d). With heads there are two more, (B, H, N, d). Nothing else changes. Each
sequence attends only to itself:

    out[b] = attend(q[b], k[b], v[b])

Code that counts axes from the end works with any number of axes in front: the width is
axis −1, the tokens are axis −2. The operator @ multiplies along the last two axes and
broadcasts over all others. Only `.T` is different: it reverses *all* axes, so that (B,
M, d) becomes (d, M, B). Use k.swapaxes(-1, -2) or np.matrix_transpose(k) instead.

For example q, k of shape (2, 3, 5, 4) and v of shape (2, 3, 5, 7) give (2, 3, 5, 7).

Write `attend_batch(q, k, v)` for q (…, N, d), k (…, M, d) and v (…, M, e), with any
number of axes in front, including none.

Next: heads_split.py
"""

import numpy as np

NAME = "attend_batch"
MINUTES = 8
NEEDS = ("attend",)
EXTRA = ""
STUB = '''import numpy as np


def attend_batch(q, k, v):
    """Return out (..., N, e) of q (..., N, d), k (..., M, d), v (..., M, e)."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Start from your attend and check each axis in it: which is counted from the "
    "front?",
    "k.T reverses all axes. Swap only the last two: k.swapaxes(-1, -2).",
    "scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), then softmax over axis=-1 "
    "with keepdims=True, then weights @ v.",
)


def spec(q, k, v):
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    for at in np.ndindex(q.shape[:-2]):
        for i in range(q.shape[-2]):
            keys, values = k[at], v[at]
            scores = [q[at][i] @ key / q.shape[-1] ** 0.5 for key in keys]
            parts = [np.exp(score - max(scores)) for score in scores]
            for part, value in zip(parts, values, strict=True):
                out[at][i] += part / sum(parts) * value
    return out


def softmax(scores, axis=-1):
    parts = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return parts / parts.sum(axis=axis, keepdims=True)


def reference(q, k, v):
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    parts = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return parts / parts.sum(axis=-1, keepdims=True) @ v


def draw(rng):
    sizes = (
        ((), 2, 3, 2, 1),
        ((2,), 1, 2, 3, 2),
        ((2,), 2, 3, 4, 3),
        ((3,), 3, 2, 2, 4),
        ((2, 3), 4, 5, 3, 2),
        ((1, 2, 2), 2, 3, 4, 1),
    )
    for lead, n, m, d, e in sizes:
        shapes = ((*lead, n, d), (*lead, m, d), (*lead, m, e))
        yield tuple(2 * rng.normal(size=shape).round(1) for shape in shapes)
    more = (
        ((18,), 2, 2, 2, 2),
        ((2, 18), 1, 2, 2, 1),
        ((18, 2), 1, 2, 2, 1),
        ((2,), 18, 2, 2, 2),
        ((2,), 2, 18, 2, 2),
        ((2,), 2, 1, 2, 2),
        ((2,), 2, 2, 18, 2),
        ((2,), 2, 2, 1, 18),
    )
    for lead, n, m, d, e in more:
        shapes = ((*lead, n, d), (*lead, m, d), (*lead, m, e))
        q, k, v = (rng.normal(size=shape) for shape in shapes)
        yield q / 100, k * 200, v * 1e5
        yield q * 200 + 100, k * 10 + 10, v / 100
        yield q * 200, k / 100, v


def mistake_all_axes_turned(q, k, v):
    """k.T reverses all axes, including the batch: swap only the last two, with
    k.swapaxes(-1, -2)."""
    return softmax(q @ k.T / np.sqrt(q.shape[-1])) @ v


def mistake_from_the_front(q, k, v):
    """An axis is counted from the front, which works only for one number of axes: count
    from the end, with axis=-1 and swapaxes(-1, -2)."""
    return softmax(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]), axis=2) @ v


def mistake_one_long_sequence(q, k, v):
    """The sequences of a batch see each other, as if they were one long sequence: keep
    the axes in front, and @ treats each sequence separately."""
    keys, values = (x.reshape(-1, x.shape[-1]) for x in (k, v))
    return softmax(q @ keys.T / np.sqrt(q.shape[-1])) @ values


def mistake_scale_by_length(q, k, v):
    """That scales by the root of q.shape[1], which is the length if there is a
    batch: the width is q.shape[-1]."""
    return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[1])) @ v


def mistake_over_queries(q, k, v):
    """Your softmax runs over the queries, axis=-2: it must run over the keys,
    axis=-1."""
    return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), axis=-2) @ v


def mistake_over_the_batch(q, k, v):
    """Your softmax runs over the first axis, which mixes the sequences of a batch:
    it must run over the keys, axis=-1."""
    return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), axis=0) @ v


def mistake_first_sequence(q, k, v):
    """Only the first sequence of the batch is computed: keep the axes in front, and @
    treats each sequence separately."""
    while q.ndim > 2:
        q, k, v = q[0], k[0], v[0]
    return reference(q, k, v)


def mistake_shared_weights(q, k, v):
    """All sequences of the batch share the same weights, from the mean of their scores:
    each has its own."""
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    while scores.ndim > 2:
        scores = scores.mean(axis=0)
    return softmax(scores) @ v


def mistake_three_axes(q, k, v):
    """k.transpose(0, 2, 1) works for three axes only: swap the last two of any number
    of axes with k.swapaxes(-1, -2)."""
    return softmax(q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])) @ v


def mistake_no_scale(q, k, v):
    """The scores are not scaled: divide them by the root of q.shape[-1]."""
    return softmax(q @ k.swapaxes(-1, -2)) @ v


def mistake_scaled_twice(q, k, v):
    """The scores are divided by d, or twice by its root: divide them once by the root
    of q.shape[-1]."""
    return softmax(q @ k.swapaxes(-1, -2) / q.shape[-1]) @ v
