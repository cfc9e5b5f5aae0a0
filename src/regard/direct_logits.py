"""Direct logit attribution: what each head adds to a logit, by no way but its own.

    attribute_logits(model, tokens, answer, versus=other)

    logit[t] = u_t · norm(x) = d · x + c         x: residual stream after all layers
    d        = u_t · gain / size of x            the norm is frozen, and linear
    head     d · (W_O z)                         z = weights v, at the same token
    rest     d · (x - Σ heads) + c               embeddings, MLPs, biases

Heads and rest add up to the logit. What a head does through later layers is not its
own: patch_heads measures all that it does. For models of `regard.load`, which know
where their weights are.

Next: ablate/patch_heads.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.ablate.search_heads import rank_heads
from regard.arguments import suggest
from regard.circuits import check_place
from regard.display import Displayed
from regard.errors import OptionError
from regard.lens.watch import capture
from regard.nn.decoder import CausalTransformer


@dataclass(frozen=True, kw_only=True)
class DirectLogits(Displayed):
    """A logit, or the difference of two, as a sum over heads and the rest."""

    heads: Tensor  # (L, H), float64
    rest: float
    logit: float  # of the model; heads and rest add up to it

    def __str__(self) -> str:
        parts = f"{float(self.heads.sum()):+.4g} by heads, {self.rest:+.4g} by the rest"
        lines = [
            f"logit {self.logit:.4g}: {parts}",
            "layer  head      adds",
        ]
        for layer, head in rank_heads(self.heads):
            lines.append(f"{layer:5}  {head:4}  {float(self.heads[layer, head]):+8.4g}")
        return "\n".join(lines)


@suggest
def attribute_logits(
    model: CausalTransformer,
    tokens: Tensor,
    answer: int,
    *,
    versus: int | None = None,
    at: int = -1,
) -> DirectLogits:
    """Return what each head adds directly to the logit of a token.

    tokens: (1, N)
    answer: the token whose logit is taken apart
    versus: a token whose logit is subtracted
    at: the position at which the logit is read; the last one by default
    """
    check_place(model, 0, 0)
    config = model.config
    if not config.norm_first:
        raise OptionError(
            "this model has a norm after each layer, so that heads do not add to the "
            "logits. Use regard.patch_heads to measure what they change."
        )
    if tokens.shape[:-1] != (1,):
        raise OptionError(
            f"tokens have shape {tuple(tokens.shape)}, expected one sequence: (1, N)."
        )
    kept: list[Tensor] = []
    hook = model.norm.register_forward_pre_hook(lambda _, x: kept.append(x[0]))
    try:
        with torch.no_grad(), capture(model, keep="qkv") as seen:
            logits = model(tokens)[0, at].double()
    finally:
        hook.remove()
    stream = kept[0][0, at].double()  # (width,)
    u = (model.embed if config.tied else model.head).weight.detach().double()
    unembed = u[answer] - (0 if versus is None else u[versus])
    direction, constant = freeze_norm(model, stream, unembed)
    found = []
    for block, record in zip(model.blocks, seen.recording.records, strict=True):
        assert record.v is not None
        v = record.v.double().repeat_interleave(config.heads // config.shared, 0)
        z = record.weights(at).double()[:, None] @ v  # (H, 1, d)
        out = block.attention.out.weight.detach().double()  # (width, H d)
        found.append((z.flatten() * (direction @ out)).view(config.heads, -1).sum(1))
    heads = torch.stack(found)
    return DirectLogits(
        heads=heads,
        rest=float(direction @ stream + constant - heads.sum()),
        logit=float(logits[answer] - (0 if versus is None else logits[versus])),
    )


def freeze_norm(
    model: CausalTransformer, stream: Tensor, unembed: Tensor
) -> tuple[Tensor, Tensor]:
    """Return d and c with unembed · norm(x) = d · x + c, at the size of x."""
    norm, config = model.norm, model.config
    direction = unembed * norm.weight.detach().double()
    constant = torch.zeros((), dtype=torch.float64, device=stream.device)
    if config.norm == "rms":
        return direction / (stream.pow(2).mean() + config.eps).sqrt(), constant
    if getattr(norm, "bias", None) is not None:
        constant = unembed @ norm.bias.detach().double()
    direction = direction - direction.mean()  # the mean of x is subtracted
    return direction / (stream.var(correction=0) + config.eps).sqrt(), constant
