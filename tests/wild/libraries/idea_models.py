"""Small packages with one idea each: most of them attend in a way of their own."""

import os
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
from wild.stir import Run

os.environ["CLEAR_CACHE"] = "1"  # se3-transformer-pytorch: nothing in the home folder
TEXT = {"num_tokens": 64, "dim": 32, "depth": 2, "heads": 4}
LONG = TEXT | {"max_seq_len": 32}
line = partial(words, 32)


def make_perceiver_lm() -> tuple[nn.Module, Run]:
    """Make a Perceiver IO that reads tokens, some of them padding."""
    model = load("perceiver_pytorch:PerceiverLM")(
        num_tokens=64,
        dim=32,
        depth=2,
        max_seq_len=32,
        num_latents=8,
        latent_dim=32,
        cross_heads=2,
        latent_heads=4,
        cross_dim_head=8,
        latent_dim_head=8,
    )
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[1, 10:] = False
    (tokens,) = words()
    return model, lambda model: model(tokens, mask=mask)


def make_ipa() -> tuple[nn.Module, Run]:
    """Make a block of invariant point attention: scores of distances and pairs."""
    model = load("invariant_point_attention:IPABlock")(dim=32, heads=4)
    (x,), pairs = vectors(12), torch.randn(2, 12, 12, 32)
    given = {
        "pairwise_repr": pairs,
        "rotations": torch.eye(3).expand(2, 12, 3, 3),
        "translations": torch.randn(2, 12, 3),
    }
    return model, lambda model: model(x, **given)


def make_flamingo() -> tuple[nn.Module, Run]:
    """Make a resampler and a cross-attention that is told where images stand."""
    parts = {
        "resample": load("flamingo_pytorch:PerceiverResampler")(
            dim=32, depth=2, dim_head=8, heads=4, num_latents=4, num_media_embeds=2
        ),
        "cross": load("flamingo_pytorch:GatedCrossAttentionBlock")(
            dim=32, dim_head=8, heads=4
        ),
    }
    media, (text,) = torch.randn(2, 2, 9, 32), vectors()
    places = torch.zeros(2, 16, dtype=torch.bool)
    places[:, 0] = places[:, 8] = True

    def run(model: nn.Module) -> Any:
        return model["cross"](text, model["resample"](media), media_locations=places)

    return nn.ModuleDict(parts), run


def make_memorizing() -> tuple[nn.Module, Run]:
    """Make two segments of a block-recurrent transformer."""
    model = load("block_recurrent_transformer_pytorch:BlockRecurrentTransformer")(
        num_tokens=64,
        dim=32,
        depth=2,
        dim_head=8,
        heads=4,
        max_seq_len=32,
        block_width=16,
        num_state_vectors=8,
        recurrent_layers=(1,),
        use_flash_attn=False,
    )
    first, second = *line(), *line()

    def run(model: nn.Module) -> Any:
        logits, memories, states = model(first)
        return logits, model(second, xl_memories=memories, states=states)

    return model, run


def make_recurrent() -> tuple[nn.Module, Run]:
    """Make two segments of a recurrent memory transformer."""
    model = load("recurrent_memory_transformer_pytorch:RecurrentMemoryTransformer")(
        num_tokens=64,
        num_memory_tokens=4,
        dim=32,
        depth=2,
        causal=True,
        dim_head=8,
        heads=4,
        seq_len=16,
    )
    first, second = *words(), *words()

    def run(model: nn.Module) -> Any:
        logits, memory, _ = model(first)
        return logits, model(second, memory)

    return model, run


def make_coca() -> tuple[nn.Module, Run]:
    """Make a captioner around a vision transformer of the same author."""
    vit = load("vit_pytorch.simple_vit:SimpleViT")(
        image_size=32,
        patch_size=8,
        num_classes=10,
        dim=32,
        depth=1,
        heads=4,
        mlp_dim=48,
    )
    wrap = load("vit_pytorch.extractor:Extractor")
    model = load("coca_pytorch.coca_pytorch:CoCa")(
        dim=32,
        img_encoder=wrap(vit, return_embeddings_only=True, detach=False),
        image_dim=32,
        num_tokens=64,
        unimodal_depth=1,
        multimodal_depth=1,
        dim_head=8,
        heads=4,
        caption_loss_weight=1.0,
        contrastive_loss_weight=1.0,
    )
    text, images = *words(), *image()
    return model, lambda model: model(text=text, images=images)


