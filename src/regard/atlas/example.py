"""Examples: where a head's values are largest, the text there, and a recording.

    find_examples(plan, corpus, total)              before [token] after, for every head
    record_example("prose", place)                  run that document again, recorded

A tally stores only document numbers and positions. The corpus is read again for the
text, and the model runs again for a recording, which the map opens at that position.

Next: job.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from regard.atlas.chunks import KILLER, Chunk, cut_shard
from regard.atlas.corpus import Corpus, open_corpus
from regard.atlas.model import Words, open_words
from regard.atlas.settings import Settings, read_about
from regard.atlas.store import Result
from regard.atlas.table import Example, Found, read_table
from regard.errors import FileError, OptionError
from regard.seen import Seen

AROUND = 24  # tokens of context shown before an example
Key = tuple[int, int]  # of a chunk: its document, and its number there


@dataclass(frozen=True, kw_only=True)
class Place:
    """Identifies an example of a head; rank 0 is the strongest."""

    statistic: str
    layer: int
    head: int
    rank: int = 0


def find_pieces(
    plan: Settings, corpus: Corpus, words: Words, documents: Any, skip: set[str]
) -> dict[Key, tuple[Chunk, dict[str, str]]]:
    """Return the chunks of these documents' shards, with the document names."""
    known: dict[Key, tuple[Chunk, dict[str, str]]] = {}
    for number in np.unique(np.asarray(documents) // plan.shard):
        shard = corpus.shard(int(number))
        names = {place.digest: place.name for place in shard.places}
        pieces, _ = cut_shard(shard, plan, words, skip)
        known |= {(x.document, x.number): (x, names) for x in pieces}
    return known


def find_examples(plan: Settings, corpus: Corpus, total: Result) -> Found:
    """Return the examples of each head, with the text around them."""
    words, top = open_words(plan.model), total.tally.top
    skip = {x for x, _, why in total.aside if plan.packed or why == KILLER}
    documents = top["document"][top["document"] >= 0]
    if plan.packed and total.n_aside > len(total.aside):
        documents = documents[:0]  # it is unknown which documents were packed
    known = find_pieces(plan, corpus, words, documents, skip)
    found: dict[tuple[str, int, int], tuple[Example, ...]] = {}
    for s, statistic in enumerate(plan.statistics):
        for (layer, head), places in zip(total.tally.places, top[s], strict=True):
            found[statistic, layer, head] = tuple(
                quote(place, known, words) for place in places if place["document"] >= 0
            )
    return found


def quote(place: Any, known: Mapping[Key, Any], words: Words) -> Example:
    """Return the example at a place, with the text around it."""
    value, document, number, at = place.item()
    example = Example(value=value, document="", piece=number, position=at)
    if (document, number) not in known:  # the document is missing or has changed
        return example
    piece, names = known[document, number]
    before, token, after = (
        words.decode(list(piece.tokens[max(0, first) : last]))
        for first, last in ((at - AROUND, at), (at, at + 1), (at + 1, at + AROUND // 2))
    )
    owners = [names[x] for x in piece.owners]
    name = owners[0] if len(owners) == 1 else f"{owners[0]} … {owners[-1]}"
    return replace(example, document=name, before=before, token=token, after=after)


def record_example(folder: str | Path, place: Place) -> Seen:
    """Run the model on the document of an example again, and return the recording."""
    from regard.atlas.worker import Worker  # noqa: PLC0415 (it reads the weights)

    folder, table = Path(folder), read_table(folder)
    examples = table.examples(place.statistic, place.layer, place.head)
    if not 0 <= place.rank < len(examples):
        raise OptionError(
            f"{place} is not one of the {len(examples)} examples of that head; "
            f"regard atlas show {folder} lists them."
        )
    plan, _ = read_about(folder / "about.json")
    row = table.tally.places.index((place.layer, place.head))
    top = table.tally.top[table.statistics.index(place.statistic), row]
    _, document, number, position = top[place.rank].item()
    worker = Worker(plan, threads=None)
    corpus = open_corpus(folder / "corpus.parquet")
    # skip what the run set aside; the table lists these documents by name
    named = table.about["set_aside"]
    if plan.packed and table.about["aside"] > len(named):
        raise FileError(
            f"{table.about['aside']:,} documents were set aside and only "
            f"{len(named):,} are known by name: the packs cannot be made again."
        )
    aside = {name for name, why in named if plan.packed or why == KILLER}
    shard = corpus.shard(document // plan.shard)
    skip = {x.digest for x in shard.places if x.name in aside}
    known = find_pieces(plan, corpus, worker.model.words, [document], skip)
    if (document, number) not in known:
        raise FileError("the document of this example is gone, or changed.")
    piece, _ = known[document, number]
    seen = worker.watch([piece])
    recording = replace(seen.recording, tokens=(piece.tokens,))
    where = f"l={place.layer}&h={place.head}&pin={position}"
    notes = recording.notes | {"address": where}
    return Seen(replace(recording, notes=notes)).label(worker.model.words.decode)
