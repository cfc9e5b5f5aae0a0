"""Two recordings as one, to be shown together: two checkpoints, or two prompts.

    joined = join_recordings(before, after, names=("before", "after"))

    sequence 0    the records of one; layers have its names
    sequence 1    the records of the other, layer by layer
    notes         "compared": names, the tokens that correspond, heads by change

Tokens correspond as alignment.py finds them: all of them if they are the same, else by
a diff, or by a diff inside of each span that both have. Heads are sorted by `moved`,
the share of their weights that is elsewhere (comparison.py). A page, the server and the
widget show the result as any other recording, with the difference of the two.

Next: map_source.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.errors import OptionError
from regard.recording.record import Recording
from regard.show.vision_input import find_images, find_pictures
from regard.stats.alignment import Alignment, align_records, align_tokens
from regard.stats.comparison import measure_moved, pair_records, read_named

COMPARED = "compared"  # the name of the note


def join_recordings(
    one: Recording,
    other: Recording,
    *,
    names: tuple[str, str] = ("A", "B"),
    spans: Any = None,
) -> Recording:
    """Return one recording of both; see the top of the file.

    names: what the two are called
    spans: (spans of one, spans of other), as seen.spans returns them, to align tokens
    """
    if len(names) != 2 or not all(isinstance(x, str) and x for x in names):
        raise OptionError(f'names={names!r}, expected two names, as ("A", "B").')
    for x in (one, other):
        if len(set(x.sequences)) > 1:
            raise OptionError(
                f"a recording has {len(set(x.sequences))} sequences, expected one in "
                "each. Record each prompt alone."
            )
    pairs = list(pair_records(one, other))
    known = align_texts(one, other, spans, pairs)
    heads = []
    for _, layer, mine, theirs in pairs:
        moved = measure_moved(mine, theirs, *align_records(mine, theirs, known)).mean(1)
        heads += [(layer, head, float(x)) for head, x in enumerate(moved)]
    heads.sort(key=lambda x: (math.isnan(x[2]), -x[2]))  # those without weights last
    note = {
        "names": list(names),
        "how": known.how,
        "pairs": None if known.pair is None else [x.tolist() for x in known.pair],
        "heads": [
            [*x[:2], None if math.isnan(x[2]) else round(x[2], 6)] for x in heads
        ],
    }
    renamed = [replace(theirs, name=mine.name) for _, _, mine, theirs in pairs]
    return Recording(
        model=one.model,
        records=(*(mine for _, _, mine, _ in pairs), *renamed),
        sequences=(0,) * len(pairs) + (1,) * len(pairs),
        tokens=tuple(read_first(x.tokens) for x in (one, other)),
        texts=tuple(read_first(x.texts) for x in (one, other)),
        coverage=one.coverage,
        notes={
            **one.notes,
            **join_pictures(one, other),
            "title": " and ".join(names),
            COMPARED: note,
        },
    )


def join_pictures(one: Recording, other: Recording) -> dict[str, Any]:
    """Return the pictures and the named spans of both, as notes."""
    both = (one, other)
    images = [x | {"sequence": i} for i, y in enumerate(both) for x in find_images(y)]
    pictures = {
        str(i): x for i, y in enumerate(both) for x in find_pictures(y).values()
    }
    spans = {
        str(i): x["0"]
        for i, y in enumerate(both)
        if isinstance(x := y.notes.get("spans"), dict) and "0" in x
    }
    return {"images": images, "pictures": pictures, "spans": spans}


def align_texts(
    one: Recording, other: Recording, spans: Any, pairs: Sequence[Any]
) -> Alignment:
    """Return the tokens that correspond, by spans, by ids or else by their texts."""
    kind = "tokens" if all(any(x.tokens) for x in (one, other)) else "texts"
    mine, theirs = (read_first(getattr(x, kind)) for x in (one, other))
    if spans is None:
        return align_tokens(mine, theirs)
    found: list[tuple[int, int]] = []
    names = []
    for span, twin in zip(*read_named(spans, pairs), strict=True):
        inside = mine[span.slice], theirs[twin.slice]
        try:
            pair = align_tokens(*inside).pair
        except OptionError:  # nothing in common
            continue
        n = min(map(len, inside))
        both = (range(n), range(n)) if pair is None else pair
        found += [
            (span.start + int(i), twin.start + int(j))
            for i, j in zip(*both, strict=True)
        ]
        names.append(span.name)
    if not found:
        raise OptionError(
            "the spans have no token in common, so no token corresponds to another. "
            "Give spans with the same words, or none."
        )
    first, second = np.array(sorted(set(found)), np.int64).T
    return Alignment((first, second), f"{len(found)} tokens of {', '.join(names)}")


def read_first(found: Sequence[Any]) -> Any:
    """Return what is known of the first sequence."""
    return found[0] if found else ()
