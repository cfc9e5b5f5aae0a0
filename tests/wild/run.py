"""Judge the lens on all models of the field, or some, and print the table.

    python tests/wild/run.py                        all: about half an hour
    python tests/wild/run.py --tenth 3              every tenth model
    python tests/wild/run.py --library transformers --only bert
    python tests/wild/run.py --table                write tests/wild/results.json and
                                                    docs/wild.md from the results

One line of JSON for each model is added to the results; a model that is there already is
not run again. Each model runs in a forked process of its own, which may use a minute of
CPU time.
"""

# ruff: noqa: T201

import argparse
import contextlib
import dataclasses
import importlib
import json
import math
import os
import resource
import select
import signal
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import nn

from wild.case import Case
from wild.judge_model import VERDICTS, Verdict, describe, judge
from wild.table import fill_page, save_results

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "build" / "wild.jsonl"
MODULES = ("transformers_models", "timm_models", "other_models")
LIMIT = int(os.environ.get("REGARD_WILD_SECONDS", "60"))  # of CPU time, for one model
PATIENCE = 10  # times as long on the clock: the machine may be busy
OVERTIME = (signal.SIGXCPU, signal.SIGKILL)
BAD = ("wrong", "broke")


def list_cases(library: str = "") -> list[Case]:
    """Return the cases of all modules that are here."""
    cases: list[Case] = []
    for name in MODULES:
        if importlib.util.find_spec(f"wild.{name}"):
            cases += importlib.import_module(f"wild.{name}").list_cases()
    return [x for x in cases if library in ("", x.library)]


def draw_tenth(cases: Iterable[Case], tenth: int) -> list[Case]:
    """Return a tenth of the cases, always the same for the same number."""
    names = [(x, f"{x.library}/{x.name}".encode()) for x in cases]
    return [x for x, name in names if zlib.crc32(name) % 10 == tenth]


# --- one model in one process ---------------------------------------------------------


@dataclasses.dataclass
class Child:
    """A process that judges one case."""

    case: Case
    pid: int
    pipe: int
    start: float
    said: bytes = b""

    def read(self) -> bool:
        """Read what it said; return whether it is done."""
        part = os.read(self.pipe, 1 << 16)
        self.said += part
        return not part

    def end(self, *, late: bool = False) -> Verdict:
        """Wait for it, and return its verdict."""
        if late:
            os.kill(self.pid, signal.SIGKILL)
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        last = (self.said.decode().splitlines() or [""])[-1]
        if last.startswith("{"):
            return Verdict(**json.loads(last))
        stage = last or "the start"
        late = late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in OVERTIME)
        how = f"over {LIMIT} s" if late else f"the process ended ({status})"
        verdict = "broke" if stage in ("watch", "compare") else "not built"
        text = f"{how} during {stage}"
        return Verdict(self.case.name, self.case.library, verdict, text)


