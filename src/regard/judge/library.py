"""Arrays of NumPy, PyTorch and JAX: made from numbers, read back, differentiated.

    here = LIBRARIES["torch"]
    x = here.make(numbers, "float16", "cuda")
    outs, gradients = here.differentiate(fn, (q, k, v), g)

PyTorch and JAX are imported when a function that wants them is judged.

Next: subject.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from array_api_compat import is_jax_array, is_torch_array

from regard.arrays import to_numpy

Run = Callable[..., Any]  # arrays to the out of an attention, and what else it gave


class ArrayLibrary(ABC):
    """What the judge needs of a library."""

    precisions: tuple[str, ...] = ("float64", "float32", "float16")
    strided = True  # whether a view can be handed over
    compiles = False  # whether every new shape takes long

    @abstractmethod
    def make(self, x: Any, precision: str | None, device: str) -> Any:
        """Return numbers as an array; None keeps their dtype."""

    @abstractmethod
    def owns(self, x: Any) -> bool:
        """Tell whether x is an array of this library."""

    def read(self, x: Any) -> Any:
        """Return an array as NumPy's, floating point as float64."""
        x = to_numpy(x)
        return x.astype(np.float64) if x.dtype.kind != "b" else x

    def spread(self, x: Any) -> Any:
        """Return the same numbers as a view, apart from each other in memory."""
        wide = self.join([x, x + 1])
        return wide[..., 0]

    @abstractmethod
    def join(self, parts: Sequence[Any]) -> Any:
        """Stack along a new last axis."""

    def differentiate(self, run: Run, arrays: Sequence[Any], g: Any) -> list[Any]:
        """Return the gradients of sum(run(*arrays) · g)."""
        raise NotImplementedError


class NumPy(ArrayLibrary):
    """Arrays on the host; no gradients."""

    def make(self, x: Any, precision: str | None, device: str) -> Any:
        """Return a fresh array."""
        return np.array(x, dtype=precision)

    def owns(self, x: Any) -> bool:
        """Tell whether x is a NumPy array or number."""
        return isinstance(x, np.ndarray | np.generic)

    def join(self, parts: Sequence[Any]) -> Any:
        """Stack along a new last axis."""
        return np.stack(parts, -1)


class Torch(ArrayLibrary):
    """Tensors on any device."""

    precisions = ("float64", "float32", "float16", "bfloat16")

    def make(self, x: Any, precision: str | None, device: str) -> Any:
        """Return a fresh tensor."""
        torch = import_module("torch")
        dtype = None if precision is None else getattr(torch, precision)
        return torch.tensor(np.asarray(x), dtype=dtype, device=device)

    def owns(self, x: Any) -> bool:
        """Tell whether x is a tensor."""
        return bool(is_torch_array(x))

    def join(self, parts: Sequence[Any]) -> Any:
        """Stack along a new last axis."""
        return import_module("torch").stack(list(parts), -1)

    def differentiate(self, run: Run, arrays: Sequence[Any], g: Any) -> list[Any]:
        """Return the gradients of sum(run(*arrays) · g)."""
        torch = import_module("torch")
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in arrays]
            (run(*leaves) * g).sum().backward()
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


class Jax(ArrayLibrary):
    """Arrays of JAX; float64 only if its user has switched it on."""

    strided = False
    compiles = True

    @property
    def precisions(self) -> tuple[str, ...]:  # type: ignore[override]
        """What JAX keeps: float64 is off unless asked for."""
        best = ("float64",) if import_module("jax").config.jax_enable_x64 else ()
        return (*best, "float32", "float16", "bfloat16")

    def make(self, x: Any, precision: str | None, device: str) -> Any:
        """Return an array."""
        return import_module("jax.numpy").asarray(np.asarray(x), dtype=precision)

    def owns(self, x: Any) -> bool:
        """Tell whether x is an array of JAX."""
        return bool(is_jax_array(x))

    def read(self, x: Any) -> Any:
        """Return an array as NumPy's; its bfloat16 is no dtype of NumPy."""
        x = np.asarray(x)
        return x if x.dtype.kind == "b" else x.astype(np.float64)

    def join(self, parts: Sequence[Any]) -> Any:
        """Stack along a new last axis."""
        return import_module("jax.numpy").stack(parts, -1)

    def differentiate(self, run: Run, arrays: Sequence[Any], g: Any) -> list[Any]:
        """Return the gradients of sum(run(*arrays) · g)."""
        jax = import_module("jax")

        def total(*leaves: Any) -> Any:
            return (run(*leaves) * g).sum()

        return list(jax.grad(total, argnums=tuple(range(len(arrays))))(*arrays))


LIBRARIES: dict[str, ArrayLibrary] = {"numpy": NumPy(), "torch": Torch(), "jax": Jax()}
