# %% [markdown]
# # 3. A whole sequence, two widths, batches
#
# Lesson 1 had one query. In a sentence every word has a query, and matrix products
# compute all of them at once:
#
#     scores  = q kᵀ / √d_k       (N, N)      row i: query i, column j: key j
#     weights = softmax(scores)   (N, N)      each row separately
#     out     = weights v         (N, d_v)    row i: the weighted average for query i

# %%
from importlib.util import find_spec

import numpy as np

import regard
from regard.plain import softmax
from regard.show.figure import plot_steps

x = np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
scores = x @ x.T / np.sqrt(2)
weights = softmax(scores)
print(scores.round(3))
print(weights.round(3))

# %% [markdown]
# Check the first row by hand. The dot products are 1, 0 and 0.5; over √2 = 1.414 they
# are 0.707, 0 and 0.354; the exponentials 2.028, 1 and 1.424 sum to 4.452; and 2.028 /
# 4.452 is 0.456. The third token has the same dot product with the first, the second
# and itself, so its weights are equal.
#
# A widely read tutorial has an exercise on these three tokens and expects different
# numbers. If it marked your code as wrong, your code may have been correct.

# %%
expected = [[0.456, 0.225, 0.320], [0.225, 0.456, 0.320], [0.333, 0.333, 0.333]]
assert np.allclose(weights, expected, atol=5e-4)
assert np.allclose(regard.attention(x, x, x, see=("weights",)).weights, weights)

# %% [markdown]
# ## Where q, k and v come from
#
# In a model a token is a vector of D numbers, and three learned matrices project it to
# its query, its key and its value: what it looks for, what it offers, and what it
# passes on. Dot products need queries and keys of the same width, d_k. Values are only
# averaged: they may have another width, d_v, which is also the width of the output.

# %%
words = ["life", "is", "short"]
rng = np.random.default_rng(0)
tokens = rng.normal(size=(3, 6))  # N = 3, D = 6
w_q, w_k, w_v = (rng.normal(size=(6, d)) / np.sqrt(6) for d in (4, 4, 5))
q, k, v = tokens @ w_q, tokens @ w_k, tokens @ w_v  # d_k = 4, d_v = 5
steps = regard.explain(q, k, v, tokens=words)
print(steps["scores"], steps["weights"], steps["out"], sep="\n\n")
assert steps["out"].shape == (3, 5)
assert np.allclose(steps["weights"].values.sum(-1), 1)

# %% Every step for three tokens
if find_spec("matplotlib"):
    figure = plot_steps(steps, columns=2)

# %% [markdown]
# The scale uses d_k, because the scores are sums of d_k products. Using √d_v instead is
# a common mistake that raises no error and gives wrong weights.

# %%
slip = regard.attention(q, k, v, scale=1 / np.sqrt(5), see=("weights",)).weights
assert np.abs(slip - steps["weights"].values).max() > 0.01

# %% [markdown]
# ## Printed numbers
#
# A widely read tutorial computes four tokens of width 6 from seed 42 and prints weights
# whose rows do not sum to 1 (lesson 1). Its own code gives these:

# %%
state = np.random.RandomState(42)
tokens = state.randn(4, 6)
q, k, v = (tokens @ (state.randn(6, 4) * 0.5) for _ in range(3))
weights = regard.attention(q, k, v, see=("weights",)).weights
print(weights.round(3))
assert np.allclose(weights[0], [0.234, 0.239, 0.465, 0.063], atol=5.1e-4)
assert np.allclose(weights[3], [0.055, 0.223, 0.683, 0.039], atol=5.1e-4)
assert np.allclose(weights.sum(-1), 1)

# %% [markdown]
# ## Batches
#
# Many sequences are computed together with one more leading axis; nothing else changes.
# Code that counts axes from the end works for any number of them. `.T` does not: it
# reverses *all* axes. `swapaxes(-1, -2)` swaps only the last two.

# %%
many = rng.normal(size=(8, 3, 4))  # B = 8
together = regard.attention(many, many, many).out
alone = [regard.attention(one, one, one).out for one in many]
assert np.allclose(together, np.stack(alone))
assert many.T.shape == (4, 3, 8)
assert many.swapaxes(-1, -2).shape == (8, 4, 3)

# %% [markdown]
# Exercises (`regard learn`): `attend`, `batches`.
