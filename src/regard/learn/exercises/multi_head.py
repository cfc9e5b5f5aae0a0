"""Multi-head attention, with the output projection

One head gives every token one set of weights. Several heads give several: each has
separate queries, keys and values of width `d`, computed from the same tokens by learned
matrices. The outputs of all heads are concatenated, and one more matrix mixes them.

    q, k, v = x wqᵀ, x wkᵀ, x wvᵀ        each (N, H*d), split into (H, N, d)
    head_h  = attention(q_h, k_h, v_h)   scores divided by the square root of d
    out     = [head_0 | … | head_H-1] woᵀ

Matrices are stored `(out, in)`, as in PyTorch, hence the transpose. `H*d` may differ
from the width `D` of `x`: `wo` is `(D, H*d)` and maps the result back to `D`.

With `H*d = 64` and 8 heads, each head is 8 wide, so its scores are divided by 2.83 and
not by 8.

Write `multi_head(x, wq, wk, wv, wo, heads)`: the output, `(N, D)`.
`attention(q, k, v).out` of the library computes all heads `(H, N, d)` at once. You
wrote splitting before; joining is its inverse.

Next: fused_qkv.py
"""

import numpy as np

from regard.definition.attention import attention

NAME = "multi_head"
MINUTES = 15
NEEDS = ("heads_split",)
EXTRA = ""
STUB = '''import numpy as np

from regard import attention


def multi_head(x, wq, wk, wv, wo, heads):
    """Return multi-head attention of x (N, D), as (N, D)."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Four steps: project, split into (H, N, d), attention of all heads, join and mix.",
    "(x @ wq.T).reshape(N, heads, -1).swapaxes(0, 1) is q; likewise for k and v.",
    "Join with attention(q, k, v).out.swapaxes(0, 1).reshape(N, -1), then @ wo.T.",
)


def look(q, k, v, scale=None):  # plain attention
    scores = q @ k.swapaxes(-1, -2) * (scale or q.shape[-1] ** -0.5)
    parts = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return parts / parts.sum(axis=-1, keepdims=True) @ v


def spec(x, wq, wk, wv, wo, heads):
    d = len(wq) // heads
    joined = np.zeros((len(x), heads * d))
    for h in range(heads):
        mine = slice(h * d, h * d + d)
        q, k, v = (x @ w[mine].T for w in (wq, wk, wv))
        joined[:, mine] = look(q, k, v)
    return joined @ wo.T


def reference(x, wq, wk, wv, wo, heads):
    N = len(x)
    q, k, v = ((x @ w.T).reshape(N, heads, -1).swapaxes(0, 1) for w in (wq, wk, wv))
    joined = attention(q, k, v).out.swapaxes(0, 1).reshape(N, -1)
    return joined @ wo.T


def draw(rng):
    shapes = [(1, 4, 2, 2), (2, 4, 2, 2), (3, 4, 1, 4), (3, 4, 2, 3), (5, 6, 3, 4)]
    more = rng.integers(2, 6, size=4).tolist()
    long = [(18, 2, 2, 2), (2, 18, 2, 2), (2, 2, 18, 2), (2, 2, 2, 18), (2, 2, 2, 18)]
    for N, D, heads, d in (*shapes, more, *long):
        yield *make_weights(rng, N, D, heads * d), heads
    for N, D, heads, d in ((3, 5, 3, 3), (2, 1, 1, 1)):
        for sizes in SIZES:
            weights = make_weights(rng, N, D, heads * d)
            yield *(x * size for x, size in zip(weights, sizes, strict=True)), heads


SIZES = ((1, 30, 0.03, 30, 30), (20, 0.01, 1, 1, 1), (1, 0.03, 30, 0.03, 0.03))


def make_weights(rng, N, D, width):
    shapes = ((N, D), (width, D), (width, D), (width, D), (D, width))
    return [rng.normal(size=shape) for shape in shapes]


def split(x, heads):  # (H, N, d), for the mistakes
    return x.reshape(len(x), heads, -1).swapaxes(0, 1)


def join(x):  # (N, H*d)
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def mistake_no_output(x, wq, wk, wv, wo, heads):
    """The heads are concatenated, but not mixed: multiply by wo.T."""
    q, k, v = (split(x @ w.T, heads) for w in (wq, wk, wv))
    return join(look(q, k, v))


def mistake_joined_by_reshape(x, wq, wk, wv, wo, heads):
    """The heads are joined by a reshape alone, which mixes up the tokens. Swap the axes
    back to (N, H, d) first."""
    q, k, v = (split(x @ w.T, heads) for w in (wq, wk, wv))
    return look(q, k, v).reshape(len(x), -1) @ wo.T


def mistake_scaled_by_whole_width(x, wq, wk, wv, wo, heads):
    """The scores are divided by the square root of H*d; a head is only d wide."""
    q, k, v = (split(x @ w.T, heads) for w in (wq, wk, wv))
    return join(look(q, k, v, scale=len(wq) ** -0.5)) @ wo.T


def mistake_one_big_head(x, wq, wk, wv, wo, heads):
    """This is one wide head: split q, k and v into heads before attention."""
    q, k, v = (x @ w.T for w in (wq, wk, wv))
    return look(q, k, v) @ wo.T


def mistake_no_transposes(x, wq, wk, wv, wo, heads):
    """The matrices are not transposed: they are stored (out, in), so multiply by wq.T,
    wk.T, wv.T and wo.T."""
    q, k, v = (split(x @ w, heads) for w in (wq, wk, wv))
    return join(look(q, k, v)) @ wo


def mistake_output_not_transposed(x, wq, wk, wv, wo, heads):
    """The last matrix is not transposed: it is stored (out, in), so multiply by
    wo.T."""
    q, k, v = (split(x @ w.T, heads) for w in (wq, wk, wv))
    return join(look(q, k, v)) @ wo


def mistake_scaled_twice(x, wq, wk, wv, wo, heads):
    """The scores are divided twice by the root of d: attention scales them already, so
    do not scale q or the scores yourself."""
    q, k, v = (split(x @ w.T, heads) for w in (wq, wk, wv))
    return join(look(q, k, v, scale=1 / q.shape[-1])) @ wo.T


def mistake_no_scale(x, wq, wk, wv, wo, heads):
    """The scores are not scaled: divide them by the root of d, the width of a head."""
    q, k, v = (split(x @ w.T, heads) for w in (wq, wk, wv))
    return join(look(q, k, v, scale=1)) @ wo.T


def mistake_heads_attend(x, wq, wk, wv, wo, heads):
    """The heads of a token attend to each other: swap the axes to (H, N, d) before
    attention, so that tokens attend to tokens."""
    q, k, v = (split(x @ w.T, heads).swapaxes(0, 1) for w in (wq, wk, wv))
    return look(q, k, v).reshape(len(x), -1) @ wo.T


def mistake_split_by_reshape(x, wq, wk, wv, wo, heads):
    """The heads are split by a reshape to (H, N, d), which mixes up the tokens: reshape
    to (N, H, d), then swap two axes."""
    q, k, v = ((x @ w.T).reshape(heads, len(x), -1) for w in (wq, wk, wv))
    return join(look(q, k, v)) @ wo.T


def mistake_keys_averaged(x, wq, wk, wv, wo, heads):
    """The keys are averaged: the values come from wv."""
    q, k = (split(x @ w.T, heads) for w in (wq, wk))
    return join(look(q, k, k)) @ wo.T


def mistake_queries_and_keys_swapped(x, wq, wk, wv, wo, heads):
    """Queries and keys are swapped: wq makes the queries, and wk the keys."""
    return reference(x, wk, wq, wv, wo, heads)


def mistake_heads_added(x, wq, wk, wv, wo, heads):
    """The heads are added up, so that (N, d) is left: concatenate them to (N, H*d)
    before wo."""
    q, k, v = (split(x @ w.T, heads) for w in (wq, wk, wv))
    return look(q, k, v).sum(axis=0) @ wo.T
