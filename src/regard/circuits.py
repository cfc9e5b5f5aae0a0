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
For models of `regard.load`, which know where their weights are.

Next: ablate/patch_heads.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regard.errors import OptionError
from regard.nn.decoder import CausalTransformer


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


def read_circuit(model: CausalTransformer, layer: int, head: int) -> Circuit:
    """Return the weights of a head as factors, in float64.

    layer, head: counted from 0
    """
    check_place(model, layer, head)
    config, block = model.config, model.blocks[layer]
    if config.qk_norm:
        raise OptionError(
            "this model normalises q and k, so that its scores are not a product with "
            "one matrix. Use regard.patch_heads to study what its heads attend to."
        )
    h, shared, d = config.heads, config.shared, config.head
    rows = block.attention.qkv.weight.detach().double()
    q, k, v = rows.split([h * d, shared * d, shared * d])
    gain = block.attention_norm.weight.detach().double() if config.norm_first else 1.0
    group = head // (h // shared)
    mine, theirs = slice(head * d, (head + 1) * d), slice(group * d, (group + 1) * d)
    q, k, v = (centre(model, x * gain) for x in (q[mine], k[theirs], v[theirs]))
    o = block.attention.out.weight.detach().double()[:, mine]
    scale = d**-0.5 * (config.gain**2 if config.position == "rotary" else 1.0)
    return Circuit(q, k, v, centre(model, o.mT).mT, scale)


def centre(model: CausalTransformer, rows: Tensor) -> Tensor:
    """Return rows (n, width) times C if LayerNorms read the stream, else the rows."""
    config = model.config
    is_centred = config.norm == "layer" and config.norm_first
    return rows - rows.mean(-1, keepdim=True) if is_centred else rows


def check_place(model: CausalTransformer, layer: int, head: int) -> None:
    """Raise OptionError unless a model of ours has this head."""
    if not isinstance(model, CausalTransformer):
        raise OptionError(
            f"a {type(model).__name__} does not tell where the weights of a head are. "
            "Load the model with regard.load(path)."
        )
    config = model.config
    if not (0 <= layer < config.layers and 0 <= head < config.heads):
        raise OptionError(
            f"layer {layer}, head {head}: the model has {config.layers} layers of "
            f"{config.heads} heads, counted from 0."
        )


def read_vocabulary(model: CausalTransformer) -> Vocabulary:
    """Return how the residual stream reads and writes tokens, for many heads."""
    check_place(model, 0, 0)
    embed = model.embed.weight.detach().double()  # (vocabulary, width)
    out = embed if model.config.tied else model.head.weight.detach().double()
    gain = model.norm.weight.detach().double() if model.config.norm_first else 1.0
    return Vocabulary(embed.mT @ centre(model, out * gain))


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
