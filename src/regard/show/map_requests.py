"""The requests that a page sends to a source, and their parser.

    answer(source, "tile", {"sequence": 0, "layer": 18, "head": 8, "level": 3, …})

    name          parameters                       answer
    meta, table                                    for JSON
    row           a head, query                    for JSON
    column        a head, key                      for JSON
    tile          a head, level, x, y, how         a Sheet
    gallery       sequence, layer                  a Sheet

Parameters are text (server) or numbers (notebook), and untrusted in both cases.

Next: server.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regard.errors import OptionError
from regard.show.map_source import MapSource, Spot
from regard.show.zoom_levels import Sheet

NAMES = ("meta", "table", "row", "column", "tile", "gallery")
DIGITS = 9  # most digits of a number

Given = Mapping[str, str | int]


def answer(source: MapSource, name: str, given: Given) -> Sheet | dict[str, Any]:
    """Return the answer to a request; raise OptionError if it is invalid."""
    if name == "meta":
        return source.meta()
    if name == "table":
        return source.table()
    if name == "gallery":
        return source.gallery(*read_numbers(given, "sequence", "layer"))
    if name not in NAMES:
        raise OptionError(f"{name!r} cannot be asked, expected one of {NAMES}.")
    spot = Spot(*read_numbers(given, *Spot._fields))
    if name == "row":
        return source.row(spot, *read_numbers(given, "query"))
    if name == "column":
        return source.column(spot, *read_numbers(given, "key"))
    level, x, y = read_numbers(given, "level", "x", "y")
    how: Any = given.get("how", "max")
    return source.tile(spot, level=level, x=x, y=y, how=how)


def read_numbers(given: Given, *names: str) -> list[int]:
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
