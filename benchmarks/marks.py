"""The places of a page that a script fills: between two equal marks."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent


def fill(page: str, mark: str, text: str) -> None:
    """Put a text between the marks of a page of the project."""
    path = ROOT / page
    before, _, after = path.read_text("utf-8").split(mark)
    path.write_text(f"{before}{mark}\n{text}\n{mark}{after}", "utf-8")
