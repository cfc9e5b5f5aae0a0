"""What an examination found: trials, and a report of them that can be shared.

    verdict     holds     the promise was kept
                broken    it was not; `says` names the fault if it is a known one
                slow      the results are right, but took longer than expected
                not run   it could not be tried here; `says` is the reason

A report contains versions, the kind of the processor, the names of the devices and the
results. It contains no names of people or computers, no paths and no addresses; paths
are removed from the messages of exceptions.

Next: examine.py
"""

from __future__ import annotations

import json
import platform
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import torch

Outcome = Literal["holds", "broken", "slow", "not run"]
LIBRARIES = ("regard", "torch", "transformers", "triton", "numpy")
PATH = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?(?:[\\/][^\\/\s'\":,;)]+)+[\\/]?")
LONGEST = 200  # characters of an exception's message


@dataclass(frozen=True)
class Trial:
    """One promise, tried once on one device."""

    promise: str  # "watched models compute the same bits"
    subject: str  # what it was tried on: "GPT2LMHeadModel"
    device: str
    verdict: Outcome = "not run"
    measured: str = ""
    expected: str = ""
    says: str = ""  # the fault, or the reason why it was not run

    def end(
        self, verdict: Outcome, measured: str = "", expected: str = "", says: str = ""
    ) -> Trial:
        """Return the trial with its outcome."""
        return replace(
            self, verdict=verdict, measured=measured, expected=expected, says=says
        )


def judge_error(trial: Trial, error: float, allowed: float, says: str = "") -> Trial:
    """Return a trial that holds if an error is at most what is allowed."""
    return trial.end(
        "holds" if error <= allowed else "broken",
        f"error {error:.1e}",
        f"at most {allowed:.0e}",
        says,
    )


@dataclass(frozen=True)
class Examination:
    """The trials on all devices, and how long they took."""

    trials: tuple[Trial, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether no promise was broken."""
        return not any(x.verdict == "broken" for x in self.trials)

    def list_devices(self) -> list[str]:
        """Return the devices, in the order in which they were examined."""
        return list(dict.fromkeys(x.device for x in self.trials))

    def __str__(self) -> str:
        lines, last = [], [""]
        for device in self.list_devices():
            own = [x for x in self.trials if x.device == device]
            lines += [f"{device} ({name_device(device)})", *write_trials(own)]
            counts = Counter(x.verdict for x in own)
            said = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
            last.append(f"{device}: {said} ({len(own)} in all)")
        return "\n".join([*lines, *last])

    def to_json(self) -> str:
        """Return the report for sharing, as JSON without private data."""
        found = {
            "versions": read_versions(),
            "python": platform.python_version(),
            "system": platform.system(),
            "processor": platform.machine(),
            "devices": {x: name_device(x) for x in self.list_devices()},
            "seconds": round(self.seconds, 1),
            "results": [asdict(x) for x in self.trials],
        }
        return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def write_trials(trials: list[Trial]) -> Iterator[str]:
    """Yield the results as lines of text, promise by promise."""
    width = max((len(x.subject) for x in trials), default=0)
    for promise in dict.fromkeys(x.promise for x in trials):
        yield f"  {promise}"
        for each in (x for x in trials if x.promise == promise):
            line = f"    {each.verdict:7}  {each.subject:{width}}  {each.measured}"
            line += f" (expected {each.expected})" if each.expected else ""
            yield line.rstrip()
            if each.says:
                yield f"             {each.says}"


def name_device(device: str) -> str:
    """Return what the vendor calls a device."""
    if torch.device(device).type == "cpu":
        return platform.machine()
    module = torch.get_device_module(device)
    ask = getattr(module, "get_device_name", None)
    return str(ask(torch.device(device))) if ask else "no name"


def read_versions() -> dict[str, str]:
    """Return the versions of the libraries that are installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def write_error(error: Exception) -> str:
    """Return an exception as one line without paths.

    >>> write_error(ValueError("cannot open /home/ada/weights.gguf"))
    'ValueError: cannot open weights.gguf'
    """
    text = " ".join(str(error).split())
    text = PATH.sub(lambda found: re.split(r"[\\/]", found[0].rstrip("\\/"))[-1], text)
    return f"{type(error).__name__}: {text[:LONGEST]}"
