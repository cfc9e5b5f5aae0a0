"""Tiny models of every kind with random weights, saved as transformers saves them."""

import os
import wave

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers as T  # noqa: N812
from families import quiet
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "mat",
    "a",
    "dog",
    "ran",
    "user",
    "assistant",
    ":",
    ".",
]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<image>"]
CHAT = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} . {% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {**SMALL, "image_size": 16, "patch_size": 4}


def make_tokenizer(*, ends=True, template=None):
    """Return a tokenizer of whole words; ends: <s> and </s> are added."""
    vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if ends:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return T.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=template,
        model_max_length=64,
    )


def make_images():
    return T.ViTImageProcessorPil(size={"height": 16, "width": 16})


def build_bert():
    config = T.BertConfig(**SMALL, vocab_size=32, max_position_embeddings=64)
    return T.BertForMaskedLM(config), make_tokenizer()


def build_t5():
    config = T.T5Config(
        vocab_size=17,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        **TOKENS,
    )
    return T.T5ForConditionalGeneration(config), make_tokenizer()


def build_llama():
    config = T.LlamaConfig(
        **SMALL,
        **TOKENS,
        vocab_size=32,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return T.LlamaForCausalLM(config), make_tokenizer(ends=False, template=CHAT)


def build_phi():
    """Return a decoder that regard.nn does not know."""
    config = T.PhiConfig(**SMALL, **TOKENS, vocab_size=32, max_position_embeddings=64)
    return T.PhiForCausalLM(config), make_tokenizer(ends=False, template=CHAT)


def build_vit():
    return T.ViTForImageClassification(T.ViTConfig(**VISION)), make_images()


def build_wav2vec2():
    config = T.Wav2Vec2Config(
        **SMALL,
        conv_dim=(16, 16),
        conv_stride=(8, 5),
        conv_kernel=(10, 5),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
    )
    return T.Wav2Vec2Model(config), T.Wav2Vec2FeatureExtractor()


def build_whisper():
    config = T.WhisperConfig(
        vocab_size=17,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=50,
        max_target_positions=16,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **TOKENS,
    )
    network = T.WhisperForConditionalGeneration(config)
    return network, T.WhisperFeatureExtractor(feature_size=8, chunk_length=1)


def build_clip():
    text = {**SMALL, "vocab_size": 32, "max_position_embeddings": 64, **TOKENS}
    config = T.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=16)
    images = T.CLIPImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    )
    return T.CLIPModel(config), T.CLIPProcessor(images, make_tokenizer())


KINDS = {
    "bert": build_bert,
    "t5": build_t5,
    "llama": build_llama,
    "phi": build_phi,
    "vit": build_vit,
    "wav2vec2": build_wav2vec2,
    "whisper": build_whisper,
    "clip": build_clip,
}


def save_tiny(kind, folder):
    """Save a model of a kind with its tokenizer or processor; return the network."""
    with quiet(seed=3):  # with which t5 writes words, not special tokens alone
        network, words = KINDS[kind]()
        with torch.no_grad():
            for weight in network.parameters():
                weight.add_(torch.randn_like(weight), alpha=0.2)
        network.eval().save_pretrained(folder)
        words.save_pretrained(folder)
    return network


def save_picture(path):
    """Write a picture of 16 x 24 pixels; return its pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


def save_sound(path, *, rate=16_000, n=3_200):
    """Write a sound of a fifth of a second as WAV; return its numbers."""
    numbers = np.random.default_rng(0).integers(-9_000, 9_000, n, np.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(numbers.tobytes())
    return numbers / 2**15
