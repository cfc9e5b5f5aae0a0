"""The active ablations: what they remove from a call, combined once for each call.

    with edited(PendingCall(…)) as edit:
        run it under the edit

A call may be intercepted several times: by nested ablations, or as a kernel in a
function. The first interception edits it for all of them, and the others do not.

Next: edited_calls.py
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from regard.run.call_edit import ALTERING, NOTHING, CallEdit, PendingCall


class ActiveAblation(Protocol):
    """An active ablation of a model."""

    def look(self, call: PendingCall) -> CallEdit:
        """Return what to remove from a call of this thread."""

    def is_running(self) -> bool:
        """Return whether the model is running in this thread."""


class Passing(threading.local):
    """Whether a call of this thread is already being edited (thread-local)."""

    def __init__(self) -> None:
        self.busy = False


PASSING = Passing()
ACTIVE: list[ActiveAblation] = []


@contextmanager
def edited(call: PendingCall) -> Iterator[CallEdit]:
    """Yield the combined edit of all ablations where a call is first intercepted."""
    if PASSING.busy or not ACTIVE:
        yield NOTHING
        return
    edit = NOTHING
    for ablation in tuple(ACTIVE):  # another thread may remove one
        edit |= ablation.look(call)
    PASSING.busy = True
    ALTERING.outputs = bool(edit.replaced) or edit.gone is not None
    try:
        yield edit
    finally:
        PASSING.busy = False
        ALTERING.outputs = False
