"""Which versions of Python the tests pass on: every one is run, none is assumed.

    python benchmarks/support.py PYTHON ...    writes support.json, and docs/install.md
    python benchmarks/support.py --here        this Python only; writes nothing

PYTHON is an interpreter whose environment has the pinned dependencies: run
.ci/environment.py with it. The tests are those of `AREAS`, without the slow ones, in
two processes.

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
PACKAGES = ("torch", "numpy", "jax", "transformers")
ASK = (
    "import importlib.metadata as m, json, platform, sys;"
    "found = {x: m.version(x) for x in sys.argv[1:]};"
    "print(json.dumps([platform.python_version(), found]))"
)


def run_tests(python: str) -> ET.Element:
    """Return the report of one run of pytest, on the files of all areas."""
    names = " ".join(AREAS.values()).split()
    files = [f"tests/test_{name}.py" for name in names]
    env = os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "HYPOTHESIS_PROFILE": "quick",
    }
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.xml"
        command = [python, "-m", "pytest", "-q", "-n", "2", "-m", "not slow", *files]
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


def run_version(python: str) -> dict[str, Any]:
    """Return what a Python is and has, and the counts of every area."""
    began = time.perf_counter()
    asked = subprocess.run(
        [python, "-c", ASK, *PACKAGES], check=True, capture_output=True, text=True
    )
    version, packages = json.loads(asked.stdout)
    report = run_tests(python)
    areas = {area: count(report, names) for area, names in AREAS.items()}
    for area, found in areas.items():
        print(f"{version}  {area:<12} {describe(found)}", flush=True)
    seconds = round(time.perf_counter() - began)
    return {
        "python": version,
        "packages": packages,
        "areas": areas,
        "seconds": seconds,
    }


def describe(counts: dict[str, Any]) -> str:
    """Return the counts in words."""
    text = f"{counts['passed']} passed"
    text += f", {counts['failed']} failed" if counts["failed"] else ""
    return text + (f", {counts['skipped']} skipped" if counts["skipped"] else "")


def render(rows: list[dict[str, Any]]) -> str:
    """Return the table of all versions that were run."""
    lines = [
        f"| Python | torch | {' | '.join(AREAS)} |",
        "|---" * (2 + len(AREAS)) + "|",
    ]
    for row in rows:
        cells = [describe(row["areas"][area]) for area in AREAS]
        told = [row["python"], row["packages"]["torch"], *cells]
        lines.append(f"| {' | '.join(told)} |")
    return "\n".join(lines)


def read_results() -> list[dict[str, Any]]:
    """Return what is known, one row per version."""
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text("utf-8"))
    return found


def keep(row: dict[str, Any]) -> None:
    """Put the row of a version into the results, in place of an older one."""
    minor = row["python"].rpartition(".")[0]
    known = read_results() if RESULTS.exists() else []
    others = [x for x in known if x["python"].rpartition(".")[0] != minor]
    rows = sorted([*others, row], key=lambda x: int(x["python"].split(".")[1]))
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


def main() -> None:
    """Run the versions that are named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pythons", nargs="*", metavar="PYTHON")
    parser.add_argument("--here", action="store_true", help="this Python only")
    asked = parser.parse_args()
    if asked.here:
        row = run_version(sys.executable)
        sys.exit(any(x["failed"] for x in row["areas"].values()))
    for python in asked.pythons:
        keep(run_version(python))
    fill("docs/install.md", MARK, render(read_results()))


if __name__ == "__main__":
    main()
