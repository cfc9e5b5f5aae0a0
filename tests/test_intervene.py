"""Heads and keys cut out of running models, against zeroed weights and the definition."""

import math
import os
import sys
import threading

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers
from families import FAMILIES as OTHERS
from intervened_models import (
    EAGER,
    FAMILIES,
    GROUPED,
    HEADS,
    MAIN,
    SELF,
    TOKENS,
    WIDTH,
    D,
    find_projection,
    largest,
    open_family,
    read,
    stir,
    tokens,
)
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import regard
from regard.ablate.active import ACTIVE, PASSING
from regard.ablate.effect import Effect, effect
from regard.ablate.knock_out import knock_out
from regard.engine.choose import attend
from regard.errors import OptionError
from regard.masks.biases import alibi
from regard.nn.decoder import CausalTransformer
from regard.nn.generation import generate
from regard.plain.config import Config
from regard.recording.spans import Span
from regard.run.monkeypatch import PATCHED
from regard.run.own_work import COMPUTING
from regard.seen import watch

BLIND = {"mamba2", "reformer", "written-hidden"}  # no softmax, no kernel


# --- heads ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_a_removed_head_is_a_slice_of_zeros_in_the_output_projection(name):
    family, model, inputs = open_family(name)
    heads = [(i, (3 * i + 1) % HEADS) for i in range(len(family.layers))]
    before = read(model, inputs)
    with knock_out(model, heads):
        cut = read(model, inputs)
    with knock_out(model, [(family.layers[i], h) for i, h in heads]):
        by_name = read(model, inputs)
    assert largest(read(model, inputs), before) == 0
    for i, head in heads:
        part = slice(head * D, (head + 1) * D)
        projection = find_projection(model, family.layers[i], family.out)
        with torch.no_grad():
            if isinstance(projection, nn.Linear):
                projection.weight[:, part] = 0
            else:  # GPT-2 keeps it the other way round
                projection.weight[part] = 0
    expected = read(model, inputs)
    assert largest(before, expected) > 1e-2
    assert largest(cut, expected) < 1e-6
    assert largest(by_name, cut) == 0


def test_a_layer_is_all_of_its_heads_and_a_name_holds_what_is_inside():
    _, model, inputs = open_family("llama")
    with knock_out(model, layers=[1]):
        whole = read(model, inputs)
    with knock_out(model, [(1, h) for h in range(HEADS)]):
        assert largest(read(model, inputs), whole) == 0
    with knock_out(model, layers=["model.layers.1"]):
        assert largest(read(model, inputs), whole) == 0
    with knock_out(model):
        both = read(model, inputs)
    with knock_out(model, layers=[0, 1]):
        assert largest(read(model, inputs), both) == 0
    assert largest(both, whole) > 1e-2


# --- keys -----------------------------------------------------------------------------


def hidden_cells(n_q, n_k, keys, queries, heads=None):
    cells = torch.zeros(HEADS, n_q, n_k, dtype=torch.bool)
    for h in range(HEADS) if heads is None else heads:
        for i in range(n_q) if queries is None else queries:
            for j in keys:
                if i < n_q and j < n_k:
                    cells[h, i, j] = True
    return cells


def bias_of(model, layer, n_q, n_k):
    """Return T5's bias, which the first layer of a stack computes for all of them."""
    if "SelfAttention" not in layer:
        return None
    stack = layer.partition(".")[0]
    first = model.get_submodule(f"{stack}.block.0.layer.0.SelfAttention")
    return first.compute_bias(n_q, n_k)[0].detach()


