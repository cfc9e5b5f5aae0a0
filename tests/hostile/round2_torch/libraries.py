"""Models of other libraries with unusual options, against all softmaxes that ran."""

import math
import os
import sys
import warnings

warnings.filterwarnings("ignore")
os.environ["HF_HUB_OFFLINE"] = "1"
import regard  # noqa: E402
import torch  # noqa: E402
from oracle import same_bits, state_of  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

torch.set_num_threads(1)
try:  # a torchvision whose extension does not load still has its models
    import torchvision
except RuntimeError:
    for key in [k for k in sys.modules if k.startswith("torchvision")]:
        del sys.modules[key]
    stub = torch.library.Library("torchvision", "DEF")
    for op in ("nms(Tensor a, Tensor b, float c)", "qnms(Tensor a, Tensor b, float c)"):
        stub.define(op + " -> Tensor")
    import torchvision  # noqa: F401
VERBOSE = bool(os.environ.get("VERBOSE"))


class Capture(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (
            torch.ops.aten._softmax.default,
            torch.ops.aten._safe_softmax.default,
        ):
            dim = args[1] % out.dim()
            self.found.append(out.detach().clone().double().movedim(dim, -1))
        return out


def sharpen(net, gain):
    for n, p in net.named_parameters():
        if p.dim() > 1 and any(x in n for x in ("q", "k", "Wqkv", "in_proj", "attn")):
            p.data.mul_(gain)


def library(name, build, run=None, gain=2.0, grads=False):
    if len(sys.argv) > 1 and not any(a in name for a in sys.argv[1:]):
        return
    try:
        torch.manual_seed(0)
        net, x = build()
        net = net.eval()
        sharpen(net, gain)
        call = (lambda: run(net, x)) if run else (lambda: net(x))

        def go():
            torch.manual_seed(1)
            with torch.set_grad_enabled(grads):
                return call()

        plain = go()
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        with Capture() as capture, sdpa_kernel(SDPBackend.MATH):
            go()
        torch.backends.mha.set_fastpath_enabled(fast)
        before = state_of(net)
        with regard.watch(net) as seen:
            watched = go()
        bad = [
            f"left behind {k}" for k, v in state_of(net).items() if before.get(k) != v
        ]
        if not same_bits(plain, watched):
            bad.append("outputs differ")
        rows = sum(math.prod(w.shape[:-1]) for w in capture.found if w.dim() > 1)
        shown, lost = 0, 0
        for r in seen.records:
            w = torch.as_tensor(r.weights()).double()
            h, nq, nk = w.shape
            shown += h * nq
            good = torch.zeros(h, nq, dtype=torch.bool)
            for c in capture.found:
                if c.shape[-1] < nk or good.all():
                    continue
                flat = c.reshape(-1, c.shape[-1])
                if c.shape[-1] > nk:
                    continue
                d = (w.reshape(-1, 1, nk) - flat[None]).abs().amax(-1)
                good |= (d.amin(-1) < 1e-4).view(h, nq) if flat.numel() else good
            if not good.all():
                bad.append(
                    f"{r.name}: {(~good).sum()} of {h * nq} rows are not of a softmax"
                )
                break
        told, cov = [], seen.coverage()
        for c in cov:
            if c.reason or not c.attention:
                told.append((c.name, c.calls, c.kept, c.reason or "no attention"))
            if c.attention and not c.reason:
                lost += c.rows - c.in_records
        calls = sum(c.calls for c in cov)
        if calls < len(capture.found):
            bad.append(f"{calls} calls counted, {len(capture.found)} softmaxes ran")
        said = str(seen)
        if (
            "certified:" in said
            and " 0 failed" not in said
            and "not certified" not in said
        ):
            bad.append("certificate: " + said.splitlines()[-1])
        if any("observer failed" in c.reason for c in cov):
            bad.append("observer failed")
        extra = f"{len(seen.records)} records, rows {shown}/{rows}, {told[:3]}"
        notes = {c.note for c in cov if c.note}
    except Exception as error:  # noqa: BLE001
        import traceback

        if VERBOSE:
            traceback.print_exc(limit=-4)
        bad = [f"CRASH {type(error).__name__}: {str(error)[:150]}"]
        extra, notes = "", ""
    print(f"{name} | " + ("DEFECT: " + "; ".join(bad) if bad else "ok"), flush=True)
    if VERBOSE:
        print("      ", extra[:400], notes)


def x_transformer(**kw):
    def build():
        from x_transformers import Decoder, Encoder, TransformerWrapper

        kind = Encoder if kw.pop("encoder", False) else Decoder
        net = TransformerWrapper(
            num_tokens=30,
            max_seq_len=16,
            attn_layers=kind(dim=32, depth=2, heads=4, attn_dim_head=8, **kw),
        )
        return net, torch.randint(0, 30, (2, 9))

    return build


for kw in (
    dict(attn_pre_talking_heads=True),
    dict(attn_post_talking_heads=True),
    dict(attn_sparse_topk=3),
    dict(attn_kv_heads=2),
    dict(attn_one_kv_head=True),
    dict(attn_qk_norm=True),
    dict(attn_num_mem_kv=3),
    dict(attn_gate_values=True),
    dict(attn_head_scale=True),
    dict(attn_on_attn=True),
    dict(residual_attn=True),
    dict(rel_pos_bias=True),
    dict(alibi_pos_bias=True),
    dict(rotary_xpos=True),
    dict(macaron=True),
    dict(attn_softclamp_logits=True),
    dict(attn_add_zero_kv=True),
    dict(attn_hybrid_module=None),
    dict(attn_selective=True),
    dict(attn_laser=True),
    dict(attn_cog_signed=True),
    dict(attn_value_rmsnorm=True),
    dict(attn_data_dependent_alibi=True),
    dict(attn_custom_attn_fn=None),
    dict(attn_hard=True),
    dict(shift_tokens=1),
    dict(attn_orthog_projected_values=True),
    dict(attn_dropout=0.1, encoder=True),
):
    library(f"x-transformers {kw}", x_transformer(**kw))


def timm_model(name, fused, size=None, **kw):
    def build():
        import timm
        from timm.layers import set_fused_attn

        set_fused_attn(fused)
        net = timm.create_model(name, num_classes=5, **kw)
        return net, torch.randn(2, 3, size or 32, size or 32)

    return build


VIT = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)
for fused in (True, False):
    library(f"timm vit fused {fused}", timm_model("vit_tiny_patch16_224", fused, **VIT))
    library(
        f"timm vit, map pooling, fused {fused}",
        timm_model(
            "vit_tiny_patch16_224", fused, global_pool="map", class_token=False, **VIT
        ),
    )
    library(
        f"timm vit, qk_norm and registers, fused {fused}",
        timm_model("vit_tiny_patch16_224", fused, reg_tokens=4, qk_norm=True, **VIT),
    )
    library(
        f"timm vit, parallel blocks, fused {fused}",
        timm_model("vit_tiny_patch16_224", fused, **VIT),
        run=lambda net, x: net.forward_intermediates(x)[0],
    )
