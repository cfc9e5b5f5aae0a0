"""Every head patched in turn, against patches that are made one at a time."""

import math
import re
from dataclasses import replace

import pytest
import torch
from intervened_models import FAMILIES, HEADS, largest, open_family, read, stir, tokens
from test_patch_heads import change_inputs, record
from torch import nn
from transformers import DynamicCache

from regard.ablate import (
    attribute_heads,
    average_outputs,
    average_searches,
    patch_heads,
    record_path,
    search_heads,
)
from regard.ablate.ablation import Tokens
from regard.ablate.active import ACTIVE
from regard.ablate.direct_logits import attribute_logits
from regard.ablate.search_heads import HeadSearch
from regard.ablate.skip_prefix import Prefix, find_done
from regard.errors import OptionError
from regard.nn.decoder import CausalTransformer
from regard.plain.config import Config
from regard.seen import watch


def measure(logits):
    flat = logits.flatten(1)
    return flat[:, 1] - flat[:, 0]


def measure_last(logits):
    return logits[:, -1, 5] - logits[:, -1, 7]


def take_first(inputs):
    return {name: x[:1] for name, x in inputs.items()}


def check_undone(model):
    assert not ACTIVE
    assert not [x for x in model.modules() if "forward" in vars(x)]
    assert not [x for x in model.modules() if x._forward_hooks or x._forward_pre_hooks]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_search_is_a_patch_of_each_head(name):
    family, model, inputs = open_family(name)
    one, other = take_first(inputs), take_first(change_inputs(inputs))
    source = record(model, other)
    done = []
    found = search_heads(
        model, one, source, measure, batch=3, progress=lambda *x: done.append(x)
    )
    assert found.skipped
    assert found.layers == family.layers
    assert found.before == float(measure(read(model, one))[0])
    expected = torch.zeros(len(family.layers), HEADS).double()
    for i in range(len(family.layers)):
        for head in range(HEADS):
            with patch_heads(model, source, [(i, head)]):
                expected[i, head] = float(measure(read(model, one))[0])
    assert largest(found.values, expected) < 1e-5
    assert found.changes.abs().max() > 1e-3
    assert done[-1] == (expected.numel(), expected.numel())
    assert [x for x, _ in done] == sorted({x for x, _ in done})
    check_undone(model)


def test_a_search_of_our_own_model_with_means():
    config = Config(vocabulary=60, width=32, layers=3, heads=4, kv_heads=2, context=64)
    model = stir(CausalTransformer(config), 0.3).double()
    text = tokens(8)[:1]
    with torch.no_grad(), watch(model, keep="qkv") as source:
        model(tokens(8))
    means = average_outputs(source)
    found = search_heads(model, text, means, measure)
    assert found.skipped
    for i in range(3):
        for head in range(HEADS):
            with torch.no_grad(), patch_heads(model, means, [(i, head)]):
                value = float(measure(model(text))[0])
            assert float(found.values[i, head]) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("name", ["ours", "llama", "gpt2"])
def test_a_search_may_compute_the_last_logits_only(name):
    if name == "ours":
        config = Config(
            vocabulary=60, width=32, layers=3, heads=4, kv_heads=2, context=64
        )
        model = stir(CausalTransformer(config), 0.3).eval()
        first, (text, other) = "tokens", tokens(8)[:, None]
    else:
        _, model, inputs = open_family(name)
        first, (text, other) = "input_ids", inputs["input_ids"][:, None]
    with torch.no_grad(), watch(model, keep="qkv") as source:
        model(other)

    whole = search_heads(model, text, source, measure_last)
    brief = {first: text, "logits_to_keep": 1}
    found = search_heads(model, brief, source, measure_last)
    assert largest(found.values, whole.values) < 1e-5
    assert found.changes.abs().max() > 1e-3
    assert found.skipped


@pytest.mark.parametrize("kept", [1, 3, 8])
def test_our_decoder_keeps_the_last_logits(kept):
    config = Config(vocabulary=60, width=32, layers=1, heads=4, kv_heads=2, context=64)
    model = stir(CausalTransformer(config), 0.3).double()
    with torch.no_grad():
        whole, last = model(tokens(8)), model(tokens(8), logits_to_keep=kept)
    assert last.shape == (2, kept, 60)
    assert largest(last, whole[:, -kept:]) < 1e-12


class Remembers(nn.Module):
    """A block after which a layer behaves in another way: it counts its calls."""

    def __init__(self, inside):
        super().__init__()
        self.inside, self.calls = inside, 0

    def forward(self, x, *args, **named):
        self.calls += 1
        return self.inside(x, *args, **named)


