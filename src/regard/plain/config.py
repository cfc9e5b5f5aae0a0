"""The configuration of a model, for GPT-2, Llama and similar architectures.

    tokens ─▶ embedding (+ positions) ─▶ layers × block ─▶ norm ─▶ logits

A Config describes the architecture of a causal transformer, not how it runs; the plain
decoder, the torch modules, the cost formulas and the weight loader all read it. Weights
have these names and shapes, here and in files; matrices are (out, in), as in PyTorch:

    embed.weight                        (vocabulary, width), also the head if tied
    positions.weight                    (context, width), if learned
    blocks.0.attention_norm.weight      (width,)
    blocks.0.attention.qkv.weight       ((H + 2 Hk) d, width), rows of q, then k, then v
    blocks.0.attention.q_norm.weight    (d,), and k_norm, if qk_norm
    blocks.0.attention.out.weight       (width, H d)
    blocks.0.feed_norm.weight           (width,)
    blocks.0.feed.up.weight             (hidden, width); swiglu: rows of the gate first
    blocks.0.feed.down.weight           (width, hidden)
    norm.weight                         (width,), if norm_first
    head.weight                         (vocabulary, width), unless tied

Biases have the same names with `.bias`.

Next: linear.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, get_args

from regard.errors import OptionError

Norm = Literal["layer", "rms"]
Position = Literal["learned", "sinusoidal", "rotary", "none"]
Activation = Literal["relu", "gelu", "gelu_tanh", "swiglu"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """The architecture of a causal transformer; the defaults are those of GPT-2.

    >>> Config(vocabulary=50_257, context=1_024, width=768, layers=12, heads=12).head
    64
    """

    vocabulary: int
    context: int  # maximum number of tokens
    width: int
    layers: int
    heads: int
    kv_heads: int = 0  # 0: same as heads
    head_width: int = 0  # 0: width / heads
    hidden: int = 0  # width of the feed-forward layer; 0: 4 * width
    activation: Activation = "gelu_tanh"
    norm: Norm = "layer"
    eps: float = 1e-5
    norm_first: bool = True  # pre-norm; else post-norm, as in 2017
    position: Position = "learned"
    base: float = 10_000.0  # of rotary and sinusoidal angles
    stretch: tuple[float, ...] = ()  # divides each rotary frequency, (d/2,); (): by 1
    gain: float = 1.0  # multiplies rotary cosines and sines
    bias: bool = True  # in the matrices and the layer norms
    qkv_bias: bool | None = None  # None: same as bias
    qk_norm: bool = False  # apply rms norm to each head of q and k
    window: int | None = None  # attend to the last `window` tokens, including itself
    window_layers: tuple[int, ...] | None = None  # layers with it; None: all
    tied: bool = True  # the head shares the embedding's weights
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name, usual in COUNTS.items():
            value, least = getattr(self, name), 0 if usual else 1
            if not isinstance(value, Integral) or value < least:
                raise OptionError(
                    f"{name}={value}, expected an integer of at least 1{usual}."
                )
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                expected = ", ".join(map(repr, known))
                raise OptionError(
                    f"{name}={getattr(self, name)!r}, expected one of {expected}."
                )
        if not self.head_width and self.width % self.heads:
            raise OptionError(
                f"a width of {self.width} cannot be split into {self.heads} heads. "
                "Set head_width=; heads * head_width need not equal the width."
            )
        if self.heads % self.shared:
            raise OptionError(
                f"{self.heads} heads cannot share {self.shared} heads of keys, "
                f"expected kv_heads to divide {self.heads}."
            )
        if self.position == "rotary" and self.head % 2:
            raise OptionError(
                f"rotary rotates pairs, but a head has the odd width {self.head}. "
                "Set an even head_width=."
            )
        self.check_lists()
        if not 0 <= self.dropout < 1:
            raise OptionError(f"dropout={self.dropout}, expected 0 <= dropout < 1.")
        if self.window is not None and self.window < 1:
            raise OptionError(f"window={self.window}, expected at least 1 or None.")

    def check_lists(self) -> None:
        """Raise if the settings of single layers or frequencies do not fit."""
        object.__setattr__(self, "stretch", tuple(self.stretch))  # JSON has lists
        if self.stretch and len(self.stretch) != self.head // 2:
            raise OptionError(
                f"stretch has {len(self.stretch)} numbers, expected one for each of "
                f"the {self.head // 2} pairs of a head, or ()."
            )
        if self.window_layers is None:
            return
        object.__setattr__(self, "window_layers", tuple(self.window_layers))
        if self.window is None or not {*self.window_layers} <= {*range(self.layers)}:
            raise OptionError(
                f"window_layers={self.window_layers}, window={self.window}: expected "
                f"layers of 0 … {self.layers - 1}, and a window."
            )

    def find_window(self, layer: int) -> int | None:
        """Return the window of a layer, None if it attends to all earlier tokens."""
        some = self.window_layers
        return self.window if some is None or layer in some else None

    @property
    def shared(self) -> int:
        """The number of key and value heads."""
        return self.kv_heads or self.heads

    @property
    def head(self) -> int:
        """The width of one head."""
        return self.head_width or self.width // self.heads

    @property
    def inner(self) -> int:
        """The width of the feed-forward layer."""
        return self.hidden or 4 * self.width

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of every weight, in model order."""
        yield "embed.weight", (self.vocabulary, self.width)
        if self.position == "learned":
            yield "positions.weight", (self.context, self.width)
        for i in range(self.layers):
            for name, shape in self.block_shapes():
                yield f"blocks.{i}.{name}", shape
        if self.norm_first:
            yield from self.norm_shapes("norm")
        if not self.tied:
            yield "head.weight", (self.vocabulary, self.width)

    def block_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of every weight of one block."""
        qkv = (self.heads + 2 * self.shared) * self.head
        ups = 2 * self.inner if self.activation == "swiglu" else self.inner
        qkv_bias = self.bias if self.qkv_bias is None else self.qkv_bias
        yield from self.norm_shapes("attention_norm")
        yield from matrix_shapes("attention.qkv", qkv, self.width, bias=qkv_bias)
        if self.qk_norm:
            yield "attention.q_norm.weight", (self.head,)
            yield "attention.k_norm.weight", (self.head,)
        joined = self.heads * self.head
        yield from matrix_shapes("attention.out", self.width, joined, bias=self.bias)
        yield from self.norm_shapes("feed_norm")
        yield from matrix_shapes("feed.up", ups, self.width, bias=self.bias)
        yield from matrix_shapes("feed.down", self.width, self.inner, bias=self.bias)

    def norm_shapes(self, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of every weight of a norm."""
        yield f"{name}.weight", (self.width,)
        if self.norm == "layer" and self.bias:
            yield f"{name}.bias", (self.width,)

    def start_from(self, name: str) -> tuple[float, float]:
        """Return the mean and standard deviation of a weight's normal initialization.

        Matrices that write to the residual stream start smaller, so that the stream
        does not grow with depth.
        """
        if name.endswith("bias"):
            return 0.0, 0.0
        if "norm" in name:
            return 1.0, 0.0
        if name.endswith(("out.weight", "down.weight")):
            return 0.0, 0.02 / math.sqrt(2 * self.layers)
        return 0.0, 0.02


COUNTS = {  # field: the meaning of 0, if allowed
    **dict.fromkeys(("vocabulary", "context", "width", "layers", "heads"), ""),
    "kv_heads": ", or 0 for the same as heads",
    "head_width": ", or 0 for width / heads",
    "hidden": ", or 0 for 4 * width",
}
CHOICES = {
    "norm": get_args(Norm),
    "position": get_args(Position),
    "activation": get_args(Activation),
}


def matrix_shapes(
    name: str, rows: int, columns: int, *, bias: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of a matrix (out, in) and of its bias."""
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)
