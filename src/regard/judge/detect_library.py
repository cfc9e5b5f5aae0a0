"""Detect which array library a function is written for from its code.

Sources of evidence, strongest first; the first that names a library decides:

    the classes of a module or callable object        nn.Module
    annotations                                       q: torch.Tensor
    names in its own code, and imports inside it      np.exp, torch.softmax
    the same for the functions that it calls          softmax(x), one level at a time
    the imports of its file                           import numpy as np

If a file imports several libraries and the function names none of them, it is a NumPy
function if NumPy arrays have all methods that it calls.

Next: convention.py
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import sys
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType
from typing import Any, Literal, get_args

import numpy as np

Library = Literal["numpy", "torch", "jax"]
LIBRARIES: tuple[Library, ...] = ("torch", "jax", "numpy")  # np.sqrt(d) is no evidence
assert set(LIBRARIES) == set(get_args(Library))
DEPTH = 4  # maximum depth of calls that are followed


def read_library(fn: Any) -> Library:
    """Return the library that a function is written for; NumPy if it is unclear.

    >>> read_library(lambda q, k, v: np.exp(q @ k.T) @ v)
    'numpy'
    """
    if find_root(type(fn)) in ("jax", "jaxlib"):  # jax.jit
        return "jax"
    fn = unwrap(fn)
    if not inspect.isroutine(fn):
        found = pick_library({find_root(base) for base in type(fn).__mro__})
        if found:
            return found
        fn = getattr(fn, "forward", type(fn).__call__)
    level, seen = [unwrap(fn)], set()
    for _ in range(DEPTH):
        found = pick_library({root for each in level for root in read_roots(each)})
        if found:
            return found
        seen |= {id(each) for each in level}
        called = [f for each in level for f in find_called(each)]
        level = [f for f in called if id(f) not in seen]
    return read_imports(fn)


def pick_library(roots: set[str]) -> Library | None:
    """Return the array library in a set of packages, or None."""
    return next((name for name in LIBRARIES if name in roots), None)


def unwrap(fn: Any) -> Any:
    """Return the function inside decorators and functools.partial."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.unwrap(fn)


def read_roots(fn: Any) -> set[str]:
    """Return the packages in the annotations of a function, else those in its code."""
    if not isinstance(unwrap_method(fn), FunctionType):
        return {find_root(fn)}
    notes = list(getattr(fn, "__annotations__", {}).values())
    noted = {
        note.split(".")[0] if isinstance(note, str) else find_root(note)
        for note in notes
    }
    noted = {find_root(read_globals(fn).get(x)) or x for x in noted}
    if pick_library(noted):
        return noted
    imported = {
        x.argval.split(".")[0]
        for x in list_instructions(fn)
        if x.opname == "IMPORT_NAME"
    }
    return imported | {find_root(x) for x in find_objects(fn)}


def find_called(fn: Any) -> list[Any]:
    """Return the Python functions that a function refers to."""
    found = [unwrap(x) for x in find_objects(fn) if inspect.isroutine(x)]
    return [x for x in found if isinstance(unwrap_method(x), FunctionType)]


def find_objects(fn: Any) -> list[Any]:
    """Return the global and closure objects that a function refers to."""
    known = read_globals(fn)
    names = {
        x.argval for x in list_instructions(fn) if x.opname == "LOAD_GLOBAL"
    }  # not jax's .nn
    cells = getattr(unwrap_method(fn), "__closure__", None) or ()
    enclosed = [cell.cell_contents for cell in cells if cell != CellType()]
    return [known[name] for name in names if name in known] + enclosed


def read_imports(fn: Any) -> Library:
    """Return the library that a function's file imports, or whose methods fit."""
    roots = {find_root(x) for x in read_globals(fn).values()} & set(LIBRARIES)
    methods = {
        x.argval
        for x in list_instructions(fn)
        if x.opname in ("LOAD_ATTR", "LOAD_METHOD")
    }
    if len(roots) > 1 and methods <= set(dir(np.ndarray)):
        return "numpy"
    return pick_library(roots) or "numpy"


def read_globals(fn: Any) -> dict[str, Any]:
    """Return the global names of the module that a function is defined in."""
    own = getattr(unwrap_method(fn), "__globals__", None)
    if own is not None:
        return dict(own)
    place = getattr(fn, "__module__", None) or type(fn).__module__
    return dict(vars(sys.modules.get(place, builtins)))


def unwrap_method(fn: Any) -> Any:
    """Return the function of a bound method."""
    return getattr(fn, "__func__", fn)


def list_instructions(fn: Any) -> Iterator[dis.Instruction]:
    """Yield the bytecode instructions of a function and of its nested functions."""
    codes: list[CodeType] = [x for x in (getattr(fn, "__code__", None),) if x]
    while codes:
        code = codes.pop()
        codes += [x for x in code.co_consts if isinstance(x, CodeType)]
        yield from dis.get_instructions(code)


def find_root(x: Any) -> str:
    """Return the top-level package of a module, function, class or array."""
    name = getattr(x, "__name__", "") if inspect.ismodule(x) else None
    name = name or getattr(x, "__module__", None) or type(x).__module__
    return str(name or "").split(".")[0]
