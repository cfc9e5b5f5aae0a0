"""Read the tensors of llama.cpp while it runs a graph.

    Tensor        the fields of ggml_tensor, as the library's header lays them out
    TensorReader  reads its numbers, (ne3, ne2, ne1, ne0)

The layout is checked before it is used: the name in the structure must be the one that
the library returns. ggml counts its axes from the last one.

Next: llama_cells.py
"""

from __future__ import annotations

import ctypes
import re
from ctypes import c_char, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

KINDS: dict[int, np.dtype[Any]] = {  # enum ggml_type
    0: np.dtype(np.float32),
    1: np.dtype(np.float16),
    26: np.dtype(np.int32),
    27: np.dtype(np.int64),
}
LAYER = re.compile(rb"-(\d+)(?: \(.*\))?$")  # "Qcur-3", "Qcur-3 (view)"
CACHE = re.compile(rb"cache_k_l(\d+)(?: \(.*\))?$")


class Tensor(ctypes.Structure):
    """A tensor of ggml, up to its name."""


Tensor._fields_ = [
    ("kind", c_int),
    ("buffer", c_void_p),
    ("ne", c_int64 * 4),
    ("nb", c_size_t * 4),
    ("op", c_int),
    ("parameters", c_int32 * 16),
    ("flags", c_int32),
    ("src", ctypes.POINTER(Tensor) * 10),
    ("view_src", ctypes.POINTER(Tensor)),
    ("view_offs", c_size_t),
    ("data", c_void_p),
    ("name", c_char * 64),
]


class TensorReader:
    """The functions of ggml that read tensors.

    folder: where llama.cpp's libraries are
    """

    def __init__(self, folder: Path) -> None:
        library = ctypes.CDLL(str(next(folder.glob("*ggml-base.*"))))
        pointer = ctypes.POINTER(Tensor)
        self.get_name = library.ggml_get_name
        self.get_name.argtypes, self.get_name.restype = [pointer], c_char_p
        self.get_op = library.ggml_op_name
        self.get_op.argtypes, self.get_op.restype = [c_int], c_char_p
        self.copy = library.ggml_backend_tensor_get
        self.copy.argtypes = [pointer, c_void_p, c_size_t, c_size_t]
        self.copy.restype = None
        self.ops: dict[int, str] = {}

    def is_understood(self, tensor: Tensor) -> bool:
        """Return whether the structure is laid out as it is declared here."""
        return bool(self.get_name(tensor) == tensor.name)

    def name_op(self, tensor: Tensor) -> str:
        """Return the name of the operator that computes a tensor."""
        op = tensor.op
        if op not in self.ops:
            self.ops[op] = self.get_op(op).decode()
        return self.ops[op]

    def read(
        self, tensor: Tensor, first: int = 0, stop: int | None = None
    ) -> NDArray[Any]:
        """Return a copy of the numbers; of ne1 only first … stop - 1, if given."""
        if tensor.kind not in KINDS:
            raise ValueError(f"numbers of ggml's type {tensor.kind} cannot be read")
        dtype, shape, strides = KINDS[tensor.kind], [*tensor.ne], [*tensor.nb]
        shape[1] = (shape[1] if stop is None else stop) - first
        ends = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
        held = np.empty(dtype.itemsize + sum(ends), np.uint8)
        self.copy(tensor, held.ctypes.data, first * strides[1], held.size)
        view = np.ndarray(shape[::-1], dtype, held, strides=strides[::-1])
        return view.copy()


def list_operands(tensor: Tensor, count: int) -> list[Tensor | None]:
    """Return the first tensors that a tensor is computed from, None for no tensor."""
    return [x.contents if x else None for x in tensor.src[:count]]


def read_floats(tensor: Tensor, count: int) -> list[float]:
    """Return the first parameters of an operator, which are floats."""
    numbers = np.array(tensor.parameters[:count], np.int32)
    return [float(x) for x in numbers.view(np.float32)]


def find_number(tensor: Tensor, pattern: re.Pattern[bytes]) -> int | None:
    """Return the number in the name of a tensor, or of one that it comes from."""
    while True:
        found = pattern.search(tensor.name)
        if found is not None:
            return int(found[1])
        before = tensor.view_src or tensor.src[0]
        if not before:
            return None
        tensor = before.contents


def find_layer(tensor: Tensor) -> int:
    """Return the number of the layer that queries belong to."""
    number = find_number(tensor, LAYER)
    if number is None:
        raise ValueError("its queries have no name with the number of a layer")
    return number


def find_cache_number(tensor: Tensor) -> int | None:
    """Return the number of the cache that keys are read from, None without one."""
    return find_number(tensor, CACHE)
