"""Watch llama.cpp: `with regard.watch(llama) as seen: llama("The cat sat on the")`.

    llama._ctx           its context: the cache, and the callback of its graphs
    with …               a second context with a callback of ours, and the same state
    afterwards           the first context again, with the state of the second

A callback can only be given to a new context, so the `with` needs memory for a second
cache. A generation is one record per layer, and so is every sequence of a batch. A
completion that continues the text before it continues its record. It needs no torch.

Next: ../seen.py
"""

# ruff: noqa: SLF001 (what is needed has no public name)

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from regard.errors import OptionError
from regard.recording.record import Recording
from regard.recording.token_texts import label_tokens
from regard.serving.engine import choose_layers
from regard.serving.ggml_tensors import Tensor, TensorReader
from regard.serving.llama_cells import BatchRow
from regard.serving.llama_recorder import LlamaRecorder


class LlamaRun:
    """The recording, once the `with` is left."""

    recording: Recording


@contextmanager
def capture(
    model: Any, *, layers: Collection[int | str] | None = None, keep: str = "qk"
) -> Iterator[LlamaRun]:
    """Record a Llama of llama_cpp while the `with` lasts."""
    library = import_module("llama_cpp")
    count = library.llama_model_n_layer(model._model.model)
    names = choose_layers([f"blk.{i}.attn" for i in range(count)], layers)
    reader = TensorReader(Path(str(library.__file__)).parent / "lib")
    recorder = LlamaRecorder(reader, names, keep_v=keep == "qkv")
    first, second = model._ctx, open_context(library, model, recorder)
    found, model._ctx = LlamaRun(), second
    try:
        read_past(library, model, recorder)
        yield found
    finally:
        model._ctx = first
        if not copy_state(library, second.ctx, first.ctx):
            first.kv_cache_clear()
            model.reset()
        second.close()
        recording = recorder.finish(name_model(model))
        found.recording = label_tokens(
            recording,
            lambda x: model.detokenize(x, special=True).decode(errors="replace"),
        )


def open_context(library: Any, model: Any, recorder: LlamaRecorder) -> Any:
    """Return a context like that of a model, with its state, that calls a recorder."""
    first = model._ctx
    params = type(first.params).from_buffer_copy(first.params)

    def call(tensor: int, is_asked: bool, _: Any) -> bool:  # noqa: FBT001
        return recorder.call(Tensor.from_address(tensor), is_asked)

    params.cb_eval = library.ggml_backend_sched_eval_callback(call)
    try:
        second = type(first)(model=model._model, params=params, verbose=first.verbose)
    except ValueError as error:
        raise OptionError(
            "llama.cpp could not make a second context, in which it is watched: its "
            "cache needs as much memory again. Make the Llama with a smaller n_ctx."
        ) from error
    if model._lora_adapter is not None:
        adapters = (library.llama_adapter_lora_p_ctypes * 1)(model._lora_adapter)
        scales = (ctypes.c_float * 1)(model.lora_scale)
        library.llama_set_adapters_lora(second.ctx, adapters, 1, scales)
    copy_state(library, first.ctx, second.ctx)
    decode = second.decode

    def decode_watched(batch: Any) -> None:
        recorder.begin(list_batch_rows(batch.batch))
        decode(batch)

    second.decode = decode_watched
    return second


def list_batch_rows(batch: Any) -> list[BatchRow]:
    """Return the rows of a batch of llama.cpp."""
    return [
        BatchRow(int(batch.token[i]), int(batch.pos[i]), int(batch.seq_id[i][0]))
        for i in range(batch.n_tokens)
    ]


def copy_state(library: Any, source: Any, target: Any) -> bool:
    """Copy the cache and the last results of a context; return whether it worked."""
    size = library.llama_state_get_size(source)
    held = (ctypes.c_uint8 * size)()
    size = library.llama_state_get_data(source, held, size)
    return bool(library.llama_state_set_data(target, held, size) == size)


def read_past(library: Any, model: Any, recorder: LlamaRecorder) -> None:
    """Tell a recorder what is in the cache already: tokens, and their cells."""
    n, context = model.n_tokens, model._ctx
    if n == 0 or context.memory is None:
        return
    tokens = model.input_ids[:n].tolist()
    recorder.past[0] = dict(enumerate(tokens))
    if list_cell_positions(library, context.ctx)[:n] == [*range(n)]:
        recorder.early.put(
            np.arange(n), [BatchRow(x, i, 0) for i, x in enumerate(tokens)]
        )


def list_cell_positions(library: Any, context: Any) -> list[int]:
    """Return the positions of sequence 0 in the cells of the cache, from the first on.

    [] if they are not known. The state of a sequence begins with four numbers (magic,
    sequence, streams, count of cells), then come three for each cell: its position, how
    many sequences it belongs to, and which.
    """
    if library.llama_model_n_swa(library.llama_get_model(context)) > 0:
        return []  # there are two caches, and the second one has dropped positions
    size = library.llama_state_seq_get_size(context, 0)
    held = (ctypes.c_uint8 * size)()
    library.llama_state_seq_get_data(context, held, size, 0)
    numbers = np.frombuffer(held, np.int32, size // 4)
    _, _, streams, count = numbers[:4].tolist()
    cells = numbers[4 : 4 + 3 * count].reshape(-1, 3)
    if streams != 1 or not (cells[:, 1:] == (1, 0)).all():
        return []
    found: list[int] = cells[:, 0].tolist()
    return found


def decode_tokens(model: Any, tokens: list[int]) -> str:
    """Return the text of tokens."""
    text: bytes = model.detokenize(tokens, special=True)
    return text.decode(errors="replace")


def name_model(model: Any) -> str:
    """Return the name that the file of a model gives it, or that of the file."""
    name: str = model.metadata.get("general.name") or Path(model.model_path).stem
    return name
