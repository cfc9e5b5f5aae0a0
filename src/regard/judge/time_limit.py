"""Call a function that may raise, exit or never return.

    call_within(10, lambda: fn(q, k, v))     its result, or CallFailedError

Next: subject.py
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from regard.judge.inputs import CallFailedError, NotAskedError


def call_within(limit: float, work: Callable[[], Any]) -> Any:
    """Return work(); raise CallFailedError if it raises or exceeds the time limit."""
    box: list[Any] = []

    def run() -> None:
        try:
            with np.errstate(all="ignore"):
                box.append((work(), None))
        except BaseException as error:  # noqa: BLE001 (it may call sys.exit)
            box.append((None, error))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if limit == math.inf:  # no thread: a browser has none
            run()
        else:
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            thread.join(limit)
    if not box:
        raise CallFailedError(f"it did not answer within {limit:g} seconds.")
    found, error = box[0]
    if isinstance(error, NotAskedError | CallFailedError):
        raise error
    if error is not None:
        text = " ".join(str(error).split())
        text = "".join(c for c in text if c.isprintable())[:200]
        raise CallFailedError(f"it raised {type(error).__name__}: {text}") from None
    return found
