"""Situations (a): half and mixed precision, near-miss masks, scales and biases."""

import torch
from oracle import COUNT, Core, Net, situation, tokens

BF, FP = torch.bfloat16, torch.float16


class Fp32(Core):
    def softmax(self, s):
        return s.softmax(-1, dtype=torch.promote_types(s.dtype, torch.float32)).to(
            s.dtype
        )


class Sdpa(Core):
    kernel = "sdpa"


class Cap(Fp32):
    def logits(self, m, q, k, mask):
        s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        return torch.tanh(s / 5.0) * 5.0 + mask.to(s.dtype)


class CapAfterMask(Fp32):
    def logits(self, m, q, k, mask):
        s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + mask.to(q.dtype)
        return torch.tanh(s / 8.0) * 8.0


class Sink(Core):
    def weights(self, m, q, k, mask):
        s = self.logits(m, q, k, mask)
        b = torch.tensor([1.0, 3.0, -2.0, 0.5], dtype=s.dtype)[None, :, None, None]
        c = torch.cat([s, b.expand(s.shape[0], 4, s.shape[2], 1)], -1)
        c = c - c.max(-1, keepdim=True).values
        return c.softmax(-1)[..., :-1]


class Temperature(Fp32):
    """Each head has its own temperature."""

    def logits(self, m, q, k, mask):
        t = torch.tensor([1.0, 1.01, 1.03, 0.98], dtype=q.dtype)[:, None, None]
        return q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 * t + mask.to(q.dtype)


class RowTemperature(Fp32):
    """The temperature grows with the row."""

    def logits(self, m, q, k, mask):
        n = torch.arange(k.shape[2] - q.shape[2], k.shape[2]) + 1
        t = (1 + 0.02 * n.log()).to(q.dtype)[:, None]
        return q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 * t + mask.to(q.dtype)


class KeyTemperature(Fp32):
    """The temperature depends on the key."""

    def logits(self, m, q, k, mask):
        t = (1 + 0.03 * torch.arange(k.shape[2])).to(q.dtype)
        return q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 * t + mask.to(q.dtype)


class OneKey(Fp32):
    """One key in one head is lowered by a little."""

    low = 0.2

    def logits(self, m, q, k, mask):
        s = super().logits(m, q, k, mask)
        s = s.clone()
        s[:, 1, :, 2] -= self.low
        return s


class OneKeyFill(Fp32):
    def logits(self, m, q, k, mask):
        s = super().logits(m, q, k, mask).clone()
        hide = torch.zeros(s.shape[-2:], dtype=torch.bool)
        hide[3:, 2] = True
        return s.masked_fill(hide, -4.0)


class Alibi(Fp32):
    slope = 0.05

    def logits(self, m, q, k, mask):
        s = super().logits(m, q, k, mask)
        d = torch.arange(k.shape[2]) - torch.arange(
            k.shape[2] - q.shape[2], k.shape[2]
        ).unsqueeze(1)
        h = torch.arange(1, 5)[:, None, None]
        return s + (self.slope * h * d).to(s.dtype)


class Quadratic(Fp32):
    """s + 0.02 s^2, which no formula of scale and bias gives."""

    f = staticmethod(lambda s: s + 0.02 * s * s)

    def logits(self, m, q, k, mask):
        s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        return self.f(s) + mask.to(s.dtype)


class Cubic(Quadratic):
    f = staticmethod(lambda s: s - s**3 * 0.001)


class Clamp(Quadratic):
    f = staticmethod(lambda s: s.clamp(-6, 6))


class Mixed(Fp32):
    """Heads are mixed before the softmax."""

    def logits(self, m, q, k, mask):
        s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        x = (torch.eye(4) + 0.03 * torch.ones(4, 4)).to(s.dtype)
        return torch.einsum("bhqk,hg->bgqk", s, x) + mask.to(s.dtype)


class Scaled(Fp32):
    """The product of the scaled q, in fp32, of halves."""

    def logits(self, m, q, k, mask):
        f = torch.promote_types(q.dtype, torch.float32)
        q = q * q.shape[-1] ** -0.5
        s = q.to(f) @ k.to(f).transpose(-1, -2)
        return s + mask.to(f)


class After(Fp32):
    """Weights are changed after the softmax by a little."""

    def after(self, m, w):
        return w * 1.0 + 0.01


class Cosine(Fp32):
    def logits(self, m, q, k, mask):
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        t = torch.tensor([5.0, 10, 20, 14.3], dtype=q.dtype)[:, None, None]
        return q @ k.transpose(-1, -2) * t + mask.to(q.dtype)


class Twice(Fp32):
    """finfo.min is added twice, which gives -inf."""

    def logits(self, m, q, k, mask):
        s = super().logits(m, q, k, mask)
        return s + mask.to(s.dtype)


class Manual(Core):
    """exp and sum by hand."""

    def softmax(self, s):
        e = (s - s.amax(-1, keepdim=True)).exp()
        return e / e.sum(-1, keepdim=True)


class Window(Fp32):
    """The window is one smaller in head 0."""

    def logits(self, m, q, k, mask):
        s = super().logits(m, q, k, mask).clone()
        for h in range(4):
            for i in range(s.shape[2]):
                last = k.shape[2] - q.shape[2] + i
                s[:, h, i, : max(0, last - 4 + (h == 0))] = torch.finfo(s.dtype).min
        return s


def make(core, dtype=BF, low="min", spread=2.0, auto=None, B=2, N=9, steps=0, **kw):
    def build():
        net = Net(core, low=low, spread=spread, **kw).to(dtype)
        t = tokens(B, N + steps)

        def call():
            with torch.autocast("cpu", dtype=auto or BF, enabled=auto is not None):
                cache = {} if steps else None
                out = [net(t[:, :N], cache)]
                for i in range(steps):
                    out.append(net(t[:, N + i : N + i + 1], cache))
                return out

        return net, call

    return build


def main():
    for d, n in ((BF, "bf16"), (FP, "fp16")):
        for c in (
            Core, Fp32, Sdpa, Cap, CapAfterMask, Sink, Temperature, RowTemperature,
            KeyTemperature, OneKey, OneKeyFill, Alibi, Quadratic, Cubic, Clamp, Mixed,
            Scaled, After, Cosine, Twice, Manual, Window,
        ):  # fmt: skip
            low = -100.0 if c is CapAfterMask else "min"
            situation(f"{n} {c.__name__}", make(c(), d, low), half=True)
            situation(f"{n} {c.__name__} steps", make(c(), d, low, steps=4), half=True)
    for c in (Core, Fp32, Sdpa, Alibi, OneKey, Quadratic, Temperature):
        name = c.__name__
        situation(f"autocast {name}", make(c(), torch.float32, auto=BF), half=True)
        situation(f"large bf16 {name}", make(c(), BF, spread=5.0), half=True)
        situation(f"low -5 bf16 {name}", make(c(), BF, low=-5.0), half=True)
        situation(f"low -20 fp16 {name}", make(c(), FP, low=-20.0), half=True)
    print(COUNT)


if __name__ == "__main__":
    main()
