"""The request of the sound view: the weights of words over the time of a sound.

    answer_sound(source, {"sequence": 0, "heads": "3.2,5", "combine": "mean"})

    cell[i, j] = over the heads h of  weight[h, i, j]      i: a word, j: a moment

The heads are those of layers whose queries are the words and whose keys are the
moments: the cross-attention. The answer is a Sheet of a row per word (log_codes.py).

Next: map_requests.py
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import numpy as np

from regard.arrays import to_numpy
from regard.recording.record import Record
from regard.show.log_codes import encode_weights
from regard.show.map_source import MapSource, MissingError
from regard.show.request_numbers import read_numbers
from regard.show.text_request import read_heads
from regard.show.text_tint import TextSelection
from regard.show.zoom_levels import Sheet
from regard.stats.nonfinite import mark_nonfinite


def answer_sound(source: MapSource, given: Mapping[str, str | int]) -> Sheet:
    """Return the weights of every word; raise OptionError for an invalid request."""
    (sequence,) = read_numbers(given, "sequence")
    combine: Any = given.get("combine", "mean")
    TextSelection(0, 0, combine=combine)  # raises if it is unknown
    wanted = read_heads(source, sequence, str(given.get("heads", "")))
    across = dict(list_across(source, sequence))
    unknown = next((x for x in wanted or () if x not in across), None)
    if unknown is not None or not across:
        what = "no layer" if unknown is None else f"layer {unknown}: its queries do not"
        raise MissingError(
            f"{what} attend from words to the sound of sequence {sequence}."
        )
    chosen = wanted or {layer: list(range(r.heads)) for layer, r in across.items()}
    parts = [
        (mark_nonfinite(across[layer]), sorted(set(heads)))
        for layer, heads in chosen.items()
    ]
    join: Any = np.maximum if combine == "max" else np.add
    found = (
        to_numpy(record.weights(heads=[head])).astype(np.float64)[0]
        for record, heads in parts
        for head in heads
    )
    total = reduce(join, found)
    if combine == "mean":
        total = total / sum(len(heads) for _, heads in parts)
    return Sheet(encode_weights(total, np.ones(total.shape, bool)), 0, combine)


def list_across(source: MapSource, sequence: int) -> list[tuple[int, Record]]:
    """Return the layers whose queries are words and whose keys are moments."""
    about = source.about["sounds"].get(str(sequence), {"words": ()})
    n_words, n_keys = len(about["words"]), len(source.recording.texts[sequence])
    return [
        (layer, record)
        for (i, layer), record in source.records.items()
        if i == sequence
        and record.shape[1:] == (n_words, n_keys)
        and not all(source.name_tokens(sequence, record).values())
    ]
