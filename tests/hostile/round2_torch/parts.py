"""Attention of torch.nn and of torch's fused operators, in many combinations."""

import math

import torch
import torch.nn.functional as F
from oracle import check, dense, tap
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

B, H, N, D = 2, 3, 7, 8
E = H * D


def mha_truth(m, q, k, hide=None, bias=None, keys=None):
    """Return the weights of nn.MultiheadAttention; inputs are batch first."""
    e, h = m.embed_dim, m.num_heads
    if m.in_proj_weight is not None:
        wq, wk, _ = m.in_proj_weight.detach().double().chunk(3)
    else:
        wq, wk = m.q_proj_weight.detach().double(), m.k_proj_weight.detach().double()
    bq = bk = 0.0
    if m.in_proj_bias is not None:
        bq, bk, _ = m.in_proj_bias.detach().double().chunk(3)
    q, k = q.detach().double() @ wq.T + bq, k.detach().double() @ wk.T + bk
    if m.bias_k is not None:
        k = torch.cat([k, m.bias_k.detach().double().expand(len(k), 1, e)], 1)
    q, k = (x.view(len(x), -1, h, e // h).transpose(1, 2) for x in (q, k))
    if m.add_zero_attn:
        k = torch.cat([k, torch.zeros_like(k[:, :, :1])], 2)
    extra = k.shape[2] - (0 if hide is None and bias is None else 0)
    allow = torch.ones(len(q), h, q.shape[2], extra, dtype=torch.bool)
    if hide is not None:
        hide = hide.view(-1, h, *hide.shape[1:]) if hide.dim() == 3 else hide
        allow[..., : hide.shape[-1]] &= ~hide
    if keys is not None:
        allow[..., : keys.shape[-1]] &= ~keys[:, None, None]
    if bias is not None:
        bias = F.pad(bias, (0, extra - bias.shape[-1]))
    blind = ~allow.any(-1, keepdim=True)  # torch's module returns NaN there
    return dense(q, k, mask=allow, bias=bias).masked_fill(blind, torch.nan)


HIDE = ~torch.ones(N, N, dtype=torch.bool).tril()
KEYS = torch.arange(N) >= torch.tensor([[N], [N - 2]])


class Holder(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.attn = m

    def forward(self, *args, **kw):
        return self.attn(*args, **kw)


def mha(name, init=None, grads=False, cross=False, first=True, unbatched=False, **kw):
    truth = {x: kw.pop(x) for x in ("hide", "bias", "keys") if x in kw}
    context = kw.pop("context", None)
    train = kw.pop("train", False)

    def make():
        m = nn.MultiheadAttention(E, H, batch_first=first, **(init or {})).train(train)
        for p in m.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=2 / math.sqrt(E))
            else:
                nn.init.normal_(p, std=0.3)
        net = Holder(m)
        x = torch.randn(B, N, E)
        kd, vd = m.kdim or E, m.vdim or E
        k = torch.randn(B, 5, kd) if cross else x
        v = torch.randn(B, 5, vd) if cross else x
        if cross == "same":
            v = k
        ordered = (x, k, v)
        if not first:
            ordered = tuple(y.transpose(0, 1) for y in ordered)
            if not cross:
                ordered = (ordered[0],) * 3
        if unbatched:
            ordered = tuple(y[0] for y in (x, k, v))

        def call():
            s = slice(1) if unbatched else slice(None)
            tap("attn", lambda: mha_truth(m, x[s], k[s], **truth))
            import contextlib

            with torch.set_grad_enabled(grads), context or contextlib.nullcontext():
                out = net(*ordered, **kw)
                if grads:
                    out[0].square().mean().backward()
                return out

        return net, call

    if __name__ == "__main__":
        check("MHA " + name, make, grads=grads)


mha("plain (fast path)")
mha("without weights (fast path)", need_weights=False)
mha("weights by head", average_attn_weights=False)
mha("sequence first", first=False)
mha("sequence first without weights", first=False, need_weights=False)
mha("unbatched", unbatched=True)
mha("unbatched, sequence first, no weights", unbatched=True, need_weights=False)
mha("bool mask", attn_mask=HIDE, hide=HIDE)
mha("float mask", attn_mask=HIDE * -1e9, hide=HIDE, need_weights=False)
BIAS = torch.randn(N, N)
mha("float bias", attn_mask=BIAS, bias=BIAS)
mha("float bias, no weights", attn_mask=BIAS, bias=BIAS, need_weights=False)
mha("causal hint", attn_mask=HIDE, hide=HIDE, is_causal=True, need_weights=False)
mha("causal hint, weights", attn_mask=HIDE, hide=HIDE, is_causal=True)
mha("padding", key_padding_mask=KEYS, keys=KEYS)
mha("padding, no weights", key_padding_mask=KEYS, keys=KEYS, need_weights=False)
mha("padding and mask", key_padding_mask=KEYS, keys=KEYS, attn_mask=HIDE, hide=HIDE)
mha(
    "padding and mask, no weights",
    key_padding_mask=KEYS,
    keys=KEYS,
    attn_mask=HIDE,
    hide=HIDE,
    need_weights=False,
)
three = torch.rand(B * H, N, N) < 0.3
three[..., 0] = False
mha("mask by head", attn_mask=three, hide=three)
mha("mask by head, no weights", attn_mask=three, hide=three, need_weights=False)
mha("bias_k and bias_v", init={"add_bias_kv": True})
mha("bias_k and bias_v, no weights", init={"add_bias_kv": True}, need_weights=False)
mha("zero attention", init={"add_zero_attn": True})
mha(
    "zero attention, bias_kv, padding, mask",
    init={"add_zero_attn": True, "add_bias_kv": True},
    key_padding_mask=KEYS,
    keys=KEYS,
    attn_mask=HIDE,
    hide=HIDE,
)
mha("cross", cross=True)
mha("cross, kdim and vdim", cross=True, init={"kdim": 10, "vdim": 12})
mha(
    "cross, kdim, no weights",
    cross=True,
    init={"kdim": 10, "vdim": 12},
    need_weights=False,
)
mha("cross same, sequence first", cross="same", first=False)
mha("no bias", init={"bias": False})
mha("training", grads=True, train=True)
mha("training with dropout", grads=True, train=True, init={"dropout": 0.4})
mha(
    "training, no weights, dropout",
    grads=True,
    train=True,
    init={"dropout": 0.4},
    need_weights=False,
)
mha("inference mode", context=torch.inference_mode())
mha(
    "all keys of a sequence hidden",
    key_padding_mask=torch.tensor([[False] * N, [True] * N]),
    keys=torch.tensor([[False] * N, [True] * N]),
)


class Fused(nn.Module):
    """q, k, v from one projection, then any function of (B, H, N, D)."""

    def __init__(self, f, h=H, kv=H, d=D, dv=None, gain=2.0):
        super().__init__()
        self.dv = dv or d
        self.h, self.kv, self.d, self.f = h, kv, d, f
        self.q, self.k = nn.Linear(E, h * d), nn.Linear(E, kv * d)
        self.v, self.o = nn.Linear(E, kv * self.dv), nn.Linear(h * self.dv, E)
        for m in (self.q, self.k):
            nn.init.normal_(m.weight, std=gain / math.sqrt(E))

    def forward(self, x, c=None):
        c = x if c is None else c
        q = self.q(x).view(*x.shape[:-1], self.h, self.d).transpose(-2, -3)
        k = self.k(c).view(*c.shape[:-1], self.kv, self.d).transpose(-2, -3)
        v = self.v(c).view(*c.shape[:-1], self.kv, self.dv).transpose(-2, -3)
        out = self.f(q, k, v, self)
        return self.o(out.transpose(-2, -3).flatten(-2))


def fused(name, f, shape=(B, N), grads=False, cast=None, tol=3e-5, context=None, **kw):
    def make():
        net = Holder(Fused(f, **kw))
        if cast:
            net = net.to(cast)
        x = torch.randn(*shape, E).to(cast or torch.float32)
        if context == "complex":
            raise ValueError

        def call():
            with torch.set_grad_enabled(grads):
                if context:
                    with context():
                        out = net(x)
                else:
                    out = net(x)
                if grads:
                    out.float().square().mean().backward()
                return out

        return net, call

    if __name__ == "__main__":
        check("SDPA " + name, make, grads=grads, tol=tol)


def sdpa(truth=None, **kw):
    def f(q, k, v, m):
        tap("attn", lambda: dense(q, k, **(truth or {})))
        return F.scaled_dot_product_attention(q, k, v, **kw)

    return f


TRI = ~HIDE
for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
    b = backend.name.lower()
    c = lambda backend=backend: sdpa_kernel(backend)  # noqa: E731
    fused(f"{b}", sdpa(), context=c)
    fused(f"{b} causal", sdpa({"causal": True}, is_causal=True), context=c)
    fused(f"{b} scale", sdpa({"scale": 0.9}, scale=0.9), context=c)
    fused(f"{b} mask", sdpa({"mask": TRI}, attn_mask=TRI), context=c)
    fused(f"{b} training", sdpa({"mask": TRI}, attn_mask=TRI), context=c, grads=True)
    fused(f"{b} bfloat16", sdpa(), context=c, cast=torch.bfloat16, tol=3e-2)
    fused(f"{b} float64", sdpa(), context=c, cast=torch.float64, tol=1e-9)
    fused(f"{b} bias", sdpa({"bias": BIAS}, attn_mask=BIAS), context=c)
fused("gqa", sdpa(enable_gqa=True), kv=1)
fused("gqa 6 of 2", sdpa(enable_gqa=True), h=6, kv=2, d=4)
fused(
    "gqa 6 of 2 causal train",
    sdpa({"causal": True}, enable_gqa=True, is_causal=True),
    h=6,
    kv=2,
    d=4,
    grads=True,
)
fused("dropout in training", sdpa(dropout_p=0.3), grads=True)
fused("another value width", sdpa(), dv=5)
fused("one token", sdpa(), shape=(B, 1))
fused("no token", sdpa(), shape=(B, 0))
fused("batch of none", sdpa(), shape=(0, N))
fused("600 tokens", sdpa({"causal": True}, is_causal=True), shape=(1, 600))
fused("negative scale", sdpa({"scale": -0.5}, scale=-0.5))
fused("scale 0", sdpa({"scale": 0.0}, scale=0.0))
HEADED = torch.rand(1, H, N, N) < 0.6
HEADED[..., 0] = True
fused("mask by head", sdpa({"mask": HEADED}, attn_mask=HEADED))
BATCHED = torch.rand(B, 1, 1, N) < 0.6
BATCHED[..., 0] = True
fused("mask by sequence", sdpa({"mask": BATCHED}, attn_mask=BATCHED))
ROW = TRI.clone()
ROW[3] = False
fused("a row that sees nothing", sdpa({"mask": ROW}, attn_mask=ROW))
fused(
    "float mask of finfo.min in a whole row",
    sdpa({"bias": (~ROW) * -1e30}, attn_mask=(~ROW) * -1e30),
)


def three_d(q, k, v, m):
    tap("attn", lambda: dense(q, k))
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).unflatten(0, (B, H))


fused("three axes, heads folded", three_d)


def five_d(q, k, v, m):
    tap("attn", lambda: dense(q, k))
    q, k, v = (x[:, None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v)[:, 0]


fused("five axes", five_d)


def five_windows(q, k, v, m):
    tap("attn", lambda: dense(q.flatten(0, 1), k.flatten(0, 1)))
    return F.scaled_dot_product_attention(q, k, v)


fused("five axes, windows", five_windows, shape=(B, 4, N))


def broadcast_batch(q, k, v, m):
    tap("attn", lambda: dense(q[:1].expand_as(q), k))
    return F.scaled_dot_product_attention(q[:1], k, v)


fused("q broadcast over the batch", broadcast_batch)


def broadcast_heads(q, k, v, m):
    tap("attn", lambda: dense(q, k[:, :1].expand_as(k)))
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1])


