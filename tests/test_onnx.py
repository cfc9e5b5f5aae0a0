"""The ONNX standard's own node tests, run against the definition.

    Attention         93 cases, in every array library, one call of `attention` each
    FlexAttention     11 cases, its subgraphs as `edit=` functions
    RotaryEmbedding    8 cases, by `rotate`

The onnx package makes inputs and expected outputs in memory, so nothing is downloaded.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import array_api_strict
import jax.numpy
import numpy as np
import onnx
import onnx.backend.test.case.node as onnx_node
import onnx.backend.test.case.node.attention
import onnx.backend.test.case.node.flexattention
import onnx.backend.test.case.node.rotaryembedding  # importing makes the cases
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from regard import attention, causal, padding, where, window
from regard.arrays import Array, namespace
from regard.definition.heads import join_heads, split_heads
from regard.definition.position import HALVES, NEIGHBOURS, rotate
from regard.masks import Mask, array

Case = Any  # onnx.backend.test.case.test_case.TestCase

STEP_OF_MODE = ("scores", "capped", "logits", "weights")


def cases_of(op_type: str) -> list[Case]:
    """Return the cases that are one node of this operator, not its expansion."""
    return [
        case
        for case in onnx_node._NodeTestCases
        if case.model.graph.node[0].op_type == op_type and "_expanded" not in case.name
    ]


def is_half(case: Case) -> bool:
    return any(x.dtype == np.float16 for x in case.data_sets[0][0])


ATTENTION = cases_of("Attention")
STRICT = [case for case in ATTENTION if not is_half(case)]  # strict has no float16
FLEX = cases_of("FlexAttention")
ROTARY = cases_of("RotaryEmbedding")


def each(cases: list[Case]) -> pytest.MarkDecorator:
    names = [case.name.removeprefix("test_") for case in cases]
    return pytest.mark.parametrize("case", cases, ids=names)


# How a library takes an array of the standard. NumPy and strict have no bfloat16; its
# numbers are float32 numbers too, so there they are read and compared as float32.


def widen(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if x.dtype.name == "bfloat16" else x


def to_torch(x: np.ndarray) -> torch.Tensor:
    wide = torch.tensor(widen(x))
    return wide.to(torch.bfloat16) if x.dtype.name == "bfloat16" else wide


def to_strict(x: np.ndarray) -> Array:
    return array_api_strict.asarray(widen(x))


def to_numpy(x: Array) -> np.ndarray:
    if isinstance(x, torch.Tensor):
        x = x.to(torch.float64)
    return np.asarray(x).astype(np.float64)


LIBRARIES = {"numpy": widen, "torch": to_torch, "jax": jax.numpy.asarray}


# What the standard's operators are in our words.


def onnx_attention(
    q: Array,  # (B, H, Nq, D), or (B, Nq, H*D), as k and v
    k: Array,
    v: Array,
    attn_mask: Array | None = None,  # bool: True = may attend; float: is added
    past_key: Array | None = None,  # (B, Hk, P, D)
    past_value: Array | None = None,
    nonpad_kv_seqlen: Array | None = None,  # (B,)
    *,
    is_causal: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    q_num_heads: int = 0,
    kv_num_heads: int = 0,
    softmax_precision: int = 0,  # ours is at least float32, whatever is asked
    qk_matmul_output_mode: int = 0,
    left_window_size: int = -1,  # -1: no bound on this side
    right_window_size: int = -1,
) -> tuple[Array, Array, Array, Array]:
    """Return Y, present_key, present_value, qk_matmul_output."""
    xp = namespace(q=q)
    flat = q.ndim == 3
    if flat:
        q, k, v = (
            split_heads(q, q_num_heads),
            split_heads(k, kv_num_heads),
            split_heads(v, kv_num_heads),
        )
    start, masks, bias = 0, [], None
    if past_key is not None:
        k, v = xp.concat([past_key, k], axis=-2), xp.concat([past_value, v], axis=-2)
        start = past_key.shape[-2]
    if nonpad_kv_seqlen is not None:
        masks.append(padding(lengths=nonpad_kv_seqlen))
        start = nonpad_kv_seqlen - q.shape[-2]
    if is_causal:
        masks.append(causal())
    if left_window_size >= 0:
        masks.append(window(left_window_size, None))
    if right_window_size >= 0:
        masks.append(window(None, right_window_size))
    if attn_mask is not None and xp.isdtype(attn_mask.dtype, "bool"):
        masks.append(by_row(reach(attn_mask, k.shape[-2], fill=False), start))
    elif attn_mask is not None:
        bias = reach(attn_mask, k.shape[-2], fill=-np.inf)

    step = STEP_OF_MODE[qk_matmul_output_mode]
    seen = attention(
        q,
        k,
        v,
        functools.reduce(operator.and_, masks) if masks else None,
        bias=bias,
        scale=scale,
        softcap=softcap or None,
        q_start=start,
        see=(step,),
    )
    out = join_heads(seen.out) if flat else seen.out
    return out, k, v, xp.astype(getattr(seen, step), q.dtype)


def reach(mask: Array, n_keys: int, *, fill: float) -> Array:
    """Return all four axes and all keys; a short mask forbids those after it."""
    xp = namespace(mask=mask)
    mask = xp.reshape(mask, (1,) * (4 - mask.ndim) + tuple(mask.shape))
    rest = (*mask.shape[:-1], n_keys - mask.shape[-1])
    return xp.concat([mask, xp.full(rest, fill, dtype=mask.dtype)], axis=-1)


def by_row(allowed: Array, start: int | Array) -> Mask:
    """Row i is for the i-th query, wherever each batch starts."""
    if not isinstance(start, int):
        start = namespace(start=start).reshape(start, (-1, 1, 1, 1))
    mask = array(allowed)
    return where(lambda b, h, q, k: mask(b, h, q - start, k))


def onnx_flex_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    score_mod: onnx.GraphProto | None = None,  # of the scaled scores
    prob_mod: onnx.GraphProto | None = None,  # of what the softmax gives
) -> tuple[Array]:
    """Return Y, with the subgraphs run where they stand in the formula."""
    graphs = {"scores": score_mod, "weights": prob_mod}
    edit = {step: as_function(graph) for step, graph in graphs.items() if graph}
    return (attention(q, k, v, scale=scale, edit=edit).out,)


def as_function(graph: onnx.GraphProto) -> Any:
    run = ReferenceEvaluator(graph, opsets={"": onnx.defs.onnx_opset_version()}).run
    return lambda step: run(None, {graph.input[0].name: step})[0]


def onnx_rotary_embedding(
    x: Array,  # (B, H, N, D), or (B, N, H*D)
    cos: Array,  # (positions, R/2), or (B, N, R/2) without position_ids
    sin: Array,
    position_ids: Array | None = None,  # (B, N)
    *,
    num_heads: int = 0,
    interleaved: int = 0,
    rotary_embedding_dim: int = 0,  # R: only the first so many numbers turn; 0 is all
) -> tuple[Array]:
    """Return the turned x."""
    heads = split_heads(x, num_heads) if x.ndim == 3 else x
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    cos, sin = cos[:, None], sin[:, None]  # the same for every head
    width = rotary_embedding_dim or heads.shape[-1]
    pairing = NEIGHBOURS if interleaved else HALVES
    turned = rotate(heads[..., :width], cos, sin, pairing=pairing)
    both = np.concat([turned, heads[..., width:]], axis=-1)
    return (join_heads(both) if x.ndim == 3 else both,)


def check(case: Case, operation: Any, load: Any = widen) -> None:
    """Run the one node of a case in one library and compare all that it gives."""
    (node,) = case.model.graph.node
    ((given, expected),) = case.data_sets
    arrays = iter(given)  # only the inputs that are named
    inputs = [load(next(arrays)) if name else None for name in node.input]
    options = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    outputs = zip(node.output, operation(*inputs, **options), strict=False)
    results = [x for name, x in outputs if name]
    for result, wanted in zip(results, map(load, expected), strict=True):
        assert result.dtype == wanted.dtype
        np.testing.assert_allclose(
            to_numpy(result),
            to_numpy(wanted),
            rtol=rtol_of(case),
            atol=case.atol,
            strict=True,  # shapes are equal, not only alike
        )


def rtol_of(case: Case) -> float:
    """As the standard's runner: two units in the last place of bfloat16."""
    has_bfloat16 = any(x.dtype.name == "bfloat16" for x in case.data_sets[0][1])
    return max(case.rtol, 2**-6) if has_bfloat16 else case.rtol


