"""Feed-forward, with the exact GELU

Attention moves information between tokens. The feed-forward layer then processes each
token separately: it expands the vector, applies a nonlinear function, and projects it
back.

    hidden = x upᵀ + up_bias                  (N, F), often F = 4 D
    bent   = GELU(hidden)
    out    = bent downᵀ + down_bias           (N, D)

Without the nonlinearity the two matrices would be equivalent to one. GELU multiplies a
number by the probability that a standard normal variable is below it:

    GELU(z) = z Φ(z) = z (1 + erf(z / √2)) / 2

GELU(1) = 0.8413, GELU(-1) = -0.1587, GELU(0) = 0. GPT-2 uses an approximation with
tanh; the default of PyTorch is the exact formula, which is used here. They differ by up
to 0.0005: enough to notice when you load pretrained weights.

Write `feed_forward(x, up, up_bias, down, down_bias)`. `up` is `(F, D)` and `down` is
`(D, F)`. NumPy has no erf; the stub vectorizes Python's.

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

erf = np.vectorize(math.erf)  # elementwise


def feed_forward(x, up, up_bias, down, down_bias):
    """Expand x (N, D) to (N, F), apply GELU, project back to (N, D)."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Three lines: hidden, bent, out. Matrices are (out, in), so transpose them.",
    "hidden = x @ up.T + up_bias, and bent = hidden * (1 + erf(...)) / 2.",
    "The argument of erf is hidden / np.sqrt(2); the output is bent @ down.T + "
    "down_bias.",
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
    """The argument of erf is z: it must be z / √2, to give the normal distribution."""
    z = x @ up.T + up_bias
    return z * (1 + erf(z)) / 2 @ down.T + down_bias


def mistake_relu(x, up, up_bias, down, down_bias):
    """This is ReLU, max(z, 0): GELU is z (1 + erf(z / √2)) / 2."""
    return np.maximum(x @ up.T + up_bias, 0) @ down.T + down_bias


def mistake_no_bend(x, up, up_bias, down, down_bias):
    """There is no nonlinearity between the two matrices: apply GELU to hidden."""
    return (x @ up.T + up_bias) @ down.T + down_bias


def mistake_chance_only(x, up, up_bias, down, down_bias):
    """This is Φ(z), the probability alone: GELU multiplies it by z."""
    return (1 + erf((x @ up.T + up_bias) / math.sqrt(2))) / 2 @ down.T + down_bias


def mistake_bias_after_bend(x, up, up_bias, down, down_bias):
    """up_bias is added after GELU: add it before, it is part of hidden."""
    z = x @ up.T
    return (z * (1 + erf(z / math.sqrt(2))) / 2 + up_bias) @ down.T + down_bias


def mistake_sigmoid(x, up, up_bias, down, down_bias):
    """This is the approximation of GELU with a sigmoid, z / (1 + exp(-1.702 z)): use
    the exact one, with erf."""
    z = x @ up.T + up_bias
    return z / (1 + np.exp(-1.702 * z)) @ down.T + down_bias


def mistake_not_transposed(x, up, up_bias, down, down_bias):
    """The matrices are not transposed: they are stored (out, in), so multiply by up.T
    and down.T."""
    z = x @ up + up_bias
    return z * (1 + erf(z / np.sqrt(2))) / 2 @ down + down_bias


def mistake_no_half(x, up, up_bias, down, down_bias):
    """The result of GELU is twice as large: divide z (1 + erf(z / √2)) by 2."""
    z = x @ up.T + up_bias
    return z * (1 + erf(z / np.sqrt(2))) @ down.T + down_bias


def mistake_no_up_bias(x, up, up_bias, down, down_bias):
    """up_bias is missing: add it to x @ up.T."""
    return reference(x, up, np.zeros_like(up_bias), down, down_bias)


def mistake_no_down_bias(x, up, up_bias, down, down_bias):
    """down_bias is missing: add it at the end."""
    return reference(x, up, up_bias, down, np.zeros_like(down_bias))
