"""The thirteen defects that a test on models in the wild found, one section for each.

Real models of transformers, shrunk, and small ones that write attention as other
libraries do. Records are held against the dense truth (dense_truth.py). A layer that is
not recorded must say why.
"""

import sys
import time
from contextlib import contextmanager

import pytest
import torch
import transformers
from dense_truth import (
    EXACT,
    TIGHT,
    build,
    compare_all,
    count_calls,
    count_softmaxes,
    draw,
    explain,
    find_error,
    find_errors,
    find_said,
    group_by_module,
    group_coverage,
    list_softmaxes,
    list_wrong,
    pad,
    run_plain,
    split_heads,
    watch_run,
)
from families import quiet
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard
from regard.ablate import knock_out
from regard.errors import OptionError

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT = {**SIZES, "vocab_size": 100, "max_position_embeddings": 64}
IMAGE = {**SIZES, "image_size": 32, "patch_size": 8}
PAIR = {
    "vocab_size": 100,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 2,
}


def call(**inputs):
    """Return what runs a model on these inputs."""
    return lambda model: run_plain(model, **inputs)


def check_all(model, run, real=None):
    """Run a model watched; assert that every softmax is recorded and right."""
    found = list_softmaxes(model, run)
    seen, _ = watch_run(model, run)
    assert list_wrong(compare_all(seen, found, real)) == {}
    assert {n: x for n, x in count_calls(seen).items() if x} == count_softmaxes(found)
    return seen


class Heads(nn.Module):
    """What the models below share: projections to q, k and v, and heads of them."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.qkv = nn.Linear(width, 3 * width)
        with torch.no_grad():
            self.qkv.weight.mul_(4)  # attention is far from even
        self.heads = heads

    def split(self, x):
        """Return q, k and v, each (B, H, N, D)."""
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        return parts.movedim(-3, 0).transpose(-2, -3)

    def score(self, x):
        """Return scaled scores (B, H, N, N) and v."""
        q, k, v = self.split(x)
        return q @ k.mT / q.shape[-1] ** 0.5, v


class Plain(Heads):
    """Attention through the function of torch."""

    def forward(self, x, mask=None):
        q, k, v = self.split(x)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2).flatten(2)


class Written(Heads):
    """Attention as two products and a softmax."""

    def forward(self, x):
        scores, v = self.score(x)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def give(*shape, dtype=torch.float32):
    """Return random numbers, the same every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


# --- 1. masks belong to the calls that used them --------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_1_a_padded_text_of_clip_takes_no_patch_from_the_image(side):
    valid, text = pad(10, 4, 10, side=side), draw(2, 10)
    inputs = {"input_ids": text, "pixel_values": give(2, 3, 32, 32)}
    model = build(
        "CLIPModel",
        inputs,
        text_config={**TEXT, "eos_token_id": 2},
        vision_config=IMAGE,
        projection_dim=16,
    )
    seen = check_all(model, call(**inputs, attention_mask=valid), {10: valid})
    vision = [r for r in seen.records if r.name.startswith("vision")]
    assert [r.q.shape[1] for r in vision] == [17] * 4
    assert [r.q_positions.tolist() for r in vision] == [list(range(17))] * 4
    blamed = [x for x in seen.audit() if x.level == "error" and "vision" in str(x)]
    assert blamed == []


@pytest.mark.parametrize("side", ["left", "right"])
def test_1_a_padded_text_of_blip_takes_no_patch_from_the_image(side):
    valid = pad(10, 4, 10, side=side)
    inputs = {"input_ids": draw(2, 10), "pixel_values": give(2, 3, 32, 32)}
    model = build(
        "BlipForConditionalGeneration",
        inputs,
        text_config={
            **TEXT,
            "encoder_hidden_size": 32,
            "eos_token_id": 2,
            "sep_token_id": 2,
            "bos_token_id": 1,
            "pad_token_id": 0,
        },
        vision_config=IMAGE,
        projection_dim=16,
    )
    check_all(model, call(**inputs, attention_mask=valid), {10: valid})


@pytest.mark.parametrize("side", ["left", "right"])
def test_1_a_padded_text_of_git_takes_no_patch_from_the_image(side):
    valid = pad(10, 4, 10, side=side)
    inputs = {"input_ids": draw(2, 10), "pixel_values": give(2, 3, 32, 32)}
    model = build("GitForCausalLM", inputs, **TEXT, vision_config=IMAGE)
    whole = torch.cat([torch.ones(2, 17, dtype=torch.long), valid], 1)
    run = call(**inputs, attention_mask=valid, use_cache=False)
    check_all(model, run, {27: whole})


@pytest.mark.parametrize("side", ["left", "right"])
def test_1_canine_is_kept_whole_at_each_of_its_lengths(side):
    valid = pad(16, 11, 16, side=side)
    inputs = {"input_ids": draw(2, 16), "attention_mask": valid}
    model = build(
        "CanineModel",
        inputs,
        **SIZES,
        num_hash_buckets=32,
        num_hash_functions=4,
        max_position_embeddings=64,
    )
    seen = check_all(model, call(**inputs), {16: valid})
    assert min(r.q.shape[1] for r in seen.records) > 1


@pytest.mark.parametrize("side", ["left", "right"])
def test_1_funnel_is_kept_whole_at_each_of_its_lengths(side):
    valid = pad(16, 7, 16, side=side)
    inputs = {"input_ids": draw(2, 16), "attention_mask": valid}
    model = build(
        "FunnelModel",
        inputs,
        vocab_size=100,
        block_sizes=[2, 2],
        num_decoder_layers=1,
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=48,
    )
    seen = check_all(model, call(**inputs), {16: valid})
    assert min(r.q.shape[1] for r in seen.records) > 1


@pytest.mark.parametrize("side", ["left", "right"])  # it counts samples: hides the end
def test_1_a_mask_of_samples_is_no_mask_of_frames(side):
    inputs = {
        "input_values": give(2, 400),
        "attention_mask": pad(400, 230, 400, side=side),
    }
    model = build(
        "Wav2Vec2Model",
        inputs,
        **SIZES,
        conv_dim=(16, 16),
        conv_kernel=(10, 3),
        conv_stride=(5, 2),
        num_feat_extract_layers=2,
        feat_extract_norm="layer",
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
        layerdrop=0.0,
    )
    seen = check_all(model, call(**inputs))
    assert {r.q.shape[1] for r in seen.records} == {39}


@pytest.mark.parametrize("side", ["left", "right"])
def test_1_every_sequence_of_xglm_has_its_own_mask(side):
    valid = pad(10, 10, 4, side=side)
    inputs = {"input_ids": draw(2, 10), "attention_mask": valid}
    model = build("XGLMForCausalLM", inputs, **XGLM)
    check_all(model, call(**inputs, use_cache=False), {10: valid})


XGLM = {
    "vocab_size": 100,
    "d_model": 32,
    "ffn_dim": 48,
    "num_layers": 2,
    "attention_heads": 4,
    "max_position_embeddings": 64,
}


