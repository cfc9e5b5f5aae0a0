"""A mask that proves whole tiles

A kernel works tile by tile. If a mask can prove that a tile is empty (no cell is
allowed), the tile is skipped; if it is full, it needs no mask. The proof reads only the
edges of a tile, so a tile of a million cells costs as much as a tile of one.

The mask of this exercise cuts the text into chunks of `size` tokens. A query may see a
key that is not in the future, and in its own chunk or one of the `back` chunks before:

    k <= q   and   q // size - k // size <= back

A tile has the queries `q_first … q_last` and the keys `k_first … k_last`, ends
included. With `size = 4` and `back = 1`, the tile of queries 8 … 11 is empty for the
keys 0 … 3, which are two chunks back, and full for 4 … 7.

Distances are largest and smallest at the corners of a tile, because the chunk number
never decreases. Prove both parts, then combine them as the mask algebra does: `a & b`
is empty if either is empty, and full if both are full.

Write `prove_tiles(q_first, q_last, k_first, k_last, size, back)`: the tuple `empty,
full` of boolean arrays `(N, M)`. The queries are `(N, 1)`, the keys `(1, M)`. You are
judged by all cells of every tile. Then your proof becomes a mask of regard, and
attention runs on it.

Next: ring.py
"""

import tracemalloc

import numpy as np

from regard.definition.attention import attention
from regard.masks.algebra import Mask
from regard.masks.patterns import same
from regard.masks.tiles import Proof

