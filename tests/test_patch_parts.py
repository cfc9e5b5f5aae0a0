"""q, k, v and patterns of heads replaced in running models, against hooks by hand.

A hook replaces columns of the output of a projection, before positions are applied: the
tokens of both runs are at the same positions. A shared head of keys or values belongs
to a group of heads, which is then replaced as a whole.
"""

import pytest
import torch
import transformers
from intervened_models import (
    FAMILIES,
    GROUPED,
    HEADS,
    WIDTH,
    D,
    find_projection,
    largest,
    open_family,
    read,
    stir,
    tokens,
)
from test_patch_heads import change_inputs, record

import regard
from regard.ablate import average_outputs, knock_out, patch_heads
from regard.ablate.active import ACTIVE
from regard.errors import OptionError
from regard.nn.decoder import CausalTransformer
from regard.plain.config import Config
from regard.run.monkeypatch import PATCHED
from regard.seen import watch

OWN_SOFTMAX = ("bloom", "gptj")  # their calls cannot be run again with other arrays
PATCHED_FAMILIES = [x for x in FAMILIES if x not in OWN_SOFTMAX]
PROJECTIONS = {  # the modules that compute q, k and v
    "gpt2": ("c_attn", "c_attn", "c_attn"),
    "bert": ("query", "key", "value"),
    "t5": ("q", "k", "v"),
}
PARTS = ("q", "k", "v", "pattern", "qkv", "kv")


def find_projections(model, name, layer):
    """Return {part: (module, first column)} of a layer."""
    names = PROJECTIONS.get(name.removesuffix("-eager"), ("q_proj", "k_proj", "v_proj"))
    fused = len(set(names)) == 1
    return {
        part: (find_projection(model, layer, out), i * WIDTH if fused else 0)
        for i, (part, out) in enumerate(zip("qkv", names, strict=True))
    }


def count_groups(family):
    """Return how many heads share a key."""
    return HEADS // family.options.get("num_key_value_heads", HEADS)


def catch_projections(model, name, family, inputs):
    """Return the output of every projection, {(layer, part): array}."""
    caught, hooks = {}, []
    for layer in family.layers:
        for part, (module, _) in find_projections(model, name, layer).items():

            def keep(_module, _args, out, key=(layer, part)):
                caught[key] = out.clone()

            hooks.append(module.register_forward_hook(keep))
    read(model, inputs)
    for hook in hooks:
        hook.remove()
    return caught


