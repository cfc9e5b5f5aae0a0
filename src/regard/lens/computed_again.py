"""Whether a call has the keys of an earlier one: bit for bit, or computed again.

    a cache             gives the same bits, perhaps of its sequences in another order
    no cache            each pass computes all keys and rows again, up to rounding

Rounding depends on the shapes of a pass, so rows that are computed again are compared
as a whole: ‖mine - theirs‖ <= near · ‖mine‖.

Next: assemble.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.lens.captured_call import CapturedCall
from regard.lens.captured_rows import pick
from regard.run.cells import hides, make_four

NEAR = {torch.float64: 1e-6, torch.float32: 1e-3}  # else 0.1


def is_again(
    call: CapturedCall, rows: Tensor, keys: Tensor, order: Tensor | None
) -> bool:
    """Return whether a call computes rows and keys again, of sequences in an order.

    Rows of padding may differ: those that see the new key, or average over all.
    """
    stays = torch.ones(1, call.q.shape[2], dtype=torch.bool, device=call.q.device)
    if call.mask is not None:
        stays = hides(make_four(call.mask)[..., -1]).all(1)
    if call.blind is not None:
        stays = stays & ~call.blind
    return all(
        is_near(pick(mine, order), theirs.detach(), stays)
        for mine, theirs in ((rows, call.q), (keys, call.k))
    )


def is_near(mine: Tensor, theirs: Tensor, stays: Tensor) -> bool:
    """Return whether theirs begins with mine, up to rounding, in the rows that stay."""
    n, kind = mine.shape[2], mine.dtype
    wide = torch.promote_types(kind, torch.float32)
    theirs = theirs[:, :, :n].to(mine.device)
    if mine.shape != theirs.shape:
        return False
    moves = ~stays[:, None, :n, None].to(mine.device)
    mine, theirs = (x.to(wide).masked_fill(moves, 0) for x in (mine, theirs))
    return bool((mine - theirs).norm() <= NEAR.get(kind, 0.1) * mine.norm())


def find_order(mine: Tensor, theirs: Tensor, told: Tensor | None) -> Tensor | None:
    """Return which sequence of ours each of theirs continues, None if one is new.

    Sequences may have the same keys, so what a cache was told is preferred.
    """
    if told is not None:
        told = told.to(mine.device)
    known = told is not None and int(told.max()) < len(mine)
    if known and torch.equal(mine.index_select(0, told), theirs):
        return told
    order = []
    for place, x in enumerate(theirs):
        same = [i for i, y in enumerate(mine) if torch.equal(x, y)]
        if not same:
            return None
        order.append(min(same, key=lambda i: abs(i - place)))
    return torch.tensor(order, device=mine.device)
