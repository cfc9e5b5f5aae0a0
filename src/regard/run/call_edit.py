"""What an ablation removes from one attention call, and how a call is run without it.

    hidden cells     are removed from the mask, or from the scores
    a removed head   outputs 0, before the output projection
    a replaced head  outputs what it is given, at some queries, or what the same call
                     outputs with another q, k or v
    a row without any visible key outputs 0, unless it is replaced

An adapter describes a call before it runs (PendingCall), and runs it under a CallEdit;
which edit that is, is decided in regard.ablate.

Next: ../lens/adapters/adapter.py
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from regard.errors import OptionError, ShapeError
from regard.run.cells import FILLED, drop_axes, hides, may_see


@dataclass(frozen=True, kw_only=True)
class PendingCall:
    """What is known of a call before it runs."""

    like: Tensor  # on its device, the batch is its first axis
    heads: int | None  # None: they are folded into the batch
    n_q: int
    n_k: int
    aligned: bool = False  # query 0 is at key 0, unless a cache shifts it
    learnt: int = 0  # keys behind the others that are of no token
    sure: bool = True  # it is a whole attention call, not a part that looks like one
    find_hidden: Callable[[], Tensor | None]  # cells that it hides itself
    scale: float | None = None  # of q · k; None: unknown

    @classmethod
    def of(cls, call: Any) -> PendingCall:  # a CapturedCall
        """Return a call that was described before it ran."""
        return cls(
            like=call.q,
            heads=call.q.shape[1],
            n_q=call.q.shape[2],
            n_k=call.k.shape[2],
            aligned=call.causal,
            scale=call.scale,
            find_hidden=partial(find_hidden, call.mask, causal=call.causal),
        )


@dataclass(frozen=True)
class NewInput:
    """Values for q, k or v of one call, at some of its tokens."""

    taken: Tensor  # (B or 1, N), where they replace those of the call
    values: Tensor  # (B or 1, H, N, D); H: the heads of q or k, or a divisor of them

    def put(self, x: Tensor, *, shared: bool) -> Tensor:
        """Return q, k or v (B, H, N, D) of a call, with the new values.

        shared: whether heads of the source may be repeated, each for a group of x
        """
        _, heads, n, width = x.shape
        known = self.values.shape[1]
        fits = heads == known or (shared and not heads % known)
        if not fits or self.values.shape[2:] != (n, width):
            raise ShapeError(
                f"its shape is {tuple(x.shape)}, and that of the source "
                f"{tuple(self.values.shape)}"
            )
        values = self.values.repeat_interleave(heads // known, 1)
        return torch.where(self.taken[:, None, :, None], values.to(x.dtype), x)


@dataclass(frozen=True)
class Rerun:
    """A call that can be run again with another q, k or v."""

    call: Callable[[Tensor, Tensor, Tensor], Tensor]  # returns (…, H, Nq, Dv)
    arrays: tuple[Tensor, Tensor, Tensor]

    def run(self, inputs: Mapping[str, NewInput]) -> Tensor:
        """Return the output with some of q, k and v replaced."""
        heads = self.arrays[0].shape[1]  # keys may be there once for each of them
        q, k, v = (
            inputs[name].put(x, shared=name != "q" and x.shape[1] == heads)
            if name in inputs
            else x
            for name, x in zip("qkv", self.arrays, strict=True)
        )
        return self.call(q, k, v)


class Turn(Enum):
    """When outputs are replaced, whatever the nesting; only traces are not USUAL."""

    FIRST = "as the kernel returns them"
    USUAL = "in the order of the interventions"
    LATE = "after all patches"
    LAST = "after heads are removed, too: as the model goes on"


@dataclass(frozen=True)
class ReplacedHeads:
    """Heads and queries of a call whose outputs are replaced, and by what.

    outputs: (B or 1, H, Nq or 1, Dv), or a function of the outputs (B, H, Nq, Dv)
    inputs: new q, k or v; the outputs are those of the same call with them
    """

    here: Tensor  # (B or 1, H, Nq, 1), bool
    outputs: Tensor | Callable[[Tensor], Tensor] | None = None
    inputs: Mapping[str, NewInput] = field(default_factory=dict)
    turn: Turn = Turn.USUAL

    def apply(self, out: Tensor, rerun: Rerun | None) -> Tensor:
        """Return outputs (…, H, Nq, Dv) of a call with these heads replaced."""
        if self.inputs:
            if rerun is None:
                raise ShapeError("its q, k and v cannot be replaced")
            new = rerun.run(self.inputs)
        elif isinstance(self.outputs, Tensor):
            new = drop_axes(self.outputs, out.ndim)
        else:
            assert self.outputs is not None
            new = self.outputs(out)
        if new.shape[-1] != out.shape[-1]:
            raise ShapeError(
                f"its heads output {out.shape[-1]} numbers, and the source has "
                f"{new.shape[-1]}"
            )
        new = new.to(out.dtype)
        if new.shape == out.shape and bool(self.here.all()):
            return new  # so that no gradient is computed by what is not used
        return torch.where(drop_axes(self.here, out.ndim), new, out)


@dataclass(frozen=True)
class CallEdit:
    """What is removed or replaced in one call, where the masks are True."""

    cells: Tensor | None = None  # (B or 1, H or 1, Nq, Nk)
    gone: Tensor | None = None  # (1, H or 1, 1, 1)
    replaced: tuple[ReplacedHeads, ...] = ()  # in this order, within a turn

    @property
    def is_empty(self) -> bool:
        """Whether nothing is edited."""
        return self.cells is None and self.gone is None and not self.replaced

    def __or__(self, other: CallEdit) -> CallEdit:
        """Return both edits; a replacement of the other one comes last."""
        for x, y in product(self.replaced, other.replaced):
            both = {x.turn, y.turn}
            if not (x.inputs or y.inputs) or both & {Turn.LATE, Turn.LAST}:
                continue
            if Turn.FIRST in both:
                raise OptionError(
                    "the weights of heads with new q, k or v are not recorded, so that "
                    "they cannot be attributed or weighed. Patch outputs: "
                    'patch_heads(…, parts="z").'
                )
            if bool((x.here & y.here).any()):
                raise OptionError(
                    "two interventions replace the same head and query, one of them "
                    'by new inputs. Name both in one call: parts="qv".'
                )
        return CallEdit(
            unite(self.cells, other.cells),
            unite(self.gone, other.gone),
            self.replaced + other.replaced,
        )

    def clear(self, out: Tensor, rerun: Rerun | None = None) -> Tensor:
        """Replace outputs of (…, H, Nq, Dv); removed heads are 0.

        rerun: how to run the call again; None if that is not possible
        """
        for turn in Turn:
            if turn is Turn.LAST and self.gone is not None:
                out = out.masked_fill(drop_axes(self.gone, out.ndim), 0)
            for each in self.replaced:
                if each.turn is turn:
                    out = each.apply(out, rerun)
        return out


def unite(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return where one of two masks is True."""
    return other if one is None else one if other is None else one | other