class PromptTuned(nn.Module):
    """Learnt tokens in front of the text: the base model is given a longer mask."""

    def __init__(self, base, many=3):
        super().__init__()
        self.base, self.prompt = base, nn.Parameter(give(many, 32))

    def forward(self, input_ids, attention_mask):
        size = len(input_ids), len(self.prompt)
        own = self.base.get_input_embeddings()(input_ids)
        embeds = torch.cat([self.prompt.expand(size[0], -1, -1), own], 1)
        valid = torch.cat([attention_mask.new_ones(size), attention_mask], 1)
        return self.base(inputs_embeds=embeds, attention_mask=valid)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["BertModel", "LlamaModel"])
def test_1_learnt_tokens_in_front_are_no_padding(kind, side):
    valid = pad(8, 5, 8, side=side)
    inputs = {"input_ids": draw(2, 8), "attention_mask": valid}
    model = PromptTuned(build(kind, inputs, **TEXT)).eval()
    whole = torch.cat([torch.ones(2, 3, dtype=torch.long), valid], 1)
    check_all(model, call(**inputs), {11: whole})


class Masked(nn.Module):
    """A model of one's own: what it calls attention_mask is read in its own way."""

    def __init__(self, read):
        super().__init__()
        self.embed, self.attend, self.read = nn.Embedding(100, 32), Plain(), read
        with torch.no_grad():
            self.embed.weight.copy_(give(100, 32))

    def forward(self, input_ids, attention_mask):
        return self.attend(self.embed(input_ids), self.read(attention_mask))


@pytest.mark.parametrize("batch", [2, 8])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_1_a_causal_square_is_no_padding(batch, dtype):
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    if dtype == torch.float32:
        mask = torch.zeros(8, 8).masked_fill(~mask, -torch.inf)
    model = Masked(lambda mask: mask)
    run = call(input_ids=draw(batch, 8), attention_mask=mask)
    seen = check_all(model, run)
    assert [r.q.shape[1] for r in seen.records] == [8] * batch


KINDS = {  # how a mask (B, N) may be written, and how a model reads it
    "additive": (
        lambda valid: torch.zeros(valid.shape).masked_fill(valid == 0, -torch.inf),
        lambda mask: mask[:, None, None],
    ),
    "additive, finite": (
        lambda valid: (1 - valid) * torch.finfo(torch.float32).min,
        lambda mask: mask[:, None, None],
    ),
    "inverted": (lambda valid: valid == 0, lambda mask: ~mask[:, None, None]),
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_1_a_mask_that_counts_the_other_way_keeps_the_tokens(kind, side):
    write, read = KINDS[kind]
    valid, tokens = pad(8, 5, 8, side=side), draw(2, 8)
    run = call(input_ids=tokens, attention_mask=write(valid))
    check_all(Masked(read), run, {8: valid})


@pytest.mark.parametrize("kind", KINDS)
def test_1_a_token_is_knocked_out_whatever_the_mask_looks_like(kind):
    write, read = KINDS[kind]
    valid, tokens, model = pad(8, 5, 8, side="right"), draw(2, 8), Masked(read)
    without = valid.clone()
    without[:, 1] = 0
    plain, expected = (
        run_plain(model, input_ids=tokens, attention_mask=write(x))
        for x in (valid, without)
    )
    with knock_out(model, keys=[1]):
        cut = run_plain(model, input_ids=tokens, attention_mask=write(valid))
    assert float((expected - plain).abs().max()) > 0.1
    for b, n in enumerate((5, 8)):
        torch.testing.assert_close(cut[b, :n], expected[b, :n], atol=TIGHT, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_1_cross_attention_numbers_keys_as_their_encoder_does(side):
    valid = pad(10, 6, 10, side=side)
    inputs = {"input_ids": draw(2, 10), "decoder_input_ids": draw(2, 5, seed=1)}
    model = build("BartModel", inputs, **PAIR)
    run = call(**inputs, attention_mask=valid, use_cache=False)
    seen = check_all(model, run, {10: valid})
    for b in range(2):
        for i in range(2):
            own = seen.layer(f"encoder.layers.{i}.self_attn", sequence=b)
            cross = seen.layer(f"decoder.layers.{i}.encoder_attn", sequence=b)
            assert cross.k_positions.tolist() == own.k_positions.tolist()


# --- 2. what is kept stays what it was ------------------------------------------------


def list_sequences(seen):
    """Return {sequence: {layer: record}}."""
    found = {}
    for record, number in zip(seen.records, seen.recording.sequences, strict=True):
        found.setdefault(number, {})[record.name] = record
    return found


def test_2_a_cache_that_is_reset_leaves_the_earlier_record_alone():
    text = draw(1, 8)
    options = {**TEXT, "num_key_value_heads": 2}
    model = build("LlamaForCausalLM", {"input_ids": text}, **options)
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)

    def converse(model):
        for part in (slice(0, 4), slice(4, 5)):
            run_plain(model, text[:, part], past_key_values=cache)
        cache.reset()
        run_plain(model, text[:, 5:], past_key_values=cache)

    seen, _ = watch_run(model, converse)
    found = list_sequences(seen)
    assert len(found) == 2
    for number, part in enumerate((text[:, :5], text[:, 5:])):
        truth = list_softmaxes(model, call(input_ids=part, use_cache=False))
        assert seen.recording.tokens[number] == tuple(part[0].tolist())
        for name, dense in truth:
            assert find_error(found[number][name], dense[0]) < TIGHT


class Cached(Plain):
    """Keys in one buffer, written in place, for as many prompts as there are."""

    def __init__(self, room=16):
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 4, room, 8))
        self.register_buffer("values", torch.zeros(1, 4, room, 8))

    def forward(self, x, start):
        q, k, v = self.split(x)
        end = start + x.shape[1]
        self.keys[:, :, start:end], self.values[:, :, start:end] = k, v
        mask = torch.ones(end, end, dtype=torch.bool).tril()[start:]
        return F.scaled_dot_product_attention(
            q, self.keys[:, :, :end], self.values[:, :, :end], attn_mask=mask
        )


@pytest.mark.parametrize("steps", [(6,), (4, 1, 1)], ids=str)
def test_2_one_buffer_for_two_prompts_gives_two_records(steps):
    texts, model = [give(1, 6, 32), give(2, 6, 32)[1:]], Cached()

    def run(model):
        for text in texts:
            start = 0
            for n in steps:
                run_plain(model, text[:, start : start + n], start)
                start += n

    seen, _ = watch_run(model, run)
    found = list_sequences(seen)
    assert len(found) == 2
    for number, text in enumerate(texts):
        ((_, dense),) = list_softmaxes(Cached(), lambda m, x=text: run_plain(m, x, 0))
        (record,) = found[number].values()
        assert find_error(record, dense[0]) < TIGHT


