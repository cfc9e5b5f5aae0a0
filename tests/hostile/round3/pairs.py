"""Situations (c): one kind of attention for the first passes, another one after."""

import sys

import torch
from continued import (
    Biased, High, Hot, HotSdpa, Low, Narrow, Reversed, becomes, build,
)  # fmt: skip
from half import Alibi, Cap, Fp32, RowTemperature, Sdpa, Sink, Temperature
from oracle import COUNT, Core, situation

BF = torch.bfloat16


class Mild(Fp32):
    """Scores are multiplied by 1.04."""

    scale = 1.04 * 8**-0.5


class MildCore(Core):
    scale = 1.04 * 8**-0.5


class NarrowSdpa(Sdpa):
    """A window of 3, in the kernel."""

    def __call__(self, m, q, k, v, mask):
        d = torch.arange(k.shape[2] - q.shape[2], k.shape[2]).unsqueeze(1)
        low = torch.finfo(q.dtype).min
        hide = torch.zeros(d.shape[0], k.shape[2])
        hide = hide.masked_fill(torch.arange(k.shape[2]) < d - 2, -1e30).to(q.dtype)
        return super().__call__(m, q, k, v, (mask + hide).clamp_min(low))


KINDS = (
    Core, Sdpa, Fp32, Hot, HotSdpa, Mild, MildCore, Narrow, NarrowSdpa, Sink, Cap,
    Alibi, Biased, Temperature, RowTemperature, Low, High, Reversed,
)  # fmt: skip


def main():
    at = int(sys.argv[1])
    dtype = {"fp32": torch.float32, "bf16": BF}[sys.argv[2]]
    for one in KINDS:
        for two in KINDS:
            if one is not two:
                name = f"{sys.argv[2]} {one.__name__} then {two.__name__} at {at}"
                low = Low in (one, two)
                tol = 0.1 if dtype is BF else (2e-2 if low else 2e-4)
                run = becomes(two, at=at)
                situation(name, build(run, one, dtype, layers=1), tol=tol)
    print(COUNT)


if __name__ == "__main__":
    main()
