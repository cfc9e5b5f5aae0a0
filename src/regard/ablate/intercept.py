"""Where attention calls are edited for an ablation, above autograd.

    the functions of torch of an adapter    as the adapter runs them under an edit
    nn.MultiheadAttention                   the kernel call inside of its function
    a softmax                               its logits, weights of a removed head
    a product with the weights of one       its result, if heads are replaced

A mode intercepts these functions of torch while a module of the model is running.
Whether a softmax is attention is told by the verifier (verify.py), which hears the
operators below. The patches are undone when the `with` is left.

Next: verify.py
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import Any

from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from regard.ablate.active import ACTIVE, edited
from regard.ablate.edited_calls import EditedCalls
from regard.ablate.edited_products import PRODUCTS, EditedProducts
from regard.lens import (
    SDPA,
    CapturedCall,
    arrange,
    compute_weights,
    expect_sdpa,
    list_adapters,
)
from regard.run.call_edit import SOFTMAX, PendingCall, find_hidden, lower, run_safely
from regard.run.cells import drop_axes
from regard.run.monkeypatch import put
from regard.run.own_work import compute

Handler = Callable[[Any, Any, Any], Any]  # function, args, named


def expect_aligned(learnt: int, *args: Any, **named: Any) -> PendingCall:
    """Return what is known of a call in nn.MultiheadAttention: it has no cache."""
    return replace(expect_sdpa(*args, **named), aligned=True, learnt=learnt)


def describe_sdpa(args: Any, named: Mapping[str, Any]) -> CapturedCall:
    """Return a call of the kernel as it was run."""
    given = dict(
        zip(("query", "key", "value", "mask", "", "causal"), args, strict=False)
    )
    mask = named.get("attn_mask", given.get("mask"))
    q, k, v, mask = arrange(given["query"], given["key"], given["value"], mask)
    scale = named.get("scale")
    return CapturedCall(
        via=SDPA.name,
        q=q,
        k=k,
        v=v,
        out=None,
        lse=None,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        mask=mask,
        causal=bool(named.get("is_causal", given.get("causal"))),
    )


class Mode(TorchFunctionMode):  # type: ignore[misc]
    """Intercepts every torch function of this thread while it is active."""

    def __init__(self, calls: EditedCalls) -> None:
        super().__init__()
        self.calls, self.verifier = calls, calls.verifier
        self.products = EditedProducts()
        self.handlers: dict[Any, Handler] = {
            F.multi_head_attention_forward: self.run_mha,
            **dict.fromkeys(SOFTMAX, self.run_softmax),
            **dict.fromkeys(PRODUCTS, self.products.run),
        }
        for adapter in list_adapters():
            for function in adapter.torch_functions:
                self.handlers[function] = partial(calls.run, adapter)

    def __enter__(self) -> Any:
        self.verifier.enter()
        return super().__enter__()

    def flush(self) -> None:
        """End a pass."""
        self.verifier.leave()

    def __torch_function__(
        self, func: Any, _types: Any, args: Any = (), named: Any = None
    ) -> Any:
        named = named or {}
        handler = None if self.verifier.local.held else self.handlers.get(func)
        return func(*args, **named) if handler is None else handler(func, args, named)

    def run_mha(self, func: Any, args: Any, named: Any) -> Any:
        """Edit the kernel call inside nn.MultiheadAttention.

        Its function hides its calls from modes, so the kernel is monkeypatched while it
        runs. With need_weights it would call no kernel: it is run without, and its
        weights are computed again.
        """
        if not any(ablation.is_running() for ablation in ACTIVE):
            return func(*args, **named)
        kept: list[tuple[Any, Any]] = []
        thread, asked = threading.get_ident(), named.get("need_weights", True)
        given = inspect.signature(func).bind(*args, **named).arguments
        learnt = (given["bias_k"] is not None) + given["add_zero_attn"]
        inside = replace(SDPA, expect=partial(expect_aligned, learnt))

        def make(before: Any) -> Any:
            @wraps(before)  # a call that is run again is not kept
            def keep(*args: Any, **named: Any) -> Any:
                kept.append((args, named))
                return before(*args, **named)

            def stand_in(*args: Any, **named: Any) -> Any:
                if threading.get_ident() != thread:  # other threads are unaffected
                    return before(*args, **named)
                return self.calls.run(inside, keep, args, named)

            return stand_in

        with put(F, "scaled_dot_product_attention", make):
            out, _ = func(*args, **{**named, "need_weights": False})
        if not asked:
            return out, None
        with compute():
            weights = compute_weights(describe_sdpa(*kept[-1]))
        if named.get("average_attn_weights", True):
            weights = weights.mean(1)
        return out, weights if out.ndim == 3 else weights[0]

    def run_softmax(self, func: Any, args: Any, named: Any) -> Tensor:
        """Edit a softmax over keys: the last resort, if nothing else is called."""
        logits = args[0] if args else named["input"]
        axis = named.get("dim", args[1] if len(args) > 1 else None)
        last = axis in (-1, logits.ndim - 1) and logits.shape[-1] > 1
        if (
            not last
            or logits.ndim not in (3, 4)
            or not self.verifier.is_attention(logits)
        ):
            return func(*args, **named)
        n_q, n_k = logits.shape[-2:]
        call = PendingCall(
            like=logits,
            heads=None if logits.ndim == 3 else logits.shape[1],
            n_q=n_q,
            n_k=n_k,
            sure=False,
            learnt=self.verifier.count_sinks(logits),
            find_hidden=partial(find_hidden, logits),
        )
        with edited(call) as edit:
            if edit.cells is None:
                weights = func(*args, **named)
            else:
                logits, _ = lower(logits, drop_axes(edit.cells, logits.ndim))
                named = {name: x for name, x in named.items() if name != "input"}
                weights = run_safely(logits, *args[1:], **named)
        weights = replace(edit, replaced=()).clear(weights)
        if edit.replaced:
            self.products.expect(self.verifier.here.name, weights, edit)
        return weights
