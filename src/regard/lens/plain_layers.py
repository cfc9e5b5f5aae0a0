"""Layers that cannot attend: the observer rests while they run.

    a layer of torch         a linear layer, a norm or an activation, with plain weights
    any other layer          all that the code of its forward names are operations on
    without layers inside    single numbers, and means: RMSNorm as models write it

What such a layer returns has the axes of its input; the rows of a linear layer are
those of its input, and its columns are features. A layer that is given scores or
weights of an attention is observed as everything else is.

Next: wide_passes.py
"""

from __future__ import annotations

from dis import get_instructions
from functools import cache
from types import CodeType, FunctionType

from torch import Tensor, nn

from regard.lens.origin import FEATURE, ROW, Origin
from regard.lens.trace import Trace

PLAIN = (Tensor, nn.Parameter)
SAME = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GELU,
    nn.SiLU,
    nn.ReLU,
    nn.Tanh,
    nn.Sigmoid,
)
# operations on numbers one by one, means over features, and attributes with numbers
NAMES = """
    torch nn functional F dtype to type type_as float float16 float32 float64 bfloat16
    add mul sub div neg pow square sqrt rsqrt mean var abs sigmoid silu gelu relu tanh
    rms_norm layer_norm normalized_shape shape weight bias eps epsilon variance_epsilon
    norm_eps
""".split()  # noqa: SIM905
REFUSED = {"@", "@=", "BINARY_SUBSCR", "BINARY_SLICE", "BINARY_MATRIX_MULTIPLY"}


def cannot_attend(module: nn.Module) -> bool:
    """Return whether a layer cannot attend, so that it need not be observed."""
    kind, own = type(module), vars(module)
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
        return False  # they may do anything
    if own.get("inplace"):
        return False
    if any(type(x) not in PLAIN for x in module.parameters(recurse=False)):
        return False
    if kind is nn.Linear or kind in SAME:
        return True
    inside = next(module.children(), None)
    return inside is None and has_plain_code(getattr(kind, "forward", None))


@cache
def has_plain_code(function: object) -> bool:
    """Return whether a function only computes numbers one by one, and means."""
    code = getattr(function, "__code__", None)
    if not isinstance(function, FunctionType) or code is None or code.co_freevars:
        return False
    inner = any(isinstance(x, CodeType) for x in code.co_consts)
    steps = {x for y in get_instructions(code) for x in (y.opname, y.argrepr)}
    known = code.co_names and {*code.co_names} <= {*NAMES}
    return bool(known and not inner and not steps & REFUSED)


def add_layer(trace: Trace, module: nn.Module, x: Tensor, out: Tensor) -> None:
    """Add what a layer returned to the trace of a pass."""
    if type(out) not in PLAIN or not out.numel():
        return
    if out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        return  # in its place, or nothing was done
    if type(module) is nn.Linear:
        width = out.shape[-1]
        sizes = (out.numel() // width, width) if out.ndim > 1 else (width,)
        kinds = [ROW, FEATURE][-len(sizes) :]
        made = Origin(sizes, (width, 1)[-len(sizes) :], kinds=kinds)
    elif out.shape == x.shape:
        made = Origin(tuple(out.shape), out.stride(), lead=trace.view(x))
    else:
        made = Origin(tuple(out.shape), out.stride())
    trace.put(out, made)
