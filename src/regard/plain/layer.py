"""One transformer layer: attention, then feed-forward, each with a residual connection.

    norm first    x = x + attention(norm(x));   x = x + feed(norm(x))
    norm last     x = norm(x + attention(x));   x = norm(x + feed(x))

Next: decoder.py
"""

from __future__ import annotations

from regard.arrays import Array
from regard.definition.position import HALVES, rotary
from regard.masks.algebra import Mask
from regard.plain.config import Config
from regard.plain.feedforward import feed_forward
from regard.plain.linear import Weights, find_linear
from regard.plain.multihead import multi_head
from regard.plain.norm import layer_norm, rms_norm


def norm(x: Array, weights: Weights, name: str, config: Config) -> Array:
    """Apply the norm with this name."""
    weight, bias = find_linear(weights, name)
    if config.norm == "rms":
        return rms_norm(x, weight, config.eps)
    return layer_norm(x, weight, bias, config.eps)


def block(
    x: Array,  # (..., N, D)
    weights: Weights,  # of one block: attention.qkv.weight, …
    config: Config,
    *,
    mask: Array | Mask | None = None,
    positions: Array | None = None,  # (N,), needed for rotary positions
) -> Array:
    """Apply one layer to x."""

    def prepare(q: Array, k: Array) -> tuple[Array, Array]:
        if config.qk_norm:
            q = rms_norm(q, weights["attention.q_norm.weight"], config.eps)
            k = rms_norm(k, weights["attention.k_norm.weight"], config.eps)
        if config.position == "rotary":
            q, k = turn(q), turn(k)
        return q, k

    def turn(x: Array) -> Array:
        stretch = config.stretch or 1.0
        x = rotary(x, positions, pairing=HALVES, base=config.base, stretch=stretch)
        return x * config.gain

    def attend(x: Array) -> Array:
        return multi_head(
            x,
            find_linear(weights, "attention.qkv"),
            find_linear(weights, "attention.out"),
            heads=config.heads,
            kv_heads=config.shared,
            mask=mask,
            prepare=prepare,
        )

    def feed(x: Array) -> Array:
        up, down = find_linear(weights, "feed.up"), find_linear(weights, "feed.down")
        return feed_forward(x, up, down, config.activation)

    if config.norm_first:
        x = x + attend(norm(x, weights, "attention_norm", config))
        return x + feed(norm(x, weights, "feed_norm", config))
    x = norm(x + attend(x), weights, "attention_norm", config)
    return norm(x + feed(x), weights, "feed_norm", config)
