# %% [markdown]
# # 15. Statistics without the matrix
#
# How focused is a head? How much weight does it put on a passage? Such questions seem
# to need all N × N weights. They do not: each is one more call of the attention that
# you have anyway, because
#
#     log p[i, j] = scale q[i] · k[j] - lse[i]        and        out = p v
#
# ## Mass: attention with other values
#
# The output is a weighted average of the values. If the value of a key is 1 inside a
# passage and 0 outside, the output is the weight on the passage.

# %%
import tracemalloc

import numpy as np

import regard

rng = np.random.default_rng(0)
q, k = rng.normal(size=(2, 64, 8))
p = regard.attention(q, k, k, regard.causal(), see=("weights",)).weights
passage = ((np.arange(64) >= 10) & (np.arange(64) < 20)).astype(float)
mass = regard.attention(q, k, passage[:, None], regard.causal()).out[:, 0]
assert np.allclose(mass, p[:, 10:20].sum(-1))

# %% [markdown]
# The same works for any feature of the keys. With their positions as values, the output
# is the mean position that a query attends to:

# %%
places = regard.attention(q, k, np.arange(64.0)[:, None], regard.causal()).out[:, 0]
print(f"query 63 attends to position {places[63]:.1f} on average")
assert np.allclose(places, p @ np.arange(64))

# %% [markdown]
# ## Masks: only lse
#
# exp(lse) is the sum of the exponentials of a row. Under a narrower mask the sum is
# smaller, and the ratio is the weight inside of it:
#
#     weight within a window = exp(lse of the window - lse)

# %%
near = regard.attention(q, k, k, regard.causal() & regard.window(3)).lse
lse = regard.attention(q, k, k, regard.causal()).lse
inside = regard.window(3).dense((64, 64))
assert np.allclose(np.exp(near - lse), (p * inside).sum(-1))

# %% [markdown]
# ## Entropy: attention with the keys as values
#
#     H[i] = - Σ_j p[i, j] log p[i, j]
#
# The sum is an average of log p over a row. As log p is linear in the key, only the
# average key is needed, and that is attention with v = k:
#
#     H[i] = lse[i] - scale q[i] · (average key of i)


# %%
def measure_entropy(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Return the entropy of each row, in nats."""
    found = regard.attention(q, k, k, regard.causal(), block=128)
    return found.lse - (q * found.out).sum(-1) / np.sqrt(q.shape[-1])


dense = -(p * np.log(np.where(p > 0, p, 1))).sum(-1)
assert np.allclose(measure_entropy(q, k), dense)
assert np.allclose(measure_entropy(0 * q, k), np.log(np.arange(1, 65)))  # uniform

# %% [markdown]
# The memory is proportional to the length, not to its square. At 2,048 tokens the
# matrix would take 34 MB:

# %%
q, k = rng.normal(size=(2, 2048, 8))
tracemalloc.start()
entropy = measure_entropy(q, k)
_, most = tracemalloc.get_traced_memory()
tracemalloc.stop()
print(f"exp(entropy) of the last row: {np.exp(entropy[-1]):.0f} of 2,048 keys")
assert most < 2048 * 2048 * 8 / 8

# %% [markdown]
# `regard.stats` has these and others for recorded heads, with masks, grouped heads and
# soft caps: `stats.entropy`, `stats.mass`, `stats.masked_mass`.
#
# Exercises (`regard learn`): `row_entropy`.