def test_a_model_that_cannot_skip_is_run_as_a_whole():
    config = Config(vocabulary=60, width=32, layers=2, heads=4, kv_heads=2, context=64)
    model = stir(CausalTransformer(config), 0.3)
    first = model.blocks[0] = Remembers(model.blocks[0])

    def disturb(_module, args):
        new = args[0]
        if first.calls == disturb.before:  # the first block was skipped
            new = new + torch.linspace(0, 9, new.shape[-1])
        disturb.before = first.calls
        return (new, *args[1:])

    disturb.before = 0
    text, other = tokens(8)[:1], tokens(8)[1:]
    with torch.no_grad(), watch(model, keep="qkv") as source:
        model(other)
    hook = model.blocks[1].register_forward_pre_hook(disturb)
    found = search_heads(model, text, source, measure)
    assert not found.skipped
    with torch.no_grad(), patch_heads(model, source, [(1, 2)]):
        value = float(measure(model(text))[0])
    assert float(found.values[1, 2]) == pytest.approx(value, abs=1e-5)
    hook.remove()
    check_undone(model)


def test_only_what_ends_before_a_layer_is_skipped():
    events = [("enter", ""), ("enter", "embed"), ("leave", "embed")]
    for i in range(2):
        events += [("enter", f"h.{i}"), ("enter", f"h.{i}.norm")]
        events += [("leave", f"h.{i}.norm"), ("enter", f"h.{i}.attn")]
        events += [("enter", "shared"), ("leave", "shared")]
        events += [("leave", f"h.{i}.attn"), ("leave", f"h.{i}")]
    events.append(("leave", ""))
    assert sorted(find_done(events, "h.0.attn")) == ["embed", "h.0.norm"]
    assert sorted(find_done(events, "h.1.attn")) == ["embed", "h.0", "h.1.norm"]
    assert sorted(find_done(events, "h.1.attn#2")) == ["embed", "h.0", "h.1.norm"]


def test_outputs_of_skipped_modules_are_copies():
    _, model, inputs = open_family("llama")
    one = take_first(inputs)
    layer = FAMILIES["llama"].layers[1]
    before = read(model, one)
    prefix = Prefix(model, lambda model: read(model, one), [layer])

    def spoil(_module, args, named):
        (args[0] if args else named["hidden_states"]).mul_(2)

    with prefix.skip(layer, 1):
        hook = model.model.layers[1].register_forward_pre_hook(spoil, with_kwargs=True)
        read(model, one)
        hook.remove()
        assert torch.equal(read(model, one), before)
    assert torch.equal(read(model, one), before)
    check_undone(model)


def test_what_cannot_be_searched_is_refused():
    _, model, inputs = open_family("llama")
    source = record(model, take_first(inputs))
    with pytest.raises(OptionError, match=re.escape("input_ids has shape (2, 10)")):
        search_heads(model, inputs, source, measure)
    one = take_first(inputs)
    with pytest.raises(OptionError, match=r"measure returned \(\), expected a number"):
        search_heads(model, one, source, lambda logits: logits.sum())
    with pytest.raises(OptionError, match="measure returned float"):
        search_heads(model, one, source, lambda logits: float(logits.sum()))
    four = {name: x.repeat(2, 1) for name, x in inputs.items()}  # as many as heads
    with pytest.raises(OptionError, match="source has 4 sequences, expected one"):
        search_heads(model, one, record(model, four), measure)
    for batch in (0, -1):
        with pytest.raises(OptionError, match=f"batch={batch}, expected"):
            search_heads(model, one, source, measure, batch=batch)
    with pytest.raises(OptionError, match="the source has layers 0 to 1"):
        search_heads(model, one, source, measure, layers=[7])
    with pytest.raises(OptionError, match="the measure is NaN"):
        search_heads(model, one, source, lambda logits: measure(logits) * float("nan"))
    model.train()
    with pytest.raises(OptionError, match="in training mode"):
        search_heads(model, one, source, measure)
    check_undone(model)


def test_a_cache_that_several_runs_would_extend_is_refused():
    _, model, inputs = open_family("llama")
    one, source = take_first(inputs), record(model, take_first(inputs))
    cache = DynamicCache()
    read(model, one, past_key_values=cache)
    length, more = cache.get_seq_length(), {**one, "past_key_values": cache}
    for run in (
        lambda: search_heads(model, more, source, measure),
        lambda: record_path(model, more, source, [(0, 1)]),
        lambda: attribute_logits(model, more, 5),
    ):
        with pytest.raises(OptionError, match="past_key_values is a cache"):
            run()
    assert cache.get_seq_length() == length
    search_heads(model, {**one, "use_cache": True}, source, measure)


