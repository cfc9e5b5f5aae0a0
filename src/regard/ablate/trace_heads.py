"""Keep what heads output and what they write, with gradients, while a model runs.

    with trace_heads(model) as traced:
        model(tokens).logits[0, -1, answer].backward()
    traced.outputs(17)              z of layer 17, (B, H, N, Dv)
    traced.output_gradients(17)     ∂ / ∂ z
    traced.writes(17, 3)            what head 3 adds to the residual stream: W_O z,
                                    times the multiplier of the model, if it has one
    traced.write_gradients(17)      ∂ / ∂ write, (B, N, width): the same for all heads

The model computes the same bits. Without a backward pass there are no gradients; under
torch.no_grad() there are outputs only. Memory is linear in the length. Rows of padding
are as the model has them.

Next: attribute_weights.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from regard.ablate.ablation import read_ablation
from regard.ablate.follow_write import Jacobian, WriteFinder
from regard.ablate.intervene import intervene
from regard.ablate.replacement import CallPlace
from regard.arguments import expect_with, suggest
from regard.errors import OptionError
from regard.run.call_edit import ReplacedHeads, Turn
from regard.run.chosen_layers import Layer


class TracedOutputs:
    """Keeps the outputs of every layer, as they are, for their gradients."""

    by_position = False

    def __init__(self, turn: Turn) -> None:
        self.turn = turn  # among other interventions
        self.own: dict[str, Tensor] = {}
        self.real: dict[str, Tensor] = {}  # (B, N), queries that are no padding

    def replace(self, place: CallPlace) -> ReplacedHeads:
        """Return a function that keeps the outputs of a call."""
        self.real[place.layer] = place.q_taken
        every = torch.ones_like(place.here)  # padding, too
        return ReplacedHeads(every, partial(self.keep, place.layer), turn=self.turn)

    def keep(self, layer: str, z: Tensor) -> Tensor:
        """Return the same outputs; gradients pass through what is kept."""
        self.own[layer] = z.clone() if z.requires_grad else z.clone().requires_grad_()
        return self.own[layer]


class TracedHeads(TracedOutputs):
    """What the heads of a model output and wrote in one forward pass."""

    def __init__(self, turn: Turn = Turn.LAST) -> None:
        super().__init__(turn)
        self.finders: dict[str, WriteFinder] = {}
        self.jacobians: dict[str, Jacobian | OptionError] = {}
        self.again: set[str] = set()  # layers that attended in several passes
        self.latest: Any = None  # the output of the last module that ran

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers, in the order of their calls."""
        return tuple(self.own)

    def outputs(self, layer: Layer) -> Tensor:
        """Return the outputs of the heads of a layer, z = weights v, (B, H, N, Dv)."""
        return self.own[self.name(layer)].detach()

    def output_gradients(self, layer: Layer) -> Tensor:
        """Return the gradients by the outputs, (B, H, N, Dv)."""
        return expect_gradient(self.own[self.name(layer)].grad)

    def writes(self, layer: Layer, head: int) -> Tensor:
        """Return what a head adds to the residual stream, (B, N, width)."""
        found, z = self.find(layer, head), self.outputs(layer)
        alone = torch.zeros_like(z)
        alone[:, head] = z[:, head]
        return found.multiply(alone)

    def read_projection(self, layer: Layer, head: int) -> Tensor:
        """Return W_O of a head, (Dv, width); of one sequence."""
        found = self.find(layer, head).read_projection(head)
        if found is None:
            raise OptionError(
                f"what the heads of {self.name(layer)} write is not the product with "
                "one matrix for all tokens: there is a gate, or tokens are mixed. Use "
                "`writes` for what a head writes at each token."
            )
        return found

    def find(self, layer: Layer, head: int) -> Jacobian:
        """Return the map from z to the writes of a layer, or raise."""
        name = self.name(layer)
        found, heads = self.jacobians[name], self.own[name].shape[1]
        if isinstance(found, OptionError):
            raise found
        if not 0 <= head < heads:
            raise OptionError(
                f"{name} has {heads} heads, there is no head {head}; they are "
                "counted from 0."
            )
        return found

    def write_gradients(self, layer: Layer) -> Tensor:
        """Return the gradients by what the heads of a layer write, (B, N, width)."""
        self.find(layer, 0)
        return expect_gradient(self.finders[self.name(layer)].gradient)

    def name(self, layer: Layer) -> str:
        """Return the name of a layer, given by name or number, or raise."""
        name = layer
        if isinstance(layer, int) and 0 <= layer < len(self.own):
            name = self.layers[layer]
        if name not in self.own:
            raise OptionError(
                f"there is no layer {layer!r}; traced were {list(self.own)}."
            )
        assert isinstance(name, str)
        if name in self.again:
            raise OptionError(
                f"{name} attended in several forward passes. Trace one of them: "
                "`with trace_heads(model) as traced:` around one call of the model."
            )
        return name

    def keep(self, layer: str, z: Tensor) -> Tensor:
        """Keep the outputs of a call, and go on with them."""
        if layer in self.own:
            self.again.add(layer)
        own = super().keep(layer, z)
        own.retain_grad()
        self.finders[layer] = WriteFinder(own.view_as(own))  # a node to be found
        return self.finders[layer].z

    def look(self, _module: nn.Module, _args: Any, out: Any) -> None:
        """Look for the product of the last call, in the output of a module."""
        self.latest = out
        layer = next(reversed(self.finders), None)
        if layer is not None and layer not in self.jacobians:
            with self.contain(layer):
                self.finders[layer].look(out)

    def finish(self, *_: Any) -> None:
        """Find the maps from z to the writes, before .backward() frees the graph."""
        outputs = [x for x in tree_leaves(self.latest) if isinstance(x, Tensor)]
        for layer, finder in self.finders.items():
            if layer not in self.jacobians:
                with self.contain(layer):
                    self.jacobians[layer] = finder.find_jacobian(layer, outputs)

    @contextmanager
    def contain(self, layer: str) -> Iterator[None]:
        """Keep an error for those who ask for the writes; none reaches the model."""
        try:
            yield
        except OptionError as error:
            self.jacobians[layer] = error
        except Exception as error:  # noqa: BLE001
            self.jacobians[layer] = OptionError(
                f"what the heads of {layer} write could not be found: "
                f"{type(error).__name__}: {error}"
            )


def expect_gradient(x: Tensor | None) -> Tensor:
    """Return a gradient, or raise if there is none."""
    if x is None:
        raise OptionError(
            "there is no gradient: call .backward() on a number computed from what "
            "the model returned, inside of the `with` or after it."
        )
    return x


@expect_with
@suggest
def trace_heads(model: nn.Module) -> Iterator[TracedHeads]:
    """Keep what heads output and write while the `with` lasts, with gradients.

    Trace one forward pass; .backward() may be called in the `with` or after it.
    """
    traced = TracedHeads()
    with trace_into(traced, model):
        yield traced


@contextmanager
def trace_into(traced: TracedHeads, model: nn.Module) -> Iterator[None]:
    """Keep what the heads of a model output and write, while the `with` lasts."""
    ablation = read_ablation(model, None, None, (None, None), traced)
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_hook(traced.look).remove)
        stack.callback(model.register_forward_hook(traced.finish).remove)
        stack.enter_context(intervene(model, ablation))
        yield
        traced.finish()  # if only a part of the model was called
