"""diffusers: denoisers and autoencoders, small, with each of its attention processors."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from wild.case import Case
from wild.libraries.recipe import Recipe, feed, list_recipes, load
from wild.stir import Run

UNET: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 8,
    "cross_attention_dim": 32,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}


def latents(n: int = 8, channels: int = 4) -> torch.Tensor:
    """Draw noisy images (2, C, n, n)."""
    return torch.randn(2, channels, n, n)


def conditioned() -> dict[str, Any]:
    """Draw images, their times and their texts."""
    return {
        "sample": latents(),
        "timestep": torch.tensor([3, 7]),
        "encoder_hidden_states": torch.randn(2, 6, 32),
    }


def make_unet(processor: str = "", **options: Any) -> tuple[nn.Module, Run]:
    """Make a conditional UNet with one attention processor."""
    model = load("diffusers:UNet2DConditionModel")(**UNET | options)
    if processor:
        module = "diffusers.models.attention_processor"
        given = (2,) if processor.startswith("Sliced") else ()
        if processor.startswith("Fused"):
            model.fuse_qkv_projections()
        model.set_attn_processor(load(f"{module}:{processor}")(*given))
    return model, feed(conditioned())


def masked() -> dict[str, Any]:
    """Draw the same with a mask over the texts."""
    mask = torch.ones(2, 6)
    mask[1, 3:] = 0
    return conditioned() | {"encoder_attention_mask": mask}


def make_masked() -> tuple[nn.Module, Run]:
    """Make a conditional UNet that is told which tokens are padding."""
    return load("diffusers:UNet2DConditionModel")(**UNET), feed(masked())


DIT = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "num_layers": 2,
    "sample_size": 8,
    "patch_size": 2,
    "norm_num_groups": 4,
}


def class_labels() -> dict[str, Any]:
    """Draw images with classes."""
    return {
        "hidden_states": latents(),
        "timestep": torch.tensor([3, 7]),
        "class_labels": torch.tensor([1, 2]),
    }


def captions() -> dict[str, Any]:
    """Draw images with captions, padded."""
    mask = torch.ones(2, 6)
    mask[1, 3:] = 0
    return {
        "hidden_states": latents(),
        "timestep": torch.tensor([3, 7]),
        "encoder_hidden_states": torch.randn(2, 6, 32),
        "encoder_attention_mask": mask,
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def joint() -> dict[str, Any]:
    """Draw images with pooled texts, for SD3."""
    return {
        "hidden_states": latents(),
        "encoder_hidden_states": torch.randn(2, 6, 32),
        "pooled_projections": torch.randn(2, 64),
        "timestep": torch.tensor([3, 7]),
    }


def packed(*, guidance: bool = False) -> dict[str, Any]:
    """Draw packed images with positions, for Flux."""
    ids = torch.zeros(16, 3)
    ids[:, 1], ids[:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
    given = {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 6, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": ids,
        "txt_ids": torch.zeros(6, 3),
    }
    return given | ({"guidance": torch.ones(2)} if guidance else {})


def moving() -> dict[str, Any]:
    """Draw videos with texts."""
    return {
        "hidden_states": torch.randn(1, 4, 3, 8, 8),
        "encoder_hidden_states": torch.randn(1, 6, 32),
        "timestep": torch.tensor([3]),
    }


def at(name: str, options: dict[str, Any], inputs: Callable[[], Any]) -> Recipe:
    """Return the recipe of one class of diffusers."""
    return Recipe(f"diffusers:{name}", options, inputs)


VAE = {
    "block_out_channels": (16, 32),
    "norm_num_groups": 4,
    "sample_size": 16,
    "latent_channels": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}


def pictures() -> tuple:
    """Draw images."""
    return (torch.randn(2, 3, 16, 16),)


MODELS: dict[str, Any] = {
    "unet": make_unet,
    "unet-bmm": partial(make_unet, "AttnProcessor"),
    "unet-sliced": partial(make_unet, "SlicedAttnProcessor"),
    "unet-fused-projections": partial(make_unet, "FusedAttnProcessor2_0"),
    "unet-masked": make_masked,
    "unet-linear-projection": partial(make_unet, use_linear_projection=True),
    "unet-unconditional": at(
        "UNet2DModel",
        {
            "sample_size": 8,
            "block_out_channels": (16, 32),
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "attention_head_dim": 8,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        lambda: (latents(8, 3), torch.tensor([3, 7])),
    ),
    "unet-1d": at(
        "UNet1DModel",
        {
            "sample_size": 32,
            "in_channels": 14,
            "out_channels": 14,
            "extra_in_channels": 64,
            "block_out_channels": (32, 32),
            "norm_num_groups": 4,
            "down_block_types": ("DownBlock1DNoSkip", "AttnDownBlock1D"),
            "up_block_types": ("AttnUpBlock1D", "UpBlock1DNoSkip"),
        },
        lambda: (torch.randn(2, 14, 32), 3),
    ),
    "unet-3d": at(
        "UNet3DConditionModel",
        UNET
        | {
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        lambda: conditioned() | {"sample": torch.randn(2, 4, 3, 8, 8)},
    ),
    "autoencoder": at("AutoencoderKL", VAE, pictures),
    "autoencoder-vq": at(
        "VQModel",
        VAE | {"num_vq_embeddings": 32},
        pictures,
    ),
    "dit": at("DiTTransformer2DModel", DIT, class_labels),
    "transformer-2d": at(
        "Transformer2DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 16,
            "num_layers": 2,
            "norm_num_groups": 4,
            "cross_attention_dim": 32,
        },
        lambda: {
            "hidden_states": latents(8, 16),
            "encoder_hidden_states": torch.randn(2, 6, 32),
        },
    ),
    "prior": at(
        "PriorTransformer",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 2,
            "embedding_dim": 16,
            "num_embeddings": 5,
            "additional_embeddings": 4,
        },
        lambda: {
            "hidden_states": torch.randn(2, 16),
            "timestep": torch.tensor([3, 7]),
            "proj_embedding": torch.randn(2, 16),
            "encoder_hidden_states": torch.randn(2, 5, 16),
        },
    ),
    "pixart": at(
        "PixArtTransformer2DModel",
        DIT
        | {
            "out_channels": 8,
            "cross_attention_dim": 16,
            "caption_channels": 32,
            "use_additional_conditions": False,
        },
        captions,
    ),
    "sd3": at(
        "SD3Transformer2DModel",
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "caption_projection_dim": 32,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 64,
            "out_channels": 4,
        },
        joint,
    ),
    "flux": at(
        "FluxTransformer2DModel",
        {
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (4, 4, 8),
        },
        packed,
    ),
    "aura-flow": at(
        "AuraFlowTransformer2DModel",
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "caption_projection_dim": 32,
            "joint_attention_dim": 32,
            "pos_embed_max_size": 64,
            "out_channels": 4,
        },
        lambda: {
            "hidden_states": latents(),
            "encoder_hidden_states": torch.randn(2, 6, 32),
            "timestep": torch.tensor([0.3, 0.7]),
        },
    ),
    "sana": at(
        "SanaTransformer2DModel",
        {
            "sample_size": 8,
            "patch_size": 1,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 16,
            "caption_channels": 32,
        },
        lambda: {k: v for k, v in captions().items() if k != "added_cond_kwargs"},
    ),
    "latte": at(
        "LatteTransformer3DModel",
        {k: v for k, v in DIT.items() if k != "norm_num_groups"}
        | {"out_channels": 4, "caption_channels": 32, "video_length": 3},
        moving,
    ),
    "cogvideox": at(
        "CogVideoXTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 16,
            "text_embed_dim": 32,
            "num_layers": 2,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 9,
            "patch_size": 2,
            "max_text_seq_length": 6,
        },
        lambda: moving() | {"hidden_states": torch.randn(1, 3, 4, 8, 8)},
    ),
    "wan": at(
        "WanTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 32,
            "freq_dim": 32,
            "ffn_dim": 48,
            "num_layers": 2,
        },
        moving,
    ),
    "stable-audio": at(
        "StableAudioDiTModel",
        {
            "sample_size": 16,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "num_key_value_attention_heads": 2,
            "out_channels": 4,
            "cross_attention_dim": 32,
            "time_proj_dim": 8,
            "global_states_input_dim": 16,
            "cross_attention_input_dim": 32,
        },
        lambda: {
            "hidden_states": torch.randn(2, 4, 16),
            "timestep": torch.tensor([0.3, 0.7]),
            "encoder_hidden_states": torch.randn(2, 6, 32),
            "global_hidden_states": torch.randn(2, 1, 16),
        },
    ),
    "controlnet": at(
        "ControlNetModel",
        {
            k: UNET[k]
            for k in UNET
            if k not in {"sample_size", "out_channels", "up_block_types"}
        }
        | {"conditioning_embedding_out_channels": (8, 16)},
        lambda: conditioned() | {"controlnet_cond": torch.randn(2, 3, 16, 16)},
    ),
}


def list_cases() -> Iterable[Case]:
    """Yield every model of the table."""
    return list_recipes("diffusers", MODELS, needs=("diffusers",))