class Twice(nn.Module):
    """A block that attends, and has a part that attends; both are called twice."""

    def __init__(self, inner=None):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.inner = inner

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        z = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(z.transpose(1, 2).flatten(2))
        return x if self.inner is None else self.inner(x)


class SharedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(60, 16), Twice(Twice())

    def forward(self, tokens):
        return self.block(self.block(self.embed(tokens)))


def test_a_layer_of_a_search_is_one_call_without_what_is_inside():
    model = stir(SharedBlock(), 0.2).eval()
    text, other = tokens(8)[:, None] % 60
    with torch.no_grad(), watch(model, keep="qkv") as source:
        model(other)
    found = search_heads(model, text, source, measure)
    assert found.layers == ("block", "block.inner", "block#2", "block.inner#2")
    for i in range(4):
        for head in range(4):
            with torch.no_grad(), patch_heads(model, source, [(i, head)]):
                value = float(measure(model(text))[0])
            assert float(found.values[i, head]) == pytest.approx(value, abs=1e-5)
    with torch.no_grad(), patch_heads(model, source, [("block#1", 2)]):
        value = float(measure(model(text))[0])
    assert float(found.values[0, 2]) == pytest.approx(value, abs=1e-5)
    assert found.changes.abs().min() > 1e-4


def test_the_text_lists_the_largest_changes():
    values = torch.tensor([[1.0, 3.5], [float("nan"), 0.25]])
    found = HeadSearch(layers=("a", "b"), values=values, before=1.0, skipped=True)
    assert str(found).splitlines() == [
        "without a patch   1",
        "layer  head     patched   change",
        "    0     1         3.5     +2.5",
        "    1     1        0.25    -0.75",
        "    0     0           1       +0",
    ]
    assert found.changes[0].tolist() == [0, 2.5]


def make_search(changes):
    changes = torch.as_tensor(changes, dtype=torch.float64)
    return HeadSearch(layers=("a", "b"), values=changes, before=0.0, skipped=True)


@pytest.mark.parametrize("pairs", [8, 16])
def test_intervals_over_pairs_hold_the_mean_as_often_as_they_say(pairs):
    """Changes of known mean: the interval misses it in about 5 % of the heads."""
    generator = torch.Generator().manual_seed(1)
    many = torch.randn(pairs, 2, 2000, generator=generator, dtype=torch.float64) + 0.3
    found = average_searches([make_search(x.tolist()) for x in many])
    assert torch.allclose(found.mean, many.mean(0))
    held = ((found.low < 0.3) & (found.high > 0.3)).double().mean()
    assert 0.93 < float(held) < 0.97
    right = {8: 2.364624, 16: 2.131450}[pairs] * many.std(0) / pairs**0.5  # of SciPy
    assert torch.allclose((found.high - found.low) / 2, right, rtol=1e-3)


def test_heads_without_an_effect_are_sure_in_one_experiment_of_twenty():
    """The interval is for all heads at once; with one for each, 17 of 20 would be."""
    generator = torch.Generator().manual_seed(2)
    wrong = 0
    for _ in range(200):
        many = torch.randn(8, 2, 20, generator=generator, dtype=torch.float64)
        many[:, 0, 0] = math.nan  # not patched, so that it counts as no head
        wrong += bool(average_searches(list(map(make_search, many))).is_sure.any())
    assert 1 <= wrong <= 20
    many[:, 1, 3] += 30
    found = average_searches(list(map(make_search, many)))
    assert found.is_sure.nonzero().tolist() == [[1, 3]]


def test_fewer_than_eight_pairs_have_a_mean_and_no_interval():
    first = [[1.0, -5.0], [0.1, math.nan]]
    searches = [make_search(first)] * 7
    few, enough = average_searches(searches), average_searches([*searches, *searches])
    assert bool(few.low.isnan().all() and few.high.isnan().all())
    assert not bool(few.is_sure.any())
    assert bool(enough.is_sure[0].all())
    assert str(few).splitlines() == [
        "mean change over 7 pairs",
        "layer  head   change",
        "    0     1       -5",
        "    0     0       +1",
        "    1     0     +0.1",
        "An interval needs at least 8 pairs.",
    ]
    with pytest.raises(OptionError, match="1 searches of 1 models"):
        average_searches([make_search(first)])


def test_an_average_lists_the_largest_changes_and_which_are_sure():
    nan = float("nan")
    first, second = [[1.0, -5.0], [0.1, nan]], [[2.0, -5.5], [-0.1, nan]]
    found = average_searches([make_search(x) for x in (first, second) * 4])
    assert str(found).splitlines() == [
        "mean change over 8 pairs, 95 % confidence interval",
        "layer  head   change   interval",
        "    0     1    -5.25   -5.473 to -5.027 *",
        "    0     0     +1.5   +1.053 to +1.947 *",
        "    1     0       +0   -0.08937 to +0.08937",
        "* 0 is outside of an interval for all of them at once: 2 of 3",
    ]
    assert found.is_sure.tolist() == [[True, True], [False, False]]


