"""Grouped heads keep their axes, whatever transformers does with them below its layers."""

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard
from regard.errors import OptionError
from regard.lens import about_model

NEW = 5  # generated tokens
SIZE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAJOR = int(transformers.__version__.partition(".")[0])
FAMILIES = {
    "Llama": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 6},
    "Gemma2": {"sliding_window": 6},
    "Gemma3": {"sliding_window": 6},
}


def make(family, implementation="sdpa"):
    name = {"Gemma3": "Gemma3Text"}.get(family, family)
    config = getattr(transformers, f"{name}Config")(**SIZE, **FAMILIES[family])
    if family == "Gemma2":  # its softcap needs eager attention
        implementation = "eager"
    config._attn_implementation = implementation
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.generation_config.eos_token_id = None
    return model


def make_prompt(padded):
    torch.manual_seed(1)
    ids, mask = torch.randint(3, 64, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    if padded:
        ids[0, :3] = mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, padded, cache, **more):
    kind = {} if cache == "dynamic" else {"cache_implementation": cache}
    with torch.no_grad():
        return model.generate(
            **make_prompt(padded),
            **kind,
            **more,
            max_new_tokens=NEW,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )


def see_eagerly(family, tokens, hidden):
    """Return the weights of every layer of one sequence, run alone and without a cache."""
    model = make(family, "eager")
    with torch.no_grad():
        out = model(tokens[None, hidden:-1], output_attentions=True)
    return [x[0] for x in out.attentions]


CASES = [
    (family, padded, cache)
    for family in FAMILIES
    for padded in (False, True)
    for cache in ("dynamic", "static")
]


@pytest.mark.parametrize(("family", "padded", "cache"), CASES)
def test_records_of_grouped_heads_are_those_of_eager_attention(family, padded, cache):
    model = make(family)
    with regard.watch(model) as seen:
        done = generate(model, padded, cache)
    assert [x.reason for x in seen.recording.coverage if x.reason] == []
    assert len(seen.records) == 4
    for sequence, tokens in enumerate(done.sequences):
        hidden = 3 if padded and not sequence else 0
        for layer, want in enumerate(see_eagerly(family, tokens, hidden)):
            got = torch.as_tensor(seen.layer(layer, sequence=sequence).weights())
            torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("family", "padded", "cache"), CASES)
def test_a_removed_grouped_head_is_that_of_a_hook(family, padded, cache):
    model = make(family)
    plain = generate(model, padded, cache).logits
    for layer, head in ((0, 1), (1, 2)):

        def cut(_module, args, head=head):
            x = args[0].clone()
            x[..., head * 16 : head * 16 + 16] = 0
            return (x,)

        output = model.model.layers[layer].self_attn.o_proj
        handle = output.register_forward_pre_hook(cut)
        want = generate(model, padded, cache)
        handle.remove()
        with regard.knock_out(model, heads=[(layer, head)]):
            got = generate(model, padded, cache)
        assert torch.equal(got.sequences, want.sequences)
        for x, y, z in zip(got.logits, want.logits, plain, strict=True):
            torch.testing.assert_close(x, y, atol=1e-3, rtol=0)
            assert (y - z).abs().max() > 0.1


def attend_packed(module, query, key, value, attention_mask, scaling=None, **_options):
    """Attend with the heads that share keys as rows of one head, for any version."""
    b, heads, n, d = query.shape
    q = query.reshape(b, key.shape[1], -1, d)
    mask = attention_mask
    if mask is None:
        mask = torch.ones(n, key.shape[2], dtype=torch.bool).tril(key.shape[2] - n)
    mask = mask.expand(b, heads, n, key.shape[2]).reshape(
        b, key.shape[1], -1, key.shape[2]
    )
    out = F.scaled_dot_product_attention(q, key, value, mask, scale=scaling)
    return out.reshape(b, heads, n, -1).transpose(1, 2).contiguous(), None


@pytest.fixture
def packed():
    transformers.AttentionInterface.register("packed", attend_packed)
    transformers.AttentionMaskInterface.register(
        "packed", transformers.masking_utils.sdpa_mask
    )
    yield
    del transformers.AttentionInterface._global_mapping["packed"]
    del transformers.AttentionMaskInterface._global_mapping["packed"]


