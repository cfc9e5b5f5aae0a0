"""The differential fuzzer of fuzz/differential: some seeds, and proof that it can fail.

CI runs it for a minute with new seeds after the tests; see `python fuzz/differential`.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.engine import attend

FOLDER = Path(__file__).parent.parent / "fuzz/differential"
sys.path.append(str(FOLDER))

import questions  # noqa: E402
from draw import draw_call  # noqa: E402

QUESTIONS = {x.__name__.removeprefix("ask_"): x for x in questions.QUESTIONS}


def ask(name, seed):
    call = draw_call(np.random.default_rng(seed))
    return QUESTIONS[name](call, np.random.default_rng([seed, 1]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUESTIONS)
def test_fast_paths_agree_with_the_definition(name):
    seeds = range(200 if name in ("compiled", "traced") else 60)
    assert sum(ask(name, seed) for seed in seeds) >= 2  # of those that apply


def forget_the_sign(q, k, v, mask=None, *, scale=None, **options):
    return attend(q, k, v, mask, scale=scale and abs(scale), **options)


def round_lse(*arrays, **options):
    done = attend(*arrays, **options)
    return replace(done, lse=done.lse.bfloat16().float())


def drop_a_row(*arrays, **options):
    done = attend(*arrays, **options)
    out = done.out.clone()
    out[..., 7:8, :] = 0
    return replace(done, out=out)


def hide_nan(*arrays, **options):
    done = attend(*arrays, **options)
    return replace(done, out=done.out.nan_to_num(0), lse=done.lse.nan_to_num(0))


def detach_lse(*arrays, **options):
    done = attend(*arrays, **options)
    return replace(done, lse=done.lse.detach())


class Forgetful(torch.autograd.Function):
    """The identity, whose gradient cannot be differentiated."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.detach()


def lose_curvature(*arrays, **options):
    done = attend(*arrays, **options)
    return replace(done, out=Forgetful.apply(done.out))


FAULTS = {
    forget_the_sign: "values",
    round_lse: "values",
    drop_a_row: "autocast",
    hide_nan: "values",
    detach_lse: "gradients",
    lose_curvature: "curvature",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_fuzzer_finds_faults(fault, monkeypatch):
    monkeypatch.setattr(questions, "attend", fault)
    with pytest.raises(questions.WrongNumberError):
        for seed in range(200):
            ask(FAULTS[fault], seed)


@pytest.mark.filterwarnings("ignore")
def test_the_fuzzer_finds_gradients_of_other_numbers(monkeypatch):
    versions = sys.modules["regard.engine.in_place"].Versions
    monkeypatch.setattr(versions, "check", lambda _: None)
    with pytest.raises(questions.WrongNumberError, match="after a change in place"):
        for seed in range(200):
            ask("in_place", seed)


def test_a_run_prints_its_seed_and_what_it_asked():
    command = [sys.executable, "-W", "ignore", str(FOLDER), "--seconds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "calls from seed" in done.stdout.splitlines()[-1]
    assert done.stdout.splitlines()[-1].endswith(" 0 findings")
