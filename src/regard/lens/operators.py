"""The ATen operators that matter to the lens, by the names in their schemas.

Next: trace.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

SOFTMAX = {
    "_softmax",
    "_safe_softmax",
    "_log_softmax",
    "softmax",
    "log_softmax",
}
PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "addmm": 1, "baddbmm": 1}  # first operand
EXPONENTS = {"exp", "exp_", "exp2", "exp2_"}
FLEX = "flex_attention"  # a higher-order operator
ENCODER_LAYER = "_transformer_encoder_layer_fwd"
FAST_PATHS = {"_native_multi_head_attention", ENCODER_LAYER}
VARLEN = {"_flash_attention_forward", "_efficient_attention_forward"}
SDPA = {
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
}
FUSED = SDPA | FAST_PATHS | VARLEN
COMPOSITE_ATTENTION = {  # heard as a whole only if they cannot be taken apart
    "scaled_dot_product_attention",
    "_scaled_dot_product_attention_math",
}
VIEWS = {"_unsafe_view", "_reshape_alias", "detach", "alias"}  # not declared as views
MAYBE_VIEWS = {"reshape", "flatten", "contiguous", "to", "unflatten"}  # or copies
COPIES = {"clone", "_to_copy", "copy", "contiguous"}
JOINS = {"cat", "stack"}
SELECTS = {"index_select", "gather", "index"}
RESHAPES = JOINS | SELECTS | {"constant_pad_nd", "roll"}
REFILLS = {"zero", "fill", "empty", "resize", "set"}
RANDOM = ("bernoulli", "uniform", "normal", "rand")
COMPOSITE: dict[Any, bool] = {}


def read_name(func: Any) -> str:
    """Return the name of an operator, without its namespace."""
    schema = getattr(func, "_schema", None)  # a higher-order operator has none
    return str(func) if schema is None else str(schema.name.rpartition("::")[2])


def is_mutable(func: Any) -> bool:
    """Return whether an operator writes into its arguments."""
    return bool(getattr(getattr(func, "_schema", None), "is_mutable", False))


def makes_tensors(func: Any) -> bool:
    """Return whether an operator returns tensors that are not views."""
    schema = getattr(func, "_schema", None)
    if schema is None or func.is_view or read_name(func) in VIEWS:
        return False
    return any("Tensor" in str(x.type) for x in schema.returns)


def is_composite(func: Any) -> bool:
    """Return whether an operator is written in terms of others, and returns no view.

    One that returns a view is not taken apart: its result would become a view twice.
    """
    found = COMPOSITE.get(func)
    if found is None:
        key = torch._C.DispatchKey.CompositeImplicitAutograd  # noqa: SLF001
        found = getattr(func, "_schema", None) is not None
        # not `func.has_kernel…`: torch has Python kernels of native_batch_norm and
        # upsample_nearest, and running a key without a C++ kernel kills the process
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001
        found = found and has_kernel(func.name(), key)
        found = found and all(x.alias_info is None for x in func._schema.returns)  # noqa: SLF001
        COMPOSITE[func] = found
    return found


def find_tensors(given: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments, and in lists of them, that have numbers."""
    for x in given:
        if isinstance(x, tuple | list):
            yield from find_tensors(x)
        elif isinstance(x, Tensor) and has_numbers(x):
            yield x


def has_numbers(x: Tensor) -> bool:
    """Return whether a tensor has a storage: a derivative that is 0 has none."""
    return not (x.is_nested or x._is_zerotensor()) and x.numel() > 0  # noqa: SLF001


def has_nested(args: Iterable[Any]) -> bool:
    """Return whether a nested tensor is among some arguments."""
    return any(isinstance(x, Tensor) and x.is_nested for x in args)
