"""Draw a call of attention with hostile options from a random generator.

    draw_call(rng) -> HostileCall      shapes, dtypes, masks, biases, scales, sinks

Nothing is left at its usual value for long: scales are zero or negative, keys hold NaN,
arrays have gaps in memory, axes broadcast, rows see nothing. What is drawn is always
within the contract of `regard.attention`, so there is one right answer.

Next: questions.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from regard import masks

Rng = np.random.Generator
DTYPES = ("float64", "float32", "float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True, eq=False)
class HostileCall:
    """The arguments of one call; arrays are float64 and exact in `dtype`."""

    q: Any  # (..., H, Nq, D)
    k: Any  # (..., Hk, Nk, D)
    v: Any  # (..., Hk, Nk, Dv)
    options: dict[str, Any]  # of attention; arrays in NumPy
    dtype: str
    strides: int  # 0: contiguous; 1: transposed; 2: every second number of a larger one

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        """The arrays q, k and v."""
        return self.q, self.k, self.v

    @property
    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite, in the arrays or in the sink."""
        sink = self.options.get("sink")
        known = [*self.arrays, np.zeros(()) if sink is None else sink]
        return all(np.isfinite(x).all() for x in known)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the scores, (B, H, Nq, Nk)."""
        lead = np.broadcast_shapes(*(x.shape[:-3] for x in self.arrays))
        batch = lead[-1] if lead else 1
        heads = self.q.shape[-3] if self.q.ndim > 2 else 1
        return batch, heads, self.q.shape[-2], self.k.shape[-2]

    def to_torch(self, *, grad: bool = False) -> tuple[list[Any], dict[str, Any]]:
        """Return q, k and v with their dtype and strides, and the options."""
        arrays = [stride(round_to(x, self.dtype), self.strides) for x in self.arrays]
        options = {name: to_tensor(x) for name, x in self.options.items()}
        return [x.requires_grad_(grad) for x in arrays], options

    def __str__(self) -> str:
        shapes = ", ".join(str(x.shape) for x in self.arrays)
        said = {n: shorten(x) for n, x in self.options.items()}
        return f"{shapes} {self.dtype} strides {self.strides} {said}"


def shorten(x: Any) -> str:
    """Return an option in a few words."""
    if isinstance(x, np.ndarray) and x.size > 8:
        return f"<{x.dtype} {x.shape}>"
    return repr(x)[:200]


def to_tensor(x: Any) -> Any:
    """Return an array as a tensor, anything else as it is."""
    return torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x


def round_to(x: Any, dtype: str) -> torch.Tensor:
    """Return an array as a tensor of a dtype."""
    return torch.from_numpy(np.ascontiguousarray(x)).to(getattr(torch, dtype))


def stride(x: torch.Tensor, how: int) -> torch.Tensor:
    """Return the same numbers with other strides."""
    if how == 1:
        return x.mT.contiguous().mT
    if how == 2:
        return torch.stack([x, x + 1], -1).flatten(-2)[..., ::2]
    return x


def draw_call(rng: Rng) -> HostileCall:
    """Return a call that is within the contract, and as odd as can be."""
    lead, heads, shared = draw_axes(rng)
    n_q, n_k = draw_length(rng), draw_length(rng)
    q_start = int(rng.integers(0, 6))
    if rng.random() < 0.6:
        n_k, q_start = n_q, 0
    width, width_v = (int(rng.choice([1, 2, 3, 8, 16, 17])) for _ in "kv")
    if rng.random() < 0.6:
        width_v = width
    dtype = str(rng.choice(DTYPES))
    sizes = ((heads, n_q, width), (shared, n_k, width), (shared, n_k, width_v))
    q, k, v = (draw_numbers(rng, size, lead, dtype) for size in sizes)
    call = HostileCall(q=q, k=k, v=v, options={}, dtype=dtype, strides=draw_layout(rng))
    call = drop_axes(rng, call)
    options = draw_options(rng, call.shape, q_start)
    axes = max(x.ndim for x in call.arrays)
    for name in {"mask", "bias"} & options.keys():
        x = options[name]
        if isinstance(x, np.ndarray):  # as many axes as the scores: it fits in one way
            options[name] = x[0] if axes == 2 else x[(None,) * (axes - x.ndim)]
    return replace(call, options=options)


def draw_axes(rng: Rng) -> tuple[tuple[int, ...], int, int]:
    """Return the axes before the heads, the heads of q, and those of k and v."""
    lead = tuple(int(n) for n in rng.integers(1, 4, size=rng.choice([0, 1, 1, 1, 2])))
    shared = int(rng.integers(1, 4))
    return lead, shared * int(rng.integers(1, 4)), shared


def draw_length(rng: Rng) -> int:
    """Return a length: mostly a few tokens, sometimes past the edge of a tile."""
    if rng.random() < 0.1:
        return int(rng.choice([0, 255, 256, 257, 300, 513]))
    return int(rng.integers(1, 40))


def draw_layout(rng: Rng) -> int:
    """Return how numbers lie in memory."""
    return int(rng.choice([0, 0, 1, 2]))


def draw_numbers(rng: Rng, size: Any, lead: tuple[int, ...], dtype: str) -> Any:
    """Return an array of float64 whose numbers are exact in the dtype."""
    lead = tuple(n if rng.random() < 0.85 else 1 for n in lead)
    x = rng.normal(size=(*lead, *size)) * rng.choice([0, 0.01, 1, 1, 1, 1, 5, 100])
    spoil = rng.random()
    if spoil < 0.06 and x.size:
        bad = rng.choice([np.nan, np.inf, -np.inf])
        x.reshape(-1)[rng.integers(0, x.size)] = bad
    elif spoil < 0.09:
        x *= 1e4 if dtype == "float16" else 1e37
    return round_to(x, dtype).double().numpy()


def drop_axes(rng: Rng, call: HostileCall) -> HostileCall:
    """Leave out axes of size 1 in front, of any of the three arrays."""
    found = []
    for x in call.arrays:
        while x.ndim > 2 and x.shape[0] == 1 and rng.random() < 0.3:
            x = x[0]  # noqa: PLW2901
        found.append(x)
    q, k, v = found
    if k.ndim == 2 or v.ndim == 2:  # heads of k and v must agree
        k, v = (x if x.ndim > 2 else x[None] for x in (k, v))
    return replace(call, q=q, k=k, v=v)


def draw_options(rng: Rng, shape: Any, q_start: int) -> dict[str, Any]:
    """Return options that fit the scores (B, H, Nq, Nk)."""
    _, heads, n_q, n_k = shape
    options: dict[str, Any] = {}
    if n_q != n_k or rng.random() < 0.3:
        options["q_start"] = q_start
    start = options.get("q_start", 0)
    if rng.random() < 0.8:
        options["mask"] = draw_mask(rng, shape, start)
    if rng.random() < 0.3:
        options["bias"] = draw_bias(rng, shape)
    if rng.random() < 0.5:
        scale = rng.choice([0, -0.0, -1, -0.3, 2, 1e-30, 1e-3, -20])
        options["scale"] = float(scale) if rng.random() < 0.8 else np.asarray(scale)
    if rng.random() < 0.2:
        options["softcap"] = float(rng.choice([0.1, 2, 50]))
    if rng.random() < 0.2:
        sink = rng.normal(size=heads) * rng.choice([1, 10, 100])
        if rng.random() < 0.2:
            sink[rng.integers(heads)] = rng.choice([-np.inf, np.inf, np.nan])
        options["sink"] = sink if rng.random() < 0.8 else np.asarray(sink[0])
    return options


def draw_bias(rng: Rng, shape: Any) -> Any:
    """Return a bias: an array, with -inf in some cells, or a formula."""
    _, heads, n_q, n_k = shape
    kind = rng.random()
    if kind < 0.3:
        return masks.alibi(rng.normal(size=heads))
    if kind < 0.5:
        return masks.table(rng.normal(size=(heads, 5)))
    size = (heads if rng.random() < 0.5 else 1, n_q if rng.random() < 0.7 else 1, n_k)
    x = rng.normal(size=size)
    return np.where(rng.random(size) < 0.2, -np.inf, x) if kind < 0.7 else x


def draw_mask(rng: Rng, shape: Any, start: int, depth: int = 0) -> Any:
    """Return a formula, or at the top sometimes an array."""
    batch, heads, n_q, n_k = shape
    if depth == 0 and rng.random() < 0.15:
        return rng.random((1, n_q, n_k)) < rng.choice([0, 0.3, 0.9])
    kind = rng.random()
    if depth < 3 and kind < 0.15:
        return draw_mask(rng, shape, start, depth + 1) & draw_mask(
            rng, shape, start, depth + 1
        )
    if depth < 3 and kind < 0.3:
        return draw_mask(rng, shape, start, depth + 1) | draw_mask(
            rng, shape, start, depth + 1
        )
    if depth < 3 and kind < 0.38:
        return ~draw_mask(rng, shape, start, depth + 1)
    if depth < 2 and kind < 0.42:
        inner = [draw_mask(rng, shape, start, depth + 1) for _ in range(heads)]
        return masks.per_head(inner)
    return draw_leaf(rng, batch, max(n_k, start + n_q), n_k)


def draw_leaf(rng: Rng, batch: int, far: int, n_k: int) -> Any:
    """Return a formula that is made of no others."""
    small = [int(x) for x in rng.integers(0, far + 1, size=2)]
    step = int(rng.integers(1, 5))
    ids = rng.integers(0, 4, size=far)
    choices = (
        masks.causal,
        lambda: masks.window(*small),
        lambda: masks.window(2**31, small[0]),
        lambda: masks.keys(*small),
        lambda: masks.keys(0, 0),
        lambda: masks.prefix(small[0]),
        lambda: masks.same(ids if rng.random() < 0.5 else np.sort(ids)),
        lambda: masks.padding(lengths=rng.integers(0, n_k + 1, size=batch)),
        lambda: masks.padding(rng.random((batch, n_k)) < 0.7),
        lambda: masks.where(lambda b, h, q, k: (q + 2 * k + h + b) % step == 0),
    )
    return choices[rng.integers(len(choices))]()
