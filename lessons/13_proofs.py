# %% [markdown]
# # 13. Masks that prove whole tiles
#
# Lesson 5 wrote masks as formulas. A kernel works on tiles, say of 128 queries and 128
# keys. If the mask can prove that a tile is *empty* (no cell is allowed), the tile is
# skipped; if the tile is *full*, no mask is evaluated in it. Only the mixed tiles cost
# more.
#
# ## A proof looks at the corners
#
# The causal mask allows k <= q. In a tile with queries q_first … q_last and keys
# k_first … k_last, the most favourable cell is the last query with the first key. If
# even that one is not allowed, none is. If the least favourable one is, all are.

# %%
from dataclasses import dataclass

import numpy as np

import regard
from regard.masks.algebra import Mask
from regard.masks.tiles import Edges, Proof
from regard.show.terminal_map import draw_mask


def prove_causal(
    q_first: int, q_last: int, k_first: int, k_last: int
) -> tuple[bool, bool]:
    """Return whether a tile of the causal mask is empty, and whether it is full."""
    return q_last < k_first, q_first >= k_last


assert prove_causal(0, 3, 4, 7) == (True, False)  # all in the future
assert prove_causal(4, 7, 0, 3) == (False, True)  # all in the past
assert prove_causal(4, 7, 4, 7) == (False, False)  # on the diagonal: mixed

# %% [markdown]
# `mask.tiles` asks for all tiles at once: `·` is proved empty, `■` proved full, and `▒`
# is not decided.

# %%
print(regard.causal().tiles((16, 16), block=4))

# %% [markdown]
# ## Proofs combine
#
#     a & b    empty if either is, full if both are
#     a | b    full if either is, empty if both are
#     ~a       empty and full are swapped
#
# So a long formula is proved from its parts. What the rules cannot decide stays
# undecided. That costs time, but it is never wrong. A wrong proof would give wrong
# numbers.

# %%
mask = regard.causal() & regard.window(5)
print(mask.tiles((16, 16), block=4))
empty = np.array([list(row) for row in str(mask.tiles((16, 16), block=4)).split()])
cells = mask.dense((16, 16)).reshape(4, 4, 4, 4).swapaxes(1, 2)
assert not cells[empty == "·"].any()
assert cells[empty == "■"].all()

# %% [markdown]
# ## A mask of your own
#
# `regard.where(fn)` takes any predicate, but it knows nothing of tiles: all of them are
# undecided. A subclass of `Mask` adds the proof. Here a query may see only keys at a
# distance of at least `gap`, such as a model that must not copy its neighbours.


# %%
@dataclass(frozen=True)
class Gap(Mask):
    """The key is at least `gap` tokens before the query."""

    gap: int

    @property
    def positional(self) -> bool:
        """True: it compares positions."""
        return True

    def __call__(self, b: object, h: object, q: np.ndarray, k: np.ndarray) -> object:
        return q - k >= self.gap

    def prove(self, edges: Edges) -> Proof:
        """Compare the largest and the smallest distance of each tile."""
        largest = edges.q_last - edges.k_first
        smallest = edges.q_first - edges.k_last
        return Proof(empty=largest < self.gap, full=smallest >= self.gap)


print(draw_mask(Gap(3), 8))
unproved = regard.where(lambda _b, _h, q, k: q - k >= 3)
assert str(unproved.tiles((16, 16), block=4)).count("▒") == 16
print(Gap(3).tiles((16, 16), block=4))
assert str(Gap(3).tiles((16, 16), block=4)).count("▒") == 7

# %% [markdown]
# It combines with other masks, and attention gives the same result tile by tile:

# %%
x = np.random.default_rng(0).normal(size=(16, 4))
mine = Gap(3) & regard.same(np.arange(16) // 10)
whole = regard.attention(x, x, x, mine.dense((16, 16))).out
assert np.allclose(regard.attention(x, x, x, mine, block=4).out, whole)

# %% [markdown]
# Exercises (`regard learn`): `tile_proofs`.
