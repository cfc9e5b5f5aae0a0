"""The requests that a page sends to a source, and their parser.

    answer(source, "tile", {"sequence": 0, "layer": 18, "head": 8, "level": 3, …})

    name          parameters                       answer
    meta, table                                    for JSON
    row           a head, query                    for JSON
    column        a head, key                      for JSON
    tile          a head, level, x, y, how         a Sheet
    gallery       sequence, layer                  a Sheet
    text          tokens and heads                 a Sheet (text_request.py)
    sound         heads                            a Sheet (sound_request.py)

Parameters are text (server) or numbers (notebook), and untrusted in both cases.

Next: server.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regard.errors import OptionError
from regard.show.map_source import MapSource, Spot
from regard.show.request_numbers import read_numbers
from regard.show.sound_request import answer_sound
from regard.show.text_request import answer_text
from regard.show.zoom_levels import Sheet

WHOLE = ("table", "gallery")  # then everything is computed in advance (prepare)
NAMES = ("meta", "table", "row", "column", "tile", "gallery", "text", "sound")

Given = Mapping[str, str | int]


def answer(source: MapSource, name: str, given: Given) -> Sheet | dict[str, Any]:
    """Return the answer to a request; raise OptionError if it is invalid."""
    whole = {"meta": source.meta, "table": source.table}
    if name in whole:
        return whole[name]()
    if name == "gallery":
        return source.gallery(*read_numbers(given, "sequence", "layer"))
    media = {"text": answer_text, "sound": answer_sound}
    if name in media:
        return media[name](source, given)
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
