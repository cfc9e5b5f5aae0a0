"""Our own engine, `regard.engine.attend`, with all of its options.

Next: transformers_eager.py
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.definition.attention import Attended
from regard.engine.choose import attend
from regard.lens.adapters.adapter import Adapter, Place
from regard.lens.captured_call import CapturedCall
from regard.masks.algebra import Mask
from regard.masks.formula import Formula, evaluate, resolve_start
from regard.masks.patterns import causal
from regard.run.call_edit import CallEdit, PendingCall, Rerun, find_hidden, hide
from regard.run.cells import drop_axes, make_four
from regard.run.monkeypatch import list_files


def find_engine(model: nn.Module) -> Iterator[Place]:
    """Yield where the files of a model's classes refer to our engine."""
    for file in list_files(model):
        known = inspect.unwrap(vars(file).get("attend", list_files))
        if known is inspect.unwrap(attend):
            yield file, "attend"


def describe_engine(
    done: Attended, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **options: Any
) -> CapturedCall:
    """Return a call with all of its options.

    An array scale is multiplied into q. With softcap, lse is None, and check_rebuild.py
    computes it again, because it cannot rebuild a capped output.
    """
    q, k, v = (make_four(x) for x in (q, k, v))
    simple = q.shape[2] == k.shape[2] and is_causal(mask, options)
    scale, sink = options.get("scale"), options.get("sink")
    if isinstance(scale, Tensor):
        q, scale = q * scale, 1.0
    if sink is not None:
        sink = torch.as_tensor(sink, device=q.device).reshape(-1).expand(q.shape[1])
    capped, changed = options.get("softcap") is not None, bool(options.get("edit"))
    return CapturedCall(
        q=q,
        k=k,
        v=v,
        out=None if changed else make_four(done.out),
        lse=None if capped else done.lse.reshape(q.shape[:3]),
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        mask=None if simple else write_both(mask, q, k, options),
        causal=simple,
        softcap=options.get("softcap"),
        sink=sink,
    )


def is_causal(mask: Any, options: Mapping[str, Any]) -> bool:
    """Return whether a call has a causal mask that starts at 0, and nothing else."""
    start = options.get("q_start")
    alone = isinstance(mask, Mask) and options.get("bias") is None
    at_0 = start is None or not bool(torch.as_tensor(start).any())
    return alone and at_0 and bool(mask == causal())


def expect_engine(
    q: Tensor, k: Tensor, _v: Tensor, mask: Any = None, **options: Any
) -> PendingCall:
    """Return what is known of a call before it runs."""

    def find() -> Tensor | None:
        return find_hidden(write_mask(mask, q, k, options))

    heads, n_q, n_k = q.shape[-3], q.shape[-2], k.shape[-2]
    scale = options.get("scale")
    if scale is None:
        scale = q.shape[-1] ** -0.5
    return PendingCall(
        like=q,
        heads=heads,
        n_q=n_q,
        n_k=n_k,
        find_hidden=find,
        scale=None if isinstance(scale, Tensor) else float(scale),
    )


def run_engine(  # noqa: PLR0917 (its signature)
    original: Callable[..., Attended],
    edit: CallEdit,
    /,  # the engine has an option of the same name
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    **options: Any,
) -> Attended:
    """Run a call with an edited mask."""
    if edit.cells is not None:
        cells = write_mask(mask, q, k, options)
        mask = drop_axes(hide(cells, edit.cells), q.ndim)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return original(q, k, v, mask, **options).out

    done = original(q, k, v, mask, **options)
    return replace(done, out=edit.clear(done.out, Rerun(run, (q, k, v))))


def write_both(
    mask: Any, q: Tensor, k: Tensor, options: Mapping[str, Any]
) -> Tensor | None:
    """Return a mask and a bias as one array: truth values, or numbers to add."""
    bias = options.get("bias")
    cells, numbers = (
        write(x, q, k, options) if isinstance(x, Formula) else x for x in (mask, bias)
    )
    if numbers is None:
        return None if cells is None else make_four(cells)
    numbers = make_four(numbers)
    return numbers if cells is None else numbers.masked_fill(~cells, -math.inf)


def write_mask(
    mask: Any, q: Tensor, k: Tensor, options: Mapping[str, Any]
) -> Tensor | None:
    """Return a mask as cells."""
    return write(mask, q, k, options) if isinstance(mask, Mask) else mask


def write(formula: Formula, q: Tensor, k: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Write a mask or a bias out as the cells of a call."""
    shape = (*make_four(q).shape[:3], k.shape[-2])
    start = resolve_start(options.get("q_start"), shape, formula)
    cells: Tensor = evaluate(formula.place(q), shape, q_start=start, like=q)
    return cells


ENGINE = Adapter(
    name="regard",
    find=find_engine,
    describe=describe_engine,
    expect=expect_engine,
    run=run_engine,
    lse=True,
    v=True,
    out=True,
)
