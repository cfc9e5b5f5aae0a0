"""One transformer block, norm first

A block is attention and feed-forward, each with a residual connection: the output of
each part is added to its input. So a token is a running sum, and every block adds to
it.

    x = x + attend(norm(x))
    x = x + feed(norm(x))

This is the pre-norm order, used by GPT-2 and most models since: each part gets a
normalized input, and the sum itself is never normalized. So what the first layer writes
can reach the last one unchanged, which keeps deep models trainable. (The original
transformer normalized the sum, `norm(x + attend(x))`.)

If `attend` and `feed` both return 0, the block returns `x` unchanged.

The second line uses the result of the first: feed-forward reads the output of
attention.

Write `block(x, qkv, out, up, down)`: two lines. The stub has `norm`, `attend` (one
causal head) and `feed`; you wrote all three before.

Next: decoder_logits.py
"""

from inspect import getsource

import numpy as np


def norm(x):
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def attend(x, qkv, out):
    q, k, v = np.split(x @ qkv.T, 3, axis=1)
    scores = np.where(np.tri(len(x)) > 0, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    parts = np.exp(scores - scores.max(axis=1, keepdims=True))
    return parts / parts.sum(axis=1, keepdims=True) @ v @ out.T


def feed(x, up, down):
    return np.maximum(x @ up.T, 0) @ down.T


NAME = "block"
MINUTES = 8
NEEDS = ("multi_head", "layer_norm", "feed_forward")
EXTRA = ""
GIVEN = "\n\n".join(getsource(x) for x in (norm, attend, feed))  # in the stub too
STUB = f'''import numpy as np


{GIVEN}

def block(x, qkv, out, up, down):
    """Return x (N, D) after attention and feed-forward, norm first."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Each part has three steps: normalize the input, run the part, add x.",
    "The first line is x = x + attend(norm(x), qkv, out).",
    "The second is the same with feed(norm(x), up, down), for the new x.",
)


def spec(x, qkv, out, up, down):
    N, D = x.shape
    found = attend(norm(x), qkv, out)
    after = np.zeros((N, D))
    for n in range(N):
        for i in range(D):
            after[n, i] = x[n, i] + found[n, i]
    thought = feed(norm(after), up, down)
    result = np.zeros((N, D))
    for n in range(N):
        for i in range(D):
            result[n, i] = after[n, i] + thought[n, i]
    return result


def reference(x, qkv, out, up, down):
    x = x + attend(norm(x), qkv, out)
    return x + feed(norm(x), up, down)


def draw(rng):
    sizes = ((1, 2, 3), (1, 4, 4), (2, 4, 8), (3, 5, 4), (5, 6, 12))
    for N, D, F in (*sizes, (18, 2, 2), (2, 18, 2), (2, 2, 18), (3, 3, 1)):
        shapes = ((N, D), (3 * D, D), (D, D), (F, D), (D, F))
        x, *weights = (rng.normal(size=shape) for shape in shapes)
        yield x, *weights
        yield 20 * x, *weights


def mistake_norm_last(x, qkv, out, up, down):
    """This is the post-norm order, norm(x + attend(x)): normalize the input of each
    part, not the sum."""
    x = norm(x + attend(x, qkv, out))
    return norm(x + feed(x, up, down))


def mistake_no_norm(x, qkv, out, up, down):
    """There is no norm: attend and feed read norm(x), not x."""
    x = x + attend(x, qkv, out)
    return x + feed(x, up, down)


def mistake_no_residual(x, qkv, out, up, down):
    """The output of a part replaces x: add it to x."""
    return feed(norm(attend(norm(x), qkv, out)), up, down)


def mistake_residual_normed(x, qkv, out, up, down):
    """norm(x) is added instead of x: keep x for the sum, and pass norm(x) only to the
    part."""
    x = norm(x) + attend(norm(x), qkv, out)
    return norm(x) + feed(norm(x), up, down)


def mistake_side_by_side(x, qkv, out, up, down):
    """Attention and feed-forward both read the old x: feed-forward must read x after
    the output of attention has been added."""
    return x + attend(norm(x), qkv, out) + feed(norm(x), up, down)


def mistake_one_norm(x, qkv, out, up, down):
    """Only the input of attention is normalized: feed reads norm(x), too."""
    x = x + attend(norm(x), qkv, out)
    return x + feed(x, up, down)


def mistake_input_added_twice(x, qkv, out, up, down):
    """The input is added twice: after attention, x already contains it."""
    after = x + attend(norm(x), qkv, out)
    return x + after + feed(norm(after), up, down)


def mistake_feed_first(x, qkv, out, up, down):
    """Feed-forward runs before attention: attention comes first."""
    x = x + feed(norm(x), up, down)
    return x + attend(norm(x), qkv, out)


def mistake_attention_lost(x, qkv, out, up, down):
    """The old x is added at the end, and the output of attention is lost: add x after
    attention."""
    after = x + attend(norm(x), qkv, out)
    return x + feed(norm(after), up, down)


def mistake_no_feed(x, qkv, out, up, down):
    """Feed-forward is missing: add feed(norm(x), up, down) after attention."""
    return x + attend(norm(x), qkv, out)
