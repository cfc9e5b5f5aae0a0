"""Adapters for NumPy, PyTorch and JAX: make arrays, read them, differentiate.

    here = LIBRARIES["torch"]
    x = here.make(numbers, "float16", "cuda")
    dq, dk, dv = here.differentiate(fn, (q, k, v), g)

PyTorch and JAX are imported on first use.

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
from regard.judge.inputs import CallFailedError

Run = Callable[..., Any]  # maps arrays to out


class ArrayLibrary(ABC):
    """The operations of an array library that the checks need."""

    precisions: tuple[str, ...] = ("float64", "float32", "float16")
    strided = True  # whether arrays may be non-contiguous views
    compiles = False  # whether every new shape is compiled, which is slow

    @abstractmethod
    def make(self, x: Any, precision: str | None, device: str) -> Any:
        """Return x as an array of a precision; None keeps its dtype."""

    @abstractmethod
    def owns(self, x: Any) -> bool:
        """Return whether x is an array of this library."""

    def read(self, x: Any) -> Any:
        """Return x as a NumPy array, float64 unless bool."""
        x = to_numpy(x)
        return x.astype(np.float64) if x.dtype.kind != "b" else x

    def spread(self, x: Any) -> Any:
        """Return the same numbers as a non-contiguous view."""
        wide = self.join([x, x + 1])
        return wide[..., 0]

    @abstractmethod
    def join(self, parts: Sequence[Any]) -> Any:
        """Stack along a new last axis."""

    def differentiate(self, run: Run, arrays: Sequence[Any], g: Any) -> list[Any]:
        """Return the gradients of sum(run(*arrays) · g)."""
        raise NotImplementedError


class NumPy(ArrayLibrary):
    """NumPy arrays, without gradients."""

    def make(self, x: Any, precision: str | None, device: str) -> Any:
        """Return a fresh array."""
        return np.array(x, dtype=precision)

    def owns(self, x: Any) -> bool:
        """Return whether x is a NumPy array or scalar."""
        return isinstance(x, np.ndarray | np.generic)

    def join(self, parts: Sequence[Any]) -> Any:
        """Stack along a new last axis."""
        return np.stack(parts, -1)


class Torch(ArrayLibrary):
    """PyTorch tensors on any device."""

    precisions = ("float64", "float32", "float16", "bfloat16")

    def make(self, x: Any, precision: str | None, device: str) -> Any:
        """Return a fresh tensor."""
        torch = import_module("torch")
        dtype = None if precision is None else getattr(torch, precision)
        return torch.tensor(np.asarray(x), dtype=dtype, device=device)

    def owns(self, x: Any) -> bool:
        """Return whether x is a tensor."""
        return bool(is_torch_array(x))

    def join(self, parts: Sequence[Any]) -> Any:
        """Stack along a new last axis."""
        return import_module("torch").stack(list(parts), -1)

    def differentiate(self, run: Run, arrays: Sequence[Any], g: Any) -> list[Any]:
        """Return the gradients of sum(run(*arrays) · g)."""
        torch = import_module("torch")
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in arrays]
            out = run(*leaves)
            if not out.requires_grad:
                raise CallFailedError(
                    "out does not require grad. If there is no backward pass, add "
                    "--no-gradients, or gradients=False in the Convention."
                )
            (out * g).sum().backward()
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


class Jax(ArrayLibrary):
    """JAX arrays; float64 only if jax_enable_x64 is set."""

    strided = False
    compiles = True

    @property
    def precisions(self) -> tuple[str, ...]:  # type: ignore[override]
        """The precisions that JAX supports in its current configuration."""
        best = ("float64",) if import_module("jax").config.jax_enable_x64 else ()
        return (*best, "float32", "float16", "bfloat16")

    def make(self, x: Any, precision: str | None, device: str) -> Any:
        """Return an array."""
        return import_module("jax.numpy").asarray(np.asarray(x), dtype=precision)

    def owns(self, x: Any) -> bool:
        """Return whether x is a JAX array."""
        return bool(is_jax_array(x))

    def read(self, x: Any) -> Any:
        """Return x as a NumPy array; bfloat16, which NumPy lacks, as float64."""
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
