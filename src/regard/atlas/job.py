"""Run an atlas from its plan to its table: start, resume, and decide when to stop.

    folder/about.json        the plan, and fingerprints of its model and corpus
    folder/corpus.parquet    the documents, sorted by digest
    folder/results/          the results so far (store.py)
    folder/table.parquet     the merged results; examples.json: examples of each head

The documents are in a random order that is fixed in advance, so any prefix of them is a
random sample. A run can stop after a number of tokens, or when every mean is known
precisely enough; it stops after the first shard in this order for which that holds,
even if later shards are done. Because the second rule checks the data repeatedly, it
uses the confidence sequences of confidence.py, for the decision and in the report.

Next: table.py
"""

from __future__ import annotations

import errno
import fcntl
import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from regard.atlas.confidence import estimate_growth, find_half, is_narrow
from regard.atlas.corpus import Corpus, open_corpus, plan_corpus
from regard.atlas.example import find_examples
from regard.atlas.model import open_words
from regard.atlas.runners import RunnerOptions
from regard.atlas.settings import (
    STUDENT,
    Settings,
    explain_other_model,
    fingerprint,
    read_about,
    read_interval,
    write_about,
)
from regard.atlas.store import Result, Store
from regard.atlas.table import AtlasTable
from regard.atlas.tally import Tally
from regard.atomic_file import write_atomically
from regard.errors import FileError, OptionError
from regard.stats.registry import find_statistic

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
Progress = Callable[["Standing"], object]


@dataclass(frozen=True)
class Standing:
    """The progress of a run."""

    shards: int
    of: int
    documents: int
    tokens: int
    aside: int
    damaged: tuple[str, ...] = ()  # result files that are computed again, and why
    ended: str = ""  # why the run is complete, if it is


def run_atlas(
    folder: str | Path,
    *,
    crew: RunnerOptions,
    plan: Settings | None = None,
    progress: Progress = lambda _: None,
    reading: Callable[[int, int], object] | None = None,
) -> Standing:
    """Run the remaining shards of an atlas, write its table, and return the progress.

    plan: the settings; those stored in the folder unless given
    progress: called after each shard
    reading: called with (bytes read, total bytes) while the corpus is indexed
    """
    folder = Path(folder)
    with explain_full_disk(folder, f"write: regard atlas run {folder}"), lock(folder):
        plan, corpus = begin(folder, plan, reading)
        store = Store(folder / "results", keep=plan.examples)
        standing = fold_results(store, plan, corpus)
        progress(standing)
        while not standing.ended:
            standing = run_missing(store, plan, corpus, crew, progress)
        finish(folder, plan, corpus, store)
        return standing


