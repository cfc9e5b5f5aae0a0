"""Detect the array library of an input, and convert between libraries.

The code on top of it (masks, the definition) uses only functions of the Array API
standard, which NumPy, PyTorch, JAX and others share: matmul, where, exp.

Next: definition/attention.py
"""

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import array_api_compat
import numpy as np

from regard.errors import ArrayError

Array = Any  # the libraries share no static type
MODULES = {"numpy": "numpy", "torch": "torch", "jax": "jax.numpy"}
LIBRARIES: dict[frozenset[type], Any] = {}  # a cache, keyed by array types


def is_array(x: object) -> bool:
    """Return whether x is an array of any supported library."""
    if x is None or type(x) in (int, float):  # a shortcut for the common cases
        return False
    return bool(array_api_compat.is_array_api_obj(x))


def as_array(x: Any) -> Any:
    """Return arrays and integers unchanged, anything else as a NumPy array."""
    return x if isinstance(x, int) or is_array(x) else np.asarray(x)


def is_floating(x: Array) -> bool:
    """Return whether x has a floating-point dtype that its library supports."""
    return holds(x, "real floating")


def is_torch(x: object) -> bool:
    """Return whether x is a torch tensor."""
    return bool(array_api_compat.is_torch_array(x))


def holds(x: Array, kind: str) -> bool:
    """Return whether x has a dtype of an Array API kind, such as "integral"."""
    try:
        return bool(namespace(x=x).isdtype(x.dtype, kind))
    except TypeError:  # a custom NumPy dtype, such as those of ml_dtypes
        return False


def namespace(**arrays: Array) -> Any:
    """Return the array library that all the named arrays belong to."""
    types = frozenset(map(type, arrays.values()))
    if types not in LIBRARIES:
        LIBRARIES[types] = find_library(arrays)
    return LIBRARIES[types]


def find_library(arrays: dict[str, Array]) -> Any:
    """Return the common array library, or raise an ArrayError that names the cause."""
    for name, x in arrays.items():
        if x is None:
            raise ArrayError(f"{name} is None, expected an array.")
    try:
        return array_api_compat.array_namespace(*arrays.values())
    except TypeError:
        for name, x in arrays.items():
            if not is_array(x):
                raise ArrayError(
                    f"{name} is a {type(x).__name__}, expected an array. "
                    f"Write numpy.asarray({name}), or the equivalent of your library."
                ) from None
        kinds = ", ".join(f"{n}: {type(x).__module__}" for n, x in arrays.items())
        raise ArrayError(
            f"arrays from several libraries ({kinds}), expected one. "
            "Convert them to the library of q."
        ) from None


def convert(x: Array, like: Array) -> Array:
    """Return x as an array of the library and on the device of `like`."""
    xp, device = namespace(like=like), array_api_compat.device(like)
    if namespace(x=x) is xp:
        return array_api_compat.to_device(x, device)
    # copy: the backward pass needs these values even if x is modified later
    given = to_numpy(x).copy()
    found = xp.asarray(given, device=device)
    kept = str(found.dtype).rpartition(".")[2]  # JAX has no int64 by default
    if given.dtype.kind in "iu" and (given.astype(kept) != given).any():
        raise ArrayError(
            f"integers from {given.min()} to {given.max()} do not fit {kept}. Use "
            'smaller ones, or write jax.config.update("jax_enable_x64", True).'
        )
    return found


def make_like(library: Any) -> Array:
    """Return an array of a library, given by its name or as a module, for `convert`."""
    name = str(getattr(library, "__name__", library)).split(".", maxsplit=1)[0]
    if name not in MODULES:
        raise ArrayError(f"{library!r}, expected one of {', '.join(MODULES)}.")
    try:
        return import_module(MODULES[name]).asarray(0.0)
    except ModuleNotFoundError:
        raise ArrayError(f"{name} is not installed: pip install {name}") from None


def convert_library(x: Array, like: Array) -> Array:
    """Return x in the library of `like`; unchanged if it is of that library."""
    if namespace(x=x) is namespace(like=like):
        return x
    if array_api_compat.is_numpy_array(like):
        return to_numpy(x)
    return convert(x, like)


def to_numpy(x: Array) -> np.ndarray[Any, Any]:
    """Return x as a NumPy array on the host."""
    if array_api_compat.is_torch_array(x):
        x = x.detach().cpu()
        x = x.float() if str(x.dtype) == "torch.bfloat16" else x  # not in NumPy
    try:
        return np.asarray(x)
    except TypeError:  # a JAX tracer has no values
        raise ArrayError(
            f"{type(x).__name__}: its values are not known while a function is traced. "
            "Omit block=, or make this call outside of the traced function."
        ) from None


def without_autocast(like: Array) -> AbstractContextManager[None]:
    """Return a context manager that disables torch autocast."""
    xp = namespace(x=like)
    autocast = getattr(xp, "autocast", None)  # only torch has it
    if autocast is None or like.device.type == "meta":
        return nullcontext()
    if not xp.is_autocast_enabled(like.device.type):
        return nullcontext()
    off: AbstractContextManager[None] = autocast(like.device.type, enabled=False)
    return off


def matmul(x: Array, y: Array) -> Array:
    """Return the matrix product in the dtype of x and y, also under autocast."""
    with without_autocast(x):
        return namespace(x=x, y=y).matmul(x, y)


def count_from(start: int | Array, n: int, like: Array) -> Array:
    """Return start, start + 1, …, start + n - 1 on the device of `like`."""
    xp = namespace(like=like)
    return start + xp.arange(n, device=array_api_compat.device(like))


def constant(value: float, like: Array, shape: tuple[int, ...] = ()) -> Array:
    """Return an array filled with value, with the dtype and device of `like`."""
    xp, device = namespace(like=like), array_api_compat.device(like)
    return xp.full(shape, value, dtype=like.dtype, device=device)


def accumulator(xp: Any, *arrays: Array) -> Any:
    """Return the dtype to compute in: the arrays' dtype, but at least float32."""
    dtype = xp.result_type(*arrays)
    return xp.float32 if xp.finfo(dtype).bits < 32 else dtype