@pytest.mark.usefixtures("packed")
def test_packed_heads_are_heads_under_autocast():
    model, plain = make("Llama", "packed"), make("Llama")
    inputs = make_prompt(padded=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with regard.watch(model) as seen:
            model(**inputs)
        with regard.watch(plain) as want:
            plain(**inputs)
    for x, y in zip(seen.records, want.records, strict=True):
        torch.testing.assert_close(x.weights(), y.weights(), atol=0.05, rtol=0)


@pytest.mark.parametrize("backend", [None, SDPBackend.MATH])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.usefixtures("packed")
def test_heads_that_a_function_packs_into_rows_are_heads(padded, backend):
    model, plain = make("Llama", "packed"), make("Llama")
    inputs = make_prompt(padded)
    with torch.no_grad(), regard.watch(plain) as want:
        plain(**inputs)
    with sdpa_kernel(backend or list(SDPBackend.__members__.values())):
        with torch.no_grad(), regard.watch(model) as seen:
            model(**inputs)
        with torch.no_grad(), regard.knock_out(model, heads=[(0, 1)], keys=[4]):
            got = model(**inputs).logits
    for x, y in zip(seen.records, want.records, strict=True):
        torch.testing.assert_close(x.weights(), y.weights(), atol=2e-5, rtol=0)
    with torch.no_grad(), regard.knock_out(plain, heads=[(0, 1)], keys=[4]):
        logits = plain(**inputs).logits
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[real], logits[real], atol=1e-4, rtol=0)


@pytest.mark.usefixtures("packed")
def test_a_patch_of_packed_heads_keeps_the_bits_of_the_others():
    model, inputs = make("Llama", "packed"), make_prompt(padded=True)
    seen = []
    output = model.model.layers[0].self_attn.o_proj
    output.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    with torch.no_grad():
        model(**inputs)
        with regard.patch_heads(model, lambda z: z / 2, heads=[(0, 1)]):
            model(**inputs)
    plain, patched = (x.unflatten(-1, (4, 16)) for x in seen)
    assert torch.equal(plain[..., [0, 2, 3], :], patched[..., [0, 2, 3], :])
    assert torch.equal(plain[..., 1, :] / 2, patched[..., 1, :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_heads_are_heads_where_torch_computes_in_float32(dtype, monkeypatch):
    monkeypatch.setitem(SIZE, "head_dim", 8)  # with 16, q · scale ** 0.5 is exact
    model = make("Llama").to(dtype)  # transformers 5.23 packs when it decodes
    with sdpa_kernel(SDPBackend.MATH), regard.watch(model) as seen:
        generate(model, padded=True, cache="dynamic")
    assert [x.reason for x in seen.recording.coverage if x.reason] == []
    assert [x.shape for x in seen.records] == [(4, 8, 8)] * 2 + [(4, 11, 11)] * 2


class FoldedHeads(nn.Module):
    """Four heads, as rows of one, without the interface of transformers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 32)
        self.attention = FoldedAttention()

    def forward(self, input_ids):
        return self.attention(self.embed(input_ids))


class FoldedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x):
        b, n, _ = x.shape
        k, v = self.kv(x)[:, None].chunk(2, -1)
        q = self.q(x).view(b, 1, n * 4, 8)
        return F.scaled_dot_product_attention(q, k, v)


def test_heads_that_seem_to_be_queries_are_reported_and_not_edited():
    model, ids = FoldedHeads(), torch.arange(5)[None]
    with torch.no_grad(), regard.watch(model) as seen:
        model(ids)
    assert (
        "its projections have 4 times as many heads" in seen.recording.coverage[0].note
    )
    refused = pytest.raises(OptionError, match="1 heads and 20 queries")
    with refused, torch.no_grad(), regard.knock_out(model, heads=[(0, 0)]):
        model(ids)


@pytest.mark.parametrize(
    ("newest", "lines"), [(f"{MAJOR - 1}.99", 1), (f"{MAJOR}.3", 1), (f"{MAJOR}.99", 0)]
)
def test_a_library_that_is_newer_than_the_tested_ones_is_reported(
    newest, lines, monkeypatch, tmp_path
):
    monkeypatch.setitem(about_model.TESTED, "transformers", newest)
    model = make("Llama")
    with torch.no_grad(), regard.watch(model) as seen:
        model(**make_prompt(padded=False))
    seen.save(tmp_path / "seen.regard")
    says = f"transformers {transformers.__version__} is newer than {newest}"
    for text in (str(seen), str(regard.open(tmp_path / "seen.regard"))):
        assert text.startswith("LlamaForCausalLM: 2 of 2 attention layers seen")
        assert text.count(says) == lines
    assert says in seen._repr_html_() or not lines
    assert not list(seen.audit())