class Spoiled(Heads):
    """Writes over q, k, and the weights once they have been used."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        q, k, v = (part.clone() for part in self.split(x))
        if self.how == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            weights = (q @ k.mT / 8**0.5).softmax(-1)
            out = weights @ v
            weights.zero_()
        q.zero_(), k.mul_(-3), v.fill_(7)
        return out


@pytest.mark.parametrize("size", [5, 200])
@pytest.mark.parametrize("how", ["sdpa", "written"])
def test_2_q_and_k_that_are_written_over_are_kept_as_they_were(how, size):
    x = give(2, size, 32)
    check_all(Spoiled(how), lambda model: run_plain(model, x))


# --- 3. what is attention -------------------------------------------------------------


DEEPSEEK = {
    **TEXT,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "layer_types": ["sliding_attention", "sliding_attention"],
    "mlp_layer_types": ["moe", "moe"],
    "hc_mult": 4,
    "o_groups": 2,
    "o_lora_rank": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 4,
}
DEEPSEEK.pop("intermediate_size")


def test_3_hyper_connections_are_no_attention():
    inputs = {"input_ids": draw(1, 12), "use_cache": False}
    model = build("DeepseekV4ForCausalLM", inputs, **DEEPSEEK)
    found = list_softmaxes(model, call(**inputs))
    seen, _ = watch_run(model, call(**inputs))
    names = tuple(f"model.layers.{i}.self_attn" for i in range(2))
    assert seen.layers == names
    for name, (dense,) in group_by_module(found).items():
        if name in names:  # a sink takes part of every row: its column is cut off
            n = seen.layer(name).k.shape[1]
            assert max(find_errors(seen, name, dense[..., :n])) < TIGHT
    others = [x for x in seen.coverage() if x.name not in names and x.calls]
    assert len(others) == 4
    assert [(x.attention, x.kept) for x in others] == [(False, 0)] * 4


def test_3_the_first_layer_is_cut_and_not_a_hyper_connection(monkeypatch):
    inputs = {"input_ids": draw(1, 12), "use_cache": False}
    model = build("DeepseekV4ForCausalLM", inputs, **DEEPSEEK)
    plain = run_plain(model, **inputs).logits
    with quiet(), knock_out(model, [(0, 1)]):
        cut = run_plain(model, **inputs).logits
    code = sys.modules[type(model).__module__]
    attend = code.eager_attention_forward

    def zero(module, *args, **named):
        out, weights = attend(module, *args, **named)  # (B, N, H, D)
        if module is model.model.layers[0].self_attn:
            out = out.clone()
            out[:, :, 1] = 0
        return out, weights

    monkeypatch.setattr(code, "eager_attention_forward", zero)
    expected = run_plain(model, **inputs).logits
    assert float((expected - plain).abs().max()) > 1e-3
    torch.testing.assert_close(cut, expected, atol=TIGHT, rtol=TIGHT)


class Named(nn.Module):
    """Attention, and a part with a treacherous name whose softmax is a gate."""

    def __init__(self, name):
        super().__init__()
        self.attend = Plain()
        self.add_module(name, Gate())
        self.name = name

    def forward(self, x):
        return getattr(self, self.name)(self.attend(x))


class Gate(Heads):
    """A softmax with the shape of attention that scales what it is multiplied with."""

    def forward(self, x):
        q, k, v = self.split(x)
        gate = (q + k).softmax(-1)  # (B, H, N, D)
        return (gate * v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("name", ["flatten_head", "pattern_router", "scatter"])
def test_3_a_name_does_not_make_attention(name):
    x, model = give(2, 8, 32), Named(name)
    found = group_by_module(list_softmaxes(model, lambda m: run_plain(m, x)))
    seen, _ = watch_run(model, lambda m: run_plain(m, x))
    assert seen.layers == ("attend",)
    assert max(find_errors(seen, "attend", found["attend"][0])) < TIGHT
    (gate,) = group_coverage(seen)[name]
    assert (gate.calls, gate.kept, gate.attention) == (1, 0, False)


class GatedAttention(Heads):
    """Attention, and the gate of its branches, in one module."""

    def forward(self, x):
        q, k, v = self.split(x)
        gate = (q * 2).softmax(-1)
        out = F.scaled_dot_product_attention(q, k, v) * gate
        return out.transpose(1, 2).flatten(2)


def test_3_a_gate_in_an_attention_module_is_no_sequence():
    x, model = give(2, 8, 32), nn.Sequential(GatedAttention())
    found = list_softmaxes(model, lambda m: run_plain(m, x))
    seen, _ = watch_run(model, lambda m: run_plain(m, x))
    assert len(found) == 2
    assert seen.recording.sequences == (0, 1)
    (name,) = seen.layers
    assert name.split("#")[0] == "0"
    assert max(find_errors(seen, name, found[1][1])) < TIGHT
    entries = group_coverage(seen)["0"]
    assert sum(x.calls for x in entries) == 2
    assert [x.kept for x in entries if x.attention] == [1]
    assert [x.kept for x in entries if not x.attention] == [0]


LARGE_OUTPUT = """
import json, resource, torch, regard
from torch import nn

class Codebooks(nn.Module):  # as of a model of sound: four tokens at each step
    def __init__(self):
        super().__init__()
        self.attention_head = nn.Linear(8, 8000)

    def forward(self, x):
        return self.attention_head(x).softmax(-1)

