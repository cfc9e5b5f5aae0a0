"""Which array library is this? The only file that asks.

Everything written on top of it (masks, the definition) uses the functions that the
Array API standard gives to NumPy, PyTorch, JAX and others alike: matmul, where, exp.

Next: definition/attention.py
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import array_api_compat
import numpy as np

from regard.errors import ArrayError

Array = Any  # four libraries, no common static type
LIBRARIES: dict[frozenset[type], Any] = {}  # found once for each kind of array


def is_array(x: object) -> bool:
    """Tell whether x is an array of any supported library."""
    if x is None or type(x) in (int, float):  # the usual cases, without asking around
        return False
    return bool(array_api_compat.is_array_api_obj(x))


def as_array(x: Any) -> Any:
    """Leave arrays and integers as they are, make anything else a NumPy array."""
    return x if isinstance(x, int) or is_array(x) else np.asarray(x)


def is_floating(x: Array) -> bool:
    """Tell whether x holds floating point numbers that its library computes with."""
    return holds(x, "real floating")


def holds(x: Array, kind: str) -> bool:
    """Tell whether x holds numbers of a kind of the Array API, such as "integral"."""
    try:
        return bool(namespace(x=x).isdtype(x.dtype, kind))
    except TypeError:  # a dtype that NumPy stores for others, such as ml_dtypes
        return False


def namespace(**arrays: Array) -> Any:
    """Return the one array library that all the named arrays belong to."""
    types = frozenset(map(type, arrays.values()))
    if types not in LIBRARIES:
        LIBRARIES[types] = find_library(arrays)
    return LIBRARIES[types]


def find_library(arrays: dict[str, Array]) -> Any:
    """Ask array-api-compat, and put its answer into words."""
    try:
        return array_api_compat.array_namespace(*arrays.values())
    except TypeError:
        for name, x in arrays.items():
            if not is_array(x):
                raise ArrayError(
                    f"{name} is a {type(x).__name__}, expected an array. "
                    f"Write numpy.asarray({name}), or the like of your library."
                ) from None
        kinds = ", ".join(f"{n}: {type(x).__module__}" for n, x in arrays.items())
        raise ArrayError(
            f"arrays of several libraries ({kinds}), expected one. "
            "Convert them to the library of q."
        ) from None


def convert(x: Array, like: Array) -> Array:
    """Return x as an array of the library and on the device of `like`."""
    xp, device = namespace(like=like), array_api_compat.device(like)
    if namespace(x=x) is xp:
        return array_api_compat.to_device(x, device)
    # a copy: a gradient needs the numbers of the call, whatever becomes of x later
    return xp.asarray(to_numpy(x).copy(), device=device)


def to_numpy(x: Array) -> np.ndarray[Any, Any]:
    """Return x as a NumPy array on the host."""
    if array_api_compat.is_torch_array(x):
        x = x.detach().cpu()
        x = x.float() if str(x.dtype) == "torch.bfloat16" else x  # NumPy has none
    try:
        return np.asarray(x)
    except TypeError:  # JAX has no numbers yet
        raise ArrayError(
            f"{type(x).__name__}: its values are not known while a function is traced. "
            "Leave block= out, or call this outside of the function."
        ) from None


def without_autocast(like: Array) -> AbstractContextManager[None]:
    """Return a context in which torch computes in the dtypes that it is given."""
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
    """Return start, start + 1, …, start + n - 1 beside `like`."""
    xp = namespace(like=like)
    return start + xp.arange(n, device=array_api_compat.device(like))


def constant(value: float, like: Array, shape: tuple[int, ...] = ()) -> Array:
    """Return an array full of value, of the dtype and on the device of `like`."""
    xp, device = namespace(like=like), array_api_compat.device(like)
    return xp.full(shape, value, dtype=like.dtype, device=device)


def accumulator(xp: Any, *arrays: Array) -> Any:
    """Return the dtype to compute in: that of the arrays, at least float32."""
    dtype = xp.result_type(*arrays)
    return xp.float32 if xp.finfo(dtype).bits < 32 else dtype