def start(case: Case) -> Child:
    """Start to judge one case."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Child(case, pid, reading, time.monotonic())
    try:
        os.close(reading)
        used = math.ceil(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used + LIMIT, used + LIMIT + 1))
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        try:
            found = judge(case, tell=lambda x: os.write(writing, f"{x}\n".encode()))
        except Exception as error:  # noqa: BLE001 (a mistake of the judge is no crash)
            text = f"the judge: {describe(error)}"
            found = Verdict(case.name, case.library, "broke", text)
        line = json.dumps(dataclasses.asdict(found))
        os.write(writing, f"{line}\n".encode())
    finally:
        os._exit(0)


def judge_all(cases: Iterable[Case], jobs: int) -> Iterator[Verdict]:
    """Judge cases, some at a time, and yield their verdicts."""
    waiting, running = list(cases)[::-1], {}
    while waiting or running:
        while waiting and len(running) < jobs:
            child = start(waiting.pop())
            running[child.pipe] = child
        ready, _, _ = select.select(list(running), [], [], 1.0)
        for pipe in list(running):
            child = running[pipe]
            late = time.monotonic() - child.start > PATIENCE * LIMIT
            if late or (pipe in ready and child.read()):
                del running[pipe]
                yield child.end(late=late)


def warm_up(libraries: set[str]) -> None:
    """Import once, for all children, what every one of them needs."""
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    x = torch.zeros(1, 3, 8)
    judge(Case("warm", "torch", lambda: (layer, lambda model: model(x))))
    if "transformers" in libraries:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 (slow)

        importlib.import_module("wild.inputs")
        importlib.import_module("transformers.generation.utils")
        importlib.import_module("transformers.models.llama.modeling_llama")
        assert AutoModelForCausalLM


def import_libraries(cases: Iterable[Case]) -> None:
    """Build a model of each other library, so that no child has to import it."""
    firsts: dict[str, Case] = {}
    for case in cases:
        if case.library != "transformers" and not case.missing:
            firsts.setdefault(case.library, case)
    for case in firsts.values():
        with contextlib.suppress(Exception):  # it is told when the case is judged
            case.build()


def run_cases(cases: Iterable[Case], results: Path, jobs: int) -> list[Verdict]:
    """Judge the cases that are not in the results yet; return the verdicts of all."""
    cases = list(cases)
    results.parent.mkdir(parents=True, exist_ok=True)
    done = {(x.library, x.name): x for x in read_results(results)}
    todo = [x for x in cases if (x.library, x.name) not in done]
    warm_up({x.library for x in todo if not x.missing})
    import_libraries(todo)
    with results.open("a", encoding="utf-8") as file:
        for found in judge_all(todo, jobs):
            line = f"{found.verdict:10} {found.library}/{found.name} {found.text[:150]}"
            print(line, flush=True)
            file.write(json.dumps(dataclasses.asdict(found)) + "\n")
            file.flush()
            done[found.library, found.name] = found
    return [done[x.library, x.name] for x in cases]


def read_results(results: Path) -> list[Verdict]:
    """Return the verdicts in a file."""
    if not results.exists():
        return []
    lines = results.read_text("utf-8").splitlines()
    return [Verdict(**json.loads(x)) for x in lines if x]


# --- the table ------------------------------------------------------------------------


def write_table(results: Path) -> int:
    """Write the page from the results of all cases; return 1 if some were not run."""
    found = {(x.library, x.name): x for x in read_results(results)}
    wanted = [(x.library, x.name) for x in list_cases()]
    missing = [name for name in wanted if name not in found]
    if missing:
        print(f"{len(missing)} cases were not run yet, {missing[0]} for example.")
        return 1
    fill_page(save_results(found[name] for name in wanted))
    return 0


def count(found: list[Verdict]) -> dict[str, Counter[str]]:
    """Return how many models of each library have each verdict."""
    rows: dict[str, Counter[str]] = {}
    for x in found:
        rows.setdefault(x.library, Counter())[x.verdict] += 1
    rows["all"] = sum(rows.values(), Counter())
    return rows


def print_table(found: list[Verdict]) -> None:
    """Print the counts, and what is left."""
    print(f"\n{'':20}", *(f"{x:>10}" for x in VERDICTS))
    for library, row in count(found).items():
        print(f"{library:20}", *(f"{row[x]:10}" for x in VERDICTS))
    for verdict in ("not built", *BAD):
        for x in found:
            if x.verdict == verdict:
                print(f"{verdict}: {x.library}/{x.name}: {x.text}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", default="", help="only this library")
    parser.add_argument("--only", default="", help="only this model, run again")
    parser.add_argument("--tenth", type=int, help="only one tenth, 0 to 9")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--table", action="store_true", help="write results.json and docs/wild.md"
    )
    return parser.parse_args(arguments)


def main() -> int:
    """Run what is asked for; return 1 if anything is wrong or broke."""
    options = parse()
    torch.set_num_threads(1)
    if options.table:
        return write_table(options.results)
    cases = list_cases(options.library)
    if options.only:
        cases = [x for x in cases if x.name == options.only]
        warm_up({x.library for x in cases})
        import_libraries(cases)
        found = list(judge_all(cases, options.jobs))
    else:
        if options.tenth is not None:
            cases = draw_tenth(cases, options.tenth)
        found = run_cases(cases, options.results, options.jobs)
    print_table(found)
    return int(any(x.verdict in BAD for x in found))


if __name__ == "__main__":
    sys.exit(main())
