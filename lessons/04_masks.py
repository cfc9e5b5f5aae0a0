# %% [markdown]
# # 4. Masks
#
# A model that writes text must not read what it is about to write. So a query may see
# itself and what came before it: the *causal* mask. Other masks hide padding, or other
# documents. Here a mask is a table of truth values, and True means *may attend*. (Some
# libraries mean the opposite; a mask read the wrong way round gives no error.)

# %%
from importlib.util import find_spec

import numpy as np

import regard
from regard.plain import softmax
from regard.show.experiment import list_mistakes, make_example, plot_mistakes

may_see = np.tril(np.ones((3, 3), dtype=bool))
print(may_see.astype(int))

# %% [markdown]
# A hidden key must get the weight 0. exp(-∞) is 0, so its score becomes minus infinity
# *before* the softmax; the rest of the row then sums to 1 by itself.

# %%
state = np.random.RandomState(0)
q, k = state.randn(3, 2), state.randn(3, 2)
scores = q @ k.T / np.sqrt(2)
weights = softmax(np.where(may_see, scores, -np.inf))
print(weights.round(3))
assert np.allclose(weights[1], [0.460, 0.540, 0], atol=5e-4)
assert np.allclose(weights[2], [0.780, 0.132, 0.089], atol=5.1e-4)

# %% [markdown]
# The first token sees only itself, whatever its score is. (These q and k are those of a
# graded exercise of a widely read tutorial, seed 0, which expects other numbers. The
# ones above are what its code computes.)
#
# ## Three ways that agree
#
# The mask as truth values; as numbers to add, 0 or -∞; and after the softmax, if every
# row is then divided by its new sum. The last works because both the old and the new
# sum only divide the row: what remains is exp(score) over the sum of the visible ones.

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
# Without that division the rows sum to what is printed above, and the output shrinks.
# It is one of three common mistakes. The others are known from lessons 2 and 3: no
# scale, and the scale of d_v.

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
# A widely read text makes the numbers to add from a table of 0 and 1, as `table *
# -inf`. But 0 × ∞ is not 0, it is undefined, so every cell that *may* be seen becomes
# NaN. Choose with `where`, as above; do not multiply.

# %%
with np.errstate(invalid="ignore"):
    product = (1 - may_see) * -np.inf
print(product)
assert np.isnan(product[may_see]).all()

# %% [markdown]
# A large finite number such as -1e9 avoids that, and has a fault of its own: in a row
# that may see nothing all scores are about -1e9, float32 loses their differences, and
# the softmax spreads the weight evenly over keys that are all forbidden.
#
# ## Rows that may see nothing
#
# They exist: a row of padding, a token alone in its window. With -∞ a careless softmax
# computes -∞ - (-∞), which is NaN, and one NaN soon spoils the whole model. Here such a
# row gets the weights 0 and the output 0: nothing was seen, so nothing was handed over.

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
