"""Direct logit attribution: what each head adds to a logit, by no way but its own.

    attribute_logits(model, tokens, answer, versus=other)

    logit[t] = u_t · norm(x) = d · x + c         x: residual stream after all layers
    head     d · (W_O z)                         z = weights v, at the same token
    rest     d · (x - Σ heads) + c               embeddings, MLPs, biases

d is that of the last norm with its size frozen (frozen_norm.py), and heads and rest add
up to the logit. What a head does through later layers is not its own: patch_heads
measures all that it does.

For any model with norms before or after its MLPs. In one forward pass, the last norm is
frozen, as is a norm between a head and the residual stream. What heads and other norms
compute is detached from what they read. Then the derivative of the logit by z is d W_O.
The logit must be a linear function of all z now: its second derivative is checked.

Next: ablate/patch_heads.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from regard.ablate.ablation import check_model
from regard.ablate.effect import check_evaluating
from regard.ablate.follow_write import find_between
from regard.ablate.frozen_norm import Norm, freeze, is_small, recognise_norm
from regard.ablate.search_heads import RepeatedInputs, rank_heads, refuse_cache
from regard.ablate.trace_heads import TracedHeads, trace_into
from regard.arguments import suggest
from regard.display import Displayed
from regard.errors import OptionError

KINKED = ("Relu", "Threshold", "Clamp", "Abs", "Max", "Min", "Hardtanh")


@dataclass(frozen=True, kw_only=True)
class DirectLogits(Displayed):
    """A logit, or the difference of two, as a sum over heads and the rest."""

    heads: Tensor  # (L, H), float64; NaN where a layer has fewer heads
    rest: float
    logit: float  # of the model; heads and rest add up to it

    def __str__(self) -> str:
        by_heads = float(self.heads.nansum())
        parts = f"{by_heads:+.4g} by heads, {self.rest:+.4g} by the rest"
        lines = [f"logit {self.logit:.4g}: {parts}", "layer  head      adds"]
        for layer, head in rank_heads(self.heads):
            lines.append(f"{layer:5}  {head:4}  {float(self.heads[layer, head]):+8.4g}")
        return "\n".join(lines)


class SeparateHeads(TracedHeads):
    """Heads that are traced to what they write, and not to what they read."""

    def keep(self, layer: str, z: Tensor) -> Tensor:
        """Keep the outputs of a call, without what they were computed from."""
        return super().keep(layer, z.detach())


class NormHooks:
    """Finds the last norm of a model in one pass; freezes and detaches in another."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [x for x in model.modules() if is_small(x)]
        self.last: nn.Module | None = None

    @contextmanager
    def hook(self, change: Callable[..., Any]) -> Iterator[None]:
        """Replace what each norm returns by change(module, norm, x, out)."""

        def look(module: nn.Module, args: Any, named: Any, out: Any) -> Any:
            x = next(
                (x for x in (*args, *named.values()) if isinstance(x, Tensor)), out
            )
            norm = recognise_norm(module, x, out) if isinstance(out, Tensor) else None
            return out if norm is None else change(module, norm, x, out)

        with ExitStack() as stack:
            for module in self.modules:
                hook = module.register_forward_hook(look, with_kwargs=True)
                stack.callback(hook.remove)
            yield

    def find_last(
        self, module: nn.Module, _norm: Norm, _x: Tensor, out: Tensor
    ) -> Tensor:
        """Keep the norm that is called last."""
        self.last = module
        return out

    def cut(
        self, traced: TracedHeads, module: nn.Module, norm: Norm, x: Tensor, out: Tensor
    ) -> Tensor:
        """Freeze a norm on the direct path; detach what any other norm computed."""
        finder = next(reversed(traced.finders.values()), None)
        write = None if finder is None else finder.product
        is_between = write is not None and x.grad_fn is write.grad_fn
        direct = module is self.last or is_between
        return freeze(norm, x, out) if direct else out.detach()


@suggest
def attribute_logits(
    model: nn.Module,
    inputs: Mapping[str, Any] | Tensor,
    answer: int,
    *,
    versus: int | None = None,
    at: int = -1,
) -> DirectLogits:
    """Return what each head adds directly to the logit of a token.

    inputs: of one sequence: tokens (1, N), or the keyword arguments of the model
    answer: the token whose logit is taken apart
    versus: a token whose logit is subtracted
    at: the position at which the logit is read; the last one by default
    """
    check_model(model)
    check_evaluating(model)
    refuse_cache(inputs)
    sequence, norms = RepeatedInputs(model, inputs), NormHooks(model)
    with torch.no_grad(), norms.hook(norms.find_last):
        sequence.run()
    traced = SeparateHeads()
    with (
        torch.enable_grad(),
        trace_into(traced, model),
        norms.hook(partial(norms.cut, traced)),
    ):
        n, words = (every := sequence.run()[0]).shape
        if not (-n <= at < n and 0 <= answer < words and 0 <= (versus or 0) < words):
            told = f"at={at}, answer={answer}, versus={versus}"
            raise OptionError(f"{told}: there are {n} positions and {words} tokens.")
        logits = every[at].double()
        logit = logits[answer] - (0 if versus is None else logits[versus])
        slopes = find_slopes(logit, traced)
    found = [
        (traced.outputs(layer)[0].double() * slope[0].double()).sum((1, 2))
        for layer, slope in slopes.items()
    ]
    heads = pad_sequence(found, batch_first=True, padding_value=math.nan).cpu()
    return DirectLogits(
        heads=heads,
        rest=float(logit.detach()) - float(heads.nansum()),
        logit=float(logit.detach()),
    )


def find_slopes(logit: Tensor, traced: TracedHeads) -> dict[str, Tensor]:
    """Return the derivative of a logit by every z, (1, H, N, Dv), or raise."""
    ends = {layer: finder.z for layer, finder in traced.finders.items()}
    slopes = torch.autograd.grad(
        logit, list(ends.values()), create_graph=True, allow_unused=True
    )
    for layer, slope in zip(ends, slopes, strict=True):
        if slope is None:
            raise OptionError(
                f"the heads of {layer} reach the logits only through other layers, or "
                "through a norm after the layer: they add nothing directly. Use "
                "regard.patch_heads to measure what they change."
            )
    if is_bent(logit, list(ends.values()), slopes):
        raise OptionError(
            "the logits of this model are not a linear function of what "
            "its heads write, even with constant norms. Use regard.patch_heads to "
            "measure what heads change."
        )
    return {layer: slope.detach() for layer, slope in zip(ends, slopes, strict=True)}


def is_bent(logit: Tensor, ends: list[Tensor], slopes: Sequence[Tensor]) -> bool:
    """Return whether a logit is not a linear function of every z."""
    nodes = {node.name() for z in ends for node in find_between(logit, z)}
    if any(kink in name for name in nodes for kink in KINKED):
        return True  # linear in pieces: its second derivative is 0, too
    size = torch.stack([(x * x.detach()).sum() for x in slopes]).sum()
    if not size.requires_grad:
        return False
    bends = torch.autograd.grad(size, ends, allow_unused=True)
    return any(x is not None and bool(x.any()) for x in bends)