def test_no_case_of_the_standard_goes_missing():
    groups = (ATTENTION, STRICT, FLEX, ROTARY)
    assert [len({case.name for case in cases}) for cases in groups] == [93, 87, 11, 8]
    assert [len(cases) for cases in groups] == [93, 87, 11, 8]


@each(ATTENTION)
@pytest.mark.parametrize("library", LIBRARIES)
def test_attention_is_what_the_standard_says(library, case):
    check(case, onnx_attention, LIBRARIES[library])


@each(STRICT)
@pytest.mark.filterwarnings("ignore:The 2021.12 version:UserWarning")
@pytest.mark.parametrize(
    "version", ["2021.12", "2022.12", "2023.12", "2024.12", "2025.12"]
)
def test_attention_needs_no_more_than_the_array_api(version, case):
    with array_api_strict.ArrayAPIStrictFlags(
        api_version=version,
        boolean_indexing=False,
        data_dependent_shapes=False,
        enabled_extensions=(),
    ):
        check(case, onnx_attention, to_strict)


@each(FLEX)
def test_edits_are_the_subgraphs_of_flex_attention(case):
    check(case, onnx_flex_attention)


@each(ROTARY)
def test_rotate_is_what_the_standard_says(case):
    check(case, onnx_rotary_embedding)