class Altering(threading.local):
    """Whether an intervention changes what a running call outputs (thread-local)."""

    outputs = False


ALTERING, NOTHING = Altering(), CallEdit()
SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}


def hide(mask: Tensor | None, cells: Tensor, *, causal: bool = False) -> Tensor:
    """Return a kernel's mask with some cells hidden; in a bool mask True is visible.

    Float masks are added to the scores. transformers masks with the lowest number, and
    a row with nothing else would become an average: such a row is set to -inf, for
    which the kernels output 0.
    """
    if causal:  # query i may attend to keys 0 … i, as in torch
        early = torch.ones_like(cells[0, 0]).tril()
        mask = early if mask is None else hide(mask, ~early[None, None])
    if mask is None:
        return ~cells
    cells = drop_axes(cells, mask.ndim) if cells.shape[:2] == (1, 1) else cells
    if mask.dtype == torch.bool:
        return mask & ~cells
    edited = torch.where(cells, -math.inf, mask)
    return edited.masked_fill(find_blank(mask, edited, cells), -math.inf)


def lower(scores: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
    """Return float scores with some cells hidden, and which rows are blank.

    The softmax of a blank row must be a safe one (SafeSoftmax): it is NaN otherwise,
    and so would be the gradients of every row.
    """
    edited = torch.where(cells, -math.inf, scores)
    blank = find_blank(scores, edited, cells)
    return edited.masked_fill(blank, -math.inf), blank


class SafeSoftmax(TorchFunctionMode):  # type: ignore[misc]
    """While it is active, a softmax is 0 in rows of -inf, and its gradients too."""

    def __torch_function__(
        self, func: Any, _types: Any, args: Any = (), named: Any = None
    ) -> Any:
        named = named or {}
        return (run_safely if func in SOFTMAX else func)(*args, **named)


def run_safely(
    input: Tensor,  # noqa: A002 (torch's name)
    dim: int,
    *rest: Any,
    dtype: Any = None,
    **_named: Any,
) -> Tensor:
    """Run a softmax that is 0 in rows of -inf."""
    dtype = next((x for x in rest if isinstance(x, torch.dtype)), dtype)
    return torch._safe_softmax(input, dim, dtype)  # noqa: SLF001


def find_hidden(mask: Tensor | None, *, causal: bool = False) -> Tensor | None:
    """Return which cells a mask, or scores, hide; a causal kernel has no other mask."""
    return None if mask is None or causal else hides(mask.detach())


def find_blank(scores: Tensor, edited: Tensor, cells: Tensor) -> Tensor:
    """Return which rows have no visible key left, (…, Nq, 1)."""
    top = scores.amax(-1, keepdim=True).clamp(max=0)  # the model may fill in -1e4
    seen = (may_see(edited) & (edited > top + FILLED)).any(-1, keepdim=True)
    return ~seen & cells.any(-1, keepdim=True)
