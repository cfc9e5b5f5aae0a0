"""Build an atlas: the heads that do something else in code than in prose.

    python examples/atlas.py [model]          needs: pip install "regard[atlas]"

One prompt is an anecdote. Here every head reads all of prose.jsonl and code.jsonl, and
each mean has its interval over them. Look at the heads that are marked: they differ
by more than an interval that holds for all heads at once. The two folders that it makes
go on where they stopped, and hold tables for pandas. For more texts: regard atlas run.
"""

from pathlib import Path

import numpy as np
from models import find_smollm

from regard.atlas.job import run
from regard.atlas.plan import Plan
from regard.atlas.runners import Crew
from regard.atlas.table import compare, read_table
from regard.atlas.text import tell_marked

HERE = Path(__file__).parent
NAMES = ("prose", "code")  # the files here, and the folders that are made


def main() -> None:
    """Make two small atlases, then print what differs."""
    model = find_smollm()
    for name in NAMES:
        plan = Plan(
            model=model,
            corpus=(str(HERE / f"{name}.jsonl"),),
            statistics=("induction", "previous"),
            length=64,  # tokens of a text, at most
        )
        done = run(f"atlas-{name}", plan=plan, crew=Crew(runner="loop"))
        print(f"atlas-{name}: {done.documents} documents, {done.tokens} tokens")
    prose, code = (read_table(f"atlas-{name}") for name in NAMES)
    for statistic in prose.statistics:
        found = compare(prose, code, statistic)
        print(f"\n{statistic}, code less prose: {tell_marked(found)}")
        size = np.where(found.marked, np.abs(found.difference), -1)
        for at in np.argsort(-size, axis=None)[: min(4, found.marked.sum())]:
            layer, head = np.unravel_index(at, size.shape)
            change, half = found.difference[layer, head], found.half[layer, head]
            print(f"layer {layer:2} head {head}   {change:+.3f} ± {half:.3f}")


if __name__ == "__main__":
    main()