fused("one key head, broadcast", broadcast_heads)


def strided(q, k, v, m):
    q, k, v = (torch.stack([x, x + 1], -1)[..., 0] for x in (q, k, v))
    tap("attn", lambda: dense(q, k))
    return F.scaled_dot_product_attention(q, k, v)


fused("strided", strided)


def in_place(q, k, v, m):
    tap("attn", lambda: dense(q, k))
    out = F.scaled_dot_product_attention(q, k, v)
    q.zero_(), k.zero_(), v.zero_()
    return out.mul_(2)


fused("q, k, v overwritten after", in_place)


def longer_causal(q, k, v, m):
    tap("attn", lambda: dense(q[:, :, :4], k, causal=True))
    out = F.scaled_dot_product_attention(q[:, :, :4], k, v, is_causal=True)
    return F.pad(out, (0, 0, 0, N - 4))


fused("causal with fewer queries than keys", longer_causal)


def shorter_causal(q, k, v, m):
    tap("attn", lambda: dense(q, k[:, :, :4], causal=True))
    return F.scaled_dot_product_attention(q, k[:, :, :4], v[:, :, :4], is_causal=True)


fused("causal with fewer keys than queries", shorter_causal)


def lower_right(q, k, v, m):
    from torch.nn.attention.bias import causal_lower_right

    mask = torch.ones(4, N, dtype=torch.bool).tril(N - 4)
    tap("attn", lambda: dense(q[:, :, :4], k, mask=mask))
    out = F.scaled_dot_product_attention(
        q[:, :, :4], k, v, attn_mask=causal_lower_right(4, N)
    )
    return F.pad(out, (0, 0, 0, N - 4))