class Attention(nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.codebook_attention = Attention(), Codebooks()

    def forward(self, x):
        return self.codebook_attention(self.attention(x))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

torch.set_num_threads(1)
model, x = Model(), torch.randn(2, 4, 8, 8)
with torch.no_grad():
    model(x)
    with regard.watch(model):
        model(x[:1, :1, :2])
    before = peak()
    with regard.watch(model) as seen:
        model(x)
    kept = [(r.name, r.k.shape[1]) for r in seen.records]
print(json.dumps({"grown": peak() - before, "kept": kept}))
"""


@pytest.mark.slow
def test_3_an_output_is_not_kept_and_costs_nothing(run_apart):
    done = run_apart(LARGE_OUTPUT)
    assert {name.split("#")[0] for name, _ in done["kept"]} == {"attention"}
    assert (
        done["grown"] < 100
    )  # MB; the softmax itself is 2, an identity of its width 256


# --- 4. a generation is one record, wherever it is captured ---------------------------


SOFTMAX_MODELS = {
    "bloom": (
        "BloomForCausalLM",
        {"vocab_size": 100, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    "gptj": (
        "GPTJForCausalLM",
        {
            "vocab_size": 100,
            "n_positions": 64,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "rotary_dim": 4,
        },
    ),
    "gpt-neo": (
        "GPTNeoForCausalLM",
        {
            "vocab_size": 100,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "window_size": 5,
            "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    "codegen": (
        "CodeGenForCausalLM",
        {
            "vocab_size": 100,
            "n_positions": 64,
            "n_ctx": 64,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "rotary_dim": 4,
        },
    ),
    "mpt": (
        "MptForCausalLM",
        {
            "vocab_size": 100,
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
        },
    ),
    "xglm": ("XGLMForCausalLM", XGLM),
}
SPECIAL = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
GREEDY = {"do_sample": False, "max_new_tokens": 5}


@pytest.mark.parametrize("size", [1, 6])
@pytest.mark.parametrize("name", SOFTMAX_MODELS)
def test_4_a_generation_of_a_softmax_model_is_one_record(name, size):
    kind, options = SOFTMAX_MODELS[name]
    text = draw(2, size)
    model = build(kind, {"input_ids": text}, **options, **SPECIAL)
    run = lambda m: m.generate(text, **GREEDY)  # noqa: E731
    with quiet():
        plain = run(model)
    seen, done = watch_run(model, run)
    assert torch.equal(plain, done)
    assert seen.recording.tokens == tuple(tuple(x.tolist()) for x in done[:, :-1])
    assert len(seen.records) == 4
    truth = list_softmaxes(model, call(input_ids=done[:, :-1], use_cache=False))
    assert list_wrong(compare_all(seen, truth)) == {}
    assert set(count_calls(seen).values()) == {5}


# --- 5. the watch never ends the run --------------------------------------------------


def list_outcome(run):
    """Return what a run returns, or its error."""
    try:
        return run(), None
    except Exception as error:  # noqa: BLE001 (any: it is compared)
        return None, (type(error), str(error))


def run_both(model, run):
    """Return what is seen of a run whose outcome must be that of an unwatched one."""
    with quiet():
        plain = list_outcome(lambda: run(model))
        with regard.watch(model) as seen:
            watched = list_outcome(lambda: run(model))
    assert watched[1] == plain[1]
    return seen, plain[0], watched[0]


def check_reported(seen, name):
    """Assert that a module was heard, and either kept or explained."""
    entries = group_coverage(seen).get(name, [])
    assert sum(x.calls for x in entries) > 0 or explain(seen, name), seen.coverage()
    for x in entries:
        assert x.reason or x.note or x.kept == x.calls or not x.attention


def test_5_continuous_batching_gives_the_same_tokens():
    prompts = [draw(1, 6)[0].tolist(), draw(1, 9, seed=1)[0].tolist()]
    options = {**TEXT, "num_key_value_heads": 2, **SPECIAL}
    text = {"input_ids": draw(1, 6)}
    model = build("LlamaForCausalLM", text, **options)
    with quiet():
        model.set_attn_implementation("paged|sdpa")
    config = transformers.GenerationConfig(
        max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    batching = transformers.ContinuousBatchingConfig(
        page_size=16,
        num_blocks=16,
        max_batch_tokens=64,
        allow_block_sharing=False,
        use_async_batching=False,
        use_cuda_graph=False,
    )

    def run(model):
        done = model.generate_batch(
            prompts,
            generation_config=config,
            continuous_batching_config=batching,
            warmup=False,
        )
        return [x.generated_tokens for x in done.values()]

    seen, plain, watched = run_both(model, run)
    assert [len(x) for x in plain] == [4, 4]
    assert watched == plain
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn"
        check_reported(seen, name)
    # what is recorded is right, or says what differs
    model.set_attn_implementation("sdpa")
    finals = [p + x[:-1] for p, x in zip(prompts, plain, strict=True)]
    for record, number in zip(seen.records, seen.recording.sequences, strict=True):
        if explain(seen, record.name.split("#")[0]):
            continue
        tokens = list(seen.recording.tokens[number])
        assert tokens in finals
        truth = list_softmaxes(
            model, call(input_ids=torch.tensor([tokens]), use_cache=False)
        )
        dense = group_by_module(truth)[record.name][0][0]
        assert find_error(record, dense) < TIGHT


class Direct(nn.Module):
    """The function of torch and nothing else."""

    def forward(self, q, k, v, mask=None):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_5_jagged_tensors_run_as_they_do():
    lengths, model = (5, 9), Direct()
    parts = [give(3, n, 4, 8)[i] for i, n in enumerate(lengths)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    seen, plain, watched = run_both(
        model, lambda model: run_plain(model, nested, nested, nested)
    )
    for one, two in zip(plain.unbind(), watched.unbind(), strict=True):
        assert torch.equal(one, two)
    check_reported(seen, "")
    for record, number in zip(seen.records, seen.recording.sequences, strict=True):
        q = parts[number].transpose(0, 1)
        dense = (q @ q.mT / 8**0.5).softmax(-1)
        assert find_error(record, dense) < TIGHT
    assert len(seen.records) in (0, 2)


def test_5_a_mask_that_is_a_class_of_its_own_is_read():
    q, k = give(2, 4, 5, 8), give(2, 4, 9, 8)
    bias, model = causal_lower_right(5, 9), Direct()
    seen, plain, watched = run_both(model, lambda m: run_plain(m, q, k, k, bias))
    assert torch.equal(plain, watched)
    allowed = torch.ones(5, 9, dtype=torch.bool).tril(4)
    dense = (q @ k.mT / 8**0.5).masked_fill(~allowed, -torch.inf).softmax(-1)
    assert max(find_errors(seen, "", dense)) < TIGHT


def test_5_vmap_runs_as_it_does():
    x, model = give(3, 2, 6, 32), Plain()
    seen, plain, watched = run_both(model, run_vmap(x))
    assert torch.equal(plain, watched)
    check_reported(seen, "")
    for record, number in zip(seen.records, seen.recording.sequences, strict=True):
        scores, _ = model.score(x.flatten(0, 1))
        assert find_error(record, scores.softmax(-1)[number].detach()) < TIGHT
    assert len(seen.records) == 6


def run_vmap(x):
    """Return what maps a model over the first axis of x."""

    def run(model):
        with torch.no_grad():
            return torch.vmap(model)(x)

    return run


@pytest.mark.parametrize("kind", [Plain, Written])
def test_5_gradients_of_each_sample_are_the_same(kind):
    x, model = give(3, 6, 32), kind()

    def run(model):
        weights = {name: w.detach() for name, w in model.named_parameters()}

        def loss(weights, sample):
            out = torch.func.functional_call(model, weights, (sample[None],))
            return out.square().sum()

        return torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)

    seen, plain, watched = run_both(model, run)
    assert plain.keys() == watched.keys()
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    check_reported(seen, "")


@pytest.mark.parametrize("kind", [Plain, Written])
def test_5_meta_tensors_have_no_weights_and_say_so(kind):
    model = kind().to("meta")
    seen, plain, watched = run_both(
        model, lambda m: run_plain(m, torch.empty(2, 6, 32, device="meta"))
    )
    assert plain.shape == watched.shape == (2, 6, 32)
    assert watched.device.type == "meta"
    assert seen.records == ()
    assert any(x.reason for x in group_coverage(seen)[""])


@pytest.mark.parametrize("kind", [Plain, Written])
def test_5_fake_tensors_have_no_weights_and_say_so(kind):
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415

    model = kind()

    def run(model):
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            return run_plain(model, fake.from_tensor(give(2, 6, 32)))

    seen, plain, watched = run_both(model, run)
    assert type(plain) is type(watched)
    assert plain.shape == watched.shape
    assert seen.records == ()
    assert any(x.reason for x in group_coverage(seen)[""])


@pytest.mark.parametrize("kind", [Plain, Written])
def test_5_a_model_is_exported_inside_of_a_watch(kind):
    x, model = give(2, 6, 32), kind()

    def run(model):
        exported = torch.export.export(model, (x,))
        return run_plain(exported.module(), x), exported.graph_module.code

    _, plain, watched = run_both(model, run)
    assert torch.equal(plain[0], watched[0])
    assert plain[1] == watched[1]


class Scripted(nn.Module):
    """A compiled part in front, and attention behind it."""

    def __init__(self, part):
        super().__init__()
        self.part, self.attend = part, Plain()

    def forward(self, x):
        return self.attend(self.part(x))


class Squash(nn.Module):
    """No attention: it can be scripted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


@pytest.mark.filterwarnings("ignore")
def test_5_one_scripted_part_does_not_end_the_watch():
    x, model = give(2, 6, 32), Scripted(torch.jit.script(Squash()))
    seen, plain, watched = run_both(model, lambda m: run_plain(m, x))
    assert torch.equal(plain, watched)
    scores, _ = model.attend.score(torch.tanh(x))
    assert max(find_errors(seen, "attend", scores.softmax(-1).detach())) < TIGHT


# --- 6. nothing is missing without being named ----------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", ["whole", "part"])
@pytest.mark.parametrize("how", ["trace", "script"])
@pytest.mark.parametrize("kind", [Plain, Written])
def test_6_a_traced_model_is_recorded_or_named(kind, how, where):
    x = give(2, 6, 32)
    if how == "script":
        own = torch.jit.script(Straight())
    else:
        own = torch.jit.trace(kind(), x)
    model = own if where == "whole" else nn.Sequential(own)
    with torch.no_grad():
        model(x), model(x)  # the second pass optimises
    seen, plain, watched = run_both(model, lambda m: run_plain(m, x))
    assert torch.equal(plain, watched)
    # a part that takes no hooks may count for the module around it
    name = "0" if "0" in group_coverage(seen) else ""
    check_reported(seen, name)
    if seen.records:
        scores = x @ x.mT if how == "script" else kind().score(x)[0]
        dense = scores.softmax(-1).detach()
        dense = dense[:, None] if dense.ndim == 3 else dense
        assert max(find_errors(seen, seen.layers[0], dense)) < TIGHT
    else:
        assert any(x.reason for x in seen.coverage())


class Straight(nn.Module):
    """Attention that can be scripted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.transpose(-1, -2), -1) @ x


@pytest.mark.parametrize("kind", [Plain, Written])
def test_6_an_exported_model_is_recorded_or_named(kind):
    x = give(2, 6, 32)
    model = torch.export.export(kind(), (x,)).module()
    seen, plain, watched = run_both(model, lambda m: run_plain(m, x))
    assert torch.equal(plain, watched)
    check_reported(seen, "")
    assert seen.records or any(x.reason for x in seen.coverage())
    for record, number in zip(seen.records, seen.recording.sequences, strict=True):
        dense = kind().score(x)[0].softmax(-1).detach()
        assert find_error(record, dense[number]) < TIGHT


class Mixer(nn.Module):
    """One head without an axis of its own, (B, N, N), and no telling name."""

    def __init__(self):
        super().__init__()
        self.to_qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.to_qkv(x).chunk(3, -1)
        return (q @ k.mT / 32**0.5).softmax(-1) @ v


def test_6_a_single_head_without_a_telling_name_is_recorded():
    x, model = give(2, 7, 32), nn.Sequential(Mixer(), Mixer())
    found = list_softmaxes(model, lambda m: run_plain(m, x))
    seen, _ = watch_run(model, lambda m: run_plain(m, x))
    for name, dense in found:
        assert max(find_errors(seen, name, dense[:, None])) < TIGHT
    assert count_calls(seen) == {"0": 1, "1": 1}


class Encoder(nn.Module):
    """Is called through a method of its own."""

    def __init__(self):
        super().__init__()
        self.attn = Plain()

    def encode(self, x):
        return self.attn(x)

    def embed(self, x):
        return self.attn.forward(x)  # no hook hears this


@pytest.mark.parametrize("method", ["encode", "embed"])
def test_6_methods_other_than_forward_are_heard(method):
    x, model = give(2, 7, 32), Encoder()
    run = lambda m: run_plain(getattr(m, method), x)  # noqa: E731
    ((_, dense),) = list_softmaxes(model, run)
    seen, plain, watched = run_both(model, run)
    assert torch.equal(plain, watched)
    (name,) = seen.layers
    assert max(find_errors(seen, name, dense)) < TIGHT
    if method == "encode":
        assert name == "attn"


def test_6_a_module_with_two_softmaxes_is_not_seen_by_hearing_one():
    inputs = {
        "input_ids": draw(2, 16),
        "decoder_input_ids": draw(2, 5),
        "use_cache": False,
    }
    model = build("PegasusXModel", inputs, **PAIR, num_global_tokens=4, block_size=8)
    found = list_softmaxes(model, call(**inputs))
    seen, _ = watch_run(model, call(**inputs))
    assert count_softmaxes(found)["encoder.layers.0.self_attn"] == 2
    assert count_calls(seen) == count_softmaxes(found)
    for entries in group_coverage(seen).values():
        assert [x for x in entries if x.kept < x.calls and not x.reason] == []
    for name, softmaxes in group_by_module(found).items():
        for i, weights in enumerate(softmaxes):
            layer = name if i == 0 else f"{name}#{i + 1}"
            told = [x for x in seen.coverage() if x.name == layer]
            assert len(told) == 1
            if not (told[0].reason or told[0].note) and weights.ndim == 4:
                assert max(find_errors(seen, layer, weights)) < TIGHT


class Sparse(Heads):
    """Three attentions and a gate in one module: means, near keys, all keys."""

    def forward(self, x):
        q, k, v = self.split(x)
        near = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().triu(-2)
        few_k, few_v = (part.unflatten(2, (-1, 2)).mean(3) for part in (k, v))
        outs = [
            (q @ few_k.mT / 8**0.5).softmax(-1) @ few_v,
            F.scaled_dot_product_attention(q, k, v, attn_mask=near),
            (q @ k.mT / 8**0.5).softmax(-1) @ v,
        ]
        gate = q[..., :3].softmax(-1)
        return sum(gate[..., i : i + 1] * out for i, out in enumerate(outs))


def test_6_several_attentions_in_one_module_are_several_layers():
    x, model = give(2, 8, 32), nn.Sequential(Sparse())
    found = [w for _, w in list_softmaxes(model, lambda m: run_plain(m, x))]
    seen, _ = watch_run(model, lambda m: run_plain(m, x))
    assert seen.layers == ("0", "0#2", "0#3")
    for layer, dense in zip(seen.layers, found, strict=False):
        assert max(find_errors(seen, layer, dense)) < TIGHT
    entries = group_coverage(seen)["0"]
    assert sum(x.calls for x in entries) == 4
    assert sorted((x.attention, x.kept) for x in entries) == [
        (False, 0),
        *[(True, 1)] * 3,
    ]


class TwoPaths(nn.Module):
    """Two attention modules of which one runs."""

    def __init__(self):
        super().__init__()
        self.used = nn.MultiheadAttention(32, 4, batch_first=True)
        self.spare = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x):
        return self.used(x, x, x)[0]


def test_6_a_module_that_never_ran_is_not_blamed():
    seen, _ = watch_run(TwoPaths().eval(), lambda m: run_plain(m, give(2, 6, 32)))
    assert [x for x in seen.coverage() if x.name.startswith("spare")] == []
    assert len(seen.records) == 2


class Sigmoid(Heads):
    """Attention without a softmax."""

    def forward(self, x):
        scores, v = self.score(x)
        return (scores.sigmoid() @ v).transpose(1, 2).flatten(2)


class SelfAttention(Sigmoid):
    """The same, under a name that says what it is."""


def test_6_attention_without_a_softmax_is_named():
    model = nn.Sequential(SelfAttention())
    seen, _ = watch_run(model, lambda m: run_plain(m, give(2, 6, 32)))
    assert seen.records == ()
    (entry,) = [x for x in seen.coverage() if x.name == "0"]
    assert entry.reason


# --- 7. guessed tokens are followed ---------------------------------------------------


def make_pair():
    """Return a small Llama and one that is nearly the same, which guesses well."""
    text = {"input_ids": draw(1, 8)}
    options = {**TEXT, "num_key_value_heads": 2, **SPECIAL}
    model, other = (build("LlamaForCausalLM", text, **options) for _ in range(2))
    with torch.no_grad():
        other.lm_head.weight.add_(give(100, 32), alpha=0.25)
    return model, other


@pytest.mark.parametrize("how", ["assistant", "lookup"])
def test_7_assisted_decoding_is_one_sequence(how):
    model, other = make_pair()
    text = draw(1, 4).repeat(1, 3)
    options = {"do_sample": False, "max_new_tokens": 20}
    if how == "assistant":
        options["assistant_model"] = other
    else:
        options["prompt_lookup_num_tokens"] = 4
    run = lambda m: m.generate(text, **options)  # noqa: E731
    with quiet():
        plain = run(model)
    seen, done = watch_run(model, run)
    assert torch.equal(plain, done)
    final = done[0].tolist()
    (tokens,) = seen.recording.tokens
    assert list(tokens) == final[: len(tokens)]
    assert len(tokens) >= len(final) - 1
    assert seen.recording.sequences == (0, 0)
    truth = list_softmaxes(
        model, call(input_ids=done[:, : len(tokens)], use_cache=False)
    )
    assert list_wrong(compare_all(seen, truth)) == {}


# --- 8. axes --------------------------------------------------------------------------


def check_axes(seen, found, heads, names=None):
    """Assert that heads and sequences are right, or that a note says otherwise."""
    wrong = {}
    for name, softmaxes in group_by_module(found).items():
        if names is not None and name not in names:
            continue
        told = explain(seen, name)
        errors = find_errors(seen, name, split_heads(softmaxes[0], heads))
        if not max(errors) < TIGHT and not told:
            wrong[name] = errors
    assert wrong == {}


FOLDED = {
    "fsmt": (
        "FSMTModel",
        {
            **{k: v for k, v in PAIR.items() if k != "vocab_size"},
            "langs": ["en", "de"],
            "src_vocab_size": 100,
            "tgt_vocab_size": 100,
            "max_position_embeddings": 64,
        },
    ),
    "mvp": ("MvpModel", {**PAIR, "max_position_embeddings": 64}),
}


@pytest.mark.parametrize("name", FOLDED)
def test_8_heads_that_are_folded_into_the_batch_are_heads(name):
    kind, options = FOLDED[name]
    inputs = {
        "input_ids": draw(3, 10),
        "decoder_input_ids": draw(3, 5, seed=1),
        "use_cache": False,
    }
    model = build(kind, inputs, **options)
    found = list_softmaxes(model, call(**inputs))
    seen, _ = watch_run(model, call(**inputs))
    assert len(found) == 6
    check_axes(seen, found, heads=4)


def test_8_groupvit_has_heads_and_sequences():
    inputs = {"input_ids": draw(2, 10), "pixel_values": give(2, 3, 32, 32)}
    vision = {
        **IMAGE,
        "depths": [1, 1],
        "num_group_tokens": [4, 0],
        "num_output_groups": [4, 0],
    }
    vision.pop("num_hidden_layers")
    model = build(
        "GroupViTModel",
        inputs,
        text_config={**TEXT, "eos_token_id": 2},
        vision_config=vision,
        projection_dim=16,
        projection_intermediate_dim=16,
    )
    found = list_softmaxes(model, call(**inputs))
    seen, _ = watch_run(model, call(**inputs))
    folded = {name for name, w in found if w.ndim == 3 and len(w) == 8}
    assert len(folded) >= 3
    check_axes(seen, found, 4, folded)


class Folded(Heads):
    """Batch and heads as one axis of a bmm, in either order."""

    def __init__(self, order):
        super().__init__()
        self.order = order

    def forward(self, x):
        q, k, v = self.split(x)
        if self.order == "h b":
            q, k, v = (part.transpose(0, 1) for part in (q, k, v))
        size = q.shape[:2]
        q, k, v = (part.flatten(0, 1) for part in (q, k, v))
        weights = torch.bmm(q * 8**-0.5, k.mT).softmax(-1)
        out = torch.bmm(weights, v).unflatten(0, size)
        return out.transpose(0, 1) if self.order == "h b" else out


class Swapped(Heads):
    """Scores (H, B, N, N), as an einsum may order them."""

    def forward(self, x):
        q, k, v = self.split(x)
        weights = torch.einsum("bhid,bhjd->hbij", q, k).mul(8**-0.5).softmax(-1)
        return torch.einsum("hbij,bhjd->bhid", weights, v)


class Rows(Heads):
    """Scores of an alignment (B, H, R, N, N): rows of it attend each on its own."""

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # (B, R, N, 3, H, D)
        q, k, v = parts.unbind(-3)
        scores = torch.einsum("brihd,brjhd->bhrij", q, k) * 8**-0.5
        return torch.einsum("bhrij,brjhd->brihd", scores.softmax(-1), v)


class Sliced(Heads):
    """A part of the heads at a time, to save memory."""

    def forward(self, x):
        q, k, v = (part.flatten(0, 1) for part in self.split(x))
        out = torch.zeros_like(q)
        for i in range(0, len(q), 2):
            part = slice(i, i + 2)
            scores = torch.baddbmm(
                torch.empty(2, q.shape[1], k.shape[1]),
                q[part],
                k[part].mT,
                beta=0,
                alpha=8**-0.5,
            )
            out[part] = torch.bmm(scores.softmax(-1), v[part])
        return out


AXES = {
    "b h": (lambda: Folded("b h"), (3, 6, 32)),
    "h b": (lambda: Folded("h b"), (3, 6, 32)),
    "swapped": (Swapped, (3, 6, 32)),
    "rows": (Rows, (2, 3, 6, 32)),
    "sliced": (Sliced, (2, 6, 32)),
}


@pytest.mark.parametrize("name", AXES)
def test_8_axes_are_right_or_flagged(name):
    make, shape = AXES[name]
    x, model = give(*shape), nn.Sequential(make())
    q, k, _ = model[0].split(x).detach()  # (..., H, N, D)
    dense = (q @ k.mT / 8**0.5).softmax(-1)
    dense = dense.reshape(-1, 4, *dense.shape[-2:])  # rows are sequences
    seen, plain, watched = run_both(model, lambda m: run_plain(m, x))
    assert torch.equal(plain, watched)
    assert "0" in group_coverage(seen)
    if explain(seen, "0"):
        return
    assert seen.layers == ("0",)
    assert max(find_errors(seen, "0", dense)) < TIGHT
    assert len(seen.records) == len(dense)


class SwappedKernel(Heads):
    """Heads before sequences in a call of the kernel."""

    def forward(self, x):
        q, k, v = (part.transpose(0, 1) for part in self.split(x))
        return F.scaled_dot_product_attention(q, k, v).transpose(0, 1)


def test_8_axes_that_are_swapped_stay_so_in_every_pass():
    """From the third pass on, only the kernel is heard, and not where q came from."""
    x, model = give(3, 6, 32), nn.Sequential(SwappedKernel())
    dense = model[0].score(x)[0].softmax(-1).detach()
    seen, _ = watch_run(model, lambda m: [run_plain(m, x) for _ in range(4)])
    assert len(seen.records) == 12
    for record, number in zip(seen.records, seen.recording.sequences, strict=True):
        assert find_error(record, dense[number % 3]) < TIGHT


class Pooled(Heads):
    """One learnt query reads all tokens, and stands at none of them."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(give(1, 4, 1, 8))

    def forward(self, x):
        _, k, v = self.split(x)
        q = self.query.expand(len(x), -1, -1, -1)
        return F.scaled_dot_product_attention(q, k, v)


def test_8_a_learnt_query_does_not_stand_at_the_last_token():
    x, model = give(2, 7, 32), nn.Sequential(Pooled())
    ((_, dense),) = list_softmaxes(model, lambda m: run_plain(m, x))
    seen, _ = watch_run(model, lambda m: run_plain(m, x))
    assert max(find_errors(seen, "0", dense)) < TIGHT
    for record in seen.records:
        assert record.k_positions.tolist() == list(range(7))
        assert record.q_positions.tolist() == [0] or explain(seen, "0")


class Remembering(Heads):
    """Two learnt keys in front of those of the tokens."""

    def __init__(self):
        super().__init__()
        self.memory = nn.Parameter(give(2, 4, 2, 8))

    def forward(self, input_ids):
        x = give(100, 32)[input_ids]
        q, k, v = self.split(x)
        own = (m.expand(len(x), -1, -1, -1) for m in self.memory)
        k, v = (torch.cat(pair, 2) for pair in zip(own, (k, v), strict=True))
        n = q.shape[2]
        mask = torch.ones(n, n + 2, dtype=torch.bool).tril(2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_8_learnt_keys_do_not_shift_the_tokens():
    text, model = draw(2, 6), nn.Sequential(Remembering())
    run = lambda m: run_plain(m, text)  # noqa: E731
    ((_, dense),) = list_softmaxes(model, run)
    seen, _ = watch_run(model, run)
    assert max(find_errors(seen, "0", dense)) < TIGHT
    for record in seen.records:
        rows = record.q_positions.tolist()
        assert rows == list(range(6)) or explain(seen, "0")


def test_8_hiera_has_the_heads_of_its_config():
    inputs = {"pixel_values": give(2, 3, 32, 32)}
    model = build(
        "HieraModel",
        inputs,
        embed_dim=16,
        image_size=[32, 32],
        patch_size=[3, 3],
        patch_stride=[4, 4],
        patch_padding=[1, 1],
        depths=[1, 1],
        num_heads=[2, 4],
        embed_dim_multiplier=2.0,
        num_query_pool=1,
        masked_unit_size=[4, 4],
        masked_unit_attention=[True, False],
        query_stride=[2, 2],
    )
    found = list_softmaxes(model, call(**inputs))
    seen, _ = watch_run(model, call(**inputs))
    counted = count_calls(seen)
    assert {n: counted.get(n) for n, _ in found} == count_softmaxes(found)
    for (name, weights), heads in zip(found, (2, 4), strict=True):
        if explain(seen, name):
            continue
        assert {r.heads for r in seen.records if r.name == name} == {heads}
        axis = next(i for i in (1, 2) if weights.shape[i] == heads)
        dense = weights.movedim(axis, -3).flatten(0, -4)
        assert max(find_errors(seen, name, dense)) < TIGHT


# --- 9. errors and changes of the weights ---------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_9_the_error_of_a_softmax_capture_was_measured(dtype):
    x, model = give(2, 40, 32, dtype=dtype), Written().to(dtype)
    seen, _ = watch_run(model, lambda m: run_plain(m, x))
    (entry,) = seen.coverage()
    limit = TIGHT if dtype == torch.float32 else EXACT
    assert 0 < entry.error < limit  # 80 rows of sums: no rebuilt output is the same
    assert f"error {entry.error:.0e}" in str(seen)


class TalkingHeads(Heads):
    """Heads are mixed after the softmax."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(give(4, 4))

    def forward(self, x):
        scores, v = self.score(x)
        weights = torch.einsum("hg,bhij->bgij", self.mix, scores.softmax(-1))
        return (weights @ v).transpose(1, 2).flatten(2)


class LinearMix(TalkingHeads):
    """The same as a linear layer on the last axis."""

    def forward(self, x):
        scores, v = self.score(x)
        mixed = F.linear(scores.softmax(-1).permute(0, 2, 3, 1), self.mix)
        return mixed.permute(0, 3, 1, 2) @ v


class GatedPositions(Heads):
    """Content and position, mixed after a softmax each, and normalised again."""

    def forward(self, x):
        scores, v = self.score(x)
        n = x.shape[1]
        near = -(torch.arange(n)[:, None] - torch.arange(n)).abs().float()
        mixed = 0.7 * scores.softmax(-1) + 0.3 * near.softmax(-1)
        mixed = mixed / mixed.sum(-1, keepdim=True)
        return (mixed @ v).transpose(1, 2).flatten(2)


class Thresholded(Heads):
    """Small weights are cut off."""

    def forward(self, x):
        scores, v = self.score(x)
        weights = scores.softmax(-1)
        return torch.where(weights > 0.1, weights, 0.0) @ v


@pytest.mark.parametrize("kind", [TalkingHeads, LinearMix, GatedPositions, Thresholded])
def test_9_weights_that_change_after_the_softmax_are_noted(kind):
    x, model = give(2, 8, 32), nn.Sequential(kind())
    seen, plain, watched = run_both(model, lambda m: run_plain(m, x))
    assert torch.equal(plain, watched)
    assert explain(seen, "0")
    scores = model[0].score(x)[0].softmax(-1).detach()
    if seen.records and kind is not GatedPositions:
        assert max(find_errors(seen, "0", scores)) < TIGHT


@pytest.mark.parametrize("kind", [TalkingHeads, LinearMix])
def test_9_a_mixed_head_is_cut_where_it_ends_or_refused(kind):
    """Cutting a head is zeroing what it gives to the output, after the mixing."""
    x, model = give(2, 8, 32), nn.Sequential(kind())
    expected = run_plain(model, x).clone()
    if kind is TalkingHeads:
        expected[..., 8:16] = 0  # (B, N, H D)
    else:
        expected[:, 1] = 0  # (B, H, N, D)
    try:
        with knock_out(model, [(0, 1)]):
            cut = run_plain(model, x)
    except OptionError:
        return
    torch.testing.assert_close(cut, expected, atol=TIGHT, rtol=0)


def test_9_dropout_is_noted():
    x, model = give(2, 8, 32), nn.Sequential(Dropping()).train()

    def run(model):
        torch.manual_seed(0)
        return run_plain(model, x)

    seen, plain, watched = run_both(model, run)
    assert torch.equal(plain, watched)
    assert explain(seen, "0")
    scores = model[0].score(x)[0].softmax(-1).detach()
    assert max(find_errors(seen, "0", scores)) < TIGHT


class Dropping(Heads):
    """Weights are dropped at random, as in training."""

    def forward(self, x):
        scores, v = self.score(x)
        return F.dropout(scores.softmax(-1), 0.5, self.training) @ v


# --- 10. compiled FlexAttention -------------------------------------------------------


class Flexible(nn.Module):
    """FlexAttention, compiled, under a causal mask of blocks."""

    def __init__(self, n):
        super().__init__()
        self.mask = create_block_mask(
            lambda b, h, q, k: q >= k, None, None, n, n, "cpu"
        )
        self.attend = torch.compile(flex_attention, dynamic=False)

    def forward(self, q):
        return self.attend(q, q, q, block_mask=self.mask)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_10_compiled_flex_attention_stays_compiled_or_says_what_it_costs():
    torch.compiler.reset()
    model, q = Flexible(1024), give(1, 8, 1024, 16)
    with torch.no_grad():
        plain = model(q)  # compiles
        fast = measure(lambda: model(q))
        with regard.watch(model) as seen:
            watched = model(q)
            slow = measure(lambda: model(q))
    torch.testing.assert_close(plain, watched, atol=1e-5, rtol=1e-5)
    check_reported(seen, "")
    if not explain(seen, ""):
        assert torch.equal(plain, watched)
        assert slow < 3 * fast
    if seen.records:
        causal = torch.ones(1024, 1024, dtype=torch.bool).tril()
        scores = (q @ q.mT / 4).masked_fill(~causal, -torch.inf)
        assert find_error(seen.records[0], scores.softmax(-1)[0]) < TIGHT


def measure(run):
    """Return the shortest of three times, in seconds."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


# --- 11. masks are kept once ----------------------------------------------------------


class Documents(nn.Module):
    """Eight layers under one mask of packed documents, built once for all of them."""

    def __init__(self, each):
        super().__init__()
        self.layers = nn.ModuleList([Plain(64, 4) for _ in range(8)])
        self.each = each  # layer: the mask is built anew in every layer

    def forward(self, x, documents):
        mask = None
        for layer in self.layers:
            if mask is None or self.each:
                mask = (documents[:, None] == documents).tril()
            x = torch.tanh(layer(x, mask))
        return x


def count_bytes(records):
    """Return the bytes of q, k and lse, and of all arrays; storages count once."""
    basic, whole = {}, {}
    for record in records:
        for field in ("q", "k", "lse"):
            keep_storage(basic, getattr(record, field))
        fields = ("q", "k", "lse", "q_positions", "k_positions", "v", "sink", "bias")
        for field in fields:
            keep_storage(whole, getattr(record, field))
        nodes = record.mask.walk() if hasattr(record.mask, "walk") else [record.mask]
        for node in nodes:
            for value in [node, *vars(node).values()] if vars_of(node) else [node]:
                keep_storage(whole, value)
    return sum(basic.values()), sum(whole.values())


def vars_of(node):
    """Return whether an object has fields that may be arrays."""
    return hasattr(node, "__dict__") and not isinstance(node, torch.Tensor)


def keep_storage(known, x):
    """Note the size of what holds an array."""
    if isinstance(x, torch.Tensor):
        storage = x.untyped_storage()
        known[storage.data_ptr()] = storage.nbytes()
    elif hasattr(x, "nbytes"):
        known[id(x if x.base is None else x.base)] = x.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("each", [False, True], ids=["once", "each layer"])
@pytest.mark.parametrize("n", [2048, 4096])
def test_11_a_document_mask_costs_little(n, each):
    x, model = give(1, n, 64) * 0.3, Documents(each)
    at = torch.arange(n)
    documents = (at > n // 5).long() + (at > n // 2) + (at > n - 300)
    run = lambda m: run_plain(m, x, documents)  # noqa: E731
    plain = run(model)
    seen, watched = watch_run(model, run)
    assert torch.equal(plain, watched)
    assert len(seen.records) == 8
    basic, whole = count_bytes(seen.records)
    assert whole <= 1.3 * basic, f"{whole / 1e6:.0f} MB for {basic / 1e6:.0f} MB"
    rows = torch.tensor([0, n // 5, n // 5 + 1, n // 2 + 1, n - 300, n - 1])
    q, k, _ = model.layers[0].split(x).detach()
    allowed = ((documents[:, None] == documents).tril())[rows]
    scores = (q[0][:, rows] @ k[0].mT / 4).masked_fill(~allowed, -torch.inf)
    mine = seen.layer("layers.0").weights(rows)
    torch.testing.assert_close(mine, scores.softmax(-1), atol=TIGHT, rtol=0)


MASK_MEMORY = """
import ctypes, json, os, sys, torch, regard
sys.path.insert(0, sys.argv[1])
from test_wild_defects import Documents, give

def resident():
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free may stay in its lists
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

torch.set_num_threads(1)
n = 4096
x, model, at = give(1, n, 64) * 0.3, Documents(True), torch.arange(n)
documents = (at > n // 5).long() + (at > n // 2)
with torch.no_grad():
    model(x, documents)
    with regard.watch(model):
        model(x[:, :256], documents[:256])
    before = resident()
    with regard.watch(model) as seen:
        model(x, documents)
    grown = resident() - before
    kept = sum(a.nbytes for r in seen.records for a in (r.q, r.k, r.lse))
print(json.dumps({"grown": grown, "kept": kept}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_11_the_process_grows_by_what_is_kept_and_one_mask(run_apart, request):
    done = run_apart(MASK_MEMORY, str(request.path.parent))
    one = 4096 * 4096  # bytes of one mask; the layers have eight
    assert done["grown"] < 1.3 * done["kept"] + one


# --- 12. compiled models are noted ----------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [Plain, Written])
def test_12_a_compiled_model_is_noted(kind):
    torch.compiler.reset()
    x, inner = give(2, 8, 32), nn.Sequential(kind())
    model = torch.compile(inner, backend="eager")
    with torch.no_grad():
        plain = model(x)
        with regard.watch(model) as seen:
            watched = model(x)
    assert torch.equal(plain, watched)
    assert find_said(seen, "compile")
    if seen.records:
        dense = inner[0].score(x)[0].softmax(-1).detach()
        for record, number in zip(seen.records, seen.recording.sequences, strict=True):
            assert find_error(record, dense[number]) < TIGHT
    else:
        assert any(x.reason for x in seen.coverage())


def test_12_a_model_that_is_not_compiled_is_not_noted():
    seen, _ = watch_run(Plain(), lambda m: run_plain(m, give(2, 8, 32)))
    assert not find_said(seen, "compile")


# --- 13. an exception keeps what was recorded -----------------------------------------


class Failing(nn.Module):
    """The second block fails at the second call."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.calls = Plain(), Plain(), 0

    def forward(self, x):
        self.calls += 1
        x = self.first(x)
        if self.calls == 2:
            raise ValueError("out of luck")
        return self.second(x)


@contextmanager
def expect(error):
    """Assert that exactly this error leaves the block."""
    with pytest.raises(type(error)) as caught:
        yield
    assert str(caught.value) == str(error)


@pytest.mark.parametrize(
    "error", [ValueError("out of luck"), KeyboardInterrupt("stop")], ids=repr
)
def test_13_what_was_recorded_before_an_exception_is_kept(error):
    x, model = give(2, 6, 32), Failing()
    with torch.no_grad(), expect(error), regard.watch(model) as seen:
        model(x)
        if isinstance(error, KeyboardInterrupt):
            raise error
        model(x)
    assert {"first", "second"} <= set(seen.layers)
    found = list_softmaxes(Failing(), lambda m: run_plain(m, x))
    for name, dense in found:
        assert max(find_errors(seen, name, dense)) < TIGHT
    heard = 1 if isinstance(error, KeyboardInterrupt) else 2
    assert count_calls(seen) == {"first": heard, "second": 1}
    assert str(seen).startswith("Failing: ")
    assert len(seen.table().rows["layer"]) > 0
