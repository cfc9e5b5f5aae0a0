"""The eager attention functions of transformers, for editing.

A layer of transformers calls `attention_interface(module, query, key, value, mask, …)`.
"eager" ones are written out in each modeling file, with softcap and sinks: such a call
is edited as a whole, and observed by its operators. transformers is never imported
here: its models have imported it already.

Next: sdpa.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from regard.lens.adapters.adapter import Adapter, Place
from regard.run.call_edit import (
    CallEdit,
    PendingCall,
    Rerun,
    SafeSoftmax,
    find_hidden,
    lower,
)
from regard.run.monkeypatch import list_files

FUNCTION = "eager_attention_forward"


def find_eager(model: nn.Module) -> Iterator[Place]:
    """Yield the functions in the modeling files of a model."""
    yield from (
        (file, FUNCTION) for file in list_files(model) if FUNCTION in vars(file)
    )


def expect_eager(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,  # noqa: ARG001
    attention_mask: Tensor | None,
    *args: Any,
    **options: Any,
) -> PendingCall:
    """Return what is known of a call before it runs."""
    (_, heads, n_q, _), n_k, mask = query.shape, key.shape[2], attention_mask
    mask = None if mask is None else mask[..., :n_k]
    find = partial(find_hidden, mask)
    scale = args[0] if args else options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return PendingCall(
        like=query, heads=heads, n_q=n_q, n_k=n_k, find_hidden=find, scale=scale
    )


def run_eager(  # noqa: PLR0917 (their signature)
    original: Callable[..., Any],
    edit: CallEdit,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **options: Any,
) -> Any:
    """Run a call with edited scores: the mask is added to them."""
    mask, blank, n_k = attention_mask, None, key.shape[2]
    if edit.cells is not None:
        mask = query.new_zeros(1, 1, 1, n_k) if mask is None else mask
        mask, blank = lower(mask[..., :n_k], edit.cells)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        if blank is None:
            out, *rest = original(module, q, k, v, mask, *args, **options)
            return (out.transpose(1, 2), *rest)
        with SafeSoftmax():
            out, weights, *rest = original(module, q, k, v, mask, *args, **options)
        weights = None if weights is None else weights.masked_fill(blank, 0)
        return (out.transpose(1, 2).masked_fill(blank, 0), weights, *rest)

    arrays = (query, key, value)
    out, *rest = run(*arrays)
    out = edit.clear(out, Rerun(lambda *new: run(*new)[0], arrays))
    return (out.transpose(1, 2), *rest)


EAGER = Adapter(
    name="transformers", find=find_eager, expect=expect_eager, run=run_eager
)
