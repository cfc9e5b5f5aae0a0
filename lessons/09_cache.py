# %% [markdown]
# # 9. The cache, and attention in linear memory
#
# Two facts make attention affordable. During generation, old keys and values do not
# change, so they are kept: the *KV cache*. And the softmax can be computed block by
# block, so the full matrix of weights is never in memory: the *online softmax*.
#
# ## The KV cache
#
# No token attends to later ones. So each new token adds one key and one value, and
# needs one query. The result is the last row of the full computation.

# %%
import tracemalloc

import numpy as np

import regard
from regard.plain import Config
from regard.plain.cost import cache_bytes

rng = np.random.default_rng(0)
q, k, v = rng.normal(size=(3, 6, 4))
whole = regard.attention(q, k, v, regard.causal()).out
keys = values = np.empty((0, 4))
for t in range(6):
    keys, values = np.vstack([keys, k[t]]), np.vstack([values, v[t]])
    new = regard.attention(q[t : t + 1], keys, values).out
    assert np.allclose(new[0], whole[t])

# %% [markdown]
# No mask was needed: the cache contains only the past. If you pass a mask, it has to
# know that this query is at position t, not at 0: `q_start=t`. At position 0 it would
# attend only to the first key, a common mistake.

# %%
right = regard.attention(q[5:], k, v, regard.causal(), q_start=5).out
wrong = regard.attention(q[5:], k, v, regard.causal(), q_start=0).out
assert np.allclose(right[0], whole[5])
assert np.allclose(wrong[0], v[0])

# %% [markdown]
# The price is memory. SmolLM2 has 30 layers with 3 KV heads of width 64, and stores 2
# bytes per number:

# %%
smollm = Config(
    vocabulary=49_152, context=8_192, width=576, layers=30, heads=9, kv_heads=3
)
held = cache_bytes(smollm, 8_192).total
print(f"{held / 2**20:.0f} MiB for 8,192 tokens")
assert held == 8_192 * 30 * 2 * 3 * 64 * 2

# %% [markdown]
# ## Two halves
#
# Let a query attend to some of the keys, and then to the others. Each half gives an
# average of its values, and the logarithm of its sum of exponentials, lse. The two
# averages are merged with these sums as weights.
#
# By hand: the scores 0 and log 3 have the sum 1 + 3 = 4, and the score log 4 alone also
# has 4. So both halves have the same weight.

# %%
scores, value = np.log([1.0, 3.0, 4.0]), np.array([8.0, 16.0, 30.0])
left = (1 * 8 + 3 * 16) / 4  # 14, the average of the first half
assert np.isclose((left + 30) / 2, np.exp(scores) @ value / np.exp(scores).sum())

parts = [regard.attention(q, k[s], v[s]) for s in (slice(0, 2), slice(2, 6))]
out, lse = regard.merge(*((part.out, part.lse) for part in parts))
assert np.allclose(out, regard.attention(q, k, v).out)
assert np.allclose(lse, regard.attention(q, k, v).lse)

# %% [markdown]
# ## One key at a time
#
# In the extreme, every part is a single key. The state is the largest score so far, the
# sum of exponentials and the weighted sum of values; when a larger score appears, both
# sums are scaled down.

# %%
top, total, kept = -np.inf, 0.0, np.zeros(4)
for key, given in zip(k, v, strict=True):
    score = q[5] @ key / 2  # √4
    higher = max(top, score)
    shrink, part = np.exp(top - higher), np.exp(score - higher)
    total, kept = total * shrink + part, kept * shrink + part * given
    top = higher
print((kept / total).round(4))
assert np.allclose(kept / total, whole[5])

# %% [markdown]
# `block=` does this with tiles, and skips those that are fully masked. The result is
# the same, without an array of N² cells: at 1,024 tokens, the matrix of weights alone
# takes 4 MiB.

# %%
q, k, v = rng.normal(size=(3, 1024, 16)).astype(np.float32)
outs, peaks = [], []
for block in (None, 64):
    tracemalloc.start()
    outs.append(regard.attention(q, k, v, regard.causal(), block=block).out)
    peaks.append(tracemalloc.get_traced_memory()[1])  # peak memory in bytes
    tracemalloc.stop()
assert np.abs(outs[0] - outs[1]).max() < 1e-6
assert peaks[0] > 4 * 2**20
assert peaks[1] < peaks[0] / 10

# %% [markdown]
# Exercises (`regard learn`): `kv_cache`, `online_softmax`, `merge_parts`.
