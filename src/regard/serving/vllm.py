"""Watch vLLM: `with regard.watch(llm) as seen: llm.generate(...)`.

    this process       collective_rpc("regard_start")   ->  every worker
                       llm.generate(...)                    records what its layers run
                       collective_rpc("regard_stop")    ->  saves its heads to a file
                       the files, heads joined          <-

One record per layer and request. The engine may run in this process or in others, and
with tensor parallelism each worker has some of the heads.

Next: ../seen.py
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from regard.errors import OptionError
from regard.recording.file import open_recording
from regard.recording.gather import gather_heads
from regard.recording.record import Recording
from regard.recording.token_texts import label_tokens
from regard.serving.engine import choose_layers

MISSING = (
    "vLLM's workers do not know regard. Install regard into the environment of vLLM. "
    'If VLLM_PLUGINS is set, add "regard" to it before the LLM is made.'
)


class VllmRun:
    """The recording, once the `with` is left."""

    recording: Recording


@contextmanager
def capture(
    model: Any, *, layers: Collection[int | str] | None = None, keep: str = "qk"
) -> Iterator[VllmRun]:
    """Record an LLM of vLLM while the `with` lasts."""
    try:
        names = model.collective_rpc("regard_layers")[0]
    except Exception as error:
        if "regard_layers" not in str(error):
            raise
        raise OptionError(MISSING) from error
    model.collective_rpc("regard_start", args=(choose_layers(names, layers), keep))
    found = VllmRun()
    try:
        yield found
    finally:
        with TemporaryDirectory(prefix="regard-") as folder:
            model.collective_rpc("regard_stop", args=(folder,))
            parts = [open_recording(x) for x in sorted(Path(folder).glob("*.regard"))]
            found.recording = label(model, sort_requests(gather_heads(parts)))


def sort_requests(recording: Recording) -> Recording:
    """Return a recording with its requests in the order in which they were made.

    vLLM numbers them: "12", or "3_12" for the third sample of request 12.
    """
    names = recording.notes["requests"]
    order = sorted(range(len(names)), key=lambda i: list_numbers(names[i]))
    place = {old: new for new, old in enumerate(order)}
    pairs = zip(recording.records, recording.sequences, strict=True)
    moved = sorted(((place[n], record) for record, n in pairs), key=lambda x: x[0])
    return replace(
        recording,
        records=tuple(record for _, record in moved),
        sequences=tuple(n for n, _ in moved),
        tokens=tuple(recording.tokens[i] for i in order),
        notes=recording.notes | {"requests": [names[i] for i in order]},
    )


def list_numbers(name: str) -> tuple[int, ...]:
    """Return the numbers in a request's name, those of the request first."""
    return tuple(int(x) for x in reversed(re.findall(r"\d+", name)))


def label(llm: Any, recording: Recording) -> Recording:
    """Return a recording with the text of each token, if the engine has a tokenizer."""
    with suppress(Exception):  # an engine may be without one
        return label_tokens(recording, llm.get_tokenizer().decode)
    return recording
