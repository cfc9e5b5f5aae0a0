"""What transformers does differently: its own functions between a layer and the kernel.

A layer calls `attention_interface(module, query, key, value, mask, scaling=…, …)`. For
"sdpa" that function repeats shared heads and calls the kernel; "eager" ones are written
out in each modeling file, with softcap and sinks. Both are handed q, k and v before any
copy is made, so that is where we look. Nothing of transformers is imported here: a
model of it brings it along.

Next: ledger.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn

from regard.definition.attention import Attended
from regard.engine.choose import attend
from regard.lens.intercept import Mode, Sight, put
from regard.lens.whereabouts import Whereabouts
from regard.masks.algebra import Mask
from regard.masks.grid import evaluate, resolve_start
from regard.masks.patterns import causal

EAGER = "eager_attention_forward"


@contextmanager
def open_doors(model: nn.Module, mode: Mode, here: Whereabouts) -> Iterator[None]:
    """Look into the functions of transformers, if the model is one of its own."""
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
    """Return a function that tells of a call and leaves it as it is."""

    def stand_in(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **options: Any,
    ) -> Any:
        call = (module, query, key, value, attention_mask, *args)
        if not here.stack:  # another model's layer, in the same file
            return original(*call, **options)
        here.held = True
        try:
            done = original(*call, **options)
        finally:
            here.held = False
        scale = options.get("scaling", args[0] if args else None)
        sink = options.get("s_aux", getattr(module, "sinks", None))
        bias = options.get("position_bias")
        mode.tell(
            Sight(
                door="transformers eager",
                q=query,
                k=key,
                v=value,
                out=done[0].transpose(1, 2),
                lse=None,
                scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
                mask=add_both(attention_mask, bias),
                softcap=options.get("softcap"),
                sink=sink,
            )
        )
        return done

    return stand_in


def is_ours(file: Any) -> bool:
    """Tell whether a file calls our own engine."""
    found = vars(file).get("attend")
    return found is attend or getattr(found, "__wrapped__", None) is attend


def watch_engine(
    original: Callable[..., Any], mode: Mode, here: Whereabouts
) -> Callable[..., Any]:
    """Return `regard.engine.attend` that tells of its calls."""

    @wraps(attend)
    def stand_in(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **options: Any
    ) -> Attended:
        before, here.held = here.held, True  # its kernels see parts of the keys only
        try:
            done: Attended = original(q, k, v, mask, **options)
        finally:
            here.held = before
        if here.stack:
            start = options.get("q_start")
            formula = mask if isinstance(mask, Mask) else None
            n_q, n_k = q.shape[2], k.shape[2]
            seen = None if formula is None else write(formula, q, k, start)
            cells = mask if formula is None else seen
            mode.tell(
                Sight(
                    door="regard",
                    q=q,
                    k=k,
                    v=v,
                    out=None if options.get("edit") else done.out,
                    lse=done.lse,
                    scale=q.shape[-1] ** -0.5,
                    mask=None if formula == causal() and n_q == n_k else cells,
                    causal=formula == causal() and n_q == n_k,
                )
            )
        return done

    return stand_in


def write(formula: Mask, q: Tensor, k: Tensor, start: Any) -> Tensor:
    """Write a mask out as the truth values of a call."""
    shape = (*q.shape[:3], k.shape[2])
    start = resolve_start(start, shape, formula)
    cells: Tensor = evaluate(formula.place(q), shape, q_start=start, like=q)
    return cells


def watch_fast(
    original: Callable[..., Any], mode: Mode, here: Whereabouts
) -> Callable[..., Any]:
    """Return a function that remembers the keys before they are repeated."""

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