CUTS = {
    "keys": ([0, 4], None, None),
    "keys and queries": ([1, 2], [2, 5, 6], None),
    "keys, queries and heads": ([0, 3], [0, 3, 6], [1, 2]),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", [*MAIN, *EAGER, "gemma2", "gpt-oss"])
def test_hidden_keys_are_the_definition_under_that_mask(name, cut):
    family, model, inputs = open_family(name)
    keys, queries, heads = CUTS[cut]
    went_out = {}

    def keep(layer):
        def hook(_module, args):
            went_out[layer] = args[0].detach()

        return hook

    for layer in family.layers:
        projection = find_projection(model, layer, family.out)
        if "bert" in name:  # its projection belongs to the module around
            attention = model.get_submodule(layer)
            attention.register_forward_hook(
                lambda _m, _a, out, layer=layer: went_out.__setitem__(layer, out[0])
            )
        else:
            projection.register_forward_pre_hook(keep(layer))
    pairs = heads and [(i, h) for i in range(len(family.layers)) for h in heads]
    cutting = knock_out(model, pairs, keys=keys, queries=queries)
    with cutting, watch(model, keep="qkv") as seen:
        read(model, inputs)
    reasons = [x.reason for x in seen.coverage() if x.attention]
    assert reasons == [""] * len(family.layers)
    records = zip(seen.recording.records, seen.recording.sequences, strict=True)
    for record, b in records:
        n_q, n_k = record.q.shape[1], record.k.shape[1]
        hidden = hidden_cells(n_q, n_k, keys, queries, heads)
        allowed = ~hidden
        if family.causal(record.name):
            allowed = allowed & torch.ones(n_q, n_k, dtype=torch.bool).tril()
        if name == "gemma2" and record.name == family.layers[0]:
            allowed = allowed & torch.ones(n_q, n_k, dtype=torch.bool).triu(-4)
        defined = regard.attention(
            record.q,
            record.k,
            record.v,
            allowed,
            bias=bias_of(model, record.name, n_q, n_k) if "t5" in name else None,
            scale=record.scale,
            softcap=record.softcap,
            sink=record.sink,
            see=("weights",),
        )
        ran = went_out[record.name][b].reshape(n_q, HEADS, D).transpose(0, 1)
        assert largest(ran, defined.out) < 1e-5 * max(1, float(ran.abs().max()))
        blank = ~allowed.any(-1)
        assert not ran[blank].any()
        weights = torch.as_tensor(record.weights())
        assert largest(weights, defined.weights) < 1e-5
        assert not weights[hidden].any()
    assert len(seen.recording.records) == 2 * len(family.layers)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_watch_around_sees_what_a_watch_inside_sees_and_changes_nothing(name):
    family, model, inputs = open_family(name)
    pairs = [(i, h) for i in range(len(family.layers)) for h in (0, 3)]
    cut = {"heads": pairs, "keys": range(1, 4), "queries": slice(2, None)}
    with knock_out(model, **cut):
        alone = [read(model, inputs) for _ in range(2)]
    with knock_out(model, **cut), watch(model) as inside:
        first = [read(model, inputs) for _ in range(2)]  # the second with fewer hooks
    with watch(model) as around, knock_out(model, **cut):
        second = [read(model, inputs) for _ in range(2)]
    assert all(largest(x, y) == 0 for x, y in zip(alone, first, strict=True))
    assert all(largest(x, y) == 0 for x, y in zip(alone, second, strict=True))
    found = zip(inside.recording.records, around.recording.records, strict=True)
    for one, other in found:
        assert one.name == other.name
        weights = torch.as_tensor(one.weights())
        assert largest(weights, torch.as_tensor(other.weights())) < 1e-6
        assert not weights[[0, 3], 2:7, 1:4].any()
        assert weights[[1, 2], 2:7, 1:4].any()


def test_slices_ranges_and_lists_name_the_same_tokens():
    _, model, inputs = open_family("llama")
    done = []
    for keys in (slice(2, 6, 2), range(2, 6, 2), [2, 4], (4, 2, 2)):
        with knock_out(model, keys=keys, queries=slice(3, 8)):
            done.append(read(model, inputs))
    assert [largest(x, done[0]) for x in done] == [0, 0, 0, 0]
    with knock_out(model, keys=range(2, 6), queries=range(3, 8)):
        longer = read(model, inputs)
    with knock_out(model, keys=Span("them", 2, 6), queries=Span("us", 3, 8)):
        assert largest(read(model, inputs), longer) == 0
    with knock_out(model, keys=[2, 4, 6], queries=range(3, 8)):
        assert largest(read(model, inputs), done[0]) > 1e-3


def test_negative_numbers_count_from_the_last_token():
    _, model, inputs = open_family("llama")
    for mine, same in (
        ({"keys": [-4]}, {"keys": [6]}),
        ({"keys": slice(-4, None)}, {"keys": slice(6, 10)}),
        ({"keys": slice(2, -5)}, {"keys": slice(2, 5)}),
        ({"keys": [0, -8], "queries": [-1]}, {"keys": [0, 2], "queries": [9]}),
        ({"keys": slice(-9, -1, 3)}, {"keys": [1, 4, 7]}),
    ):
        with knock_out(model, **mine):
            found = read(model, inputs)
        with knock_out(model, **same):
            assert largest(found, read(model, inputs)) == 0
        assert largest(found, read(model, inputs)) > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_last_token_of_each_sequence_is_no_padding(side):
    _, model, inputs = open_family("llama")
    valid = torch.ones_like(inputs["input_ids"])
    valid[1, slice(0, 3) if side == "left" else slice(7, 10)] = 0
    padded = {**inputs, "attention_mask": valid}
    at = [slice(7, 8), slice(4, 5)]  # of 10 and 7 tokens
    rest = [slice(8, 10), slice(5, 7)]
    with knock_out(model, keys=at, queries=rest):
        expected = read(model, padded)
    with knock_out(model, keys=[-3], queries=slice(-2, None)):
        assert largest(read(model, padded), expected) == 0
    plain = read(model, padded)
    assert bool(((plain - expected).abs().amax((1, 2)) > 1e-4).all())
    with knock_out(model, keys=[0], queries=[-8]):  # the shorter one has no such token
        found = read(model, padded)
    assert torch.equal(found[1], plain[1])
    assert largest(found[0], plain[0]) > 1e-4


def test_a_watch_goes_on_after_a_cut_inside_of_it():
    _, model, inputs = open_family("llama")
    before = read(model, inputs)
    with watch(model) as seen:
        with knock_out(model, keys=[0]):
            read(model, inputs)
        assert largest(read(model, inputs), before) == 0
    first, *_, last = (x for x in seen.recording.records if x.name == SELF[1])
    assert not torch.as_tensor(first.weights())[..., 0].any()
    assert torch.as_tensor(last.weights())[..., 0].all()


def test_knock_outs_add_up():
    _, model, inputs = open_family("llama")
    with knock_out(model, [(0, 1)]), knock_out(model, [(1, 2)], keys=[0, 1]):
        nested = read(model, inputs)
    with knock_out(model, [(1, 2)], keys=[0]), knock_out(model, [(0, 1)]):
        with knock_out(model.model, [("layers.1", 2)], keys=[1]):
            other = read(model, inputs)
        fewer = read(model, inputs)
    assert largest(nested, other) == 0
    assert largest(nested, fewer) > 1e-3


# --- generation -----------------------------------------------------------------------

GENERATING = ("gpt2", "llama", "t5", "bloom", "gptj", "gemma2", "gpt-oss", "mistral")
GENERATED = {
    "keys": {"keys": [0, 2]},
    "keys of new tokens": {"keys": [1, 9, 10], "queries": slice(8, None)},
    "heads": {"heads": [(0, 1), (1, 3)], "keys": range(4), "queries": [3, 8, 9, 12]},
}
SHORT = {  # a decoder of its own starts at 0
    "keys": {"keys": [0, 2]},
    "keys of new tokens": {"keys": [1, 3], "queries": slice(2, None)},
    "heads": {"heads": [(0, 1), (3, 3), (5, 0)], "keys": range(4), "queries": [2, 4]},
}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", GENERATING)
def test_a_generation_with_a_cache_is_the_full_pass_without(name, cache):
    _, model, inputs = open_family(name)
    prompt = inputs["input_ids"][:, :8]
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    how = {"do_sample": False, "max_new_tokens": 7, "cache_implementation": cache}
    how |= {"output_logits": True, "return_dict_in_generate": True}
    how |= {"disable_compile": True}
    plain = model.generate(**inputs, **how)
    for cut in (SHORT if name == "t5" else GENERATED).values():
        with knock_out(model, **cut):
            done = model.generate(**inputs, **how)
            steps = torch.stack(done.logits, 1)
            if name == "t5":
                given = {**inputs, "decoder_input_ids": done.sequences}
            else:
                given = {"input_ids": done.sequences}
            full = read(model, given, use_cache=False)
        new = slice(-steps.shape[1] - 1, -1)
        size = float(full.abs().max())
        assert largest(full[:, new], steps) < 1e-5 * max(1, size)
        assert torch.equal(full[:, new].argmax(-1), done.sequences[:, -7:])
        assert largest(read(model, given, use_cache=False), full) > 1e-3
    assert torch.equal(model.generate(**inputs, **how).sequences, plain.sequences)


PADDED = [
    *((name, "dynamic") for name in ("gpt2", "llama", "llama-eager", "mistral", "t5")),
    *((name, "static") for name in ("llama", "llama-eager", "gemma2")),
]


@pytest.mark.parametrize(("name", "cache"), PADDED)
def test_positions_count_real_tokens_when_prompts_are_padded_on_the_left(name, cache):
    _, model, _ = open_family(name)
    prompts, wide = [tokens(9)[0], tokens(6)[1]], torch.zeros(2, 9, dtype=torch.long)
    for row, prompt in zip(wide, prompts, strict=True):
        row[-len(prompt) :] = prompt
    how = {"do_sample": False, "max_new_tokens": 9, "cache_implementation": cache}
    how |= {"output_logits": True, "return_dict_in_generate": True}
    how |= {"disable_compile": True}

    def generate_from(prompt, valid):
        done = model.generate(prompt, attention_mask=valid, **how)
        return torch.stack(done.logits, 1)

    plain = generate_from(wide, (wide > 0).long())
    last = {"keys": [-3], "queries": slice(-1, None)}
    for cut in (
        {"keys": range(4, 9), "queries": slice(5, None)},
        {"keys": [0, 2, 7]},
        last,
    ):
        with knock_out(model, **cut):
            together = generate_from(wide, (wide > 0).long())
        assert largest(together[0], plain[0]) > 1e-3
        for b, prompt in enumerate(prompts):
            with knock_out(model, **cut):
                alone = generate_from(prompt[None], torch.ones_like(prompt[None]))
            size = max(1.0, float(alone.abs().max()))
            assert largest(together[b], alone[0]) < 1e-5 * size


def test_every_step_of_a_generation_is_blind_to_the_hidden_tokens():
    _, model, inputs = open_family("llama")
    prompt = inputs["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    options |= {"attention_mask": torch.ones_like(prompt)}
    with watch(model) as seen, knock_out(model, keys=range(4, 9)):
        model.generate(prompt, **options)
    assert {x.reason for x in seen.coverage()} == {""}
    for record in seen.recording.records:
        weights = torch.as_tensor(record.weights())
        assert weights.shape == (HEADS, 15, 15)
        assert not weights[..., 4:9].any()
        assert weights[:, 9:, :4].all()


def test_a_cache_that_forgets_does_not_move_the_keys_of_another_sequence():
    torch.manual_seed(0)
    options = {**GROUPED, "head_dim": D, "sliding_window": 4}
    parts = {
        x: transformers.T5GemmaModuleConfig(
            **options, layer_types=["sliding_attention", "full_attention"]
        )
        for x in ("encoder", "decoder")
    }
    config = transformers.T5GemmaConfig(**parts, **TOKENS)
    model = stir(transformers.T5GemmaForConditionalGeneration(config))
    prompt = tokens(4)  # shorter than what is generated from it
    how = {"do_sample": False, "max_new_tokens": 8, "output_logits": True}
    for cut in ({"keys": [1]}, {"keys": [0, 2], "queries": slice(3, None)}):
        with knock_out(model, **cut):
            done = model.generate(prompt, **how, return_dict_in_generate=True)
            given = {"input_ids": prompt, "decoder_input_ids": done.sequences}
            full = read(model, given, use_cache=False)
        assert largest(full[:, :-1], torch.stack(done.logits, 1)) < 1e-5
        assert largest(full, read(model, given, use_cache=False)) > 1e-2


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("shorter", [6, 3])
def test_our_own_models_generate_under_a_cut_as_they_read(window, shorter):
    sizes = {"width": WIDTH, "layers": 2, "heads": HEADS, "kv_heads": 2}
    config = Config(vocabulary=60, context=40, window=window, **sizes)
    torch.manual_seed(0)
    model = stir(CausalTransformer(config), 0.3)
    prompts = [[3, 4, 5, 6, 7, 8], list(range(9, 9 + shorter))]
    with torch.no_grad():
        cut = {"keys": [1, 5, 7], "queries": slice(3, None)}
        with knock_out(model, [(0, 1), (1, 2)], **cut):
            together = generate(model, prompts, 6)
            for prompt, new in zip(prompts, together, strict=True):
                row = list(prompt)
                for _ in range(6):
                    row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
                assert row == [*prompt, *new]
            done = model(torch.tensor([row]))
        assert largest(done, model(torch.tensor([row]))) > 1e-3


def test_a_removed_head_of_our_own_models_is_a_slice_of_zeros():
    torch.manual_seed(0)
    config = Config(vocabulary=60, context=40, width=WIDTH, layers=2, heads=HEADS)
    model = stir(CausalTransformer(config), 0.3)
    with torch.no_grad():
        before = model(tokens())
        with knock_out(model, [(1, 2)]):
            cut = model(tokens())
        model.blocks[1].attention.out.weight[:, 2 * D : 3 * D] = 0
        assert largest(cut, model(tokens())) < 1e-5
        assert largest(cut, before) > 1e-2


# --- other doors ----------------------------------------------------------------------


class Block(nn.Module):
    """Attention by hand: the kernel, or torch's own module."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x, context=None, **options):
        if self.kind == "mha":
            y = x if context is None else context
            return self.attention(x, y, y, **options)[0]
        a = self.attention
        q, k, v = F.linear(x, a.in_proj_weight, a.in_proj_bias).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (HEADS, D)).transpose(1, 2) for y in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, **options)
        return a.out_proj(out.transpose(1, 2).flatten(-2))


def project(block, x, context=None):
    a, y = block.attention, x if context is None else context
    parts = zip(
        a.in_proj_weight.chunk(3), a.in_proj_bias.chunk(3), (x, y, y), strict=True
    )
    return [
        F.linear(z, w, b).unflatten(-1, (HEADS, D)).transpose(1, 2) for w, b, z in parts
    ]


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("masked", ["nothing", "bool", "numbers", "padding", "by head"])
def test_torchs_own_module_is_the_definition_under_that_mask(masked, weights):
    torch.manual_seed(0)
    block = Block("mha").eval()
    x, n = torch.randn(2, 6, WIDTH), 6
    later = torch.ones(n, n, dtype=torch.bool).triu(1)
    padded = torch.zeros(2, n, dtype=torch.bool)
    padded[1, 4:] = True
    options, allowed = {
        "nothing": ({}, torch.ones(1, 1, n, n, dtype=torch.bool)),
        "bool": ({"attn_mask": later, "is_causal": True}, ~later[None, None]),
        "numbers": (
            {"attn_mask": torch.zeros(n, n).masked_fill(later, -torch.inf)},
            ~later[None, None],
        ),
        "padding": (
            {"key_padding_mask": padded},
            ~padded[:, None, None].expand(2, 1, n, n),
        ),
        "by head": (
            {"attn_mask": later.expand(2 * HEADS, n, n)},
            ~later[None, None],
        ),
    }[masked]
    hidden = hidden_cells(n, n, [0, 2], [0, 3, 5], [1, 3])
    pairs = [("attention", 1), ("attention", 3)]
    seen = {}
    with knock_out(block, pairs, keys=[0, 2], queries=[0, 3, 5]), torch.no_grad():
        block.attention.register_forward_hook(
            lambda _m, _a, out: seen.update(weights=out[1])
        )
        done = block(x, need_weights=weights, **options)
        defined = regard.attention(
            *project(block, x), allowed & ~hidden, see=("weights",)
        )
        expected = block.attention.out_proj(defined.out.transpose(1, 2).flatten(-2))
    assert largest(done, expected) < 1e-5
    if weights:
        assert largest(seen["weights"], defined.weights.mean(1)) < 1e-5


@pytest.mark.parametrize("kind", ["mha", "kernel"])
def test_a_head_is_removed_from_modules_that_are_no_language_models(kind):
    torch.manual_seed(0)
    block, x = Block(kind).eval(), torch.randn(2, 6, WIDTH)
    with torch.no_grad():
        with knock_out(block, [(0, 2)]):
            cut = block(x)
        before = block(x)
        block.attention.out_proj.weight[:, 2 * D : 3 * D] = 0
        assert largest(cut, block(x)) < 1e-6
        assert largest(before, cut) > 1e-3


def test_the_fast_path_of_an_encoder_is_left_and_taken_again():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 6, WIDTH)
    with torch.no_grad():
        before = model(x)
        with knock_out(model, [(0, 1), ("layers.1.self_attn", 3)]):
            cut = model(x)
        assert largest(model(x), before) == 0
        for i, head in ((0, 1), (1, 3)):
            weight = model.layers[i].self_attn.out_proj.weight
            weight[:, head * D : (head + 1) * D] = 0
        assert largest(cut, model(x)) < 2e-6
        assert largest(cut, before) > 1e-3


@pytest.mark.parametrize("training", [False, True])
def test_an_encoder_of_torch_is_watched_in_both_orders(training):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    x, cut = torch.randn(2, 6, WIDTH), {"heads": [(0, 1), (1, 2)], "keys": [0, 3]}
    with torch.no_grad():
        with knock_out(model, **cut):
            alone = model(x)
        with knock_out(model, **cut), watch(model) as inside:
            assert largest(model(x), alone) == 0
        with watch(model) as around, knock_out(model, **cut):
            assert largest(model(x), alone) == 0
    for seen in (inside, around):
        assert seen.layers == ("layers.0.self_attn", "layers.1.self_attn")
        for record in seen.recording.records:
            head = 1 if record.name == seen.layers[0] else 2
            weights = torch.as_tensor(record.weights())
            assert not weights[head][:, [0, 3]].any()
            assert weights[3][:, [0, 3]].all()


def test_rows_that_are_not_asked_for_keep_their_bits_also_in_padding():
    for name in ("llama", "llama-eager", "bloom"):
        _, model, inputs = open_family(name)
        padding = torch.ones_like(inputs["input_ids"])
        padding[1, :4] = 0
        before = read(model, {**inputs, "attention_mask": padding})
        with knock_out(model, layers=[1], keys=[1, 2], queries=[4]):
            after = read(model, {**inputs, "attention_mask": padding})
        changed = (after - before).abs().amax(-1)
        for row, token in zip(changed, (4, 8), strict=True):  # the fifth real one
            assert row[token] > 1e-3, name
            assert not row[:token].any(), name
            assert not row[token + 1 :].any(), name


def test_weights_that_a_model_gives_out_are_the_cut_ones():
    _, model, inputs = open_family("llama-eager")
    with torch.no_grad(), knock_out(model, [(0, 1), (1, 1)], keys=[0, 4]):
        given = model(**inputs, output_attentions=True).attentions
    for weights in given:
        assert not weights[:, 1, :, [0, 4]].any()
        assert not weights[:, 1, 0].any()  # it sees nothing
        assert largest(weights[:, 1, 1:].sum(-1), torch.ones(())) < 1e-6
        assert weights[:, 0, :, 0].all()


@pytest.mark.parametrize("n", [4, 7])
def test_is_causal_keeps_its_meaning_with_fewer_queries_than_keys(n):
    torch.manual_seed(0)
    block = Block("kernel").eval()
    q, k, v = torch.randn(3, 1, HEADS, 7, D)
    block.forward = lambda x: F.scaled_dot_product_attention(
        q[:, :, :n], k, v, is_causal=True
    )
    calls, kernel = [], F.scaled_dot_product_attention

    class Spy(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is kernel:
                calls.append(args[5])
            return func(*args, **(kwargs or {}))

    with Spy(), knock_out(block, keys=[1], queries=[2, 3]):
        cut = block(torch.zeros(1, n, WIDTH))
    assert calls == [False]  # some kernels refuse both, a mask and is_causal
    mask = torch.ones(n, 7, dtype=torch.bool).tril()  # as torch counts: from the left
    assert largest(block(None), regard.attention(q[:, :, :n], k, v, mask).out) < 1e-5
    mask[2:4, 1] = False
    assert largest(cut, regard.attention(q[:, :, :n], k, v, mask).out) < 1e-5


def test_gradients_stay_finite_where_a_row_sees_nothing():
    for name in ("llama", "llama-eager", "t5", "t5-eager", "bloom"):
        _, model, inputs = open_family(name)
        with knock_out(model, keys=slice(None), queries=[0, 3]):
            model(**inputs).logits.square().mean().backward()
        grads = [w.grad for w in model.parameters() if w.grad is not None]
        assert all(g.isfinite().all() for g in grads), name
        assert any(g.abs().max() > 0 for g in grads)
    for kind in ("mha", "kernel"):
        block, x = Block(kind), torch.randn(2, 6, WIDTH, requires_grad=True)
        with knock_out(block, keys=slice(None), queries=[0, 3]):
            out = block(x)
        out.square().mean().backward()
        assert torch.equal(
            out[:, [0, 3]], block.attention.out_proj.bias.expand(2, 2, -1)
        )
        assert x.grad.isfinite().all()
        assert x.grad.any()


def test_a_checkpointed_layer_is_cut_again_when_it_is_computed_again():
    _, model, inputs = open_family("llama")
    grads = []
    for again in (False, True):
        model.zero_grad()
        layer = model.model.layers[0]
        own = layer.forward
        if again:
            layer.forward = lambda *args, own=own, **named: checkpoint(
                own, *args, use_reentrant=False, **named
            )
        with knock_out(model, [(0, 1)], keys=[0, 3]):
            model(**inputs, use_cache=False).logits.square().mean().backward()
        if again:
            del layer.forward
        grads.append([w.grad.clone() for w in layer.parameters()])
    assert all(largest(a, b) < 1e-6 for a, b in zip(*grads, strict=True))


def weigh(seen):
    return [torch.as_tensor(record.weights()) for record in seen.recording.records]


LINEAR = {"qwen3-next"}  # some layers attend without a softmax
APART = {"longformer", "bigbird", "qwen2-vl", *BLIND, *LINEAR}
SEEN = [n for n in OTHERS if n not in APART]


@pytest.mark.parametrize("name", LINEAR)
def test_layers_without_a_softmax_are_named_and_can_be_left_out(name):
    model, inputs = OTHERS[name].build()
    with watch(model) as seen:
        model(**inputs)
    (silent,) = [x.name for x in seen.coverage() if x.attention and x.reason]
    wrong = knock_out(model, keys=[3, 4])
    with pytest.raises(OptionError, match=f"{silent} ran, but"), wrong:
        model(**inputs)
    cut = knock_out(model, layers=seen.layers, keys=[3, 4])
    with torch.no_grad(), cut, watch(model) as seen:
        model(**inputs)
    assert seen.records
    assert all(not x[..., [3, 4]].any() for x in weigh(seen))


@pytest.mark.parametrize("name", SEEN)
def test_keys_are_hidden_in_every_family_or_the_layer_is_named(name):
    model, inputs = OTHERS[name].build()
    with torch.no_grad(), knock_out(model, keys=[3, 4]), watch(model) as seen:
        model(**inputs)
    assert [x for x in seen.coverage() if x.reason and x.attention] == []
    for record in seen.recording.records:
        at = torch.as_tensor(record.k_positions)
        weights = torch.as_tensor(record.weights())
        assert not weights[..., torch.isin(at, torch.tensor([3, 4]))].any()
        assert weights.any()


@pytest.mark.parametrize("name", sorted(OTHERS.keys() - set(SEEN)))
def test_attention_that_cannot_be_cut_is_refused_and_never_skipped(name):
    model, inputs = OTHERS[name].build()
    words = "no attention was seen|attends in pieces|attends, but was not cut"
    words += "|ran, but its attention was not seen"
    cut = knock_out(model, keys=[3, 4])
    with torch.no_grad(), pytest.raises(OptionError, match=words), cut:
        model(**inputs)


CLOSED = ["mha", "mha-by-head", "mha-unbatched", "torch-encoder", "torch-decoder"]


@pytest.mark.parametrize("name", CLOSED)
def test_three_lenses_see_the_same_inside_of_torchs_own_modules(name):
    model, inputs = OTHERS[name].build()
    with torch.no_grad():
        with watch(model) as alone:
            model(**inputs)
        with watch(model) as outer, watch(model) as middle, watch(model) as inner:
            model(**inputs)
    for seen in (outer, middle, inner):
        assert seen.layers == OTHERS[name].layers
        assert [x.calls for x in seen.coverage()] == [1] * len(seen.layers)
        pairs = zip(weigh(seen), weigh(alone), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)


def test_what_one_lens_computes_is_no_call_for_another():
    _, model, inputs = open_family("llama-eager")
    with watch(model) as outer, watch(model) as inner:
        read(model, inputs)
    for seen in (outer, inner):
        assert [(x.calls, x.via) for x in seen.coverage()] == [(1, "softmax")] * 2


class Engine(nn.Module):
    """A layer that asks our engine for everything that it can do."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        return attend(q, k, v, regard.causal(), **self.options).out


ENGINE = {
    "scale": {"scale": 0.7},
    "learned scale": {"scale": torch.tensor(0.7)},
    "softcap": {"softcap": 1.5},
    "sink": {"sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "bias": {"bias": torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(3))},
    "alibi": {"bias": alibi(torch.tensor([0.5, 0.25, 0.125, 0.0625]))},
    "all": {"scale": 0.3, "softcap": 2.0, "sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


@pytest.mark.parametrize("what", ENGINE)
def test_a_watch_on_our_engine_is_told_all_of_its_options(what):
    options = ENGINE[what]
    torch.manual_seed(0)
    model, (q, k, v) = Engine(**options), torch.randn(3, 2, 4, 6, 8)
    hidden = hidden_cells(6, 6, [1, 2], [2, 4], [0, 3])
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    cut = knock_out(model, [(0, 0), (0, 3)], keys=[1, 2], queries=[2, 4])
    with watch(model) as plain:
        model(q, k, v)
    with watch(model) as seen, cut:
        out = model(q, k, v)
    for lens, allowed in ((plain, causal), (seen, causal & ~hidden)):
        assert [x.reason for x in lens.coverage()] == [""]
        expected = regard.attention(q, k, v, allowed, **options, see=("weights",))
        for mine, theirs in zip(weigh(lens), expected.weights, strict=True):
            assert largest(mine, theirs) < 1e-5
    assert largest(out, expected.out) < 1e-5


@pytest.mark.parametrize("start", [2, torch.tensor([0, 3])], ids=["one", "each"])
def test_a_watch_on_our_engine_is_told_where_the_queries_start(start):
    torch.manual_seed(0)
    model, (q, k, v) = Engine(q_start=start), torch.randn(3, 2, 4, 6, 8)
    with watch(model) as seen:
        model(q, k, v)
    assert [x.reason for x in seen.coverage()] == [""]
    expected = regard.attention(
        q, k, v, regard.causal(), q_start=start, see=("weights",)
    ).weights
    for mine, theirs in zip(weigh(seen), expected, strict=True):
        assert largest(mine, theirs) < 1e-5


class Several(nn.Module):
    """One module that attends twice, with a gate and, if asked, mixed heads."""

    def __init__(self, *, mixed=False, traced=True):
        super().__init__()
        self.mixed, self.traced = mixed, traced
        self.gate = nn.Linear(D, D)

    def forward(self, x):  # (B, H, N, D)
        gate = self.gate(x).softmax(-1)  # as large as attention, and it is none
        return torch.stack([self.attend(x) * gate, self.attend(x.flip(-1)) * gate])

    def attend(self, x):
        if self.traced:
            logits = x @ x.mT
        else:  # additive attention: no product makes its logits
            logits = (x[..., :, None, :] + x[..., None, :, :]).tanh().sum(-1)
        weights = logits.softmax(-1)
        if self.mixed:
            weights = (weights.movedim(1, -1) @ MIX).movedim(-1, 1)
        return weights @ x


MIX = torch.randn(HEADS, HEADS, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("cut", "zeros"),
    [
        ({"heads": [(0, 1)]}, [0]),
        ({"heads": [(1, 1)]}, [1]),
        ({"heads": [("0#2", 1)]}, [1]),
        ({"heads": [("0", 1)]}, [0, 1]),
    ],
)
def test_each_attention_of_a_module_is_a_layer_and_its_gate_is_none(cut, zeros):
    torch.manual_seed(0)
    model, x = nn.Sequential(Several()), torch.randn(2, HEADS, 6, D)
    with torch.no_grad():
        expected = model(x)
        expected[zeros, :, 1] = 0
        with knock_out(model, **cut), watch(model) as seen:
            assert largest(model(x), expected) < 1e-6
    assert seen.layers == ("0", "0#2")
    wrong = knock_out(model, [(2, 0)])
    with pytest.raises(OptionError, match="layer 2 was not seen"), wrong:
        model(x)


def test_heads_that_are_mixed_are_refused_and_their_keys_are_hidden_together():
    torch.manual_seed(0)
    model, x = Several(mixed=True), torch.randn(2, HEADS, 6, D)
    for cut in ({}, {"keys": [1]}):
        wrong = knock_out(model, [(0, 1)], **cut)
        with pytest.raises(OptionError, match="not separate"), wrong:
            model(x)
    with torch.no_grad(), knock_out(model, keys=[1]):
        cut = model(x)[0]
    logits = (x @ x.mT).index_fill(-1, torch.tensor([1]), -torch.inf)
    mixed = (logits.softmax(-1).movedim(1, -1) @ MIX).movedim(-1, 1)
    gate = model.gate(x).softmax(-1).detach()
    assert largest(cut, mixed @ x * gate) < 1e-5


def test_attention_whose_logits_no_product_makes_is_refused():
    torch.manual_seed(0)
    model, x = Several(traced=False), torch.randn(2, HEADS, 6, D)
    for cut in ({"keys": [1]}, {"heads": [(0, 1)]}):
        wrong = knock_out(model, **cut)
        with pytest.raises(OptionError, match="attends, but was not cut"), wrong:
            model(x)


# --- nothing stays --------------------------------------------------------------------


def take_stock(model):
    modules = list(model.modules())
    files = {type(m).__module__ for m in modules}
    eager = [vars(sys.modules[f]).get("eager_attention_forward") for f in files]
    return {
        "forward": [vars(m).get("forward") for m in modules],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in modules],
        "eager": eager,
        "interface": ALL_ATTENTION_FUNCTIONS._local_mapping,
        "sdpa": F.scaled_dot_product_attention,
        "softmax": F.softmax,
        "mha": F.multi_head_attention_forward,
        "encoder": nn.TransformerEncoder.forward,
        "modes": _get_current_function_mode_stack(),
        "edits": (list(ACTIVE), PASSING.busy, dict(PATCHED), COMPUTING.on),
    }


def is_same(before, after):
    assert before.keys() == after.keys()
    for name, x in before.items():
        pairs = (
            zip(x, after[name], strict=True)
            if isinstance(x, list)
            else [(x, after[name])]
        )
        for one, other in pairs:
            assert one is other or (
                isinstance(one, tuple | dict | bool) and one == other
            ), name


@pytest.mark.parametrize("name", ["llama", "llama-eager", "bloom", "t5"])
def test_nothing_stays_patched_also_after_errors(name):
    _, model, inputs = open_family(name)
    before, logits = take_stock(model), read(model, inputs)
    with knock_out(model, keys=[1]), watch(model), knock_out(model, [(0, 0)]):
        read(model, inputs)
    is_same(before, take_stock(model))

    def fail(_module, _args, _out):
        raise RuntimeError("in the middle of a pass")

    last = list(model.modules())[-1]
    handle = last.register_forward_hook(fail)
    stock = take_stock(model)
    with pytest.raises(RuntimeError, match="in the middle"), knock_out(model):
        read(model, inputs)
    is_same(stock, take_stock(model))
    handle.remove()
    with pytest.raises(KeyError), watch(model), knock_out(model, keys=[1]):
        raise KeyError("between two passes")

    def interrupt(_module, _args):
        raise KeyboardInterrupt

    handle = last.register_forward_pre_hook(interrupt)
    stock = take_stock(model)
    with pytest.raises(KeyboardInterrupt), watch(model), knock_out(model, keys=[1]):
        read(model, inputs)
    is_same(stock, take_stock(model))
    handle.remove()
    with (
        pytest.raises(OptionError, match="there is no head 9"),
        knock_out(model, [(1, 9)]),
    ):
        read(model, inputs)
    is_same(before, take_stock(model))
    assert largest(read(model, inputs), logits) == 0


def test_other_models_and_threads_are_left_alone():
    _, model, inputs = open_family("llama-eager")
    other = FAMILIES["llama-eager"].build()
    before, got = read(other, inputs), []
    plain = read(model, inputs)

    def meanwhile(_module, _args):
        thread = threading.Thread(target=lambda: got.append(read(other, inputs)))
        thread.start()
        thread.join()

    handle = model.model.layers[1].mlp.register_forward_pre_hook(meanwhile)
    with knock_out(model, keys=[0]):
        cut = read(model, inputs)
        got.append(read(other, inputs))
    handle.remove()
    assert largest(cut, plain) > 1e-2
    assert [largest(x, before) for x in got] == [0, 0]


def test_two_threads_under_one_cut_get_what_each_gets_alone():
    _, model, inputs = open_family("llama")
    given = [inputs["input_ids"], tokens(7)]
    masks = [torch.ones(2, 10), torch.ones(2, 7)]
    masks[1][1, :3] = 0
    calls = [
        {"input_ids": x, "attention_mask": m} for x, m in zip(given, masks, strict=True)
    ]
    cut, turn, together = {"keys": [1], "queries": [2, 3]}, threading.Barrier(2), {}

    def work(i):
        for _ in range(4):
            turn.wait()
            together[i] = read(model, calls[i])

    with knock_out(model, **cut):
        alone = [read(model, call) for call in calls]
        workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert largest(alone[1], read(model, calls[1])) > 1e-3
    assert [largest(together[i], alone[i]) for i in range(2)] == [0, 0]


# --- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keys": slice(-3, -3)}, r"keys=slice\(-3, -3, None\), expected positions of"),
        ({"keys": slice(-3, 0)}, "expected positions of tokens, counted from 0"),
        ({"keys": slice(4, 4)}, "expected positions of tokens"),
        ({"keys": slice(4, 8, -1)}, "expected positions of tokens"),
        ({"keys": slice("a", None)}, "expected positions of tokens"),
        ({"keys": 3}, r"Write keys=slice\(0, 4\), or keys=\[-1\] for the last token"),
        ({"keys": [1.5]}, "a range or a list of integers"),
        ({"keys": [True, False]}, "a range or a list of integers"),
        ({"keys": []}, "expected positions of tokens"),
        ({"keys": [1], "queries": [0.5]}, r"queries=\[0.5\], expected"),
        ({"queries": [1]}, r"Write keys=slice\(None\) for everything"),
        ({"heads": [3]}, r"3 is no head, expected \(layer, head\)"),
        ({"heads": [(0, -1)]}, "is no head"),
        ({"heads": []}, "an empty list"),
        ({"heads": [(0, 1)], "layers": [0]}, "heads already name their layers"),
        ({"layers": ["model.layers.7"]}, "there is no layer 'model.layers.7'"),
        ({"layers": [-1]}, "there is no layer -1"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(options, words):
    _, model, _ = open_family("llama")
    with pytest.raises(OptionError, match=words), knock_out(model, **options):
        pytest.fail("it was accepted")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"keys": [10]},
            r"keys=\(10,\) needs 11 tokens, but the longest input has 10",
        ),
        ({"keys": range(8, 12)}, "needs 12 tokens"),
        ({"keys": [-11]}, r"keys=\(-11,\) needs 11 tokens"),
        ({"keys": slice(-11, None)}, "needs 11 tokens"),
        ({"keys": slice(10, None)}, "needs 11 tokens"),
        ({"keys": [1], "queries": [12]}, r"queries=\(12,\) needs 13 tokens"),
        (
            {"heads": [(1, 4)]},
            "model.layers.1.self_attn has 4 heads, there is no head 4",
        ),
        (
            {"layers": [2]},
            r"layer 2 was not seen attending.*{0: 'model.layers.0.self_attn'",
        ),
        ({"layers": ["model.norm"]}, "layer 'model.norm' was not seen attending"),
    ],
)
def test_what_missed_the_model_is_refused_after_the_run(options, words):
    _, model, inputs = open_family("llama")
    with pytest.raises(OptionError, match=words), knock_out(model, **options):
        read(model, inputs)
    with knock_out(model, keys=slice(8, 99)):  # a slice may end behind the last token
        read(model, inputs)


def test_a_model_that_never_ran_is_refused():
    _, model, _ = open_family("llama")
    words = r"no attention was seen.*Run it inside of the with"
    with pytest.raises(OptionError, match=words), knock_out(model, keys=[0]):
        pass
    words = "layer 1 was not seen attending.*Seen were none"
    with pytest.raises(OptionError, match=words), knock_out(model, [(1, 0)]):
        pass


def test_a_model_without_attention_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with (
        pytest.raises(OptionError, match="no attention was seen in this Sequential"),
        knock_out(model),
    ):
        model(torch.ones(1, 4))
    with (
        pytest.raises(OptionError, match="nothing can be cut out of a int"),
        knock_out(3),
    ):
        pass


class HiddenAttention(nn.Module):
    def forward(self, x):
        scores = torch.exp(x @ x.transpose(-1, -2))
        return scores / scores.sum(-1, keepdim=True) @ x


def test_attention_that_nobody_sees_is_named():
    model = nn.Sequential(Block("kernel"), HiddenAttention())
    x = torch.randn(2, 6, WIDTH)
    with (
        pytest.raises(OptionError, match="1 attends, but was not cut"),
        knock_out(model),
    ):
        model(x)
    with knock_out(model, layers=["0"]):
        model(x)


class Folded(nn.Module):
    """Attention whose heads are part of the batch, or of which it does a part."""

    def __init__(self, rows=None):
        super().__init__()
        self.rows = rows

    def forward(self, x):
        if self.rows is None:
            return F.scaled_dot_product_attention(x, x, x)
        q = x[:, None]
        parts = q.split(self.rows, 2)
        return torch.cat([(p @ q.mT).softmax(-1) @ q for p in parts], 2)[:, 0]


def test_heads_or_pieces_that_cannot_be_told_apart_are_refused():
    x, model = torch.randn(2, 6, WIDTH), nn.Sequential(Folded())
    with (
        pytest.raises(OptionError, match="folds its heads into the batch"),
        knock_out(model, [(0, 1)]),
    ):
        model(x)
    for differs in (lambda b, h, q, k: h != k, lambda b, h, q, k: b != k):
        with (
            pytest.raises(OptionError, match="one mask for all of them, and no padd"),
            knock_out(model, mask=regard.where(differs)),
        ):
            model(x)
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[:, 2] = False
    for hidden in ({"keys": [2]}, {"mask": regard.where(lambda b, h, q, k: k != 2)}):
        with knock_out(model, **hidden):
            assert largest(model(x), regard.attention(x, x, x, mask).out) < 1e-5
    with knock_out(model, keys=[2]):
        assert largest(model(x), regard.attention(x, x, x, mask).out) < 1e-5
    model = nn.Sequential(Folded(4))
    with (
        pytest.raises(OptionError, match="0 attends in pieces, 4 queries at a time"),
        knock_out(model),
    ):
        model(x)


class TokensFirst(nn.Module):
    def forward(self, x):  # (N, B, C)
        q = x.transpose(0, 1)[:, None]
        return ((q @ q.mT).softmax(-1) @ q)[:, 0].transpose(0, 1)


def test_tokens_may_come_before_the_batch():
    x, mask = torch.randn(6, 2, 8), torch.ones(6, 6, dtype=torch.bool)
    mask[:, 2] = False
    with knock_out(model := TokensFirst(), keys=[2]):
        cut = model(x).transpose(0, 1)
    y = x.transpose(0, 1)
    assert largest(cut, regard.attention(y, y, y, mask, scale=1.0).out) < 1e-5


class Growing(nn.Module):
    """Attention with a cache of its own, which nobody else knows of."""

    def __init__(self):
        super().__init__()
        self.past = None

    def forward(self, x):
        self.past = x if self.past is None else torch.cat([self.past, x], 1)
        q, k = (y[:, None] for y in (x, self.past))
        mask = None
        if q.shape[2] > 1:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, k, mask)[:, 0]


