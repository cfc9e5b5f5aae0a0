"""Path patching against hooks written by hand: freeze all heads but the senders."""

from dataclasses import replace

import pytest
import torch
from intervened_models import D, largest, open_family, read
from test_patch_heads import (
    change_inputs,
    read_outputs,
    record,
    replace_by_hand,
)
from test_patch_parts import (
    PATCHED_FAMILIES,
    catch_projections,
    count_groups,
    patch_by_hand,
)

from regard.ablate import patch_heads, record_path
from regard.ablate.active import ACTIVE
from regard.errors import OptionError

SENDERS = ((0, 1), (0, 3))
DEEP = {  # of three layers: senders reach the last one also through the second
    "gpt2": ("transformer.h.{}.attn", {"n_layer": 3}),
    "llama": ("model.layers.{}.self_attn", {"num_hidden_layers": 3}),
}


def walk_by_hand(model, name, family, inputs, other):
    """Return q, k and v of a run in which only the senders are those of the other."""
    theirs, _ = read_outputs(model, family, other)
    own, _ = read_outputs(model, family, inputs)
    for layer, head in SENDERS:
        part = slice(head * D, (head + 1) * D)
        own[layer][..., part] = theirs[layer][..., part]
    heads = own[0].shape[-1] // D
    places = [(i, h, slice(None)) for i in range(len(own)) for h in range(heads)]
    undo = replace_by_hand(model, family, places, own)
    found = catch_projections(model, name, family, inputs)
    undo()
    return found


def check_path(name, family, model, inputs, layer):
    """Patch paths to q, and to k and v, of some heads in a layer."""
    other = change_inputs(inputs)
    values = walk_by_hand(model, name, family, inputs, other)
    before = read(model, inputs)
    path = record_path(model, inputs, record(model, other), SENDERS)
    for parts, heads in (("q", [2]), ("kv", list(range(count_groups(family))))):
        place = (family.layers[layer], parts, heads, slice(None))
        undo = patch_by_hand(model, name, family, place, values)
        expected = read(model, inputs)
        undo()
        with patch_heads(model, path, [(layer, h) for h in heads], parts=parts):
            patched = read(model, inputs)
        assert largest(patched, expected) < 1e-6 * max(1, float(expected.abs().max()))
        assert largest(before, expected) > 1e-5
    assert torch.equal(read(model, inputs), before)
    assert not ACTIVE


@pytest.mark.parametrize("name", PATCHED_FAMILIES)
def test_the_path_to_the_next_layer_is_patched(name):
    check_path(name, *open_family(name), layer=1)


@pytest.mark.parametrize("name", DEEP)
def test_no_path_goes_through_other_heads(name):
    family, _, inputs = open_family(name)
    layer, options = DEEP[name]
    layers = tuple(layer.format(i) for i in range(3))
    family = replace(family, layers=layers, options={**family.options, **options})
    check_path(name, family, family.build(), inputs, layer=2)


def test_what_is_not_possible_is_said():
    _, model, inputs = open_family("llama")
    source = record(model, inputs)
    with pytest.raises(OptionError, match="an empty list of heads"):
        record_path(model, inputs, source, [])
    with pytest.raises(OptionError, match="in training mode"):
        record_path(model.train(), inputs, source, SENDERS)
    with pytest.raises(OptionError, match="expected a recording with records"):
        record_path(model.eval(), inputs, {}, SENDERS)
    assert not ACTIVE