fused("causal_lower_right", lower_right)


def mask_edited(q, k, v, m):
    mask = torch.zeros(N, N)
    mask.masked_fill_(HIDE, -torch.inf)
    tap("attn", lambda: dense(q, k, mask=TRI))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    mask.zero_()
    tap("attn", lambda: dense(q, k))
    return out + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


fused("one mask buffer edited between two calls", mask_edited)


def mask_edited_data(q, k, v, m):
    mask = torch.zeros(N, N)
    mask.data.masked_fill_(HIDE, -torch.inf)
    tap("attn", lambda: dense(q, k, mask=TRI))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    mask.numpy()[...] = 0
    mask.data[:, 3:] = -torch.inf
    tap("attn", lambda: dense(q, k, mask=torch.arange(N) < 3))
    return out + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


fused("one mask buffer edited by numpy between two calls", mask_edited_data)


def flex(score=None, block=None, truth=None, **kw):
    def f(q, k, v, m):
        tap("attn", lambda: dense(q, k, **(truth or {})))
        return flex_attention(q, k, v, score_mod=score, block_mask=block, **kw)

    return f


import warnings  # noqa: E402

warnings.filterwarnings("ignore")
fused("flex", flex())
fused("flex bias", flex(lambda s, b, h, i, j: s + BIAS[i, j], truth={"bias": BIAS}))
fused(
    "flex causal block mask",
    flex(
        block=create_block_mask(
            lambda b, h, i, j: i >= j, None, None, N, N, device="cpu"
        ),
        truth={"causal": True},
    ),
)
fused(
    "flex window by head",
    flex(
        block=create_block_mask(
            lambda b, h, i, j: (i - j).abs() <= h, None, H, N, N, device="cpu"
        ),
        truth={
            "mask": (torch.arange(N)[:, None] - torch.arange(N)).abs()
            <= torch.arange(H)[:, None, None]
        },
    ),
)
fused("flex gqa", flex(enable_gqa=True), kv=1)
fused("flex scale", flex(scale=0.7, truth={"scale": 0.7}))


def flex_lse(q, k, v, m):
    from torch.nn.attention.flex_attention import AuxRequest

    tap("attn", lambda: dense(q, k))
    out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
    return out * aux.lse[..., None].sigmoid()


fused("flex with lse returned", flex_lse)


def flex_cap(q, k, v, m):
    s = q.double() @ k.double().mT * D**-0.5
    tap("attn", lambda: (3 * torch.tanh(s / 3)).softmax(-1))
    return flex_attention(q, k, v, score_mod=lambda s, *a: 3 * torch.tanh(s / 3))


fused("flex softcap", flex_cap)
