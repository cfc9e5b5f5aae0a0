# %% [markdown]
# # 1. One query attends to keys
#
# A Python dictionary is strict: you look up a key, and you get the one value stored
# under exactly this key, or an error. Attention is a soft dictionary. You look up a
# *query*; every *key* matches it to some degree; and you get a weighted average of all
# *values*, in which the values of better matching keys have more weight.
#
# All of them are vectors. This lesson has one query, three keys and three values, small
# enough to compute by hand.

# %%
import numpy as np

import regard

query = np.array([1.0, 2.0])
keys = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
values = np.array([[10.0], [20.0], [30.0]])

# %% [markdown]
# ## How well does a key match?
#
# The dot product measures it: multiply element by element, and sum. For the third key
# that is 1 × 0 + 2 × 1 = 2.

# %%
scores = keys @ query
print(scores)
assert scores.tolist() == [0, 1, 2]

# %% [markdown]
# ## From scores to weights
#
# Scores can be negative and can have any sum. Weights should be positive and sum to 1.
# Two steps achieve this: `exp` makes every number positive and preserves the order;
# dividing by the sum makes the sum 1. With e = 2.718… the exponentials are 1, 2.718 and
# 7.389, their sum is 11.107, and the first weight is 1 / 11.107 = 0.090.

# %%
parts = np.exp(scores)
weights = parts / parts.sum()
print(parts.round(3), parts.sum().round(3))
print(weights.round(3))
assert np.allclose(weights, [0.090, 0.245, 0.665], atol=5e-4)
assert np.isclose(weights.sum(), 1)

# %% [markdown]
# Increasing a score by 1 multiplies its weight relative to the others by e. So only
# differences of scores matter: add 5 to all of them, and nothing changes.

# %%
assert np.isclose(weights[2] / weights[1], np.e)
moved = np.exp(scores + 5)
assert np.allclose(moved / moved.sum(), weights)

# %% [markdown]
# ## The average
#
# 0.090 × 10 + 0.245 × 20 + 0.665 × 30 = 25.75. Like every average, it is between the
# smallest and the largest value, and here closest to the value of the best key.

# %%
out = weights @ values
print(out.round(2))
assert np.allclose(out, 25.75, atol=5e-3)

# %% [markdown]
# A longer query gives sharper weights. Ten times as long, it puts nearly all weight on
# one key, and the soft dictionary becomes a strict one. A query of zeros matches all
# keys equally, and gets the plain average.

# %%
firm = regard.attention(10 * query[None], keys, values, scale=1.0)
vague = regard.attention(0 * query[None], keys, values, scale=1.0)
print(firm.out[0].round(2), vague.out[0].round(2))
assert np.allclose(firm.out, 30, atol=1e-2)
assert np.allclose(vague.out, 20)

# %% [markdown]
# `regard.attention` is the same computation for any number of queries, given as rows,
# so one query is `query[None]`. (`scale=1.0` turns off the scaling, the topic of lesson
# 2.)

# %%
seen = regard.attention(query[None], keys, values, scale=1.0, see=("weights",))
assert np.allclose(seen.weights[0], weights)
assert np.allclose(seen.out[0], out)

# %% [markdown]
# ## A simple check
#
# A row of weights sums to 1. A widely read tutorial prints the row below as the weights
# of a word, and it does not sum to 1, so it cannot be the result of a softmax. Lesson 3
# computes what the tutorial's own code returns.

# %%
printed = [0.187, 0.124, 0.399, 0.315]
print(round(sum(printed), 3))
assert abs(sum(printed) - 1) > 0.02

# %% [markdown]
# Exercises (`regard learn`): `one_score`, `scores`.
