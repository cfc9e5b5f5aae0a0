"""vit-pytorch: a file for each paper, and as many ways to write attention."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from wild.case import Case
from wild.libraries.recipe import Recipe, image, list_recipes

SIZES: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "num_classes": 10,
    "dim": 32,
    "depth": 2,
    "heads": 4,
    "mlp_dim": 48,
}
WIDE = SIZES | {"dim_head": 8}
STAGES = {"num_classes": 10}
picture = partial(image, 32)


def video() -> tuple:
    """Draw two videos of four frames."""
    return (torch.randn(2, 3, 4, 32, 32),)


def series() -> tuple:
    """Draw signals (B, channels, N)."""
    return (torch.randn(2, 3, 64),)


def pictures() -> tuple:
    """Draw images of several sizes, packed into batches."""
    return (
        [[torch.randn(3, 16, 16), torch.randn(3, 32, 16)], [torch.randn(3, 32, 32)]],
    )


def at(path: str, options: dict[str, Any], inputs: Any = picture) -> Recipe:
    """Return the recipe of one class of vit_pytorch."""
    return Recipe(f"vit_pytorch.{path}", options, inputs)


MODELS = {
    "vit": at("vit:ViT", WIDE),
    "simple": at("simple_vit:SimpleViT", WIDE),
    "simple-registers": at("simple_vit_with_register_tokens:SimpleViT", WIDE),
    "simple-qk-norm": at("simple_vit_with_qk_norm:SimpleViT", WIDE),
    "simple-flash": at("simple_flash_attn_vit:SimpleViT", WIDE | {"use_flash": True}),
    "1d": at(
        "vit_1d:ViT",
        {k: v for k, v in WIDE.items() if k != "image_size"} | {"seq_len": 64},
        series,
    ),
    "3d": at(
        "vit_3d:ViT",
        {k: v for k, v in WIDE.items() if k != "patch_size"}
        | {"image_patch_size": 8, "frames": 4, "frame_patch_size": 2},
        video,
    ),
    "vivit": at(
        "vivit:ViViT",
        {k: v for k, v in WIDE.items() if k not in {"patch_size", "depth"}}
        | {
            "image_patch_size": 8,
            "frames": 4,
            "frame_patch_size": 2,
            "spatial_depth": 2,
            "temporal_depth": 2,
        },
        video,
    ),
    "na-vit": at("na_vit:NaViT", WIDE, pictures),
    "na-vit-nested": at(
        "na_vit_nested_tensor:NaViT", WIDE, lambda: (sum(*pictures(), []),)
    ),
    "deepvit": at("deepvit:DeepViT", WIDE),
    "cait": at("cait:CaiT", WIDE | {"cls_depth": 1}),
    "t2t": at(
        "t2t:T2TViT",
        {
            "image_size": 32,
            "num_classes": 10,
            "dim": 32,
            "depth": 2,
            "heads": 4,
            "mlp_dim": 48,
            "t2t_layers": ((7, 4), (3, 2)),
        },
    ),
    "cct": at(
        "cct:CCT",
        {
            "img_size": 32,
            "embedding_dim": 32,
            "n_conv_layers": 1,
            "num_layers": 2,
            "num_heads": 4,
            "mlp_ratio": 2.0,
            "num_classes": 10,
            "positional_embedding": "learnable",
        },
    ),
    "cross-vit": at(
        "cross_vit:CrossViT",
        {
            "image_size": 32,
            "num_classes": 10,
            "depth": 1,
            "sm_dim": 24,
            "sm_patch_size": 8,
            "sm_enc_depth": 1,
            "sm_enc_heads": 2,
            "lg_dim": 32,
            "lg_patch_size": 16,
            "lg_enc_depth": 1,
            "lg_enc_heads": 2,
            "cross_attn_depth": 1,
            "cross_attn_heads": 2,
        },
    ),
    "pit": at("pit:PiT", WIDE | {"depth": (1, 1), "dim_head": 8}),
    "levit": at(
        "levit:LeViT",
        STAGES
        | {
            "image_size": 64,
            "dim": (32, 48),
            "depth": 2,
            "heads": (2, 4),
            "mlp_mult": 2,
            "stages": 2,
        },
        partial(image, 64),
    ),
    "cvt": at("cvt:CvT", STAGES | {"s3_depth": 1, "s2_depth": 1}, partial(image, 64)),
    "twins-svt": at(
        "twins_svt:TwinsSVT",
        STAGES
        | {f"s{i}_local_patch_size": 2 for i in (1, 2, 3, 4)}
        | {f"s{i}_global_k": 2 for i in (1, 2, 3, 4)}
        | {"s3_depth": 1, "s4_depth": 1},
        partial(image, 64),
    ),
    "crossformer": at(
        "crossformer:CrossFormer",
        STAGES
        | {
            "dim": (32, 32, 64, 64),
            "depth": (1, 1, 1, 1),
            "global_window_size": (4, 2, 2, 1),
            "local_window_size": 2,
        },
        partial(image, 64),
    ),
    "regionvit": at(
        "regionvit:RegionViT",
        STAGES
        | {
            "dim": (16, 32, 32, 64),
            "depth": (1, 1, 1, 1),
            "window_size": 4,
            "tokenize_local_3_conv": False,
        },
        partial(image, 128),
    ),
    "scalable": at(
        "scalable_vit:ScalableViT",
        STAGES
        | {
            "dim": 16,
            "heads": (1, 2, 2, 4),
            "depth": (1, 1, 1, 1),
            "ssa_dim_key": (8, 8, 8, 8),
            "reduction_factor": (4, 2, 1, 1),
            "window_size": (16, 8, None, None),
        },
        partial(image, 64),
    ),
    "sep": at(
        "sep_vit:SepViT",
        STAGES
        | {
            "dim": 16,
            "dim_head": 8,
            "heads": (1, 2),
            "depth": (1, 1),
            "window_size": 7,
        },
        partial(image, 56),
    ),
    "max": at(
        "max_vit:MaxViT",
        STAGES
        | {
            "dim_conv_stem": 16,
            "dim": 16,
            "dim_head": 8,
            "depth": (1, 1),
            "window_size": 4,
        },
        partial(image, 64),
    ),
    "nest": at(
        "nest:NesT",
        STAGES
        | {
            "image_size": 32,
            "patch_size": 4,
            "dim": 16,
            "heads": 2,
            "num_hierarchies": 2,
            "block_repeats": (1, 1),
        },
    ),
    "mobile": at(
        "mobile_vit:MobileViT",
        STAGES
        | {
            "image_size": (64, 64),
            "dims": [32, 32, 48],
            "channels": [8, 8, 16, 16, 16, 16, 32, 32, 32, 32, 64],
        },
        partial(image, 64),
    ),
    "xcit": at("xcit:XCiT", WIDE | {"cls_depth": 1}),
    "small-dataset": at("vit_for_small_dataset:ViT", SIZES),
    "parallel": at("parallel_vit:ViT", WIDE | {"num_parallel_branches": 2}),
    "patch-merger": at(
        "vit_with_patch_merger:ViT",
        WIDE | {"patch_merge_layer": 1, "patch_merge_num_tokens": 4},
    ),
    "rvt": at("rvt:RvT", SIZES),
    "ats": at("ats_vit:ViT", WIDE | {"max_tokens_per_depth": (16, 8)}),
    "jumbo": at(
        "jumbo_vit:JumboViT",
        WIDE | {"num_jumbo_cls": 1, "jumbo_cls_k": 2, "jumbo_ff_mult": 2},
    ),
    "look": at(
        "look_vit:LookViT",
        {k: v for k, v in WIDE.items() if k != "mlp_dim"}
        | {"highres_patch_size": 4, "cross_attn_heads": 2, "cross_attn_dim_head": 8},
    ),
    "normalized": at("normalized_vit:nViT", WIDE),
    "decorr": at("vit_with_decorr:ViT", WIDE),
    "hyper-connections": at(
        "simple_vit_with_hyper_connections:SimpleViT",
        WIDE | {"num_residual_streams": 2},
    ),
    "value-residual": at("simple_vit_with_value_residual:SimpleViT", WIDE),
    "keel": at("vit_with_keel_post_ln:ViT", WIDE),
}


def list_cases() -> Iterable[Case]:
    """Yield every model of the table."""
    return list_recipes("vit-pytorch", MODELS, needs=("vit_pytorch",))
