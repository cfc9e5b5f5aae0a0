"""The process that atheris steers: it hears which code of ours each input reaches.

    python fuzz/steered.py recording found/ corpus/ -max_total_time=30

hunt.py starts it and reads what it prints. A finding is saved and the hunt goes on;
only what ends the process (a crash, an endless wait) is left to libFuzzer to save.

Next: damage.py
"""

from __future__ import annotations

import importlib
import os
import random
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch asks

import atheris  # type: ignore[import-untyped]

OURS = ["regard", "jinja2"]  # templates are programs: which of its code they reach
with atheris.instrument_imports(include=OURS):
    from hunt import Target, judge, limit_memory, save


def steer(name: str, options: list[str]) -> None:
    """Hunt until the time is over; libFuzzer ends the process itself."""
    with atheris.instrument_imports(include=OURS):
        target: Target = importlib.import_module(name).TARGET

    def check(data: bytes) -> None:
        finding = judge(target.check, data)
        if finding is not None:
            save(target, data, finding)

    def damage(data: bytes, longest: int, seed: int) -> bytes:
        rng = random.Random(seed)  # noqa: S311 (chance, not secrets)
        if rng.random() < 0.3:
            changed: bytes = atheris.Mutate(data, longest)
            return changed
        return target.damage(rng, data)[:longest]

    with limit_memory():
        atheris.Setup([sys.argv[0], *options], check, custom_mutator=damage)
        atheris.Fuzz()


if __name__ == "__main__":
    steer(sys.argv[1], sys.argv[2:])
