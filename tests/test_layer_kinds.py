"""The kind of a layer, from its mask and its positions; from names only if needed."""

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaModel,
    T5Config,
    T5Model,
    ViTConfig,
    ViTModel,
    WhisperConfig,
    WhisperModel,
)

import regard
from regard.masks.patterns import causal, window
from regard.recording.record import Record, Recording
from regard.show.layer_kinds import find_kind
from regard.show.map_source import MapSource

SMALL = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
IDS = torch.randint(3, 40, (1, 9))
WHISPER = WhisperConfig(
    vocab_size=50,
    d_model=16,
    encoder_layers=1,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=16,
    decoder_ffn_dim=16,
    num_mel_bins=8,
    max_source_positions=20,
    max_target_positions=20,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)


def watch_kinds(model, **inputs):
    with regard.watch(model.eval()) as seen, torch.inference_mode():
        model(**inputs)
    layers = MapSource(seen.recording).about["layers"]
    return [layer["kind"] for layer in layers]


def test_models_of_every_kind():
    llama = LlamaModel(LlamaConfig(vocab_size=50, num_hidden_layers=2, **SMALL))
    assert watch_kinds(llama, input_ids=IDS) == ["decoder"] * 2
    bert = BertModel(BertConfig(vocab_size=50, num_hidden_layers=2, **SMALL))
    assert watch_kinds(bert, input_ids=IDS) == ["encoder"] * 2
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    vit = ViTModel(
        ViTConfig(**sizes, intermediate_size=16, image_size=16, patch_size=4)
    )
    pixels = torch.rand(1, 3, 16, 16)
    assert watch_kinds(vit, pixel_values=pixels) == ["vision"] * 2


@pytest.mark.parametrize("n", [5, 9])  # in the second case as long as the encoder
def test_an_encoder_decoder_has_three_kinds(n):
    config = T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2
    )
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :n]}
    expected = ["encoder"] * 2 + ["decoder", "cross"] * 2
    assert watch_kinds(T5Model(config), **inputs) == expected
    sound = {
        "input_features": torch.rand(1, 8, 40),
        "decoder_input_ids": IDS[:, :n],
    }
    expected = ["encoder"] + ["decoder", "cross"] * 2
    assert watch_kinds(WhisperModel(WHISPER), **sound) == expected


def make_record(q, k, *, mask=None, name="layer"):
    arrays = {"q": np.zeros((1, len(q), 2)), "k": np.zeros((1, len(k), 2))}
    lse = np.zeros((1, len(q)))
    at = {"q_positions": np.asarray(q), "k_positions": np.asarray(k)}
    return Record(name=name, lse=lse, scale=1.0, mask=mask, **arrays, **at)


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (make_record(range(4), range(4), mask=causal()), "decoder"),
        (make_record(range(4), range(4), mask=causal() & window(2)), "decoder"),
        (make_record(range(4), range(4), mask=np.tri(4, dtype=bool)[None]), "decoder"),
        (make_record(range(4), range(4), mask=window(2, 2)), "encoder"),
        (make_record(range(4), range(4)), "encoder"),
        (make_record([7], range(8)), "decoder"),  # a step of a generation
        (make_record(range(4), range(9)), "cross"),
        (make_record(range(2, 4), range(4)), "encoder"),  # keys from a cache
        (make_record(range(2, 4), range(4), mask=causal()), "decoder"),
        (make_record(range(4), range(4), name="crossattention"), "cross"),
        (make_record(range(4), range(4), name="vision_tower.layers.3"), "vision"),
        (make_record(range(4), range(4), name="envision.layers.3"), "encoder"),
    ],
)
def test_masks_and_positions_decide(record, kind):
    found = Recording(model="X", records=(record,), sequences=(0,), tokens=((1, 2),))
    assert find_kind(found, record) == kind


def test_a_model_with_a_picture_and_no_tokens_is_of_vision():
    record = make_record(range(4), range(4))
    plain = Recording(model="X", records=(record,), sequences=(0,))
    assert find_kind(plain, record) == "encoder"
    shown = Recording(
        model="X", records=(record,), sequences=(0,), notes={"pictures": {"0": {}}}
    )
    assert find_kind(shown, record) == "vision"
    reads_text = Recording(
        model="VisionTextModel", records=(record,), sequences=(0,), tokens=((1, 2),)
    )
    assert find_kind(reads_text, record) == "encoder"
