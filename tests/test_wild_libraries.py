"""The cases of tests/wild that need other libraries: their lists, and their weights."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from wild import other_models, timm_models
from wild.must_tell import MUST_TELL
from wild.stir import seeded

TIMM, OTHER = list(timm_models.list_cases()), list(other_models.list_cases())
LIST = Path(__file__).parent / "wild" / "requirements.txt"


def test_there_are_enough_cases():
    assert len(TIMM) >= 40
    assert len([x for x in OTHER if x.needs]) >= 60


def test_a_name_is_used_once():
    names = Counter(f"{x.library}/{x.name}" for x in (*TIMM, *OTHER))
    assert [name for name, n in names.items() if n > 1] == []
    assert names.keys() >= MUST_TELL.keys()
    assert [name for name in names if " " in name] == []


def test_every_library_is_pinned_and_torch_is_not_among_them():
    lines = [x for x in LIST.read_text("utf-8").splitlines() if x and x[0] != "#"]
    assert [
        x for x in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][a-z0-9.]*", x)
    ] == []
    names = {x.partition("==")[0] for x in lines}
    assert len(names) == len(lines)
    assert not names & {"torch", "transformers", "numpy", "regard"}


def make_network():
    """A linear map of 1e3, then a batch norm, then another."""
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
    nn.init.constant_(model[0].weight, 1e3)
    x = torch.randn(64, 16)
    return model, lambda model: model(x)


def test_weights_come_from_a_seed_and_leave_the_generator():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    (one, _), (two, _) = seeded(make_network), seeded(make_network)
    assert torch.equal(torch.rand(3), expected)
    assert not one.training
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.std() > 0.05  # also biases, which start as zeros or small


def test_a_batch_norm_knows_what_it_normalises():
    model, run = seeded(make_network)
    with torch.no_grad():
        first = run(model[:2])
    # weight and bias of the norm are near 1 and 0, so its output is near a normal one
    assert first.std(0) == pytest.approx(torch.ones(16), abs=0.4)
    assert first.mean(0) == pytest.approx(torch.zeros(16), abs=0.4)


@pytest.mark.parametrize("name", ["gpt2", "padded", "generation"])
def test_a_case_runs_the_same_twice(name):
    (case,) = (x for x in OTHER if (x.library, x.name) == ("regard", name))
    with torch.no_grad():
        outputs = [run(model) for model, run in (case.build(), case.build())]
    assert torch.equal(*outputs)
    assert outputs[0].double().std() > 0.1
