"""Record the attention of vLLM in its worker, by layer and request.

    layer.impl.forward(layer, query, key, value, cache, metadata, output=...)

is what every attention layer runs, compiled or not; it is patched while the recording
lasts. The batch is split by the metadata: rows query_start_loc[i] … of request i, whose
last position is seq_lens[i] - 1. Rows are copied as they pass; everything else (lse,
masks, the check of the output) is computed when the recording ends.

Next: vllm_plugin.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.engine.choose import attend
from regard.lens.check_rebuild import find_largest_difference
from regard.lens.find_attention import describe_error
from regard.recording.file import save_recording
from regard.recording.record import Covered, Record, Recording
from regard.serving.paged_cache import Arrange, find_arrangement, read_keys
from regard.serving.request_rows import LayerFacts, RequestRows, make_record

CHECKED = (
    512  # rows of a layer whose output is rebuilt, from the beginning of a request
)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of a rebuilt output; else 3e-2
QUANTIZED = "its KV cache is quantized ({}): it attends to other keys than it computes"
LATENT = "its keys are latent (MLA): no head has keys of its own"
NO_ATTENTION = "it is no softmax attention"
DRAFTS = (
    "speculative decoding is not followed: drafts that are rejected look like tokens"
)
UNREAD = (
    "keys of a cached prefix could not be read: the arrangement of its cache is unknown"
)
SLOPES = "ALiBi slopes are not recorded"
UNCHECKED = "its output was not checked: no request began while it was watched"
PARTIAL = "requests have no queries for a prefix that was in the cache"


@dataclass(frozen=True)
class BatchRows:
    """The rows of one request in a step."""

    request: RequestRows
    start: int
    stop: int
    first: int  # position of the first row
    index: int  # of the request in the batch


@dataclass
class HeardLayer:
    """What is known of one attention layer."""

    layer: Any
    calls: int = 0
    reasons: dict[str, None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    arrange: Arrange | None = None  # of its cache, once it is known
    sample: tuple[Tensor, Tensor, Tensor, Tensor] | None = None  # q, k, v, out


class Recorder:
    """Records the layers of one worker."""

    def __init__(self, worker: Any, layers: list[str], keep: str) -> None:
        self.runner, self.keep_v = worker.model_runner, keep == "qkv"
        config = worker.vllm_config
        self.rank = [worker.rank, config.parallel_config.world_size]
        self.heard = {name: HeardLayer(x) for name, x in find_layers(worker).items()}
        self.requests: dict[str, RequestRows] = {}
        self.context: Any = None  # of the pass that is running
        self.parts: list[BatchRows] = []
        self.failures: dict[str, None] = {}
        self.patches = ExitStack()
        for name, heard in self.heard.items():
            reason = find_obstacle(heard.layer, config)
            if name not in layers:
                reason = "not asked for"
            if reason:
                heard.reasons[reason] = None

    def patch(self) -> None:
        """Patch the layers that can be recorded."""
        for name, heard in self.heard.items():
            if not heard.reasons:
                hear = self.contain(self.hear, name)
                self.patches.enter_context(put_forward(heard.layer.impl, hear))

    def contain(self, hear: Callable[..., None], name: str) -> Callable[..., None]:
        """Return a function whose errors become a reason, and reach no model."""

        def heard(*args: Any, **named: Any) -> None:
            try:
                hear(name, *args, **named)
            except Exception as error:  # noqa: BLE001
                self.heard[name].reasons[describe_error(error)] = None

        return heard

    def hear(  # noqa: PLR0917 (the arguments are those of vLLM)
        self,
        name: str,
        _layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: Tensor,
        metadata: Any,
        output: Tensor | None = None,
        **_named: Any,
    ) -> None:
        """Copy the rows of a call."""
        if metadata is None:  # vLLM measures its memory
            return
        heard = self.heard[name]
        heard.calls += 1
        parts = self.split_batch(metadata)
        n = parts[-1].stop if parts else 0
        shared = bool(heard.layer.kv_sharing_target_layer_name)
        q = query[:n].detach().clone()
        k = None if shared or key is None else key[:n].detach().clone()
        v = None if k is None or value is None else value[:n].detach()
        if heard.sample is None and k is not None and v is not None:
            heard.sample = take_sample(parts, q, k, v, output)
        kept = v.clone() if self.keep_v and v is not None else None
        for part in parts:
            rows, cut = part.request.layer(name), slice(part.start, part.stop)
            if k is not None and rows.known < part.first:
                self.read_prefix(heard, part, k, cache, metadata)
            rows.add(
                part.first,
                q[cut],
                None if k is None else k[cut],
                None if kept is None else kept[cut],
            )

    def split_batch(self, metadata: Any) -> list[BatchRows]:
        """Return the parts of the batch; they are the same for all layers of a pass."""
        from vllm.forward_context import get_forward_context  # noqa: PLC0415

        context = get_forward_context()
        if context is self.context:
            return self.parts
        starts = metadata.query_start_loc.tolist()
        lengths = metadata.seq_lens.tolist()
        names = list(self.runner.input_batch.req_ids)
        tokens = self.runner.input_ids.gpu[: metadata.num_actual_tokens].tolist()
        self.parts = []
        for i, name in enumerate(names[: len(lengths)]):
            start, stop = starts[i], starts[i + 1]
            first = lengths[i] - (stop - start)
            request = self.requests.get(name)
            if request is None:
                request = self.requests[name] = RequestRows(clean_name(name))
                known = self.runner.input_batch.token_ids_cpu[i, :first].tolist()
                request.add_tokens(0, known)
            request.add_tokens(first, tokens[start:stop])
            if stop > start:
                self.parts.append(BatchRows(request, start, stop, first, i))
        self.context = context
        return self.parts

    def read_prefix(
        self,
        heard: HeardLayer,
        part: BatchRows,
        k: Tensor,
        cache: Tensor,
        metadata: Any,
    ) -> None:
        """Read the keys of a request that were in the cache before its rows came."""
        if heard.arrange is None:
            slots = metadata.slot_mapping[: k.shape[0]]
            heard.arrange = find_arrangement(cache, slots, k)
        if heard.arrange is None:
            heard.reasons[UNREAD] = None
            return
        table = metadata.block_table[part.index].tolist()
        first, keys = read_keys(cache, heard.arrange, table, k, part.first)
        rows = part.request.layer(heard.layer.layer_name)
        rows.add_keys(first, keys)
        heard.notes[PARTIAL] = None

    def finish(self) -> Recording:
        """Undo the patches, and return what was recorded."""
        self.patches.close()
        facts = {
            name: read_facts(x.layer) for name, x in self.heard.items() if not x.reasons
        }
        errors = {name: self.check_output(name, x) for name, x in facts.items()}
        records: list[Record] = []
        sequences: list[int] = []
        for number, request in enumerate(self.requests.values()):
            for record in self.make_records(request, facts):
                records.append(record)
                sequences.append(number)
        return Recording(
            model=type(self.runner.model).__name__,
            records=tuple(records),
            sequences=tuple(sequences),
            tokens=tuple(x.list_tokens() for x in self.requests.values()),
            coverage=tuple(self.cover(errors)),
            notes={
                "rank": self.rank,
                "requests": [x.name for x in self.requests.values()],
                "decoders": list(facts),
            },
        )

    def make_records(
        self, request: RequestRows, facts: dict[str, LayerFacts]
    ) -> Iterator[Record]:
        """Yield the records of a request; an error of ours becomes a reason."""
        for name, fact in facts.items():
            heard = self.heard[name]
            if heard.reasons or not request.layer(name).q:
                continue
            try:
                yield make_record(fact, request, compute_lse)
            except Exception as error:  # noqa: BLE001
                heard.reasons[describe_error(error)] = None

    def check_output(self, name: str, facts: LayerFacts) -> float:
        """Return the error of the output of a layer, computed again by the engine."""
        heard = self.heard[name]
        if heard.sample is None:
            heard.notes[UNCHECKED] = None
            return 0.0
        q, k, v, out = heard.sample
        done = attend_layer(q, k, v, facts, 0)
        error = find_largest_difference(done.out[0], out)
        if not error <= TOLERANCE.get(out.dtype, 3e-2):
            heard.reasons["its output could not be rebuilt"] = None
        return error

    def cover(self, errors: dict[str, float]) -> Iterator[Covered]:
        """Yield the coverage of each layer."""
        for name, heard in self.heard.items():
            if heard.calls or heard.reasons:
                kept = 0 if heard.reasons else heard.calls
                yield Covered(
                    name=name,
                    via="vllm" if heard.calls else "",
                    calls=heard.calls,
                    kept=kept,
                    error=errors.get(name, 0.0),
                    reason="; ".join(heard.reasons),
                    note="; ".join(heard.notes),
                )


@contextmanager
def put_forward(impl: Any, hear: Callable[..., None]) -> Iterator[None]:
    """Call `hear` after each call of an implementation's forward, in a `with`."""
    original = impl.forward

    @wraps(original)
    def forward(*args: Any, **named: Any) -> Any:
        out = original(*args, **named)
        hear(*args, **named)
        return out

    impl.forward = forward
    try:
        yield
    finally:
        del impl.forward  # the method of its class again


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


