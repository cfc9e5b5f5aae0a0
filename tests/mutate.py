"""Prove that the tests can fail: single edits to the source, each of which must be seen.

    python tests/mutate.py                    all of them, hours; a second run goes on
    python tests/mutate.py definition masks   those in files that begin so
    python tests/mutate.py --table            what is known so far, without running any

Edits of the kernels for GPUs are run only in Triton's interpreter:

    TRITON_INTERPRET=1 .venv.triton/bin/python tests/mutate.py kernels stats/kernel_pass

The edits are listed in tests/mutations/*.diff. Each is made in a copy of the source; the
tests of that part then run on the copy until the first failure. A survivor is a defect
of the tests, and so is an edit that is no longer located.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from mutations.edits import Edit, follow_files, read_lists, read_sources
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files",
        nargs="*",
        help="how the files to edit begin, as definition or stats/walk",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=CACHE / "regard" / "mutations.jsonl",
        help="where results are kept (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count(),
        help="edits at once (default: %(default)s)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=300,
        help="seconds for one test before it counts as a loop (default: %(default)s)",
    )
    parser.add_argument(
        "--fresh",
        type=float,
        nargs="?",
        const=1,
        default=0,
        help="run those whose result is known, too; 0.1: a random tenth of them",
    )
    parser.add_argument(
        "--table", action="store_true", help="run nothing, print what is known"
    )
    return parser.parse_args()


def main() -> int:
    """Run the edits that were asked, print the table, return 1 if one was not seen."""
    options = read_arguments()
    os.environ["HYPOTHESIS_PROFILE"] = "quick"
    for stop in (signal.SIGINT, signal.SIGTERM):  # in the background, too
        signal.signal(stop, signal.default_int_handler)
    chosen = tuple(options.files) or ("",)
    edits = [
        x
        for x in follow_files(read_lists(), read_sources())
        if x.file.startswith(chosen)
        and (INTERPRETED or not any(name.startswith("kernels/") for name in x.tests))
    ]
    if not edits:
        sys.exit(f"no edit is in a file that begins with {' or '.join(chosen)}")
    import jax.numpy  # noqa: F401, PLC0415  loaded once, before the processes are forked
    import torch  # noqa: PLC0415
    from mutations.run import Runner, make_none  # noqa: PLC0415

    torch.set_num_threads(1)
    workers = 0 if options.table else options.workers
    runner = Runner(options.results, workers, options.patience)
    console, found = Console(), []
    with Progress(console=console) as progress:
        task = progress.add_task("mutations", total=len(edits) + 1)
        try:
            for result in runner.run(edits, fresh=options.fresh):
                found.append(result)
                progress.advance(task)
                if not result.seen:
                    said = f"{result.file}: {result.name}: {result.seen_by}"
                    console.print(f"not seen: {escape(said)}")
            if any(result.seen for result in found):
                found += runner.run([make_none(found)], fresh=options.fresh)
            progress.advance(task)
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on from here")
    return show(found, edits, runner.reused, console)


def show(found: list, edits: list[Edit], reused: int, console: Console) -> int:
    """Print the table; return 0 if every edit was seen, by tests that pass without one."""
    order = {(edit.file, edit.name): i for i, edit in enumerate(edits)}
    table = Table("edit", "in", "seen by", "seconds")
    for x in sorted(found, key=lambda x: order.get((x.file, x.name), -1)):
        test = escape(x.seen_by.removeprefix("tests/"))
        table.add_row(escape(x.name), x.file, test, f"{x.seconds:.0f}")
    console.print(table)
    run = [x for x in found if x.file]
    seen = sum(x.seen for x in run)
    clean = [x.seen_by for x in found if not x.file] == ["(exit 0)"]
    console.print(
        f"{seen} of {len(edits)} edits were seen by the tests, {reused} reused"
    )
    if len(run) < len(edits):
        console.print(f"{len(edits) - len(run)} have not been run")
    elif not clean:
        console.print("but the tests that saw them do not pass without an edit")
    return 0 if clean and seen == len(edits) else 1


if __name__ == "__main__":
    sys.exit(main())
