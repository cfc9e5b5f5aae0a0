"""The request of the text view: a selection of tokens and heads, answered as codes.

    answer_text(source, {"sequence": 0, "first": 12, "last": 15, "heads": "17.5,18"})

    parameter         meaning
    first, last       positions of the selected tokens
    heads             "17.5" a head, "18" a layer, a list with commas; "" is all heads
    show              "attended" or "attending"  } text_tint.py
    combine           "mean" or "max"            }
    by                "weight", "value" or "rollout" (text_rollout.py)
    also              "1.12.15": the same for tokens 12 to 15 of sequence 1

The answer is a Sheet of one row, a code (log_codes.py) per token; those of `also`
follow. Layers that do not read the tokens of the sequence (a vision tower, a decoder)
are not part of "all heads".

Next: map_requests.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from regard.errors import OptionError
from regard.recording.record import Record
from regard.show.log_codes import encode_weights
from regard.show.map_source import MapSource, MissingError
from regard.show.request_numbers import read_numbers
from regard.show.text_rollout import tint_by_rollout
from regard.show.text_tint import TextSelection, measure_values, tint_tokens
from regard.show.zoom_levels import Sheet
from regard.stats.nonfinite import mark_nonfinite
from regard.stats.rollout import find_rollout_obstacle

LONGEST = 8192  # most characters of a list of heads


def answer_text(source: MapSource, given: Mapping[str, str | int]) -> Sheet:
    """Return the tint of every token; raise OptionError for an invalid request."""
    if "also" in given:
        one = {name: x for name, x in given.items() if name != "also"}
        names = ("sequence", "first", "last")
        parts = str(given["also"])[:LONGEST].split(".")
        if len(parts) != len(names):
            raise OptionError(f"also={parts!r:.40}, expected SEQUENCE.FIRST.LAST.")
        other = one | dict(zip(names, parts, strict=True))
        sheets = [answer_text(source, x) for x in (one, other)]
        return replace(sheets[0], codes=np.hstack([x.codes for x in sheets]))
    sequence, first, last = read_numbers(given, "sequence", "first", "last")
    show: Any = given.get("show", "attended")
    combine: Any = given.get("combine", "mean")
    by: Any = given.get("by", "weight")
    selection = TextSelection(first, last, show, combine, by)
    chosen = select_heads(source, sequence, str(given.get("heads", "")))
    about = source.about["sequences"]
    n = about[sequence]["count"] if sequence < len(about) else 0
    if last >= n:
        raise MissingError(f"there is no token {last}, expected 0 to {n - 1}.")
    if by == "rollout":
        tint = tint_by_rollout(
            list_rolled_layers(source, sequence), selection, tokens=n
        )
    else:
        longest = find_longest(source, sequence) if by == "value" else 1.0
        tint = tint_tokens(chosen, selection, tokens=n, longest=longest)
    codes = encode_weights(tint.values[None], tint.allowed[None])
    return Sheet(codes, 0, combine)


def list_rolled_layers(source: MapSource, sequence: int) -> list[Record]:
    """Return the layers of a rollout; raise MissingError if it is not defined."""
    records = [record for record, _ in select_heads(source, sequence, "")]
    wrong = find_rollout_obstacle(records)
    if wrong:
        raise MissingError(f"there is no rollout: {wrong}.")
    return records


def find_longest(source: MapSource, sequence: int) -> float:
    """Return the length of the longest value of a sequence, which is computed once."""
    if sequence not in source.longest:
        records = [record for record, _ in select_heads(source, sequence, "")]
        lengths = (measure_values(x).nan_to_num(0, posinf=0) for x in records)
        most = max((float(x.max()) for x in lengths), default=0.0)
        source.longest[sequence] = most or 1.0
    return source.longest[sequence]


def select_heads(
    source: MapSource, sequence: int, text: str
) -> list[tuple[Record, list[int]]]:
    """Return the records of a sequence that a list of heads names, with their heads."""
    if not text:
        found = [
            (mark_once(source, *key), list(range(record.heads)))
            for key, record in source.records.items()
            if key[0] == sequence and reads_text(source, *key)
        ]
        if not found:
            raise MissingError(f"no head reads the tokens of sequence {sequence}.")
        return found
    wanted = read_heads(source, sequence, text)
    for layer in wanted:
        if not reads_text(source, sequence, layer):
            raise MissingError(
                f"layer {layer} does not read the tokens of sequence {sequence}."
            )
    return [
        (mark_once(source, sequence, layer), sorted(set(heads)))
        for layer, heads in wanted.items()
    ]


def read_heads(source: MapSource, sequence: int, text: str) -> dict[int, list[int]]:
    """Return the heads that a list names, by layer; none for an empty list."""
    if len(text) > LONGEST:
        raise OptionError(
            f"heads has {len(text)} characters, expected at most {LONGEST}."
        )
    wanted: dict[int, list[int]] = {}
    for part in text.split(",") if text else ():
        first, dot, second = part.partition(".")
        given = {"layer": first, "head": second if dot else "0"}
        layer, head = read_numbers(given, "layer", "head")
        record = source.find(sequence, layer, head)
        wanted.setdefault(layer, []).extend([head] if dot else range(record.heads))
    return wanted


def mark_once(source: MapSource, sequence: int, layer: int) -> Record:
    """Return a record with its rows without weights marked.

    Finding them takes as long as a tint, so it is done once.
    """
    key = sequence, layer
    if key not in source.marked:
        source.marked[key] = mark_nonfinite(source.records[key])
    return source.marked[key]


def reads_text(source: MapSource, sequence: int, layer: int) -> bool:
    """Return whether the queries and keys of a layer are the tokens of the sequence."""
    return all(source.name_tokens(sequence, source.find(sequence, layer)).values())
