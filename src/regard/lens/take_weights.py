"""A product takes the weights of a softmax: return the attention call that this is.

    left:   weights (B, n, m) @ values (B, m, Dv)  ->  out (B, n, Dv)
    right:  values (B, Dv, m) @ weights (B, m, n)  ->  out (B, Dv, n)

Both are brought to q (B, H, Nq, D), k (B, Hk, Nk, D), v (B, Hk, Nk, Dv).

Next: observer.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.lens.captured_call import CapturedCall, see_logits
from regard.lens.coverage_notes import FOLDED
from regard.lens.layout import Axis, Part, arrange, count, merge
from regard.lens.origin import FEATURE, ROW, Root
from regard.lens.roles import Roles, Source, assign_roles
from regard.lens.scores import Formula, Term, add_terms
from regard.lens.softmax_call import SoftmaxCall, has_operands
from regard.recording.evidence import LseOrigin

STORED_AS_LOGITS = "stored as logits: q and k could not be traced"
WRITTEN = "its queries or keys were written to before its weights were used"
AVERAGE = "rows that may see no key average over all keys"


@dataclass(frozen=True)
class Taken:
    """The operands of the product that takes weights, as (B, n, m) and (B, m, Dv)."""

    weights: tuple[Axis, Axis, Axis]  # axes of the batch, the queries, the keys
    values: Tensor
    value_batch: Axis | None  # the batch of the values, traced back
    out: Tensor  # (B, n, Dv)


def make_call(call: SoftmaxCall, taken: Taken, notes: list[str]) -> CapturedCall | None:
    """Return the attention call of a softmax, None if its axes cannot be followed."""
    if call.operands is None:
        return make_untraced(call, taken, notes)
    if has_operands(call):
        return make_traced(call, taken, notes)
    call.reason = WRITTEN
    return None


@dataclass(frozen=True)
class Axes:
    """The axes of the product that made scores, and the widths of keys and values."""

    batch: Axis
    rows: Axis
    keys: Axis
    wide: Axis
    deep: Axis


@dataclass(frozen=True)
class Scores:
    """What gives the scores of a call, with sequences and heads in their places."""

    q: Tensor
    k: Tensor
    lse: Tensor
    mask: Tensor | None
    blind: Tensor | None = None  # (B, H, Nq)


def make_traced(
    call: SoftmaxCall, taken: Taken, notes: list[str]
) -> CapturedCall | None:
    """Return a call whose q and k are known."""
    assert call.product is not None
    assert call.formula is not None
    axes, is_changed = name_axes_of(call, taken), bool(notes)
    traced = [view.axes() for view in call.product.views]
    traced = traced[::-1] if call.transposed else traced
    roles = find_roles(call, taken, axes, traced)
    scores = None if roles is None else place_scores(call, roles, axes)
    if roles is None or scores is None:
        return None
    if scores.blind is not None:
        notes = [*notes, AVERAGE]
    notes = [*notes, *note_folded(traced[0], 1 + call.transposed)]
    sink = read_sink(call.extra, call.other_axes, roles, axes.rows)
    if sink is None and call.extra is not None:
        return None
    v, out = (None, None) if is_changed else place_values(taken, roles, axes)
    return CapturedCall(
        via="softmax",
        weights_taken=True,
        q=scores.q,
        k=scores.k,
        v=v,
        out=out,
        lse=scores.lse,
        origin=LseOrigin.LOGITS,
        scale=call.formula.scale,
        mask=scores.mask,
        softcap=call.formula.softcap,
        sink=sink,
        blind=None if scores.blind is None else scores.blind.any(1),
        keys_are_new=are_rows(traced[1], 2 - call.transposed),
        is_moved=is_moved(call, roles, axes),
        note="; ".join(filter(None, (*notes, roles.note))),
        error=call.error,
        rounding=call.rounding,
    )


def place_values(
    taken: Taken, roles: Roles, axes: Axes
) -> tuple[Tensor | None, Tensor | None]:
    """Return v and the output with all axes in their places, if they can be told."""
    batch = (taken.weights[0],)
    if not same_axis(taken.weights[0], axes.batch):
        return None, None
    v = roles.place_keys(taken.values, batch, axes.keys, axes.deep)
    out = roles.place(taken.out, batch, axes.rows, axes.deep)
    return v, None if v is None else out


def name_axes_of(call: SoftmaxCall, taken: Taken) -> Axes:
    """Return the axes of the product that made the scores of a softmax."""
    assert call.product is not None
    assert call.operands is not None
    q, k = call.operands
    root, left, right = call.product.roots
    left, right = (right, left) if call.transposed else (left, right)
    sizes = (
        (root, q.shape[0]),
        (left, q.shape[1]),
        (right, k.shape[1]),
        ("d", q.shape[2]),
        ("dv", taken.values.shape[2]),
    )
    return Axes(*((Part(name, 1, n),) if n > 1 else () for name, n in sizes))


def find_roles(
    call: SoftmaxCall,
    taken: Taken,
    axes: Axes,
    traced: Sequence[Sequence[Axis] | None],  # of q and k
) -> Roles | None:
    """Return which parts of the batch are sequences, and which are heads."""
    assert call.axes is not None
    sources = [
        Source(axes.batch, None if found is None else found[0], name="qk"[i])
        for i, found in enumerate(traced)
    ]
    if same_axis(taken.weights[0], axes.batch):
        sources.append(Source(taken.weights[0], taken.value_batch, "v"))
    return assign_roles(sources, call.axes, axes.batch)


def place_scores(call: SoftmaxCall, roles: Roles, axes: Axes) -> Scores | None:
    """Return q, k, lse and mask with all axes in their places, None if unknown."""
    assert call.operands is not None
    assert call.formula is not None
    assert call.axes is not None
    assert call.lse is not None
    (q, k), wanted = call.operands, (roles.sequences, roles.heads, axes.rows, axes.keys)
    full_q = roles.place(q, (axes.batch,), axes.rows, axes.wide)
    full_k = roles.place_keys(k, (axes.batch,), axes.keys, axes.wide)
    lse = arrange(call.lse, call.other_axes, wanted[:3])
    if full_q is None or full_k is None or lse is None:
        return None
    full_q, lse, mask = apply_terms(call.formula, wanted, full_q, lse)
    if call.blind is None:
        return Scores(full_q, full_k, lse, mask)
    blind, cells = arrange(call.blind, call.other_axes, wanted[:3]), call.blind_cells
    assert blind is not None  # placed as lse was
    if cells is not None:
        cells = arrange(cells, call.axes, wanted)
    full_q, mask = average_rows(blind, cells, full_q, mask)
    many = k.shape[1] if cells is None else cells.sum(-1).clamp(min=1)
    counts = torch.as_tensor(many, dtype=lse.dtype, device=lse.device)
    lse = torch.where(blind, counts.log(), lse)
    return Scores(full_q, full_k, lse, mask, blind)


def average_rows(
    blind: Tensor, cells: Tensor | None, q: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return q and a mask that give keys the same weight in some rows.

    cells: the keys of these rows, (B, H, Nq, Nk); None for all
    """
    q = q.masked_fill(blind[..., None], 0)
    if mask is None:
        return q, None
    same = bool((blind == blind[:, :1]).all()) and mask.shape[1] == 1
    if cells is not None:
        same = same and bool((cells == cells[:, :1]).all())
        cells = cells[:, :1] if same else cells
    rows = (blind[:, :1] if same else blind)[..., None]
    if mask.dtype == torch.bool:
        return q, torch.where(
            rows, torch.ones_like(rows) if cells is None else cells, mask
        )
    numbers = mask.new_zeros(())
    if cells is not None:
        numbers = mask.new_zeros(cells.shape).masked_fill(~cells, -math.inf)
    return q, torch.where(rows, numbers, mask)


