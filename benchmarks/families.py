"""Which families of models the lens sees, through which door, and how exactly.

    python benchmarks/families.py         writes families.json and docs/families.md

Every model is small and random (tests/families.py). Its outputs with and without the
lens are compared bit by bit; the weights that follow from the recording are compared
with the model's own eager attention, where it has one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from marks import fill
from rich.progress import track

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from families import FAMILIES  # noqa: E402
from test_lens import BLIND, MANY, REPORTED, compare, number_layers, run  # noqa: E402

from regard.seen import watch  # noqa: E402

MARK = "<!-- benchmark:families -->"


def look(name: str) -> dict[str, Any]:
    """Watch one family."""
    family = FAMILIES[name]
    model, inputs = family.build()
    before = run(model, inputs)
    with watch(model) as seen:
        after = run(model, inputs)
    pairs = zip(before, after, strict=True)
    same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
    found = [x for x in seen.coverage() if x.attention and x.via]
    error = None
    if family.eager and name not in BLIND | MANY | REPORTED:
        error = 0.0
        expected = family.eager(model, inputs)
        for theirs, layer in zip(expected, number_layers(family.layers), strict=True):
            own = [r for r in seen.recording.records if r.name == layer]
            for record, row in zip(own, theirs, strict=True):
                error = max(error, compare(record.weights(), row, record))
    return {
        "kind": family.kind,
        "calls": max(len(family.layers), sum(x.calls for x in found)),
        "seen": sum(x.kept for x in found),
        "doors": sorted({x.via for x in found}),
        "same_bits": same,
        "weights_error": error,
        "note": family.note,
    }


def render(result: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    columns = ("family", "kind", "calls recorded", "via", "same bits", "error")
    lines = [f"| {' | '.join(columns)} |", "|---|---|---|---|---|---|"]
    for name, x in result.items():
        error = "" if x["weights_error"] is None else f"{x['weights_error']:.0e}"
        doors = ", ".join(x["doors"]) or "not observed, listed"
        if not x["calls"]:
            doors = "no attention"
        bits = "yes" if x["same_bits"] else "NO"
        calls = f"{x['seen']} of {x['calls']}"
        lines.append(f"| {name} | {x['kind']} | {calls} | {doors} | {bits} | {error} |")
    return "\n".join(lines)


def main() -> None:
    """Watch all and write the results."""
    torch.set_num_threads(1)
    result = {name: look(name) for name in track(FAMILIES, "watching")}
    (HERE / "families.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    fill("docs/families.md", MARK, render(result))


if __name__ == "__main__":
    main()
