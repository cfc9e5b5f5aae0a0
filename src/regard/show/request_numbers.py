"""The numbers of a request, which is text from a page and untrusted.

    read_numbers({"layer": "18", "head": 8}, "layer", "head")      [18, 8]

Next: map_requests.py
"""

from __future__ import annotations

from collections.abc import Mapping

from regard.errors import OptionError

DIGITS = 9  # most digits of a number


def read_numbers(given: Mapping[str, str | int], *names: str) -> list[int]:
    """Return the named parameters as integers; raise OptionError if one is invalid."""
    found = []
    for name in names:
        if name not in given:
            raise OptionError(f"{name} is not given, expected a whole number.")
        text = str(given[name])
        if not (text.isascii() and text.isdigit() and len(text) <= DIGITS):
            raise OptionError(f"{name}={text[:40]!r}, expected a whole number.")
        found.append(int(text))
    return found
