"""Attribution patching against finite differences, and against a search of all heads."""

import pytest
import torch
from intervened_models import FAMILIES, HEADS, largest, open_family, stir, tokens
from test_patch_heads import change_inputs, record
from test_search_heads import check_undone, measure, take_first

from regard.ablate import (
    attribute_heads,
    average_outputs,
    knock_out,
    patch_heads,
    search_heads,
)
from regard.errors import OptionError
from regard.nn.decoder import CausalTransformer
from regard.plain.config import Config
from regard.recording.head_outputs import compute_outputs
from regard.seen import watch


def make_ours():
    config = Config(vocabulary=60, width=32, layers=3, heads=4, kv_heads=2, context=64)
    return stir(CausalTransformer(config), 0.3).double()


def test_an_attribution_is_the_slope_of_a_patch():
    """The output of a head is moved a little to that of the source, at some tokens."""
    model, text = make_ours(), tokens(8)[:1]
    with torch.no_grad(), watch(model, keep="qkv") as source:
        model(tokens(8).flip(1)[:1])
    found = attribute_heads(model, text, source, measure)
    assert found.before == pytest.approx(float(measure(model(text).detach())[0]))
    for layer in range(3):
        new = compute_outputs(source.recording.layer(layer))
        for head in range(HEADS):
            for rows in (slice(None), [5]):
                ends = []
                for step in (1e-5, -1e-5):
                    move = lambda z, step=step, new=new: z + step * (new - z)  # noqa: E731
                    queries = None if rows == slice(None) else rows
                    with (
                        torch.no_grad(),
                        patch_heads(model, move, [(layer, head)], queries=queries),
                    ):
                        ends.append(float(measure(model(text))[0]))
                slope = (ends[0] - ends[1]) / 2e-5
                estimate = float(found.tokens[layer][head, rows].sum())
                assert estimate == pytest.approx(slope, rel=1e-5, abs=1e-8)
    assert found.changes.shape == (3, HEADS)
    check_undone(model)


def test_an_attribution_is_the_slope_of_a_patch_in_another_intervention():
    model, text = make_ours(), tokens(8)[:1]
    with torch.no_grad(), watch(model, keep="qkv") as source:
        model(tokens(8).flip(1)[:1])
    new = compute_outputs(source.recording.layer(1))

    def move(step):
        with (
            torch.no_grad(),
            patch_heads(model, lambda z: z + step * (new - z), [(1, 1)]),
        ):
            return float(measure(model(text))[0])

    found = []
    for change in (
        patch_heads(model, lambda z: 3 * z, [(1, 1)]),
        patch_heads(model, lambda z: 3 * z, [(0, 2), (2, 0)]),
        knock_out(model, [(1, 1)]),
        knock_out(model, [(1, 1), (0, 3)], keys=[0]),
    ):
        with change:
            estimate = float(
                attribute_heads(model, text, source, measure).changes[1, 1]
            )
            slope = (move(1e-5) - move(-1e-5)) / 2e-5
        assert estimate == pytest.approx(slope, rel=1e-5, abs=1e-8)
        found.append(estimate)
    assert found[2] == 0  # a removed head stays removed
    assert len({f"{x:.4g}" for x in found}) == 4
    check_undone(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_small_patches_are_estimated_well_in_every_family(name):
    """A source close to the run: the estimates are those of a search."""
    _, model, inputs = open_family(name)
    one = take_first(inputs)
    other = {
        key: x if x.dtype == torch.int64 else x + 1e-3 * torch.randn_like(x)
        for key, x in one.items()
    }
    if all(torch.equal(other[x], one[x]) for x in one):  # tokens: weights are moved
        source = record_nearby(model, one)
    else:
        source = record(model, other)
    found = attribute_heads(model, one, source, measure)
    search = search_heads(model, one, source, measure)
    assert found.layers == search.layers
    assert found.correlate(search) > 0.999
    size = float(search.changes.abs().max())
    assert largest(found.changes, search.changes) < 0.05 * size
    check_undone(model)


def record_nearby(model, inputs):
    """Record the same text with embeddings that are moved a little."""
    table = model.get_input_embeddings().weight
    kept = table.detach().clone()
    with torch.no_grad():
        table.add_(1e-3 * torch.randn_like(table))
        seen = record(model, inputs)
        table.copy_(kept)
    return seen


def test_means_and_whole_texts_are_estimated_in_the_right_order():
    _, model, inputs = open_family("llama")
    one, other = take_first(inputs), take_first(change_inputs(inputs))
    source = record(model, other)
    search = search_heads(model, one, source, measure)
    found = attribute_heads(model, one, source, measure)
    assert found.correlate(search) > 0.5
    means = average_outputs(source)
    by_mean = attribute_heads(model, one, means, measure)
    assert by_mean.correlate(search_heads(model, one, means, measure)) > 0.5
    assert len(str(found).splitlines()) == 2 + min(10, 2 * HEADS)


def test_what_cannot_be_attributed_is_refused():
    model, text = make_ours(), tokens(8)[:1]
    with pytest.raises(OptionError, match="expected a recording, or average_outputs"):
        attribute_heads(model, text, lambda z: z, measure)
    with torch.no_grad(), watch(model, keep="qkv") as source:
        model(text)
    with pytest.raises(OptionError, match="expected a number for each"):
        attribute_heads(model, text, source, lambda logits: logits.mean())
    assert not any(x.grad is not None for x in model.parameters())


def test_a_source_of_another_model_is_refused():
    model, text = make_ours(), tokens(8)[:1]
    for heads, said in ((2, "its record 2 of 16"), (8, "its record 8 of 4")):
        config = Config(vocabulary=60, width=32, layers=3, heads=heads, context=64)
        other = CausalTransformer(config)
        with torch.no_grad(), watch(other, keep="qkv") as source:
            other(text)
        for given in (source, average_outputs(source)):
            with pytest.raises(OptionError, match=f"4 heads of 8 numbers, and {said}"):
                attribute_heads(model, text, given, measure)
