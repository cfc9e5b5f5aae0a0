"""Check an attention implementation: run every case and collect the verdicts.

    report = regard.check(my_attention)
    print(report)                 what passed, what failed and how, what was not asked
    report.ok                     for CI

A verdict is one of four: passed; failed, with the smallest inputs that show it; not
asked, if the convention cannot express the case; waiting, if a simpler case failed.

Next: report.py
"""

from __future__ import annotations

import inspect
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from regard.arguments import suggest
from regard.errors import OptionError
from regard.judge.basic_cases import BASIC
from regard.judge.call_cases import CALLS
from regard.judge.case import GATES, LEVELS, Case, Examiner
from regard.judge.convention import (
    Attention,
    Convention,
    describe_convention,
    read_convention,
    read_names,
)
from regard.judge.difference import Difference
from regard.judge.inputs import CallFailedError, NotAskedError
from regard.judge.kernel_cases import KERNEL
from regard.judge.mask_cases import MASKING
from regard.judge.observe_convention import observe_convention
from regard.judge.option_cases import OPTIONS
from regard.judge.precision import describe_tolerances, settle_precision
from regard.judge.report import Report, Status, Verdict
from regard.judge.search import Search, read_like, read_seconds, shrink, write_repeated
from regard.judge.size_cases import SIZES
from regard.judge.storage_cases import STORED
from regard.judge.subject import Subject
from regard.judge.suggest_option import suggest_declaration, suggest_option
from regard.judge.value_cases import VALUES

CASES: tuple[Case, ...] = (
    *STORED, *BASIC, *OPTIONS, *MASKING, *KERNEL, *SIZES, *VALUES, *CALLS
)  # fmt: skip
HINTS = 8  # failed cases for which other conventions are tried
HANGS = 3  # after this many timeouts the remaining cases are skipped


@suggest
def check(
    fn: Attention,
    convention: Convention | None = None,
    *,
    level: str = "complete",
    seed: int = 0,
    limit: float = 30,
    search: str | float = 0,
    like: str = "",
    start: int = 0,
) -> Report:
    """Run all cases of a level on an attention and return the report.

    >>> import numpy as np, regard
    >>> def forgetful(q, k, v):
    ...     scores = q @ k.swapaxes(-1, -2)  # no scale
    ...     weights = np.exp(scores - scores.max(-1, keepdims=True))
    ...     return weights / weights.sum(-1, keepdims=True) @ v
    >>> [failed.name for failed in regard.check(forgetful, level="basic").failed]
    ['scale_is_one_over_root_width']

    fn: a function of NumPy, PyTorch or JAX arrays, or a module
    convention: how fn is called; read from its signature by default
    level: "basic" (tutorial code), "complete" (library code), or "kernel"
    limit: seconds allowed for each call
    search: how long to draw random calls, "5m"; by default a few hundred
    like: sizes to prefer in the search, "q=8x32x1024x128,kv=8"
    start: the number of the first call, to continue a search
    """
    check_subject(fn, convention, seed)
    words = read_convention(fn) if convention is None else convention
    searched = Search(
        read_seconds(search), read_like(like) if like else None, seed, start
    )
    subject = Subject(fn, words, limit=limit)
    subject.library.check_device(words.device)
    cases = order_cases(level, words.storage.kind if words.storage else "")
    subject = observe_convention(subject)
    cases = [
        replace(x, ask=searched.ask) if x.name == "random_calls" else x for x in cases
    ]
    note = settle_precision(subject)
    verdicts = suggest_options(subject, judge_all(subject, cases, seed), seed)
    name = str(getattr(fn, "__name__", type(fn).__name__))
    judged = describe_tolerances(subject)
    said = describe_convention(subject.convention)
    unread = read_names(fn) is None and not words.arguments()
    report = Report(name, said, level, tuple(verdicts), note, judged)
    return replace(report, searched=str(searched), unread=unread)


def check_subject(fn: Any, convention: Any, seed: Any) -> None:
    """Raise OptionError unless a function, its convention and a seed are given."""
    if inspect.isclass(fn):
        raise OptionError(
            f"{fn.__name__} is a class, expected a function or a module instance. "
            f"Write check({fn.__name__}(…))."
        )
    if convention is not None and not isinstance(convention, Convention):
        raise OptionError(
            f"convention={convention!r:.60}, expected a Convention. Write "
            'convention=regard.judge.Convention(layout="bnhd").'
        )
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise OptionError(f"seed={seed!r}, expected an integer. Write seed=0.")


