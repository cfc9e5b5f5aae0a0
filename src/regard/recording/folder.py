"""A folder of recordings with a limit: what a server writes for the requests that ask.

    NAME.regard           a recording, complete: it appears by renaming
    NAME.rank1of2.part    the heads of one rank, until all ranks have written theirs

Everything is written under a lock, so files that a killed process left behind are
recognized and deleted. A recording that does not fit is not written. Nothing that was
written is ever replaced or deleted by a server: `regard recordings --prune` does that.

Next: ../serving/vllm_requests.py
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from regard.arrays import is_array
from regard.errors import FileError, OptionError
from regard.recording.file import open_recording, save_recording
from regard.recording.gather import gather_heads
from regard.recording.record import Recording

FILES, BYTES = 1_000, 10 * 2**30  # default limits
LEFT = 3_600  # seconds after which the part of a rank is no longer waited for
NAME = 120  # maximum length of a name
HEADER, PART = 2**16, 2**12  # bytes of a file besides: of its header, of a record


@dataclass(frozen=True)
class SavedRequest:
    """A recording in the folder."""

    path: Path
    size: int  # bytes
    written: float  # seconds since 1970


@dataclass(frozen=True, kw_only=True)
class RecordingFolder:
    """A folder, and how much may be written to it."""

    path: Path
    max_files: int = FILES
    max_bytes: int = BYTES

    def make(self) -> None:
        """Create the folder, readable by its owner only."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def list_recordings(self) -> list[SavedRequest]:
        """Return the recordings, oldest first."""
        found = []
        for path in self.path.glob("*.regard"):
            try:
                about = path.stat()
            except FileNotFoundError:  # deleted meanwhile
                continue
            found.append(SavedRequest(path, about.st_size, about.st_mtime))
        return sorted(found, key=lambda x: (x.written, x.path.name))

    def save(self, name: str, recording: Recording) -> Path | None:
        """Write the recording of a request, or of one rank's heads of it.

        Returns the path of the complete recording, None while ranks are missing. Raises
        FileError if it does not fit.
        """
        rank, world = recording.notes.get("rank", (0, 1))
        name = clean_file_name(name)
        with self.lock():
            self.delete_remains()
            self.require_room(measure(recording))
            if world == 1:
                return self.write(name, gather_heads([recording]))
            part = self.path / f"{name}.rank{rank}of{world}.part"
            save_recording(part, recording)
            part.chmod(0o600)
            parts = [self.path / f"{name}.rank{i}of{world}.part" for i in range(world)]
            if not all(x.exists() for x in parts):
                return None
            try:
                return self.write(
                    name, gather_heads([open_recording(x) for x in parts])
                )
            finally:
                for x in parts:
                    x.unlink()

    def write(self, name: str, recording: Recording) -> Path:
        """Write a file whose name is free."""
        path = self.path / f"{name}.regard"
        if path.exists():
            raise FileError(f"{path.name} exists already, and is not replaced.")
        save_recording(path, recording)
        path.chmod(0o600)
        return path

    def require_room(self, size: int) -> None:
        """Raise FileError if another recording of this size does not fit."""
        found = self.list_recordings()
        used = sum(x.size for x in found)
        used += sum(x.stat().st_size for x in self.path.glob("*.part"))
        if len(found) >= self.max_files or used + size > self.max_bytes:
            raise FileError(
                f"{len(found):,} recordings have {used:,} bytes, and another one of "
                f"{size:,} does not fit: the limits are "
                f"{self.max_files:,} files and {self.max_bytes:,} bytes. Delete some "
                "with: regard recordings FOLDER --prune"
            )

    def prune(self, keep: int) -> list[SavedRequest]:
        """Delete all recordings but the newest `keep`, and return what was deleted."""
        with self.lock():
            self.delete_remains()
            found = self.list_recordings()
            old = found[: max(0, len(found) - keep)]
            for x in old:
                x.path.unlink()
            return old

    def delete_remains(self) -> None:
        """Delete what killed processes left. The caller holds the lock."""
        for path in self.path.glob("*.new"):  # nobody writes without the lock
            path.unlink()
        for path in self.path.glob("*.part"):
            if time.time() - path.stat().st_mtime > LEFT:
                path.unlink()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from writing; a killed one loses its lock."""
        import fcntl  # noqa: PLC0415 (Windows lacks it; other commands run there)

        handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def clean_file_name(name: str) -> str:
    """Return a name that is a plain file name, whatever a client sent."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name).lstrip("-_")
    return plain[-NAME:].lstrip("-_") or "request"


def measure(recording: Recording) -> int:
    """Return the bytes of a recording in a file, at most."""
    arrays = {
        id(x): x
        for record in recording.records
        for x in vars(record).values()
        if is_array(x)
    }
    words = json.dumps([recording.tokens, recording.texts, recording.notes])
    parts = len(recording.records) + len(recording.coverage)
    size = sum(int(x.nbytes) for x in arrays.values())
    return size + 2 * len(words) + HEADER + PART * parts  # JSON in JSON is longer


def read_limits(path: str, files: str, size: str) -> RecordingFolder:
    """Return the folder that an operator described, in the words of the environment."""
    try:
        return RecordingFolder(
            path=Path(path),
            max_files=int(files or FILES),
            max_bytes=int(size or BYTES),
        )
    except ValueError:
        raise OptionError(
            f"REGARD_RECORD_FILES={files!r} and REGARD_RECORD_BYTES={size!r}, expected "
            "whole numbers."
        ) from None
