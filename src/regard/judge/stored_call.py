"""Call a kernel that stores tokens packed, in pages or in a cache.

    form.leaves(inputs)         q, k, v (B, H, N, D) as the function stores them
    form.read_out(x, inputs)    out (B, H, Nq, Dv); 0 where a sequence has no query

Memory that no sequence owns holds numbers that would be noticed in out, or NaN: slots
after the last key, pages of nobody, entries of the table after the last page.

Next: subject.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.errors import OptionError
from regard.judge.array_libraries import ArrayLibrary
from regard.judge.convention import Attention, Convention
from regard.judge.inputs import CallFailedError, Inputs, NotAskedError, Numbers
from regard.judge.layout import arrange_axes, restore
from regard.judge.storage import Storage

SPARE = 3  # slots of a cache, and pages, that no sequence owns


class StoredCall:
    """A function of q and of stored keys and values."""

    arrays: tuple[str, str, str] = ("q", "k", "v")
    written: tuple[str, ...] = ()  # arguments that the call may change

    def __init__(
        self, fn: Attention, convention: Convention, library: ArrayLibrary
    ) -> None:
        self.fn, self.convention, self.library = fn, convention, library
        assert convention.storage is not None
        self.storage: Storage = convention.storage

    def describe(self, inputs: Inputs) -> dict[str, Any]:
        """Return the integer arguments that describe the storage, by role."""
        raise NotImplementedError

    def leaves(self, inputs: Inputs) -> list[Numbers]:
        """Return q and the stored keys and values."""
        raise NotImplementedError

    def run(
        self,
        leaves: Sequence[Any],
        inputs: Inputs,
        keywords: dict[str, Any],
        precision: str,
    ) -> Any:
        """Call the function."""
        given = dict(keywords)
        for role, x in self.describe(inputs).items():
            name = getattr(self.storage, role)
            if name is not None:
                is_array = isinstance(x, np.ndarray)
                given[name] = self.make_integers(x) if is_array else x
        leaves = self.library.spread_all(leaves, inputs.strides)
        return self.fn(*leaves, **given)

    def make_integers(self, x: NDArray[Any]) -> Any:
        """Return an int32 array of the function's library."""
        return self.library.make(x, "int32", self.convention.device)

    def add_leaves(self, inputs: Inputs) -> dict[str, Numbers]:
        """Return further arrays by the names of their arguments."""
        return {}

    def read_out(self, x: Numbers, inputs: Inputs) -> Numbers:
        """Return (B, H, Nq, Dv)."""
        layout = self.convention.out_layout or self.convention.layout
        return restore(x, layout, (*inputs.q.shape[:3], inputs.v.shape[-1]))

    def read_gradient(self, x: Numbers, shape: tuple[int, ...]) -> Numbers:
        """Raise: only packed tokens have gradients."""
        raise NotAskedError("a cache has no gradients")

    def lay_out(self, x: Numbers, inputs: Inputs) -> Numbers:
        """Return x (B, H, Nq, Dv) as out is stored."""
        return arrange_axes(x, self.convention.out_layout or self.convention.layout)


class PackedCall(StoredCall):
    """Sequences one after the other, without padding."""

    def describe(self, inputs: Inputs) -> dict[str, Any]:
        """Return where sequences begin, and the longest lengths."""
        n_q, n_k = np.asarray(inputs.read_lengths()).T
        if self.storage.cu_k is None and (n_q != n_k).any():
            raise NotAskedError("it takes as many keys as queries")
        cu_q, cu_k = (np.concatenate([[0], np.cumsum(n)]) for n in (n_q, n_k))
        longest = {"max_q": int(n_q.max()), "max_k": int(n_k.max())}
        return {"cu_q": cu_q, "cu_k": cu_k, **longest}

    def leaves(self, inputs: Inputs) -> list[Numbers]:
        """Return q, k and v without padding."""
        n_q, n_k = zip(*inputs.read_lengths(), strict=True)
        pairs = ((inputs.q, n_q), (inputs.k, n_k), (inputs.v, n_k))
        return [self.pack(x, lengths) for x, lengths in pairs]

    def pack(self, x: Numbers, lengths: Sequence[int]) -> Numbers:
        """Join the sequences of x (B, H, N, D) along the tokens."""
        joined = np.concatenate([x[b, :, :n] for b, n in enumerate(lengths)], 1)
        return joined.swapaxes(0, 1) if self.convention.layout == "bnhd" else joined

    def unpack(self, x: Numbers, lengths: Sequence[int], shape: Any) -> Numbers:
        """Return packed tokens as (B, H, N, D), 0 after the end of a sequence."""
        _, heads, _, width = shape
        out = np.zeros(shape)
        total, is_first = sum(lengths), self.convention.layout == "bnhd"
        expected = (total, heads, width) if is_first else (heads, total, width)
        if x.shape != expected:
            raise CallFailedError(f"out has shape {x.shape}, expected {expected}.")
        joined = x.swapaxes(0, 1) if is_first else x
        first = 0
        for b, n in enumerate(lengths):
            out[b, :, :n] = joined[:, first : first + n]
            first += n
        return out

    def read_out(self, x: Numbers, inputs: Inputs) -> Numbers:
        """Return (B, H, Nq, Dv)."""
        shape = (*inputs.q.shape[:3], inputs.v.shape[-1])
        return self.unpack(x, [n for n, _ in inputs.read_lengths()], shape)

    def read_gradient(self, x: Numbers, shape: tuple[int, ...]) -> Numbers:
        """Return (B, H, N, D)."""
        return self.unpack(x, [shape[2]] * shape[0], shape)

    def lay_out(self, x: Numbers, inputs: Inputs) -> Numbers:
        """Return x (B, H, Nq, Dv) without padding."""
        return self.pack(x, [n for n, _ in inputs.read_lengths()])