def patch_by_hand(model, name, family, place, values):
    """Replace columns of projections in one layer; return what undoes it.

    place: layer, parts, heads of one group, keys
    """
    layer, parts, heads, keys = place
    group, hooks = count_groups(family), []
    for part, (module, first) in find_projections(model, name, layer).items():
        if part not in parts:
            continue
        chosen = heads if part == "q" else sorted({h // group for h in heads})
        rows = slice(None) if part == "q" else keys

        def put(
            _module, _args, out, key=(layer, part), first=first, some=chosen, rows=rows
        ):
            out = out.clone()
            for h in some:
                columns = slice(first + h * D, first + (h + 1) * D)
                out[:, rows, columns] = values[key][:, rows, columns]
            return out

        hooks.append(module.register_forward_hook(put))
    return lambda: [hook.remove() for hook in hooks]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", PATCHED_FAMILIES)
def test_parts_are_those_that_the_projections_give(name, parts):
    family, model, inputs = open_family(name)
    other = change_inputs(inputs)
    source = record(model, other)
    values = catch_projections(model, name, family, other)
    before = read(model, inputs)
    letters = {"pattern": "qk"}.get(parts, parts)
    group = count_groups(family)
    for layer, keys in ((0, slice(None)), (len(family.layers) - 1, slice(1, 4))):
        if letters == "q" or parts == "pattern":
            keys = slice(None)  # noqa: PLW2901
        heads = [1] if letters == "q" else list(range(group, 2 * group))
        place = (family.layers[layer], letters, heads, keys)
        undo = patch_by_hand(model, name, family, place, values)
        expected = read(model, inputs)
        undo()
        chosen = [(layer, h) for h in heads]
        given = None if keys == slice(None) else keys
        with patch_heads(model, source, chosen, parts=parts, keys=given):
            patched = read(model, inputs)
        size = max(1, float(expected.abs().max()))
        assert largest(patched, expected) < 1e-6 * size
        assert largest(before, expected) > 1e-4
    assert torch.equal(read(model, inputs), before)
    assert not ACTIVE
    assert not PATCHED


def make_ours():
    config = Config(vocabulary=60, width=32, layers=2, heads=4, kv_heads=2, context=64)
    return stir(CausalTransformer(config), 0.3).double()


def record_ours(model, text):
    with torch.no_grad(), watch(model, keep="qkv") as seen:
        model(text)
    return seen


def test_all_parts_together_are_the_output():
    model = make_ours()
    first, second = tokens(9), tokens(9).flip(1)
    source = record_ours(model, first)
    with torch.no_grad():
        with patch_heads(model, source, [(0, 1), (1, 2)]):
            outputs = model(second)
        with patch_heads(model, source, [(0, 1), (1, 2)], parts="qkv"):
            parts = model(second)
        own = model(second)
    assert largest(outputs, parts) < 1e-12
    assert largest(outputs, own) > 1e-3


def test_one_head_of_a_group_is_replaced_without_the_others():
    model = make_ours()
    first, second = tokens(9), tokens(9).flip(1)
    source, own = record_ours(model, first), record_ours(model, second)
    caught = []
    hook = model.blocks[0].attention.out.register_forward_pre_hook(
        lambda _, x: caught.append(x[0].clone())
    )
    with torch.no_grad():
        model(second)
        with patch_heads(model, source, [(0, 1)], parts="v"):
            model(second)
    hook.remove()
    before, after = caught
    mine = slice(D, 2 * D)
    kept = torch.ones(WIDTH, dtype=torch.bool)
    kept[mine] = False
    assert torch.equal(before[..., kept], after[..., kept])  # to the bit
    for i in range(2):
        weights = own.recording.layer(0, sequence=i).weights()[1]
        v = source.recording.layer(0, sequence=i).v[0]
        assert largest(after[i, :, mine], weights @ v) < 1e-12


def test_a_watch_records_the_call_once_and_as_it_ran():
    for model in (make_ours(), open_family("llama")[1], open_family("llama-eager")[1]):
        first, second = tokens(9), tokens(9).flip(1)
        source, plain = record_ours(model, first), record_ours(model, second)
        with patch_heads(model, source, [(0, 1)], parts="k"):
            seen = record_ours(model, second)
        assert seen.recording.layers == plain.recording.layers
        assert len(seen.recording.records) == len(plain.recording.records)
        one, other = (x.recording.layer(0).weights() for x in (seen, plain))
        assert torch.equal(one, other)


def test_a_function_changes_outputs():
    model = make_ours()
    text = tokens(9)
    with torch.no_grad():
        with patch_heads(model, lambda z: 0 * z, [(1, 2)]):
            cleared = model(text)
        with knock_out(model, heads=[(1, 2)]):
            removed = model(text)
    assert torch.equal(cleared, removed)
    shapes = []
    with torch.no_grad(), patch_heads(model, lambda z: shapes.append(z.shape) or z):
        same = model(text)
    assert shapes == [(2, 4, 9, 8)] * 2
    with torch.no_grad():
        assert torch.equal(same, model(text))
    with (
        torch.no_grad(),
        pytest.raises(OptionError, match="expected outputs like those"),
        patch_heads(model, lambda z: z.mean(2), [(0, 0)]),
    ):
        model(text)


@pytest.mark.parametrize("parts", ["q", "k", "v", "z"])
def test_gradients_flow_through_what_is_not_replaced(parts):
    model = make_ours()
    source = record_ours(model, tokens(6))
    text = tokens(6).flip(1)
    for weight in model.parameters():
        weight.requires_grad_(requires_grad=False)
    scale = torch.ones(32, dtype=torch.float64, requires_grad=True)
    hook = model.blocks[0].attention.qkv.register_forward_pre_hook(
        lambda _, x: (x[0] * scale,)
    )

    def run(scale_value):
        with patch_heads(model, source, [(0, 1)], parts=parts):
            return model(text).pow(2).mean()

    (found,) = torch.autograd.grad(run(scale), scale)
    eps = 1e-6
    for at in (0, 7, 31):
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                scale[at] += sign * eps
                ends.append(float(run(scale)))
                scale[at] -= sign * eps
        slope = (ends[0] - ends[1]) / (2 * eps)
        assert abs(slope - float(found[at])) < 1e-6 * max(1, abs(slope))
    hook.remove()


@pytest.mark.parametrize("parts", ["q", "k", "v"])
@pytest.mark.parametrize("name", ["llama", "llama-eager", "gpt2"])
def test_parts_are_replaced_with_a_cache_and_with_padding(name, parts):
    _, model, inputs = open_family(name)
    text = inputs["input_ids"]
    source = record(model, {"input_ids": text.flip(1)})
    with patch_heads(model, source, [(0, 1), (1, 2)], parts=parts):
        whole = read(model, inputs)
    with torch.no_grad(), patch_heads(model, source, [(0, 1), (1, 2)], parts=parts):
        done = model(input_ids=text[:, :6], use_cache=True)
        steps = [done.logits]
        for i in range(6, text.shape[1]):
            done = model(
                input_ids=text[:, i : i + 1], past_key_values=done.past_key_values
            )
            steps.append(done.logits)
    size = max(1, float(whole.abs().max()))
    assert largest(torch.cat(steps, 1), whole) < 1e-5 * size
    padded = torch.nn.functional.pad(text, (3, 0))
    mask = (torch.arange(padded.shape[1]) >= 3).long().expand_as(padded)
    with patch_heads(model, source, [(0, 1), (1, 2)], parts=parts):
        shifted = read(
            model,
            {
                "input_ids": padded,
                "attention_mask": mask,
                "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            },
        )
    assert largest(shifted[:, 3:], whole) < 1e-5 * size


def test_the_empty_slots_of_a_cache_are_no_tokens():
    """A static cache has a fixed size: its end is empty, and the source has no such."""
    _, model, inputs = open_family("llama")
    text = inputs["input_ids"]
    source = record(model, {"input_ids": text.flip(1)})
    cache = transformers.StaticCache(config=model.config, max_cache_len=20)
    with torch.no_grad(), patch_heads(model, source, [(0, 1), (1, 2)], parts="v"):
        whole = read(model, inputs)
        steps = [
            model(input_ids=x, past_key_values=cache).logits
            for x in (text[:, :6], *text[:, 6:].split(1, 1))
        ]
    size = max(1, float(whole.abs().max()))
    assert largest(torch.cat(steps, 1), whole) < 1e-5 * size


def test_interventions_compose_or_are_refused():
    model = make_ours()
    first, second = tokens(9), tokens(9).flip(1)
    source = record_ours(model, first)
    with torch.no_grad():
        with (
            patch_heads(model, source, [(0, 1)], parts="q"),
            patch_heads(model, source, [(0, 2)], parts="v"),
            knock_out(model, heads=[(1, 0)]),
        ):
            together = model(second)
        with (
            knock_out(model, heads=[(1, 0)]),
            patch_heads(model, source, [(0, 2)], parts="v"),
            patch_heads(model, source, [(0, 1)], parts="q"),
        ):
            turned = model(second)
        assert torch.equal(together, turned)
        with (
            pytest.raises(OptionError, match="replace the same head and query"),
            patch_heads(model, source, [(0, 3)]),
            patch_heads(model, source, [(0, 1)], parts="q"),
            patch_heads(model, source, [(0, 1)], parts="v"),
        ):
            model(second)
        with (
            patch_heads(model, source, [(0, 1)], parts="q", queries=[0, 1]),
            patch_heads(model, source, [(0, 1)], parts="v", queries=[2]),
        ):
            model(second)


def test_what_cannot_be_replaced_is_refused():
    model = make_ours()
    first = tokens(9)
    source = record_ours(model, first)
    with pytest.raises(OptionError, match="parts='x', expected 'z'"):
        patch_heads(model, source, parts="x").__enter__()
    with pytest.raises(OptionError, match="expected a recording: a mean"):
        patch_heads(model, average_outputs(source), parts="v").__enter__()
    with pytest.raises(OptionError, match="keys= with parts='z'"):
        patch_heads(model, source, keys=[0]).__enter__()
    with pytest.raises(OptionError, match="expected a recording, or average_outputs"):
        regard.ablate.search_heads(model, first[:1], lambda z: z, lambda x: x[:, 0, 0])
    longer = tokens(12)
    with (
        torch.no_grad(),
        pytest.raises(OptionError, match="token 9 is to be replaced"),
        patch_heads(model, source, [(0, 0)], parts="v"),
    ):
        model(longer)
    with torch.no_grad(), watch(model) as short:
        model(first)
    with (
        torch.no_grad(),
        pytest.raises(OptionError, match="recorded without values"),
        patch_heads(model, short, [(0, 0)], parts="v"),
    ):
        model(first)


def test_a_scale_that_differs_is_refused():
    """q of a record that was multiplied by the scale is another q."""
    model = open_family("llama")[1]
    source = record(model, {"input_ids": tokens(9)})
    for part in model.modules():
        if hasattr(part, "scaling"):
            part.scaling *= 2
    with (
        torch.no_grad(),
        pytest.raises(OptionError, match="q and k cannot be taken"),
        patch_heads(model, source, [(0, 0)], parts="q"),
    ):
        model(tokens(9))


def test_the_modules_of_torch_are_replaced_in():
    """nn.MultiheadAttention hides its kernel, and an encoder layer has a fast path."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2).double().eval()
    first, second = torch.randn(2, 2, 7, 32, dtype=torch.float64)
    source = record_ours(model, first)
    chosen = [(0, 1), (1, 2)]
    with torch.no_grad():
        with patch_heads(model, source, chosen):
            outputs = model(second)
        with patch_heads(model, source, chosen, parts="qkv"):
            parts = model(second)
        own = model(second)
    assert largest(outputs, parts) < 1e-12
    assert largest(outputs, own) > 1e-3


@pytest.mark.parametrize("parts", ["q", "k", "v"])
@pytest.mark.parametrize("name", ["llama", "llama-eager", "torch"])
def test_dropout_is_the_same_in_the_second_run(name, parts):
    """Without another source nothing changes, in training mode, to the last layer."""
    if name == "torch":
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, 0.3, batch_first=True)
        model, text = torch.nn.TransformerEncoder(layer, 2), torch.randn(2, 7, 32)
    else:
        _, model, inputs = open_family(name)
        model.config.attention_dropout, text = 0.3, inputs["input_ids"]
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.3
    own = record_ours(model.eval(), text)
    model.train()

    def run():
        torch.manual_seed(5)
        with torch.no_grad():
            out = model(text)
        return getattr(out, "logits", out), torch.rand(3)

    plain, after = run()
    assert largest(plain, run()[0]) == 0
    for queries in (None, [6]):
        with patch_heads(model, own, [(0, 1)], parts=parts, queries=queries):
            patched, then = run()
        assert largest(patched, plain) < 1e-5 * max(1, float(plain.abs().max()))
        assert torch.equal(then, after)  # the model goes on as without a patch

    if name == "torch":
        return

    def draw(z):
        return z + 0 * torch.rand_like(z)

    with patch_heads(model, draw, [(0, 2)]):
        _, after = run()
        with patch_heads(model, own, [(0, 1)], parts=parts):
            _, then = run()
    assert torch.equal(then, after)  # and what a patch drew is not drawn again


@pytest.mark.parametrize("parts", ["q", "k", "v", "pattern"])
@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_a_source_with_other_heads_is_refused(name, parts):
    def build(heads, keys):
        options = {**GROUPED, "head_dim": D}
        options |= {"num_attention_heads": heads, "num_key_value_heads": keys}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))
        model.set_attn_implementation(name)
        return stir(model)

    model, text = build(4, 2), tokens(9)
    for heads, keys in ((2, 2), (2, 1), (8, 2)):
        source = record(build(heads, keys), {"input_ids": text})
        with (
            pytest.raises(OptionError, match=f"has 4 heads, and its record {heads}"),
            patch_heads(model, source, [(1, 3)], parts=parts),
        ):
            read(model, {"input_ids": text})
    if name == "eager" and parts != "q":  # sdpa gets keys for each head
        source = record(build(4, 1), {"input_ids": text})
        with (
            pytest.raises(
                OptionError, match=r"is \(2, 2, 9, 8\), and that of the source"
            ),
            patch_heads(model, source, [(1, 3)], parts=parts),
        ):
            read(model, {"input_ids": text})
