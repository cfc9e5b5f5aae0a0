"""One matrix for q, k and v of all heads

Three matrices mean three products. Many models store one tall matrix instead: its rows
give first the queries of all heads, then the keys of all heads, then the values. One
product computes everything.

    y = x wᵀ                       w is (3*H*d, D), y is (N, 3*H*d)
    columns     0 … H*d-1          queries of head 0, of head 1, …
    columns   H*d … 2*H*d-1        keys
    columns 2*H*d … 3*H*d-1        values

With 2 heads of width 1 a token's row of `y` is `[q0, q1, k0, k1, v0, v1]`, so
`q = [[q0], [q1]]` once the token axis is moved to the middle.

Some models store the rows head by head instead: `[q0, k0, v0, q1, k1, v1]`. The shapes
are the same, so compare values when you load a file.

Write `split_qkv(x, w, heads)`: the tuple `q, k, v`, each `(H, N, d)`.

Next: cross_attention.py
"""

import numpy as np

NAME = "split_qkv"
MINUTES = 10
NEEDS = ("heads_split", "multi_head")
EXTRA = ""
STUB = '''import numpy as np


def split_qkv(x, w, heads):
    """Return q, k and v of x (N, D), each (H, N, d); w is (3*H*d, D)."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Multiply once, split the columns into three equal parts, then each into heads.",
    "np.split(x @ w.T, 3, axis=1) gives the three parts in the order q, k, v.",
    "(x @ w.T).reshape(N, 3, heads, d) has all axes; move N after the heads.",
)


def spec(x, w, heads):
    d = len(w) // 3 // heads
    q, k, v = np.zeros((3, heads, len(x), d))
    for part, out in enumerate((q, k, v)):
        for h in range(heads):
            for i in range(d):
                row = part * heads * d + h * d + i
                for n in range(len(x)):
                    out[h, n, i] = x[n] @ w[row]
    return q, k, v


def reference(x, w, heads):
    y = (x @ w.T).reshape(len(x), 3, heads, -1)  # (N, 3, H, d)
    return tuple(y.transpose(1, 2, 0, 3))


def draw(rng):
    shapes = [(1, 2, 1, 1), (1, 2, 2, 2), (2, 3, 2, 2), (3, 4, 1, 3), (4, 3, 3, 2)]
    more = rng.integers(2, 6, size=4).tolist()
    long = [(18, 2, 2, 2), (2, 18, 2, 2), (2, 2, 18, 2), (2, 2, 2, 18), (2, 2, 2, 18)]
    for N, D, heads, d in (*shapes, more, *long):
        yield rng.normal(size=(N, D)), rng.normal(size=(3 * heads * d, D)), heads
    for D, x_size, w_size in ((1, 1e5, 30), (3, 1e5, 1e-3), (3, 1e-3, 30)):
        yield x_size * rng.normal(size=(2, D)), w_size * rng.normal(size=(18, D)), 3


def mistake_head_by_head(x, w, heads):
    """The rows of w are read head by head, as q, k, v of head 0, then of head 1. Here
    all queries come first, then all keys: split into three, then into heads."""
    y = (x @ w.T).reshape(len(x), heads, 3, -1)
    return tuple(y.transpose(2, 1, 0, 3))


def mistake_values_second(x, w, heads):
    """Keys and values are swapped: the rows of w give q, then k, then v."""
    q, k, v = reference(x, w, heads)
    return q, v, k


def mistake_width_interleaved(x, w, heads):
    """A head takes every H-th column, but its d columns are contiguous."""
    y = (x @ w.T).reshape(len(x), 3, -1, heads)
    return tuple(y.transpose(1, 3, 0, 2))


def mistake_one_reshape(x, w, heads):
    """One reshape to (3, H, N, d) mixes up the tokens, though the shape is right.
    Reshape to (N, 3, H, d) and then move the axis of tokens."""
    return tuple((x @ w.T).reshape(3, heads, len(x), -1))


def mistake_one_array(x, w, heads):
    """One array of shape (3, H, N, d) is returned: return q, k and v as a tuple."""
    return np.stack(reference(x, w, heads))


def mistake_not_split(x, w, heads):
    """q, k and v are not split into heads: they are (N, H*d), expected (H, N, d)."""
    return tuple(np.split(x @ w.T, 3, axis=1))


def mistake_tokens_first(x, w, heads):
    """The tokens are still in front: q, k and v are (N, H, d), expected (H, N, d)."""
    return tuple(y.swapaxes(0, 1) for y in reference(x, w, heads))


def mistake_keys_first(x, w, heads):
    """The rows of w are read as k, q, v: they give q, then k, then v."""
    q, k, v = reference(x, w, heads)
    return k, q, v