def make_timesformer() -> tuple[nn.Module, Run]:
    """Make a video transformer, with one video shorter than the other."""
    model = load("timesformer_pytorch:TimeSformer")(
        dim=32,
        image_size=32,
        patch_size=8,
        num_frames=4,
        num_classes=10,
        depth=2,
        heads=4,
        dim_head=8,
    )
    video = torch.randn(2, 4, 3, 32, 32)
    mask = torch.tensor([[True] * 4, [True] * 3 + [False]])
    return model, lambda model: model(video, mask=mask)


def make_slots() -> tuple[nn.Module, Run]:
    """Make slot attention: the softmax is over the queries."""
    model = load("slot_attention:SlotAttention")(num_slots=4, dim=32, iters=2)
    return model, feed(vectors())


def make_colt5() -> tuple[nn.Module, Run]:
    """Make attention of few routed tokens beside that of all."""
    model = load("colt5_attention:ConditionalRoutedAttention")(
        dim=32,
        light_dim_head=8,
        light_heads=4,
        light_window_size=8,
        heavy_dim_head=8,
        heavy_heads=4,
        num_heavy_tokens_q=6,
        num_heavy_tokens_kv=6,
    )
    return model, feed(vectors(32))


def make_enformer() -> tuple[nn.Module, Run]:
    """Make the model of gene expression, on a short piece of DNA."""
    load_config = load("enformer_pytorch:EnformerConfig")
    model = load("enformer_pytorch:Enformer")(
        load_config(
            dim=96,
            depth=2,
            heads=4,
            num_downsamples=3,
            target_length=16,
            dim_divisible_by=12,
            output_heads={"human": 5, "mouse": 3},
            attn_dim_key=16,
        )
    )
    return model, feed(words(256, vocabulary=5, batch=1))


def alone(path: str, options: dict[str, Any], inputs: Any) -> dict[str, Recipe]:
    """Return a table of one recipe, named like its class."""
    return {path.partition(":")[2]: Recipe(path, options, inputs)}


