"""Hook the attention functions of transformers, and those of our own engine.

A layer calls `attention_interface(module, query, key, value, mask, scaling=…, …)`. For
"sdpa" that function repeats shared heads and calls the kernel; "eager" ones are written
out in each modeling file, with softcap and sinks. Both receive q, k and v before any
copy is made, so calls are recorded and edited there. transformers is never imported
here: its models have imported it already. Our own engine is hooked in the same way.

Next: ledger.py
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from regard.definition.attention import Attended
from regard.engine.choose import attend
from regard.lens.edit import NOTHING, PendingCall, drop_axes, edited, hide, lower
from regard.lens.intercept import Mode, put
from regard.lens.sight import Sight, make_four
from regard.lens.whereabouts import Whereabouts
from regard.masks.algebra import Mask
from regard.masks.formula import Formula, evaluate, resolve_start
from regard.masks.patterns import causal

EAGER = "eager_attention_forward"


def is_decoder(model: nn.Module, name: str) -> bool:
    """Return whether a layer is in the decoder of an encoder-decoder model."""
    config = getattr(model, "config", None)
    return bool(getattr(config, "is_encoder_decoder", False)) and "decoder" in name


@contextmanager
def open_doors(model: nn.Module, mode: Mode, here: Whereabouts) -> Iterator[None]:
    """Hook the functions of transformers and of our engine that a model uses."""
    with ExitStack() as stack:
        for name in sorted({type(module).__module__ for module in model.modules()}):
            file = sys.modules.get(name)
            if file and EAGER in vars(file):
                make = partial(watch_eager, mode=mode, here=here)
                stack.enter_context(put(file, EAGER, make))
            if file and is_ours(file):
                make = partial(watch_engine, mode=mode, here=here)
                stack.enter_context(put(file, "attend", make))
        library = sys.modules.get("transformers.modeling_utils")
        if library is not None:
            functions = library.ALL_ATTENTION_FUNCTIONS
            usual = functions["sdpa"]

            def add(before: dict[str, Any]) -> dict[str, Any]:
                fast = watch_fast(before.get("sdpa", usual), mode, here)
                return {**before, "sdpa": fast}

            stack.enter_context(put(functions, "_local_mapping", add))
        yield


def watch_eager(
    original: Callable[..., Any], mode: Mode, here: Whereabouts
) -> Callable[..., Any]:
    """Return an eager attention function that reports its calls."""

    def stand_in(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **options: Any,
    ) -> Any:
        if not here.stack:  # another model's layer, in the same file
            return original(module, query, key, value, attention_mask, *args, **options)
        (_, heads, n_q, _), n_k, mask = query.shape, key.shape[2], attention_mask
        call, blank = PendingCall(like=query, heads=heads, n_q=n_q, n_k=n_k), None
        with edited(call) as edit:
            if edit.cells is not None:
                mask = query.new_zeros(1, 1, 1, n_k) if mask is None else mask
                mask, blank = lower(mask[..., :n_k], edit.cells)
            before, here.held = here.held, True
            try:
                done = original(module, query, key, value, mask, *args, **options)
            finally:
                here.held = before
            scale = options.get("scaling", args[0] if args else None)
            mode.tell(
                Sight(
                    door="transformers eager",
                    q=query,
                    k=key,
                    v=value,
                    out=done[0].transpose(1, 2),
                    lse=None,
                    scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
                    mask=add_both(mask, options.get("position_bias")),
                    softcap=options.get("softcap"),
                    sink=options.get("s_aux", getattr(module, "sinks", None)),
                )
            )
        if edit is NOTHING:
            return done
        out, weights, *rest = done
        out = edit.clear(out.transpose(1, 2), blank).transpose(1, 2)
        if weights is not None and blank is not None:
            weights = weights.masked_fill(blank, 0)
        return (out, weights, *rest)

    return stand_in


def is_ours(file: Any) -> bool:
    """Return whether a module file calls our own engine."""
    found = vars(file).get("attend")
    return found is attend or getattr(found, "__wrapped__", None) is attend


def watch_engine(
    original: Callable[..., Any], mode: Mode, here: Whereabouts
) -> Callable[..., Any]:
    """Return a `regard.engine.attend` that reports its calls."""

    @wraps(attend)
    def stand_in(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **options: Any
    ) -> Attended:
        if not here.stack:
            return original(q, k, v, mask, **options)  # type: ignore[no-any-return]
        heads, n_q, n_k = q.shape[-3], q.shape[-2], k.shape[-2]
        with edited(PendingCall(like=q, heads=heads, n_q=n_q, n_k=n_k)) as edit:
            if edit.cells is not None:
                mask = write(mask, q, k, options) if isinstance(mask, Mask) else mask
                mask = drop_axes(hide(mask, edit.cells), q.ndim)
            before, here.held = here.held, True  # its kernels see parts of the keys
            try:
                done: Attended = original(q, k, v, mask, **options)
            finally:
                here.held = before
            mode.tell(see_engine(done, (q, k, v), mask, options))
        return replace(done, out=edit.clear(done.out))

    return stand_in


def see_engine(
    done: Attended, arrays: tuple[Tensor, ...], mask: Any, options: Mapping[str, Any]
) -> Sight:
    """Return a call of our own engine, with all of its options.

    An array scale is multiplied into q. With softcap, lse is None, and ledger.py
    computes it again, because it cannot rebuild a capped output.
    """
    q, k, v = (make_four(x) for x in arrays)
    simple = mask == causal() if isinstance(mask, Mask) else False
    simple = simple and q.shape[2] == k.shape[2] and options.get("bias") is None
    start = options.get("q_start")
    simple = simple and (start is None or not bool(torch.as_tensor(start).any()))
    scale, sink = options.get("scale"), options.get("sink")
    if isinstance(scale, Tensor):
        q, scale = q * scale, 1.0
    if sink is not None:
        sink = torch.as_tensor(sink).reshape(-1).expand(q.shape[1])
    capped, changed = options.get("softcap") is not None, bool(options.get("edit"))
    return Sight(
        door="regard",
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


def write(formula: Formula, q: Tensor, k: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Write a mask or a bias out as the cells of a call."""
    shape = (*make_four(q).shape[:3], k.shape[-2])
    start = resolve_start(options.get("q_start"), shape, formula)
    cells: Tensor = evaluate(formula.place(q), shape, q_start=start, like=q)
    return cells


def watch_fast(
    original: Callable[..., Any], mode: Mode, here: Whereabouts
) -> Callable[..., Any]:
    """Return an sdpa function that stores the keys before they are repeated."""

    def stand_in(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *rest: Any,
        **more: Any,
    ) -> Any:
        if not here.stack:
            return original(module, query, key, value, *rest, **more)
        here.shared = key, value
        try:
            with nullcontext() if here.on else mode:
                return original(module, query, key, value, *rest, **more)
        finally:
            here.shared = None

    return stand_in


def add_both(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return what is added to the scores."""
    if mask is None or bias is None:
        return bias if mask is None else mask
    return mask + bias
