"""Warn before an array of weights fills the memory.

    bytes = layers × heads × queries × keys × 4        float32

32 layers of 32 heads over 8,192 tokens are 275 GB. Everything else in this library
needs memory linear in the number of tokens; only whole weights do not.

Next: dense_weights.py
"""

from __future__ import annotations

import os
import warnings

from regard.errors import OptionError

LARGE = 1_000_000_000  # bytes: from here on there is a warning
INSTEAD = (
    "Select less with layers=, heads=, rows= or keys=; seen.table() and regard.stats "
    "need no array of weights."
)


def expect_room(size: int, what: str, *, stacklevel: int) -> None:
    """Warn if an array has a GB or more; raise OptionError if it cannot fit.

    size: the bytes of the array; computing it needs up to twice as much
    what: the call that was made, for the message
    stacklevel: how many functions are between the warning and that call
    """
    if size < LARGE:
        return
    whole = measure_memory()
    told = f"{what} takes {size / 1e9:,.1f} GB"
    if whole and size > whole:
        raise OptionError(
            f"{told}, and this machine has {whole / 1e9:,.1f} GB of memory. {INSTEAD}"
        )
    warnings.warn(f"{told}. {INSTEAD}", stacklevel=stacklevel)


def measure_memory() -> int:
    """Return the bytes of this machine's memory, 0 if they are unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows
        return 0
