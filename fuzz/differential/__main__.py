"""Compare every fast path with the definition on random hostile calls.

    python fuzz/differential --seconds 60         new seeds every time
    python fuzz/differential --seed 1234567       one case again, with its traceback

Each case is a seed. A finding prints its seed, the call and what is wrong; the exit
code is then 1. The seeds in SEEDS were findings once: the tests ask them again.

Next: draw.py
"""

from __future__ import annotations

import argparse
import collections
import secrets
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from draw import HostileCall, draw_call
from questions import QUESTIONS, Question

from regard.errors import RegardError

MOST = 20  # findings, then a run ends


def find(question: Question, call: HostileCall, seed: int) -> str | None:
    """Return what is wrong with the call of a seed; None if it is right."""
    try:
        question(call, np.random.default_rng([seed, 1]))
    except RegardError as refused:
        return f"refused a call within the contract: {refused}"
    except Exception as error:  # noqa: BLE001 (whatever it is, it is a finding)
        return f"{type(error).__name__}: {str(error)[:400]}"
    return None


def hunt(seconds: float, console: Console) -> int:
    """Ask all questions of new seeds for some time; return how many were wrong."""
    end, first = time.monotonic() + seconds, secrets.randbelow(2**40)
    asked: collections.Counter[str] = collections.Counter()
    cases, wrong = 0, 0
    shown = time.monotonic()
    while time.monotonic() < end and wrong < MOST:
        seed, cases = first + cases, cases + 1
        call = draw_call(np.random.default_rng(seed))
        for question in QUESTIONS:
            name = question.__name__.removeprefix("ask_")
            told = find(question, call, seed)
            asked[name] += 1
            if told:
                wrong += 1
                console.print(
                    f"seed {seed}, {name}: {told}\n  {call}",
                    markup=False,
                    soft_wrap=True,
                )
        if time.monotonic() - shown > 60:
            shown = time.monotonic()
            console.print(f"… {cases:,} calls, {wrong} findings", highlight=False)
    console.print(
        f"differential: {cases:,} calls from seed {first}, "
        f"{sum(asked.values()):,} questions, {wrong} findings",
        highlight=False,
    )
    return wrong


def main() -> None:
    """Read the command line."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int)
    given = parser.parse_args()
    console = Console()
    if given.seed is None:
        sys.exit(hunt(given.seconds, console) > 0)
    call = draw_call(np.random.default_rng(given.seed))
    console.print(call, markup=False)
    for question in QUESTIONS:
        try:
            applies = question(call, np.random.default_rng([given.seed, 1]))
            console.print(f"{question.__name__}: {'right' if applies else 'not asked'}")
        except Exception:  # noqa: BLE001
            console.print(question.__name__, markup=False)
            traceback.print_exc()


if __name__ == "__main__":
    main()
