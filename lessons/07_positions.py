# %% [markdown]
# # 7. Cross-attention, and positions
#
# So far, queries and keys came from the same sequence. In cross-attention they do not:
# a translation attends to the original, a caption to a picture. The queries come from x
# (N tokens), the keys and values from another sequence y (M tokens), and the weights
# have shape (N, M).

# %%
from importlib.util import find_spec

import numpy as np

import regard
from regard.definition.position import HALVES
from regard.plain import rotary, sinusoidal
from regard.show.figure import plot_weights
from regard.show.terminal_map import draw_weights

rng = np.random.default_rng(0)
x, y = rng.normal(size=(2, 4)), rng.normal(size=(3, 4))
w_q, w_k, w_v = rng.normal(size=(3, 4, 4))  # random here, learned in a model
seen = regard.attention(x @ w_q, y @ w_k, y @ w_v, see=("weights",))
print(draw_weights(seen.weights, rows=["le", "chat"], keys=["the", "black", "cat"]))
assert (seen.weights.shape, seen.out.shape) == ((2, 3), (2, 4))

# %% [markdown]
# ## Shape tests are not enough
#
# The companion code of a widely read tutorial swaps the matrices of q and k here, and
# its test checks only the shape of the result. The shape is right, the numbers are
# wrong:

# %%
swapped = regard.attention(x @ w_k, y @ w_q, y @ w_v).out
assert swapped.shape == seen.out.shape
assert np.abs(swapped - seen.out).max() > 0.8

# %% [markdown]
# ## Attention ignores the order
#
# Shuffle the tokens, and every token gets the same result as before: the formula does
# not depend on positions. "Dog bites man" and "man bites dog" would be the same.

# %%
tokens = rng.normal(size=(5, 8))
order = np.array([3, 0, 4, 1, 2])
plain = regard.attention(tokens, tokens, tokens).out
shuffled = regard.attention(tokens[order], tokens[order], tokens[order]).out
assert np.allclose(shuffled, plain[order])

# %% [markdown]
# ## Additive positions
#
# The first solution: add a vector to every token that depends on its position. It can
# be learned, or computed from sines and cosines of decreasing frequency, like the hands
# of a clock. Position 0 is 0, 1, 0, 1, …, and the first pair rotates by one radian per
# step. As sin a sin b + cos a cos b = cos(a - b), the dot product of two such vectors
# depends only on their distance.

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
# ## Rotary positions (RoPE)
#
# Most models today rotate the pairs of q and k instead, by an angle proportional to the
# position (*rotary*). Values are not changed. Rotating both by the same angle does not
# change their dot product, so a score depends on the two tokens and on their distance,
# and not on where in the text they are.

# %%
q, k = rng.normal(size=(2, 8))
places = np.arange(120)  # the same q and k at all positions
turned_q = rotary(np.tile(q, (120, 1)), places, pairing=HALVES)
turned_k = rotary(np.tile(k, (120, 1)), places, pairing=HALVES)
scores = turned_q @ turned_k.T
print(scores[[9, 109, 9], [4, 104, 5]].round(4))
assert np.isclose(scores[9, 4], scores[109, 104])
assert not np.isclose(scores[9, 4], scores[9, 5])
assert np.isclose(scores[0, 0], q @ k)

# %% [markdown]
# Let all tokens be equal, so that only positions matter. A token gives itself the most
# weight, and less with every step back, until after three steps the fastest pair has
# rotated by half a turn.

# %%
turned = rotary(np.ones((12, 16)), np.arange(12), pairing=HALVES)
seen = regard.attention(turned, turned, turned, regard.causal(), see=("weights",))
assert (np.diff(seen.weights[-1])[-3:] > 0).all()
assert (seen.weights[-1, :-1] < seen.weights[-1, -1]).all()

# %% Equal tokens that differ only in their rotary positions
if find_spec("matplotlib"):
    figure = plot_weights(seen.weights, mask=regard.causal())

# %% [markdown]
# Exercises (`regard learn`): `cross_attention`, `sinusoidal`, `rotary`.