PERCEIVER = {
    "depth": 2,
    "num_latents": 8,
    "latent_dim": 32,
    "cross_heads": 2,
    "latent_heads": 4,
    "cross_dim_head": 8,
    "latent_dim_head": 8,
}
LIBRARIES: dict[str, tuple[str, dict[str, Any]]] = {
    "perceiver-pytorch": (
        "perceiver_pytorch",
        {
            "Perceiver": Recipe(
                "perceiver_pytorch:Perceiver",
                PERCEIVER
                | {
                    "input_channels": 3,
                    "input_axis": 2,
                    "num_freq_bands": 4,
                    "max_freq": 8.0,
                    "num_classes": 10,
                },
                lambda: (torch.randn(2, 8, 8, 3),),
            ),
            "PerceiverIO": Recipe(
                "perceiver_pytorch:PerceiverIO",
                PERCEIVER | {"dim": 32, "queries_dim": 16, "logits_dim": 10},
                lambda: {
                    "data": torch.randn(2, 20, 32),
                    "queries": torch.randn(5, 16),
                },
            ),
            "PerceiverLM": make_perceiver_lm,
        },
    ),
    "performer-pytorch": (
        "performer_pytorch",
        alone("performer_pytorch:PerformerLM", LONG | {"dim_head": 8}, line)
        | {
            "PerformerLM-local": Recipe(
                "performer_pytorch:PerformerLM",
                LONG
                | {
                    "dim_head": 8,
                    "local_attn_heads": 2,
                    "local_window_size": 8,
                    "causal": False,
                },
                line,
            )
        },
    ),
    "local-attention": (
        "local_attention",
        alone(
            "local_attention:LocalTransformer",
            LONG | {"local_attn_window_size": 8, "causal": True, "dim_head": 8},
            line,
        ),
    ),
    "routing-transformer": (
        "routing_transformer",
        alone(
            "routing_transformer:RoutingTransformerLM",
            LONG | {"window_size": 8, "causal": True},
            line,
        ),
    ),
    "reformer-pytorch": (
        "reformer_pytorch",
        alone(
            "reformer_pytorch:ReformerLM",
            LONG | {"bucket_size": 8, "n_hashes": 2, "causal": True},
            line,
        )
        | {
            "ReformerLM-full": Recipe(
                "reformer_pytorch:ReformerLM",
                LONG | {"bucket_size": 8, "use_full_attn": True, "causal": True},
                line,
            )
        },
    ),
    "linear-attention-transformer": (
        "linear_attention_transformer",
        alone(
            "linear_attention_transformer:LinearAttentionTransformerLM",
            LONG
            | {"n_local_attn_heads": 2, "local_attn_window_size": 8, "causal": True},
            line,
        ),
    ),
    "sinkhorn-transformer": (
        "sinkhorn_transformer",
        alone(
            "sinkhorn_transformer:SinkhornTransformerLM",
            LONG | {"bucket_size": 8},
            line,
        ),
    ),
    "linformer": (
        "linformer",
        alone(
            "linformer:LinformerLM",
            TEXT | {"seq_len": 32, "k": 8},
            line,
        ),
    ),
    "nystrom-attention": (
        "nystrom_attention",
        alone(
            "nystrom_attention:Nystromformer",
            {"dim": 32, "depth": 2, "heads": 4, "dim_head": 8, "num_landmarks": 4},
            partial(vectors, 32),
        ),
    ),
    "h-transformer-1d": (
        "h_transformer_1d",
        alone(
            "h_transformer_1d:HTransformer1D",
            LONG | {"block_size": 8, "causal": True},
            line,
        ),
    ),
    "axial-attention": (
        "axial_attention",
        alone(
            "axial_attention:AxialAttention",
            {"dim": 16, "heads": 4, "num_dimensions": 2, "dim_index": 1},
            lambda: (torch.randn(2, 16, 8, 8),),
        ),
    ),
    "lambda-networks": (
        "lambda_networks",
        alone(
            "lambda_networks:LambdaLayer",
            {"dim": 16, "dim_out": 16, "n": 8, "dim_k": 8, "heads": 4, "dim_u": 1},
            lambda: (torch.randn(2, 16, 8, 8),),
        ),
    ),
    "halonet-pytorch": (
        "halonet_pytorch",
        alone(
            "halonet_pytorch:HaloAttention",
            {"dim": 16, "block_size": 4, "halo_size": 2, "dim_head": 8, "heads": 2},
            lambda: (torch.randn(2, 16, 8, 8),),
        ),
    ),
    "bottleneck-transformer-pytorch": (
        "bottleneck_transformer_pytorch",
        alone(
            "bottleneck_transformer_pytorch:BottleStack",
            {
                "dim": 16,
                "fmap_size": 8,
                "dim_out": 32,
                "num_layers": 2,
                "heads": 4,
                "dim_head": 8,
                "rel_pos_emb": True,
            },
            lambda: (torch.randn(2, 16, 8, 8),),
        ),
    ),
    "conformer": (
        "conformer",
        alone(
            "conformer:Conformer",
            {"dim": 32, "depth": 2, "dim_head": 8, "heads": 4},
            vectors,
        ),
    ),
    "slot-attention": ("slot_attention", {"SlotAttention": make_slots}),
    "soft-moe-pytorch": (
        "soft_moe_pytorch",
        alone(
            "soft_moe_pytorch:SoftMoE",
            {"dim": 32, "seq_len": 16, "num_experts": 4},
            vectors,
        ),
    ),
    "tab-transformer-pytorch": (
        "tab_transformer_pytorch",
        alone(
            "tab_transformer_pytorch:TabTransformer",
            {
                "categories": (4, 5, 6),
                "num_continuous": 3,
                "dim": 32,
                "depth": 2,
                "heads": 4,
                "dim_head": 8,
                "dim_out": 1,
                "mlp_act": nn.ReLU(),
            },
            lambda: (torch.randint(0, 4, (2, 3)), torch.randn(2, 3)),
        )
        | alone(
            "tab_transformer_pytorch:FTTransformer",
            {
                "categories": (4, 5, 6),
                "num_continuous": 3,
                "dim": 32,
                "depth": 2,
                "heads": 4,
                "dim_head": 8,
                "dim_out": 1,
            },
            lambda: (torch.randint(0, 4, (2, 3)), torch.randn(2, 3)),
        ),
    ),
    "timesformer-pytorch": ("timesformer_pytorch", {"TimeSformer": make_timesformer}),
    "invariant-point-attention": (
        "invariant_point_attention",
        {"IPABlock": make_ipa},
    ),
    "flamingo-pytorch": ("flamingo_pytorch", {"Flamingo": make_flamingo}),
    "block-recurrent-transformer-pytorch": (
        "block_recurrent_transformer_pytorch",
        {"BlockRecurrentTransformer": make_memorizing},
    ),
    "recurrent-memory-transformer-pytorch": (
        "recurrent_memory_transformer_pytorch",
        {"RecurrentMemoryTransformer": make_recurrent},
    ),
    "CoCa-pytorch": ("coca_pytorch", {"CoCa": make_coca}),
    "CoLT5-attention": ("colt5_attention", {"ConditionalRoutedAttention": make_colt5}),
    "hourglass-transformer-pytorch": (
        "hourglass_transformer_pytorch",
        alone(
            "hourglass_transformer_pytorch:HourglassTransformerLM",
            {
                "num_tokens": 64,
                "dim": 32,
                "max_seq_len": 32,
                "depth": (1, 2, 1),
                "shorten_factor": 2,
                "heads": 4,
                "dim_head": 8,
                "causal": True,
                "attn_resampling": True,
            },
            line,
        ),
    ),
    "mega-pytorch": (
        "mega_pytorch",
        alone(
            "mega_pytorch:Mega",
            {
                "num_tokens": 64,
                "dim": 32,
                "depth": 2,
                "ema_heads": 4,
                "attn_dim_qk": 16,
                "attn_dim_value": 32,
                "laplacian_attn_fn": False,
            },
            line,
        )
        | {
            "Mega-laplacian": Recipe(
                "mega_pytorch:Mega",
                {
                    "num_tokens": 64,
                    "dim": 32,
                    "depth": 2,
                    "ema_heads": 4,
                    "attn_dim_qk": 16,
                    "attn_dim_value": 32,
                    "laplacian_attn_fn": True,
                },
                line,
            )
        },
    ),
    "native-sparse-attention-pytorch": (
        "native_sparse_attention_pytorch",
        alone(
            "native_sparse_attention_pytorch:SparseAttention",
            {
                "dim": 32,
                "dim_head": 8,
                "heads": 4,
                "sliding_window_size": 4,
                "compress_block_size": 4,
                "compress_block_sliding_stride": 4,
                "selection_block_size": 4,
                "num_selected_blocks": 2,
            },
            partial(vectors, 31),
        ),
    ),
    "simple-hierarchical-transformer": (
        "simple_hierarchical_transformer",
        alone(
            "simple_hierarchical_transformer:HierarchicalTransformer",
            {
                "num_tokens": 64,
                "dim": 32,
                "depth": 2,
                "seq_len": 32,
                "hierarchies": (1, 2),
                "window_sizes": (16, None),
                "dim_head": 8,
                "heads": 4,
            },
            line,
        ),
    ),
    "egnn-pytorch": (
        "egnn_pytorch",
        alone(
            "egnn_pytorch:EGNN_Network",
            {
                "num_tokens": 21,
                "num_positions": 32,
                "dim": 32,
                "depth": 2,
                "num_nearest_neighbors": 4,
                "global_linear_attn_every": 1,
                "global_linear_attn_heads": 4,
                "global_linear_attn_dim_head": 8,
            },
            lambda: (torch.randint(0, 21, (2, 16)), torch.randn(2, 16, 3)),
        ),
    ),
    "se3-transformer-pytorch": (
        "se3_transformer_pytorch",
        alone(
            "se3_transformer_pytorch:SE3Transformer",
            {
                "dim": 16,
                "heads": 2,
                "depth": 1,
                "dim_head": 8,
                "num_degrees": 2,
                "num_neighbors": 4,
                "output_degrees": 1,
            },
            lambda: (torch.randn(1, 12, 16), torch.randn(1, 12, 3)),
        ),
    ),
    "enformer-pytorch": (
        "enformer_pytorch",
        {"Enformer": make_enformer},
    ),
    "ring-attention-pytorch": (
        "ring_attention_pytorch",
        alone(
            "ring_attention_pytorch:RingTransformer",
            TEXT | {"causal": True, "dim_head": 8, "force_regular_attn": True},
            line,
        )
        | {
            "RingTransformer-buckets": Recipe(
                "ring_attention_pytorch:RingTransformer",
                TEXT | {"causal": True, "dim_head": 8, "bucket_size": 8},
                line,
            )
        },
    ),
    "denoising-diffusion-pytorch": (
        "denoising_diffusion_pytorch",
        alone(
            "denoising_diffusion_pytorch:Unet",
            {"dim": 16, "dim_mults": (1, 2), "attn_dim_head": 8, "attn_heads": 2},
            lambda: (torch.randn(2, 3, 16, 16), torch.tensor([3.0, 7.0])),
        ),
    ),
}


def list_cases() -> Iterable[Case]:
    """Yield every model of every package."""
    for library, (module, recipes) in LIBRARIES.items():
        yield from list_recipes(library, recipes, needs=(module,))
