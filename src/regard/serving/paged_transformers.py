"""Watch a torch model, with transformers' generate_batch: continuous batching.

    with regard.watch(model) as seen:
        model.generate_batch(inputs)     one record per layer and request
        model(...)                       and all that is not batched, as ever

    patched while the `with` lasts              to know
    ContinuousBatchingIOs.prepare_batch_tensors the requests of a batch
    AttentionInterface.get_interface            what an attention function is given
    PagedAttentionCache.update                  the keys that it attends to
    RequestState.fork                           which samples share their first rows
    ModelRunner.warmup                          which batches are made up
    ModelRunner._get_forward_fn                 nothing: it runs the model in place of
                                                a CUDA graph, in which none is heard

Nothing of transformers is imported: a model that has these has imported them already.

Next: ../seen.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch

from regard.lens.adapters.hear import run_muted
from regard.lens.watch import Watcher
from regard.lens.watch import capture as capture_passes
from regard.recording.evidence import Covered
from regard.recording.record import Recording
from regard.run.monkeypatch import put
from regard.run.own_work import COMPUTING, compute, is_tracing
from regard.serving.paged_batch import BatchedCall
from regard.serving.paged_recorder import UNHEARD, PagedRecorder, refuse_for

FOLDER = "transformers.generation.continuous_batching"


@contextmanager
def capture_torch(
    model: Any,
    *,
    layers: Collection[int | str] | None = None,
    keep: str = "qk",
    store: str = "device",
) -> Iterator[Watcher]:
    """Record a torch model while the `with` lasts, also in generate_batch."""
    with ExitStack() as stack:
        watcher = recorder = None
        try:
            with capture_passes(
                model, layers=layers, keep=keep, store=store
            ) as watcher:
                recorder = PagedRecorder(watcher)
                patch(stack, recorder)
                yield watcher
        finally:
            stack.close()
            if watcher is not None and recorder is not None:
                watcher.recording = add_batches(watcher, recorder)


def patch(stack: ExitStack, recorder: PagedRecorder) -> None:
    """Patch transformers until the stack is closed.

    Nothing is patched without transformers, or in a version that is built in another
    way: then the lens reports layers that attend with a paged cache.
    """
    batching = sys.modules.get(f"{FOLDER}.input_outputs")
    if batching is None:
        return
    try:
        cache, runner, requests, models = (
            sys.modules[name]
            for name in (
                f"{FOLDER}.cache",
                f"{FOLDER}.model_runner",
                f"{FOLDER}.requests",
                "transformers.modeling_utils",
            )
        )
        places = (
            (batching.ContinuousBatchingIOs, "prepare_batch_tensors", hear_batch),
            (models.AttentionInterface, "get_interface", hear_interface),
            (cache.PagedAttentionCache, "update", hear_cache),
            (requests.RequestState, "fork", hear_fork),
            (runner.ModelRunner, "warmup", hear_warmup),
            (runner.ModelRunner, "_get_forward_fn", avoid_graphs),
        )
        with ExitStack() as patches:
            for owner, name, make in places:
                patches.enter_context(put(owner, name, partial(make, recorder)))
            stack.push(patches.pop_all())
    except (AttributeError, KeyError):  # of another version
        return


def add_batches(watcher: Watcher, recorder: PagedRecorder) -> Recording:
    """Return the recording of all passes; an error of ours becomes a reason."""
    recording = watcher.recording
    try:
        return recorder.finish(recording)
    except Exception as error:  # noqa: BLE001 (the rest is kept)
        why = f"generate_batch is not recorded: {type(error).__name__}: {error}"
        missing = Covered(name="", via="", reason=why, attention=False)
        return replace(recording, coverage=(*recording.coverage, missing))


# --- the patches ---------------------------------------------------------------------


def hear_batch(
    recorder: PagedRecorder, original: Callable[..., None]
) -> Callable[..., None]:
    """Return prepare_batch_tensors, which tells the requests of the next batch."""

    @wraps(original)
    def stand_in(inputs: Any, requests_in_batch: Any, *args: Any, **named: Any) -> None:
        recorder.mine.batch = None
        try:  # before their positions are moved on
            recorder.prepare(inputs.cache, requests_in_batch)
        except Exception as error:  # noqa: BLE001 (nothing of ours reaches the model)
            recorder.watcher.fail(error)
        original(inputs, requests_in_batch, *args, **named)

    return stand_in


def hear_interface(
    recorder: PagedRecorder, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Return get_interface, whose functions tell their calls with a paged cache."""

    @wraps(original)
    def stand_in(*args: Any, **named: Any) -> Any:
        function = original(*args, **named)
        if is_tracing():
            return function

        @wraps(function)
        def attend_watched(*given: Any, **options: Any) -> Any:
            return run_function(recorder, function, given, options)

        return attend_watched

    return stand_in


def run_function(
    recorder: PagedRecorder,
    function: Callable[..., Any],
    given: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    """Run an attention function; record the call if its cache is paged."""
    here = recorder.watcher.here
    deaf = not here.names or here.mode.muted or COMPUTING.on or is_tracing()
    if deaf or "cu_seq_lens_k" not in named or named.get("cache") is None:
        return function(*given, **named)
    call = BatchedCall(function, given, named)
    call.edited = torch._C._len_torch_function_stack() > 0  # noqa: SLF001
    before, recorder.mine.call = recorder.mine.call, call
    try:
        done = run_muted(here.mode, function, given, named)
    finally:
        recorder.mine.call = before
    try:
        with compute(), torch.no_grad():
            call.out = done[0]
            recorder.hear(call)
    except Exception as error:  # noqa: BLE001 (nothing of ours reaches the model)
        recorder.refuse(refuse_for(error))
    return done


def hear_cache(
    recorder: PagedRecorder, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Return update, which tells the keys and values that a layer attends to."""

    @wraps(original)
    def stand_in(cache: Any, *args: Any, **named: Any) -> Any:
        done = original(cache, *args, **named)
        try:
            call = recorder.mine.call
            if call is not None:
                number = named["layer_idx"] if "layer_idx" in named else args[2]
                call.allocator = cache.layer_to_allocator[number]
                call.k, call.v = done
            elif recorder.watcher.here.names and not recorder.mine.warming:
                recorder.refuse(UNHEARD)
        except Exception as error:  # noqa: BLE001 (nothing of ours reaches the model)
            recorder.refuse(refuse_for(error))
        return done

    return stand_in


def hear_fork(
    recorder: PagedRecorder, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Return fork, which tells that a sample goes on from another one."""

    @wraps(original)
    def stand_in(state: Any, *args: Any, **named: Any) -> Any:
        made = original(state, *args, **named)
        recorder.forks.append((made, state))
        return made

    return stand_in


def hear_warmup(
    recorder: PagedRecorder, original: Callable[..., None]
) -> Callable[..., None]:
    """Return warmup, which tells that its batches are made up."""

    @wraps(original)
    def stand_in(*args: Any, **named: Any) -> None:
        recorder.mine.warming = True
        try:
            original(*args, **named)
        finally:
            recorder.mine.warming = False

    return stand_in


def avoid_graphs(
    _recorder: PagedRecorder, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Return _get_forward_fn, which never asks for a CUDA graph."""

    @wraps(original)
    def stand_in(*args: Any, **named: Any) -> Any:
        function, _ = original(*args, **named)
        return function, False

    return stand_in
