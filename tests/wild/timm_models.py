"""Models of timm, made small: vision transformers, hybrids and some without attention.

The table has one line for each model: its name, the side of its images, and what is
smaller than usual. "unfused" ones write attention out instead of calling SDPA.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from wild.case import Case
from wild.stir import Run, seeded

TWO = {"depth": 2}
SMALL: dict[str, Any] = {"img_size": 64, "depth": 2}

MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    # vision transformers of one width
    "vit_tiny_patch16_224": (64, SMALL),
    "vit_small_patch16_36x1_224": (64, SMALL),
    "vit_relpos_small_patch16_224": (64, SMALL),
    "vit_srelpos_small_patch16_224": (64, SMALL),
    "vit_base_patch16_siglip_224": (64, SMALL),
    "vit_base_patch16_clip_224": (64, SMALL),
    "vit_little_patch16_reg4_gap_256": (64, SMALL),
    "vit_dwee_patch16_reg1_gap_256": (64, SMALL),
    "vit_dpwee_patch16_reg1_gap_256": (64, SMALL),
    "vit_pwee_patch16_reg1_gap_256": (64, SMALL),
    "vit_small_r26_s32_224": (64, SMALL),
    "vit_small_patch16_rope_224": (64, SMALL),
    "vit_small_patch16_dinov3": (64, SMALL),
    "vit_pe_core_tiny_patch16_384": (64, SMALL),
    "flexivit_small": (64, SMALL),
    "aimv2_large_patch14_224": (56, {"img_size": 56, "depth": 2}),
    "deit_tiny_patch16_224": (64, SMALL),
    "deit_tiny_distilled_patch16_224": (64, SMALL),
    "deit3_small_patch16_224": (64, SMALL),
    "beit_base_patch16_224": (64, SMALL),
    "beitv2_base_patch16_224": (64, SMALL),
    "beit3_base_patch16_224": (64, SMALL),
    "eva02_tiny_patch14_224": (56, {"img_size": 56, "depth": 2}),
    "eva_large_patch14_196": (56, {"img_size": 56, "depth": 2}),
    "cait_xxs24_224": (64, SMALL),
    "xcit_tiny_12_p16_224": (64, SMALL),
    "convit_tiny": (64, SMALL),
    "tnt_s_patch16_224": (64, SMALL),
    "samvit_base_patch16_224": (64, SMALL | {"global_attn_indexes": (1,)}),
    "naflexvit_base_patch16_gap": (64, TWO),
    # in stages
    "swin_tiny_patch4_window7_224": (56, {"img_size": 56, "depths": (2, 2, 2, 1)}),
    "swinv2_tiny_window8_256": (64, {"img_size": 64, "depths": (2, 2, 2, 1)}),
    "swinv2_cr_tiny_224": (64, {"img_size": 64, "depths": (2, 2, 2, 1)}),
    "twins_pcpvt_small": (64, {"depths": (1, 1, 1, 1)}),
    "twins_svt_small": (64, {"depths": (2, 2, 2, 2)}),
    "pvt_v2_b0": (64, {}),
    "pvt_v2_b2_li": (64, {"depths": (1, 1, 1, 1)}),
    "pit_ti_224": (64, {"img_size": 64}),
    "pit_ti_distilled_224": (64, {"img_size": 64}),
    "coat_tiny": (64, {"img_size": 64}),
    "coat_lite_tiny": (64, {"img_size": 64}),
    "crossvit_tiny_240": (240, {}),
    "levit_128s": (64, {"img_size": 64}),
    "levit_conv_128s": (64, {"img_size": 64}),
    "volo_d1_224": (64, {"img_size": 64}),
    "visformer_tiny": (64, {"img_size": 64, "depth": (1, 1, 1)}),
    "nest_tiny": (64, {"img_size": 64}),
    "mvitv2_tiny": (64, {"img_size": 64}),
    "mvitv2_small_cls": (64, {"img_size": 64}),
    "maxvit_pico_rw_256": (64, {"img_size": 64}),
    "maxvit_rmlp_pico_rw_256": (64, {"img_size": 64}),
    "maxxvit_rmlp_nano_rw_256": (64, {"img_size": 64}),
    "coatnet_nano_rw_224": (64, {"img_size": 64}),
    "coatnet_rmlp_nano_rw_224": (64, {"img_size": 64}),
    "gcvit_xxtiny": (64, {"img_size": 64}),
    "davit_tiny": (64, {"depths": (1, 1, 1, 1)}),
    "hiera_tiny_224": (64, {"img_size": 64}),
    "hieradet_small": (64, {}),
    "vitamin_small_224": (64, {"img_size": 64, "depth": 2}),
    "tiny_vit_5m_224": (64, {}),
    "caformer_s18": (64, {}),
    "csatv2": (128, {}),
    # small and fast
    "efficientformer_l1": (224, {}),
    "efficientformerv2_s0": (224, {}),
    "efficientvit_m0": (64, {"img_size": 64}),
    "efficientvit_b0": (64, {}),
    "mobilevit_xxs": (64, {}),
    "mobilevitv2_050": (64, {}),
    "mobilenetv4_hybrid_medium": (64, {}),
    "edgenext_xx_small": (64, {}),
    "fastvit_sa12": (64, {}),
    "fastvit_mci0": (64, {}),
    "shvit_s1": (128, {}),
    "nextvit_small": (64, {}),
    "swiftformer_xs": (64, {}),
    # convolutional networks with some attention
    "botnet26t_256": (64, {"img_size": 64}),
    "halonet26t": (256, {}),
    "lambda_resnet26t": (64, {"img_size": 64}),
    "lamhalobotnet50ts_256": (256, {}),
    "resnet50_clip": (64, {"img_size": 64}),
    "gcresnext26ts": (64, {}),
    "bat_resnext26ts": (256, {}),
    # softmaxes that are no attention, and none at all
    "resnest14d": (64, {}),
    "skresnet18": (64, {}),
    "sequencer2d_s": (64, {"img_size": 64, "layers": (1, 1, 1, 1)}),
    "mixer_s32_224": (64, {"img_size": 64}),
}
UNFUSED = (
    "vit_tiny_patch16_224",
    "beit_base_patch16_224",
    "eva02_tiny_patch14_224",
    "swin_tiny_patch4_window7_224",
    "mobilevit_xxs",
    "hiera_tiny_224",
)


def build(name: str, size: int, options: dict[str, Any], *, fused: bool):
    """Make one model of timm, and a run of it on two images."""
    import timm  # noqa: PLC0415 (a list of cases must be cheap)
    from timm.layers import config  # noqa: PLC0415

    before = config._USE_FUSED_ATTN  # there is no public getter

    def make() -> tuple[nn.Module, Run]:
        model = timm.create_model(name, pretrained=False, num_classes=10, **options)
        images = torch.randn(2, 3, size, size)
        return model, lambda model: model(images)

    config._USE_FUSED_ATTN = before if fused else 0
    try:
        return seeded(make)
    finally:
        config._USE_FUSED_ATTN = before


def list_cases() -> Iterable[Case]:
    """Yield every model of the table."""
    for name, (size, options) in MODELS.items():
        made = partial(build, name, size, options, fused=True)
        yield Case(name, "timm", made, needs=("timm", "torchvision"))
    for name in UNFUSED:
        made = partial(build, name, *MODELS[name], fused=False)
        yield Case(f"{name}-unfused", "timm", made, needs=("timm", "torchvision"))
