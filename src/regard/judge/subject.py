"""The attention under test: translate the inputs, call it, translate the results.

    subject = Subject(fn, convention, limit=10)
    subject.ask(inputs).out                         (B, H, Nq, Dv), float64, NumPy

CallFailedError is raised if the function raises, hangs or returns something invalid,
NotAskedError if the convention cannot express the inputs.

Next: case.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.judge.array_libraries import LIBRARIES, NO_GRADIENT, ArrayLibrary
from regard.judge.convention import (
    Attention,
    Convention,
    check_arguments,
    read_required,
)
from regard.judge.inputs import (
    END,
    CallFailedError,
    Inputs,
    NotAskedError,
    Numbers,
    compute_allowed,
)
from regard.judge.layout import arrange_axes, arrange_mask, restore
from regard.judge.projection import Projected
from regard.judge.stored_call import CALLS, CachedCall, StoredCall
from regard.judge.time_limit import call_within


@dataclass(frozen=True, eq=False)
class Answer:
    """The result of one call, in the axes of the definition."""

    out: Numbers  # (B, H, Nq, Dv)
    weights: Numbers | None  # (B, H or 1 if averaged, Nq, Nk)
    lse: Numbers | None  # (B, H, Nq)
    dtypes: dict[str, str]
    changed: tuple[str, ...]  # arguments that the call modified
    caches: tuple[Numbers, ...] = ()  # k and v after a call that writes to them
    reread: Callable[[], Answer] | None = None  # read the same result again


class Direct:
    """A function of q, k and v."""

    arrays = ("q", "k", "v")
    written: tuple[str, ...] = ()  # arguments that the call may change

    def __init__(
        self, fn: Attention, convention: Convention, library: ArrayLibrary
    ) -> None:
        self.fn, self.convention, self.library = fn, convention, library

    def leaves(self, inputs: Inputs) -> list[Numbers]:
        """Return q, k and v in the function's layout."""
        layout = self.convention.layout
        return [arrange_axes(x, layout) for x in (inputs.q, inputs.k, inputs.v)]

    def run(
        self,
        leaves: Sequence[Any],
        inputs: Inputs,
        keywords: dict[str, Any],
        precision: str,
    ) -> Any:
        """Call the function."""
        q, k, v = self.library.spread_all(leaves, inputs.strides)
        order = (q, v, k) if self.convention.order == "qvk" else (q, k, v)
        return self.fn(*order, **keywords)

    def read_out(self, x: Numbers, inputs: Inputs) -> Numbers:
        """Return (B, H, Nq, Dv)."""
        layout = self.convention.out_layout or self.convention.layout
        return restore(x, layout, (*inputs.q.shape[:3], inputs.v.shape[-1]))

    def read_gradient(self, x: Numbers, shape: tuple[int, ...]) -> Numbers:
        """Return (B, H, N, D)."""
        return restore(x, self.convention.layout, shape, "a gradient")


