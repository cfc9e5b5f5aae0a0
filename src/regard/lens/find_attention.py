"""Find attention among the operators that a model runs.

    operator                            what is done when it has run
    a matrix product                    its operands are held for a while
    an operator on scores               becomes a step: scaled, added, hid (trace.py)
    a softmax                           its logits are explained (softmax_call.py)
    exp of scores                       is a softmax by hand, which is only reported
    a product that sums over its keys   the attention call is complete (take_weights.py)
    fused attention                     is a complete call by itself (fused.py)

A softmax whose weights no product takes is a gate, a router or an output.

Next: observer.py
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from regard.lens.captured_call import PIECE, CapturedCall, unpack_rows
from regard.lens.fused import read_flex, read_fused
from regard.lens.layout import Axis
from regard.lens.operators import (
    COMPOSITE_ATTENTION,
    ENCODER_LAYER,
    EXPONENTS,
    FAST_PATHS,
    FLEX,
    FUSED,
    MAYBE_VIEWS,
    PRODUCTS,
    RESHAPES,
    SOFTMAX,
    is_mutable,
    makes_tensors,
    read_name,
)
from regard.lens.origin import Origin, Product, View
from regard.lens.placement import Placement, place_axes
from regard.lens.products import name_kinds, read_operands, read_terms
from regard.lens.softmax_call import SoftmaxCall, hear_softmax
from regard.lens.take_weights import Taken, make_call
from regard.lens.trace import Trace
from regard.recording.coverage import COMPARES

ATTENDING = SOFTMAX | FUSED | COMPOSITE_ATTENTION | {FLEX}
HELD = 8  # products and softmaxes that are held at the same time
TAKEN = "taken"  # the kind of an axis of what an attention gave
UNSTABLE = Placement(keys=-1)  # the axes of a module's calls differ
UNUSED = "no matrix product takes its result"
PARTLY = "a product takes its weights in a way that could not be followed"
NO_DATA = "its tensors have no data"
NESTED = "nested tensors are not recorded in inference mode"
NO_NESTED = "nested tensors cannot be recorded by this operator"
BY_HAND = "its weights are computed by exp, not by a softmax"
NO_AXES = "its axes could not be followed"

Handler = Callable[[Any, Any, Any, Any], None]  # operator, args, kwargs, result
Pair = tuple[Tensor, Tensor]


class Listener(Protocol):
    """Who is told about attention calls."""

    def module(self) -> str:
        """Return the innermost module that is running."""

    def complete(self, module: str, call: CapturedCall) -> None:
        """Take a complete call."""

    def drop(self, module: str, reason: str, *, attention: bool) -> None:
        """Take a call that is not kept, and why."""

    def fail(self, error: Exception) -> None:
        """Take an error of the observer."""


class AttentionFinder:
    """Finds the attention calls of one thread."""

    def __init__(
        self,
        listener: Listener,
        weights: set[int],  # storages of the model's parameters
        placements: dict[str, Placement] | None = None,
        harmless: Sequence[str] = (),  # operators that may change weights
    ) -> None:
        self.listener, self.weights = listener, weights
        self.trace = Trace(listener.module)
        self.harmless = describe_changes(harmless)
        self.placements = {} if placements is None else placements  # by module
        self.narrow = False  # it hears a single call, and cannot trace its arguments
        self.products: deque[Product] = deque()
        self.pending: deque[SoftmaxCall] = deque()
        self.queries: dict[str, list[Origin]] = {}  # of modules that attended
        self.handlers: dict[Any, Handler | None] = {}
        self.before: Tensor | None = None  # an argument that was overwritten
        self.operators = 0  # softmaxes and kernels

    def hears(self, func: Any) -> bool:
        """Return whether an operator tells anything."""
        if func not in self.handlers:
            self.handlers[func] = None  # if the next line fails
            self.handlers[func] = self.choose_handler(func)
        return self.handlers[func] is not None

    def hear(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Hear an operator that has run."""
        handler = self.handlers[func]
        self.operators += read_name(func) in ATTENDING
        if handler is not None:
            handler(func, args, kwargs, out)

    def choose_handler(self, func: Any) -> Handler | None:
        """Return how a kind of operator is heard; views need not be."""
        name = read_name(func)
        for names, handler in (
            (SOFTMAX, self.hear_softmax),
            (FUSED, self.hear_fused),
            ({FLEX}, self.hear_flex),
            (PRODUCTS, self.hear_product),
            (EXPONENTS, self.hear_exp),
            (COMPOSITE_ATTENTION, self.hear_composite),
        ):
            if name in names:
                return handler
        if is_mutable(func):
            return self.hear_in_place
        if name in MAYBE_VIEWS:  # heard as a whole in inference mode only
            return self.trace.add_copy
        return self.trace.add_results if makes_tensors(func) else None

    def hear_in_place(self, func: Any, args: Any, kwargs: Any, _out: Any) -> None:
        """Hear an operator that wrote into its arguments."""
        self.trace.add_in_place(func, args, kwargs)

    def hear_composite(self, _func: Any, _args: Any, _kwargs: Any, _out: Any) -> None:
        """Count attention that could not be taken apart."""
        self.listener.drop(self.listener.module(), NESTED, attention=True)

    def hear_softmax(self, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
        """Explain the logits of a softmax, and hold it until a product takes it."""
        logits, dim, name = args[0], args[1], read_name(func)
        module, before = self.listener.module(), self.before
        if logits.is_nested:
            self.listener.drop(module, NO_NESTED, attention=True)
            return
        if logits.ndim == 0 or not logits.numel():
            self.listener.drop(module, UNUSED, attention=False)
            return
        if logits.device.type == "meta":
            self.listener.drop(module, NO_DATA, attention=True)
            return
        is_log = "log" in name
        try:
            origin = self.trace.find(logits if before is None else before)
            weights = out.exp() if is_log else out
            call = hear_softmax(
                module, logits, weights, dim, origin, is_safe="safe" in name
            )
        except Exception as error:
            self.listener.drop(module, describe_error(error), attention=True)
            raise
        made = Origin(tuple(out.shape), out.stride(), lead=call.view, softmax=call)
        made.is_log = is_log
        self.trace.put(out, made)
        self.pending.append(call)
        if len(self.pending) > HELD:
            self.give_up(self.pending.popleft())

    def hear_exp(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Find weights that no softmax computed; a product that takes them is told."""
        before = self.trace.get(args[0])
        scores = None if before is None else before.product
        hear = self.hear_in_place if is_mutable(func) else self.trace.add_results
        hear(func, args, kwargs, out)
        made = self.trace.get(out)
        if scores is None or made is None or made.softmax is not None:
            return
        view = self.trace.view(out)
        given = self.listener.module(), view, view.axes(), -1, out.dtype
        call = SoftmaxCall(*given, reason=BY_HAND, is_by_hand=True)
        made.product, made.softmax = None, call

    def hear_product(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Hold the operands of a product, or find that it takes weights."""
        name = read_name(func)
        operands = read_operands(name, args, out)
        if operands is None:
            return
        left, right, full = operands
        views = self.trace.view(left), self.trace.view(right)
        fixed = [x.untyped_storage().data_ptr() in self.weights for x in (left, right)]
        origin = Origin(tuple(out.shape), out.stride())
        for call in (call for view in views for call in view.origin.others):
            call.is_touched = True
        if self.take_any(views, (left, right), full, fixed):
            origin.kinds = [TAKEN] * out.ndim
        elif any(fixed):
            origin.kinds = name_kinds(out.ndim, fixed, views)
            self.mix(origin, views)
        elif any(is_traced(view) for view in views):
            self.mix(origin, views)
        else:
            self.hold(origin, Product(left, right, views))
            origin.steps = read_terms(name, args, kwargs, origin)
        self.trace.put(out, origin)

    def hold(self, origin: Origin, product: Product) -> None:
        """Hold a product that may make scores, and release the oldest."""
        axes = product.axes()
        origin.product = product
        origin.axes = (
            axes[3 - len(origin.shape) :] if len(origin.shape) > 1 else axes[1:2]
        )
        self.products.append(product)
        if len(self.products) > HELD:
            self.products.popleft().forget()

    def mix(self, made: Origin, views: tuple[View, View]) -> None:
        """Carry weights, if one side holds any, through a product that mixes heads."""
        if not any(view.origin.softmax for view in views):
            return
        side = 0 if views[0].origin.softmax is not None else 1
        origin, axes = views[side].origin, views[side].axes()
        assert origin.softmax is not None
        if axes is None or origin.softmax.is_touched:  # these are no weights any more
            return
        made.softmax, made.changes = origin.softmax, (*origin.changes, "a product")
        kept = list(made.begin())
        if len(kept) == 3:
            kept[0] = axes[0]
        if len(kept) > 1:
            kept[-1 if side else -2] = axes[2 if side else 1]
        made.axes = tuple(kept)

    def take_any(
        self,
        views: tuple[View, View],
        operands: Pair,
        out: Tensor,
        fixed: Sequence[bool],
    ) -> bool:
        """Return whether a product takes the weights of a softmax."""
        for side, view in enumerate(views):
            if view.origin.softmax is None or fixed[1 - side]:
                continue  # a layer that is applied to what a gate let through
            if self.take(side, views, operands, out):
                return True
        return False

    def take(
        self, side: int, views: tuple[View, View], operands: Pair, out: Tensor
    ) -> bool:
        """Complete a call if a product sums over its keys; return whether it does."""
        origin, axes = views[side].origin, views[side].axes()
        call = origin.softmax
        assert call is not None
        if axes is None or call.axes is None or origin.is_log:
            call.is_touched = True
            return False
        batch, *rest = axes
        rows, keys = rest[:: 1 - 2 * side]  # turned, if they are the right operand
        first, summed = find_value_axes(side, views)
        if call.is_of_features or (call.operands is None and is_taken(summed)):
            return False  # linear attention: a softmax over features
        if not call.is_summed(keys):
            moved = not RESHAPES.isdisjoint(origin.changes)  # its keys are anywhere
            call.is_touched |= moved or call.shares_axes(keys)
            return False
        if not call.is_taken:
            call.is_taken = True
            values, out = (x.mT if side else x for x in (operands[1 - side], out))
            taken = Taken((batch, rows, keys), values.detach(), first, out.detach())
            self.complete(call, taken, describe_changes(origin.changes))
        return True

    def complete(self, call: SoftmaxCall, taken: Taken, notes: list[str]) -> None:
        """Report a softmax that is attention."""
        if call in self.pending:
            self.pending.remove(call)
        try:
            notes = [x for x in notes if x not in self.harmless]
            made = None if call.reason else make_call(call, taken, notes)
            made = None if made is None else unpack_rows(made)
            views = [call.view] if call.product is None else call.product.views
            outside = not all(view.is_from(call.module) for view in views)
        except Exception as error:
            self.listener.drop(call.module, describe_error(error), attention=True)
            raise
        if made is None:
            self.listener.drop(call.module, call.reason or NO_AXES, attention=True)
        else:
            side = 1 if call.transposed else 0
            view = None if call.product is None else call.product.views[side]
            self.report(call.module, replace(made, from_outside=outside), view)
        call.release()

    def report(self, module: str, call: CapturedCall, queries: View | None) -> None:
        """Report a complete call, and whether its queries are a piece of an array."""
        if queries is not None:
            before, base = self.queries.setdefault(module, []), queries.find_base()
            if any(base is x for x in before) and not queries.has_all_rows(base):
                call = replace(call, note="; ".join(filter(None, (call.note, PIECE))))
            before.append(base)
        self.listener.complete(module, call)

    def hear_fused(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Report a fused attention call."""
        module, name = self.listener.module(), read_name(func)
        if name == ENCODER_LAYER:
            module = f"{module}.self_attn" if module else "self_attn"
        try:
            made = read_fused(func, args, kwargs, out)
            if isinstance(made, CapturedCall) and made.q.device.type == "meta":
                made = NO_DATA
            queries = None
            if isinstance(made, CapturedCall) and name not in FAST_PATHS:
                queries = None if self.narrow else self.trace.view(args[0])
                made = self.place(module, made, args)
        except Exception as error:
            self.listener.drop(module, describe_error(error), attention=True)
            raise
        if isinstance(made, str):
            self.listener.drop(module, made, attention=True)
        else:
            self.report(module, made, queries)
        if not self.narrow:
            self.trace.add_results(func, args, kwargs, out)

    def hear_flex(self, _func: Any, args: Any, _kwargs: Any, out: Any) -> None:
        """Report a call of FlexAttention."""
        module = self.listener.module()
        try:
            made = read_flex(args, out)
        except Exception as error:
            self.listener.drop(module, describe_error(error), attention=True)
            raise
        self.listener.complete(module, made)

    def place(self, module: str, call: CapturedCall, args: Any) -> CapturedCall:
        """Return a fused call with its axes as they were traced, now or earlier."""
        if self.narrow:
            placement = self.placements.get(module)
            return call if placement is None else placement.apply(call)
        made, placement = place_axes(call, [self.trace.view(x) for x in args[:3]])
        if placement is None or self.placements.get(module, placement) != placement:
            placement = UNSTABLE
        self.placements[module] = placement
        return made

    def give_up(self, call: SoftmaxCall) -> None:
        """Report a softmax whose weights no product took."""
        compares = call.formula is not None and not call.is_of_features
        reason = PARTLY if call.is_touched else COMPARES if compares else UNUSED
        self.listener.drop(call.module, reason, attention=call.is_touched)
        call.release()

    def flush(self) -> None:
        """Report what is pending, and forget everything: the pass is over."""
        try:
            while self.pending:
                self.give_up(self.pending.popleft())
        finally:
            for product in self.products:
                product.forget()
            self.pending.clear()
            self.products.clear()
            self.queries.clear()
            self.trace.origins.clear()


def find_value_axes(side: int, views: tuple[View, View]) -> tuple[Axis | None, Axis]:
    """Return the axis of the batch of the values, and the one that is summed over."""
    axes = views[1 - side].axes()
    return (None, ()) if axes is None else (axes[0], axes[2 if side else 1])


def is_traced(view: View) -> bool:
    """Return whether an array holds weights of scores that were traced to q and k."""
    call = view.origin.softmax
    return call is not None and call.product is not None and not call.is_touched


def is_taken(axis: Sequence[Any]) -> bool:
    """Return whether an axis is one of what an attention gave."""
    return any(getattr(part.root, "kind", "") == TAKEN for part in axis)


def describe_error(error: Exception) -> str:
    """Return an error of ours as a reason."""
    return f"the observer failed: {type(error).__name__}: {error}"


def describe_changes(changes: Sequence[str]) -> list[str]:
    """Return what was done to weights after their softmax, as notes."""
    return [
        "dropout was applied to the weights"
        if change == "dropout"
        else f"the weights were changed after the softmax ({change})"
        for change in dict.fromkeys(changes)
    ]
