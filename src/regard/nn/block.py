"""One transformer layer: attention and a feed-forward layer, each with a residual.

    norm first    x = x + attention(norm(x));   x = x + feed(norm(x))
    norm last     x = norm(x + attention(x));   x = norm(x + feed(x))

Next: decoder.py
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from regard.masks.algebra import Mask
from regard.nn.attention import Linear, MultiHeadAttention, RMSNorm, Rotation
from regard.nn.cache import Slot
from regard.plain.config import Config


def make_norm(config: Config) -> nn.Module:
    """Return the normalization layer of a config."""
    if config.norm == "rms":
        return RMSNorm(config.width, eps=config.eps)
    return nn.LayerNorm(config.width, eps=config.eps, bias=config.bias)


def make_dropout(config: Config) -> nn.Module:
    """Return the dropout layer of a config, or an identity."""
    return nn.Dropout(config.dropout) if config.dropout else nn.Identity()


class FeedForward(nn.Module):  # type: ignore[misc]
    """Feed-forward layer down(activation(up(x))); swiglu is down(silu(gate) * up)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.activation = config.activation
        rows = 2 * config.inner if config.activation == "swiglu" else config.inner
        self.up = Linear(config.width, rows, bias=config.bias)
        self.down = Linear(config.inner, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.activation == "swiglu":
            gate, x = x.chunk(2, -1)
            x = F.silu(gate) * x
        elif self.activation == "relu":
            x = F.relu(x)
        else:
            exact = self.activation == "gelu"
            x = F.gelu(x, approximate="none" if exact else "tanh")
        return self.down(x)


class TransformerBlock(nn.Module):  # type: ignore[misc]
    """Attention and feed-forward, each with a residual, with norms first or last."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.attention_norm = make_norm(config)
        self.attention = MultiHeadAttention(
            config.width,
            config.heads,
            kv_heads=config.kv_heads,
            head_width=config.head_width,
            bias=config.bias,
            qkv_bias=config.qkv_bias,
            qk_norm=config.eps if config.qk_norm else None,
            dropout=config.dropout,
        )
        self.feed_norm = make_norm(config)
        self.feed = FeedForward(config)
        self.dropout = make_dropout(config)

    def forward(
        self,
        x: Tensor,  # (B, N, width)
        mask: Mask | Tensor | None = None,
        *,
        rotation: Rotation | None = None,
        slot: Slot | None = None,
    ) -> Tensor:
        def attend(x: Tensor) -> Tensor:
            found = self.attention(x, mask, rotation=rotation, slot=slot)
            return self.dropout(found)

        if self.norm_first:
            x = x + attend(self.attention_norm(x))
            return x + self.dropout(self.feed(self.feed_norm(x)))
        x = self.attention_norm(x + attend(x))
        return self.feed_norm(x + self.dropout(self.feed(x)))
