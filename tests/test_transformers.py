"""Parity with Hugging Face transformers: masks, plugged-in attention, positions.

Their masks are functions (b, h, q, k) -> bool with offsets, ours are formulas; both are
written out and must be equal bit for bit. Their models must give the same logits when
regard is their attention.
"""

import itertools
import os
from types import SimpleNamespace
from typing import NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
)
from transformers import masking_utils as hf
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama
from transformers.models.t5.modeling_t5 import T5Attention

import regard
from regard.definition.position import HALVES, NEIGHBOURS, alibi_slopes, rotary
from regard.masks import alibi, everything, last, log_offsets, prefix, table

TORCH = torch.empty(0)

# --- masks ---------------------------------------------------------------------------

WINDOW, CHUNK = 3, 4


class Grid(NamedTuple):
    """Where the queries stand among the keys."""

    n_q: int
    n_k: int
    q_start: int
    seen: int  # keys that hold tokens; a static cache has room for more


class Case(NamedTuple):
    pattern: str
    padding: str
    packed: bool
    grid: Grid
    batch: int


def lay_out(n):
    return (
        Grid(n, n, 0, n),  # full
        Grid(1, n, n - 1, n),  # decode one token
        Grid(3, n, n - 3, n),  # chunked prefill
        Grid(2, n + 4, n - 2, n),  # static cache, longer than what was seen
    )


PATTERNS = (
    "causal",
    "bidirectional",
    "sliding",
    "sliding both ways",
    "chunked",
    "prefix",
    "blockwise",
)
CASES = [
    Case(*case)
    for case in itertools.product(
        PATTERNS,
        ("none", "right", "left"),
        (False, True),
        [grid for n in (5, 9, 14) for grid in lay_out(n)],
        (1, 3),
    )
]


def pad(case):
    """Return the 2-D attention mask, or None, and the padding on the left, (B,)."""
    counts = torch.arange(case.batch) % 3 + 1
    at = torch.arange(case.grid.seen)[None, :]
    none = torch.zeros(case.batch, dtype=torch.int64)
    if case.padding == "none":
        return None, none
    if case.padding == "right":
        return at < case.grid.seen - counts[:, None], none
    return at >= counts[:, None], counts


def number_documents(case):
    """Return ids (B, Nk) of documents of unequal lengths, others in every batch."""
    at, b = torch.arange(case.grid.n_k)[None, :], torch.arange(case.batch)[:, None]
    return (at > 2 + b).long() + (at > 6 - b).long() + (at > 10).long()


