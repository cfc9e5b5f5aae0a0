"""What a layer of llama.cpp computes: the facts of its record, and a check of them.

    with flash attention      out     = softmax(capped(scale q kᵀ) + mask) v
    without                   weights = softmax(capped(scale q kᵀ) + mask)

Next: llama_recorder.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.arrays import Array
from regard.definition.attention import attention
from regard.serving.ggml_tensors import (
    Tensor,
    TensorReader,
    find_cache_number,
    read_floats,
)
from regard.serving.request_rows import LayerFacts

BLOCK = 512  # rows and keys of a tile
CHECKED = 8  # rows of a call that are computed again
BIASED = "its scores have a bias, which is not recorded"


@dataclass(frozen=True, kw_only=True)
class LayerCall:
    """What a layer is given: tensors of ggml, and numbers."""

    q: NDArray[Any]  # (H, rows, D)
    k: Tensor  # (1, Hk, cells, D)
    v: Tensor | None = None  # (1, Hk, cells, D)
    mask: Tensor  # (1, 1, rows or more, cells)
    sinks: Tensor | None = None
    scale: float
    softcap: float  # 0 without


def find_softcap(
    reader: TensorReader, scores: Tensor, scale: float
) -> tuple[float, float]:
    """Return scale and softcap of scores: of c tanh(s q · k / c), s and c.

    llama.cpp multiplies by s / c, takes tanh, and multiplies by c in two steps.
    """
    op = reader.name_op(scores)
    if op == "MUL_MAT":
        return scale, 0.0
    if op != "SCALE":
        raise ValueError(BIASED)
    softcap = scale * read_floats(scores, 1)[0]
    inner = scores.src[0].contents.src[0].contents  # what tanh is taken of
    return read_floats(inner, 1)[0] * softcap, softcap


def read_layer_facts(reader: TensorReader, call: LayerCall, number: int) -> LayerFacts:
    """Return what a layer does with its queries and keys."""
    owner = find_cache_number(call.k)
    return LayerFacts(
        name=f"blk.{number}.attn",
        scale=call.scale,
        softcap=call.softcap or None,
        sink=read_sink_tensor(reader, call),
        keys_of="" if owner in (None, number) else f"blk.{owner}.attn",
    )


def read_sink_tensor(reader: TensorReader, call: LayerCall) -> NDArray[Any] | None:
    """Return the sink of each head, (H,), None without."""
    return None if call.sinks is None else reader.read(call.sinks).reshape(-1)


def find_layer_error(reader: TensorReader, call: LayerCall, tensor: Tensor) -> float:
    """Return the error of the last rows of a call, computed again."""
    n = call.q.shape[1]
    rows = slice(max(0, n - CHECKED), n)
    allowed = reader.read(call.mask, 0, n)[0, :, rows] == 0  # (1, rows, cells)
    k = reader.read(call.k)[0].astype(np.float32)
    v = k if call.v is None else reader.read(call.v)[0].astype(np.float32)
    done = attention(
        call.q[:, rows],
        k,
        v,
        allowed,
        scale=call.scale,
        softcap=call.softcap or None,
        sink=read_sink_tensor(reader, call),
        see=("weights",),
    )
    theirs, ours = reader.read(tensor)[0], done.weights
    if call.v is not None:  # (rows, H, D) as well as (H, rows, cells)
        theirs, ours = theirs.swapaxes(0, 1), done.out
    size = float(np.abs(theirs[:, rows]).max()) or 1.0
    return float(np.abs(ours - theirs[:, rows]).max()) / size


def compute_row_lse(q: Array, k: Array, facts: LayerFacts, q_start: int) -> Array:
    """Return log-sum-exp of each row, (H, Nq)."""
    return attention(
        q,
        k,
        k,
        facts.mask,
        scale=facts.scale,
        softcap=facts.softcap,
        sink=facts.sink,
        q_start=q_start,
        block=BLOCK,
    ).lse
