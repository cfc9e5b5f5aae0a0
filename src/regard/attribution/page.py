"""Stub.

Next: ../seen.py
"""
from typing import Any
def write_sources_page(data: dict[str, Any]) -> bytes:
    """Return the HTML file."""
    return b""
