"""Which processes a process started (Linux)."""

from __future__ import annotations

from pathlib import Path


def list_processes(root: int) -> list[int]:
    """Return a process and all that it started, and they."""
    below: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        below.setdefault(parent, []).append(int(path.parent.name))
    found = [root]
    for pid in found:
        found += below.get(pid, [])
    return found
