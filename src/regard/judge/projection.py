"""Check modules that project their inputs.

A case has q, k and v, but a module takes x and has projection matrices. So x consists
of unit vectors, and q, k and v are written into the matrices:

    x = I    =>    x Wq = Wq = q       likewise for k and v; Wo = I returns out

Everything between the matrices is then checked like a function. Biases are 0 and Wo is
the identity, except in the cases about them.

Next: subject.py
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from regard.errors import OptionError
from regard.judge.array_libraries import ArrayLibrary
from regard.judge.convention import Attention, Convention, Projections
from regard.judge.inputs import CallFailedError, Inputs, NotAskedError, Numbers
from regard.judge.layout import arrange_axes


class Projected:
    """A module, or a function that takes its matrices as arguments."""

    arrays = ("q", "k", "v")
    written: tuple[str, ...] = ()  # arguments that the call may change

    def __init__(
        self, fn: Attention, convention: Convention, library: ArrayLibrary
    ) -> None:
        self.fn, self.convention, self.library = fn, convention, library
        where = convention.projections
        assert where is not None
        self.where: Projections = where
        self.names = [x for x in (where.qkv, where.q, where.k, where.v) if x]
        self.is_module = getattr(fn, "named_parameters", None) is not None
        self.sizes = self.measure()
        self.copies: dict[str, Any] = {}  # the module in each precision

    def measure(self) -> tuple[int, int]:
        """Return the width of x and the width of a head."""
        if not self.is_module:
            return 32, 8  # matrices that are arguments may have any size
        known = dict(self.fn.named_parameters())  # type: ignore[attr-defined]
        for name in (*self.names, self.where.out):
            if name is not None and name not in known:
                raise OptionError(
                    f'no parameter "{name}", expected one of {", ".join(known)}.'
                )
        shapes = [tuple(known[name].shape) for name in self.names]
        shape = shapes[0]
        if len(set(shapes)) > 1:
            raise OptionError(
                f"{', '.join(self.names)} have the shapes {shapes}, expected equal "
                "shapes. If heads share keys, check the function inside the module."
            )
        wide, high = shape if self.where.inputs_first else shape[::-1]
        n = high // 3 if self.where.qkv else high
        if n % self.where.heads:
            raise OptionError(
                f"{self.names[0]} gives {n} numbers, not a multiple of "
                f"{self.where.heads} heads."
            )
        return int(wide), int(n // self.where.heads)

    def leaves(self, inputs: Inputs) -> list[Numbers]:
        """Return Wq, Wk and Wv, each (width of x, heads · width of a head)."""
        found = []
        for x in (inputs.q, inputs.k, inputs.v):
            batch, heads, n, width = x.shape
            if batch * n > self.sizes[0]:
                raise NotAskedError(
                    f"it needs a module {batch * n} wide, this is {self.sizes[0]} wide"
                )
            if heads != self.where.heads or width != self.sizes[1]:
                raise NotAskedError("it needs other heads than those of the module")
            matrix = np.zeros((self.sizes[0], heads * width))
            matrix[: batch * n] = arrange_axes(x, "bn(hd)").reshape(batch * n, -1)
            found.append(matrix)
        return found

    def read_gradient(self, x: Numbers, shape: tuple[int, ...]) -> Numbers:
        """Return (B, H, N, D) from the gradient of a matrix."""
        batch, heads, n, width = shape
        rows = x[: batch * n].reshape(batch, n, heads, width)
        return rows.swapaxes(1, 2)

    def run(
        self,
        leaves: Sequence[Any],
        inputs: Inputs,
        keywords: dict[str, Any],
        precision: str,
    ) -> Any:
        """Call the module with its matrices replaced."""
        (batch, _, n_q, _), n_k = inputs.q.shape, inputs.k.shape[2]

        def make(x: Any) -> Any:
            return self.library.make(x, precision, self.convention.device)

        def states(n: int) -> Any:
            x = np.eye(self.sizes[0])[: batch * n].reshape(batch, 1, n, -1)
            letters = self.convention.layout.replace("e", "d")
            return make(arrange_axes(x, letters))

        offsets = self.draw_offsets(inputs) if inputs.written == "biased" else None
        if offsets is not None:
            leaves = [x - make(b) for x, b in zip(leaves, offsets, strict=True)]
        given = self.assemble(leaves, make, turned=inputs.written == "turned")
        x, context = states(n_q), states(n_k)
        calls = {"x": (x,), "xc": (x, context)}
        arguments = calls.get(self.convention.order, (x, context, context))
        if not self.is_module:
            return self.fn(*arguments, **given, **keywords)
        module = self.prepare(precision)
        given |= self.zero_biases(module, given, offsets, make)
        call = import_module("torch").func.functional_call
        return call(module, given, arguments, keywords)

    def assemble(self, leaves: Sequence[Any], make: Any, *, turned: bool) -> Any:
        """Return the matrices by name, in the order of the module."""
        where = self.where
        parts = list(leaves) if where.inputs_first else [w.T for w in leaves]
        if where.qkv:
            axis = -1 if where.inputs_first else 0
            xp = import_module("torch" if self.is_module else self.convention.library)
            xp = import_module("jax.numpy") if xp.__name__ == "jax" else xp
            parts = [xp.concatenate(parts, axis)]
        given = dict(zip(self.names, parts, strict=True))
        if where.out:
            matrix = self.hand_over(turned=turned)
            given[where.out] = make(matrix if where.inputs_first else matrix.T)
        return given

    def hand_over(self, *, turned: bool) -> Numbers:
        """Return Wo (heads · width, width of out): the identity, or it reversed."""
        n, wide = self.where.heads * self.sizes[1], self.sizes[0]
        if n > wide:
            raise NotAskedError(f"its heads are {n} wide together, its out only {wide}")
        matrix = np.eye(n, wide)
        return np.ascontiguousarray(matrix[::-1]) if turned else matrix

    def draw_offsets(self, inputs: Inputs) -> list[Numbers]:
        """Return random biases for q, k and v."""
        rng = np.random.default_rng(1)
        n = self.where.heads * self.sizes[1]
        there = self.biases(self.fn) if self.is_module else {}
        if not there:
            raise NotAskedError("its matrices have no biases")
        kept = [[name in there] for name in self.names]  # Whisper has none for keys
        return list(rng.normal(size=(3, n)) * kept)

    def biases(self, module: Any) -> dict[str, Any]:
        """Return the biases of the projections by the names of their matrices."""
        known = dict(module.named_parameters())
        pairs = {name: name.replace("weight", "bias") for name in self.names}
        return {name: known[b] for name, b in pairs.items() if b in known and b != name}

    def zero_biases(self, module: Any, given: Any, offsets: Any, make: Any) -> Any:
        """Return all biases by name: the given offsets, else 0."""
        names = [name.replace("weight", "bias") for name in given]
        known = dict(module.named_parameters())
        found = {n: make(np.zeros(known[n].shape)) for n in names if n in known}
        if offsets is not None:
            parts = [np.concatenate(offsets)] if self.where.qkv else offsets
            for name, part in zip(self.names, parts, strict=True):
                if name in self.biases(module):
                    found[name.replace("weight", "bias")] = make(part)
        return found

    def prepare(self, precision: str) -> Any:
        """Return a copy of the module in a precision, in eval mode."""
        if precision not in self.copies:
            torch = import_module("torch")
            own = copy.deepcopy(self.fn).eval()  # type: ignore[attr-defined]
            dtype, device = getattr(torch, precision), self.convention.device
            self.copies[precision] = own.to(device=device, dtype=dtype)
        return self.copies[precision]

    def read_out(self, x: Numbers, inputs: Inputs) -> Numbers:
        """Convert the output of the module to (B, H, Nq, D)."""
        (batch, heads, n, width), letters = inputs.q.shape, self.convention.layout
        out_letters = self.convention.out_layout or letters
        if "b" not in out_letters:
            x = x[None]
        elif out_letters == "nbe":
            x = x.swapaxes(0, 1)
        wide = self.sizes[0] if self.where.out else heads * width
        if x.shape != (batch, n, wide):
            raise CallFailedError(
                f"out has shape {x.shape}, expected {(batch, n, wide)}, the axes bne."
            )
        x = x[..., : heads * width]
        if inputs.written == "turned":
            x = x[..., ::-1]
        return x.reshape(batch, n, heads, width).swapaxes(1, 2)
