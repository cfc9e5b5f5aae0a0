"""The peak memory of this process, above a moment that one can choose (Linux)."""

from __future__ import annotations

import re
from pathlib import Path


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
