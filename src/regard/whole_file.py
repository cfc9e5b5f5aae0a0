"""A file that is whole or as it was before, whatever happens while it is written.

    with write_whole(path) as new:
        …                          write to `new`, which lies beside it

Only when all of it is on the disk is it moved to its place, and then the move itself.
What raises meanwhile leaves the old file, and nothing half written.

Next: array_file.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def write_whole(path: Path) -> Iterator[Path]:
    """Give a place to write to, and move what is there to its own in the end."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        yield new
        flush(new)
        new.replace(path)
        flush(path.parent)  # the move itself
    finally:
        with suppress(OSError):
            new.unlink()


def flush(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
