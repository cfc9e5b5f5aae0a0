"""Split the width of every token into heads

A token of width 6 can hold two heads of width 3, or three of width 2; GPT-3, 12,288
wide with 96 heads, has heads of width 128. The heads are stored next to each other:
head `h` of width `d` is at the indices `h*d` to `h*d + d - 1`. Splitting moves the
heads to the front, so that each head is a separate sequence:

    out[h, n, i] = x[n, h*d + i]          (N, H*d)  ->  (H, N, d)

Two tokens of width 4, two heads:

    x = [[1, 2, 3, 4],        head 0 = [[1, 2],      head 1 = [[3, 4],
         [5, 6, 7, 8]]                  [5, 6]]                [7, 8]]

A reshape keeps the order of the numbers in memory. So it can split a token's vector
into heads, but it cannot bring the tokens of one head together: that takes a swap of
axes. A direct reshape to `(H, N, d)` gives the right shape and the wrong numbers,
without an error.

Write `split_heads(x, heads)`: the heads of `x`, as `(heads, N, d)`.

Next: multi_head.py
"""

import numpy as np

NAME = "split_heads"
MINUTES = 10
NEEDS = ("scores",)
EXTRA = ""
STUB = '''import numpy as np


def split_heads(x, heads):
    """Return the heads of x (N, H*d) as an array (H, N, d)."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Two steps: first split the last axis, then move the axis of heads to the front.",
    "x.reshape(N, heads, d) splits the last axis of every token and mixes no tokens.",
    "After x.reshape(N, heads, -1), swap the first two axes: swapaxes(0, 1).",
)


def spec(x, heads):
    N, width = x.shape
    d = width // heads
    out = np.zeros((heads, N, d))
    for h in range(heads):
        for n in range(N):
            for i in range(d):
                out[h, n, i] = x[n, h * d + i]
    return out


def reference(x, heads):
    return x.reshape(len(x), heads, -1).swapaxes(0, 1)


def draw(rng):
    for N, heads, d in ((1, 2, 1), (3, 1, 2), (3, 2, 1), (2, 2, 2), (5, 3, 2)):
        yield rng.normal(size=(N, heads * d)), heads
    N, heads, d = rng.integers(2, 7, size=3)
    yield rng.normal(size=(N, heads * d)), int(heads)
    for N, heads, d in ((18, 2, 2), (2, 18, 2), (2, 2, 18), (3, 3, 3), (2, 1, 1)):
        yield rng.normal(size=(N, heads * d)) * 1e-3, heads
        yield rng.normal(size=(N, heads * d)) * 1e5, heads


def mistake_one_reshape(x, heads):
    """The shape is right, but each head holds whole tokens instead of a part of each.
    Do not reshape to (H, N, d): reshape to (N, H, d), then swap two axes."""
    return x.reshape(heads, len(x), -1)


def mistake_heads_interleaved(x, heads):
    """Each head takes every H-th number of a token, but a head is contiguous: head h is
    at h*d to h*d + d - 1. Reshape to (N, H, d), not to (N, d, H)."""
    return x.reshape(len(x), -1, heads).transpose(2, 0, 1)


def mistake_tokens_first(x, heads):
    """The tokens are still in front: this is (N, H, d), expected (H, N, d). Swap the
    first two axes."""
    return x.reshape(len(x), heads, -1)


def mistake_tokens_last(x, heads):
    """The tokens are the last axis: this is (H, d, N), expected (H, N, d). Swap the
    first two axes of (N, H, d), and leave the last in place."""
    return x.reshape(len(x), heads, -1).transpose(1, 2, 0)


def mistake_backwards(x, heads):
    """The heads are in reverse order: head 0 has the first d numbers of a token."""
    return reference(x, heads)[::-1]


def mistake_not_split(x, heads):
    """The width is not split: this is (1, N, H*d), expected (H, N, d)."""
    return x[None]


def mistake_width_before_heads(x, heads):
    """The last two axes are swapped, which gives (N, d, H): swap the first two axes of
    (N, H, d)."""
    return x.reshape(len(x), heads, -1).swapaxes(1, 2)


def mistake_transposed_first(x, heads):
    """x.T is reshaped to (H, N, d), which mixes tokens and numbers: reshape x itself to
    (N, H, d), then swap two axes."""
    return x.T.reshape(heads, len(x), -1)
