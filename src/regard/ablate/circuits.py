"""A head as two matrices: what it attends by (QK), and what it moves (OV).

    logits = scale · x_iᵀ (W_Qᵀ W_K) x_j        QK: which tokens it attends to
    write  = (W_O W_V) x_j                      OV: what it adds to the residual stream

x is the residual stream, divided by the size that the norm before the head measures.
The gain of the norm is multiplied into W_Q, W_K and W_V. LayerNorm also subtracts the
mean, which no layer reads then: a matrix A that reads the stream is A C, and W_O C W_O.

    C = I - 1 1ᵀ / width        A C: each row of A minus its mean

Both matrices are (width, width) of rank d, the width of a head. They are kept as
factors, and every number here is computed from (d, d) matrices:

    eigenvalues of A B     those of B A, and zeros
    ‖A B‖²                 trace of (Aᵀ A)(B Bᵀ)

Biases are left out, and rotary positions too: QK is that of two tokens at distance 0.

The matrices are read from a model that runs, without the names of its modules: q, k and
v of the first token are derived by what the norm returned, and W_O is that of
trace_heads. So they are those of any model whose heads can be traced.

Next: patch_heads.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard.ablate.ablation import check_model, read_ablation
from regard.ablate.direct_logits import NormHooks
from regard.ablate.effect import check_evaluating
from regard.ablate.follow_write import find_between
from regard.ablate.frozen_norm import Norm
from regard.ablate.intervene import intervene
from regard.ablate.replacement import CallPlace
from regard.ablate.trace_heads import TracedHeads, trace_into
from regard.arguments import suggest
from regard.errors import OptionError
from regard.run.call_edit import ReplacedHeads
from regard.run.chosen_layers import Layer

TOKENS = 4  # that are read: several, so that what differs by token is detected


@dataclass(frozen=True, eq=False)
class Circuit:
    """The weights of one head, with the gain and the centring of the norm before it."""

    q: Tensor  # (d, width)
    k: Tensor  # (d, width)
    v: Tensor  # (d, width)
    o: Tensor  # (width, d)
    scale: float  # of q · k

    @property
    def ov_eigenvalues(self) -> Tensor:
        """The eigenvalues of W_O W_V that may differ from 0, (d,), complex.

        Positive ones mean that a token writes more of itself: the head copies.
        """
        return torch.linalg.eigvals(self.v @ self.o)

    @property
    def qk_eigenvalues(self) -> Tensor:
        """The eigenvalues of scale · W_Qᵀ W_K that may differ from 0, (d,), complex.

        Positive ones mean that a token attends to tokens like itself.
        """
        return self.scale * torch.linalg.eigvals(self.k @ self.q.mT)


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """What tokens are in the residual stream: its first and its last matrix."""

    through: Tensor  # W_Eᵀ W_U, (width, width), of embedding and unembedding


class KeptInput:
    """Keeps q, k or v of a call, where a patch would replace it."""

    x: Tensor  # (B, H, N, D)

    def put(self, x: Tensor, *, shared: bool) -> Tensor:
        """Return the same array."""
        self.x = x
        return x


class KeptInputs:
    """Keeps q, k and v of every layer."""

    by_position = False

    def __init__(self) -> None:
        self.places: dict[str, CallPlace] = {}
        self.arrays: dict[str, dict[str, KeptInput]] = {}

    def replace(self, place: CallPlace) -> ReplacedHeads:
        """Return new inputs that are the old ones."""
        found: dict[str, Any] = {name: KeptInput() for name in "qkv"}
        self.places[place.layer], self.arrays[place.layer] = place, found
        return ReplacedHeads(place.here, inputs=found)

    def pick(self, layer: str, head: int) -> list[Tensor]:
        """Return q, k and v of a head at the first token, where nothing is rotated."""
        heads = self.places[layer].heads.shape[1]
        arrays = [kept.x for kept in self.arrays[layer].values()]
        with torch.enable_grad():
            return [x[0, head // (heads // x.shape[1]), 0] for x in arrays]


class ReadModel:
    """A model that has read a few tokens, and what its heads were computed from."""

    def __init__(self, model: nn.Module) -> None:
        check_model(model)
        check_evaluating(model)
        self.model, self.kept, self.traced = model, KeptInputs(), TracedHeads()
        self.norms: list[tuple[Norm, Tensor]] = []  # and what each of them returned
        self.first: dict[str, Tensor] = {}  # what each module was given
        norms, ablation = (
            NormHooks(model),
            read_ablation(model, None, None, (None, None), self.kept),
        )
        tokens = choose_tokens(model)
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(need_gradients(model))
            stack.enter_context(norms.hook(self.keep))
            stack.enter_context(trace_into(self.traced, model))
            stack.enter_context(intervene(model, ablation))
            for name, module in model.named_modules():
                hook = partial(self.look, name)
                done = module.register_forward_pre_hook(hook, with_kwargs=True)
                stack.callback(done.remove)
            try:
                model(tokens)
            except (TypeError, RuntimeError, ValueError, IndexError) as error:
                raise OptionError(
                    f"a {type(model).__name__} cannot read {TOKENS} tokens: {error}"
                ) from error

    def keep(self, _module: nn.Module, norm: Norm, _x: Tensor, out: Tensor) -> Tensor:
        """Keep what a norm returned."""
        self.norms.append((norm, out))
        return out

    def look(self, name: str, _module: nn.Module, args: Any, named: Any) -> None:
        """Keep what a module was given."""
        given = (x for x in (*args, *named.values()) if isinstance(x, Tensor))
        self.first[name] = next(given, torch.empty(0))

    def find_read(self, layer: str, head: int) -> tuple[Norm | None, Tensor]:
        """Return the norm before a head, and what q, k and v are computed from.

        None: the head reads the residual stream itself
        """
        parts = self.kept.pick(layer, head)
        for norm, out in reversed(self.norms):
            if all(find_between(x, out) for x in parts):
                is_stream = self.traced.find(layer, head).is_added(out)
                return None if is_stream else norm, out
        return None, self.first[layer.partition("#")[0]]


def choose_tokens(model: nn.Module) -> Tensor:
    """Return a few tokens, (1, TOKENS); refuse a model in half precision.

    Their embeddings are not 0, as that of padding is, where a norm has no direction.
    """
    dtypes = {x.dtype for x in model.parameters() if x.is_floating_point()}
    if dtypes & {torch.float16, torch.bfloat16}:
        raise OptionError(
            "the model is in half precision, in which its norms cannot be recognised. "
            "Write model.float() before."
        )
    embed = getattr(model, "get_input_embeddings", lambda: None)()
    if embed is None:
        return torch.arange(TOKENS, device=next(model.parameters()).device)[None]
    return embed.weight.detach().norm(dim=-1).topk(TOKENS).indices[None]


@contextmanager
def need_gradients(model: nn.Module) -> Iterator[None]:
    """Compute gradients by all parameters, so that what reads them is in the graph."""
    frozen = [x for x in model.parameters() if x.is_floating_point()]
    frozen = [x for x in frozen if not x.requires_grad]
    try:
        for x in frozen:
            x.requires_grad_(requires_grad=True)
        yield
    finally:
        for x in frozen:
            x.requires_grad_(requires_grad=False)


@suggest
def read_circuit(model: nn.Module, layer: Layer, head: int) -> Circuit:
    """Return the weights of a head as factors, in float64.

    layer: its number, in the order in which layers attend, or its name
    head: counted from 0
    """
    read = ReadModel(model)
    name = read.traced.name(layer)
    o = read.traced.read_projection(name, head).double()  # (d, width)
    norm, given = read.find_read(name, head)
    scale = read.kept.places[name].scale
    if scale is None:
        raise OptionError(f"the scores of {name} have no scale that is one number.")
    q, k, v = (read_matrix(name, x, given) for x in read.kept.pick(name, head))
    if norm is not None:
        q, k, v = (norm.centre(x * norm.gain) for x in (q, k, v))
        o = norm.centre(o)
    return Circuit(q, k, v, o.mT, scale)


def read_matrix(layer: str, x: Tensor, given: Tensor) -> Tensor:
    """Return the matrix by which a vector x (d,) reads the first token, or raise."""
    some = torch.linspace(1, 2, len(x), dtype=x.dtype, device=x.device)
    with torch.enable_grad():  # the sum of a normalised x would be constant
        (back,) = torch.autograd.grad(x, given, some, create_graph=True)
        size, bent = (back * back.detach()).sum(), None
    if size.requires_grad:
        (bent,) = torch.autograd.grad(size, given, retain_graph=True, allow_unused=True)
    if given.shape[:2] != (1, TOKENS) or bool(back[:, 1:].any()):
        raise OptionError(f"{layer} mixes tokens before it attends.")
    if bent is not None and bool(bent.any()):
        raise OptionError(
            f"{layer} normalises q and k, so that its scores are not a product with "
            "one matrix. Use regard.patch_heads to study what its heads attend to."
        )
    units = torch.eye(len(x), dtype=x.dtype, device=x.device)
    rows = [torch.autograd.grad(x, given, u, retain_graph=True)[0][0, 0] for u in units]
    found, size = torch.stack(rows).double(), x.detach().abs()
    if bool(((found == 0).all(1) & (size == size.max()) & (size > 0)).any()):
        raise OptionError(f"{layer} clips q, k or v, so that they are not linear.")
    return found


def read_vocabulary(model: nn.Module) -> Vocabulary:
    """Return how the residual stream reads and writes tokens, for many heads."""
    read = ReadModel(model)
    embed, out = (
        getattr(model, f"get_{name}_embeddings", lambda: None)()
        for name in ("input", "output")
    )
    if embed is None or out is None:
        raise OptionError(f"a {type(model).__name__} predicts no tokens.")
    before, _ = read.find_read(read.traced.layers[-1], 0)
    u = out.weight.detach().double()
    if before is not None:  # else the last norm returns the residual stream
        last, _ = read.norms[-1]
        u = last.centre(u * last.gain)
    return Vocabulary(embed.weight.detach().double().mT @ u)


def score_copying(circuit: Circuit, vocabulary: Vocabulary) -> float:
    """Return how much a head raises the logits of the tokens it attends to, -1 to 1.

        Σ Re λ / Σ |λ|      λ: eigenvalues of W_U W_O W_V W_Eᵀ, (vocabulary)²

    It is 1 if all of them are positive: each token raises itself (Elhage et al. 2021).
    """
    small = circuit.v @ vocabulary.through @ circuit.o  # (d, d)
    found = torch.linalg.eigvals(small)
    return float(found.real.sum() / found.abs().sum())


def score_composition(
    first: Circuit, second: Circuit, *, by: Literal["q", "k", "v"]
) -> float:
    """Return how much the q, k or v of a later head reads what an earlier one writes.

        ‖W_OV1ᵀ W_QK2‖ / (‖W_OV1‖ ‖W_QK2‖)      by="q"
        ‖W_QK2 W_OV1‖  / (‖W_QK2‖ ‖W_OV1‖)      by="k"
        ‖W_OV2 W_OV1‖  / (‖W_OV2‖ ‖W_OV1‖)      by="v"

    Random heads have about 1 / √width: compare with other pairs of the same model.
    """
    if by not in ("q", "k", "v"):
        raise OptionError(f"by={by!r}, expected 'q', 'k' or 'v'.")
    ov = (first.o, first.v)
    later = {
        "q": (second.k.mT, second.q),  # W_QK2ᵀ, whose product with W_OV1 is the same
        "k": (second.q.mT, second.k),
        "v": (second.o, second.v),
    }[by]
    inner = later[1] @ ov[0]  # (d, d): all that connects the two
    whole = measure_product(later[0] @ inner, ov[1])
    return whole / (measure_product(*later) * measure_product(*ov))


def measure_product(a: Tensor, b: Tensor) -> float:
    """Return the Frobenius norm of a (n, d) times b (d, m)."""
    return math.sqrt(float(((a.mT @ a) * (b @ b.mT)).sum()))