NAME = "prove_tiles"
MINUTES = 18
NEEDS = ("mask_algebra",)
EXTRA = ""
STUB = '''import numpy as np


def prove_tiles(q_first, q_last, k_first, k_last, size, back):
    """Return which tiles are empty and which are full, each (N, M), as booleans."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "The latest query and the first key are farthest apart; q_first and k_last are "
    "nearest. Decide each of the four questions with one of these two corners.",
    "All of a tile is in the future if k_first > q_last; none of it if k_last <= "
    "q_first.",
    "nearest = q_first // size - k_last // size; the tile is empty if k_first > q_last "
    "or nearest > back.",
)


def spec(q_first, q_last, k_first, k_last, size, back):
    empty, full = np.zeros((2, len(q_first), k_first.shape[1]), dtype=bool)
    for i in range(len(q_first)):
        for j in range(k_first.shape[1]):
            cells = [
                k <= q and q // size - k // size <= back
                for q in range(q_first[i, 0], q_last[i, 0] + 1)
                for k in range(k_first[0, j], k_last[0, j] + 1)
            ]
            empty[i, j] = not any(cells)
            full[i, j] = all(cells)
    return empty, full


def reference(q_first, q_last, k_first, k_last, size, back):
    nearest = q_first // size - k_last // size
    farthest = q_last // size - k_first // size
    empty = (k_first > q_last) | (nearest > back)
    full = (k_last <= q_first) & (farthest <= back)
    return empty, full


def draw(rng):
    yield lay(cut(0, 8, 4), cut(0, 8, 4), 4, 0)
    yield lay(cut(8, 12, 4), cut(0, 12, 4), 4, 1)
    yield lay(cut(0, 12, 3), cut(0, 12, 3), 4, 1)
    yield lay(cut(3, 10, 2), cut(0, 13, 5), 3, 0)
    yield lay(cut(0, 18, 1), cut(0, 18, 1), 5, 1)
    yield lay(cut(7, 40, 6), cut(0, 47, 9), 5, 2)
    yield lay(cut(0, 36, 2), cut(0, 36, 2), 1, 3)
    yield lay(cut(0, 60, 7), cut(0, 60, 11), 18, 1)
    yield lay(cut(40, 400, 20), cut(0, 400, 20), 19, 18)
    for _ in range(3):  # the same shapes, other tiles
        yield lay(scatter(rng, 9), scatter(rng, 1), 3, 1)
    for size, back in ((1, 0), (2, 3), (5, 1), (18, 0), (3, int(rng.integers(4)))):
        yield lay(scatter(rng, 20), scatter(rng, 20), size, back)


def lay(queries, keys, size, back):
    columns, rows = (x[:, None] for x in queries), (x[None] for x in keys)
    return *columns, *rows, size, back


def cut(start, stop, block):
    firsts = np.arange(start, stop, block)
    return firsts, np.minimum(firsts + block, stop) - 1


def scatter(rng, n):
    firsts = rng.integers(40, size=n)
    return firsts, firsts + rng.integers(9, size=n)


class ChunkMask(Mask):
    """The mask of the exercise, with the proof of a learner."""

    def __init__(self, fn, size, back):
        self.fn, self.size, self.back = fn, size, back

    @property
    def positional(self):
        return True

    def __call__(self, b, h, q, k):
        return (k <= q) & (q // self.size - k // self.size <= self.back)

    def prove(self, edges):
        queries, keys = edges[:2], edges[2:]
        columns, rows = (x.reshape(-1, 1) for x in queries), (x[0, 0] for x in keys)
        empty, full = self.fn(*columns, *rows, self.size, self.back)
        return Proof(*(np.asarray(x)[None, None] for x in (empty, full)))


def check(fn, rng):
    """Run attention on the proofs, and measure the memory of a proof."""
    x, documents = rng.normal(size=(60, 4)), np.arange(60) // 25
    mask = ChunkMask(fn, 5, 2) & same(documents)
    found = attention(x, x, x, mask, block=8).out
    if not np.allclose(found, attention(x, x, x, mask).out):
        return "As a mask of regard, combined with same(documents), it is not right."
    edges = lay(cut(0, 4000, 2000), cut(0, 4000, 2000), 100, 3)
    tracemalloc.start()
    try:
        fn(*edges)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    if most > 1e6:
        return (
            f"The proof is right, but for four tiles of 2000 × 2000 cells it took "
            f"{most / 1e6:.0f} MB: use the corners, and evaluate no cells."
        )
    kinds = mask.tiles((60, 60), block=8).kinds
    print(  # noqa: T201 (shown to the learner)
        f"As a mask of regard, your proof skips {(kinds == 0).sum()} of {kinds.size} "
        "tiles, and attention is the same."
    )
    return None


def mistake_either_is_full(q_first, q_last, k_first, k_last, size, back):
    """A tile counts as full if one of the two parts is: for a & b, both must be."""
    empty, _ = reference(q_first, q_last, k_first, k_last, size, back)
    farthest = q_last // size - k_first // size
    return empty, (k_last <= q_first) | (farthest <= back)


def mistake_both_are_empty(q_first, q_last, k_first, k_last, size, back):
    """A tile counts as empty only if both parts are: for a & b, one is enough."""
    _, full = reference(q_first, q_last, k_first, k_last, size, back)
    nearest = q_first // size - k_last // size
    return (k_first > q_last) & (nearest > back), full


def mistake_corners_swapped(q_first, q_last, k_first, k_last, size, back):
    """The two corners are swapped. q_first and k_last are nearest, and prove a tile
    empty; q_last and k_first are farthest, and prove it full."""
    return reference(q_last, q_first, k_last, k_first, size, back)


def mistake_not_empty_is_full(q_first, q_last, k_first, k_last, size, back):
    """A tile that is not empty is called full, but it may be mixed: prove full from
    the farthest corner, on its own."""
    empty, _ = reference(q_first, q_last, k_first, k_last, size, back)
    return empty, ~empty


def mistake_first_cell(q_first, q_last, k_first, k_last, size, back):
    """This decides a tile by one of its cells: use the nearest corner for empty and the
    farthest for full."""
    allowed = (k_first <= q_first) & (q_first // size - k_first // size <= back)
    return ~allowed, allowed


def mistake_distance(q_first, q_last, k_first, k_last, size, back):
    """This compares distances in tokens. Chunks have fixed borders: compare q // size
    with k // size."""
    reach = back * size
    empty = (k_first > q_last) | (q_first - k_last > reach)
    return empty, (k_last <= q_first) & (q_last - k_first <= reach)


def mistake_future_forgotten(q_first, q_last, k_first, k_last, size, back):
    """The rule k <= q is missing: a tile with k_first > q_last is empty, and one with
    k_last > q_first is not full."""
    nearest = q_first // size - k_last // size
    return nearest > back, q_last // size - k_first // size <= back


def mistake_strict(q_first, q_last, k_first, k_last, size, back):
    """The borders are off by one: a query sees itself, so k <= q, and exactly back
    chunks before its own, so <= back."""
    nearest = q_first // size - k_last // size
    farthest = q_last // size - k_first // size
    empty = (k_first >= q_last) | (nearest >= back)
    return empty, (k_last < q_first) & (farthest < back)


def mistake_nothing_proved(q_first, q_last, k_first, k_last, size, back):
    """No tile is proved empty or full: compare the nearest and the farthest corner with
    both rules."""
    nothing = np.zeros((len(q_first), k_first.shape[1]), bool)
    return nothing, nothing