@contextmanager
def explain_full_disk(folder: Path, then: str) -> Iterator[None]:
    """Raise FileError if the disk of a folder is full; then: what to do next."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise FileError(
            f"the disk of {folder} is full. What was done is kept: make room, then "
            f"{then}"
        ) from error


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OptionError(f"{folder} is being worked on by another run.") from None
        yield


def begin(
    folder: Path, plan: Settings | None, reading: Callable[[int, int], object] | None
) -> tuple[Settings, Corpus]:
    """Set up a folder, or raise if it was set up with another plan."""
    path, manifest = folder / "about.json", folder / "corpus.parquet"
    if plan is not None:
        words = open_words(plan.model)  # raises first if there is no such model
        plan = replace(plan, length=min(plan.length, words.context))
        if not path.exists():
            corpus = plan_corpus(
                plan.corpus,
                manifest,
                field=plan.field,
                shard=plan.shard,
                documents=plan.documents,
                progress=reading,
            )
            note(path, plan, corpus, STUDENT)
    known, about = read_about(path)
    for name, mine in (known if plan is None else plan).identify().items():
        if mine != (theirs := getattr(known, name)):
            raise OptionError(
                f"{folder} holds an atlas with {name}={theirs!r}, given {mine!r}. "
                "Choose another folder, or go on with its own plan: "
                f"regard atlas run {folder}"
            )
    if fingerprint(known.model) != about["model"]:
        raise OptionError(explain_other_model(known.model, folder))
    corpus = open_corpus(manifest)
    if corpus.digest != about["corpus"]:
        raise FileError(f"{manifest} is another corpus than {folder} began with.")
    if plan is not None and plan != known:  # only the stopping rule differs
        note(path, plan, corpus, read_interval(folder))
    return plan or known, corpus


def note(path: Path, plan: Settings, corpus: Corpus, interval: str) -> None:
    """Write the plan of a folder to about.json."""
    with write_atomically(path) as new:
        new.write_text(write_about(plan, corpus.digest, interval), "utf-8")


def run_missing(
    store: Store,
    plan: Settings,
    corpus: Corpus,
    crew: RunnerOptions,
    progress: Progress,
) -> Standing:
    """Run the missing shards until the run is complete."""
    missing = (n for n in range(corpus.shards) if not store.has(n))
    with closing(crew.run(plan, map(corpus.shard, missing))) as results:
        for data in results:
            store.commit(data)
            standing = fold_results(store, plan, corpus)
            progress(standing)
            if standing.ended:
                break
    return fold_results(store, plan, corpus)


def fold_results(store: Store, plan: Settings, corpus: Corpus) -> Standing:
    """Merge shard by shard, up to the first gap or until the run is complete."""
    while True:
        parts = store.parts
        standing = Standing(
            shards=store.first_missing,
            of=corpus.shards,
            documents=sum(x.documents for x in parts),
            tokens=sum(x.tokens for x in parts),
            aside=sum(x.n_aside for x in parts),
            damaged=tuple(store.damaged),
        )
        ended = decide(store, plan, standing)
        if ended or not store.fold():
            return replace(standing, ended=ended)


def decide(store: Store, plan: Settings, standing: Standing) -> str:
    """Return why the run is complete, or an empty string if it is not."""
    width = plan.until_interval
    total = None if width is None else store.total()
    if width is not None and total is not None and know_enough(total.tally, plan):
        widest, what = find_widest(total, plan)
        return (
            f"every mean weight is known to ± {width:g}; the widest interval is "
            f"± {widest:.4f}, {what}"
        )
    ended = ""
    if standing.shards >= standing.of:
        ended = "every document was read"
    elif plan.tokens is not None and standing.tokens >= plan.tokens:
        ended = f"{plan.tokens:,} tokens were asked for"
    return ended + tell_missing(total, plan) if ended and total else ended


def list_weights(tally: Tally) -> list[int]:
    """Return the indices of statistics that until_interval applies to: weights."""
    entries = map(find_statistic, tally.statistics)
    return [s for s, entry in enumerate(entries) if entry.is_weight]


def know_enough(tally: Tally, plan: Settings) -> bool:
    """Return whether every measured mean weight has a narrow enough interval."""
    if plan.until_interval is None:
        return False
    narrow = is_narrow(
        tally, plan.until_interval, length=plan.length, pieces=plan.pieces
    )
    rows = list_weights(tally)
    measured = tally.sums[rows, :, 0] > 0
    return bool(measured.any() and narrow[rows][measured].all())


def find_widest(total: Result, plan: Settings) -> tuple[float, str]:
    """Return the widest half interval of all mean weights, and its head."""
    tally, worst = total.tally, (-math.inf, "")
    half = find_half(tally, length=plan.length, pieces=plan.pieces)
    documents = tally.sums[..., 0]
    for s in list_weights(tally):
        known = np.where(np.isnan(half[s]) & (documents[s] > 0), math.inf, half[s])
        if np.isnan(known).all():  # no head has this statistic
            continue
        at = int(np.nanargmax(known))
        if known[at] > worst[0]:
            layer, head = tally.places[at]
            what = f"{tally.statistics[s]} of layer {layer} head {head}"
            worst = float(known[at]), what
    return worst if worst[1] else (math.inf, "")


def tell_missing(total: Result, plan: Settings) -> str:
    """Describe the widest interval, and how many documents would be enough."""
    widest, what = find_widest(total, plan)
    if not what or plan.until_interval is None:
        return "; no mean weight was measured"
    told = f"; the widest interval of a mean weight is ± {widest:.4f}, {what}"
    growth = estimate_growth(
        total.tally,
        plan.until_interval,
        rows=list_weights(total.tally),
        length=plan.length,
        pieces=plan.pieces,
    )
    if not math.isfinite(growth):
        return told
    return (
        f"{told}; ± {plan.until_interval:g} for every head would take about "
        f"{growth * total.documents:,.0f} documents like these"
    )


def finish(folder: Path, plan: Settings, corpus: Corpus, store: Store) -> None:
    """Write the table, and the examples with their text."""
    total = store.total()
    if total is None:
        raise FileError("no shard was done.")
    there = min(total.last * plan.shard, len(corpus))
    if total.documents + total.n_aside != there:
        raise FileError(
            f"{total.documents} documents and {total.n_aside} set aside are not the "
            f"{there} of the first {total.last} shards. Remove {store.folder}, and run "
            "again."
        )
    table = AtlasTable(
        about=summarize_run(folder, plan, corpus, total),
        tally=total.tally,
        found=find_examples(plan, corpus, total),
    )
    table.save(folder)


def summarize_run(
    folder: Path, plan: Settings, corpus: Corpus, total: Result
) -> dict[str, Any]:
    """Return the metadata of the table: model, corpus, settings and counts."""
    return {
        "folder": str(folder),
        "model": Path(plan.model).name,
        "corpus": ", ".join(Path(x).name for x in plan.corpus),
        "documents": total.documents,
        "of": corpus.different,
        "tokens": total.tokens,
        "length": plan.length,
        "pieces": plan.pieces,
        "packed": plan.packed,
        "precision": plan.precision,
        "interval": read_interval(folder),
        "shards": total.last,
        "whole": total.last == corpus.shards and len(corpus) == corpus.different,
        "aside": total.n_aside,
        "set_aside": [[name, reason] for _, name, reason in total.aside],
        "reasons": total.reasons,
        "left_out": corpus.counts,
        "copies": corpus.copies,
        "missed": total.missed,
    }
