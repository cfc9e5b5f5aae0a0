# %% [markdown]
# # 7. Cross-attention, and positions
#
# So far the queries and the keys came from one sequence. They need not: a translation
# asks the original, a caption asks a picture. The queries then come from x (N tokens),
# the keys and values from another sequence y (M tokens), and the weights are a table
# (N, M).

# %%
from importlib.util import find_spec

import numpy as np

import regard
from regard.definition.position import HALVES
from regard.plain import rotary, sinusoidal
from regard.show.figure import plot_weights
from regard.show.text import draw_weights

rng = np.random.default_rng(0)
x, y = rng.normal(size=(2, 4)), rng.normal(size=(3, 4))
w_q, w_k, w_v = rng.normal(size=(3, 4, 4))  # random here, learned in a model
seen = regard.attention(x @ w_q, y @ w_k, y @ w_v, see=("weights",))
print(draw_weights(seen.weights, rows=["le", "chat"], keys=["the", "black", "cat"]))
assert (seen.weights.shape, seen.out.shape) == ((2, 3), (2, 4))

# %% [markdown]
# ## Shapes do not prove anything
#
# The companion code of a widely read tutorial swaps the matrices of q and k here, and
# its test looks at the shape of the result only. The shape is right, the numbers are
# not:

# %%
swapped = regard.attention(x @ w_k, y @ w_q, y @ w_v).out
assert swapped.shape == seen.out.shape
assert np.abs(swapped - seen.out).max() > 0.8

# %% [markdown]
# ## Attention sees a bag, not a row
#
# Shuffle the tokens, and every token gets what it got before: nothing in the formula
# knows where a token stands. "Dog bites man" and "man bites dog" would be the same.

# %%
tokens = rng.normal(size=(5, 8))
order = np.array([3, 0, 4, 1, 2])
plain = regard.attention(tokens, tokens, tokens).out
shuffled = regard.attention(tokens[order], tokens[order], tokens[order]).out
assert np.allclose(shuffled, plain[order])

# %% [markdown]
# ## Positions that are added
#
# The first cure: to every token add a row of numbers that belongs to its place. They
# can be learned, or computed: sines and cosines of ever slower waves, like the hands of
# a clock. Position 0 is 0, 1, 0, 1, …, and the first pair turns by one radian a step.
# As sin a sin b + cos a cos b = cos(a - b), the dot product of two such rows depends on
# their distance only.

# %%
waves = sinusoidal(50, 8)
print(waves[:3].round(3))
assert waves[0].tolist() == [0, 1, 0, 1, 0, 1, 0, 1]
assert np.allclose(waves[1, :2], [np.sin(1), np.cos(1)])
dots = waves @ waves.T
assert np.allclose(np.diag(dots, 7), dots[0, 7])
assert (dots[0, 1:] < dots[0, 0]).all()
placed, other = tokens + waves[:5], tokens[order] + waves[:5]
now = regard.attention(placed, placed, placed).out
assert np.abs(regard.attention(other, other, other).out - now[order]).max() > 0.1

# %% [markdown]
# ## Positions that turn
#
# Most models today turn the pairs of q and k instead, by an angle that grows with the
# position (*rotary*). Values are left alone. If both are turned by the same angle,
# their dot product stays: so a score depends on what two tokens are and on how far
# apart they stand, and the whole text may move.

# %%
q, k = rng.normal(size=(2, 8))
places = np.arange(120)  # the same q and k at all of them
turned_q = rotary(np.tile(q, (120, 1)), places, pairing=HALVES)
turned_k = rotary(np.tile(k, (120, 1)), places, pairing=HALVES)
scores = turned_q @ turned_k.T
print(scores[[9, 109, 9], [4, 104, 5]].round(4))
assert np.isclose(scores[9, 4], scores[109, 104])
assert not np.isclose(scores[9, 4], scores[9, 5])
assert np.isclose(scores[0, 0], q @ k)

# %% [markdown]
# Let all tokens be equal, so that only positions speak. A token gives itself most, and
# less with every step back, until after three steps the fastest pair has come half way
# round.

# %%
turned = rotary(np.ones((12, 16)), np.arange(12), pairing=HALVES)
seen = regard.attention(turned, turned, turned, regard.causal(), see=("weights",))
assert (np.diff(seen.weights[-1])[-3:] > 0).all()
assert (seen.weights[-1, :-1] < seen.weights[-1, -1]).all()

# %% Equal tokens, told apart by rotary positions only
if find_spec("matplotlib"):
    figure = plot_weights(seen.weights, mask=regard.causal())

# %% [markdown]
# Exercises (`regard learn`): `cross_attention`, `sinusoidal`, `rotary`.
