"""The trace of a pass: what each storage holds, and what operators did to it.

    a new result         was made from one of its arguments, element by element, and has
                         its axes; scores and weights take their story along
    a result in place    adds a step to the scores, or a change to the weights

A storage is known by its address. Every new tensor replaces what was known of its
address, so that memory that is used again does not keep an old story.

Next: observer.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from regard.lens.operators import (
    COPIES,
    JOINS,
    RANDOM,
    REFILLS,
    RESHAPES,
    SELECTS,
    find_tensors,
    has_numbers,
    read_name,
)
from regard.lens.origin import FEATURE, ROW, Origin, Step, View
from regard.lens.steps import read_step


class Trace:
    """What the storages of one pass hold."""

    def __init__(self, module: Callable[[], str]) -> None:
        self.module = module  # the innermost module that is running
        self.origins: dict[int, Origin] = {}  # by address

    def get(self, x: Tensor) -> Origin | None:
        """Return the origin of a tensor's storage, None if it is not known."""
        return self.origins.get(x.untyped_storage().data_ptr())

    def find(self, x: Tensor) -> Origin:
        """Return the origin of a tensor's storage; of an unknown one, a new origin."""
        found = self.get(x)
        if found is None:
            found = Origin(tuple(x.shape), x.stride())
            self.put(x, found)
            found.module = None  # it was there before
        return found

    def view(self, x: Tensor) -> View:
        """Return a tensor's shape and strides, and its origin."""
        return View(self.find(x), tuple(x.shape), x.stride())

    def put(self, x: Tensor, origin: Origin) -> None:
        """Set what a new storage holds, which an operator has just made."""
        if x.numel():
            origin.module = self.module()
            self.origins[x.untyped_storage().data_ptr()] = origin

    def add_results(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add the results of an operator that are new."""
        name, given = read_name(func), list(find_tensors((*args, *kwargs.values())))
        for result in find_tensors(out if isinstance(out, tuple | list) else (out,)):
            self.put(result, self.derive(name, args, kwargs, given, result))

    def add_copy(self, _func: Any, args: Any, _kwargs: Any, out: Tensor) -> None:
        """Add a result that is a view of the first argument, or a copy of it."""
        given = args[0]
        if not out.numel() or not has_numbers(given):
            return
        if out.untyped_storage().data_ptr() == given.untyped_storage().data_ptr():
            return
        strides = [1]
        for size in reversed(given.shape[1:]):
            strides.insert(0, strides[0] * size)
        view = self.view(given)
        made = Origin(tuple(given.shape), tuple(strides[: given.ndim]), lead=view)
        self.carry_story(made, "clone", args, {})
        self.put(out, made)

    def derive(
        self,
        name: str,
        args: Any,
        kwargs: Any,
        given: Sequence[Tensor],
        result: Tensor,
    ) -> Origin:
        """Return the origin of a new result."""
        shape, strides = tuple(result.shape), result.stride()
        if name == "convolution":
            return self.derive_convolved(args[0], args[1], result)
        fresh = (
            (args[1] if len(args) > 1 else 0) % len(shape) if name in JOINS else None
        )
        lead = self.choose_lead(name, given, result)
        if lead is None:
            return self.derive_reshaped(name, given, result)
        made = Origin(shape, strides, lead=self.view(lead), fresh=fresh)
        made.is_random = name.startswith(RANDOM)
        if fresh is None and lead.numel() == result.numel():
            self.carry_story(made, name, args, kwargs)
        elif name == "cat" and fresh == len(shape) - 1:
            self.add_sink(made, given)
        if name in JOINS:
            self.add_joined(made, name, given)
        return made

    def derive_convolved(self, given: Tensor, weight: Tensor, result: Tensor) -> Origin:
        """Return the origin of a convolution; one of single cells may mix heads."""
        shape, strides = tuple(result.shape), result.stride()
        origin = self.get(given)
        mixes = weight.shape[2:].numel() == 1 and given.shape[2:] == shape[2:]
        if origin is None or origin.softmax is None or not mixes:
            kinds = [ROW, FEATURE] + [ROW] * (len(shape) - 2)
            return Origin(shape, strides, kinds=kinds)
        made = Origin(shape, strides, lead=self.view(given), fresh=1)
        made.softmax, made.changes = origin.softmax, (*origin.changes, "convolution")
        return made

    def add_joined(self, made: Origin, name: str, given: Sequence[Tensor]) -> None:
        """Carry weights over to what was joined from them."""
        for x in given:
            origin = self.get(x)
            if origin is None or origin.softmax is None:
                continue
            if made.softmax is None:
                made.softmax, made.changes = origin.softmax, (*origin.changes, name)
            made.others = (*made.others, origin.softmax, *origin.others)

    def choose_lead(
        self, name: str, given: Sequence[Tensor], result: Tensor
    ) -> Tensor | None:
        """Return the argument whose axes the result has, None if there is none.

        Scores and weights come first, then the first argument of the same shape, then
        one that was broadcast.
        """
        fits = list_fitting(name, given, result)
        known = [(x, self.get(x)) for x in fits]
        for kind in ("softmax", "product"):  # weights come before scores
            for x, origin in known:
                if getattr(origin, kind, None) is not None:
                    return x
        if fits or name in RESHAPES:
            return fits[0] if fits else None
        some = [x for x in given if broadcasts(x, result)]
        return max(some, key=lambda x: x.ndim) if some else None

    def derive_reshaped(
        self, name: str, given: Sequence[Tensor], result: Tensor
    ) -> Origin:
        """Return the origin of a result with axes of its own."""
        made = Origin(tuple(result.shape), result.stride())
        for x in given if name in RESHAPES else ():
            origin = self.get(x)
            if origin is not None and origin.softmax is not None:
                made.softmax, made.changes = origin.softmax, (*origin.changes, name)
        return made

    def add_sink(self, made: Origin, given: Sequence[Tensor]) -> None:
        """Carry scores over to what was joined from them and the logits of a sink."""
        assert made.lead is not None
        origin = made.lead.origin
        is_first = self.get(given[0]) is origin
        if origin.product and is_first and len(given) == 2 and origin.extra is None:
            made.product, made.steps = origin.product, origin.steps
            made.extra = given[1].detach()  # a key without a value

    def carry_story(self, made: Origin, name: str, args: Any, kwargs: Any) -> None:
        """Carry what is known of scores or weights over to what was made from them."""
        assert made.lead is not None
        origin = made.lead.origin
        if name.endswith("_like"):
            return  # only its shape is that of the scores
        if origin.softmax is not None:
            made.softmax, made.changes = origin.softmax, origin.changes
            made.is_log = origin.is_log
            self.add_change(made, name, args)
        elif origin.product is not None:
            made.product, made.extra = origin.product, origin.extra
            step = self.make_step(name, args, kwargs, made.lead)
            made.steps = (*origin.steps, step)

    def make_step(self, name: str, args: Any, kwargs: Any, view: View) -> Step:
        """Return what an operator did to scores."""
        if kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode") is not None:
            return Step("unknown")
        for i, x in enumerate(args):
            if isinstance(x, Tensor) and self.get(x) is view.origin:
                return read_step(name, args, i, view)
        return Step("unknown")

    def add_change(self, origin: Origin, name: str, args: Any) -> None:
        """Add what an operator did to weights."""
        if name == "exp" and origin.is_log:
            origin.is_log = False
        elif name not in COPIES:
            others = (self.get(x) for x in find_tensors(args))
            random = any(x is not None and x.is_random for x in others)
            random = random or name == "native_dropout"
            origin.changes += ("dropout" if random else name,)

    def add_in_place(self, func: Any, args: Any, kwargs: Any) -> None:
        """Add what an operator did to an array in its place."""
        name = read_name(func).rstrip("_")
        target = kwargs.get("out", args[0] if args else None)
        if not isinstance(target, Tensor) or not target.numel():
            return
        self.find(target).writes += 1
        if "out" in kwargs:
            given = list(find_tensors(args))
            self.put(target, self.derive(name, args, {}, given, target))
        elif name in REFILLS:
            self.put(target, Origin(tuple(target.shape), target.stride()))
        elif name == "copy" and self.is_story(args[1]) and is_whole(target):
            self.put(target, self.derive(name, args[1:], {}, [args[1]], target))
        else:
            self.change_in_place(name, args, kwargs, target)

    def is_story(self, x: Any) -> bool:
        """Return whether x holds scores or weights."""
        origin = self.get(x) if isinstance(x, Tensor) and not x.is_nested else None
        if origin is None:
            return False
        return bool(origin.product or origin.softmax or origin.others)

    def change_in_place(
        self, name: str, args: Any, kwargs: Any, target: Tensor
    ) -> None:
        """Add a step to scores, or a change to weights."""
        origin = self.find(target)
        if name.startswith(RANDOM):
            origin.is_random = True
        whole = target.numel() == math.prod(origin.shape)
        if origin.softmax is not None:
            self.add_change(origin, name if whole else f"{name} of a part", args[1:])
        elif origin.product is not None:
            view = self.view(target)
            step = self.make_step(name, args, kwargs, view) if whole else None
            origin.steps = (*origin.steps, step or Step("unknown"))


def list_fitting(name: str, given: Sequence[Tensor], result: Tensor) -> list[Tensor]:
    """Return the arguments whose axes a result may have."""
    if name in JOINS:  # last, learnt keys that are the same for all sequences
        return sorted((x for x in given if x.ndim == result.ndim), key=repeats)
    some = given[:1] if name in SELECTS else given  # not what selects
    return [x for x in some if x.shape == result.shape]


def broadcasts(x: Tensor, result: Tensor) -> bool:
    """Return whether x has some axes of a result, aligned at the last one."""
    if x.ndim > result.ndim or x.ndim < 2:
        return False
    pairs = zip(reversed(x.shape), reversed(result.shape), strict=False)
    return all(n in (1, size) for n, size in pairs)


def repeats(x: Tensor) -> bool:
    """Return whether a tensor only repeats itself along an axis."""
    return any(
        n > 1 and not stride for n, stride in zip(x.shape, x.stride(), strict=True)
    )


def is_whole(x: Tensor) -> bool:
    """Return whether a tensor fills its storage."""
    return bool(x.nbytes == x.untyped_storage().nbytes())


def find_storages(model: nn.Module) -> set[int]:
    """Return the storages of a model's parameters."""
    found = set()
    for x in model.parameters():
        with suppress(Exception):  # a subclass without memory of its own
            found.add(x.untyped_storage().data_ptr())
    return found - {0}