def number_blocks(case):
    """Return transformers' block ids (B, Nk): -1 is text, others are images."""
    at, b = torch.arange(case.grid.n_k)[None, :], torch.arange(case.batch)[:, None]
    return torch.where((at + b) % 5 < 2, -1, (at + b) // 5)


def write_theirs(case):
    """Return the mask function that transformers would build."""
    prefixes = torch.arange(case.batch) % 3 + 2
    fn = {
        "causal": lambda: hf.causal_mask_function,
        "bidirectional": lambda: hf.bidirectional_mask_function,
        "sliding": lambda: hf.sliding_window_causal_mask_function(WINDOW),
        "sliding both ways": lambda: hf.sliding_window_bidirectional_mask_function(
            WINDOW
        ),
        "chunked": lambda: hf.chunked_causal_mask_function(CHUNK, pad(case)[1]),
        "prefix": lambda: hf.or_masks(
            hf.causal_mask_function, lambda b, h, q, k: k < prefixes[b]
        ),
        "blockwise": lambda: hf.or_masks(
            hf.causal_mask_function, hf.blockwise_overlay(number_blocks(case))
        ),
    }[case.pattern]()
    if not case.packed:
        return fn
    return hf.and_masks(fn, hf.packed_sequence_mask_function(number_documents(case)))


def write_ours(case):
    """Return the formula that we write for it."""
    at = torch.arange(case.grid.n_k)[None, :]
    blocks = number_blocks(case)
    alone = torch.where(blocks < 0, -1 - at, blocks)  # text is a block of its own
    formula = {
        "causal": regard.causal,
        "bidirectional": everything,
        "sliding": lambda: last(WINDOW),  # theirs counts the query itself
        "sliding both ways": lambda: regard.window(WINDOW, WINDOW),  # here it does not
        "chunked": lambda: (
            regard.causal() & regard.same((at - pad(case)[1][:, None]) // CHUNK)
        ),
        "prefix": lambda: prefix(torch.arange(case.batch) % 3 + 2),
        "blockwise": lambda: regard.causal() | regard.same(alone),
    }[case.pattern]()
    valid = pad(case)[0]
    if case.packed:
        formula = formula & regard.same(number_documents(case))
    if valid is not None:
        room = case.grid.n_k - case.grid.seen
        formula = formula & regard.padding(torch.nn.functional.pad(valid, (0, room)))
    return formula


def materialize_theirs(case):
    return hf.sdpa_mask(
        batch_size=case.batch,
        q_length=case.grid.n_q,
        kv_length=case.grid.n_k,
        q_offset=case.grid.q_start,
        kv_offset=0,
        mask_function=write_theirs(case),
        attention_mask=pad(case)[0],
        allow_is_causal_skip=False,
    )


def materialize(formula, case):
    shape = (case.batch, 1, case.grid.n_q, case.grid.n_k)
    return formula.dense(shape, q_start=case.grid.q_start, like=TORCH)


def test_at_least_700_different_masks_are_compared():
    assert len(set(CASES)) == len(CASES) >= 700


@pytest.mark.parametrize("packed", [False, True], ids=["alone", "packed"])
@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_equal_those_of_transformers(pattern, padding, packed):
    cases = [case for case in CASES if case[:3] == (pattern, padding, packed)]
    assert len(cases) == 24
    for case in cases:
        theirs, ours = materialize_theirs(case), materialize(write_ours(case), case)
        assert theirs.dtype == ours.dtype == torch.bool
        assert torch.equal(theirs.expand(ours.shape), ours), case


def test_formulas_with_numpy_data_equal_those_with_torch_data():
    for case in CASES[:: len(PATTERNS)]:
        formula = write_ours(case).place(np.empty(0))
        assert torch.equal(
            materialize(formula, case), materialize(write_ours(case), case)
        )


def test_mask_functions_of_transformers_plug_in_as_they_are():
    for case in CASES[::5]:
        valid, fn = pad(case)[0], write_theirs(case)
        if valid is not None:
            valid = hf.prepare_padding_mask(valid, case.grid.n_k, 0)
            fn = hf.and_masks(fn, hf.padding_mask_function(valid))
        plugged = materialize(regard.where(fn), case)
        assert torch.equal(plugged, materialize(write_ours(case), case)), case


@pytest.mark.parametrize("dropped", [1, 3, 6])
@pytest.mark.parametrize("n_q", [1, 4])
def test_a_rolling_cache_starts_the_queries_earlier(n_q, dropped):
    """Their kv_offset is how many keys are gone; we count positions from the first."""
    n_k, q_offset = 5 + n_q, dropped + 5
    valid = torch.arange(dropped + n_k)[None, :] >= torch.tensor([[0], [dropped + 2]])
    theirs = hf.sdpa_mask(
        batch_size=2,
        q_length=n_q,
        kv_length=n_k,
        q_offset=q_offset,
        kv_offset=dropped,
        mask_function=hf.sliding_window_causal_mask_function(WINDOW),
        attention_mask=valid,
        allow_is_causal_skip=False,
    )
    formula = last(WINDOW) & regard.padding(valid[:, dropped:])
    ours = formula.dense((2, 1, n_q, n_k), q_start=q_offset - dropped, like=TORCH)
    assert torch.equal(theirs, ours)


# --- models --------------------------------------------------------------------------


def attend(
    module,
    query,
    key,
    value,
    attention_mask,
    *,
    scaling=None,
    softcap=None,
    s_aux=None,
    **_,
):
    """Compute an attention layer of transformers with regard.

    A missing mask means causal, as sdpa reads it: from the first key on if there are
    several queries, everything if there is one.
    """
    if attention_mask is None and query.shape[-2] > 1:
        attention_mask = regard.causal()
    done = regard.attention(
        query,
        key,
        value,
        attention_mask,
        scale=scaling,
        softcap=softcap,
        sink=s_aux,
        q_start=0,
    )
    return done.out.transpose(1, 2), None


SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build_llama():
    return LlamaForCausalLM(LlamaConfig(**SMALL)), "sdpa"


def build_gemma2():
    config = Gemma2Config(
        **SMALL,
        attn_logit_softcapping=2.0,  # small, so that it bites
        sliding_window=4,
        query_pre_attn_scalar=8,
    )
    return Gemma2ForCausalLM(config), "eager"


def build_gpt_oss():
    config = GptOssConfig(
        **SMALL,
        sliding_window=4,
        num_local_experts=2,
        num_experts_per_tok=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    model = GptOssForCausalLM(config)
    model.set_experts_implementation("eager")  # the other one knows no float64
    return model, "eager"


@pytest.fixture
def registries(monkeypatch):
    """Let a test register in both tables; both are as before afterwards."""
    for table_ in (AttentionInterface, AttentionMaskInterface):
        mapping = dict(table_._global_mapping)
        monkeypatch.setattr(table_, "_global_mapping", mapping)


def make_model(build, dtype=torch.float32):
    """Return a random model whose scores are large enough to matter."""
    torch.manual_seed(0)
    model, implementation = build()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "v_proj", "sinks")):
                weight.normal_(std=0.4)
    return model.to(dtype).eval(), implementation


def make_batch():
    """Return two texts, one of them with four tokens of padding on the left."""
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    valid = torch.ones_like(ids)
    valid[1, :4] = 0
    return torch.where(valid.bool(), ids, 0), valid


@torch.no_grad()
def run(model, implementation, ids, valid):
    model.set_attn_implementation(implementation)
    positions = None if valid is None else (valid.cumsum(-1) - 1).clamp(min=0)
    return model(ids, attention_mask=valid, position_ids=positions).logits


def distance(a, b):
    return (a - b).abs().max().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.usefixtures("registries")
def test_hf_plugin_gets_its_mask(dtype):
    """The trap: without an entry in the mask table, padding is silently lost."""
    model, reference = make_model(build_llama, dtype)
    ids, valid = make_batch()
    real = valid.bool()
    expected = run(model, reference, ids, valid)
    plain = run(model, reference, ids, None)

    AttentionInterface.register("regard", attend)
    trapped = run(model, "regard", ids, valid)
    assert distance(trapped[0], expected[0]) < 1e-5  # no padding there: nothing to see
    assert distance(trapped[real], expected[real]) > 0.01
    assert distance(run(model, "regard", ids, None), plain) < 1e-5  # nor here

    AttentionMaskInterface.register("regard", hf.sdpa_mask)
    assert distance(run(model, "regard", ids, valid)[real], expected[real]) < 1e-5
    assert distance(run(model, "regard", ids, None), plain) < 1e-5


def test_the_registries_are_as_before_after_a_test():
    assert "regard" not in AttentionInterface()
    assert "regard" not in AttentionMaskInterface()


@pytest.mark.parametrize(
    ("build", "dtype"),
    [
        (build_llama, torch.float32),
        (build_llama, torch.float64),
        # not float64: its eager softmax is float32, where the lowest float64 is -inf,
        # so that padding gives NaN
        (build_gemma2, torch.float32),
        (build_gpt_oss, torch.float32),
        (build_gpt_oss, torch.float64),
    ],
)
@pytest.mark.usefixtures("registries")
def test_models_give_the_same_logits_with_regard(build, dtype):
    AttentionInterface.register("regard", attend)
    AttentionMaskInterface.register("regard", hf.sdpa_mask)
    model, reference = make_model(build, dtype)
    ids, valid = make_batch()
    for mask in (valid, None):
        real = slice(None) if mask is None else mask.bool()
        expected = run(model, reference, ids, mask)[real]
        assert distance(run(model, "regard", ids, mask)[real], expected) < 1e-5


@pytest.mark.parametrize("build", [build_llama, build_gemma2, build_gpt_oss])
@pytest.mark.usefixtures("registries")
@torch.no_grad()
def test_cached_chunks_give_the_same_logits_as_the_whole(build):
    AttentionInterface.register("regard", attend)
    AttentionMaskInterface.register("regard", hf.sdpa_mask)
    model, reference = make_model(build)
    ids, valid = make_batch()
    real = valid.bool()
    expected = run(model, reference, ids, valid)
    model.set_attn_implementation("regard")
    positions, cache, parts = (valid.cumsum(-1) - 1).clamp(min=0), None, []
    for start, stop in ((0, 5), (5, 8), (8, 9)):  # a prompt, a chunk of it, a token
        done = model(
            ids[:, start:stop],
            attention_mask=valid[:, :stop],
            position_ids=positions[:, start:stop],
            past_key_values=cache,
            use_cache=True,
        )
        cache = done.past_key_values
        parts.append(done.logits)
    assert distance(torch.cat(parts, dim=1)[real], expected[real]) < 1e-5


@pytest.mark.usefixtures("registries")
def test_the_logits_depend_on_softcap_and_sink():
    """So that the parity above says something about them."""

    def forget(module, query, key, value, attention_mask, **options):
        for name in ("softcap", "s_aux"):
            options.pop(name, None)
        return attend(module, query, key, value, attention_mask, **options)

    AttentionInterface.register("regard", forget)
    AttentionMaskInterface.register("regard", hf.sdpa_mask)
    for build in (build_gemma2, build_gpt_oss):
        model, reference = make_model(build)
        ids, _ = make_batch()
        expected = run(model, reference, ids, None)
        assert distance(run(model, "regard", ids, None), expected) > 1e-3


# --- attention functions -------------------------------------------------------------


def draw(*shapes, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def add_mask(allowed):
    """Return transformers' eager mask: 0 if allowed, else the lowest number."""
    zero = torch.zeros((), dtype=torch.float64)
    return torch.where(allowed, zero, torch.finfo(zero.dtype).min)


@pytest.mark.parametrize("n_kv", [1, 2, 4])
def test_sinks_equal_those_of_gpt_oss(n_kv):
    q, k, v, sinks = draw((2, 4, 5, 8), (2, n_kv, 7, 8), (2, n_kv, 7, 8), (4,))
    allowed = regard.causal().dense((1, 1, 5, 7), q_start=2, like=TORCH)
    module = SimpleNamespace(
        num_key_value_groups=4 // n_kv, sinks=sinks, training=False
    )
    out, weights = modeling_gpt_oss.eager_attention_forward(
        module, q, k, v, add_mask(allowed), scaling=0.3
    )
    ours = regard.attention(
        q, k, v, regard.causal(), scale=0.3, sink=sinks, q_start=2, see=("weights",)
    )
    torch.testing.assert_close(ours.out.transpose(1, 2), out, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.weights, weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 0.5, 3.0, 50.0])
def test_softcap_equals_that_of_gemma2(softcap):
    q, k, v = draw((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    mask = last(3)
    allowed = mask.dense((1, 1, 5, 7), q_start=2, like=TORCH)
    module = SimpleNamespace(num_key_value_groups=2, head_dim=8, training=False)
    out, weights = modeling_gemma2.eager_attention_forward(
        module, q, k, v, add_mask(allowed), scaling=1.5, softcap=softcap
    )
    ours = regard.attention(
        q, k, v, mask, scale=1.5, softcap=softcap, q_start=2, see=("weights",)
    )
    # they take the softmax in float32, whatever the dtype
    torch.testing.assert_close(ours.out.transpose(1, 2), out, rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.weights, weights, rtol=0, atol=1e-6)


# --- positions -----------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True], ids=["both ways", "causal"])
@pytest.mark.parametrize(("n", "far"), [(32, 128), (16, 64), (64, 256)])
@pytest.mark.parametrize("library", [np.asarray, torch.asarray], ids=["numpy", "torch"])
def test_log_offsets_equal_the_buckets_of_t5(n, far, causal, library):
    offsets = np.arange(-600, 601)
    theirs = T5Attention._relative_position_bucket(
        torch.asarray(offsets),
        bidirectional=not causal,
        num_buckets=n,
        max_distance=far,
    )
    ours = log_offsets(n, far=far, causal=causal)(library(offsets))
    assert np.asarray(ours).tolist() == theirs.tolist()
    assert len(set(theirs.tolist())) == (n if causal else n - 1)  # all are reached


@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize(
    ("n_q", "n_k", "q_start"), [(70, 70, 0), (1, 200, 199), (9, 40, 7)]
)
@torch.no_grad()
def test_tables_equal_the_bias_of_t5(n_q, n_k, q_start, decoder):
    torch.manual_seed(0)
    config = T5Config(d_model=24, d_kv=6, num_heads=4, is_decoder=decoder)
    layer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    layer.relative_attention_bias.weight.normal_()
    theirs = layer.compute_bias(n_q, n_k, past_seen_tokens=q_start)
    values = layer.relative_attention_bias.weight.T
    bias = table(values, log_offsets(32, far=128, causal=decoder))
    assert torch.equal(
        theirs, bias.dense((1, 4, n_q, n_k), q_start=q_start, like=TORCH)
    )


@torch.no_grad()
def test_attention_with_a_table_equals_a_layer_of_t5():
    """T5 does not scale, masks with the smallest number and adds its table."""
    torch.manual_seed(0)
    config = T5Config(d_model=24, d_kv=6, num_heads=4, dropout_rate=0.0)
    config._attn_implementation = "eager"
    layer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    layer = layer.double().eval()
    for weight in layer.parameters():
        weight.normal_(std=0.4)
    (x,) = draw((2, 9, 24))
    valid = torch.arange(9)[None, :] < torch.tensor([[9], [6]])
    out = layer(x, mask=add_mask(valid[:, None, None, :]))[0]
    q, k, v = (
        part(x).unflatten(-1, (4, 6)).transpose(1, 2)
        for part in (layer.q, layer.k, layer.v)
    )
    bias = table(layer.relative_attention_bias.weight.T, log_offsets())
    ours = regard.attention(q, k, v, regard.padding(valid), bias=bias, scale=1.0).out
    ours = layer.o(ours.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(ours, out, rtol=0, atol=1e-5)  # their softmax is float32


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_rotary_by_halves_equals_llama(base):
    q, k = draw((2, 3, 40, 16), (2, 3, 40, 16))
    positions = torch.arange(40) + torch.tensor([[0], [17]])
    frequencies = base ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    at = positions[..., None] * frequencies
    both = torch.cat([at, at], dim=-1)
    theirs = modeling_llama.apply_rotary_pos_emb(q, k, both.cos(), both.sin())
    for x, turned in zip((q, k), theirs, strict=True):
        ours = rotary(x, positions[:, None], pairing=HALVES, base=base)
        torch.testing.assert_close(ours, turned, rtol=0, atol=1e-12)
        other = rotary(x, positions[:, None], pairing=NEIGHBOURS, base=base)
        assert distance(other, turned) > 0.1  # the pairing matters


def test_rotary_equals_the_whole_module_of_llama():
    q, k = draw((1, 2, 40, 8), (1, 2, 40, 8), dtype=torch.float32)
    positions = torch.arange(40)
    module = modeling_llama.LlamaRotaryEmbedding(LlamaConfig(**SMALL))
    cos, sin = module(q, positions[None, :])
    theirs, _ = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    ours = rotary(q, positions, pairing=HALVES)
    # they compute the angles in float32: 39 radians, give or take 2e-6
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


def test_rotary_by_neighbours_equals_gpt_j():
    (x,) = draw((2, 40, 3, 16))  # (B, N, H, D)
    at = torch.arange(40)[:, None] * 10_000.0 ** (
        -torch.arange(0, 16, 2, dtype=torch.float64) / 16
    )
    sin, cos = at.sin()[None], at.cos()[None]
    theirs = modeling_gptj.apply_rotary_pos_emb(x, sin, cos).transpose(1, 2)
    x = x.transpose(1, 2)
    ours = rotary(x, torch.arange(40), pairing=NEIGHBOURS)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert distance(rotary(x, torch.arange(40), pairing=HALVES), theirs) > 0.1


def test_the_sines_of_gpt_j_are_ours():
    sin, cos = modeling_gptj.create_sinusoidal_positions(40, 16).chunk(2, dim=-1)
    (x,) = draw((1, 40, 1, 16), dtype=torch.float32)
    theirs = modeling_gptj.apply_rotary_pos_emb(x, sin[None], cos[None])
    ours = rotary(x.transpose(1, 2), torch.arange(40), pairing=NEIGHBOURS)
    torch.testing.assert_close(ours, theirs.transpose(1, 2), rtol=0, atol=2e-5)


@pytest.mark.parametrize("n_heads", range(1, 34))
def test_alibi_slopes_equal_those_of_bloom(n_heads):
    theirs = build_alibi_tensor(torch.ones(1, 2), n_heads, torch.float32)[:, 0, 1]
    np.testing.assert_allclose(alibi_slopes(n_heads), theirs.numpy(), rtol=1e-6)


@pytest.mark.parametrize("n_heads", [1, 4, 6])
def test_attention_with_alibi_equals_that_with_the_bias_of_bloom(n_heads):
    """Bloom adds slope * k, not -slope * |q - k|: a constant less in each row."""
    q, k, v = draw(*[(2, n_heads, 7, 8)] * 3)
    theirs = build_alibi_tensor(torch.ones(2, 7), n_heads, torch.float64)
    bias = theirs.reshape(2, n_heads, 1, 7)
    expected = regard.attention(q, k, v, regard.causal(), bias=bias).out
    slopes = torch.asarray(alibi_slopes(n_heads))
    ours = regard.attention(q, k, v, regard.causal(), bias=alibi(slopes)).out
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
