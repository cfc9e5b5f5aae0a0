"""The attention layers of vLLM: which there are, what they compute, and an exact check.

    layer.impl       scale, window, softcap and sinks, as the kernel applies them
    find_obstacle    why a layer cannot be recorded: its keys are not what it attends to
    find_error       |engine(q, k, v) - output| over the first rows of a request

Next: vllm_worker.py
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard.lens.check_rebuild import find_largest_difference
from regard.serving.layer_engine import attend_layer
from regard.serving.request_rows import LayerFacts

Sample = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v, out: (heads, N, D)

SLOPES = "ALiBi slopes are not recorded"
NO_ATTENTION = "it is no softmax attention"
CHECKED = 512  # first rows of a request whose output is rebuilt
LATENT = "its keys are latent (MLA): no head has keys of its own"
QUANTIZED = "its KV cache is quantized ({}): it attends to other keys than it computes"
DRAFTS = (
    "speculative decoding is not followed: drafts that are rejected look like tokens"
)


def find_layers(worker: Any) -> dict[str, Any]:
    """Return the attention layers of a worker, by name; experts are left out."""
    from vllm.model_executor.layers.attention_layer_base import (  # noqa: PLC0415
        AttentionLayerBase,
    )

    found = worker.vllm_config.compilation_config.static_forward_context
    return {n: x for n, x in found.items() if isinstance(x, AttentionLayerBase)}


def find_obstacle(layer: Any, config: Any) -> str:
    """Return why a layer cannot be recorded, or nothing."""
    from vllm.model_executor.layers.attention import Attention  # noqa: PLC0415

    if config.speculative_config is not None:
        return DRAFTS
    if "MLA" in type(layer).__name__:
        return LATENT
    if not isinstance(layer, Attention):
        return NO_ATTENTION
    if layer.kv_cache_torch_dtype != layer.dtype:
        return QUANTIZED.format(layer.kv_cache_dtype)
    if getattr(layer.impl, "alibi_slopes", None) is not None:
        return SLOPES
    return ""


def read_facts(layer: Any) -> LayerFacts:
    """Return what a layer does with its queries and keys."""
    impl = layer.impl
    sinks = getattr(impl, "sinks", None)
    return LayerFacts(
        name=layer.layer_name,
        scale=float(impl.scale),
        is_causal=str(layer.attn_type).lower().rpartition(".")[2] == "decoder",
        window=layer.sliding_window,
        softcap=getattr(impl, "logits_soft_cap", None) or None,
        sink=None if sinks is None else sinks.detach().clone(),
        keys_of=layer.kv_sharing_target_layer_name or "",
    )


def take_sample(q: Tensor, k: Tensor, v: Tensor, output: Tensor) -> Sample:
    """Copy the first rows of a request, (N, heads, D), and their output."""
    wide = output.reshape(q.shape[:2] + v.shape[2:])
    q, k, v, out = (x[:CHECKED].transpose(0, 1).clone() for x in (q, k, v, wide))
    return q, k, v, out


def find_error(layer: Any, sample: Sample) -> float:
    """Return the error of the output of a layer, computed again by the engine."""
    q, k, v, out = sample
    done = attend_layer(q, k, v, read_facts(layer), 0)
    return find_largest_difference(done.out[0], out)
