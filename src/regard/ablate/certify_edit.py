"""Certify an edit: the heads that changed are those that the model counts as chosen.

    a call                       its output, (B, H, Nq, D), on the axes that were found
    the layer that mixes heads   its input, (…, H * D): head h is features h * D … + D

A call is edited along the axes that were found; the layer has axes of its own. Heads
were edited if their features are 0, or differ from what the kernel returned:

    exactly the chosen heads             certified
    others, and not all chosen ones      the ablation raises an error
    no head, every head, chosen ones     cannot tell: a gate or a norm came in between,
    and others                           or the edit changed nothing

Next: verify.py
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor


class Verdict(Enum):
    """What the input of a layer tells about an edit."""

    CERTIFIED = "exactly the chosen heads were edited"
    WRONG = "other heads were edited"
    UNKNOWN = "cannot tell"


@dataclass(frozen=True)
class EditedOutput:
    """What a kernel returned for a call of which some heads are edited."""

    module: str
    chosen: set[int]
    out: Tensor  # (B, H, Nq, D), before heads were removed or replaced

    def judge(self, x: Tensor) -> Verdict:
        """Return what the input of a later layer, (…, H * D), tells."""
        edited = self.find_edited(x)
        if edited == self.chosen:
            return Verdict.CERTIFIED
        wrong = edited - self.chosen and self.chosen - edited
        every = len(edited) == x.shape[-1] // self.out.shape[-1]
        return Verdict.WRONG if wrong and not every else Verdict.UNKNOWN

    def find_edited(self, x: Tensor) -> set[int]:
        """Return the heads in x that are 0, or not what the kernel returned."""
        (_, given, _, size), n = self.out.shape, x.numel()
        heads = x.shape[-1] // size if x.ndim > 1 and n == self.out.numel() > 0 else 0
        if heads < max(2, given) or x.shape[-1] != heads * size:
            return set()  # it is not the layer that mixes heads
        found = x.detach().reshape(-1, heads, size)
        edited = (found == 0).all(0).all(-1)
        if heads == given:
            kernel = self.out.transpose(1, 2).reshape(found.shape).to(found.dtype)
            edited |= (found != kernel).any(0).any(-1)
        return set(edited.nonzero().flatten().tolist())
