"""What a model is told in a pass: by position, in a wrapper, beside a cache, by a mask."""

import pytest
import torch
import transformers
from torch import nn
from transformers import DynamicCache

import regard
from regard.ablate import average_outputs, knock_out, patch_heads
from regard.errors import OptionError
from regard.run.parts import find_models

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}


def stir(model):
    torch.manual_seed(0)
    model = model.double().eval()
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.2 * torch.randn_like(x))
    return model


def build(name, **options):
    cls = getattr(transformers, name)
    return stir(cls(cls.config_class(**{**SIZES, **options})))


def draw(seed, batch=1, n=10):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 60, (batch, n), generator=generator)


def pad_left():
    """Return two texts, of which the second has three tokens of padding."""
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, :3] = 0
    return draw(1, 2) * mask, mask


@torch.no_grad()
def run(model, *args, **named):
    return model(*args, **named).logits


def record(model, *args, **named):
    with torch.no_grad(), regard.watch(model, keep="qkv") as seen:
        model(*args, **named)
    return seen


def count_rows(seen):
    return [x.q.shape[1] for x in seen.recording.records]


def largest(a, b):
    return float((a - b).abs().max())


class Wrapped(nn.Module):
    """A model whose inputs are one argument, as in a training framework."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return self.model(**batch)


class Stepper(nn.Module):
    """A model that keeps its cache, and its mask, to itself."""

    def __init__(self, model, mask=None):
        super().__init__()
        self.model, self.mask = model, mask
        self.cache = DynamicCache(config=model.config)

    def forward(self, x):
        end = self.cache.get_seq_length() + x.shape[1]
        mask = None if self.mask is None else self.mask[:, :end]
        return self.model(
            x, attention_mask=mask, past_key_values=self.cache, use_cache=True
        )


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM"])
def test_a_mask_by_position_is_a_mask(name):
    model, (text, mask) = build(name), pad_left()
    named = {"input_ids": text, "attention_mask": mask}
    with knock_out(model, keys=[1]):
        expected, found = run(model, **named), run(model, text, mask)
    assert torch.equal(found, expected)
    assert largest(found[1, 3:], run(model, text, mask)[1, 3:]) > 0.1
    assert count_rows(record(model, text, mask)) == [10, 10, 7, 7]


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM", "BertModel"])
def test_a_wrapper_need_not_have_the_mask(name):
    model, (text, mask) = build(name), pad_left()
    batch = {"input_ids": text, "attention_mask": mask}
    wrapped = Wrapped(model)
    assert find_models(wrapped) == ("", "model")
    with torch.no_grad():
        plain = model(**batch)[0]
        with knock_out(model, keys=[1]):
            expected = model(**batch)[0]
        with knock_out(wrapped, keys=[1]):
            found = wrapped(batch)[0]
            whole = wrapped({"input_ids": text})[0]  # the mask is not that of before
    assert torch.equal(found, expected)
    assert largest(found[1, 3:], plain[1, 3:]) > 0.1
    with torch.no_grad(), knock_out(model, keys=[1]):
        assert torch.equal(whole, model(text)[0])
    assert count_rows(record(wrapped, batch)) == [10, 10, 7, 7]


class Embedding(Wrapped):
    """A model whose tokens are embedded by its wrapper."""

    def forward(self, input_ids, attention_mask):
        x = self.model.get_input_embeddings()(input_ids)
        return self.model(inputs_embeds=x, attention_mask=attention_mask)


def test_a_wrapper_and_its_model_tell_together():
    model, (text, mask) = build("LlamaForCausalLM"), pad_left()
    seen = record(Embedding(model), text, mask)
    assert count_rows(seen) == [10, 10, 7, 7]
    assert [list(x) for x in seen.recording.tokens] == [
        text[0].tolist(),
        text[1, 3:].tolist(),
    ]


@pytest.mark.parametrize("padded", [False, True])
def test_a_wrapper_need_not_have_the_cache(padded):
    model = build("MistralForCausalLM", num_key_value_heads=2, sliding_window=4)
    text, mask = pad_left() if padded else (draw(1, 2), None)
    with knock_out(model, keys=[1]):
        expected = run(model, text, mask)
    stepper = Stepper(model, mask)
    with knock_out(stepper, keys=[1]):
        pieces = [run(stepper, text[:, :6])]
        pieces += [run(stepper, text[:, i : i + 1]) for i in range(6, 10)]
    real = slice(None) if mask is None else mask.bool()
    assert largest(torch.cat(pieces, 1)[real], expected[real]) < 1e-6
    assert largest(expected[real], run(model, text, mask)[real]) > 0.1


def test_a_picture_in_a_second_turn_has_its_own_positions():
    parts = {key: x for key, x in SIZES.items() if key != "vocab_size"}
    text = transformers.LlamaConfig(**{**SIZES, "vocab_size": 70})
    vision = transformers.CLIPVisionConfig(**parts, image_size=16, patch_size=4)
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_id=65
    )
    config.vision_feature_layer = -1
    model = stir(transformers.LlavaForConditionalGeneration(config))
    torch.manual_seed(1)
    image = torch.randn(1, 3, 16, 16).double()
    picture = torch.full((1, 16), 65)
    first, second = draw(1, n=20), torch.cat([draw(2, n=2), picture, draw(3, n=3)], 1)

    def take_turns():
        cache = DynamicCache(config=text)
        run(model, input_ids=first, past_key_values=cache)
        return run(model, input_ids=second, pixel_values=image, past_key_values=cache)

    names = [x for x, _ in model.named_modules()]
    layer = next(x for x in names if "vision" in x and x.endswith("1.self_attn"))
    with knock_out(model, layers=[layer], keys=[3]):
        together = run(
            model, input_ids=torch.cat([first, second], 1), pixel_values=image
        )
        found = take_turns()
    assert largest(found, together[:, -21:]) < 1e-6
    assert largest(found, take_turns()) > 0.1


@pytest.mark.parametrize("length", [1, 9])
def test_an_encoder_has_no_part_in_the_cache_of_the_decoder(length):
    model = build("T5ForConditionalGeneration", **T5, decoder_start_token_id=0)
    source, target = draw(1, n=length), draw(2, n=5)
    layer = "encoder.block.1.layer.0.SelfAttention"
    caught = []
    model.encoder.register_forward_hook(lambda *x: caught.append(x[-1][0]))

    def step():
        cache = model(
            input_ids=source, decoder_input_ids=target[:, :4], use_cache=True
        ).past_key_values
        caught.clear()
        model(input_ids=source, decoder_input_ids=target[:, 4:], past_key_values=cache)
        return caught[-1]

    with torch.no_grad():
        plain = step()
        with knock_out(model, layers=[layer], keys=[length - 1]):
            found = step()
            model(input_ids=source, decoder_input_ids=target)
    assert torch.equal(found, caught[-1])
    assert largest(found, plain) > 0.1


def test_all_prefixes_of_a_text_are_padded_and_not_causal():
    """The padding of these is a triangle, as a causal mask is."""
    model, kept = build("LlamaForCausalLM"), []
    mask = torch.ones(6, 6, dtype=torch.long).tril()
    out = model.model.layers[1].self_attn.o_proj
    out.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    seen = record(model, input_ids=draw(1, n=6) * mask, attention_mask=mask)
    with patch_heads(model, average_outputs(seen), [(1, 1)]):
        run(model, draw(2, n=6))
    expected = kept[0][mask.bool()].mean(0)[8:16]
    assert largest(kept[1][0, 0, 8:16], expected) < 1e-6
    assert largest(expected, kept[0].flatten(0, 1).mean(0)[8:16]) > 0.01


class Masked(nn.Module):
    """One attention; its mask is causal, (N, N), or padding, (B, N)."""

    def __init__(self, name="attn"):
        super().__init__()
        self.name, self.embed = name, nn.Embedding(60, 32)
        self.add_module(name, nn.MultiheadAttention(32, 4, batch_first=True))

    def forward(self, input_ids, attention_mask, pad=None):
        x, attend = self.embed(input_ids), getattr(self, self.name)
        hidden = None if pad is None else pad == 0
        later = attention_mask == 0
        out, _ = attend(
            x, x, x, key_padding_mask=hidden, attn_mask=later, need_weights=False
        )
        return x + out


def test_a_causal_mask_is_one_for_as_many_texts_as_tokens():
    model = stir(Masked())
    causal = torch.ones(6, 6, dtype=torch.long).tril()
    seen = record(model, draw(1, 6, 6), causal)
    assert count_rows(seen) == [6] * 6
    assert all(not x for x in seen.recording.notes["hidden"])


@pytest.mark.parametrize("kind", ["bool", "numbers"])
def test_a_token_that_nobody_sees_keeps_its_position(kind):
    model, text = build("LlamaForCausalLM"), draw(1)
    see = torch.ones(10, 10, dtype=torch.bool).tril()
    see[:, 2] = False
    see[2, 0] = True
    mask = see[None, None]
    if kind == "numbers":
        least = torch.finfo(torch.float64).min
        mask = torch.zeros(1, 1, 10, 10).double().masked_fill(~mask, least)
    plain = run(model, input_ids=text, attention_mask=mask)
    with knock_out(model, [(1, 1)], keys=[1], queries=[5]):
        found = run(model, input_ids=text, attention_mask=mask)
    moved = ((found - plain).abs().amax(-1)[0] > 1e-9).nonzero().flatten()
    assert moved.tolist() == [5]
    assert count_rows(record(model, input_ids=text, attention_mask=mask)) == [10, 10]


class Padded(Masked):
    """Self-attention with a padding mask, by any name."""

    def forward(self, input_ids, attention_mask):
        causal = torch.ones(10, 10, dtype=torch.long).tril()
        return super().forward(input_ids, causal, attention_mask)


@pytest.mark.parametrize("name", ["attn", "multihead_attn"])
def test_a_name_of_cross_attention_is_one_beside_self_attention(name):
    model, (text, mask) = stir(Padded(name)), pad_left()
    with torch.no_grad():
        plain = model(text, mask)
        with knock_out(model, [(0, 1)], keys=[1], queries=[4]):
            moved = (model(text, mask) - plain).abs().amax(-1) > 1e-9
    assert moved[1].nonzero().flatten().tolist() == [7]
    assert count_rows(record(model, text, mask)) == [10, 7]


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_padding_of_a_decoder_is_on_the_right(side):
    model = build("T5ForConditionalGeneration", **T5, decoder_start_token_id=0)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, slice(0, 3) if side == "left" else slice(4, 7)] = 0
    inputs = {
        "input_ids": draw(1, 2, 9),
        "decoder_input_ids": draw(3, 2, 7),
        "decoder_attention_mask": mask,
    }
    heads = [("decoder.block.1.layer.0.SelfAttention", 2)]
    run(model, **inputs)
    with knock_out(model, heads):  # needs no positions
        run(model, **inputs)
    if side == "left":
        with (
            pytest.raises(OptionError, match="Put the padding on the right"),
            knock_out(model, heads, keys=[1]),
        ):
            run(model, **inputs)
        return
    with knock_out(model, heads, keys=[1]):
        found = run(model, **inputs)
    with knock_out(model, heads, keys=[1]):
        alone = run(
            model,
            input_ids=inputs["input_ids"][1:],
            decoder_input_ids=inputs["decoder_input_ids"][1:, :4],
        )
    assert largest(found[1, :4], alone[0]) < 1e-6


def test_a_module_of_torch_alone_begins_a_pass_each_time():
    """Such a module has no hooks: torch would run it differently."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double().eval()
    x, other = torch.randn(2, 1, 6, 32).double()
    with torch.no_grad(), regard.watch(model, keep="qkv") as source:
        model(other)
    with torch.no_grad():
        plain = model(x)
        for way in (knock_out(model, [(1, 1)]), patch_heads(model, source, [(1, 1)])):
            with way:
                first, second = model(x), model(x)
            assert torch.equal(first, second)
            assert largest(first, plain) > 0.1
        with regard.watch(model) as seen:
            model(x)
            model(other)
    names = [x.name for x in seen.recording.records]
    assert names == ["layers.0.self_attn", "layers.1.self_attn"] * 2
    assert seen.recording.sequences == (0, 0, 1, 1)
