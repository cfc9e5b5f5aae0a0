"""A softmax that may turn out to be attention, from its logits to its values.

    softmax runs       its logits are compared with the formula of the product that made
                       them; lse is computed; if the formula fails, the logits are kept
    a product takes    its weights, summing over the keys: it is attention, and the
                       other operand holds the values
    neither            a gate, a router or an output: it is counted and not kept

Next: roles.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.lens.check_rebuild import find_tolerance
from regard.lens.layout import Axis, Part, arrange
from regard.lens.origin import FEATURE, Origin, Product, Root, View
from regard.lens.scores import Formula, add_terms, apply_formula, make_term, read_steps
from regard.run.cells import HIDDEN

CHECKED = 2  # rows whose logits are compared with the formula
FAR = math.inf, math.inf, 0.0  # the axes of some logits do not fit
VISIBLE = 1e-6  # a weight whose logit is compared
KEPT = 2**28  # bytes of logits that are kept at most


@dataclass(eq=False)
class SoftmaxCall:
    """One softmax, while it is not known yet who takes its weights."""

    module: str
    view: View  # of the logits
    axes: tuple[Axis, ...] | None
    dim: int
    dtype: torch.dtype
    product: Product | None = None
    transposed: bool = False  # the keys are the left operand of the product
    formula: Formula | None = None
    operands: tuple[Tensor, Tensor] | None = None  # q and k, if the formula holds
    multiplied: tuple[Tensor, Tensor] | None = None  # as given: torch counts writes
    logits: Tensor | None = None  # if it does not
    blind: Tensor | None = None  # rows that hide every key, as lse; they average
    blind_cells: Tensor | None = None  # the keys over which they average, if not all
    extra: Tensor | None = None  # logits of a sink, behind those of the keys
    taken_axis: Axis = ()  # over which a product has to sum, if it takes the weights
    lse: Tensor | None = None  # as the logits, without the axis of the keys
    error: float = 0.0  # of the weights that are rebuilt from the formula
    rounding: float = 0.0  # of what it gives, if its logits were rounded
    reason: str = ""  # why it cannot be kept
    notes: list[str] = field(default_factory=list)
    is_of_features: bool = False  # it compares features, not keys
    is_by_hand: bool = False  # its weights are not those of a softmax
    is_touched: bool = False  # a product took parts of its weights
    is_taken: bool = False  # it was found to be attention

    @property
    def key_axis(self) -> Axis:
        """The axis of the keys."""
        assert self.axes is not None
        return self.axes[self.dim]

    @property
    def other_axes(self) -> tuple[Axis, ...]:
        """The axes of the logits without that of the keys."""
        assert self.axes is not None
        return tuple(axis for i, axis in enumerate(self.axes) if i != self.dim)

    def is_summed(self, axis: Axis) -> bool:
        """Return whether a product that sums over an axis of the weights takes them."""
        if self.is_by_hand:
            return self.axes is not None and axis in self.axes
        return axis == self.taken_axis

    def shares_axes(self, axis: Axis) -> bool:
        """Return whether an axis holds some keys, or what they were compared with."""
        roots = {part.root for part in self.taken_axis}
        if self.view.origin.product is not None:
            roots.update(self.view.origin.product.roots[1:])
        return any(part.root in roots for part in axis)

    def release(self) -> None:
        """Release all arrays."""
        self.operands = self.logits = self.lse = self.product = self.formula = None
        self.multiplied = None
        self.extra = self.blind = self.blind_cells = None


def hear_softmax(
    module: str,
    logits: Tensor,
    weights: Tensor,
    dim: int,
    origin: Origin,
    *,
    is_safe: bool = False,  # a row without visible keys has weights 0, not NaN
) -> SoftmaxCall:
    """Return a softmax that has just run, with what is needed of its logits."""
    view = View(origin, tuple(logits.shape), logits.stride())
    call = SoftmaxCall(module, view, view.axes(), dim % logits.ndim, logits.dtype)
    logits = logits.detach()
    if call.axes is None:
        call.reason = "its axes could not be followed"
        return call
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    call.lse = torch.logsumexp(wide, call.dim)
    if not is_safe:
        call.lse = call.lse.masked_fill(call.lse == -math.inf, math.nan)
    blind = find_blind(call, origin)
    if bool(blind.any()):
        call.blind = blind
        top = wide.amax(call.dim, keepdim=True)
        wide = torch.where(blind.unsqueeze(call.dim), wide - top, wide)
        call.lse = torch.logsumexp(wide, call.dim)
        logits = wide
    call.taken_axis, product, weights = call.key_axis, origin.product, weights.detach()
    if product is not None and product.is_known:
        if origin.extra is not None:
            wide, weights = set_sink_apart(call, product, origin.extra, wide, weights)
        find_formula(call, product, origin, wide, weights)
    if call.formula is None:
        call.axes, call.extra = view.axes(), None
        call.is_of_features = all(
            isinstance(x.root, Root) and x.root.kind == FEATURE for x in call.key_axis
        )
        if logits.nbytes > KEPT:
            call.reason = (
                f"its logits come from no product, and are too large to be kept "
                f"({logits.nbytes / 2**20:.0f} MB)"
            )
        else:
            call.logits = logits
    return call


def find_blind(call: SoftmaxCall, origin: Origin) -> Tensor:
    """Return which rows, as lse, hide every key with a number.

    If the largest logit of each row was subtracted, that number is gone again, and the
    scores of the row with it.
    """
    assert call.axes is not None
    assert call.lse is not None
    blind = (call.lse <= HIDDEN) & (call.lse > -math.inf)
    for step in origin.steps:
        if step.kind != "add" or step.tensor is None or not call.key_axis:
            continue
        x = make_term(step).place(call.axes)
        if x is not None and x.shape[call.dim] == 1:
            blind = blind | (x.squeeze(call.dim) * step.number >= -HIDDEN)
    return blind


def set_sink_apart(
    call: SoftmaxCall, product: Product, extra: Tensor, *given: Tensor
) -> list[Tensor]:
    """Return logits and weights without the columns of a sink."""
    assert call.axes is not None
    n = call.view.shape[call.dim] - extra.shape[-1]
    whole = call.axes
    axes = [*whole[:-1], product.axes()[2]]
    if extra.shape[-1] != 1 or n != product.sizes[2]:
        return list(given)
    (root, step, _), *more = call.key_axis
    if not more:
        call.axes, call.extra = tuple(axes), extra
        call.taken_axis = (Part(root, step, n),) if n > 1 else ()
    return [x.narrow(call.dim, 0, n) for x in given]


def find_formula(
    call: SoftmaxCall,
    product: Product,
    origin: Origin,
    logits: Tensor,
    weights: Tensor,
) -> None:
    """Set how the logits follow from a product, if they do."""
    assert product.left is not None
    assert product.right is not None
    whole = product.axes()
    if call.key_axis == whole[2]:
        q, k, rows = product.left, product.right.mT, whole[1]
    elif call.key_axis == whole[1]:
        q, k, rows = product.right.mT, product.left, whole[2]
        call.transposed = True
    else:
        return
    q, k = q.detach(), k.detach()
    formula = read_steps(origin.steps)
    if formula is None or not averages(call, weights):
        return
    error, off, size = compare_rows(
        call, formula, (q, k), (whole[0], rows), (logits, weights)
    )
    # large logits lose their last bits, also if they were widened afterwards
    rounded = off <= 4 * torch.finfo(q.dtype).eps * size
    if error <= find_tolerance(call.dtype) or rounded:
        call.product, call.formula, call.error = product, formula, error
        call.operands, call.multiplied = (q, k), (product.left, product.right)
        call.rounding = 2 * math.expm1(off) if rounded else 0.0


def averages(call: SoftmaxCall, weights: Tensor) -> bool:
    """Return whether rows that hide every key give all keys the same weight."""
    if call.blind is None:
        return True
    rows = weights.movedim(call.dim, -1)[call.blind]
    some = rows > 0  # a number that was added twice became -inf
    lowest = torch.where(some, rows, math.inf).amin(-1)
    if not bool((rows.amax(-1) - lowest < 1e-6).all()):
        return False
    if not bool(some.all()):
        call.blind_cells = weights > 0
    return True


def compare_rows(
    call: SoftmaxCall,
    formula: Formula,
    operands: tuple[Tensor, Tensor],
    outer: tuple[Axis, Axis],  # of the batch and the queries
    given: tuple[Tensor, Tensor],  # logits and weights
) -> tuple[float, float, float]:
    """Return how far weights of some rows, and their logits, are from a formula's.

    The last number is the largest logit that was compared, or before it was shifted.
    """
    assert call.axes is not None
    assert call.lse is not None
    (q, k), (batch, rows), keys = operands, outer, call.key_axis
    n = q.shape[1]
    picked = torch.linspace(0, n - 1, min(CHECKED, n)).long().unique().to(q.device)
    wanted = (batch, rows, keys)
    logits, weights = (arrange(x, call.axes, wanted) for x in given)
    if logits is None or weights is None:
        return FAR
    wide = logits.dtype
    scores = q[:, picked].to(wide) @ k.mT.to(wide)
    mine = compute_logits(scores, formula, wanted, picked)
    if mine is None:
        return FAR
    theirs, weights = logits[:, picked], weights[:, picked].to(wide)
    if call.blind is not None:  # they average, whatever their scores are
        blind = arrange(call.blind, call.other_axes, (batch, rows))
        if blind is None:
            return FAR
        mine = torch.where(blind[:, picked, None], theirs, mine)
    lse = arrange(call.lse, call.other_axes, (batch, rows))
    if lse is None:
        return FAR
    lse = lse[:, picked, None]
    rebuilt = torch.exp(mine - lse.masked_fill(lse == -math.inf, 0))
    same = rebuilt.isnan() & weights.isnan()
    difference = (rebuilt - weights).masked_fill(same, 0).abs()
    if not difference.numel():
        return 0.0, 0.0, 0.0
    seen = (torch.maximum(rebuilt, weights) > VISIBLE) & ~same
    off = torch.where(seen, (mine - theirs).abs(), 0)
    raw, shown = scores.abs().max(), torch.where(seen, theirs.abs(), 0).max()
    size = max(float(raw) * abs(formula.scale), float(shown))
    return float(difference.max()), float(off.max()), size


def has_operands(call: SoftmaxCall) -> bool:
    """Return whether q and k, if written to since, still give the lse of the logits."""
    assert call.product is not None
    assert call.operands is not None
    assert call.formula is not None
    assert call.axes is not None
    assert call.lse is not None
    assert call.multiplied is not None
    (q, k), whole = call.operands, call.product.axes()
    if call.product.count_writes(*call.multiplied) == call.product.versions:
        return True
    wanted = (whole[0], whole[2 if call.transposed else 1], call.key_axis)
    lse = arrange(call.lse, call.other_axes, wanted[:2])
    scores = q.to(call.lse.dtype) @ k.mT.to(call.lse.dtype)
    logits = compute_logits(scores, call.formula, wanted, slice(None))
    others_too = call.blind is not None or call.extra is not None
    if logits is None or lse is None or others_too:
        return False
    mine = torch.logsumexp(logits, -1)
    rounding = float(4 * torch.finfo(call.dtype).eps * scores.abs().max())
    some = max(find_tolerance(call.dtype), rounding * abs(call.formula.scale))
    lse = lse.masked_fill(lse.isnan(), -math.inf)
    return bool(torch.allclose(mine, lse, 0, some))


def compute_logits(
    scores: Tensor, formula: Formula, wanted: tuple[Axis, ...], picked: Tensor | slice
) -> Tensor | None:
    """Return the logits of some rows, from their scores; None if axes do not fit."""
    try:
        added = add_terms(formula.added, wanted)
    except ValueError:
        return None
    if added is not None and added.shape[1] > 1:
        added = added[:, picked]
    for factor in formula.factors:
        x = factor.place(wanted)
        if x is None or x.shape[2] > 1:
            return None
        scores = scores * (x[:, picked] if x.shape[1] > 1 else x) ** factor.number
    return apply_formula(scores, formula, added)