def is_moved(call: SoftmaxCall, roles: Roles, axes: Axes) -> bool:
    """Return whether logits are not (B, H, Nq, Nk), or (B * H, Nq, Nk)."""
    assert call.axes is not None
    usual = merge(roles.sequences), merge(roles.heads), axes.rows, axes.keys
    found = tuple(merge(x) for x in call.axes)
    return found != usual if len(found) == 4 else found[-2:] != usual[-2:]


def are_rows(axes: Sequence[Axis] | None, dim: int) -> bool:
    """Return whether an axis is one of rows that a product was given."""
    if axes is None or not axes[dim]:
        return False
    return all(isinstance(x.root, Root) and x.root.kind == ROW for x in axes[dim])


def note_folded(axes: Sequence[Axis] | None, dim: int) -> list[str]:
    """Return a note if some rows of the queries are columns of a projection: heads."""
    parts = () if axes is None else axes[dim]
    are_heads = [isinstance(x.root, Root) and x.root.kind == FEATURE for x in parts]
    if all(are_heads) or not any(are_heads):
        return []
    heads = (x.size for x, is_head in zip(parts, are_heads, strict=True) if is_head)
    return [FOLDED.format(math.prod(heads))]


def read_sink(
    extra: Tensor | None, others: tuple[Axis, ...], roles: Roles, rows: Axis
) -> Tensor | None:
    """Return the logit of each head's sink, None if it is not the same everywhere."""
    if extra is None:
        return None
    own = [axis if n > 1 else () for n, axis in zip(extra.shape, others, strict=False)]
    wanted = (roles.sequences, roles.heads, rows)
    full = arrange(extra[..., 0], own, wanted)
    if full is None or not bool((full == full[:1, :, :1]).all()):
        return None
    return full[0, :, 0]


