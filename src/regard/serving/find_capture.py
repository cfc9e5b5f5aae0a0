"""The function that watches a model: that of its engine, or of torch.

Next: engine.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

from regard.errors import OptionError
from regard.serving.engine import Capture, match_engine

STORE = ("device", "host")  # where a recording is kept


def find_capture(model: Any, store: str) -> Capture:
    """Return the function that watches this kind of model."""
    if store not in STORE:
        raise OptionError(f'store="{store}", expected "device" or "host".')
    engine = match_engine(model)
    if engine is not None:
        if store == "host":
            raise OptionError(
                f'store="host" for a {type(model).__name__}, expected a '
                "torch.nn.Module. Leave it out for an engine."
            )
        return engine.capture
    from regard.serving.paged_transformers import capture_torch  # noqa: PLC0415

    return partial(capture_torch, store=store)
