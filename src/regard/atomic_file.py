"""Write a file atomically: after a crash it has either its new or its old contents.

    with write_atomically(path) as new:
        …                          write to `new`, a temporary file in the same folder

The temporary file is flushed to disk and then renamed; the rename is flushed as well.
If an exception is raised, the old file remains and the temporary file is deleted.

Next: recording/array_file.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path, and rename it to `path` when the block succeeds."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        yield new
        sync_to_disk(new)
        new.replace(path)
        sync_to_disk(path.parent)  # the rename
    finally:
        with suppress(OSError):
            new.unlink()


def sync_to_disk(path: Path) -> None:
    """Wait until a file or folder has been written to disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