def test_a_search_of_some_layers_is_a_part_of_the_whole_search():
    _, model, inputs = open_family("llama")
    text, source = take_first(inputs), record(model, take_first(change_inputs(inputs)))
    whole = search_heads(model, text, source, measure)
    part = search_heads(model, text, source, measure, layers=[1])
    assert torch.equal(part.values[1], whole.values[1])
    assert bool(part.values[0].isnan().all())
    assert part.layers == whole.layers


def test_heads_are_searched_at_one_token():
    _, model, inputs = open_family("llama")
    text, source = take_first(inputs), record(model, take_first(change_inputs(inputs)))
    whole = search_heads(model, text, source, measure)
    found = search_heads(model, text, source, measure, queries=[3])
    for layer, head in ((0, 1), (1, 3)):
        with patch_heads(model, source, [(layer, head)], queries=[3]):
            expected = measure(read(model, text))
        assert abs(float(found.values[layer, head] - expected)) < 1e-5
    assert float((found.values - whole.values).abs().min()) > 1e-6


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("batch", [3, 64])
def test_heads_are_searched_at_each_place(name, batch):
    """As many places as heads: rows of a batch are heads and places, not sequences."""
    _, model, inputs = open_family(name)
    text, source = take_first(inputs), record(model, take_first(change_inputs(inputs)))
    places = [slice(3, 4), slice(0, 3), range(5, 7), slice(-1, None)]
    done = []
    found = search_heads(
        model,
        text,
        source,
        measure_last,
        queries=places,
        batch=batch,
        progress=lambda *x: done.append(x),
    )
    assert found.values.shape == (2, HEADS, 4)
    for p, at in enumerate(places):
        one = search_heads(model, text, source, measure_last, queries=at)
        assert largest(found.values[..., p], one.values) < 1e-6
        with patch_heads(model, source, [(1, 2)], queries=at):
            expected = float(measure_last(read(model, text))[0])
        assert float(found.values[1, 2, p]) == pytest.approx(expected, abs=1e-5)
    assert float(found.changes.std(-1).min()) > 1e-6  # the places differ
    assert done[-1] == (2 * HEADS * 4, 2 * HEADS * 4)
    estimate = attribute_heads(model, text, source, measure_last)
    whole = estimate.sum_tokens([Tokens(slice(None))])[..., 0]
    assert torch.equal(whole, estimate.changes)
    sums = estimate.sum_tokens(found.places)
    assert largest(sums[1, :, 2], estimate.tokens[1][:, 5:7].sum(1)) == 0
    both = torch.stack([sums.flatten(), found.changes.flatten()])
    assert estimate.correlate(found) == pytest.approx(float(torch.corrcoef(both)[0, 1]))


def test_places_are_listed_and_averaged():
    places = (Tokens(slice(3, 4)), Tokens((5, 6)))
    values = torch.tensor([[[1.0, 3.5], [0.25, 1.0]]], dtype=torch.float64)
    options = {"layers": ("a",), "before": 1.0, "skipped": True}
    found = HeadSearch(values=values, places=places, **options)
    assert str(found).splitlines()[1:4] == [
        "layer  head    tokens     patched   change",
        "    0     0       5,6         3.5     +2.5",
        "    0     1         3        0.25    -0.75",
    ]
    texts = ("4", "0:4", "-2:", "1:9:2", "3,5")
    given = (slice(4, 5), slice(4), slice(-2, None), slice(1, 9, 2), (3, 5))
    assert tuple(map(str, map(Tokens, given))) == texts
    mean = average_searches([found, replace(found, values=values + 1)])
    assert mean.mean.tolist() == [[[0.5, 3], [-0.25, 0.5]]]
    assert str(mean).splitlines()[1:3] == [
        "layer  head    tokens   change",
        "    0     0       5,6       +3",
    ]
    other = replace(found, places=(Tokens(slice(3, 4)), Tokens((5, 7))))
    with pytest.raises(OptionError, match="searches at other tokens"):
        average_searches([found, other])


def test_a_place_that_is_none_is_refused():
    _, model, inputs = open_family("llama")
    text, source = take_first(inputs), record(model, take_first(inputs))
    with pytest.raises(OptionError, match="queries= has None, expected slices"):
        search_heads(model, text, source, measure, queries=[None, slice(0, 1)])
    with pytest.raises(OptionError, match="needs 11 tokens"):
        search_heads(model, text, source, measure, queries=[slice(0, 1), slice(10, 11)])