def take_sample(
    parts: list[BatchRows], q: Tensor, k: Tensor, v: Tensor, output: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Return the first rows of a request, with their output, if they are there."""
    for part in parts:
        if part.first == 0 and output is not None:
            cut = slice(part.start, min(part.stop, part.start + CHECKED))
            wide = output[cut].detach().reshape(q[cut].shape[:2] + v.shape[2:])
            q, k, v, out = (
                x.transpose(0, 1).clone() for x in (q[cut], k[cut], v[cut], wide)
            )
            return q, k, v, out
    return None


def attend_layer(
    q: Tensor, k: Tensor, v: Tensor, facts: LayerFacts, q_start: int
) -> Any:
    """Run the engine on what a layer was given, (H, N, D)."""
    return attend(
        q[None],
        k[None],
        v[None],
        facts.mask,
        scale=facts.scale,
        softcap=facts.softcap,
        sink=None if facts.sink is None else facts.sink.to(q.dtype),
        q_start=q_start,
    )


def compute_lse(q: Tensor, k: Tensor, facts: LayerFacts, q_start: int) -> Tensor:
    """Return log-sum-exp of each row, (H, Nq)."""
    with torch.no_grad():
        lse: Tensor = attend_layer(q, k, k, facts, q_start).lse[0]
        return lse


def clean_name(name: str) -> str:
    """Return a request's name without the suffix that the engine adds to it."""
    return re.sub(r"-[0-9a-f]{8}$", "", name)


def start_recording(worker: Any, layers: list[str], keep: str) -> None:
    """Begin to record in a worker."""
    if getattr(worker, "regard_recorder", None) is not None:
        raise RuntimeError("this engine is already being watched")
    worker.regard_recorder = Recorder(worker, layers, keep)
    worker.regard_recorder.patch()


def stop_recording(worker: Any, folder: str) -> None:
    """End the recording of a worker, and save it to a file of its rank."""
    recorder, worker.regard_recorder = worker.regard_recorder, None
    recording = recorder.finish()
    save_recording(Path(folder) / f"rank{recorder.rank[0]:05}.regard", recording)