library(
    "timm swinv2",
    timm_model(
        "swinv2_cr_tiny_224",
        True,
        img_size=32,
        patch_size=2,
        window_size=4,
        embed_dim=24,
        depths=(2, 2),
        num_heads=(2, 3),
    ),
)
library(
    "timm swin, other size",
    timm_model(
        "swin_tiny_patch4_window7_224",
        False,
        56,
        img_size=56,
        patch_size=4,
        window_size=7,
        embed_dim=24,
        depths=(2, 2),
        num_heads=(2, 3),
    ),
)
library(
    "timm xcit",
    timm_model("xcit_nano_12_p16_224", True, 32, img_size=32, depth=2, embed_dim=48),
)
library(
    "timm eva",
    timm_model(
        "eva02_tiny_patch14_224",
        True,
        img_size=32,
        patch_size=8,
        embed_dim=48,
        depth=2,
        num_heads=3,
    ),
)
library(
    "timm beit",
    timm_model(
        "beit_base_patch16_224",
        False,
        img_size=32,
        patch_size=8,
        embed_dim=48,
        depth=2,
        num_heads=3,
    ),
)


def torchvision_model(kind):
    def build():
        import torchvision.models as m

        if kind == "vit":
            net = m.VisionTransformer(32, 8, 2, 3, 48, 96, num_classes=5)
        elif kind == "swin":
            net = m.SwinTransformer([4, 4], 24, [2, 2], [2, 3], [4, 4], num_classes=5)
        else:
            from torchvision.models.swin_transformer import SwinTransformerBlockV2

            net = m.SwinTransformer(
                [4, 4],
                24,
                [2, 2],
                [2, 3],
                [4, 4],
                num_classes=5,
                block=SwinTransformerBlockV2,
            )
        return net, torch.randn(2, 3, 32, 32)

    return build


for kind in ("vit", "swin", "swin v2"):
    library(f"torchvision {kind}", torchvision_model(kind))
library(
    "torchvision swin, training",
    torchvision_model("swin"),
    grads=True,
    run=lambda net, x: net.train()(x),
)


def unet(setup):
    def build():
        from diffusers import UNet2DConditionModel

        net = UNet2DConditionModel(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            layers_per_block=1,
            block_out_channels=(16, 32),
            norm_num_groups=4,
            cross_attention_dim=24,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=4,
        )
        setup(net)
        return net, (torch.randn(2, 4, 8, 8), torch.randn(2, 5, 24))

    return build


