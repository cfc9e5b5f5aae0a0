"""Hear every operator that a model runs, without changing one.

The observer is a dispatch mode: it works below autograd, for every caller. It runs each
operator with its own arguments, and hands arguments and result to `find_attention.py`.
An error of ours becomes a reason in the coverage and is never raised.

    tensors                              how they are heard
    plain ones, and parameters           each operator
    subclasses (nested, DTensor, …)      the operators that they run inside
    fake and meta tensors                their softmaxes are counted: they have no data
    in inference mode                    composite operators arrive whole and are taken
                                         apart, so that the same kernels run

Next: plain_layers.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import (
    flex_attention,
    flex_attention_backward,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from regard.lens.find_attention import NO_DATA, AttentionFinder
from regard.lens.fused import ask_for_lse
from regard.lens.operators import FUSED, SOFTMAX, has_nested, is_composite, read_name
from regard.lens.plain_layers import PLAIN, add_layer, cannot_attend
from regard.run.modules import Act
from regard.run.own_work import COMPUTING, compute

NO_WAY = torch._C._disabled_torch_dispatch_impl  # noqa: SLF001
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd  # noqa: SLF001


class Observer(TorchDispatchMode):  # type: ignore[misc]
    """Hears every operator of a thread while it is active."""

    supports_higher_order_operators = True  # FlexAttention is one

    def __init__(self, finder: AttentionFinder) -> None:
        super().__init__()
        self.finder = finder
        self.muted = 0  # inside of a call that is reported as a whole
        self.called = 0  # softmaxes and kernels that Python called, in this pass
        self.in_sdpa = 0  # inside of a patched function, observed in narrow passes too
        self.resting: nn.Module | None = None  # the layer that is not observed

    @property
    def is_deaf(self) -> bool:
        """Whether nothing is observed: it is reported as a whole, or it is ours."""
        return bool(self.muted) or COMPUTING.on

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # FlexAttention compiles itself, and refuses other modes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled during a watch; the wrapper costs time

    def __enter__(self) -> Any:
        self.keys = (
            torch._C._dispatch_tls_local_include_set(),  # noqa: SLF001
            torch._C._dispatch_tls_local_exclude_set(),  # noqa: SLF001
        )
        return super().__enter__()

    def rest(self, module: nn.Module, args: Any) -> None:
        """Observe nothing until a layer that cannot attend has run."""
        if len(args) != 1 or type(args[0]) not in PLAIN or self.is_deaf:
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001
            return  # vmap and grad wrap what has no storage of its own
        alone = _get_current_dispatch_mode_stack() == [self] and self.resting is None
        with torch._C.DisableTorchFunction():  # noqa: SLF001
            if alone and not self.finder.trace.is_story(args[0]):
                self.resting = module
                _pop_mode()

    def wake(self, args: Any, out: Any) -> None:
        """Observe again; `out` is what the layer returned, None after an error."""
        module = self.resting
        if module is None:
            return
        if self not in _get_current_dispatch_mode_stack():  # no interrupt came before
            _push_mode(self)
        self.resting = None
        if out is not None:
            with torch._C.DisableTorchFunction():  # noqa: SLF001
                add_layer(self.finder.trace, module, args[0], out)

    def __exit__(self, *error: object) -> None:
        self.wake((), None)  # an interrupt came while it rested
        # torch 2.6 frees a popped mode that only its stack holds, and then returns it:
        # passes that end in the order in which they began pop each other's modes
        held = _get_current_dispatch_mode_stack()
        if not held:  # an interrupt took them all
            _push_mode(self)
        super().__exit__(*error)
        del held

    def ask(self, func: Any, args: Any) -> Any:
        """Return the arguments of an operator, with its lse asked for."""
        try:
            return ask_for_lse(func, args)
        except Exception as error:  # noqa: BLE001 (nothing of ours reaches the model)
            self.finder.listener.fail(error)
            return args

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), named: Any = None
    ) -> Any:
        named = named or {}
        if types and any(map(has_own_way, types)):
            return self.run_subclass(func, types, args, named)
        if self.is_deaf:  # no lens hears what another one computes
            return func(*args, **named)
        whole = torch.is_inference_mode_enabled() and is_composite(func)
        if whole and not has_nested(args):
            # with the dispatch keys of the model, which decide how `linear` runs
            with torch._C._ForceDispatchKeyGuard(*self.keys), self:  # noqa: SLF001
                return func._op_dk(COMPOSITE, *args, **named)  # noqa: SLF001
        if not self.hears(func):  # a view: most operators are
            return func(*args, **named)
        before = self.save_overwritten(args, named)
        out = func(*self.ask(func, args), **named)
        try:
            with compute():
                self.finder.hear(func, before, named, out)
        except Exception as error:  # noqa: BLE001 (nothing of ours reaches the model)
            self.finder.listener.fail(error)
        return out

    def hears(self, func: Any) -> bool:
        """Return whether an operator tells anything."""
        try:
            return self.finder.hears(func)
        except Exception as error:  # noqa: BLE001 (nothing of ours reaches the model)
            self.finder.listener.fail(error)
            return False

    def run_subclass(self, func: Any, types: Any, args: Any, named: Any) -> Any:
        """Run an operator on tensors that have their own way to run it."""
        others = [kind for kind in types if has_own_way(kind)]
        if not all(x.__module__.startswith("torch._subclasses") for x in others):
            return NotImplemented  # what they run inside is heard
        out = func(*args, **named)
        if read_name(func) in SOFTMAX | FUSED:
            listener = self.finder.listener
            listener.drop(listener.module(), NO_DATA, attention=True)
        return out

    def save_overwritten(self, args: Any, named: Any) -> Any:
        """Return the arguments as they are before an operator writes into them."""
        out, self.finder.before = named.get("out"), None
        if not isinstance(out, Tensor) or not args or not isinstance(args[0], Tensor):
            return args
        try:
            with compute():
                first = args[0]
                where = first.untyped_storage().data_ptr()
                if out.untyped_storage().data_ptr() == where:
                    self.finder.before = first
                    return (first.clone(), *args[1:])
        except Exception as error:  # noqa: BLE001
            self.finder.listener.fail(error)
        return args

    def count_missed(self) -> int:
        """Return how many calls of Python ran no operator that was observed."""
        missed = max(0, self.called - self.finder.operators)
        self.called = self.finder.operators = 0
        return missed

    def flush(self) -> None:
        """Report what is pending, and forget everything: the pass is over."""
        try:
            self.finder.flush()
        except Exception as error:  # noqa: BLE001 (nothing of ours reaches the model)
            self.finder.listener.fail(error)


def list_rests(here: Any, module: nn.Module) -> tuple[Act, Act] | None:
    """Return how the observer of a thread rests while a layer runs; None: never."""

    def rest(_name: str, module: nn.Module, args: Any, named: Any) -> None:
        if here.entered and not named:
            here.mode.rest(module, args)

    def wake(_name: str, _module: nn.Module, args: Any, out: Any) -> None:
        if here.entered:
            here.mode.wake(args, out)

    return (rest, wake) if cannot_attend(module) else None


def has_own_way(kind: Any) -> bool:
    """Return whether tensors of a class run operators in a way of their own."""
    return kind not in PLAIN and kind.__torch_dispatch__ is not NO_WAY


def hear_flex(func: Any, mode: Observer, *args: Any, **named: Any) -> Any:
    """Give a higher-order operator to the mode as any other one."""
    types = tuple(type(x) for x in args if isinstance(x, Tensor))
    return mode.__torch_dispatch__(func, types, args, named)


if "supports_higher_order_operators" not in vars(TorchDispatchMode):
    # torch 2.6 asks each operator which modes it knows
    for func in (flex_attention, flex_attention_backward):
        func.py_impl(Observer)(partial(hear_flex, func))
