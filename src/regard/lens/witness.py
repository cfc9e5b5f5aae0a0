"""What a call returned for a few rows, kept to certify the record that it becomes.

    out_i · r    of a few rows, drawn by a seeded generator
    v_j · r      of every key, stored as the keys are

r is a vector of signs: one number tells of a whole value whether it is the right one.
Without it, a record whose log-sum-exp was computed from its own q and k would prove
nothing. It is not kept where the model's own log-sum-exp is known.

Next: assemble.py
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from regard.lens.captured_call import CapturedCall

ROWS = 4  # of each call


@dataclass(frozen=True)
class Witness:
    """Some rows of a call, and what it returned for them, times r."""

    rows: Tensor  # (R,)
    out: Tensor  # (B, H, R)
    size: Tensor  # (B, H, R), the norm of the output
    eps: float  # of the dtype of the output

    def reorder(self, order: Tensor) -> Witness:
        """Return the rows of some sequences."""
        out, size = (x.index_select(0, order.to(x.device)) for x in self.list_arrays())
        return Witness(self.rows, out, size, self.eps)

    def crop(self, n: int) -> Witness:
        """Return those of the first n rows."""
        some = self.rows < n
        out, size = (x[..., some] for x in self.list_arrays())
        return Witness(self.rows[some], out, size, self.eps)

    def list_arrays(self) -> tuple[Tensor, Tensor]:
        """Return the arrays that have sequences."""
        return self.out, self.size


def keep_outputs(call: CapturedCall, rows: Tensor) -> Witness | None:
    """Return what a call returned for some rows; None if that is not known."""
    if call.out is None or call.v is None:
        return None
    rows = rows.to(call.out.device)
    some = call.out.detach()[:, :, rows]
    size = some.to(torch.promote_types(some.dtype, torch.float32)).norm(dim=-1)
    return Witness(rows, project(some)[..., 0], size, torch.finfo(some.dtype).eps)


def project(x: Tensor) -> Tensor:
    """Return arrays (…, D) times the signs, (…, 1)."""
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    return wide @ draw_signs(x.shape[-1]).to(wide)[:, None]


@cache
def draw_signs(n: int) -> Tensor:
    """Return n signs, the same ones each time."""
    fixed = torch.Generator().manual_seed(n)
    return torch.randint(2, (n,), generator=fixed) * 2 - 1
