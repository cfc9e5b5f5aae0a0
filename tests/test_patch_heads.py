"""Outputs of heads replaced in running models, against hooks written by hand."""

import pytest
import torch
from intervened_models import (
    FAMILIES,
    GROUPED,
    HEADS,
    D,
    find_projection,
    largest,
    open_family,
    read,
    stir,
    tokens,
)

import regard
from regard.ablate import average_outputs, knock_out, patch_heads
from regard.ablate.active import ACTIVE
from regard.errors import OptionError
from regard.nn.decoder import CausalTransformer
from regard.nn.generation import generate
from regard.plain.config import Config
from regard.recording.head_outputs import compute_outputs
from regard.run.monkeypatch import PATCHED
from regard.seen import watch


def change_inputs(inputs):
    """Return other inputs of the same shapes."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randint(3, 60, x.shape, generator=generator)
        if x.dtype == torch.int64
        else x + torch.randn(x.shape, generator=generator)
        for name, x in inputs.items()
    }


def record(model, inputs, **options):
    with watch(model, keep="qkv") as seen:
        read(model, inputs, **options)
    return seen


def catch(model, layer, out):
    """Return a list to which the input of an output projection is added, and undo."""
    caught = []
    projection = find_projection(model, layer, out)
    hook = projection.register_forward_pre_hook(
        lambda _, x: caught.append(x[0].clone())
    )
    return caught, hook.remove


def replace_by_hand(model, family, places, values):
    """Replace slices of the input of output projections; return what undoes it.

    places: (layer, head, queries)
    values: the new input of each projection
    """
    hooks = []
    for layer, head, rows in places:
        part = slice(head * D, (head + 1) * D)

        def put(_module, args, layer=layer, rows=rows, part=part):
            x = args[0].clone()
            x[:, rows, part] = values[layer][:, rows, part]
            return (x, *args[1:])

        projection = find_projection(model, family.layers[layer], family.out)
        hooks.append(projection.register_forward_pre_hook(put))
    return lambda: [x.remove() for x in hooks]


def read_outputs(model, family, inputs):
    """Return the input of every output projection, and the logits."""
    pairs = [catch(model, layer, family.out) for layer in family.layers]
    logits = read(model, inputs)
    for _, remove in pairs:
        remove()
    return [caught[0] for caught, _ in pairs], logits


@pytest.mark.parametrize("name", FAMILIES)
def test_patched_heads_are_slices_of_the_other_run(name):
    family, model, inputs = open_family(name)
    other = change_inputs(inputs)
    source = record(model, other)
    theirs, _ = read_outputs(model, family, other)
    before = read(model, inputs)
    chosen = [(i, (3 * i + 1) % HEADS) for i in range(len(family.layers))]
    for rows in (slice(None), [2, 3]):
        queries = None if rows == slice(None) else rows
        with patch_heads(model, source, chosen, queries=queries):
            mine, patched = read_outputs(model, family, inputs)
        places = [(i, h, rows) for i, h in chosen]
        undo = replace_by_hand(model, family, places, theirs)
        expected = read(model, inputs)
        undo()
        size = max(1, float(expected.abs().max()))
        assert largest(patched, expected) < 1e-6 * size
        assert largest(before, expected) > 1e-2
        own, _ = read_outputs(model, family, inputs)
        kept = torch.ones_like(own[0], dtype=torch.bool)
        head = chosen[0][1]
        kept[:, rows, head * D : (head + 1) * D] = False
        assert torch.equal(mine[0][kept], own[0][kept])  # to the bit
    assert torch.equal(read(model, inputs), before)
    assert not ACTIVE
    assert not PATCHED


@pytest.mark.parametrize("name", FAMILIES)
def test_the_mean_of_a_head_is_that_of_its_outputs(name):
    family, model, inputs = open_family(name)
    texts = [change_inputs(inputs), inputs]
    sources = [record(model, x) for x in texts]
    all_theirs = [read_outputs(model, family, x)[0] for x in texts]
    last = len(family.layers) - 1
    means = {
        i: torch.cat([x[i].flatten(0, -2) for x in all_theirs]).mean(0)
        for i in (0, last)
    }
    own, _ = read_outputs(model, family, inputs)
    values = {i: x.expand_as(own[i]) for i, x in means.items()}
    rows = slice(None)
    undo = replace_by_hand(model, family, [(0, 1, rows), (last, 2, rows)], values)
    expected = read(model, inputs)
    undo()
    with patch_heads(model, average_outputs(*sources), [(0, 1), (last, 2)]):
        patched = read(model, inputs)
    size = max(1, float(expected.abs().max()))
    assert largest(patched, expected) < 1e-6 * size
    assert largest(read(model, inputs), expected) > 1e-3


def test_a_model_of_ours_is_patched_in_float64():
    config = Config(vocabulary=60, width=32, layers=2, heads=4, kv_heads=2, context=64)
    model = stir(CausalTransformer(config), 0.3).double()
    first, second = tokens(9), tokens(9).flip(1)
    with torch.no_grad():
        with watch(model, keep="qkv") as source:
            base = model(first)
        with patch_heads(model, source):
            same = model(first)
        with patch_heads(model, source, [(0, 1)], queries=slice(3, 6)):
            patched = model(second)
        before = model(second)
        z = compute_outputs(source.layer(0, sequence=1))
    assert largest(same, base) < 1e-12
    assert largest(patched[:, :3], before[:, :3]) == 0  # causal: nothing is changed
    assert largest(patched[:, 3], before[:, 3]) > 1e-3
    seen = source.layer(0, sequence=1)
    dense = torch.as_tensor(seen.weights()) @ seen.v.repeat_interleave(2, 0)
    assert largest(z, dense) < 1e-14


def test_one_sequence_is_for_all_and_others_are_one_for_each():
    family, model, inputs = open_family("llama")
    other = change_inputs(inputs)
    single = {"input_ids": other["input_ids"][:1]}
    theirs, _ = read_outputs(model, family, single)
    undo = replace_by_hand(model, family, [(1, 3, slice(None))], {1: theirs[1]})
    expected = read(model, inputs)
    undo()
    with patch_heads(model, record(model, single), [(1, 3)]):
        assert largest(read(model, inputs), expected) < 1e-5
    with patch_heads(model, record(model, other), [(1, 3)]):
        each = read(model, inputs)
    assert largest(each[:1], expected[:1]) < 1e-5
    assert largest(each[1:], expected[1:]) > 1e-2
    three = {"input_ids": tokens()[[0, 1, 0]]}
    message = "3 sequences, and the source has 2; expected one for all"
    with (
        pytest.raises(OptionError, match=message),
        patch_heads(model, record(model, other), [(1, 3)]),
    ):
        read(model, three)


@pytest.mark.parametrize("name", ["llama", "llama-eager", "gpt2", "mistral", "qwen3"])
def test_tokens_are_counted_without_padding(name):
    _, model, inputs = open_family(name)
    ids = inputs["input_ids"]
    source = record(model, change_inputs(inputs))
    with patch_heads(model, source, [(0, 1), (1, 2)], queries=[1, 4, 9]):
        expected = read(model, inputs)
    pad = torch.zeros(2, 3, dtype=ids.dtype)
    mask = torch.cat([pad, torch.ones_like(ids)], 1)
    padded = {"input_ids": torch.cat([pad, ids], 1), "attention_mask": mask}
    padded["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    with patch_heads(model, source, [(0, 1), (1, 2)], queries=[1, 4, 9]):
        shifted = read(model, padded)
    assert largest(shifted[:, 3:], expected) < 1e-5
    with patch_heads(model, record(model, padded), [(0, 1)]):  # padding has no outputs
        assert largest(read(model, padded)[:, 3:], read(model, inputs)) < 1e-5


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "mistral", "gemma2"])
def test_a_generation_with_a_cache_is_the_full_pass_without(name, cache):
    _, model, inputs = open_family(name)
    prompt = inputs["input_ids"][:, :8]
    source = record(model, change_inputs({"input_ids": prompt}))
    given = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    how = {"do_sample": False, "max_new_tokens": 5, "cache_implementation": cache}
    how |= {"output_logits": True, "return_dict_in_generate": True}
    how |= {"disable_compile": True}
    heads, rows = [(0, 1), (1, 2)], slice(2, 8)
    with patch_heads(model, source, heads, queries=rows):
        done = model.generate(**given, **how)
        full = read(model, {"input_ids": done.sequences}, use_cache=False)
    steps = torch.stack(done.logits, 1)
    new = slice(-steps.shape[1] - 1, -1)
    assert largest(full[:, new], steps) < 1e-5 * max(1, float(full.abs().max()))
    without = read(model, {"input_ids": done.sequences}, use_cache=False)
    assert largest(without, full) > 1e-3
    with patch_heads(model, average_outputs(source), heads):  # also of new tokens
        done = model.generate(**given, **how)
        full = read(model, {"input_ids": done.sequences}, use_cache=False)
    steps = torch.stack(done.logits, 1)
    assert largest(full[:, new], steps) < 1e-5 * max(1, float(full.abs().max()))
    message = "token 8 is to be replaced, but the source has tokens 0 to 7"
    with pytest.raises(OptionError, match=message), patch_heads(model, source, heads):
        model.generate(**given, **how)


def test_our_generation_is_patched():
    config = Config(vocabulary=60, width=32, layers=2, heads=4, kv_heads=2, context=64)
    model = stir(CausalTransformer(config), 0.3)
    prompt = tokens(6)
    with torch.no_grad():
        with watch(model, keep="qkv") as source:
            model(prompt.flip(1))
        with patch_heads(model, source, layers=[1], queries=slice(0, 6)):
            new = torch.tensor(generate(model, prompt.tolist(), 4))
            full = model(torch.cat([prompt, new], 1)[:, :-1])
        assert torch.equal(full[:, 5:].argmax(-1), new)


def test_interventions_compose_and_the_inner_one_wins():
    family, model, inputs = open_family("llama")
    first, second = change_inputs(inputs), {"input_ids": inputs["input_ids"].flip(1)}
    one, other = record(model, first), record(model, second)
    theirs = [read_outputs(model, family, x)[0][0] for x in (first, second)]
    rows = slice(None)
    outer, inner = [(0, 0), (0, 1)], [(0, 1)]
    with patch_heads(model, one, outer), patch_heads(model, other, inner):
        with knock_out(model, [(0, 3)]):
            patched = read(model, inputs)
        assert largest(read(model, inputs), patched) > 1e-3
    zero = torch.zeros_like(theirs[0])
    undo = [
        replace_by_hand(model, family, [(0, head, rows)], {0: values})
        for head, values in ((0, theirs[0]), (1, theirs[1]), (3, zero))
    ]
    expected = read(model, inputs)
    for remove in undo:
        remove()
    assert largest(patched, expected) < 1e-5
    with patch_heads(model, one, [(0, 1)]), knock_out(model, [(0, 1)]):
        removed = read(model, inputs)
    with knock_out(model, [(0, 1)]):
        assert torch.equal(read(model, inputs), removed)


@pytest.mark.parametrize(
    "name", ["llama", "llama-eager", "gptj", "bert", "t5", "whisper"]
)
def test_a_watch_changes_no_bit_and_records_what_ran(name):
    _, model, inputs = open_family(name)
    source = record(model, change_inputs(inputs))
    with patch_heads(model, source, [(0, 1)]):
        alone = read(model, inputs)
    with patch_heads(model, source, [(0, 1)]), watch(model) as inside:
        assert torch.equal(read(model, inputs), alone)
    with watch(model) as around, patch_heads(model, source, [(0, 1)]):
        assert torch.equal(read(model, inputs), alone)
    with watch(model) as removed, knock_out(model, [(0, 1)]):
        read(model, inputs)
    for seen in (inside, around, removed):
        first, *others = (x for x in seen.coverage() if x.attention)
        assert not [x for x in (first, *others) if x.reason]
        assert "changed" in first.note  # the outputs, or the weights of a softmax
        assert not [x for x in others if "changed" in x.note]


@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_an_error_of_a_function_is_raised_at_once(name):
    _, model, inputs = open_family(name)

    def fail(z):
        raise ValueError("mine")

    went_on = False
    with (
        pytest.raises(
            OptionError, match="the function raised ValueError: mine"
        ) as found,
        patch_heads(model, fail, [(0, 1)]),
    ):
        read(model, inputs)
        went_on = True
    assert not went_on
    assert str(found.value.__cause__) == "mine"
    with (
        pytest.raises(OptionError, match="the function returned int, expected outputs"),
        patch_heads(model, lambda z: 3, [(0, 1)]),
    ):
        read(model, inputs)
    assert not ACTIVE
    assert not PATCHED


def test_gradients_are_those_of_the_patched_model():
    config = Config(vocabulary=60, width=32, layers=2, heads=4, kv_heads=2, context=64)
    model = stir(CausalTransformer(config), 0.3).double()
    text = tokens(7)
    with torch.no_grad(), watch(model, keep="qkv") as source:
        model(text.flip(1))
    weight = next(model.parameters())

    def loss():
        with patch_heads(model, source, [(0, 1), (1, 2)], queries=slice(2, 5)):
            return model(text).square().mean()

    (gradient,) = torch.autograd.grad(loss(), weight)
    direction = torch.randn_like(weight)
    step = 1e-6
    with torch.no_grad():
        weight.add_(step * direction)
        up = loss()
        weight.sub_(2 * step * direction)
        down = loss()
        weight.add_(step * direction)
    slope = float((gradient * direction).sum())
    assert abs(slope) > 1e-4
    assert slope == pytest.approx(float((up - down) / (2 * step)), rel=1e-6)


def test_what_cannot_be_replaced_is_refused():
    _, model, inputs = open_family("llama")
    with watch(model) as no_values:
        read(model, inputs)
    with (
        pytest.raises(OptionError, match=r'recorded without values.*keep="qkv"'),
        patch_heads(model, no_values, [(0, 1)]),
    ):
        read(model, inputs)
    with watch(model, keep="qkv", layers=[1]) as some:
        read(model, inputs)
    with (
        pytest.raises(OptionError, match=r"no record of model\.layers\.0\.self_attn"),
        patch_heads(model, some, [(0, 1)]),
    ):
        read(model, inputs)
    wide = stir(type(model)(model.config_class(**{**GROUPED, "head_dim": 2 * D})))
    with (
        pytest.raises(OptionError, match=r"heads output 8 numbers.*source has 16"),
        patch_heads(model, record(wide, inputs), [(0, 1)]),
    ):
        read(model, inputs)
    with (
        pytest.raises(OptionError, match="source is a int, expected a recording"),
        patch_heads(model, 3, [(0, 1)]),
    ):
        pass
    with pytest.raises(OptionError, match="average_outputs"):
        average_outputs()
    _, gptj, inputs = open_family("gptj")
    with (
        pytest.raises(OptionError, match=r"softmax of its own.*q, k and v cannot"),
        patch_heads(gptj, record(gptj, inputs), [(0, 1)], parts="v"),
    ):
        read(gptj, inputs)
    assert not ACTIVE
    assert not PATCHED


def test_outputs_of_a_record_with_a_sink_are_the_definition():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(h, 6, 4, generator=generator).double() for h in (4, 2))
    v = torch.randn(2, 6, 5, generator=generator).double()
    sink = torch.randn(4, generator=generator).double()
    done = regard.attention(q, k, v, regard.causal(), sink=sink, scale=0.5)
    at = torch.arange(6)
    found = regard.recording.record.Record(
        name="layer",
        q=q,
        k=k,
        v=v,
        lse=done.lse,
        sink=sink,
        scale=0.5,
        mask=regard.causal(),
        q_positions=at,
        k_positions=at,
    )
    assert largest(compute_outputs(found), done.out) < 1e-14
    arrays = compute_outputs(found.to("numpy"))
    assert largest(torch.as_tensor(arrays), done.out) < 1e-14


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of flex_attention
@pytest.mark.filterwarnings("ignore:.*flex_attention called without:UserWarning")
@pytest.mark.filterwarnings(
    "ignore:return_lse is deprecated:FutureWarning"
)  # transformers 4
@pytest.mark.parametrize("name", ["sdpa", "eager", "flex_attention"])
def test_a_row_without_visible_keys_gets_what_replaces_it(name):
    family, model, inputs = open_family("llama")
    model.set_attn_implementation(name)
    source = record(model, change_inputs(inputs))
    caught, undo = catch(model, family.layers[1], family.out)
    with knock_out(model, [(1, 1)], keys=[0]), patch_heads(model, source, [(1, 1)]):
        read(model, inputs)
    with knock_out(model, [(1, 1)], keys=[0]):
        read(model, inputs)
    undo()
    patched, hidden = (x[..., D : 2 * D] for x in caught)
    for i in range(2):
        expected = compute_outputs(source.recording.layer(1, sequence=i))[1]
        assert largest(patched[i], expected) < 1e-5
    assert not hidden[:, 0].any()


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
def test_a_compiled_model_has_the_layers_of_the_plain_one():
    """torch.compile puts a prefix before the names of modules."""
    _, model, inputs = open_family("llama")
    compiled, other = torch.compile(model), change_inputs(inputs)
    sources = record(model, other), record(compiled, other)
    outs = []
    for source in sources:
        for each in (model, compiled):
            with patch_heads(each, source, [(1, 1)]):
                outs.append(read(each, inputs))
    assert all(torch.equal(x, outs[0]) for x in outs)
    assert largest(outs[0], read(model, inputs)) > 1e-4
