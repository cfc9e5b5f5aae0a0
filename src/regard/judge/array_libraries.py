"""Adapters for NumPy, PyTorch and JAX: make arrays, read them, differentiate.

    here = LIBRARIES["torch"]
    x = here.make(numbers, "float16", "cuda")
    dq, dk, dv = here.differentiate(fn, (q, k, v), g)

PyTorch and JAX are imported on first use.

Next: subject.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from array_api_compat import array_namespace, is_jax_array, is_torch_array

from regard.arrays import to_numpy
from regard.errors import OptionError
from regard.judge.inputs import CallFailedError

NO_GRADIENT = "out does not require a gradient"
Run = Callable[..., Any]  # maps arrays to out


class ArrayLibrary(ABC):
    """The operations of an array library that the checks need."""

    precisions: tuple[str, ...] = ("float64", "float32", "float16")
    strided = True  # whether arrays may be non-contiguous views
    compiles = False  # whether every new shape is compiled, which is slow

    @abstractmethod
    def make(self, x: Any, precision: str | None, device: str) -> Any:
        """Return x as an array of a precision; None keeps its dtype."""

    def check_device(self, device: str) -> None:
        """Raise OptionError if arrays cannot be made on a device."""
        try:
            self.make(np.zeros(1), "float32", device)
        except Exception as error:  # noqa: BLE001 (each backend has its own)
            text = str(error).strip().partition("\n")[0].rstrip(".")
            raise OptionError(
                f'device="{device}" cannot be used here: {text}. Write device="cpu", '
                "or name a device that this machine has."
            ) from None

    @abstractmethod
    def owns(self, x: Any) -> bool:
        """Return whether x is an array of this library."""

    def read(self, x: Any) -> Any:
        """Return x as a NumPy array, float64 unless bool."""
        x = to_numpy(x)
        return x.astype(np.float64) if x.dtype.kind != "b" else x

    def spread(self, x: Any, how: str) -> Any:
        """Return the same numbers as a view of a larger or permuted array.

        columns: the last axis has stride 2
        swapped: the two axes before the last are stored in the other order
        part: one of three arrays that are stored together, as k in a fused qkv
        grown: the first half of a longer axis, as the used part of a cache
        expanded: the first axis has stride 0; its numbers must be equal
        """
        xp, how = (
            array_namespace(x),
            how if x.ndim > 2 or how == "expanded" else "columns",
        )
        if how == "expanded":
            return xp.broadcast_to(x[:1], x.shape)
        other = ~x if str(x.dtype).endswith("bool") else x + 1
        if how == "columns":
            return xp.stack([x, other], axis=-1)[..., 0]
        if how == "swapped":
            turned = xp.stack([other, x]).swapaxes(-3, -2)
            return pack(turned)[1].swapaxes(-3, -2)
        axis = min(1, x.ndim - 2)
        if how == "grown":
            return pack(xp.stack([x, other], axis=x.ndim - 2))[..., 0, :, :]
        parts = pack(xp.stack([other, x, other], axis=axis))
        return parts[(slice(None),) * axis + (1,)]

    def spread_all(
        self, arrays: Sequence[Any], strides: Mapping[str, str]
    ) -> list[Any]:
        """Return q, k and v, each with the strides that are given for it."""
        pairs = zip("qkv", arrays, strict=True)
        return [self.spread(x, strides[n]) if n in strides else x for n, x in pairs]

    def differentiate(
        self, run: Run, arrays: Sequence[Any], g: Any, how: str, only: str
    ) -> list[Any]:
        """Return the gradients of sum(run(*arrays) · g) for those named in only."""
        raise NotImplementedError


def pack(x: Any) -> Any:
    """Return x as a contiguous array."""
    return x.reshape(-1).reshape(x.shape)


class NumPy(ArrayLibrary):
    """NumPy arrays, without gradients."""

    def make(self, x: Any, precision: str | None, device: str) -> Any:
        """Return a fresh array."""
        return np.array(x, dtype=precision)

    def owns(self, x: Any) -> bool:
        """Return whether x is a NumPy array or scalar."""
        return isinstance(x, np.ndarray | np.generic)


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

    def differentiate(
        self, run: Run, arrays: Sequence[Any], g: Any, how: str, only: str
    ) -> list[Any]:
        """Return the gradients of sum(run(*arrays) · g) for those named in only.

        how: "" (the gradient of out is contiguous), "ones" (g = 1, expanded from a
        single number), "swapped" (its strides), "twice" (the graph is retained and
        used again; the second gradients are returned)
        """
        torch = import_module("torch")
        with torch.enable_grad():
            pairs = zip("qkv", arrays, strict=True)
            leaves = [x.detach().requires_grad_(n in only) for n, x in pairs]
            out = run(*leaves)
            if not out.requires_grad:
                raise CallFailedError(f"{NO_GRADIENT}.")
            if how == "ones":
                out.sum().backward()
            elif how == "swapped":
                out.backward(self.spread(g, "swapped"))
            elif how == "twice":
                (out * g).sum().backward(retain_graph=True)
                for leaf in leaves:
                    leaf.grad = None
            if how in ("", "twice"):
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

    def differentiate(
        self, run: Run, arrays: Sequence[Any], g: Any, how: str, only: str
    ) -> list[Any]:
        """Return the gradients of sum(run(*arrays) · g)."""
        jax = import_module("jax")

        def total(*leaves: Any) -> Any:
            return (run(*leaves) * g).sum()

        return list(jax.grad(total, argnums=tuple(range(len(arrays))))(*arrays))


LIBRARIES: dict[str, ArrayLibrary] = {"numpy": NumPy(), "torch": Torch(), "jax": Jax()}