def same_axis(found: Axis, whole: Axis) -> bool:
    """Return whether an axis holds all of another one, in any order."""
    roots = {part.root for part in found}
    return roots <= {part.root for part in whole} and count(found) == count(whole)


def apply_terms(
    formula: Formula, wanted: tuple[Axis, ...], q: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return q with the factors of its rows, lse without their shifts, and the mask."""
    for factor in formula.factors:
        x = factor.place(wanted)
        assert x is not None  # compare_rows placed it
        q = q * x.to(q.dtype) ** factor.number
    cells: list[Term] = []
    for term in formula.added:
        x = term.place(wanted)
        assert x is not None
        several = count(wanted[-1]) > 1 or term.where.shape[-1] > 1  # also a sink
        if x.shape[-1] == 1 and several and not term.hides:
            lse = lse - x[..., 0].to(lse.dtype) * term.number  # the same for all keys
        else:
            cells.append(term)
    return q, lse, add_terms(cells, wanted)


def make_untraced(
    call: SoftmaxCall, taken: Taken, notes: list[str]
) -> CapturedCall | None:
    """Return a call of which only the logits are known."""
    if call.logits is None or call.axes is None:
        return None
    logits = arrange(call.logits, call.axes, taken.weights)
    if logits is None:
        return None
    n_batch = count(taken.weights[0])
    batch = (Part("batch", 1, n_batch),) if n_batch > 1 else ()
    step, inner = n_batch, []
    for part in taken.weights[0]:
        step //= part.size
        inner.append((part, step))
    dims = [
        tuple(
            Part("batch", unit * (p.step // part.step), p.size)
            for p in axis
            for part, unit in inner
            if part.root == p.root and part.step <= p.step < part.step * part.size
        )
        for axis in call.axes
    ]
    roles = assign_roles([Source(batch, taken.value_batch, "v")], dims, batch)
    if roles is None:
        return None
    sizes = logits.shape[1:]
    rows, keys = (
        (Part(name, 1, n),) if n > 1 else ()
        for name, n in zip("qk", sizes, strict=True)
    )
    full = roles.place(logits, (batch,), rows, keys)
    if full is None:
        return None
    seen = see_logits(
        "softmax", full.to(torch.promote_types(full.dtype, torch.float32))
    )
    text = "; ".join(filter(None, (STORED_AS_LOGITS, *notes, roles.note)))
    return replace(seen, weights_taken=True, note=text)