class PagedCall(StoredCall):
    """Keys and values in pages, in any order; a table lists those of a sequence."""

    arrays = ("q", "k_cache", "v_cache")

    def describe(self, inputs: Inputs) -> dict[str, Any]:
        """Return the table and the number of keys of each sequence."""
        lengths = np.asarray([n for _, n in inputs.read_lengths()])
        return {"table": self.place_pages(lengths), "lengths": lengths}

    def place_pages(self, lengths: NDArray[Any]) -> NDArray[Any]:
        """Return the table (B, pages): one page each in turn, from the last one down.

        Entries after the last page of a sequence name page 0, which is nobody's.
        """
        needed = -(-lengths // self.storage.page)
        table = np.zeros((len(lengths), max(1, int(needed.max()))), np.int64)
        used = np.arange(table.shape[1]) < needed[:, None]
        pages = np.arange(int(needed.sum()) + SPARE)[: SPARE - 1 : -1]
        table.T[used.T] = pages
        return table

    def leaves(self, inputs: Inputs) -> list[Numbers]:
        """Return q, and the pages of k and v."""
        lengths = np.asarray([n for _, n in inputs.read_lengths()])
        table, size = self.place_pages(lengths), self.storage.page
        count = int((-(-lengths // size)).sum()) + SPARE
        pages = []
        for x in (inputs.k, inputs.v):
            batch, heads, _, width = x.shape
            store = np.full((count, heads, size, width), inputs.strange, np.float64)
            for b in range(batch):
                for j in range(int(lengths[b])):
                    store[table[b, j // size], :, j % size] = x[b, :, j]
            pages.append(arrange_axes(store, self.convention.layout))
        return [arrange_axes(inputs.q, self.convention.layout), *pages]


class CachedCall(StoredCall):
    """A cache to which the call adds the keys and values of the new tokens."""

    arrays = ("q", "k_cache", "v_cache")
    written = ("k_cache", "v_cache")

    def __init__(
        self, fn: Attention, convention: Convention, library: ArrayLibrary
    ) -> None:
        super().__init__(fn, convention, library)
        if convention.library == "jax":
            raise OptionError(
                "JAX arrays cannot be changed in place, expected a function of NumPy "
                "or PyTorch arrays. Check the attention without the cache instead."
            )

    def describe(self, inputs: Inputs) -> dict[str, Any]:
        """Return the number of keys that the cache holds before the call."""
        if any(n > m for n, m in inputs.read_lengths()):
            raise NotAskedError("it adds as many keys as there are queries")
        return {"lengths": np.asarray([m - n for n, m in inputs.read_lengths()])}

    def leaves(self, inputs: Inputs) -> list[Numbers]:
        """Return q and the caches before the call."""
        caches = self.fill_caches(inputs, new=False)
        return [arrange_axes(x, self.convention.layout) for x in (inputs.q, *caches)]

    def fill_caches(self, inputs: Inputs, *, new: bool) -> list[Numbers]:
        """Return the caches (B, Hk, capacity, D) with or without the new tokens."""
        spare = 0 if inputs.full else SPARE
        caches = []
        for x in (inputs.k, inputs.v):
            batch, heads, n_k, width = x.shape
            store = np.full(
                (batch, heads, n_k + spare, width), inputs.strange, np.float64
            )
            for b, (n, m) in enumerate(inputs.read_lengths()):
                last = m if new else m - n
                store[b, :, :last] = x[b, :, :last]
            caches.append(store)
        return caches

    def add_leaves(self, inputs: Inputs) -> dict[str, Numbers]:
        """Return the new keys and values."""
        self.describe(inputs)
        found = {}
        for name, x in ((self.storage.k, inputs.k), (self.storage.v, inputs.v)):
            new = [x[b, :, m - n : m] for b, (n, m) in enumerate(inputs.read_lengths())]
            found[str(name)] = arrange_axes(np.stack(new), self.convention.layout)
        return found

    def read_caches(self, leaves: Sequence[Any], inputs: Inputs) -> list[Numbers]:
        """Return the caches after a call, as (B, Hk, capacity, D)."""
        shapes = [x.shape for x in self.fill_caches(inputs, new=True)]
        pairs = zip(leaves[1:], shapes, strict=True)
        layout = self.convention.layout
        return [restore(self.library.read(x), layout, s, "cache") for x, s in pairs]


CALLS = {"varlen": PackedCall, "paged": PagedCall, "cache": CachedCall}
