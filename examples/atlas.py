"""Build an atlas: heads that behave differently in code than in prose.

    python examples/atlas.py [model]          needs: pip install "regard[atlas]"

One prompt proves little. Here every head is measured on all of prose.jsonl and
code.jsonl, and each mean has a confidence interval. Look at the marked heads: they
differ by more than an interval that holds for all heads at once. The script creates two
folders with tables for pandas; a stopped run resumes. For more texts: regard atlas run.
"""

from pathlib import Path

import numpy as np
from models import find_smollm

from regard.atlas.job import run_atlas
from regard.atlas.runners import RunnerOptions
from regard.atlas.settings import Settings
from regard.atlas.table import compare_atlases, read_table
from regard.atlas.terminal_table import tell_marked

HERE = Path(__file__).parent
NAMES = ("prose", "code")  # of the files here, and of the folders created


def main() -> None:
    """Build two small atlases, then print the heads that differ."""
    model = find_smollm()
    for name in NAMES:
        plan = Settings(
            model=model,
            corpus=(str(HERE / f"{name}.jsonl"),),
            statistics=("induction", "previous"),
            length=64,  # maximum number of tokens of a text
        )
        done = run_atlas(f"atlas-{name}", plan=plan, crew=RunnerOptions(runner="loop"))
        print(f"atlas-{name}: {done.documents} documents, {done.tokens} tokens")
    prose, code = (read_table(f"atlas-{name}") for name in NAMES)
    for statistic in prose.statistics:
        found = compare_atlases(prose, code, statistic)
        print(f"\n{statistic}, code minus prose: {tell_marked(found)}")
        size = np.where(found.marked, np.abs(found.difference), -1)
        for at in np.argsort(-size, axis=None)[: min(4, found.marked.sum())]:
            layer, head = np.unravel_index(at, size.shape)
            change, half = found.difference[layer, head], found.half[layer, head]
            print(f"layer {layer:2} head {head}   {change:+.3f} ± {half:.3f}")


if __name__ == "__main__":
    main()
