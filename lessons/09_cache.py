# %% [markdown]
# # 9. The cache, and attention in linear memory
#
# Two facts make attention affordable. When text is written, old keys and values do not
# change, so they are kept: the *KV cache*. And the softmax can be computed piece by
# piece, so the square of weights never has to be in memory: the *online softmax*.
#
# ## The cache
#
# No token sees what comes after it. So with each new token one key and one value are
# added, and one query is asked. The result is the last row of the whole computation.

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
# No mask was needed: all of the cache is the past. If there is one, it has to know that
# this query stands at position t, not at 0: `q_start=t`. Counted as 0, it would see the
# first key only, a common slip.

# %%
right = regard.attention(q[5:], k, v, regard.causal(), q_start=5).out
wrong = regard.attention(q[5:], k, v, regard.causal(), q_start=0).out
assert np.allclose(right[0], whole[5])
assert np.allclose(wrong[0], v[0])

# %% [markdown]
# The price is memory. SmolLM2 has 30 layers with 3 heads of 64 for keys and as many for
# values, of 2 bytes each:

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
# Let a query look at some of the keys, and then at the others. Each half gives an
# average of its values, and the logarithm of its sum of exponentials, lse. The two
# averages are merged by these sums: a half whose keys answered better counts more.
#
# By hand: scores 0 and log 3 have the sum 1 + 3 = 4, the score log 4 alone has 4 as
# well. So both halves count one half.

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
# In the end every piece may be a single key. Kept are the largest score so far, the sum
# of exponentials and the sum of values; when a larger score comes, both sums are scaled
# down.

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
# `block=` does this with tiles, and skips those that the mask forbids. The same
# numbers, and no array of N² cells: at 1,024 tokens the square of weights alone has 4
# MiB.

# %%
q, k, v = rng.normal(size=(3, 1024, 16)).astype(np.float32)
outs, peaks = [], []
for block in (None, 64):
    tracemalloc.start()
    outs.append(regard.attention(q, k, v, regard.causal(), block=block).out)
    peaks.append(tracemalloc.get_traced_memory()[1])  # the most bytes held at a time
    tracemalloc.stop()
assert np.abs(outs[0] - outs[1]).max() < 1e-6
assert peaks[0] > 4 * 2**20
assert peaks[1] < peaks[0] / 10

# %% [markdown]
# Exercises (`regard learn`): `kv_cache`, `online_softmax`, `merge_parts`.