def test_a_cache_of_ones_own_is_followed_as_it_grows():
    x = torch.randn(1, 6, WIDTH)
    model = Growing()
    with knock_out(model, keys=[1, 2], queries=[3, 5]):
        steps = torch.cat([model(x[:, :4]), model(x[:, 4:5]), model(x[:, 5:])], 1)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    mask[[3, 3, 5, 5], [1, 2, 1, 2]] = False
    expected = regard.attention(x, x, x, mask).out
    assert largest(steps, expected) < 1e-5
    with (
        pytest.raises(OptionError, match="from 1 queries to 7 keys, and which tokens"),
        knock_out(model, keys=[1], queries=[3]),
    ):
        model(x[:, :1])


# --- effects --------------------------------------------------------------------------


def test_an_effect_is_what_changed():
    _, model, inputs = open_family("gpt2")
    labels = inputs["input_ids"]
    found = effect(
        model, lambda m: m(**inputs, labels=labels), [(0, 1), (1, 2)], keys=[3]
    )
    with torch.no_grad():
        old = model(**inputs, labels=labels)
        with knock_out(model, [(0, 1), (1, 2)], keys=[3]):
            new = model(**inputs, labels=labels)
    p, q = (x.logits[:, -1].softmax(-1) for x in (old, new))
    assert found.logits == pytest.approx(largest(old.logits, new.logits), rel=1e-6)
    assert found.kl == pytest.approx((p * (p / q).log()).sum(-1).tolist(), rel=1e-4)
    assert min(found.kl) > 1e-4
    assert found.loss == pytest.approx((float(old.loss), float(new.loss)))
    for b in range(2):
        assert found.before[b] == (int(p[b].argmax()), pytest.approx(float(p[b].max())))
        assert found.after[b] == (int(q[b].argmax()), pytest.approx(float(q[b].max())))


