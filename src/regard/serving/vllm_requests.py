"""Record single requests of a vLLM server: those whose body asks for it.

    operator     REGARD_RECORD_DIR=/var/recordings vllm serve MODEL
    client       {"model": …, "messages": …, "vllm_xargs": {"regard": "qk"}}
    file         /var/recordings/chatcmpl-…-1a2b3c4d.regard

vLLM tells its workers before each step which requests are new, and which are finished.
The attention layers are patched only while a request that asked is running. When it is
finished, one thread computes its record and writes it.

Next: vllm_plugin.py
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import wraps
from typing import Any

from regard.errors import RegardError
from regard.recording.folder import RecordingFolder, read_limits
from regard.recording.record import Recording
from regard.recording.token_texts import label_tokens
from regard.serving.request_rows import RequestRows
from regard.serving.vllm_worker import Recorder

FIELD = "regard"  # of vllm_xargs
logger = logging.getLogger("vllm.regard")  # vLLM's handler prints it


class RequestRecorder:
    """Records the requests of one worker that ask for it."""

    def __init__(self, worker: Any, folder: RecordingFolder) -> None:
        self.worker, self.folder = worker, folder
        self.chosen: set[str] = set()
        self.recorder: Recorder | None = None  # while requests are recorded
        self.waiting: dict[str, RequestRows] = {}  # finished, and not written yet
        self.writer = ThreadPoolExecutor(1, "regard")
        self.decode: Callable[[list[int]], str] | None = None

    def begin_step(self, scheduled: Any) -> None:
        """Read what vLLM is going to do in its next step."""
        for name in scheduled.finished_req_ids & self.chosen:
            self.finish(name)
        for request in scheduled.scheduled_new_reqs:
            if is_asked_for(request):
                self.chosen.add(request.req_id)
        if not self.chosen:
            self.close()
        elif self.recorder is None:
            self.recorder = Recorder(self.worker, None, "qk", self.chosen)
            self.recorder.patch()
        else:
            self.limit_memory(self.recorder)

    def close(self) -> None:
        """Undo the patches of the layers."""
        if self.recorder is not None:
            self.recorder.patches.close()
            self.recorder = None

    def finish(self, name: str) -> None:
        """Let the writer write a request that is finished."""
        self.chosen.discard(name)
        recorder = self.recorder
        rows = recorder.requests.pop(name, None) if recorder is not None else None
        if recorder is not None and rows is not None:
            self.waiting[name] = rows
            self.writer.submit(self.write, recorder, rows)

    def write(self, recorder: Recorder, rows: RequestRows) -> None:
        """Compute the records of a request, and write its file."""
        try:
            recording = self.label(recorder.make_recording([rows]))
            path = self.folder.save(rows.name, recording)
            if path is not None:
                logger.info("recorded %s", path.name)
        except RegardError as error:
            logger.warning("request %r is not recorded: %s", rows.name, error)
        except Exception:
            logger.exception("request %r is not recorded", rows.name)
        finally:
            del self.waiting[rows.name]

    def limit_memory(self, recorder: Recorder) -> None:
        """Stop to record the longest request if rows take more than a folder may."""
        rows = recorder.requests
        held = (*rows.values(), *tuple(self.waiting.values()))
        if rows and sum(x.nbytes for x in held) > self.folder.max_bytes:
            name = max(rows, key=lambda x: rows[x].nbytes)
            self.chosen.discard(name)
            del rows[name]
            logger.warning("request %r is not recorded: it is too long", name)

    def label(self, recording: Recording) -> Recording:
        """Return a recording with the text of each token, if there is a tokenizer."""
        with suppress(Exception):
            if self.decode is None:
                from vllm.tokenizers import (  # noqa: PLC0415
                    cached_tokenizer_from_config,
                )

                config = self.worker.vllm_config.model_config
                self.decode = cached_tokenizer_from_config(config).decode
            return label_tokens(recording, self.decode)
        return recording


def is_asked_for(request: Any) -> bool:
    """Return whether the body of a new request asks for a recording."""
    params = request.sampling_params
    asked = params is not None and params.extra_args and params.extra_args.get(FIELD)
    return asked in ("qk", "1", 1)  # a tuple: a client may send what has no hash


def patch_workers(path: str) -> None:
    """Let the workers of this process record requests to a folder."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase  # noqa: PLC0415

    original = WorkerWrapperBase.execute_model
    if FIELD in vars(original):  # vLLM may load a plugin repeatedly
        return
    limits = (os.environ.get(f"REGARD_RECORD_{x}", "") for x in ("FILES", "BYTES"))
    folder = read_limits(path, *limits)
    folder.make()

    @wraps(original)
    def execute_model(wrapper: Any, scheduled: Any) -> Any:
        try:
            recorder = wrapper.__dict__.get("regard_requests")
            if recorder is None:
                recorder = RequestRecorder(wrapper.worker, folder)
                wrapper.__dict__["regard_requests"] = recorder
            recorder.begin_step(scheduled)
        except Exception:
            logger.exception("requests are not recorded")
        return original(wrapper, scheduled)

    vars(execute_model)[FIELD] = True
    WorkerWrapperBase.execute_model = execute_model
