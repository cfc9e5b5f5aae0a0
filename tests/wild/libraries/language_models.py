"""Language and vision-language models of larger libraries, and wrappers around models."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from wild.case import Case
from wild.libraries.recipe import (
    Recipe,
    feed,
    image,
    list_recipes,
    load,
    vectors,
    words,
)
from wild.stir import Run, stir

LLAMA: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_llama(attention: str = "sdpa") -> nn.Module:
    """Make a small Llama of transformers, to be wrapped."""
    config = load("transformers:LlamaConfig")(**LLAMA)
    config._attn_implementation = attention
    return stir(load("transformers:LlamaForCausalLM")(config))


# --- litgpt ---------------------------------------------------------------------------


def make_litgpt(options: dict[str, Any]) -> tuple[nn.Module, Run]:
    """Make a model of litgpt."""
    sizes = {
        "block_size": 32,
        "vocab_size": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 32,
    }
    config = load("litgpt:Config")(padded_vocab_size=64, **sizes | options)
    return load("litgpt:GPT")(config), feed(words())


def make_litgpt_cached() -> tuple[nn.Module, Run]:
    """Make a model of litgpt that decodes three tokens with its cache."""
    model, _ = make_litgpt({"n_query_groups": 2})
    (tokens,) = words(8, batch=1)

    def run(model: nn.Module) -> Any:
        model.max_seq_length = 32
        model.set_kv_cache(batch_size=1)
        places = [torch.arange(5), *torch.arange(5, 8).split(1)]
        steps = [model(tokens[:, at], at) for at in places]
        model.clear_kv_cache()
        return steps

    return model, run


LITGPT = {
    "gpt": partial(make_litgpt, {}),
    "grouped": partial(make_litgpt, {"n_query_groups": 2, "rotary_percentage": 1.0}),
    "window": partial(
        make_litgpt,
        {"sliding_window_size": 4, "sliding_window_indices": [1, 0]},
    ),
    "softcap": partial(make_litgpt, {"attention_logit_softcapping": 5.0}),
    "cached": make_litgpt_cached,
}


# --- PEFT, quantisation ---------------------------------------------------------------


def make_lora() -> tuple[nn.Module, Run]:
    """Wrap a Llama with LoRA."""
    config = load("peft:LoraConfig")(r=4, target_modules=["q_proj", "v_proj"])
    return load("peft:get_peft_model")(make_llama(), config), feed(words())


def make_prompted(name: str, options: dict[str, Any]) -> tuple[nn.Module, Run]:
    """Wrap a Llama with learnt tokens, and pad the second text."""
    config = load(f"peft:{name}")(
        task_type="CAUSAL_LM", num_virtual_tokens=3, **options
    )
    model = load("peft:get_peft_model")(make_llama(), config)
    (ids,), mask = words(), torch.ones(2, 16, dtype=torch.long)
    mask[1, :5] = 0
    return model, lambda model: model(input_ids=ids, attention_mask=mask)


def make_adaption() -> tuple[nn.Module, Run]:
    """Wrap a Llama with the adaption prompt, which attends a second time."""
    config = load("peft:AdaptionPromptConfig")(
        adapter_len=3, adapter_layers=2, task_type="CAUSAL_LM"
    )
    return load("peft:get_peft_model")(make_llama("eager"), config), feed(words())


def make_generating() -> tuple[nn.Module, Run]:
    """Wrap a Llama with LoRA and generate."""
    model, _ = make_lora()
    (ids,) = words(6)

    def run(model: nn.Module) -> Any:
        return model.generate(
            input_ids=ids, max_new_tokens=5, do_sample=False, pad_token_id=0
        )

    return model, run


PEFT = {
    "lora": make_lora,
    "ia3": lambda: (
        load("peft:get_peft_model")(
            make_llama(),
            load("peft:IA3Config")(
                target_modules=["k_proj", "v_proj", "down_proj"],
                feedforward_modules=["down_proj"],
            ),
        ),
        feed(words()),
    ),
    "prompt-tuning": partial(make_prompted, "PromptTuningConfig", {}),
    "prefix-tuning": partial(make_prompted, "PrefixTuningConfig", {}),
    "p-tuning": partial(
        make_prompted, "PromptEncoderConfig", {"encoder_hidden_size": 16}
    ),
    "adaption-prompt": make_adaption,
    "lora-generation": make_generating,
}


def make_torchao(name: str) -> tuple[nn.Module, Run]:
    """Quantise a Llama with torchao."""
    model = make_llama().eval()
    load("torchao.quantization:quantize_")(
        model, load(f"torchao.quantization:{name}")()
    )
    return model, feed(words())


def make_quanto() -> tuple[nn.Module, Run]:
    """Quantise a Llama with quanto."""
    model = make_llama().eval()
    load("optimum.quanto:quantize")(model, weights=load("optimum.quanto:qint8"))
    load("optimum.quanto:freeze")(model)
    return model, feed(words())


def make_dynamic() -> tuple[nn.Module, Run]:
    """Quantise a vision transformer with torch itself."""
    model = make_llama().eval()
    made = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    return made, feed(words())


# --- other libraries ------------------------------------------------------------------


def make_sentences() -> tuple[nn.Module, Run]:
    """Make the transformer and the pooling of a sentence embedder."""
    bert = load("transformers:BertModel")(
        load("transformers:BertConfig")(
            **{k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
        )
    )

    class Reader(nn.Module):
        """What sentence_transformers.models.Transformer does, without its files."""

        def __init__(self) -> None:
            super().__init__()
            self.auto_model = bert

        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            states = self.auto_model(
                features["input_ids"], attention_mask=features["attention_mask"]
            )
            return features | {"token_embeddings": states[0]}

    pooling = load("sentence_transformers.models:Pooling")(32)
    model = load("sentence_transformers:SentenceTransformer")(
        modules=[Reader(), pooling], device="cpu"
    )
    (ids,), mask = words(), torch.ones(2, 16, dtype=torch.long)
    mask[1, 10:] = 0
    return model, lambda model: model({"input_ids": ids, "attention_mask": mask})


CLIP = {
    "embed_dim": 32,
    "vision_cfg": {
        "image_size": 32,
        "layers": 2,
        "width": 32,
        "head_width": 8,
        "patch_size": 8,
    },
    "text_cfg": {
        "context_length": 16,
        "vocab_size": 64,
        "width": 32,
        "heads": 4,
        "layers": 2,
    },
}


def make_clip(path: str, vision: dict[str, Any], more: dict[str, Any]) -> Any:
    """Make a CLIP or a CoCa of open_clip."""
    options = CLIP | {"vision_cfg": CLIP["vision_cfg"] | vision} | more
    model = load(f"open_clip.{path}")(**options)
    return model, feed((*image(), *words()))


COCA: dict[str, Any] = {
    "text_cfg": CLIP["text_cfg"] | {"output_tokens": True, "embed_cls": True},
    "multimodal_cfg": {
        "context_length": 16,
        "vocab_size": 64,
        "width": 32,
        "heads": 4,
        "layers": 2,
    },
}
OPEN_CLIP = {
    "clip": partial(make_clip, "model:CLIP", {}, {}),
    "clip-attentional-pool": partial(
        make_clip,
        "model:CLIP",
        {"attentional_pool": True, "attn_pooler_queries": 4, "attn_pooler_heads": 4},
        {},
    ),
    "clip-resnet": partial(
        make_clip, "model:CLIP", {"layers": (1, 1, 1, 1), "head_width": 32}, {}
    ),
    "coca": partial(
        make_clip,
        "coca_model:CoCa",
        {
            "attentional_pool": True,
            "attn_pooler_queries": 4,
            "attn_pooler_heads": 4,
            "output_tokens": True,
        },
        COCA,
    ),
}


def make_lens(options: dict[str, Any]) -> tuple[nn.Module, Run]:
    """Make a model of TransformerLens, whose softmax stands between hooks."""
    config = load("transformer_lens:HookedTransformerConfig")(
        n_layers=2,
        d_model=32,
        n_ctx=32,
        d_head=8,
        n_heads=4,
        d_vocab=64,
        act_fn="gelu",
        **options,
    )
    return load("transformer_lens:HookedTransformer")(config), feed(words())


TRANSFORMER_LENS = {
    "gpt2": partial(make_lens, {}),
    "rotary-grouped": partial(
        make_lens,
        {
            "positional_embedding_type": "rotary",
            "rotary_dim": 8,
            "n_key_value_heads": 2,
        },
    ),
    "alibi": partial(make_lens, {"positional_embedding_type": "alibi"}),
    "local": partial(
        make_lens,
        {
            "use_local_attn": True,
            "attn_types": ["global", "local"],
            "window_size": 4,
        },
    ),
    "split": partial(make_lens, {"use_split_qkv_input": True}),
}


def make_keras(options: dict[str, Any], inputs: int) -> tuple[nn.Module, Run]:
    """Make a MultiHeadAttention of Keras, with torch below."""
    import os  # noqa: PLC0415

    os.environ["KERAS_BACKEND"] = "torch"
    model = load("keras.layers:MultiHeadAttention")(num_heads=4, key_dim=8, **options)
    given = [*vectors()] * inputs
    model(*given)  # Keras makes the weights at the first call
    return model, feed(tuple(given))


def make_keras_grouped() -> tuple[nn.Module, Run]:
    """Make a GroupedQueryAttention of Keras, causal."""
    import os  # noqa: PLC0415

    os.environ["KERAS_BACKEND"] = "torch"
    model = load("keras.layers:GroupQueryAttention")(
        head_dim=8, num_query_heads=4, num_key_value_heads=2
    )
    (x,) = vectors()
    model(x, x)
    return model, lambda model: model(x, x, use_causal_mask=True)


KERAS = {
    "MultiHeadAttention": partial(make_keras, {}, 2),
    "MultiHeadAttention-unfused": partial(make_keras, {"flash_attention": False}, 2),
    "GroupQueryAttention": make_keras_grouped,
}


def make_torchscale(kind: str, options: dict[str, Any]) -> tuple[nn.Module, Run]:
    """Make an encoder or a decoder of torchscale."""
    side = kind.lower()
    sizes = {
        f"{side}_embed_dim": 32,
        f"{side}_attention_heads": 4,
        f"{side}_ffn_embed_dim": 48,
        f"{side}_layers": 2,
    }
    config = load(f"torchscale.architecture.config:{kind}Config")(
        vocab_size=64, **sizes | options
    )
    embed = nn.Embedding(64, 32)
    model = load(f"torchscale.architecture.{side}:{kind}")(config, embed_tokens=embed)
    (tokens,) = words()
    return model, lambda model: model(tokens)


TORCHSCALE = {
    "encoder": partial(make_torchscale, "Encoder", {}),
    "encoder-buckets": partial(
        make_torchscale, "Encoder", {"rel_pos_buckets": 8, "max_rel_pos": 16}
    ),
    "decoder": partial(make_torchscale, "Decoder", {}),
    "decoder-xpos": partial(make_torchscale, "Decoder", {"xpos_rel_pos": True}),
}


def make_whisper(fused: bool) -> tuple[nn.Module, Run]:
    """Make a model of openai-whisper, with SDPA or the attention it writes itself."""
    size = {"ctx": 16, "state": 32, "head": 4, "layer": 2}
    dimensions = load("whisper.model:ModelDimensions")(
        n_mels=8,
        n_vocab=64,
        **{f"n_{side}_{k}": n for side in ("audio", "text") for k, n in size.items()},
    )
    model = load("whisper.model:Whisper")(dimensions)
    sound, (tokens,) = torch.randn(2, 8, 32), words(10)
    unfused = load("whisper.model:disable_sdpa")

    def run(model: nn.Module) -> Any:
        if fused:
            return model(sound, tokens)
        with unfused():
            return model(sound, tokens)

    return model, run


def make_curated(path: str, options: dict[str, Any]) -> tuple[nn.Module, Run]:
    """Make a model of curated-transformers, the second text padded."""
    family, _, name = path.partition(":")
    module = f"curated_transformers.models.{family}"
    config = load(f"{module}:{options['config']}")(
        hidden_width=32,
        n_hidden_layers=2,
        n_pieces=64,
        dtype=torch.float32,
        **options["sizes"],
    )
    model = load(f"{module}:{name}")(config)
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[1, 10:] = False
    (tokens,) = words()
    wrap = load("curated_transformers.layers:AttentionMask")
    return model, lambda model: model(tokens, wrap(mask))


CURATED = {
    "bert": partial(
        make_curated,
        "bert:BERTEncoder",
        {
            "config": "BERTConfig",
            "sizes": {
                "embedding_width": 32,
                "intermediate_width": 48,
                "n_attention_heads": 4,
            },
        },
    ),
    "llama": partial(
        make_curated,
        "llama:LlamaCausalLM",
        {
            "config": "LlamaConfig",
            "sizes": {
                "intermediate_width": 48,
                "n_query_heads": 4,
                "n_key_value_heads": 2,
                "rotary_embedding_fraction": 1.0,
            },
        },
    ),
    "mpt": partial(
        make_curated,
        "mpt:MPTCausalLM",
        {"config": "MPTConfig", "sizes": {"n_attention_heads": 4}},
    ),
}


def make_chronos(attention: str) -> tuple[nn.Module, Run]:
    """Make Chronos 2, which attends over times and over the series of a group."""
    config = load("chronos.chronos2.config:Chronos2CoreConfig")(
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        attn_implementation=attention,
        chronos_config={
            "context_length": 64,
            "output_patch_size": 8,
            "input_patch_size": 8,
            "input_patch_stride": 8,
            "quantiles": [0.1, 0.5, 0.9],
            "use_reg_token": True,
            "use_arcsinh": True,
            "max_output_patches": 2,
        },
    )
    model = load("chronos:Chronos2Model")(config)
    series, groups = torch.randn(4, 64), torch.tensor([0, 0, 1, 1])
    return model, lambda model: model(series, group_ids=groups)


def make_lightglue(flash: bool) -> tuple[nn.Module, Run]:
    """Make the matcher of two sets of key points, self and cross."""
    model = load("kornia.feature:LightGlue")(
        None,
        input_dim=32,
        descriptor_dim=32,
        n_layers=2,
        num_heads=4,
        flash=flash,
        depth_confidence=-1,
        width_confidence=-1,
    )

    def draw(n: int) -> dict[str, Any]:
        return {
            "keypoints": torch.rand(2, n, 2) * 64,
            "descriptors": torch.randn(2, n, 32),
            "image_size": torch.tensor([[64, 64]] * 2),
        }

    pair = {"image0": draw(12), "image1": draw(9)}
    return model, lambda model: model(pair)


MONAI: dict[str, Any] = {
    "vit": Recipe(
        "monai.networks.nets:ViT",
        {
            "in_channels": 1,
            "img_size": (16, 16, 16),
            "patch_size": (8, 8, 8),
            "hidden_size": 32,
            "mlp_dim": 48,
            "num_layers": 2,
            "num_heads": 4,
            "classification": True,
        },
        lambda: (torch.randn(2, 1, 16, 16, 16),),
    ),
    "swin-unetr": Recipe(
        "monai.networks.nets:SwinUNETR",
        {
            "in_channels": 1,
            "out_channels": 2,
            "feature_size": 12,
            "depths": (2, 1, 1, 1),
            "num_heads": (1, 2, 3, 3),
            "window_size": 4,
            "spatial_dims": 2,
        },
        lambda: (torch.randn(2, 1, 64, 64),),
    ),
    "decoder": Recipe(
        "monai.networks.nets:DecoderOnlyTransformer",
        {
            "num_tokens": 64,
            "max_seq_len": 32,
            "attn_layers_dim": 32,
            "attn_layers_depth": 2,
            "attn_layers_heads": 4,
            "with_cross_attention": True,
        },
        lambda: {"x": words()[0], "context": vectors(6)[0]},
    ),
}


ESM = {"num_layers": 2, "embed_dim": 32, "attention_heads": 4}


def make_esm(name: str) -> tuple[nn.Module, Run]:
    """Make a protein language model of fair-esm."""
    alphabet = load("esm.data:Alphabet").from_architecture("ESM-1b")
    if name == "ESM2":
        model = load("esm.model.esm2:ESM2")(**ESM, alphabet=alphabet)
        return model, feed(words(16, vocabulary=24))
    import argparse  # noqa: PLC0415

    arguments = argparse.Namespace(
        layers=2,
        embed_dim=32,
        ffn_embed_dim=48,
        attention_heads=4,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        max_tokens_per_msa=2**14,
        max_tokens=2**14,
        max_positions=32,
        embed_positions_msa=True,
        embed_positions_msa_dim=32,
        logit_bias=True,
    )
    alphabet = load("esm.data:Alphabet").from_architecture("msa_transformer")
    model = load("esm.model.msa_transformer:MSATransformer")(arguments, alphabet)
    return model, lambda model: model(
        torch.randint(4, 24, (1, 5, 12), generator=seed())
    )


def seed() -> torch.Generator:
    """Return a generator that draws the same each time."""
    return torch.Generator().manual_seed(3)


def make_sam() -> tuple[nn.Module, Run]:
    """Make the encoder of segment-anything, with windows and relative positions."""
    model = load("segment_anything.modeling:ImageEncoderViT")(
        img_size=64,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=4,
        out_chans=16,
        use_rel_pos=True,
        window_size=4,
        global_attn_indexes=(1,),
    )
    return model, feed(image(64))


def make_mask_decoder() -> tuple[nn.Module, Run]:
    """Make the decoder of segment-anything, which attends both ways."""
    model = load("segment_anything.modeling:TwoWayTransformer")(
        depth=2, embedding_dim=32, num_heads=4, mlp_dim=48
    )
    x, at = torch.randn(2, 2, 32, 8, 8)
    return model, feed((x, at, torch.randn(2, 6, 32)))


LIBRARIES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "litgpt": (("litgpt",), LITGPT),
    "peft": (("peft", "transformers"), PEFT),
    "torchao": (
        ("torchao", "transformers"),
        {
            "int8": partial(make_torchao, "Int8WeightOnlyConfig"),
            "int8-dynamic": partial(
                make_torchao, "Int8DynamicActivationInt8WeightConfig"
            ),
        },
    ),
    "optimum-quanto": (("optimum", "transformers"), {"int8": make_quanto}),
    "torch": (("transformers",), {"quantize-dynamic": make_dynamic}),
    "sentence-transformers": (
        ("sentence_transformers",),
        {"embedder": make_sentences},
    ),
    "open-clip": (("open_clip",), OPEN_CLIP),
    "transformer-lens": (("transformer_lens",), TRANSFORMER_LENS),
    "keras": (("keras",), KERAS),
    "fair-esm": (
        ("esm",),
        {"esm2": partial(make_esm, "ESM2"), "msa": partial(make_esm, "MSA")},
    ),
    "segment-anything": (
        ("segment_anything",),
        {"encoder": make_sam, "decoder": make_mask_decoder},
    ),
    "torchscale": (("torchscale",), TORCHSCALE),
    "openai-whisper": (
        ("whisper",),
        {"sdpa": partial(make_whisper, True), "written": partial(make_whisper, False)},
    ),
    "curated-transformers": (("curated_transformers",), CURATED),
    "chronos-forecasting": (
        ("chronos",),
        {
            "chronos2": partial(make_chronos, "sdpa"),
            "chronos2-eager": partial(make_chronos, "eager"),
        },
    ),
    "kornia": (
        ("kornia",),
        {
            "lightglue": partial(make_lightglue, True),
            "lightglue-written": partial(make_lightglue, False),
        },
    ),
    "monai": (("monai",), MONAI),
    "rtdl-revisiting-models": (
        ("rtdl_revisiting_models",),
        {
            "FTTransformer": Recipe(
                "rtdl_revisiting_models:FTTransformer",
                {
                    "n_cont_features": 4,
                    "cat_cardinalities": [3, 5],
                    "d_out": 1,
                    "n_blocks": 2,
                    "d_block": 32,
                    "attention_n_heads": 4,
                    "attention_dropout": 0.0,
                    "ffn_d_hidden": 48,
                    "ffn_d_hidden_multiplier": None,
                    "ffn_dropout": 0.0,
                    "residual_dropout": 0.0,
                },
                lambda: (torch.randn(2, 4), torch.randint(0, 3, (2, 2))),
            )
        },
    ),
    "torchvision": (
        ("torchvision",),
        {
            "vit": Recipe(
                "torchvision.models:VisionTransformer",
                {
                    "image_size": 32,
                    "patch_size": 8,
                    "num_layers": 2,
                    "num_heads": 4,
                    "hidden_dim": 32,
                    "mlp_dim": 48,
                    "num_classes": 10,
                },
                image,
            ),
            "swin": Recipe(
                "torchvision.models.swin_transformer:SwinTransformer",
                {
                    "patch_size": [4, 4],
                    "embed_dim": 16,
                    "depths": [2, 2],
                    "num_heads": [2, 4],
                    "window_size": [4, 4],
                    "num_classes": 10,
                },
                partial(image, 64),
            ),
            "maxvit": Recipe(
                "torchvision.models:MaxVit",
                {
                    "input_size": (64, 64),
                    "stem_channels": 16,
                    "partition_size": 2,
                    "block_channels": [16, 32],
                    "block_layers": [1, 1],
                    "head_dim": 8,
                    "stochastic_depth_prob": 0.0,
                    "num_classes": 10,
                },
                partial(image, 64),
            ),
        },
    ),
}


def list_cases() -> Iterable[Case]:
    """Yield every model of every library."""
    for library, (needs, recipes) in LIBRARIES.items():
        yield from list_recipes(library, recipes, needs=needs)
