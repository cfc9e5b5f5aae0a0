"""Examine devices: run every check on every device, and contain what fails.

    report = examine_devices()              the CPU, and the accelerator if there is one
    report = examine_devices(["cuda:1"])

A check is a function of a device that yields a Trial for each thing that it tried. To
add one, append it to CHECKS. An exception in a check becomes a broken promise in the
report, and the other checks go on.

Next: device_arithmetic.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from regard.doctor.device_arithmetic import check_arithmetic
from regard.doctor.engine_results import check_engine
from regard.doctor.examined import Examination, Trial, write_error
from regard.doctor.memory_and_time import check_memory, check_times
from regard.doctor.statistics_results import check_recorded_statistics
from regard.doctor.watched_families import check_families
from regard.doctor.watched_generations import check_generations
from regard.errors import OptionError

DeviceCheck = Callable[[torch.device], Iterator[Trial]]

CHECKS: dict[str, DeviceCheck] = {  # the promise: its check
    "the device computes in the precision of its dtypes": check_arithmetic,
    "the engine agrees with the definition": check_engine,
    "watched models are unchanged, and their weights are right": check_families,
    "generations are recorded and edited as they run": check_generations,
    "statistics agree with the definition": check_recorded_statistics,
    "memory is linear in the sequence length": check_memory,
    "the cost is close to that of the bare kernel": check_times,
}


def examine_devices(
    devices: Sequence[str] | None = None,
    *,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Examination:
    """Check the promises of the README on some devices, and return a report.

    devices: as torch names them; by default, the CPU and the accelerator of torch
    progress: called with the number of checks that are done, and of all
    """
    start = time.monotonic()
    names = find_devices() if devices is None else [read_device(x) for x in devices]
    trials: list[Trial] = []
    runs = [(name, promise) for name in names for promise in CHECKS]
    for done, (name, promise) in enumerate(runs):
        progress(done, len(runs))
        trials += run_check(promise, CHECKS[promise], torch.device(name))
    return Examination(tuple(trials), time.monotonic() - start)


def run_check(
    promise: str, check: DeviceCheck, device: torch.device
) -> Iterator[Trial]:
    """Yield the results of one check; an exception is a result, too."""
    try:
        with torch.random.fork_rng(devices=[]):
            yield from check(device)
    except Exception as error:  # noqa: BLE001 (anything may fail on an unknown device)
        trial = Trial(promise, "the check itself", str(device))
        yield trial.end("broken", says=write_error(error))


def find_devices() -> list[str]:
    """Return the CPU, and the accelerator that torch finds."""
    found = torch.accelerator.is_available()
    return ["cpu", torch.accelerator.current_accelerator().type] if found else ["cpu"]


def read_device(name: str) -> str:
    """Return a device's name; raise OptionError if torch cannot use it."""
    try:
        torch.ones(1, device=name).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        found = " and ".join(find_devices())
        reason = str(error).split("\n")[0]
        raise OptionError(
            f"device={name!r} cannot be used: {reason}. torch finds {found} here."
        ) from error
    return name