def set_processor(name):
    def setup(net):
        import diffusers.models.attention_processor as p

        net.set_attn_processor(getattr(p, name)())

    return setup


def denoise(net, x):
    return net(x[0], 3, x[1], return_dict=False)


def denoise_twice(net, x):
    y = net(x[0], 5, x[1], return_dict=False)[0]
    return net(y, 3, x[1], return_dict=False)


library("diffusers unet, sdpa", unet(lambda n: None), run=denoise)
library("diffusers unet, two steps", unet(lambda n: None), run=denoise_twice)
library("diffusers unet, classic", unet(set_processor("AttnProcessor")), run=denoise)
library(
    "diffusers unet, sliced by 1", unet(lambda n: n.set_attention_slice(1)), run=denoise
)
library(
    "diffusers unet, sliced, two steps",
    unet(lambda n: n.set_attention_slice(2)),
    run=denoise_twice,
)
library(
    "diffusers unet, fused projections",
    unet(lambda n: n.fuse_qkv_projections()),
    run=denoise,
)
library(
    "diffusers unet, free u and masks",
    unet(lambda n: None),
    run=lambda net, x: net(
        x[0],
        3,
        x[1],
        encoder_attention_mask=torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
        return_dict=False,
    ),
)


def sd3():
    from diffusers import SD3Transformer2DModel

    net = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=3,
        joint_attention_dim=24,
        caption_projection_dim=24,
        pooled_projection_dim=12,
        out_channels=4,
    )
    return net, (torch.randn(2, 4, 8, 8), torch.randn(2, 5, 24), torch.randn(2, 12))


library(
    "diffusers SD3 joint attention",
    sd3,
    run=lambda net, x: net(x[0], x[1], x[2], torch.tensor([3, 3]), return_dict=False),
)


def clip():
    import open_clip

    net = open_clip.CLIP(
        32,
        dict(image_size=32, patch_size=8, width=48, layers=2, head_width=16),
        dict(context_length=9, vocab_size=40, width=32, heads=4, layers=2),
    )
    return net, (torch.randn(2, 3, 32, 32), torch.randint(1, 40, (2, 9)))


library("open_clip, both towers", clip, run=lambda net, x: net(*x))
library(
    "open_clip, text twice",
    clip,
    run=lambda net, x: [net.encode_text(x[1]), net.encode_text(x[1].flip(0))],
)


def light_glue():
    from kornia.feature import LightGlue

    net = LightGlue(
        features=None,
        input_dim=32,
        descriptor_dim=32,
        n_layers=2,
        num_heads=4,
        weights=None,
    )
    return net, None


def loftr():
    from kornia.feature.loftr.loftr_module.transformer import LoFTREncoderLayer

    return LoFTREncoderLayer(32, 4, "full"), torch.randn(2, 9, 32)


library("kornia LoFTR layer, full attention", loftr, run=lambda net, x: net(x, x + 1))


def sam_mask():
    from segment_anything.modeling.transformer import TwoWayTransformer

    return TwoWayTransformer(2, 32, 4, 48), (
        torch.randn(2, 32, 4, 4),
        torch.randn(2, 32, 4, 4),
        torch.randn(2, 3, 32),
    )


library("segment-anything two-way transformer", sam_mask, run=lambda net, x: net(*x))


def geometric():
    from torch_geometric.nn import GPSConv, GINConv

    net = GPSConv(24, GINConv(nn.Linear(24, 24)), heads=3)
    return net, (
        torch.randn(9, 24),
        torch.randint(0, 9, (2, 20)),
        torch.tensor([0] * 4 + [1] * 5),
    )


library("torch-geometric GPS with padding", geometric, run=lambda net, x: net(*x))


def pyg_pool():
    from torch_geometric.nn.aggr import SetTransformerAggregation

    return SetTransformerAggregation(24, 2, 1, 1, 3), (
        torch.randn(9, 24),
        torch.tensor([0] * 4 + [1] * 5),
    )


library("torch-geometric set transformer", pyg_pool, run=lambda net, x: net(*x))


def pyg_softmax_aggr():
    from torch_geometric.nn.aggr import AttentionalAggregation

    return AttentionalAggregation(nn.Linear(24, 1)), (
        torch.randn(9, 24),
        torch.tensor([0] * 4 + [1] * 5),
    )


library(
    "torch-geometric attentional aggregation",
    pyg_softmax_aggr,
    run=lambda net, x: net(*x),
)


def keras_mha():
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    a, b = keras.Input((7, 24)), keras.Input((5, 24))
    out = keras.layers.MultiHeadAttention(3, 8)(a, b)
    net = keras.Model([a, b], out)
    return net, [torch.randn(2, 7, 24), torch.randn(2, 5, 24)]


library("keras MultiHeadAttention, cross", keras_mha, gain=1.0)
