"""Feed-forward, with the exact GELU

Attention moves information between tokens. What a token then does with it happens in
the feed-forward part, for each token by itself: widen, bend, narrow.

    hidden = x upᵀ + up_bias                  (N, F), often F = 4 D
    bent   = GELU(hidden)
    out    = bent downᵀ + down_bias           (N, D)

Without the bend in the middle the two matrices would be one. GELU multiplies a number
with the chance that a normal variable is below it:

    GELU(z) = z Φ(z) = z (1 + erf(z / √2)) / 2

GELU(1) = 0.8413, GELU(-1) = -0.1587, GELU(0) = 0. GPT-2 used a formula with tanh that
is close to it; PyTorch has the exact one unless told otherwise, and so have we here.
They differ by up to 0.0005: enough to see when you load somebody's weights.

Write `feed_forward(x, up, up_bias, down, down_bias)`. `up` is `(F, D)` and `down` is
`(D, F)`. NumPy has no erf; the stub makes one from Python's.

Next: block.py
"""

import math

import numpy as np

NAME = "feed_forward"
MINUTES = 10
NEEDS = ("rms_norm",)
EXTRA = ""
STUB = '''import math

import numpy as np

erf = np.vectorize(math.erf)  # of every number of an array


def feed_forward(x, up, up_bias, down, down_bias):
    """Widen x (N, D) to (N, F), bend it with GELU, narrow it to (N, D)."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Three lines: hidden, bent, out. Matrices are (out, in), so transpose them.",
    "hidden = x @ up.T + up_bias, and bent = hidden * (1 + erf(...)) / 2.",
    "Inside erf stands hidden / np.sqrt(2); the end is bent @ down.T + down_bias.",
)
ATOL = 1e-9
erf = np.vectorize(math.erf)


def spec(x, up, up_bias, down, down_bias):
    (N, D), F = x.shape, len(up)
    out = np.zeros((N, D))
    for n in range(N):
        bent = np.zeros(F)
        for f in range(F):
            z = sum(up[f, i] * x[n, i] for i in range(D)) + up_bias[f]
            bent[f] = z * (1 + math.erf(z / math.sqrt(2))) / 2
        for i in range(D):
            out[n, i] = sum(down[i, f] * bent[f] for f in range(F)) + down_bias[i]
    return out


def reference(x, up, up_bias, down, down_bias):
    hidden = x @ up.T + up_bias
    bent = hidden * (1 + erf(hidden / np.sqrt(2))) / 2
    return bent @ down.T + down_bias


def draw(rng):
    up, down = np.array([[1.0], [-1.0]]), np.array([[1.0, 2.0]])
    yield np.array([[1.5]]), up, np.array([0.1, 0.2]), down, np.array([0.5])
    shapes = [(1, 2, 2), (2, 2, 4), (3, 2, 5), (4, 3, 3)]
    long = [(18, 2, 2), (2, 18, 2), (2, 2, 18), (2, 2, 18)]
    for N, D, F in (*shapes, rng.integers(2, 7, size=3), *long):
        x, up, down = (rng.normal(size=s) for s in ((N, D), (F, D), (D, F)))
        yield x, up, rng.normal(size=F), down, rng.normal(size=D)
    for N, D, F in ((2, 1, 1), (2, 3, 3)):
        for sizes in ((20, 0.01, 0.003, 30, 30), (0.05, 30, 50, 100, 0.003)):
            shapes = ((N, D), (F, D), (F,), (D, F), (D,))
            yield tuple(
                size * rng.normal(size=shape)
                for size, shape in zip(sizes, shapes, strict=True)
            )


def mistake_tanh(x, up, up_bias, down, down_bias):
    """This is GPT-2's approximation of GELU with tanh: use the exact one, with erf."""
    z = x @ up.T + up_bias
    bent = z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2
    return bent @ down.T + down_bias


def mistake_no_root_two(x, up, up_bias, down, down_bias):
    """erf is taken of z itself: take it of z / √2, which makes it the normal curve."""
    z = x @ up.T + up_bias
    return z * (1 + erf(z)) / 2 @ down.T + down_bias


def mistake_relu(x, up, up_bias, down, down_bias):
    """This is ReLU, which cuts at 0: GELU is z (1 + erf(z / √2)) / 2."""
    return np.maximum(x @ up.T + up_bias, 0) @ down.T + down_bias


def mistake_no_bend(x, up, up_bias, down, down_bias):
    """There is no bend between the two matrices: apply GELU to the hidden numbers."""
    return (x @ up.T + up_bias) @ down.T + down_bias


def mistake_chance_only(x, up, up_bias, down, down_bias):
    """This gives Φ(z), the chance alone: GELU multiplies it with z."""
    return (1 + erf((x @ up.T + up_bias) / math.sqrt(2))) / 2 @ down.T + down_bias


def mistake_bias_after_bend(x, up, up_bias, down, down_bias):
    """up_bias is added after GELU: add it before, it belongs to the hidden numbers."""
    z = x @ up.T
    return (z * (1 + erf(z / math.sqrt(2))) / 2 + up_bias) @ down.T + down_bias
