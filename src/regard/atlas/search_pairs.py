"""Patch every head over many pairs of prompts, with confidence intervals.

    found = search_pairs("SmolLM2-135M-Instruct.Q4_1.gguf", "pairs.jsonl", "names")
    print(found)                  a process that was killed: run it again, it resumes

    folder/about.json             the plan (search_settings.py)
    folder/results/               the results so far (search_results.py)
    folder/heads.csv, pairs.csv   a row for each head, and for each pair

Next: ../ablate/search_heads.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from regard.atlas.job import explain_full_disk, lock
from regard.atlas.pairs import Pair, cut_shards, digest_pairs, read_prompt_pairs
from regard.atlas.runners import RunnerOptions
from regard.atlas.search_results import (
    PairSearch,
    ShardResult,
    read_search,
    read_shards,
    store_shard,
    unpack_shard,
)
from regard.atlas.search_settings import SearchSettings, begin_search
from regard.errors import OptionError


@dataclass(frozen=True)
class SearchProgress:
    """How far a search is."""

    done: int  # pairs, with those set aside
    of: int
    aside: int
    damaged: tuple[str, ...]  # files of results that are computed again


def search_pairs(
    model: str | Path,
    pairs: str | Path | Sequence[Pair],
    out: str | Path,
    *,
    batch: int = 16,
    precision: str = "float32",
    device: str = "cpu",
    crew: RunnerOptions | None = None,
    progress: Callable[[SearchProgress], object] = lambda _: None,
) -> PairSearch:
    """Patch every head from the clean into the corrupted run of each pair.

    model: a GGUF file, a folder, a Hugging Face name, or module:function
    pairs: a JSON Lines file with clean, corrupted, answer and wrong; or Pair objects
    out: the folder of the results; if it holds a part of this search, the rest is run
    batch: heads in one forward pass
    crew: the runner and its workers; a process for each core unless given
    progress: called after each shard of four pairs
    """
    folder, known = Path(out), read_prompt_pairs(pairs)
    plan = SearchSettings(
        model=str(model),
        pairs=digest_pairs(known),
        count=len(known),
        batch=batch,
        precision=precision,
        device=device,
    )
    with explain_full_disk(folder, "run the same search again"), lock(folder):
        begin_search(folder, plan)
        results = folder / "results"
        done, damaged = read_shards(results)
        for name in damaged:
            (results / name).replace(results / f"{name}.damaged")
        progress(count_done(done, plan, damaged))
        missing = [x for x in cut_shards(known, plan.shard) if x.number not in done]
        if missing:
            with closing((crew or RunnerOptions()).run(plan, missing)) as found:
                for data in found:
                    expect_same_weights(unpack_shard(data), done, plan)
                    result = store_shard(results, data)
                    done[result.number] = result
                    progress(count_done(done, plan, damaged))
        search = read_search(folder)
        search.save(folder)
        return search


def expect_same_weights(
    result: ShardResult, done: dict[int, ShardResult], plan: SearchSettings
) -> None:
    """Raise OptionError if a function returned other weights than before."""
    if any(x.weights != result.weights for x in done.values()):
        raise OptionError(
            f"{plan.model} returned other weights than for the pairs that are done. "
            "Let it return the same in every process, or choose another folder."
        )


def count_done(
    done: dict[int, ShardResult], plan: SearchSettings, damaged: list[str]
) -> SearchProgress:
    """Return how far a search is."""
    aside = sum(len(x.aside) for x in done.values())
    pairs = sum(len(x.pairs) for x in done.values())
    return SearchProgress(pairs + aside, plan.count, aside, tuple(damaged))
