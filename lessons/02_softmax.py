# %% [markdown]
# # 2. Softmax, and why scores are scaled
#
# Lesson 1 turned scores into weights: exponentials, divided by their sum. This function
# is called softmax. Implemented literally, it fails for large scores, and wide queries
# give large scores. Both problems have a simple solution.

# %%
from importlib.util import find_spec

import numpy as np

from regard.plain import softmax
from regard.show.scaling_demo import draw_scaling, measure_scaling, plot_scaling

with np.errstate(over="ignore", invalid="ignore"):
    parts = np.exp(np.array([1000.0, 1001.0]))
    print(parts, parts / parts.sum())
    assert np.isinf(parts).all()

# %% [markdown]
# exp(1000) overflows to infinity, and infinity divided by infinity is NaN. But only
# differences of scores matter, so subtract the largest first. Then the largest
# exponential is exp(0) = 1, and the sum is at least 1.

# %%
scores = np.array([1000.0, 1001.0])
parts = np.exp(scores - scores.max())
print((parts / parts.sum()).round(3))
assert np.allclose(parts / parts.sum(), [0.269, 0.731], atol=5e-4)
assert np.allclose(softmax(scores), parts / parts.sum())

# %% [markdown]
# A score of minus infinity gets a weight of exactly 0. That is how a key is masked
# (lesson 4). Two mistakes are common in hand-written softmaxes:
#
# - A widely read text divides by the sum plus 1e-10, so that its rows sum to less than
#   1. After the largest score is subtracted, the sum is at least 1 and needs no
#   epsilon; lesson 4 covers fully masked rows.
# - The same text also treats *plus* infinity as masked. The limit is the opposite: a
#   score that grows without bound takes all of the weight.

# %%
guarded = np.exp([0.0]) / (np.exp([0.0]).sum() + 1e-10)
print(f"{guarded[0]:.10f}")
assert guarded.sum() < 1
assert softmax(np.array([0.0])).sum() == 1

assert softmax(np.array([0.0, -np.inf])).tolist() == [1, 0]
assert softmax(np.array([0.0, 800.0])).tolist() == [0, 1]  # the limit for a large score
with np.errstate(invalid="ignore"):
    endless = softmax(np.array([0.0, np.inf]))
print(endless)
assert np.isnan(endless).any()  # inf - inf is NaN, and the NaN is kept

# %% [markdown]
# ## Wide queries give large scores
#
# Let all elements of q and k be random, with mean 0 and variance 1. A score is a sum of
# d products, each of variance 1, so its variance is d and its standard deviation √d.
# For d = 64 that is 8, and if two scores differ by 8, their weights differ by a factor
# of 3,000.

# %%
rng = np.random.default_rng(0)
for d in (4, 64, 256):
    q, k = rng.normal(size=(2, 20_000, d))
    spread = (q * k).sum(-1).std()
    print(f"d = {d:>3}   √d = {np.sqrt(d):>2.0f}   spread of the scores = {spread:.1f}")
    assert abs(spread / np.sqrt(d) - 1) < 0.02
assert round(np.exp(8)) == 2981

# %% [markdown]
# Divided by √d, scores have a standard deviation of 1 at any width. This is the scale
# in "scaled dot-product attention", and the default of `regard.attention`. Below are
# four random tokens: without the scale, one key soon gets all the weight. The softmax
# is then saturated: small changes of the scores change nothing, and the gradient
# vanishes.

# %%
print(draw_scaling())

# %%
largest = measure_scaling()
scaled, bare = largest.values()
assert (np.median(bare, 0)[3:] > 0.999).all()
assert (np.median(scaled, 0) < 0.8).all()

# %% The largest weight against the head width, scaled and unscaled
if find_spec("matplotlib"):
    figure = plot_scaling()

# %% [markdown]
# A widely read tutorial has this experiment, with a table. Its claim is right: unscaled
# weights saturate. But its numbers are not those of its own code, which are the rows
# for seed 42 above. They also show how little a single draw means: the scaled ones
# happen to *grow* from d = 64 to d = 512, while the median of a hundred draws hardly
# changes.

# %%
assert scaled[0].round(4).tolist() == [0.6650, 0.4708, 0.4617, 0.7101, 0.7490]
assert bare[0].round(4).tolist() == [0.9048, 0.8828, 0.9888, 1.0, 1.0]
medians = np.median(scaled, 0)
assert scaled[0, -1] - scaled[0, 2] > 0.28
assert abs(medians[-1] - medians[2]) < 0.05

# %% [markdown]
# Exercises (`regard learn`): `softmax`, `scaling`.