def order_cases(level: str, storage: str = "") -> list[Case]:
    """Return the cases of a level and the levels below, in dependency order.

    With a storage, those about it come first, and all others depend on them.
    """
    if level not in LEVELS:
        raise OptionError(f'level="{level}", expected one of {", ".join(LEVELS)}.')
    known = LEVELS[: LEVELS.index(level) + 1]
    left = [x for x in CASES if x.level in known and x.storage in ("", storage)]
    first = tuple(x.name for x in left if x.storage)
    left = [x if x.storage or x.name in GATES else await_all(x, first) for x in left]
    sorted_cases: list[Case] = []
    while left:
        waiting = {case.name for case in left}
        ready = next(case for case in left if not waiting & set(case.after))
        sorted_cases.append(ready)
        left.remove(ready)
    return sorted_cases


def await_all(case: Case, names: tuple[str, ...]) -> Case:
    """Return a case that depends on further cases."""
    return replace(case, after=(*case.after, *names))


def judge_all(subject: Subject, cases: Sequence[Case], seed: int = 0) -> list[Verdict]:
    """Return the verdict on every case."""
    found: dict[str, Verdict] = {}
    for case in cases:
        hangs = sum("did not answer" in x.says for x in found.values())
        awaited = [n for n in case.after if n in found and found[n].holds_up]
        if hangs >= HANGS:
            why = f"it did not answer {HANGS} times, so the rest was not asked"
            found[case.name] = Verdict(case, "not asked", why)
        elif awaited:
            first = found[awaited[0]]
            root = first.says if first.status == "waiting" else awaited[0]
            found[case.name] = Verdict(case, "waiting", root)
        else:
            found[case.name] = judge(subject, case, seed)
        if found[case.name].holds_up:
            subject.doubted.add(case.name)
        wrong = found[case.name].difference
        if wrong is not None and wrong.call is not None:
            least = shrink(Examiner(subject, np.random.default_rng(seed)), wrong)
            least = replace(least, code=write_repeated(subject, least.call))
            verdict = replace(found[case.name], says=least.says, difference=least)
            found[case.name] = verdict
    return list(found.values())


def suggest_options(
    subject: Subject, verdicts: Sequence[Verdict], seed: int = 0
) -> list[Verdict]:
    """Return the verdicts, with the option that would make a failed case pass."""
    cases = {case.name: case for case in CASES}
    left = HINTS

    def ask(other: Subject, case: Case) -> Status:
        return judge(other, case, seed).status

    found = []
    for each in verdicts:
        hint = ""
        if each.status == "failed" and left and "did not answer" not in each.says:
            hint = suggest_option(subject, each.case, cases, ask)
            left -= 1
        elif each.status in ("passed", "not asked"):
            hint = suggest_declaration(subject, each.case, cases, ask)
        found.append(replace(each, hint=hint))
    return found


def judge(subject: Subject, case: Case, seed: int = 0) -> Verdict:
    """Run one case; its random inputs depend only on its name and the seed."""
    rng = np.random.default_rng([seed, zlib.crc32(case.name.encode())])
    began = time.perf_counter()
    status: Status = "passed"
    says, difference = "", None
    try:
        difference = case.ask(Examiner(subject, rng))
    except NotAskedError as reason:
        status, says = "not asked", str(reason)
    except CallFailedError as trouble:
        difference = Difference(str(trouble))
    except Exception as error:  # noqa: BLE001 (one case must not stop the others)
        text = " ".join(str(error).split())[:200]
        difference = Difference(f"its answer led to {type(error).__name__}: {text}")
    if difference is not None:
        status, says = "failed", difference.says
    return Verdict(case, status, says, difference, time.perf_counter() - began)


def load_attention(place: str) -> Any:
    """Import the object "module:name"; raise an OptionError if that fails."""
    module, _, name = place.partition(":")
    if not name:
        raise OptionError(f'"{place}", expected module:function, as in my_code:attend.')
    sys.path.insert(0, "")  # the current directory
    try:
        found = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # noqa: BLE001 (a module may raise anything)
        text = " ".join(str(error).split())
        raise OptionError(
            f"{place} cannot be loaded, {type(error).__name__}: {text}"
        ) from None
    finally:
        sys.path.remove("")
    if inspect.isclass(found):
        raise OptionError(
            f"{place} is a class, expected a function or a module instance: write "
            f"mine = {name}(…) in {module}, and check {module}:mine."
        )
    return found
