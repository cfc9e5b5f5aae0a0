# %% [markdown]
# # 4. Masks
#
# A model that generates text must not attend to the tokens it is about to predict. So a
# query may attend to itself and to earlier tokens: the *causal* mask. Other masks
# exclude padding, or other documents. Here a mask is a boolean array, and True means
# *may attend*. (In some libraries it means the opposite; an inverted mask raises no
# error.)

# %%
from importlib.util import find_spec

import numpy as np

import regard
from regard.plain import softmax
from regard.show.scaling_demo import list_mistakes, make_example, plot_mistakes

may_see = np.tril(np.ones((3, 3), dtype=bool))
print(may_see.astype(int))

# %% [markdown]
# A masked key must get the weight 0. exp(-∞) is 0, so its score is set to minus
# infinity *before* the softmax; the rest of the row then sums to 1.

# %%
state = np.random.RandomState(0)
q, k = state.randn(3, 2), state.randn(3, 2)
scores = q @ k.T / np.sqrt(2)
weights = softmax(np.where(may_see, scores, -np.inf))
print(weights.round(3))
assert np.allclose(weights[1], [0.460, 0.540, 0], atol=5e-4)
assert np.allclose(weights[2], [0.780, 0.132, 0.089], atol=5.1e-4)

# %% [markdown]
# The first token attends only to itself, whatever its score. (These q and k are from a
# graded exercise of a widely read tutorial, seed 0, which expects different numbers.
# The ones above are what its code computes.)
#
# ## Three equivalent ways
#
# A boolean mask; an additive mask of 0 and -∞; or masking after the softmax, if every
# row is then divided by its new sum. The last one works because the old and the new sum
# only rescale the row: the result is exp(score) over the sum of the unmasked ones.

# %%
added = np.where(may_see, 0.0, -np.inf)
late = softmax(scores) * may_see
print(late.sum(-1).round(3))
assert np.allclose(softmax(scores + added), weights)
assert np.allclose(late / late.sum(-1, keepdims=True), weights)
assert np.allclose(
    regard.attention(q, k, k, may_see, see=("weights",)).weights, weights
)

# %% [markdown]
# Without that division, the rows have the sums printed above, and the output shrinks.
# This is one of three common mistakes. The others are from lessons 2 and 3: no scale,
# and scaling by d_v.

# %%
mistakes = list_mistakes(*make_example())
for mistake in mistakes:
    print(f"{mistake.title:<20}", *mistake.tell(), sep="   ")
sums = {x.title: x.weights.sum(-1) for x in mistakes}
assert np.allclose(sums["right"], 1)
assert sums["mask after softmax"].min() < 0.5

# %% One causal head, right and wrong in three ways
if find_spec("matplotlib"):
    figure = plot_mistakes()

# %% [markdown]
# ## Zero times infinity
#
# A widely read text computes the additive mask from an array of 0 and 1, as `array *
# -inf`. But 0 × ∞ is NaN, not 0, so every *unmasked* cell becomes NaN. Use `where`, as
# above, instead of multiplying.

# %%
with np.errstate(invalid="ignore"):
    product = (1 - may_see) * -np.inf
print(product)
assert np.isnan(product[may_see]).all()

# %% [markdown]
# A large finite number such as -1e9 avoids that, but has another problem: in a fully
# masked row all scores are about -1e9, float32 loses their differences, and the softmax
# distributes the weight uniformly over masked keys.
#
# ## Fully masked rows
#
# They occur in practice, for example for padding. With -∞, a careless softmax computes
# -∞ - (-∞), which is NaN, and one NaN soon spreads through the whole model. In regard,
# such a row has weights 0 and output 0.

# %%
nothing = np.zeros((1, 3), dtype=bool)
spread = softmax(scores[:1].astype(np.float32) - np.float32(1e9))
empty = regard.attention(q[:1], k, k, nothing, see=("weights",))
print(spread.round(3), empty.weights, empty.out)
assert np.allclose(spread, 1 / 3)
assert not empty.weights.any()
assert not empty.out.any()

# %% [markdown]
# Exercises (`regard learn`): `causal_mask`, `masks`.
