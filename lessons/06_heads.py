# %% [markdown]
# # 6. Heads
#
# One softmax gives one average. A word may need several things at once: its verb, its
# article, the previous word. So attention is computed several times in parallel, each
# time with separate, narrower q, k and v. Each of these is a *head*.

# %%
from importlib.util import find_spec

import numpy as np

import regard
from regard.definition.heads import join_heads, split_heads
from regard.plain import Linear, multi_head
from regard.plain.multihead import attend_listed, fuse
from regard.show.figure import plot_weights
from regard.show.terminal_map import draw_weights

words = ["the", "cat", "sat", "down"]
N, D, H, d = 4, 8, 2, 3  # H × d need not be D
rng = np.random.default_rng(0)
x = rng.normal(size=(N, D))
heads = [tuple(Linear(rng.normal(size=(d, D))) for _ in "qkv") for _ in range(H)]
out = Linear(rng.normal(size=(D, H * d)))

# %% [markdown]
# ## One head after the other
#
# The direct way: compute attention for each head, concatenate the results (N, H × d),
# and apply the output projection (D, H × d), which mixes them and restores the model
# width.

# %%
parts = [regard.attention(q(x), k(x), v(x)).out for q, k, v in heads]
listed = np.concatenate(parts, axis=-1) @ out.weight.T
assert listed.shape == (N, D)
assert np.allclose(listed, attend_listed(x, heads, out))

# %% [markdown]
# ## All at once
#
# The matrices of all heads can be stacked into one: first the rows of all q, then of
# all k, then of all v. One product computes everything, and a reshape splits it into
# heads. The order matters: (N, H × d) becomes (N, H, d) first, and only then are the
# axes swapped.

# %%
together = multi_head(x, fuse(heads), out, heads=H)
assert np.allclose(together, listed)

small = np.arange(8).reshape(2, 4)  # N = 2, two heads of width 2
print(split_heads(small, 2).tolist())
assert split_heads(small, 2).tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
assert small.reshape(2, 2, 2).tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]  # wrong
assert (join_heads(split_heads(small, 2)) == small).all()

# %% [markdown]
# The two lines before the last differ: reshaping directly to (H, N, d) mixes tokens and
# heads, and raises no error.
#
# Each head has different weights:

# %%
q, k, v = (np.stack([head[i](x) for head in heads]) for i in range(3))  # (H, N, d)
weights = regard.attention(q, k, v, see=("weights",)).weights
print(draw_weights(weights, rows=words, keys=words))
assert np.abs(weights[0] - weights[1]).max() > 0.1

# %% Two heads over the same four words
if find_spec("matplotlib"):
    figure = plot_weights(weights, rows=words, keys=words)

# %% [markdown]
# ## How wide is a head?
#
# Usually D / H. A widely read tutorial says that GPT-3 has heads of width 64; with its
# published width of 12,288 and 96 heads, it is 128.

# %%
assert split_heads(np.zeros((1, 12_288)), 96).shape == (96, 1, 128)

# %% [markdown]
# ## Initialization
#
# Glorot initialization draws a matrix (out, in) from ±√(6 / (in + out)), which depends
# on its shape. A widely read text draws the fused matrix and the output matrix from the
# range of a (d_model, d_k) matrix, although neither has that shape. For 512 and 8 heads
# of 64, both start too large, the fused one by a factor of 1.9.

# %%
shared, fused, output = (np.sqrt(6 / n) for n in (512 + 64, 512 + 3 * 512, 512 + 512))
print(f"one for all {shared:.4f}   fused {fused:.4f}   output {output:.4f}")
assert np.isclose(shared / fused, 1.89, atol=5e-3)
assert np.isclose(shared / output, 1.33, atol=5e-3)

# %% [markdown]
# ## Grouped-query attention
#
# Many models have fewer heads of k and v than of q: query head h uses key head
# h // (H / Hk).

# %%
q, k, v = rng.normal(size=(4, N, d)), *rng.normal(size=(2, 2, N, d))
shared = regard.attention(q, k, v).out
assert np.allclose(shared, regard.attention(q, k[[0, 0, 1, 1]], v[[0, 0, 1, 1]]).out)

# %% [markdown]
# Exercises (`regard learn`): `heads_split`, `multi_head`, `fused_qkv`, `grouped_heads`.
