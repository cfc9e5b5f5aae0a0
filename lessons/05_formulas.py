# %% [markdown]
# # 5. Masks as formulas
#
# A mask for N tokens has N² cells: at 131,072 tokens that is 17 billion, for a rule
# that fits into a few words. So write the rule. A formula answers for a query at
# position q and a key at position k, and formulas combine: `&` and, `|` or, `~` not.

# %%
from importlib.util import find_spec

import numpy as np

import regard
from regard import causal, padding, same, where, window
from regard.errors import MaskError, PositionError, RegardError
from regard.show.figure import plot_mask
from regard.show.text import draw_mask

print(draw_mask(causal(), 6))
print(draw_mask(causal() & window(2), 6))
near = (causal() & window(2)).dense((6, 6))
assert near.sum(-1).tolist() == [1, 2, 3, 3, 3, 3]

# %% [markdown]
# `window(2)` is itself and the *two others* before it, three keys in all. Whether a
# window counts the query itself differs between libraries, and is a common error by
# one.
#
# ## Packed documents
#
# To train without waste, short documents are put one after the other into one sequence.
# `same` keeps them apart: a query sees the keys that carry its number.

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
# If the numbers are right, each document is computed as if it were alone:

# %%
x = np.random.default_rng(0).normal(size=(6, 4))
packed = regard.attention(x, x, x, mask).out
for at in (slice(0, 3), slice(3, 5), slice(5, 6)):
    assert np.allclose(packed[at], regard.attention(x[at], x[at], x[at], causal()).out)

# %% [markdown]
# ## Anything else
#
# `where` takes any function of batch, head, query and key. `padding` says how long the
# sequences of a batch really are.

# %%
every_second = where(lambda _b, _h, q, k: (q - k) % 2 == 0)
print(draw_mask(causal() & every_second, 6))
lengths = padding(lengths=np.array([6, 4]))
assert lengths.dense((2, 1, 6, 6))[:, 0, 0].sum(-1).tolist() == [6, 4]
assert (~causal()).dense((3, 3)).sum() == 3  # what the causal mask hides

# %% [markdown]
# ## A rule can be asked about whole tiles
#
# Cut the square into tiles. For most of them the rule can prove that no cell is
# allowed, or that all are, without looking at a single one. The first are skipped, the
# second need no mask. This is why a formula is fast where a table is slow.

# %%
long = np.arange(131_072) // 30_000
tiles = (causal() & window(24_575) & same(long)).tiles((131_072, 131_072), block=8_192)
print(tiles)
drawn = str(tiles)
assert drawn.count("·") > 200  # of 256 tiles

# %% [markdown]
# ## What is refused
#
# A mask of 0 and 1 could mean "allowed", or numbers to add. Two queries over six keys
# could be the first two or the last two. Here one has to say which, and the message
# tells how; a guess would give no error, only wrong numbers.

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
