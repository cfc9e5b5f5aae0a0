"""Record the attention of vLLM in its worker, by layer and request.

    layer.impl.forward(layer, query, key, value, cache, metadata, output=...)

is what every attention layer runs, compiled or not; it is patched while the recording
lasts. The batch is split by the metadata: rows query_start_loc[i] … of request i, whose
last position is seq_lens[i] - 1. Rows are copied as they pass; everything else (lse,
masks, the check of the output) is computed when the recording ends.

Next: vllm_requests.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.lens.check_rebuild import find_tolerance
from regard.lens.find_attention import describe_error
from regard.recording.evidence import Covered
from regard.recording.file import save_recording
from regard.recording.record import Record, Recording
from regard.serving.layer_engine import compute_lse
from regard.serving.paged_cache import Arrange, find_arrangement, read_keys
from regard.serving.request_rows import RequestRows, make_record, refuse_layer
from regard.serving.vllm_layers import (
    Sample,
    find_error,
    find_layers,
    find_obstacle,
    read_facts,
    take_sample,
)

UNREAD = (
    "keys of a cached prefix could not be read: the arrangement of its cache is unknown"
)
UNCHECKED = "its output was not checked: no request began while it was watched"
PARTIAL = "requests have no queries for a prefix that was in the cache"


@dataclass(frozen=True)
class BatchRows:
    """The rows of one request in a step."""

    request: RequestRows
    start: int  # among the rows that are recorded
    stop: int
    first: int  # position of the first row
    index: int  # of the request in the batch


@dataclass
class HeardLayer:
    """What is known of one attention layer."""

    layer: Any
    calls: int = 0
    reasons: dict[str, None] = field(default_factory=dict)
    arrange: Arrange | None = None  # of its cache, once it is known
    sample: Sample | None = None
    error: float | None = None  # of the output of the sample, once it was computed


@dataclass
class Batch:
    """The requests of a pass that are recorded."""

    parts: list[BatchRows]
    rows: slice | Tensor  # of the pass; a slice if they are next to each other
    context: Any  # of vLLM, one for each pass

    def copy(self, x: Tensor) -> Tensor:
        """Copy the recorded rows of a tensor."""
        found = x.detach()[self.rows]
        return found.clone() if isinstance(self.rows, slice) else found

    def find_beginning(self) -> slice | None:
        """Return the rows of a request that begins, among those that are recorded."""
        begun = (slice(x.start, x.stop) for x in self.parts if x.first == 0)
        return next(begun, None)


class Recorder:
    """Records the layers of one worker.

    chosen: the requests to record, None for all
    """

    def __init__(
        self,
        worker: Any,
        layers: Collection[str] | None,
        keep: str,
        chosen: Collection[str] | None = None,
    ) -> None:
        self.runner, self.keep_v = worker.model_runner, keep == "qkv"
        config = worker.vllm_config
        self.rank = [worker.rank, config.parallel_config.world_size]
        self.heard = {name: HeardLayer(x) for name, x in find_layers(worker).items()}
        self.chosen = chosen
        self.requests: dict[str, RequestRows] = {}
        self.batch = Batch([], slice(0), None)
        self.patches = ExitStack()
        for name, heard in self.heard.items():
            reason = find_obstacle(heard.layer, config)
            if layers is not None and name not in layers:
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
        batch = self.split_batch(metadata)
        if not batch.parts:
            return
        heard.calls += 1
        q, k, v = batch.copy(query), None, None
        if key is not None and not heard.layer.kv_sharing_target_layer_name:
            k = batch.copy(key)
        if k is not None and value is not None and (self.keep_v or not heard.sample):
            v = batch.copy(value)
            cut = batch.find_beginning()
            if cut and output is not None and heard.sample is None:
                out = batch.copy(output)
                heard.sample = take_sample(q[cut], k[cut], v[cut], out[cut])
        for part in batch.parts:
            rows, cut = part.request.layer(name), slice(part.start, part.stop)
            if k is not None and rows.known < part.first:
                self.read_prefix(heard, part, k, cache, metadata)
            rows.add(
                part.first,
                q[cut],
                None if k is None else k[cut],
                v[cut] if v is not None and self.keep_v else None,
            )

    def split_batch(self, metadata: Any) -> Batch:
        """Return the parts of the batch; they are the same for all layers of a pass."""
        from vllm.forward_context import get_forward_context  # noqa: PLC0415

        context = get_forward_context()
        if context is self.batch.context:
            return self.batch
        starts = metadata.query_start_loc.tolist()
        lengths = metadata.seq_lens.tolist()
        names = list(self.runner.input_batch.req_ids)[: len(lengths)]
        tokens = self.runner.input_ids.gpu[: metadata.num_actual_tokens].tolist()
        parts: list[BatchRows] = []
        rows: list[int] = []
        for i, name in enumerate(names):
            start, stop = starts[i], starts[i + 1]
            if start == stop or not (self.chosen is None or name in self.chosen):
                continue
            first = lengths[i] - (stop - start)
            request = self.find_request(name, i, first)
            request.add_tokens(first, tokens[start:stop])
            begin = len(rows)
            rows += range(start, stop)
            parts.append(BatchRows(request, begin, len(rows), first, i))
        self.batch = Batch(parts, make_index(rows, metadata.slot_mapping), context)
        return self.batch

    def find_request(self, name: str, index: int, first: int) -> RequestRows:
        """Return what is known of a request; a new one has tokens before `first`."""
        request = self.requests.get(name)
        if request is None:
            request = self.requests[name] = RequestRows(name)
            known = self.runner.input_batch.token_ids_cpu[index, :first].tolist()
            request.add_tokens(0, known)
        return request

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
            slots = metadata.slot_mapping[self.batch.rows]
            heard.arrange = find_arrangement(cache, slots, k)
        if heard.arrange is None:
            heard.reasons[UNREAD] = None
            return
        table = metadata.block_table[part.index].tolist()
        first, keys = read_keys(cache, heard.arrange, table, k, part.first)
        rows = part.request.layer(heard.layer.layer_name)
        rows.add_keys(first, keys)

    def finish(self) -> Recording:
        """Undo the patches, and return what was recorded."""
        self.patches.close()
        return self.make_recording(list(self.requests.values()))

    def make_recording(self, requests: Sequence[RequestRows]) -> Recording:
        """Return the recording of some requests; any thread may call it."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # rows are copied on a stream of the engine
        coverage = {
            name: self.cover(name, heard, requests)
            for name, heard in self.heard.items()
            if heard.calls or heard.reasons
        }
        found = [
            (number, record)
            for number, request in enumerate(requests)
            for record in self.make_records(request, coverage)
        ]
        kept = [pair for pair in found if not coverage[pair[1].name].reason]
        return Recording(
            model=type(self.runner.model).__name__,
            records=tuple(record for _, record in kept),
            sequences=tuple(number for number, _ in kept),
            tokens=tuple(x.list_tokens() for x in requests),
            coverage=tuple(coverage.values()),
            notes={
                "rank": self.rank,
                "requests": [clean_name(x.name) for x in requests],
            },
        )

    def make_records(
        self, request: RequestRows, coverage: dict[str, Covered]
    ) -> Iterator[Record]:
        """Yield the records of a request; an error becomes a reason in the coverage."""
        for name, covered in coverage.items():
            if covered.reason or not request.layer(name).q:
                continue
            try:
                facts = read_facts(self.heard[name].layer)
                record = make_record(facts, request, compute_lse)
            except Exception as error:  # noqa: BLE001
                coverage[name] = refuse_layer(covered, describe_error(error))
                continue
            is_partial = int(record.q_positions[0]) > int(record.k_positions[0])
            if is_partial and PARTIAL not in covered.note:
                notes = filter(None, (covered.note, PARTIAL))
                coverage[name] = replace(covered, note="; ".join(notes))
            yield record

    def cover(
        self, name: str, heard: HeardLayer, requests: Sequence[RequestRows]
    ) -> Covered:
        """Return the coverage of a layer that ran, for some of the requests."""
        reasons, calls = list(heard.reasons), heard.calls
        if self.chosen is not None:  # other requests may have run beside these
            calls = max(len(x.layer(name).q) for x in requests)
        if heard.sample is not None:
            if heard.error is None:
                heard.error = find_error(heard.layer, heard.sample)
            if not heard.error <= find_tolerance(heard.sample[-1].dtype):
                reasons.append("its output could not be rebuilt")
        found = Covered(
            name=name,
            via="vllm" if calls else "",
            calls=calls,
            kept=calls,
            error=heard.error or 0.0,
            note="" if heard.sample is not None else UNCHECKED,
        )
        return refuse_layer(found, "; ".join(reasons)) if reasons else found


def make_index(rows: list[int], like: Tensor) -> slice | Tensor:
    """Return how to select rows: a slice if they are next to each other."""
    if not rows or rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1) if rows else slice(0)
    return torch.tensor(rows, device=like.device)


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
