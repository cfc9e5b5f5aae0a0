"""Edits of attention calls, certified by the input of the layer that mixes heads."""

import pytest
import torch
from intervened_models import FAMILIES, HEADS, open_family, read
from test_patch_heads import change_inputs, record

from regard.ablate import knock_out, locate, patch_heads
from regard.ablate.certify_edit import EditedOutput, Verdict
from regard.errors import OptionError

OUT = torch.randn(2, 4, 5, 3)


def write(out):
    """Return the input of the layer that mixes heads."""
    return out.transpose(1, 2).flatten(2)


def change(heads, factor):
    out = OUT.clone()
    out[:, heads] *= factor
    return out


@pytest.mark.parametrize("factor", [0, 1.01])
@pytest.mark.parametrize(
    ("edited", "chosen", "verdict"),
    [
        ([1], {1}, Verdict.CERTIFIED),
        ([0, 2], {0, 2}, Verdict.CERTIFIED),
        ([2], {1}, Verdict.WRONG),
        ([1, 2], {0, 1}, Verdict.WRONG),
        ([], {1}, Verdict.UNKNOWN),
        ([0, 1, 2, 3], {1}, Verdict.UNKNOWN),  # a norm
        ([1, 2], {1}, Verdict.UNKNOWN),  # the model may scale a head, too
    ],
)
def test_an_edit_is_compared_with_the_heads_of_the_model(
    edited, chosen, verdict, factor
):
    written = EditedOutput("layer", chosen, OUT)
    assert written.judge(write(change(edited, factor))) is verdict


def test_heads_as_rows_are_other_heads():
    packed = OUT.reshape(2, 2, 10, 3)  # two heads that share keys: rows of one
    x = torch.cat([write(OUT[:, :2]), torch.zeros(2, 5, 6)], -1)  # 2 of 4 are removed
    assert EditedOutput("layer", {1}, packed).judge(x) is Verdict.WRONG


@pytest.mark.parametrize("x", [OUT, OUT[0, 0], write(OUT)[:1], torch.zeros(5), OUT[:0]])
def test_inputs_of_other_layers_tell_nothing(x):
    assert EditedOutput("layer", {1}, OUT).judge(x) is Verdict.UNKNOWN


@pytest.fixture
def verdicts(monkeypatch):
    """What each ablation found, by layer."""
    found, before = [], locate.AblationLocator.check

    def check(locator):
        found.append(locator.verifier.certified)
        before(locator)

    monkeypatch.setattr(locate.AblationLocator, "check", check)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_an_ablation_of_the_neighbouring_head_is_detected(name, verdicts, monkeypatch):
    family, model, inputs = open_family(name)
    chosen = [(layer, 1) for layer in family.layers]
    source = record(model, change_inputs(inputs))
    for edit in (
        lambda: knock_out(model, chosen),
        lambda: patch_heads(model, source, chosen),
    ):
        with edit():
            read(model, inputs)
        assert set(verdicts[-1].values()) == {Verdict.CERTIFIED}
        assert set(verdicts[-1]) == set(family.layers)
    mark = locate.mark_heads

    def mark_next(ablation, heads, *rest):
        return mark(ablation, tuple((x + 1) % HEADS for x in heads), *rest)

    monkeypatch.setattr(locate, "mark_heads", mark_next)
    for edit in (
        lambda: knock_out(model, chosen),
        lambda: patch_heads(model, source, chosen),
    ):
        with pytest.raises(OptionError, match="other heads than the chosen"), edit():
            read(model, inputs)


def test_two_interventions_are_not_compared(verdicts):
    family, model, inputs = open_family("llama")
    one, two = [(family.layers[0], 1)], [(family.layers[0], 2)]
    with knock_out(model, one), knock_out(model, two):
        read(model, inputs)
    assert verdicts == [{}, {}]
