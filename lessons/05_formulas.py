# %% [markdown]
# # 5. Masks as formulas
#
# A mask for N tokens has N² cells: at 131,072 tokens that is 17 billion, for a rule
# that takes a few words. So write the rule instead. A formula is a predicate of a query
# position q and a key position k, and formulas combine: `&` and, `|` or, `~` not.

# %%
from importlib.util import find_spec

import numpy as np

import regard
from regard import causal, padding, same, where, window
from regard.errors import MaskError, PositionError, RegardError
from regard.show.figure import plot_mask
from regard.show.terminal_map import draw_mask

print(draw_mask(causal(), 6))
print(draw_mask(causal() & window(2), 6))
near = (causal() & window(2)).dense((6, 6))
assert near.sum(-1).tolist() == [1, 2, 3, 3, 3, 3]

# %% [markdown]
# `window(2)` is the token itself and the *two others* before it, three keys in total.
# Libraries differ in whether a window size includes the query itself: a common
# off-by-one error.
#
# ## Packed documents
#
# To train without padding, short documents are concatenated into one sequence. `same`
# separates them: a query may attend to keys with the same document id.

# %%
documents = np.array([0, 0, 0, 1, 1, 2])
mask = causal() & same(documents)
print(draw_mask(mask, 6))
by_hand = np.tril(documents[:, None] == documents[None, :])
assert (mask.dense((6, 6)) == by_hand).all()

# %% Causal, within a document
if find_spec("matplotlib"):
    figure = plot_mask(mask, 6)

# %% [markdown]
# If the ids are right, each document gets the same result as alone:

# %%
x = np.random.default_rng(0).normal(size=(6, 4))
packed = regard.attention(x, x, x, mask).out
for at in (slice(0, 3), slice(3, 5), slice(5, 6)):
    assert np.allclose(packed[at], regard.attention(x[at], x[at], x[at], causal()).out)

# %% [markdown]
# ## Anything else
#
# `where` takes any function of batch, head, query and key. `padding` takes the actual
# lengths of the sequences in a batch.

# %%
every_second = where(lambda _b, _h, q, k: (q - k) % 2 == 0)
print(draw_mask(causal() & every_second, 6))
lengths = padding(lengths=np.array([6, 4]))
assert lengths.dense((2, 1, 6, 6))[:, 0, 0].sum(-1).tolist() == [6, 4]
assert (~causal()).dense((3, 3)).sum() == 3  # the future

# %% [markdown]
# ## Proofs for whole tiles
#
# Divide the matrix into tiles. For most tiles, the formula can prove that no cell is
# allowed, or that all are, without evaluating a single one. The former are skipped, the
# latter need no mask. This is why a formula is faster than a mask array.

# %%
long = np.arange(131_072) // 30_000
tiles = (causal() & window(24_575) & same(long)).tiles((131_072, 131_072), block=8_192)
print(tiles)
drawn = str(tiles)
assert drawn.count("·") > 200  # of 256 tiles

# %% [markdown]
# ## What is refused
#
# A mask of 0 and 1 could be boolean or additive. Two queries over six keys could be the
# first two or the last two. In regard you have to say which, and the error message
# tells you how; a wrong guess would raise no error and give wrong numbers.

# %%
refused = []
for given in (
    lambda: regard.attention(x, x, x, np.tril(np.ones((6, 6)))),
    lambda: regard.attention(x[4:], x, x, causal()),
):
    try:
        given()
    except RegardError as error:
        refused.append(type(error))
        print(f"{error}\n")
assert refused == [MaskError, PositionError]
last = regard.attention(x[4:], x, x, causal(), q_start=4).out
assert np.allclose(last, regard.attention(x, x, x, causal()).out[4:])

# %% [markdown]
# Exercises (`regard learn`): `mask_algebra`.
