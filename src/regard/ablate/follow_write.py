"""Follow what heads output to what they write: the product with the output projection.

    z = weights v ─▶ transpose, reshape, gate ─▶ output projection ─▶ write

The graph of autograd tells what was computed from z. The write is the output of the
first module in which z was multiplied by a matrix; if a later module adds a second
product to it (LoRA does), the write is the output of that module. So no names of
modules are needed.

A write is linear in z, and what head h writes is the Jacobian J times its z, found
without a matrix by differentiating twice:

    g(u)  = Jᵀ u                      one backward pass, from the write to z
    J z_h = ∂ (g(u) · z_h) / ∂ u      for any u

Next: trace_heads.py
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from regard.errors import OptionError

CLOSE = 1e-4  # of the largest sum, between tokens
PRODUCT = re.compile("mm|linear|conv|einsum", re.IGNORECASE)  # names of its nodes


def find_between(start: Tensor, end: Tensor, *, avoid: Node | None = None) -> set[Node]:
    """Return the operations by which `start` was computed from `end`.

    avoid: an operation; what depends on `end` only through it does not count
    """
    last = end.grad_fn
    if start.grad_fn is None or last is None:
        return set()
    users = list_users(start.grad_fn, last, avoid)
    found, left = set(), users.get(last, [])
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += users[node]
    return found


def list_users(start: Node, last: Node, avoid: Node | None) -> dict[Node, list[Node]]:
    """Return which operations use the result of one, from `start` back to `last`."""
    oldest = last._sequence_nr()  # noqa: SLF001 (what is older cannot depend on it)
    users: dict[Node, list[Node]] = {start: []}
    left = [start]
    while left:
        node = left.pop()
        if node is avoid or node is last or node._sequence_nr() < oldest:  # noqa: SLF001
            continue
        for before, _ in node.next_functions:
            if before is not None:
                left += [] if before in users else [before]
                users.setdefault(before, []).append(node)
    return users


def multiplies(nodes: set[Node]) -> bool:
    """Return whether one of some operations is a product with a matrix."""
    return any(PRODUCT.search(node.name()) for node in nodes)


@dataclass(frozen=True, eq=False)
class Jacobian:
    """The linear map from the outputs of the heads of a layer to what they write."""

    u: Tensor  # (B, N, width)
    back: Tensor  # g(u) = Jᵀ u, (B, H, N, Dv)

    def multiply(self, z: Tensor) -> Tensor:
        """Return J z, (B, N, width); it is that of one head if z of others is 0."""
        with torch.enable_grad():
            (found,) = torch.autograd.grad(self.back, self.u, z, retain_graph=True)
        return found

    def read_projection(self, head: int) -> Tensor | None:
        """Return W_O of a head, (Dv, width); None if it is not that of every token.

        A gate makes it another one for each token. Of one sequence.
        """
        n, d = self.back.shape[2:]
        rows = []
        for first in range(0, d, n):  # unit vectors, one at each token
            at = torch.arange(min(n, d - first))
            z = torch.zeros_like(self.back)
            z[0, head, at, first + at] = 1
            rows.append(self.multiply(z).flatten(end_dim=-2)[at])
        weight = torch.cat(rows)
        z = torch.zeros_like(self.back)
        z[0, head] = 1  # must give the same at every token
        sums = self.multiply(z).flatten(end_dim=-2)
        far = (sums - weight.sum(0)).abs().max()
        return weight if bool(far <= CLOSE * weight.abs().sum(0).max()) else None


class WriteFinder:
    """Finds the write of one attention call among the outputs of later modules."""

    def __init__(self, z: Tensor) -> None:
        self.z = z  # (B, H, N, Dv), as the model goes on with it
        self.write: Tensor | None = None

    def look(self, out: Any) -> None:
        """Look at the output of a module that ran after the call."""
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and self.is_write(x):
                self.write = x
                return

    def is_write(self, x: Tensor) -> bool:
        """Return whether this is the write, or adds a second product to it."""
        if self.write is None:
            return multiplies(find_between(x, self.z))
        if not find_between(x, self.write):
            return False
        return multiplies(find_between(x, self.z, avoid=self.write.grad_fn))

    def find_jacobian(self, layer: str) -> Jacobian:
        """Return the map from z to its write, or raise; before the graph is freed."""
        z, write = self.z, self.write
        if write is None:
            raise OptionError(
                f"the output of {layer} was not seen to be multiplied by an output "
                "projection. Run the model with gradients, not under torch.no_grad()."
            )
        with torch.enable_grad():
            u = write.detach().clone().requires_grad_()
            (back,) = torch.autograd.grad(write, z, u, create_graph=True)
            size = (back * back.detach()).sum()
            (bent,) = torch.autograd.grad(size, z, retain_graph=True, allow_unused=True)
        write.retain_grad()  # from here on: a gradient of ours would be kept, too
        if bent is not None and bool(bent.any()):
            raise OptionError(
                f"between the heads of {layer} and what they write is more than a "
                "linear map, such as a norm, so that they do not write separately. Use "
                "regard.patch_heads to measure what each of them changes."
            )
        return Jacobian(u, back)