def test_an_effect_of_nothing_is_nothing():
    _, model, inputs = open_family("llama")
    found = effect(model, lambda m: m(**inputs).logits, keys=[9], queries=[0])
    assert found.logits == 0
    assert found.kl == pytest.approx((0, 0), abs=1e-6)
    assert found.before == found.after
    assert found.loss is None


def test_an_effect_does_not_hide_what_is_no_number():
    _, model, inputs = open_family("llama")
    spoil = iter((0.0, torch.nan, 0.0, torch.inf, torch.inf, torch.inf))

    def run(model):
        logits = model(**inputs).logits.clone()
        logits[0, -1, 3] -= next(spoil)
        return logits

    found = effect(model, run, keys=[9], queries=[0])
    assert math.isnan(found.logits)
    assert math.isnan(found.kl[0])
    assert found.kl[1] == pytest.approx(0, abs=1e-6)
    found = effect(model, run, keys=[9], queries=[0])  # a token became impossible
    assert (found.logits, found.kl[0]) == (math.inf, math.inf)
    found = effect(model, run, keys=[9], queries=[0])  # and so it was before
    assert (found.logits, found.kl[0]) == (0, pytest.approx(0, abs=1e-6))


def test_an_effect_is_a_short_table():
    found = Effect(
        logits=1.25, kl=(0.5,), before=((7, 0.25),), after=((9, 0.5),), loss=(1.0, 1.5)
    )
    assert str(found).splitlines() == [
        "largest change of a logit   1.25",
        "loss   1.0000 -> 1.5000   (+0.5000)",
        "sequence        KL   next token before              after",
        "       0       0.5            7  25.0%           9  50.0%",
    ]


def test_an_effect_refuses_what_it_cannot_compare():
    _, model, inputs = open_family("llama")
    with pytest.raises(OptionError, match="nothing can be cut out of a int, expected"):
        effect(3, lambda m: m(**inputs).logits)
    with pytest.raises(OptionError, match="run returned a str, expected logits"):
        effect(model, lambda _: "text", [(0, 0)])
    lengths = iter((4, 5))
    with pytest.raises(OptionError, match="expected the same shape"):
        effect(model, lambda m: m(tokens(next(lengths))).logits, [(0, 0)])
    with pytest.raises(OptionError, match=r"Call model\.eval"):
        effect(model.train(), lambda m: m(**inputs).logits, [(0, 0)])


def test_classes_of_an_image_are_a_distribution_too():
    _, model, inputs = open_family("vit")
    found = effect(model, lambda m: m(**inputs), keys=range(1, 9))
    assert len(found.kl) == 2
    assert found.logits > 1e-3
