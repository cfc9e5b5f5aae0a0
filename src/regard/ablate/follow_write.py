"""Follow what heads output to what they add to the residual stream.

    z = weights v ─▶ gate ─▶ output projection ─▶ multiplier ─▶ residual stream + write

The graph of autograd tells what was computed from z. The product is the output of the
first module in which z was multiplied by a matrix; if a later module adds a second
product to it (LoRA does), it is the output of that module. The write is what is then
added to something else, the residual stream: with the multiplier of Granite, or the
scale of DINOv2. It is the product if nothing is added. So no names are needed.

A write is linear in z, unless there is a norm before the sum, which is refused. What
head h writes is the Jacobian J times its z, without a matrix, by differentiating twice:

    g(u)  = Jᵀ u                      one backward pass, from the write to z
    J z_h = ∂ (g(u) · z_h) / ∂ u      for any u

Next: trace_heads.py
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_leaves

from regard.errors import OptionError

CLOSE = 1e-4  # of the largest sum, between tokens
PRODUCT = re.compile("mm|linear|conv|einsum", re.IGNORECASE)  # names of its nodes
SUM = re.compile("^Add(cmul|cdiv)?Backward")


def find_between(start: Tensor, end: Tensor, *, avoid: Node | None = None) -> set[Node]:
    """Return the operations by which `start` was computed from `end`.

    avoid: an operation; what depends on `end` only through it does not count
    """
    last = end.grad_fn
    if start.grad_fn is None or last is None:
        return set()
    return list_after(last, list_users([start], last, avoid))


def list_after(node: Node, users: dict[Node, list[Node]]) -> set[Node]:
    """Return the operations that depend on one."""
    found: set[Node] = set()
    left = list(users.get(node, []))
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += users[node]
    return found


def list_users(
    starts: list[Tensor], last: Node, avoid: Node | None = None
) -> dict[Node, list[Node]]:
    """Return which operations use the result of one, from `starts` back to `last`."""
    oldest = last._sequence_nr()  # noqa: SLF001 (what is older cannot depend on it)
    users: dict[Node, list[Node]] = {x.grad_fn: [] for x in starts if x.grad_fn}
    left = list(users)
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
    z: Tensor  # (B, H, N, Dv)
    edge: GradientEdge  # the sum of the write and the residual stream

    def is_added(self, x: Tensor) -> bool:
        """Return whether a write is added to x, from which its head was computed."""
        u = self.u.detach()
        (both,) = torch.autograd.grad(self.edge, x, u, retain_graph=True)
        (own,) = torch.autograd.grad(self.z, x, self.back.detach(), retain_graph=True)
        far = (both - own - u).abs().max() if both.shape == u.shape else math.inf
        return bool(far <= CLOSE * u.abs().max())

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
    """Finds the product of one attention call among the outputs of later modules."""

    def __init__(self, z: Tensor) -> None:
        self.z = z  # (B, H, N, Dv), as the model goes on with it
        self.product: Tensor | None = None
        self.gradient: Tensor | None = None  # by the write

    def look(self, out: Any) -> None:
        """Look at the output of a module that ran after the call."""
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and self.is_product(x):
                self.product = x
                return

    def is_product(self, x: Tensor) -> bool:
        """Return whether this is the product, or adds a second one to it."""
        if self.product is None:
            return multiplies(find_between(x, self.z))
        if not find_between(x, self.product):
            return False
        return multiplies(find_between(x, self.z, avoid=self.product.grad_fn))

    def find_jacobian(self, layer: str, outputs: list[Tensor]) -> Jacobian:
        """Return the map from z to its write, or raise; before the graph is freed.

        outputs: what the model returned
        """
        z = self.z
        if self.product is None:
            raise OptionError(
                f"the output of {layer} was not seen to be multiplied by an output "
                "projection. Run the model with gradients, not under torch.no_grad()."
            )
        with torch.enable_grad():
            edge = find_sum(self.product, outputs)
            like = edge.node._input_metadata[edge.output_nr]  # noqa: SLF001
            some = torch.randn(like.shape, generator=torch.Generator().manual_seed(0))
            u = some.to(z.device, like.dtype).requires_grad_()
            (back,) = torch.autograd.grad(edge, z, u, create_graph=True)
            size = (back * back.detach()).sum()
            (bent,) = torch.autograd.grad(size, z, retain_graph=True, allow_unused=True)
        if bent is not None and bool(bent.any()):
            raise OptionError(
                f"between the heads of {layer} and what they write is more than a "
                "linear map, such as a norm, so that they do not write separately. Use "
                "regard.patch_heads to measure what each of them changes."
            )
        # from here on: a gradient of ours would be kept, too
        edge.node.register_prehook(partial(self.keep_gradient, edge.output_nr))
        return Jacobian(u, back, z, edge)

    def keep_gradient(self, at: int, gradients: tuple[Tensor | None, ...]) -> None:
        """Add up the gradients by the write, as those of a tensor are."""
        found, before = gradients[at], self.gradient
        if found is not None:
            self.gradient = found.detach() + (0 if before is None else before)


def find_sum(product: Tensor, outputs: list[Tensor]) -> GradientEdge:
    """Return the sum of a product and the residual stream; the product without one.

    It is the first sum with what was computed otherwise, on every way to the outputs.
    A parameter is a bias. The stream is a constant where nothing needs a gradient, as
    is a bias then: so it is the last such sum.
    """
    edge = get_gradient_edge(product)
    users = list_users(outputs, edge.node)
    after = list_after(edge.node, users)
    ends = {x.grad_fn for x in outputs}
    found: dict[bool, list[Node]] = {True: [], False: []}
    for node in sorted(after, key=lambda x: x._sequence_nr()):  # noqa: SLF001
        shape = node._input_metadata[0].shape  # noqa: SLF001
        if not SUM.search(node.name()) or math.prod(shape) != product.numel():
            continue
        given = [x for x, _ in node.next_functions]
        others = [x for x in given if x not in after and x is not edge.node]
        leaves = [getattr(x, "variable", None) for x in others]  # of a parameter
        if len(others) < len(given) - 1:
            continue
        if not all(isinstance(x, nn.Parameter) for x in leaves):
            around = list_after(edge.node, {**users, node: []}) - {node}
            if not ends & around:
                found[None not in others].append(node)
    best = found[True][:1] or found[False][-1:]
    return GradientEdge(best[0], 0) if best else edge
