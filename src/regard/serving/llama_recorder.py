"""Record the attention of llama.cpp from its callback, by layer and sequence.

    GET_ROWS(embeddings, tokens)                  a part of the batch begins
    SET_ROWS(new keys, cells)                     the cells that its keys are written to
    FLASH_ATTN_EXT(q, k, v, mask, sinks)          a layer attends
    MUL_MAT(k, q), SOFT_MAX(scores, mask, sinks)  the same without flash attention

Keys are read from the cache, as it rounds them. The first call of a layer is checked:
its output, or its weights without flash attention, are computed again.

Next: llama_cpp.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.recording.evidence import Covered
from regard.recording.record import Record, Recording
from regard.serving.ggml_tensors import (
    Tensor,
    TensorReader,
    find_cache_number,
    find_layer,
    list_operands,
    read_floats,
)
from regard.serving.llama_cells import BatchRow, CacheCells, SeenMask
from regard.serving.llama_layers import (
    BIASED,
    LayerCall,
    compute_row_lse,
    find_layer_error,
    find_softcap,
    read_layer_facts,
)
from regard.serving.request_rows import (
    LayerFacts,
    LayerRows,
    RequestRows,
    make_record,
    refuse_layer,
)

TOLERANCE = 3e-2  # of a layer computed again: llama.cpp rounds to float16 on the way
NAMED = {"SET_ROWS": b"cache_k_l", "MUL_MAT": b"kq-", "SOFT_MAX": b"kq_soft_max-"}
EARLY = "some of its keys were computed before the watch"
PARTIAL = "sequences have no queries for a prefix that was in the cache"
MASKED = "its mask is neither causal nor a window of positions"
VALUES = 'keep="qkv" needs flash attention: Llama(..., flash_attn=True)'
STREAMS = "its sequences have caches of their own, which are not told apart"
ORDER = "the rows of a batch run in an order that is not known"
LAYOUT = "this version of llama.cpp lays out its tensors in another way"


@dataclass
class LlamaLayer:
    """What is known of one layer."""

    calls: int = 0
    facts: LayerFacts | None = None  # but for its mask
    mask: SeenMask = field(default_factory=SeenMask)
    product: tuple[NDArray[Any], Tensor] | None = None  # q and k
    error: float = 0.0
    is_partial: bool = False
    reasons: dict[str, None] = field(default_factory=dict)


class LlamaRecorder:
    """Records what a context of llama.cpp runs.

    layers: the names of the layers to record
    early: what the cache held before, and `past` its tokens by sequence
    """

    def __init__(
        self, reader: TensorReader, layers: Collection[str], *, keep_v: bool = False
    ) -> None:
        self.reader, self.layers, self.keep_v = reader, layers, keep_v
        self.early, self.past = CacheCells(), dict[int, dict[int, int]]()
        self.cells: dict[int, CacheCells] = {}  # of the cache of a layer
        self.shared: dict[int, CacheCells | SeenMask] = {}  # by address, in a part
        self.heard: dict[str, LlamaLayer] = {}
        self.requests: list[RequestRows] = []
        self.running: dict[int, RequestRows] = {}  # by sequence
        self.ends: dict[int, int] = {}  # one past the last position, by sequence
        self.batch: list[BatchRow] = []  # what is left of it
        self.rows: list[BatchRow] = []  # the part of it that runs
        self.is_understood = False  # whether the layout of tensors is known
        self.reason = ""  # why nothing can be recorded

    # --- batches ---------------------------------------------------------------------

    def begin(self, batch: list[BatchRow]) -> None:
        """Begin a batch; a row that does not follow the last one begins a request."""
        self.batch = batch
        for row in batch:
            if row.position != self.ends.get(row.sequence):
                self.begin_request(row)
            self.running[row.sequence].tokens[row.position] = row.token
            self.ends[row.sequence] = row.position + 1

    def begin_request(self, row: BatchRow) -> None:
        """Begin a request, which may use what the cache has of the last one."""
        request = RequestRows(str(len(self.requests)))
        before = self.running.get(row.sequence)
        known = self.past.get(row.sequence, {}) if before is None else before.tokens
        request.tokens = {i: x for i, x in known.items() if i < row.position}
        for cells in (self.early, *self.cells.values()):
            cells.drop(row.sequence, row.position)
        self.requests.append(request)
        self.running[row.sequence] = request

    # --- the callback ----------------------------------------------------------------

    def call(self, tensor: Tensor, is_asked: bool) -> bool:  # noqa: FBT001
        """Be called by llama.cpp before a tensor is computed, and after it.

        Before, return whether it is wanted; after it, whether to go on.
        """
        if self.reason:
            return not is_asked
        try:
            if is_asked:
                return self.is_wanted(tensor)
            self.hear(tensor)
        except Exception as error:  # noqa: BLE001 (none of ours may reach llama.cpp)
            self.reason = describe_failure(error)
        return not is_asked

    def is_wanted(self, tensor: Tensor) -> bool:
        """Return whether a tensor says something about attention."""
        if not self.is_understood:
            self.is_understood = self.reader.is_understood(tensor)
            if not self.is_understood:
                raise ValueError(LAYOUT)
        op = self.reader.name_op(tensor)
        if op == "GET_ROWS":
            table, tokens = (x.contents.name for x in tensor.src[:2])
            return (table, tokens) == (b"token_embd.weight", b"inp_tokens")
        return op == "FLASH_ATTN_EXT" or (
            op in NAMED and tensor.name.startswith(NAMED[op])
        )

    def hear(self, tensor: Tensor) -> None:
        """Read a tensor that was computed."""
        op, (first, second) = self.reader.name_op(tensor), list_operands(tensor, 2)
        assert first is not None
        assert second is not None
        if op == "GET_ROWS":
            self.begin_part(self.reader.read(second).reshape(-1).tolist())
        elif op == "SET_ROWS":
            self.place_keys(tensor, second)
        else:
            number = find_layer(second if op == "MUL_MAT" else first)
            name = f"blk.{number}.attn"
            heard = self.heard.setdefault(name, LlamaLayer())
            if name not in self.layers:
                heard.reasons["not asked for"] = None
            try:
                if not heard.reasons:
                    self.hear_layer(op, tensor, heard, number)
            except Exception as error:  # noqa: BLE001 (of this layer only)
                heard.reasons[describe_failure(error)] = None

    def begin_part(self, tokens: list[int]) -> None:
        """Begin the part of the batch that has these tokens."""
        n = len(tokens)
        self.rows, self.batch, self.shared = self.batch[:n], self.batch[n:], {}
        if [row.token for row in self.rows] != tokens:
            self.reason = ORDER

    def place_keys(self, cache: Tensor, cells: Tensor) -> None:
        """Note the cells that new keys are written to; layers share them."""
        number, address = find_cache_number(cache), ctypes.addressof(cells)
        assert number is not None
        found = self.shared.get(address)
        if not isinstance(found, CacheCells):
            found = self.cells.get(number) or deepcopy(self.early)
            found.put(self.reader.read(cells).reshape(-1), self.rows)
            self.shared[address] = found
        self.cells[number] = found

    # --- layers ----------------------------------------------------------------------

    def hear_layer(
        self, op: str, tensor: Tensor, heard: LlamaLayer, number: int
    ) -> None:
        """Read a tensor of a layer."""
        source: list[Any] = list_operands(tensor, 5)
        if op == "MUL_MAT":
            heard.product = self.read_q(source[1]), source[0]
            return
        if op == "SOFT_MAX":
            assert heard.product is not None
            (q, k), heard.product = heard.product, None
            scale, slope = read_floats(tensor, 2)
            scale, softcap = find_softcap(self.reader, source[0], scale)
            v, mask, sinks = None, source[1], source[2]
        else:
            q, (k, v, mask, sinks) = self.read_q(source[0]), source[1:]
            scale, slope, softcap = read_floats(tensor, 3)
        if slope:
            raise ValueError(BIASED)
        call = LayerCall(
            q=q, k=k, v=v, mask=mask, sinks=sinks, scale=scale, softcap=softcap
        )
        if heard.facts is None:
            heard.facts = read_layer_facts(self.reader, call, number)
            heard.error = find_layer_error(self.reader, call, tensor)
        self.add(call, heard, heard.facts, number)
        heard.calls += 1

    def read_q(self, tensor: Tensor) -> NDArray[Any]:
        """Return queries, (H, rows, D)."""
        found: NDArray[Any]
        found, *more = self.reader.read(tensor)
        if more:
            raise ValueError(STREAMS)
        return found

    def add(
        self, call: LayerCall, heard: LlamaLayer, facts: LayerFacts, number: int
    ) -> None:
        """Add the rows of a call to their requests."""
        owner = find_cache_number(call.k)
        cells = CacheCells() if owner is None else self.cells[owner]
        if owner is None:
            cells.put(np.arange(len(self.rows)), self.rows)
        self.check_mask(call, heard, cells)
        q, v = call.q.swapaxes(0, 1), None
        k = None if facts.keys_of else self.read_cells(call.k, cells.written)
        if self.keep_v:
            if call.v is None:
                raise ValueError(VALUES)
            v = self.read_cells(call.v, cells.written)
        for sequence in dict.fromkeys(row.sequence for row in self.rows):
            at = [i for i, row in enumerate(self.rows) if row.sequence == sequence]
            first = self.rows[at[0]].position
            layer = self.running[sequence].layer(facts.name)
            if not layer.q and first > 0:
                heard.is_partial = True
                self.add_prefix(call, layer, *cells.find(sequence, first))
            layer.add(first, q[at], *(None if x is None else x[at] for x in (k, v)))

    def check_mask(self, call: LayerCall, heard: LlamaLayer, cells: CacheCells) -> None:
        """Learn from the mask of a call; raise ValueError if it is no formula.

        Layers share masks, so each is read once in a part.
        """
        address = ctypes.addressof(call.mask)
        if self.shared.get(address) is heard.mask:
            return
        allowed = self.reader.read(call.mask, 0, len(self.rows))[0, 0] == 0
        if not cells.know(allowed.any(0)):
            raise ValueError(EARLY)
        if not heard.mask.check(allowed, cells, self.rows):
            raise ValueError(MASKED)
        known = self.shared.setdefault(address, heard.mask)
        if isinstance(known, SeenMask) and known == heard.mask:
            heard.mask = known

    def add_prefix(
        self, call: LayerCall, layer: LayerRows, cells: NDArray[Any], first: int
    ) -> None:
        """Add the keys and values that were in the cache when a request began."""
        if cells.size:
            layer.add_keys(first, self.read_cells(call.k, cells))
            if self.keep_v and call.v is not None:
                layer.put(layer.v, first, self.read_cells(call.v, cells))

    def read_cells(self, tensor: Tensor, cells: NDArray[Any]) -> NDArray[Any]:
        """Return the keys or values in some cells, (cells, Hk, D)."""
        runs = np.split(cells, np.flatnonzero(np.diff(cells) != 1) + 1)
        spans = [(int(run[0]), int(run[-1]) + 1) for run in runs]
        found = [self.reader.read(tensor, *span)[0] for span in spans]
        return np.concatenate(found, 1).swapaxes(0, 1).astype(np.float32)

    # --- the result ------------------------------------------------------------------

    def finish(self, model: str) -> Recording:
        """Return the recording."""
        coverage = {name: self.cover(name, x) for name, x in self.heard.items()}
        if self.reason and not coverage:
            coverage[""] = Covered(name="", via="", reason=self.reason)
        found = [
            (number, record)
            for number, request in enumerate(self.requests)
            for record in self.make_records(request, coverage)
        ]
        return Recording(
            model=model,
            records=tuple(record for _, record in found),
            sequences=tuple(number for number, _ in found),
            tokens=tuple(request.list_tokens() for request in self.requests),
            coverage=tuple(coverage.values()),
        )

    def make_records(
        self, request: RequestRows, coverage: dict[str, Covered]
    ) -> Iterator[Record]:
        """Yield the records of a request; a layer that has none says why."""
        for name, heard in self.heard.items():
            if coverage[name].reason or name not in request.layers:
                continue
            assert heard.facts is not None
            mask = heard.mask
            facts = replace(heard.facts, is_causal=mask.is_causal, window=mask.window)
            try:
                yield make_record(facts, request, compute_row_lse)
            except Exception as error:  # noqa: BLE001 (of this layer only)
                coverage[name] = refuse_layer(coverage[name], describe_failure(error))

    def cover(self, name: str, heard: LlamaLayer) -> Covered:
        """Return the coverage of a layer."""
        reasons = [*filter(None, [self.reason]), *heard.reasons]
        if not heard.mask.is_known:
            reasons.append(MASKED)
        if not heard.error <= TOLERANCE:
            reasons.append("its output could not be computed again")
        found = Covered(
            name=name,
            via="llama.cpp" if heard.calls else "",
            calls=heard.calls,
            kept=heard.calls,
            error=heard.error,
            note=PARTIAL if heard.is_partial else "",
        )
        return refuse_layer(found, "; ".join(reasons)) if reasons else found


def describe_failure(error: Exception) -> str:
    """Return an error of a layer as a reason; a ValueError is a sentence of ours."""
    said = str(error)
    return said if type(error) is ValueError else f"{type(error).__name__}: {said}"
