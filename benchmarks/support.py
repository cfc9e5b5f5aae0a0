"""Which versions the tests pass on: every one is run, none is assumed.

    python benchmarks/support.py PYTHON ...    writes support.json, and docs/install.md
    python benchmarks/support.py --here        this Python only; writes nothing
    python benchmarks/support.py --torch PYTHON ...    the second table, of other torch
                                               and transformers, and libraries.json

PYTHON is an interpreter whose environment has the pinned dependencies: run
.ci/environment.py with it. The tests are those of `AREAS`, without the slow ones, in
two processes; those of `MODEL_AREAS` for the second table, in one.

Next: .github/workflows/ci.yml
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from marks import fill

HERE = Path(__file__).parent
ROOT = HERE.parent
MARK, RESULTS = "<!-- benchmark:support -->", HERE / "support.json"
AREAS = {
    "definition": "definition steps position masks plain plain_arrays precision",
    "engine": "engine torch tile tiles gradients few_queries torch_masks",
    "models": "nn tasks tokens generation train weights",
    "lens": "lens recording transformers storage spans",
    "interventions": "intervene patch_heads trace_heads direct_logits circuits",
    "statistics": "stats registry attention_flow",
    "tools": "display page cli grade class atlas_tally",
}
MODEL_MARK = "<!-- benchmark:libraries -->"
MODEL_RESULTS = HERE / "libraries.json"
MODEL_AREAS = {  # what depends most on torch and transformers
    "grouped heads": "attention_interface",
    "generation": "generation",
    "interventions": "patch_heads",
    "doctor": "doctor",
}
PACKAGES = ("torch", "numpy", "jax", "transformers")
ASK = (
    "import importlib.metadata as m, json, platform, sys;"
    "found = {x: m.version(x) for x in sys.argv[1:]};"
    "print(json.dumps([platform.python_version(), found]))"
)


def run_tests(python: str, areas: dict[str, str], *, workers: int) -> ET.Element:
    """Return the report of one run of pytest, on the files of all areas."""
    names = " ".join(areas.values()).split()
    files = [f"tests/test_{name}.py" for name in names]
    env = os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "HYPOTHESIS_PROFILE": "quick",
    }
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.xml"
        command = [python, "-m", "pytest", "-q", "-n", str(workers), *files]
        command += ["-m", "not slow"]
        done = subprocess.run(
            [*command, "--junitxml", str(report), "-p", "no:cacheprovider"],
            cwd=ROOT,
            env=env,
            check=False,
            capture_output=True,
            text=True,
        )
        if not report.exists():
            sys.exit(f"{python} ran no tests:\n{done.stdout}{done.stderr}")
        if done.returncode:
            print(done.stdout[-6_000:])
        return ET.parse(report).getroot()


def count(report: ET.Element, names: str) -> dict[str, int]:
    """Return how many tests of some files passed, failed and were skipped."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    modules = {f"tests.test_{name}" for name in names.split()}
    for case in report.iter("testcase"):
        if case.attrib.get("classname") in modules:
            kinds = {part.tag for part in case}
            failed = bool(kinds & {"failure", "error"})
            kind = "skipped" if "skipped" in kinds else "passed"
            counts["failed" if failed else kind] += 1
    return counts


def run_version(
    python: str, areas: dict[str, str] = AREAS, *, workers: int = 2
) -> dict[str, Any]:
    """Return what a Python is and has, and the counts of every area."""
    began = time.perf_counter()
    asked = subprocess.run(
        [python, "-c", ASK, *PACKAGES], check=True, capture_output=True, text=True
    )
    version, packages = json.loads(asked.stdout)
    report = run_tests(python, areas, workers=workers)
    counts = {area: count(report, names) for area, names in areas.items()}
    for area, found in counts.items():
        print(f"{version}  {area:<12} {describe(found)}", flush=True)
    seconds = round(time.perf_counter() - began)
    return {
        "python": version,
        "packages": packages,
        "areas": counts,
        "seconds": seconds,
    }


def describe(counts: dict[str, Any]) -> str:
    """Return the counts in words."""
    text = f"{counts['passed']} passed"
    text += f", {counts['failed']} failed" if counts["failed"] else ""
    return text + (f", {counts['skipped']} skipped" if counts["skipped"] else "")


def render(
    rows: list[dict[str, Any]], first: tuple[str, ...] = ("Python", "torch")
) -> str:
    """Return the table of all versions that were run, with these columns first."""
    areas = list(rows[0]["areas"])
    lines = [
        f"| {' | '.join([*first, *areas])} |",
        "|---" * (len(first) + len(areas)) + "|",
    ]
    for row in rows:
        versions = {"Python": row["python"], **row["packages"]}
        told = [versions[name] for name in first]
        told += [describe(row["areas"][area]) for area in areas]
        lines.append(f"| {' | '.join(told)} |")
    return "\n".join(lines)


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return what is known, one row per version."""
    found: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))
    return found


def name_row(row: dict[str, Any], path: Path) -> tuple[list[int], ...]:
    """Return what a row is a row of, in the order of the table."""
    packages = row["packages"]
    told = [packages["torch"].partition("+")[0], packages["transformers"]]
    if path == RESULTS:
        told = [row["python"].rpartition(".")[0]]
    return tuple([int(x) for x in version.split(".")] for version in told)


def keep(row: dict[str, Any], path: Path) -> None:
    """Put the row of a version into the results, in place of an older one."""
    known = read_results(path) if path.exists() else []
    others = [x for x in known if name_row(x, path) != name_row(row, path)]
    rows = sorted([*others, row], key=lambda x: name_row(x, path))
    path.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


def main() -> None:
    """Run the versions that are named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pythons", nargs="*", metavar="PYTHON")
    parser.add_argument("--here", action="store_true", help="this Python only")
    parser.add_argument("--torch", action="store_true", help="the second table")
    asked = parser.parse_args()
    if asked.here:
        row = run_version(sys.executable)
        sys.exit(any(x["failed"] for x in row["areas"].values()))
    for python in asked.pythons:
        if asked.torch:
            keep(run_version(python, MODEL_AREAS, workers=0), MODEL_RESULTS)
        else:
            keep(run_version(python), RESULTS)
    page = "docs/install.md"
    fill(page, MARK, render(read_results(RESULTS)))
    if MODEL_RESULTS.exists():
        table = render(read_results(MODEL_RESULTS), ("torch", "transformers"))
        fill(page, MODEL_MARK, table)


if __name__ == "__main__":
    main()
