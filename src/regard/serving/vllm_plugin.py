"""vLLM's plugin: three methods of its workers, which do nothing until they are called.

vLLM loads it in every process, from the entry point group vllm.general_plugins of an
installed regard. `regard.watch(llm)` then calls these methods by collective_rpc. With
REGARD_RECORD_DIR set, a server also records the requests that ask for it.

Next: vllm.py
"""

from __future__ import annotations

import os
from typing import Any


def register() -> None:
    """Add the methods to the class of vLLM's workers; vLLM may call this repeatedly."""
    from vllm.v1.worker.worker_base import WorkerBase  # noqa: PLC0415

    WorkerBase.regard_layers = list_layers
    WorkerBase.regard_start = start
    WorkerBase.regard_stop = stop
    if os.environ.get("REGARD_RECORD_DIR"):
        from regard.serving.vllm_requests import patch_workers  # noqa: PLC0415

        patch_workers(os.environ["REGARD_RECORD_DIR"])


def list_layers(worker: Any) -> list[str]:
    """Return the names of the attention layers of a worker."""
    from regard.serving.vllm_layers import find_layers  # noqa: PLC0415

    return list(find_layers(worker))


def start(worker: Any, layers: list[str], keep: str) -> None:
    """Begin to record in a worker."""
    from regard.serving.vllm_worker import start_recording  # noqa: PLC0415

    start_recording(worker, layers, keep)


def stop(worker: Any, path: str) -> None:
    """End the recording of a worker, and save it to a file."""
    from regard.serving.vllm_worker import stop_recording  # noqa: PLC0415

    stop_recording(worker, path)
