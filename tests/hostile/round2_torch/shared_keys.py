"""Several heads ask one key head (multi-query, MLA), by einsum: are heads heads?"""

import math
import sys

import regard
import torch
from torch import nn

torch.set_num_threads(1)
H, N = 3, 6


class Attn(nn.Module):
    """q: (B, N, H, D) or (B, H, N, D) by einsum with one (B, N, D)."""

    def __init__(self, d, order, project, width, fused_qkv):
        super().__init__()
        self.d, self.order, self.fused = d, order, fused_qkv
        if fused_qkv:
            self.qkv = nn.Linear(width, (H + 2) * d)
            nn.init.normal_(self.qkv.weight, std=2 / math.sqrt(width))
        else:
            self.q = nn.Linear(width, H * d)
            self.k, self.v = nn.Linear(width, d), nn.Linear(width, d)
            nn.init.normal_(self.q.weight, std=2 / math.sqrt(width))
        self.o = nn.Linear(H * d, width) if project else nn.Identity()
        self.true = None

    def forward(self, x):
        if self.fused:
            q, k, v = self.qkv(x).split((H * self.d, self.d, self.d), -1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        q = q.unflatten(-1, (H, self.d))
        if self.order == "bhid":
            q = q.transpose(1, 2)
            w = torch.einsum("bhid,bjd->bhij", q, k).softmax(-1)
        elif self.order == "bihd":
            w = torch.einsum("bihd,bjd->bhij", q, k).softmax(-1)
        else:
            w = torch.einsum("bihd,bjd->bihj", q, k).softmax(-1)
        if self.order == "bihj":
            self.true = w.transpose(1, 2).detach()
            return self.o(torch.einsum("bihj,bjd->bihd", w, v).flatten(2))
        self.true = w.detach()
        out = torch.einsum("bhij,bjd->bhid", w, v)
        return self.o(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, attn):
        super().__init__()
        self.block = attn

    def forward(self, x):
        return self.block(x)


def situation(name, order, project, inner, fused_qkv, batch, width=12):
    if len(sys.argv) > 1 and not any(a in name for a in sys.argv[1:]):
        return
    torch.manual_seed(0)
    attn = Attn(12, order, project, width, fused_qkv)
    model = Model(attn) if inner else attn
    with torch.no_grad(), regard.watch(model) as seen:
        model(torch.randn(batch, N, width))
    (c,) = [x for x in seen.coverage() if x.attention]
    if c.reason:
        print(f"{name} | ok (reported: {c.reason})")
        return
    shapes = [r.shape for r in seen.records]
    if shapes == [(H, N, N)] * batch:
        err = max(
            (r.weights() - w).abs().max() for r, w in zip(seen.records, attn.true)
        )
        print(f"{name} | " + ("ok" if err < 1e-4 else f"DEFECT: off by {err:.3g}"))
    elif c.note:
        print(f"{name} | ok (noted {shapes[:2]}: {c.note})")
    else:
        q = seen.records[0].q_positions.tolist()
        print(
            f"{name} | DEFECT: shapes {shapes[:2]} of {(H, N, N)}, no note, rows of "
            f"coverage {c.rows}, positions of queries {q}"
        )


for width in (36, 24, 48, 12, 10):
    for order in ("bhid", "bihd", "bihj"):
        for project, inner, fused_qkv in (
            (True, True, True),
            (True, True, False),
            (False, False, False),
        ):
            situation(
                f"width {width}, heads of 12, {order}, "
                f"{'projected' if project else 'returned'}, "
                f"{'inner' if inner else 'whole'} module, "
                f"{'one' if fused_qkv else 'three'} projections",
                order,
                project,
                inner,
                fused_qkv,
                2,
                width,
            )
