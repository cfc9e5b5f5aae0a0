"""Multi-head attention as a torch module, on the fused kernels of the engine.

    q, k, v = split(x Wqkvᵀ)      out = join(attend(q, k, v, mask)) Woᵀ

Options: grouped-query attention, rotary positions, normalization of q and k, and a KV
cache. The engine chooses the kernel. The attention weights are never materialized,
except to apply dropout to them in training.

Next: cache.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from regard.definition.attention import Attended
from regard.engine.choose import attend
from regard.errors import OptionError
from regard.masks.algebra import Mask
from regard.nn.cache import Slot

Rotation = tuple[Tensor, Tensor]  # cosines and sines, (N, d) or (B, 1, N, d)


class Linear(nn.Linear):  # type: ignore[misc]
    """Linear layer x Wᵀ + b that uses a matrix-vector product for a single row.

    Decoding one token is limited by memory bandwidth. The matrix-vector product reaches
    it; the general product reaches half of it in float32 and a third in bfloat16
    (benchmarks/generate.py).
    """

    def forward(self, x: Tensor) -> Tensor:
        return apply_matrix(x, self.weight, self.bias)


def apply_matrix(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b for x (..., in) and W (out, in)."""
    if x.numel() != weight.shape[1]:
        return F.linear(x, weight, bias)
    y = torch.mv(weight, x.reshape(-1))
    y = y if bias is None else y + bias
    return y.view(*x.shape[:-1], -1)


class RMSNorm(nn.RMSNorm):  # type: ignore[misc]
    """RMS norm, x / sqrt(mean x² + eps) * weight, as the layer norm of (x, -x).

    (x, -x) has mean 0 and variance mean x². The layer norm is one kernel; torch's
    RMS norm takes six on a CPU, most of the overhead when one token is decoded.
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # torch's version saves less for the backward pass
            return super().forward(x)
        (width,) = self.normalized_shape
        both = torch.cat((x, -x), -1)
        return F.layer_norm(both, (2 * width,), eps=self.eps)[..., :width] * self.weight


def rotate_halves(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pairs (i, i + d/2) of x (B, H, N, d).

    The first half of the sines is negated, so one multiply-add computes both
    first cos - second sin and second cos + first sin.
    """
    cos, sin = rotation
    if cos.dtype != x.dtype:  # autocast converts q and k, but not the tables
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class MultiHeadAttention(nn.Module):  # type: ignore[misc]
    """Multi-head self-attention or cross-attention, with an optional KV cache.

    >>> import torch, regard
    >>> attention = MultiHeadAttention(64, 8, kv_heads=2)
    >>> attention(torch.randn(1, 10, 64), regard.causal()).shape
    torch.Size([1, 10, 64])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int = 0,  # 0: as many as heads
        head_width: int = 0,  # 0: width / heads
        bias: bool = True,
        qkv_bias: bool | None = None,  # None: as bias
        qk_norm: float | None = None,  # eps of an RMS norm of each head of q and k
        dropout: float = 0.0,  # of the weights, in training only
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.head_width = head_width or width // heads
        self.dropout = dropout
        if not head_width and width % heads:
            raise OptionError(
                f"a width of {width} cannot be split into {heads} heads. "
                "Give head_width=; heads * head_width need not be the width."
            )
        if kv_heads < 0 or heads % self.kv_heads:
            raise OptionError(
                f"{heads} heads cannot share {kv_heads} heads of keys, "
                f"expected kv_heads to divide {heads}."
            )
        rows = (heads + 2 * self.kv_heads) * self.head_width
        self.qkv = Linear(width, rows, bias=bias if qkv_bias is None else qkv_bias)
        self.out = Linear(heads * self.head_width, width, bias=bias)
        self.q_norm: Any = None
        self.k_norm: Any = None
        if qk_norm is not None:
            self.q_norm = RMSNorm(self.head_width, eps=qk_norm)
            self.k_norm = RMSNorm(self.head_width, eps=qk_norm)

    def forward(
        self,
        x: Tensor,  # (B, N, width)
        mask: Mask | Tensor | None = None,
        *,
        context: Tensor | None = None,  # (B, M, width), for cross-attention
        rotation: Rotation | None = None,
        slot: Slot | None = None,  # the keys and values of earlier tokens
    ) -> Tensor:
        """Return (B, N, width)."""
        q, k, v = self.project(x, context, rotation)
        q_start: Any = None
        if slot is not None:
            q_start, (k, v) = slot.start, slot.write(k, v)
        edit = None
        if self.dropout and self.training:
            edit = {"weights": lambda w: F.dropout(w, self.dropout)}
        done = attend(q, k, v, mask, q_start=q_start, edit=edit)
        return self.out(done.out.transpose(1, 2).flatten(-2))

    def look(
        self,
        x: Tensor,
        mask: Mask | Tensor | None = None,
        *,
        context: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Attended:
        """Return the output of each head and the attention weights, without dropout."""
        q, k, v = self.project(x, context, rotation)
        return attend(q, k, v, mask, see=("weights",))

    def project(
        self, x: Tensor, context: Tensor | None, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, H, N, d), k and v (B, Hk, M, d)."""
        h, shared, d = self.heads, self.kv_heads, self.head_width
        if context is None:
            heads = self.qkv(x).view(*x.shape[:2], h + 2 * shared, d).transpose(1, 2)
            q, k, v = heads[:, :h], heads[:, h:-shared], heads[:, -shared:]
        elif rotation is not None:
            raise OptionError(
                "rotation= with context=: a rotation compares positions in one "
                "sequence. Leave it out for cross-attention."
            )
        else:
            q = self.qkv_rows(x, 0, h)
            k = self.qkv_rows(context, h, h + shared)
            v = self.qkv_rows(context, h + shared, h + 2 * shared)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate_halves(q, rotation), rotate_halves(k, rotation)
        return q, k, v

    def qkv_rows(self, x: Tensor, first: int, stop: int) -> Tensor:
        """Project x with only the rows of qkv that belong to heads first to stop."""
        rows = slice(first * self.head_width, stop * self.head_width)
        bias = None if self.qkv.bias is None else self.qkv.bias[rows]
        y = apply_matrix(x, self.qkv.weight[rows], bias)
        return y.unflatten(-1, (stop - first, self.head_width)).transpose(1, 2)
