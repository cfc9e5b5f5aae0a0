"""The memory of this process: now, and its peak since a chosen moment (Linux)."""

from __future__ import annotations

import os
import re
from pathlib import Path


def read_memory() -> float:
    """Return the memory in use now, in MB."""
    pages = int(Path("/proc/self/statm").read_text("utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def reset_peak() -> float:
    """Forget the peak so far; return the memory in use now, in MB."""
    Path("/proc/self/clear_refs").write_text("5", "utf-8")
    return read_peak()


def read_peak() -> float:
    """Return the largest memory in use since then, in MB."""
    status = Path("/proc/self/status").read_text("utf-8")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found.group(1)) / 1024