class Subject:
    """A function or module, its convention, and a time limit per call."""

    def __init__(
        self, fn: Attention, convention: Convention, *, limit: float = 10
    ) -> None:
        check_arguments(fn, convention)
        self.convention, self.limit = convention, limit
        self.required = read_required(fn)
        self.library = LIBRARIES[convention.library]
        self.form = make_form(fn, convention, self.library)
        self.offered = convention.precisions or self.library.precisions
        self.precisions = self.offered  # those that are judged, best first
        self.computes = {dtype: dtype for dtype in self.offered}
        self.declared = convention  # as opposed to what is observed
        self.doubted: set[str] = set()  # cases that failed, or that wait for one

    def ask(self, inputs: Inputs, precision: str | None = None) -> Answer:
        """Call the function once, with inputs rounded to a precision."""
        precision = precision or self.precisions[0]
        order = order_heads(inputs, self.convention)
        inputs = take_heads(inputs, order)
        leaves, keywords = self.express(inputs, precision)
        if inputs.strides and not self.library.strided:
            raise NotAskedError("arrays of this library have no strides")
        given = dict(zip(self.form.arrays, leaves, strict=True))
        given |= {n: x for n, x in keywords.items() if self.library.owns(x)}
        before = {name: self.library.read(x).copy() for name, x in given.items()}
        found = call_within(
            self.limit, lambda: self.form.run(leaves, inputs, keywords, precision)
        )
        changed = tuple(
            name
            for name, x in given.items()
            if name not in self.form.written
            and not np.array_equal(self.library.read(x), before[name], equal_nan=True)
        )

        def reread() -> Answer:
            answer, kept = self.read(found, inputs, changed), {}
            for name in ("out", "weights", "lse"):
                x = getattr(answer, name)  # averaged weights have a single head
                if x is not None and x.shape[1] > 1:
                    kept[name] = x[:, np.argsort(order)]
            if isinstance(self.form, CachedCall):
                kept["caches"] = tuple(self.form.read_caches(leaves, inputs))
            return replace(answer, **kept)

        return replace(reread(), reread=reread)

    def ask_gradients(
        self, inputs: Inputs, g: Numbers, precision: str | None = None
    ) -> tuple[Numbers, ...]:
        """Return the gradients of sum(out · g) for q, k and v."""
        if self.convention.library == "numpy" or self.convention.gradients is False:
            raise NotAskedError("it has no gradients")
        precision = precision or self.precisions[0]
        order = order_heads(inputs, self.convention)
        inputs, g = take_heads(inputs, order), np.take(g, order, 1)
        leaves, keywords = self.express(inputs, precision)

        def out(*arrays: Any) -> Any:
            found = self.form.run(arrays, inputs, keywords, precision)
            return self.unpack(found, inputs)["out"]

        def work() -> Any:
            shape = self.library.read(out(*leaves)).shape
            stored = isinstance(self.form, StoredCall)
            laid = (
                self.form.lay_out(g, inputs) if stored else self.lay_out(g, shape)  # type: ignore[union-attr]
            )
            beside = self.make(laid, precision)
            given = (inputs.backward, inputs.only)
            return self.library.differentiate(out, leaves, beside, *given)

        try:
            found = [self.library.read(x) for x in call_within(self.limit, work)]
        except CallFailedError as trouble:
            if self.convention.gradients or NO_GRADIENT not in str(trouble):
                raise
            raise NotAskedError(NO_GRADIENT) from None
        shapes = [x.shape for x in (inputs.q, inputs.k, inputs.v)]
        pairs = zip(found, shapes, strict=True)
        d_q, d_k, d_v = (self.form.read_gradient(x, shape) for x, shape in pairs)
        return d_q[:, np.argsort(order)], d_k, d_v

    def lay_out(self, g: Numbers, shape: tuple[int, ...]) -> Numbers:
        """Return g (B, H, Nq, Dv) in the layout and shape of out."""
        layout = self.convention.out_layout or self.convention.layout
        if not self.convention.projections:
            return arrange_axes(g, layout)
        flat = arrange_axes(g, layout.replace("e", "(hd)"))
        return np.pad(
            flat, [(0, n - m) for n, m in zip(shape, flat.shape, strict=True)]
        )

    def make(self, x: Any, precision: str | None) -> Any:
        """Return x as an array of the function's library."""
        return self.library.make(x, precision, self.convention.device)

    def express(
        self, inputs: Inputs, precision: str
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arrays and keyword arguments of the function for these inputs."""
        words = self.convention
        check_declared_sizes(inputs, words)
        named: dict[str, Any] = dict(words.fixed)
        if words.heads:
            named[words.heads] = inputs.q.shape[1]
        for name in ("scale", "softcap", "sink", "look"):
            value = getattr(inputs, name)
            if value is not None:
                value = self.make(value, precision) if name == "sink" else value
                named[name_argument(words, name)] = value
        rest = self.say_positions(inputs, named)
        if rest.literal is not None:
            named[name_argument(words, "mask")] = self.make(rest.literal, None)
        self.say_mask(rest, named, precision)
        self.say_required(inputs, named)
        for role in {"mask", "bias"} & set(inputs.strides):
            name = getattr(words, role)
            if named.get(name) is not None:
                named[name] = self.library.spread(named[name], inputs.strides[role])
        if isinstance(self.form, StoredCall):
            added = self.form.add_leaves(inputs).items()
            named |= {name: self.make(x, precision) for name, x in added}
        leaves = [self.make(x, precision) for x in self.form.leaves(inputs)]
        return leaves, named

    def say_required(self, inputs: Inputs, named: dict[str, Any]) -> None:
        """Set declared arguments without a default value to what changes nothing."""
        neutral = {"causal": False, "q_start": 0, "scale": inputs.q.shape[-1] ** -0.5}
        for role in ("mask", "causal", "q_start", "bias", "scale", "softcap", "sink"):
            name = getattr(self.convention, role)
            if name in self.required and name not in named:
                named[name] = neutral.get(role)

    def say_positions(self, inputs: Inputs, named: dict[str, Any]) -> Inputs:
        """Set the causal and window arguments; return what is left for a mask."""
        words = self.convention
        if inputs.window is not None:
            more = words.window_counts == "all"
            named[name_argument(words, "window")] = inputs.window + more
            inputs = replace(inputs, window=None)
        if not inputs.causal:
            return replace(inputs, lengths=None)  # the storage has them
        n_q, n_k = inputs.shape[2:]
        same = all(n == m for n, m in inputs.read_lengths())
        last = n_k - n_q if inputs.lengths is None else END
        ends = {"start": 0, "end": 0 if same else last}
        stands = ends.get(words.causal_from or "", 0 if same else None)
        if words.q_start and (words.causal or words.always_causal):
            named[words.q_start] = inputs.q_start
            stands = inputs.q_start
        if stands == inputs.q_start and (words.causal or words.always_causal):
            if not words.always_causal:
                named[words.causal or ""] = True
            return replace(inputs, causal=False, lengths=None)
        if words.mask is None or words.always_causal:
            what = "no causal argument" if not words.causal else "no q_start argument"
            raise NotAskedError(f"it has {what}")
        return inputs

    def say_mask(self, inputs: Inputs, named: dict[str, Any], precision: str) -> None:
        """Set the mask and bias arguments."""
        words, allowed, bias = self.convention, compute_allowed(inputs), inputs.bias
        added, axes = words.true_means == "added", words.axes_of_mask
        lay = partial(arrange_mask, axes=axes, shape=inputs.shape, narrow=inputs.narrow)
        if bias is not None and words.bias:
            named[words.bias] = self.make(lay(bias), precision)
            bias = None
        if bias is not None and not (words.mask and (added or words.float_mask)):
            raise NotAskedError("it has no bias argument")
        if allowed is None and bias is None:
            return
        name = name_argument(words, "mask")
        if allowed is None:
            allowed = np.ones((1, 1, 1, 1), bool)
        if added or bias is not None:
            numbers = np.where(allowed, 0.0 if bias is None else bias, -np.inf)
            named[name] = self.make(lay(numbers), precision)
        else:
            says = allowed if words.true_means == "attend" else ~allowed
            named[name] = self.make(lay(says), None)

    def read(self, found: Any, inputs: Inputs, changed: tuple[str, ...]) -> Answer:
        """Return the result of a call in the axes of the definition."""
        parts = self.unpack(found, inputs)
        numbers = {name: self.library.read(x) for name, x in parts.items()}
        dtypes = {name: str(x.dtype).split(".")[-1] for name, x in parts.items()}
        out = self.form.read_out(numbers["out"], inputs)
        batch, heads, n_q, n_k = inputs.shape
        weights, lse = numbers.get("weights"), numbers.get("lse")
        if weights is not None:
            shape = (batch, heads, n_q, n_k)
            weights = add_axes(weights, shape, "weights")
        if "mean_weights" in numbers:
            shape = (batch, 1, n_q, n_k)
            weights = add_axes(numbers["mean_weights"], shape, "weights")
        if lse is not None:
            lse = add_axes(lse, (batch, heads, n_q), "lse")
            lse = lse * math.log(2) if self.convention.lse_base == "2" else lse
        return Answer(out, weights, lse, dtypes, changed)

    def unpack(self, found: Any, inputs: Inputs) -> dict[str, Any]:
        """Return the arrays of a result by name."""
        out = getattr(found, "out", None)
        if out is not None:  # an object with named fields
            named = {n: getattr(found, n, None) for n in ("out", "weights", "lse")}
            found = {n: x for n, x in named.items() if x is not None}
        elif isinstance(found, tuple | list):
            found = self.name_parts(found, inputs)
        else:
            found = {"out": found}
        for name, x in found.items():
            if not self.library.owns(x):
                raise CallFailedError(
                    f"{name} is a {type(x).__name__}, expected an array of "
                    f"{self.convention.library}."
                )
        return dict(found)

    def name_parts(self, parts: Sequence[Any], inputs: Inputs) -> dict[str, Any]:
        """Name the parts of a tuple, as declared or by their shapes."""
        declared = self.convention.returns
        if declared is not None:
            if len(declared) != len(parts):
                raise CallFailedError(
                    f"it returned {len(parts)} values, the convention says {declared}."
                )
            pairs = zip(declared, parts, strict=True)
            return {n: x for n, x in pairs if n != "other" and x is not None}
        if not parts:
            raise CallFailedError("it returned nothing, expected out.")
        found = {"out": parts[0]}
        batch, heads, n_q, n_k = inputs.shape
        lead = [n for n in (batch, heads) if n > 1]
        kinds = [("weights", [n_q, n_k]), ("lse", [n_q])]
        for x in parts[1:]:
            shape = [n for n in getattr(x, "shape", ()) if n > 1]
            is_lse = getattr(x, "ndim", 0) == 1 + sum(
                a in "bh" for a in self.convention.layout
            )
            for name, axes in kinds[::-1] if is_lse else kinds:  # one key fits both
                many = getattr(x, "ndim", 0) >= len(axes)  # x may be None
                if shape == lead + [n for n in axes if n > 1] and many:
                    found.setdefault(name, x)
                    break
        return found


def make_form(
    fn: Attention, convention: Convention, library: ArrayLibrary
) -> Direct | Projected | StoredCall:
    """Return how the function is called."""
    if convention.storage is not None:
        return CALLS[convention.storage.kind](fn, convention, library)
    kind = Projected if convention.projections else Direct
    return kind(fn, convention, library)


def order_heads(inputs: Inputs, words: Convention) -> NDArray[np.int64]:
    """Return which head of the definition each head of the function is."""
    heads, shared = inputs.q.shape[1], inputs.k.shape[1]
    order = np.arange(heads)
    if words.head_order == "grouped" or heads % shared:
        return order
    return order.reshape(shared, heads // shared).T.ravel()


def take_heads(inputs: Inputs, order: NDArray[np.int64]) -> Inputs:
    """Return the inputs with the heads of the queries in another order."""
    taken: dict[str, Any] = {"q": np.take(inputs.q, order, 1)}  # contiguous
    for name in ("mask", "bias"):
        x = getattr(inputs, name)
        if x is not None and x.shape[1] > 1:
            taken[name] = np.take(x, order, 1)
    if inputs.sink is not None:
        taken["sink"] = inputs.sink[order]
    return replace(inputs, **taken)


def name_argument(words: Convention, name: str) -> str:
    """Return the function's name for an argument, or raise NotAskedError."""
    word: str | None = getattr(words, name)
    if word is None:
        raise NotAskedError(f"it has no {name} argument")
    return word


def check_declared_sizes(inputs: Inputs, words: Convention) -> None:
    """Raise NotAskedError for sizes that the convention excludes."""
    (_, heads, n_q, width), (_, shared, n_k, _) = inputs.q.shape, inputs.k.shape
    if heads != shared and not words.shared_heads:
        raise NotAskedError("its heads do not share keys")
    if n_q != n_k and (not words.other_lengths or words.order == "x"):
        raise NotAskedError("it takes as many keys as queries")
    if inputs.v.shape[-1] != width and not words.other_widths:
        raise NotAskedError("its values are as wide as its keys")


def add_axes(x: NDArray[Any], shape: tuple[int, ...], name: str) -> NDArray[Any]:
    """Reshape x by adding or removing axes of size 1; raise if it does not fit."""
    if [n for n in x.shape if n > 1] != [n for n in shape if n > 1]:
        raise CallFailedError(f"{name} has shape {x.shape}, expected {shape}.")
    return x.reshape(shape)
