"""A product takes the weights of a softmax: return the attention call that this is.

    left:   weights (B, n, m) @ values (B, m, Dv)  ->  out (B, n, Dv)
    right:  values (B, Dv, m) @ weights (B, m, n)  ->  out (B, Dv, n)

Both are brought to q (B, H, Nq, D), k (B, Hk, Nk, D), v (B, Hk, Nk, Dv).

Next: observer.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.lens.captured_call import CapturedCall, see_logits
from regard.lens.layout import Axis, Part, arrange, count
from regard.lens.origin import ROW, Root
from regard.lens.roles import Roles, Source, assign_roles
from regard.lens.scores import Formula, Term, add_terms
from regard.lens.softmax_call import SoftmaxCall

STORED_AS_LOGITS = "stored as logits: q and k could not be traced"
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
    if call.operands is not None:
        return make_traced(call, taken, notes)
    return make_untraced(call, taken, notes)


def make_traced(
    call: SoftmaxCall, taken: Taken, notes: list[str]
) -> CapturedCall | None:
    """Return a call whose q and k are known."""
    assert call.product is not None
    assert call.operands is not None
    assert call.formula is not None
    assert call.axes is not None
    assert call.lse is not None
    q, k = call.operands
    root, left, right = call.product.roots
    left, right = (right, left) if call.transposed else (left, right)
    batch, rows, keys, wide, deep = (
        (Part(name, 1, n),) if n > 1 else ()
        for name, n in (
            (root, q.shape[0]),
            (left, q.shape[1]),
            (right, k.shape[1]),
            ("d", q.shape[2]),
            ("dv", taken.values.shape[2]),
        )
    )
    views = call.product.views[::-1] if call.transposed else call.product.views
    traced = [view.axes() for view in views]
    sources = [
        Source(batch, None if axes is None else axes[0], name="qk"[i])
        for i, axes in enumerate(traced)
    ]
    is_whole = same_axis(taken.weights[0], batch)
    if is_whole:
        sources.append(Source(taken.weights[0], taken.value_batch, "v"))
    roles = assign_roles(sources, call.axes, batch)
    if roles is None:
        return None
    full_q = roles.place(q, (batch,), rows, wide)
    full_k = roles.place_keys(k, (batch,), keys, wide)
    others = tuple(axis for i, axis in enumerate(call.axes) if i != call.dim)
    lse = arrange(call.lse, others, (roles.sequences, roles.heads, rows))
    if full_q is None or full_k is None or lse is None:
        return None
    wanted = (roles.sequences, roles.heads, rows, keys)
    full_q, lse, mask = apply_terms(call.formula, wanted, full_q, lse)
    blind_rows = None
    if call.blind is not None:
        blind = arrange(call.blind, others, wanted[:3])
        cells = call.blind_cells
        if cells is not None:
            cells = arrange(cells, call.axes, wanted)
        full_q, mask = average_rows(blind, cells, full_q, mask)
        many = k.shape[1] if cells is None else cells.sum(-1).clamp(min=1)
        blind_rows = blind.any(1)
        lse = torch.where(blind, torch.as_tensor(many, dtype=lse.dtype).log(), lse)
        notes = [*notes, AVERAGE]
    sink = None
    if call.extra is not None:
        sink = read_sink(call.extra, others, roles, rows)
        if sink is None:
            return None
    v = out = None
    if is_whole and not set(notes) - {AVERAGE}:
        v = roles.place_keys(taken.values, (taken.weights[0],), keys, deep)
        out = roles.place(taken.out, (taken.weights[0],), rows, deep)
    exact = call.dtype in (torch.float32, torch.float64)
    return CapturedCall(
        via="softmax",
        q=full_q,
        k=full_k,
        v=v,
        out=out if v is not None else None,
        lse=lse if exact else None,
        scale=call.formula.scale,
        mask=mask,
        softcap=call.formula.softcap,
        sink=sink,
        blind=blind_rows,
        keys_are_new=are_rows(traced[1], 2 if not call.transposed else 1),
        note="; ".join(filter(None, (*notes, roles.note))),
        error=call.error,
    )


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
    numbers = torch.zeros((), dtype=mask.dtype)
    if cells is not None:
        numbers = torch.zeros(cells.shape, dtype=mask.dtype).masked_fill(
            ~cells, -math.inf
        )
    return q, torch.where(rows, numbers, mask)


def are_rows(axes: Sequence[Axis] | None, dim: int) -> bool:
    """Return whether an axis is one of rows that a product was given."""
    if axes is None or not axes[dim]:
        return False
    return all(isinstance(x.root, Root) and x.root.kind == ROW for x in axes[dim])


def read_sink(
    extra: Tensor, others: tuple[Axis, ...], roles: Roles, rows: Axis
) -> Tensor | None:
    """Return the logit of each head's sink, None if it is not the same everywhere."""
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
        if x.shape[-1] == 1 and count(wanted[-1]) > 1 and not term.hides:
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
    return CapturedCall(
        via="softmax",
        q=seen.q,
        k=seen.k,
        v=None,
        out=None,
        lse=seen.lse,
        scale=1.0,
        mask=seen.mask,
        note=text,
    )
