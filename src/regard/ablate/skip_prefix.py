"""Run a model from a layer on: modules that are done before it are not run again.

    prefix = Prefix(model, run, ["model.layers.17.self_attn"])
    with prefix.skip("model.layers.17.self_attn", batch=9):
        run(model)           blocks 0 … 16 return what they returned in the first run

In a search over the heads of a layer, everything before the layer is the same for all
of them. The outermost modules that end before the layer begins return copies of their
outputs, repeated for each sequence of the batch. A module that is called twice in a
pass is always run.

Next: search_heads.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

RunModel = Callable[[nn.Module], Any]
ENTER, LEAVE = "enter", "leave"


class Prefix:
    """The modules of one pass, in their order, and the outputs of some of them."""

    def __init__(self, model: nn.Module, run: RunModel, layers: list[str]) -> None:
        self.modules = dict(model.named_modules())
        events: list[tuple[str, str]] = []

        def note(what: str, name: str, *_: Any) -> None:
            events.append((what, name))

        with self.hook(self.modules, note):
            run(model)
        self.done = {layer: find_done(events, layer) for layer in layers}
        needed = {name for names in self.done.values() for name in names}
        self.outputs: dict[str, Any] = {}

        def keep(what: str, name: str, *given: Any) -> None:
            if what == LEAVE:
                self.outputs[name] = tree_map(copy_tensor, given[-1])

        with self.hook({x: self.modules[x] for x in needed}, keep):
            run(model)

    @staticmethod
    @contextmanager
    def hook(
        modules: dict[str, nn.Module], note: Callable[..., None]
    ) -> Iterator[None]:
        """Call note("enter" or "leave", name, module, …) for these modules."""
        with ExitStack() as stack:
            for name, module in modules.items():
                before = module.register_forward_pre_hook(partial(note, ENTER, name))
                after = module.register_forward_hook(partial(note, LEAVE, name))
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    @contextmanager
    def skip(self, layer: str, batch: int) -> Iterator[None]:
        """Do not run what is done before a layer, while the `with` lasts."""
        with ExitStack() as stack:
            for name in self.done[layer]:
                module, output = self.modules[name], self.outputs[name]
                before = vars(module).get("forward")
                restore = (
                    partial(delattr, module, "forward")
                    if before is None
                    else partial(setattr, module, "forward", before)
                )
                stack.callback(restore)
                module.forward = partial(repeat_output, output, batch)
            yield


def find_done(events: list[tuple[str, str]], layer: str) -> list[str]:
    """Return the outermost modules that ended before a layer first began."""
    calls = Counter(name for what, name in events if what == ENTER)
    start = events.index((ENTER, layer.partition("#")[0]))  # its first call
    ended = {name for what, name in events[:start] if what == LEAVE}
    ended = {name for name in ended if name and calls[name] == 1}
    return [x for x in ended if not any(x.startswith(f"{y}.") for y in ended)]


def copy_tensor(x: Any) -> Any:
    """Return a copy of a tensor, and anything else as it is."""
    return x.detach().clone() if isinstance(x, Tensor) else x


def repeat_output(output: Any, batch: int, *_args: Any, **_named: Any) -> Any:
    """Return a copy of an output of one sequence, for each sequence of a batch."""

    def repeat(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x.ndim and x.shape[0] == 1:
            x = x.expand(batch, *x.shape[1:])
        return x.clone(memory_format=torch.contiguous_format)  # a model may edit it

    return tree_map(repeat, output)
