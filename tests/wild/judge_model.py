"""Judge the lens on one model: are its records the truth, and is all accounted for?

correct      every record equals the oracle's weights, and nothing is missing
reported     so too, and what is missing or differs has a reason or a note
wrong        a weight differs, or something is missing, and nobody says so
broke        the watched run failed, or its output has other bits
not built    the model does not run here, with or without the lens
"""

import dataclasses
import re
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import regard
from wild.case import Case
from wild.match import Ledger, Problem, find_owner
from wild.must_tell import CHANGED, MUST_TELL
from wild.oracle import Softmax, list_heard, list_softmaxes

VERDICTS = ("correct", "reported", "wrong", "broke", "not built")


@dataclass(frozen=True)
class Verdict:
    """What was found about one case."""

    name: str
    library: str
    verdict: str
    text: str = ""
    softmaxes: int = 0  # of the oracle
    records: int = 0
    seconds: float = 0.0
    remarks: tuple[str, ...] = field(default=())


def be_silent(stage: str) -> None:
    """Tell nobody what is done next."""


def judge(case: Case, *, tell: Callable[[str], Any] = be_silent) -> Verdict:
    """Build one model, run it with and without the lens, and compare.

    tell: is told what is done next: "build", "watch", "oracle" or "compare"
    """
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = examine(case, tell)
    return dataclasses.replace(found, seconds=round(time.perf_counter() - start, 2))


def examine(case: Case, tell: Callable[[str], Any]) -> Verdict:
    """Return the verdict about one case."""

    def say(verdict: str, text: str = "", **more: Any) -> Verdict:
        return Verdict(case.name, case.library, verdict, text, **more)

    if case.missing:
        return say("not built", f"not installed: {', '.join(case.missing)}")
    tell("build")
    try:
        model, run = case.build()
        run = make_repeatable(run)
        plain = run(model)
        heard, again = list_heard(model, run)
    except Exception as error:  # noqa: BLE001 (whatever a model does)
        return say("not built", describe(error))
    if not is_same(plain, again):
        return say("not built", "two runs differ")
    tell("watch")
    try:
        with regard.watch(model) as seen:
            watched = run(model)
        recording = seen.recording
    except Exception as error:  # noqa: BLE001 (this is what is tested)
        return say("broke", describe(error))
    if not is_same(plain, watched):
        return say("broke", "the output has other bits")
    tell("oracle")
    try:
        truth = list_softmaxes(model, run)
    except Exception as error:  # noqa: BLE001 (whatever a model does)
        return say("not built", f"no oracle: {describe(error)}")
    tell("compare")
    counts = {"softmaxes": len(truth), "records": len(recording.records)}
    verdict, text, remarks = weigh(truth, heard, recording)
    unsaid = find_unsaid(f"{case.library}/{case.name}", recording.coverage)
    if unsaid and verdict in ("correct", "reported"):
        verdict, text = "wrong", f"missing: {unsaid}, nothing said"
    return say(verdict, text, **counts, remarks=remarks)


def weigh(
    truth: list[Softmax], heard: Counter[str], recording: Any
) -> tuple[str, str, tuple[str, ...]]:
    """Return the verdict about a recording, why, and what is worth a look."""
    ledger = Ledger(truth, recording)
    problems = [*ledger.compare(), *find_unaccounted(heard, recording.coverage)]
    wrong = [x.text for x in problems if not x.told]
    if wrong:
        return "wrong", join(wrong), ledger.remarks
    told = [x.text for x in problems] + list_reasons(recording.coverage)
    text = join(told) if told or truth else "no softmax"
    return ("reported" if told else "correct"), text, ledger.remarks


def make_repeatable(run):
    """Return the run, from a seed and without gradients."""

    def repeat(model: nn.Module) -> Any:
        torch.manual_seed(1)
        with torch.no_grad():
            return run(model)

    return repeat


def describe(error: BaseException) -> str:
    """Return type and first line of an error."""
    text = re.sub(r"/\S*/(site-packages/)?", "", str(error))  # no paths of a machine
    lines = text.strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def join(texts: list[str]) -> str:
    """Return different texts, the first three of them; numbers are no difference."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for text in texts:
        kinds[re.sub(r"[0-9.e+-]+", "0", text)].append(text)
    first = [
        x[0] if len(x) == 1 else f"{x[0]} (and {len(x) - 1} like it)"
        for x in kinds.values()
    ]
    more = [f"{len(first) - 3} more"] if len(first) > 3 else []
    return "; ".join([*first[:3], *more])


# --- the same bits --------------------------------------------------------------------


def list_tensors(x: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield every tensor of an output: of containers, dataclasses and caches."""
    if isinstance(x, Tensor):
        yield x
        return
    if depth > 8 or x is None or isinstance(x, (str, bytes, int, float, nn.Module)):
        return
    if isinstance(x, dict):
        parts = list(x.values())
    elif isinstance(x, (list, tuple, set)):
        parts = list(x)
    else:
        parts = list(getattr(x, "__dict__", {}).values())
    for part in parts:
        yield from list_tensors(part, depth + 1)


def is_same(a: Any, b: Any) -> bool:
    """Return whether two outputs have the same tensors; NaN equals NaN."""
    a, b = list(list_tensors(a)), list(list_tensors(b))
    return len(a) == len(b) and all(map(is_equal, a, b))


def is_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal; NaN equals NaN."""
    if a.is_nested or b.is_nested:
        return all(map(is_equal, a.unbind(), b.unbind()))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


# --- accounting -----------------------------------------------------------------------


def find_unaccounted(heard: Counter[str], coverage: Any) -> Iterator[Problem]:
    """Yield the modules whose softmaxes are not all counted in the coverage."""
    calls: Counter[str] = Counter()
    for entry in coverage:
        calls[entry.name.split("#")[0]] += entry.calls
    ran: dict[str, int] = defaultdict(int)
    for name, count in heard.items():
        ran[find_owner(name, set(calls))] += count
    for name, count in ran.items():
        if calls[name] != count:
            text = f"missing: {name or 'the model'} ran {count}, {calls[name]} counted"
            yield Problem(text, told=False)


def list_reasons(coverage: Any) -> list[str]:
    """Return what attention the coverage says is not recorded."""
    some = [x for x in coverage if x.reason and getattr(x, "attention", True)]
    return [f"{x.name or 'the model'}: {x.reason}" for x in some]


def find_unsaid(name: str, coverage: Any) -> str:
    """Return what a model is known to do though no softmax shows it, if nobody says so."""
    known = MUST_TELL.get(name, "")
    said = any(x.attention and x.reason for x in coverage)
    if known == CHANGED:
        said |= any("changed after the softmax" in x.note for x in coverage)
    return "" if said else known
