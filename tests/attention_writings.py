"""Many ways to write attention, each with the weights it must be recorded with.

A `Block` is a module that attends in the way its `Plan` says. Most plans combine parts:

    keys and queries  of the input, of a memory, with learned or zero keys, one query
    layout            how q and k become scores and the weights meet v: LAYOUTS
    scale, cap, bias  what happens to the scores
    mask              how hidden cells are written: FILLS
    softmax           how the softmax is called: SOFTMAXES
    after             what happens to the weights between softmax and product
    gate              softmaxes of the same module that are no attention

The others, in WRITINGS, are written as a whole: SDPA, loops, chunks, vmap, …

A block tells its `book`, if it has one, of every call: the true weights, computed from q
and k in float64 by `compute_weights`, which calls no softmax. `tell` checks them against
the output of the block, so that a wrong truth is an error of the draw. Without a book
nothing is computed: that is how the blocks run when a lens watches.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

EDGE = 1.5  # where scores are capped
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-5, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Plan:
    """How a block attends, and its sizes."""

    heads: int
    kv_heads: int
    width: int  # of a head
    writing: str = "spelled"
    keys: str = "self"
    queries: str = "all"
    share: str = "repeat_interleave"
    layout: str = "matmul"
    scale: str = "after"
    cap: str = "none"
    bias: str = "none"
    mask: str = "none"
    fill: str = "-inf"
    softmax: str = "F.softmax"
    after: str = "nothing"
    gate: str = "none"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parts, for a table of outcomes."""
        whole = [f"keys: {self.keys}", f"mask: {self.mask}", f"gate: {self.gate}"]
        if self.queries != "all":
            whole.append(f"queries: {self.queries}")
        if self.kv_heads < self.heads:
            whole.append(f"share: {self.share}")
        if self.writing != "spelled":
            return (f"writing: {self.writing}", *whole)
        return (
            f"layout: {self.layout}",
            f"scale: {self.scale}",
            f"cap: {self.cap}",
            f"bias: {self.bias}",
            *([f"fill: {self.fill}"] if self.mask != "none" else []),
            f"softmax: {self.softmax}",
            f"after: {self.after}",
            *whole,
        )


@dataclass(frozen=True)
class Call:
    """What a block does with a softmax or with SDPA, and how it may be recorded."""

    weights: Tensor | None  # (B, H, Nq, Nk) in float64; None: it is no attention
    where: tuple[str, ...] = ("",)  # modules that may be named, below the block
    changed: bool = False  # other weights meet the values: a note must say so
    optional: bool = False  # no softmax, or no matrix product: it may be absent
    others: tuple[Tensor, ...] = ()  # as good, if a note says so
    whole: Tensor | None = None  # of all calls of the block, if they are parts of it
    own: bool = True  # its keys are those of the model's tokens, padding too
    heard: tuple[int, ...] = (1,)  # how many softmax or SDPA calls this may count as


@dataclass(frozen=True)
class Given:
    """What is added to the scores, and what is hidden; they broadcast to all scores."""

    bias: Tensor | None  # (1, H, Nq, Nk)
    allowed: Tensor | None  # (B or 1, 1, Nq, Nk)

    def add(self, like: Tensor) -> Tensor | None:
        """Return both as one term, (B or 1, H or 1, Nq, Nk)."""
        if self.allowed is None:
            return self.bias
        hidden = torch.zeros(self.allowed.shape, dtype=like.dtype)
        hidden = hidden.masked_fill(~self.allowed, -math.inf)
        return hidden if self.bias is None else hidden + self.bias


# --- the truth ------------------------------------------------------------------------


def wide(x: Tensor) -> Tensor:
    """Return a tensor in float64, without its history."""
    return x.detach().to(torch.float64)


def compute_weights(
    q: Tensor,
    k: Tensor,
    given: Given,
    *,
    scale: float,
    cap: float | None = None,
    mix: Tensor | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Return the weights (B, H, Nq, Nk) in float64; q and k are (B, N, H, D).

    mix: (H, H), from the heads of the scores to those of the weights
    sink: (H,), a logit that takes its part of every row
    """
    group = q.shape[2] // k.shape[2]
    k = k.repeat_interleave(group, 2)
    logits = torch.einsum("bqhd,bkhd->bhqk", wide(q), wide(k)) * scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    if mix is not None:
        logits = torch.einsum("bhqk,hg->bgqk", logits, wide(mix))
    if given.bias is not None:
        logits = logits + wide(given.bias)
    if given.allowed is not None:
        blind = ~given.allowed.any(-1, keepdim=True)  # all are filled with one number
        logits = logits.masked_fill(~given.allowed, -math.inf).masked_fill(blind, 0)
    top = logits.amax(-1, keepdim=True)
    parts = torch.exp(logits - top)
    total = parts.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(wide(sink)[:, None, None] - top)
    return parts / total


def check_output(weights: Tensor, v: Tensor, out: Tensor) -> None:
    """Raise an error unless out, (B, Nq, H, D), is the product of weights and v."""
    v = wide(v).repeat_interleave(out.shape[2] // v.shape[2], 2)
    expected = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    check_close(expected, out)


def check_close(expected: Tensor, found: Tensor) -> None:
    """Raise an error if the truth of a draw is not what its block computed."""
    most = 10 * TOLERANCE[found.dtype] * max(1.0, float(expected.abs().max()))
    off = float((expected - wide(found)).abs().max())
    if not off < most:
        raise AssertionError(f"the truth of this draw is wrong: it is off by {off:.1e}")


# --- layouts: how q and k become scores, and how weights meet v -----------------------


@dataclass(frozen=True)
class Layout:
    """q, k and v are (B, N, H, D); `lay` arranges (B, H, Nq, Nk) like the scores."""

    score: Callable[[Tensor, Tensor], Tensor]
    apply: Callable[[Tensor, Tensor], Tensor]  # weights and v to (B, Nq, H, D)
    lay: Callable[[Tensor, int, int], Tensor] = lambda t, b, h: t
    axis: int = -1  # of the keys
    optional: bool = False  # the weights meet v in no matrix product


def spell(
    score: str, apply: str, order: tuple[int, ...] = (0, 1, 2, 3), axis: int = -1
) -> Layout:
    """Return a layout written with torch.einsum."""
    return Layout(
        score=lambda q, k: torch.einsum(score, q, k),
        apply=lambda w, v: torch.einsum(apply, w, v),
        lay=lambda t, b, h: t.permute(order),
        axis=axis,
    )


def fold(x: Tensor) -> Tensor:
    """Return (B, N, H, D) as (B H, N, D)."""
    return x.transpose(1, 2).flatten(0, 1)


def fold_heads_first(x: Tensor) -> Tensor:
    """Return (B, N, H, D) as (H B, N, D)."""
    return x.permute(2, 0, 1, 3).flatten(0, 1)


def fold_sequence_first(x: Tensor) -> Tensor:
    """Return (B, N, H, D) as (B H, N, D), from (N, B H, D) as fairseq does."""
    b, n, h, d = x.shape
    return x.transpose(0, 1).reshape(n, b * h, d).transpose(0, 1)


def unfold(x: Tensor, v: Tensor) -> Tensor:
    """Return (B H, N, D) as (B, N, H, D)."""
    return x.unflatten(0, (v.shape[0], v.shape[2])).transpose(1, 2)


def unfold_heads_first(x: Tensor, v: Tensor) -> Tensor:
    """Return (H B, N, D) as (B, N, H, D)."""
    return x.unflatten(0, (v.shape[2], v.shape[0])).permute(1, 2, 0, 3)


def lay_folded(t: Tensor, b: int, h: int) -> Tensor:
    """Return (B or 1, H or 1, Nq, Nk) as (B H, Nq, Nk)."""
    return t.expand(b, h, -1, -1).flatten(0, 1)


def lay_heads_first(t: Tensor, b: int, h: int) -> Tensor:
    """Return (B or 1, H or 1, Nq, Nk) as (H B, Nq, Nk)."""
    return t.expand(b, h, -1, -1).transpose(0, 1).flatten(0, 1)


def multiply_and_sum(q: Tensor, k: Tensor) -> Tensor:
    """Return the scores (B, Nq, Nk, H), without a matrix product."""
    return (q[:, :, None] * k[:, None]).sum(-1)


LAYOUTS = {
    "matmul": Layout(
        lambda q, k: q.transpose(1, 2) @ k.permute(0, 2, 3, 1),
        lambda w, v: (w @ v.transpose(1, 2)).transpose(1, 2),
    ),
    "torch.matmul, einsum": Layout(
        lambda q, k: torch.matmul(q.transpose(1, 2), k.transpose(1, 2).mT),
        lambda w, v: torch.einsum("bhqk,bkhd->bqhd", w, v),
    ),
    "einsum bhqk": spell("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd"),
    "einsum with other letters": spell("tihc,tjhc->thij", "thij,tjhc->tihc"),
    "einsum bqhk": spell("bqhd,bkhd->bqhk", "bqhk,bkhd->bqhd", (0, 2, 1, 3)),
    "einsum bqkh": spell("bqhd,bkhd->bqkh", "bqkh,bkhd->bqhd", (0, 2, 3, 1), 2),
    "einsum hbqk": spell("bqhd,bkhd->hbqk", "hbqk,bkhd->bqhd", (1, 0, 2, 3)),
    "einsum bhkq": spell("bqhd,bkhd->bhkq", "bhkq,bkhd->bqhd", (0, 1, 3, 2), -2),
    "keys first": Layout(
        lambda q, k: k.transpose(1, 2) @ q.permute(0, 2, 3, 1),
        lambda w, v: (w.mT @ v.transpose(1, 2)).transpose(1, 2),
        lambda t, b, h: t.mT,
        -2,
    ),
    "keys first, values transposed": Layout(
        lambda q, k: k.transpose(1, 2) @ q.permute(0, 2, 3, 1),
        lambda w, v: (v.permute(0, 2, 3, 1) @ w).permute(0, 3, 1, 2),
        lambda t, b, h: t.mT,
        -2,
    ),
    "channels first": Layout(
        lambda q, k: q.permute(0, 2, 3, 1).mT @ k.permute(0, 2, 3, 1),
        lambda w, v: (v.permute(0, 2, 3, 1) @ w.mT).permute(0, 3, 1, 2),
    ),
    "heads before batch": Layout(
        lambda q, k: q.permute(2, 0, 1, 3) @ k.permute(2, 0, 3, 1),
        lambda w, v: (w @ v.permute(2, 0, 1, 3)).permute(1, 2, 0, 3),
        lambda t, b, h: t.transpose(0, 1),
    ),
    "bmm, batch and heads folded": Layout(
        lambda q, k: torch.bmm(fold(q), fold(k).mT),
        lambda w, v: unfold(torch.bmm(w, fold(v)), v),
        lay_folded,
    ),
    "bmm, heads and batch folded": Layout(
        lambda q, k: torch.bmm(fold_heads_first(q), fold_heads_first(k).mT),
        lambda w, v: unfold_heads_first(torch.bmm(w, fold_heads_first(v)), v),
        lay_heads_first,
    ),
    "bmm, sequence first": Layout(
        lambda q, k: torch.bmm(fold_sequence_first(q), fold_sequence_first(k).mT),
        lambda w, v: unfold(torch.bmm(w, fold_sequence_first(v)), v),
        lay_folded,
    ),
    "scores without a product": Layout(
        multiply_and_sum,
        lambda w, v: torch.einsum("bqkh,bkhd->bqhd", w, v),
        lambda t, b, h: t.permute(0, 2, 3, 1),
        2,
    ),
    "values without a product": Layout(
        lambda q, k: torch.einsum("bqhd,bkhd->bqkh", q, k),
        lambda w, v: (w[..., None] * v[:, None]).sum(2),
        lambda t, b, h: t.permute(0, 2, 3, 1),
        2,
        optional=True,
    ),
}

# --- masks, softmaxes, and what follows them ------------------------------------------


def fill_multiplied(s: Tensor, a: Tensor) -> Tensor:
    """Hide as the first GPT did."""
    seen = a.to(s.dtype)
    return s * seen - 1e4 * (1 - seen)


FILLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "-inf": lambda s, a: s.masked_fill(~a, -math.inf),
    "finfo.min": lambda s, a: s.masked_fill(~a, torch.finfo(s.dtype).min),
    "-1e9": lambda s, a: s.masked_fill(a == 0, -1e9),
    "-1e4": lambda s, a: s.masked_fill(~a, -1e4),
    "masked_fill_": lambda s, a: s.masked_fill_(~a, -math.inf),
    "where": lambda s, a: torch.where(a, s, torch.full((), -1e30, dtype=s.dtype)),
    "where -inf": lambda s, a: torch.where(a, s, -math.inf),
    "added": lambda s, a: s + (1 - a.to(s.dtype)) * torch.finfo(s.dtype).min,
    "added -1e4": lambda s, a: s + (1 - a.to(s.dtype)) * -1e4,
    "add_": lambda s, a: s.add_((~a).to(s.dtype) * -1e9),
    "multiplied": fill_multiplied,
}
EVEN = ("finfo.min", "-1e9", "-1e4")  # where all is hidden, weights are even


def divide_exponentials(s: Tensor, axis: int) -> Tensor:
    """Return a softmax that no operator tells of."""
    parts = torch.exp(s - s.amax(axis, keepdim=True))
    return parts / parts.sum(axis, keepdim=True)


SOFTMAXES: dict[str, Callable[[Any, Tensor, int], Tensor]] = {
    "F.softmax": lambda block, s, axis: F.softmax(s, dim=axis),
    "torch.softmax": lambda block, s, axis: torch.softmax(s, axis),
    "method": lambda block, s, axis: s.softmax(axis),
    "torch.special": lambda block, s, axis: torch.special.softmax(s, axis),
    "in float32": lambda block, s, axis: F.softmax(s, dim=axis, dtype=torch.float32).to(
        s.dtype
    ),
    "cast before": lambda block, s, axis: s.double().softmax(axis).to(s.dtype),
    "in place": lambda block, s, axis: torch.softmax(s, axis, out=s),
    "into another": lambda block, s, axis: torch.softmax(
        s, axis, out=torch.empty_like(s)
    ),
    "log_softmax": lambda block, s, axis: s.log_softmax(axis).exp(),
    "log_softmax, exp_": lambda block, s, axis: F.log_softmax(s, axis).exp_(),
    "nn.Softmax": lambda block, s, axis: block.normalise(s),
    "aten": lambda block, s, axis: torch.ops.aten._softmax(s, axis, False),
    "of shifted scores": lambda block, s, axis: (
        s - s.amax(axis, keepdim=True)
    ).softmax(axis),
    "by hand": lambda block, s, axis: divide_exponentials(s, axis),
}
NO_GRADIENT = {"in place", "into another", "log_softmax, exp_", "aten"}
UNHEARD = {"by hand"}


def keep_largest(w: Tensor, axis: int) -> Tensor:
    """Return the weights without those below the mean of their row."""
    return w * (w >= w.mean(axis, keepdim=True))


# name: how it changes the weights of a layout, and whether it changes their values
AFTER: dict[str, tuple[Callable[[Any, Tensor, int], Tensor], bool]] = {
    "nothing": (lambda block, w, axis: w, False),
    "dropout": (
        lambda block, w, axis: F.dropout(w, 0.3, training=block.training),
        False,  # in training only
    ),
    "nn.Dropout": (lambda block, w, axis: block.drop(w), False),
    "view and contiguous": (
        lambda block, w, axis: w.contiguous().view(w.shape).clone(),
        False,
    ),
    "renormalised": (lambda block, w, axis: w / w.sum(axis, keepdim=True), False),
    "multiplied": (lambda block, w, axis: w * block.factor, True),
    "mul_": (lambda block, w, axis: w.clone().mul_(block.factor), True),
    "largest only": (lambda block, w, axis: keep_largest(w, axis), True),
    "squared": (lambda block, w, axis: w.square(), True),
}
TALKING = {"talking before", "talking after", "talking around"}
CANONICAL = {"matmul", "torch.matmul, einsum", "einsum bhqk"}  # (B, H, Nq, Nk)


# --- the block ------------------------------------------------------------------------


class Helper(nn.Module):
    """A module without a forward: its method attends."""

    def attend(self, *args):
        return attend_simply(*args)


class Block(nn.Module):
    """x + attention(x), written as its plan says."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, self.book = plan, None
        H, Hk, D = plan.heads, plan.kv_heads, plan.width
        C = H * D
        self.to_q, self.to_k = nn.Linear(C, C), nn.Linear(C, Hk * D)
        self.to_v, self.to_out = nn.Linear(C, Hk * D), nn.Linear(C, C)
        self.normalise = nn.Softmax(LAYOUTS[plan.layout].axis)
        self.drop, self.helper, self.factor = nn.Dropout(0.25), Helper(), 0.7
        for name, shape in find_extras(plan).items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        make = CHILDREN.get(plan.writing)
        if make is not None:
            self.child = make(plan)

    def forward(self, x: Tensor, memory: Tensor, valid: Tensor | None = None) -> Tensor:
        source = memory if self.plan.keys == "cross" else x
        if self.plan.writing in CHILDREN:
            return WRITINGS[self.plan.writing](self, x, source, valid)
        q, k, v = self.project(x, source)
        given = self.find_given(q, k, valid)
        out = WRITINGS[self.plan.writing](self, q, k, v, given)
        return x + GATES[self.plan.gate](self, self.to_out(out.flatten(2)))

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, Nq, H, D) and k, v (B, Nk, Hk, D)."""
        D, plan = self.plan.width, self.plan
        asked = x
        if plan.queries == "pooled":
            asked = self.query.expand(x.shape[0], -1, -1)
        q = self.to_q(asked).unflatten(-1, (-1, D))
        k, v = (f(source).unflatten(-1, (-1, D)) for f in (self.to_k, self.to_v))
        more = (x.shape[0], -1, -1, -1)
        if plan.keys == "learned":
            k = torch.cat([self.more_k.expand(more), k], 1)
            v = torch.cat([self.more_v.expand(more), v], 1)
        elif plan.keys == "zero":
            k, v = (F.pad(t, (0, 0, 0, 0, 0, 1)) for t in (k, v))
        return q, k, v

    def find_given(self, q: Tensor, k: Tensor, valid: Tensor | None) -> Given:
        """Return the bias and the mask; every query sees the first key, or none."""
        n_q, n_k = q.shape[1], k.shape[1]
        far = torch.arange(n_q)[:, None] - torch.arange(n_k)
        bias = allowed = None
        if self.plan.bias == "alibi":
            slopes = 0.5 ** torch.arange(1, self.plan.heads + 1)
            bias = (-slopes[:, None, None] * far.abs()).to(q.dtype)[None]
        elif self.plan.bias == "relative":
            table = self.relative[:, (far.clamp(-9, 9) + 9)]
            bias = table[None]
        if self.plan.mask == "causal":
            allowed = (far >= min(0, n_q - n_k))[None, None]
        elif self.plan.mask == "window":
            allowed = (far.abs() < 3)[None, None]
        elif self.plan.mask == "padding":
            seen = torch.ones(q.shape[0], n_k, dtype=torch.bool)
            if valid is not None and valid.shape[1] == n_k:
                seen = valid.bool()
            allowed = seen[:, None, None]
        if allowed is not None:
            allowed = allowed | (torch.arange(n_k) == 0)
            allowed = allowed.expand(-1, -1, n_q, n_k)
        if self.plan.mask == "blind rows":
            allowed = ((far >= 0) & (torch.arange(n_q) > 0)[:, None])[None, None]
        return Given(bias, allowed)

    def tell(
        self,
        weights: Tensor,
        v: Tensor | None = None,
        out: Tensor | None = None,
        **options: Any,
    ) -> None:
        """Write a call into the book, and check it if its output is given."""
        if out is not None:
            check_output(weights, v, out)
        options.setdefault("own", self.plan.keys != "cross")
        self.book.append(Call(weights, **options))

    def tell_other(self, heard: int = 1) -> None:
        """Write a softmax that is no attention into the book."""
        if self.book is not None:
            self.book.append(Call(None, heard=(heard,)))


def find_extras(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters that only some plans need."""
    H, Hk, D = plan.heads, plan.kv_heads, plan.width
    extras: dict[str, tuple[int, ...]] = {}
    if plan.queries == "pooled":
        extras["query"] = (1, 1, H * D)
    if plan.keys == "learned":
        extras |= {"more_k": (1, 2, Hk, D), "more_v": (1, 2, Hk, D)}
    if plan.bias == "relative":
        extras["relative"] = (H, 19)
    if plan.after in TALKING:
        extras |= {"talk_before": (H, H), "talk_after": (H, H)}
    if plan.gate != "none":
        extras["to_gate"] = (H * D, H * D)
    if plan.gate == "router":
        extras |= {"to_router": (H * D, 3), "experts": (3, H * D)}
    if plan.writing in {"sink column", "sink added to the sum"}:
        extras["sink"] = (H,)
    if plan.writing == "linear pooling":
        extras["pool"] = (H, D)
    return extras


def share_heads(block: Block, x: Tensor) -> Tensor:
    """Return (B, N, Hk, D) as (B, N, H, D)."""
    (b, n, h, d), group = x.shape, block.plan.heads // x.shape[2]
    if group == 1:
        return x
    if block.plan.share == "repeat_interleave":
        return x.repeat_interleave(group, 2)
    x = x[:, :, :, None].expand(b, n, h, group, d)
    return x.reshape(b, n, h * group, d)


# --- gates: softmaxes that are no attention -------------------------------------------


def gate_softmax(block: Block, out: Tensor) -> Tensor:
    block.tell_other()
    return out * F.softmax(out @ block.to_gate, -1)


def gate_four_axes(block: Block, out: Tensor) -> Tensor:
    """Gate with a softmax of the shape that attention has."""
    block.tell_other()
    parts = out.unflatten(-1, (block.plan.heads, -1)).transpose(1, 2)
    gate = (parts @ block.to_gate[: parts.shape[-1], : parts.shape[-1]]).softmax(-1)
    return (parts * gate).transpose(1, 2).flatten(2)


def route(block: Block, out: Tensor) -> Tensor:
    """Mix experts by a router, as a mixture of experts does."""
    block.tell_other()
    chances = torch.softmax(out @ block.to_router, -1)
    best, which = chances.topk(2, -1)
    return out + sum(
        best[..., i, None] * torch.tanh(out * block.experts[which[..., i]])
        for i in range(2)
    )


GATES: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "none": lambda block, out: out,
    "sigmoid": lambda block, out: out * torch.sigmoid(out @ block.to_gate),
    "softmax": gate_softmax,
    "softmax of four axes": gate_four_axes,
    "router": route,
}

# --- writings -------------------------------------------------------------------------

SCALES = ("before", "after", "split", "keys", "mul_", "divided", "none")


def scale_inputs(how: str, q: Tensor, k: Tensor, s: float) -> tuple[Tensor, Tensor]:
    """Scale q or k or both, if that is how the scores are scaled."""
    if how == "before":
        return q * s, k
    if how == "keys":
        return q, k * s
    if how == "split":
        return q * math.sqrt(s), k * math.sqrt(s)
    return q, k


def scale_scores(how: str, scores: Tensor, s: float) -> Tensor:
    """Scale the scores, if that is how it is done."""
    if how == "after":
        return scores * s
    if how == "mul_":
        return scores.mul_(s)
    return scores / (1 / s) if how == "divided" else scores


def write_spelled(block: Block, q: Tensor, k: Tensor, v: Tensor, given: Given):
    """Combine the parts that the plan names."""
    plan, layout = block.plan, LAYOUTS[block.plan.layout]
    (b, _, h, d), axis = q.shape, layout.axis
    s = 1.0 if plan.scale == "none" else d**-0.5
    shared, values = share_heads(block, k), share_heads(block, v)
    scores = layout.score(*scale_inputs(plan.scale, q, shared, s))
    scores = scale_scores(plan.scale, scores, s)
    if plan.cap == "tanh":
        scores = EDGE * torch.tanh(scores / EDGE)
    mixed = plan.after in {"talking before", "talking around"}
    if mixed:
        scores = torch.einsum("bhqk,hg->bgqk", scores, block.talk_before)
    if given.bias is not None:
        bias = layout.lay(given.bias, b, h)
        scores = scores.add_(bias) if plan.fill == "add_" else scores + bias
    if given.allowed is not None:
        scores = FILLS[plan.fill](scores, layout.lay(given.allowed, b, h))
    weights = SOFTMAXES[plan.softmax](block, scores, axis)
    applied, changed = change_weights(block, weights, axis)
    out = layout.apply(applied, values)
    if block.book is not None:
        block.tell(
            compute_weights(
                q,
                k,
                given,
                scale=s,
                cap=EDGE if plan.cap == "tanh" else None,
                mix=block.talk_before if mixed else None,
            ),
            v,
            None if changed else out,
            changed=changed,
            optional=layout.optional or plan.softmax in UNHEARD,
            where=("normalise", "") if plan.softmax == "nn.Softmax" else ("",),
            heard=(0, 1) if plan.softmax in UNHEARD else (1,),
        )
    return out


def change_weights(block: Block, weights: Tensor, axis: int) -> tuple[Tensor, bool]:
    """Return the weights that meet the values, and whether they are others."""
    after = block.plan.after
    if after in {"talking after", "talking around"}:
        return torch.einsum("bhqk,hg->bgqk", weights, block.talk_after), True
    if after == "talking before":
        return weights, False
    change, changed = AFTER[after]
    dropped = after in {"dropout", "nn.Dropout"} and block.training
    return change(block, weights, axis), changed or dropped


def tell_plain(block: Block, q, k, v, given: Given, out, **options: Any) -> None:
    """Write down an attention with the usual scale and nothing unusual."""
    if block.book is not None:
        weights = compute_weights(q, k, given, scale=q.shape[-1] ** -0.5)
        block.tell(weights, v, out, **options)


def attend_simply(q, k, v, add=None):
    """Attend over the last two axes of tensors with any others before them."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if add is not None:
        scores = scores + add
    return torch.softmax(scores, -1) @ v


# SDPA


def write_sdpa(block: Block, q, k, v, given: Given):
    add = given.add(q)
    if add is not None:
        add = add.expand(q.shape[0], -1, -1, -1)
    if add is None or given.bias is None:  # as bool, if nothing but a mask is there
        add = given.allowed
    shared = (share_heads(block, x).transpose(1, 2) for x in (k, v))
    out = F.scaled_dot_product_attention(q.transpose(1, 2), *shared, attn_mask=add)
    out = out.transpose(1, 2)
    tell_plain(block, q, k, v, given, out)
    return out


def write_sdpa_float_mask(block: Block, q, k, v, given: Given):
    """Mask and bias are one float tensor; the scale is another."""
    add, heads = given.add(q), (share_heads(block, x).transpose(1, 2) for x in (k, v))
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), *heads, attn_mask=add, scale=0.4
    ).transpose(1, 2)
    if block.book is not None:
        block.tell(compute_weights(q, k, given, scale=0.4), v, out)
    return out


def write_sdpa_causal(block: Block, q, k, v, given: Given):
    n_q, n_k = q.shape[1], k.shape[1]
    heads = (share_heads(block, x).transpose(1, 2) for x in (k, v))
    out = F.scaled_dot_product_attention(q.transpose(1, 2), *heads, is_causal=True)
    out = out.transpose(1, 2)
    seen = (torch.arange(n_q)[:, None] >= torch.arange(n_k))[None, None]
    tell_plain(block, q, k, v, Given(None, seen), out)
    return out


def write_sdpa_grouped(block: Block, q, k, v, given: Given):
    out = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        attn_mask=given.add(q),
        enable_gqa=True,
    ).transpose(1, 2)
    tell_plain(block, q, k, v, given, out)
    return out


def write_sdpa_dropout(block: Block, q, k, v, given: Given):
    heads = (share_heads(block, x).transpose(1, 2) for x in (k, v))
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        *heads,
        attn_mask=given.add(q),
        dropout_p=0.3 if block.training else 0.0,
    ).transpose(1, 2)
    dropped = block.training
    tell_plain(block, q, k, v, given, None if dropped else out, changed=dropped)
    return out


def write_sdpa_folded(block: Block, q, k, v, given: Given):
    """Three axes: batch and heads are one."""
    add = given.add(q)
    if add is not None:
        add = lay_folded(add, q.shape[0], q.shape[2])
    parts = (fold(x) for x in (q, share_heads(block, k), share_heads(block, v)))
    out = unfold(F.scaled_dot_product_attention(*parts, attn_mask=add), q)
    tell_plain(block, q, k, v, given, out)
    return out


def write_sdpa_one_head(block: Block, q, k, v, given: Given):
    """Three axes: (B, N, D), only the first head attends."""
    q, k, v = (x[:, :, 0] for x in (q, k, v))
    add = given.add(q)
    add = None if add is None else add[:, 0]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=add)[:, :, None]
    if block.book is not None:
        first = Given(None if given.bias is None else given.bias[:, :1], given.allowed)
        tell_plain(block, q[:, :, None], k[:, :, None], v[:, :, None], first, out)
    return out.expand(-1, -1, block.plan.heads, -1)


def write_sdpa_jagged(block: Block, q, k, v, given: Given):
    """Call SDPA with nested tensors, whose sequences could have any length."""
    shared = (q, share_heads(block, k), share_heads(block, v))
    nested = (
        torch.nested.as_nested_tensor(list(x.unbind()), layout=torch.jagged)
        for x in shared
    )
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in nested))
    out = torch.stack(out.transpose(1, 2).unbind())
    tell_plain(block, q, k, v, Given(None, None), out, heard=(0, 1))
    return out


def see_twice(x: Tensor) -> Tensor:
    """Return (B, N, H, D) as two windows, (B, 2, H, N, D)."""
    return torch.stack([x, x.flip(1)], 1).transpose(2, 3)


def tell_windows(block: Block, q, k, v, given: Given, out) -> None:
    """Write down windows (B, 2, H, N, D) as sequences, in the order of memory."""
    if block.book is None:
        return
    q, k, v = (see_twice(x).transpose(2, 3).flatten(0, 1) for x in (q, k, v))
    allowed = given.allowed
    if allowed is not None and allowed.shape[0] > 1:
        allowed = allowed.repeat_interleave(2, 0)
    flat = out.transpose(2, 3).flatten(0, 1)
    tell_plain(block, q, k, v, Given(given.bias, allowed), flat)


def write_windows(block: Block, q, k, v, given: Given):
    """Attend in five axes, (B, windows, H, N, D)."""
    add = given.add(q)
    shared = (see_twice(share_heads(block, x)) for x in (k, v))
    out = attend_simply(see_twice(q), *shared, None if add is None else add[:, None])
    tell_windows(block, q, k, v, given, out)
    return out.mean(1).transpose(1, 2)


def write_sdpa_windows(block: Block, q, k, v, given: Given):
    """Call SDPA with five axes."""
    add = given.add(q)
    add = None if add is None else add[:, None]
    shared = (see_twice(share_heads(block, x)) for x in (k, v))
    out = F.scaled_dot_product_attention(see_twice(q), *shared, attn_mask=add)
    tell_windows(block, q, k, v, given, out)
    return out.mean(1).transpose(1, 2)


# other products


def write_baddbmm(block: Block, q, k, v, given: Given):
    """Let the product add the mask, or nothing, as Bloom and diffusers do."""
    b, n_q, h, d = q.shape
    add, shared = given.add(q), share_heads(block, k)
    base, beta = torch.empty(b * h, n_q, k.shape[1], dtype=q.dtype), 0
    if add is not None:
        base, beta = lay_folded(add, b, h), 1
    scores = torch.baddbmm(base, fold(q), fold(shared).mT, beta=beta, alpha=d**-0.5)
    out = torch.bmm(scores.softmax(-1), fold(share_heads(block, v)))
    out = unfold(out, q)
    tell_plain(block, q, k, v, given, out)
    return out


def write_grouped(block: Block, q, k, v, given: Given):
    """Keep groups of heads as an axis: (B, Hk, group, N, D)."""
    group, add = q.shape[2] // k.shape[2], given.add(q)
    parts = q.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4)
    if add is not None:
        add = add.expand(-1, q.shape[2], -1, -1).unflatten(1, (-1, group))
    k4, v4 = (x.transpose(1, 2)[:, :, None] for x in (k, v))
    out = attend_simply(parts, k4, v4, add).flatten(1, 2).transpose(1, 2)
    tell_plain(block, q, k, v, given, out)
    return out


def write_each_head(block: Block, q, k, v, given: Given):
    """Loop over heads in Python."""
    outs, k, v = [], share_heads(block, k), share_heads(block, v)
    add = given.add(q)
    if add is not None:
        add = add.expand(-1, q.shape[2], -1, -1)
    for h in range(q.shape[2]):
        one = (x[:, :, h] for x in (q, k, v))
        outs.append(attend_simply(*one, None if add is None else add[:, h]))
    out = torch.stack(outs, 2)
    tell_parts(
        block, q, k, v, given, out, [(slice(None), h) for h in range(q.shape[2])]
    )
    return out


def tell_parts(block: Block, q, k, v, given: Given, out, parts) -> None:
    """Write down one call for each part (sequences, head) of an attention."""
    if block.book is None:
        return
    weights = compute_weights(q, k, given, scale=q.shape[-1] ** -0.5)
    check_output(weights, v, out)
    for b, h in parts:
        block.tell(weights[b, [h]].reshape(-1, 1, *weights.shape[-2:]), whole=weights)


def write_each_matrix(block: Block, q, k, v, given: Given):
    """Loop over sequences and heads: two axes, mm and addmm."""
    shared, values = share_heads(block, k), share_heads(block, v)
    (B, _, H, D), add = q.shape, given.add(q)
    out, parts = torch.empty_like(q), [(b, h) for b in range(B) for h in range(H)]
    done = []
    for b, h in parts:
        one, keys = q[b, :, h], shared[b, :, h]
        if add is None:
            scores = torch.mm(one, keys.t()) * D**-0.5
        else:
            one_add = add[min(b, add.shape[0] - 1), min(h, add.shape[1] - 1)]
            scores = torch.addmm(one_add, one, keys.t(), alpha=D**-0.5)
        done.append(torch.mm(scores.softmax(1), values[b, :, h]))
    out = torch.stack(done).unflatten(0, (B, H)).transpose(1, 2)
    tell_parts(block, q, k, v, given, out, [(slice(b, b + 1), h) for b, h in parts])
    return out


def write_chunks_of_queries(block: Block, q, k, v, given: Given):
    """Loop over blocks of three queries."""
    shared, values = share_heads(block, k), share_heads(block, v)
    outs, add, n = [], given.add(q), q.shape[1]
    keys, values = shared.transpose(1, 2), values.transpose(1, 2)
    for start in range(0, n, 3):
        rows = slice(start, start + 3)
        one = q[:, rows].transpose(1, 2)
        outs.append(
            attend_simply(one, keys, values, None if add is None else add[:, :, rows])
        )
    out = torch.cat(outs, 2).transpose(1, 2)
    if block.book is not None:
        weights = compute_weights(q, k, given, scale=q.shape[-1] ** -0.5)
        check_output(weights, v, out)
        for start in range(0, n, 3):
            block.tell(weights[:, :, start : start + 3], whole=weights)
    return out


def write_slices(block: Block, q, k, v, given: Given):
    """Write each sequence into a buffer, as the sliced attention of diffusers."""
    b, _, h, d = q.shape
    shared, values = fold(share_heads(block, k)), fold(share_heads(block, v))
    add, one, outs = given.add(q), fold(q), []
    add = None if add is None else lay_folded(add, b, h)
    for i in range(b):
        rows = slice(i * h, (i + 1) * h)
        outs.append(
            attend_simply(
                one[rows],
                shared[rows],
                values[rows],
                None if add is None else add[rows],
            )
        )
    out = unfold(torch.cat(outs), q)
    if block.book is not None:
        weights = compute_weights(q, k, given, scale=d**-0.5)
        check_output(weights, v, out)
        for i in range(b):
            # three axes (H, N, N): heads or sequences, nobody can tell
            block.tell(
                weights[i : i + 1],
                others=(weights[i : i + 1].transpose(0, 1),),
                whole=weights,
            )
    return out


def write_chunks_of_keys(block: Block, q, k, v, given: Given):
    """Attend to blocks of three keys, and join the outputs by their lse."""
    q4 = q.transpose(1, 2)
    k4, v4 = (share_heads(block, x).transpose(1, 2) for x in (k, v))
    parts = []
    for start in range(0, k.shape[1], 3):
        keys = slice(start, start + 3)
        scores = q4 @ k4[:, :, keys].mT * q.shape[-1] ** -0.5
        parts.append(
            (scores.softmax(-1) @ v4[:, :, keys], scores.logsumexp(-1, keepdim=True))
        )
    total = torch.logsumexp(torch.cat([x for _, x in parts], -1), -1, keepdim=True)
    out = sum(x * torch.exp(lse - total) for x, lse in parts).transpose(1, 2)
    if block.book is not None:
        none = Given(None, None)
        weights = compute_weights(q, k, none, scale=q.shape[-1] ** -0.5)
        check_output(weights, v, out)
        for start in range(0, k.shape[1], 3):
            own = weights[..., start : start + 3]
            block.tell(own / own.sum(-1, keepdim=True), whole=weights)
    return out


def write_online(block: Block, q, k, v, given: Given):
    """Sum exponentials over keys, one block after another: no softmax is called."""
    q4 = q.transpose(1, 2)
    k4, v4 = (share_heads(block, x).transpose(1, 2) for x in (k, v))
    out, total = torch.zeros_like(q4), torch.zeros_like(q4[..., :1])
    for start in range(0, k.shape[1], 3):
        keys = slice(start, start + 3)
        parts = torch.exp(q4 @ k4[:, :, keys].mT * q.shape[-1] ** -0.5)
        out, total = out + parts @ v4[:, :, keys], total + parts.sum(-1, keepdim=True)
    out = (out / total).transpose(1, 2)
    heard = tuple(range(-(-k.shape[1] // 3) + 1))  # what exp gives may be counted
    tell_plain(block, q, k, v, Given(None, None), out, optional=True, heard=heard)
    return out


# extra columns


def write_sink_column(block: Block, q, k, v, given: Given):
    """A learned logit is a further column of the softmax, then dropped: gpt-oss."""
    b, n, _, d = q.shape
    q4, k4, v4 = (share_heads(block, x).transpose(1, 2) for x in (q, k, v))
    scores, add = q4 @ k4.mT * d**-0.5, given.add(q)
    scores = scores if add is None else scores + add
    sink = block.sink.reshape(1, -1, 1, 1).expand(b, -1, n, 1)
    full = torch.cat([scores, sink], -1)
    weights = (full - full.amax(-1, keepdim=True)).softmax(-1)[..., :-1]
    out = (weights @ v4).transpose(1, 2)
    tell_sink(block, q, k, v, given, out)
    return out


def tell_sink(block: Block, q, k, v, given: Given, out) -> None:
    """Write down weights whose rows sum to less than 1; or the column with them."""
    if block.book is not None:
        weights = compute_weights(
            q, k, given, scale=q.shape[-1] ** -0.5, sink=block.sink
        )
        full = torch.cat([weights, 1 - weights.sum(-1, keepdim=True)], -1)
        block.tell(weights, v, out, others=(full,))


def write_zero_column(block: Block, q, k, v, given: Given):
    """A key and a value of zeros take part: "softmax plus one"."""
    k, v = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
    if given.allowed is not None:
        given = Given(given.bias, F.pad(given.allowed, (0, 1), value=True))
    if given.bias is not None:
        given = Given(F.pad(given.bias, (0, 1)), given.allowed)
    heads = (share_heads(block, x).transpose(1, 2) for x in (k, v))
    out = attend_simply(q.transpose(1, 2), *heads, given.add(q)).transpose(1, 2)
    tell_plain(block, q, k, v, given, out)
    return out


# other callers


class Attend(torch.autograd.Function):
    """Attention with its own gradient."""

    @staticmethod
    def forward(ctx, q, k, v):
        weights = torch.softmax(q @ k.mT, -1)
        ctx.save_for_backward(q, k, v, weights)
        return weights @ v

    @staticmethod
    def backward(ctx, grad):
        q, k, v, weights = ctx.saved_tensors
        back = grad @ v.mT
        back = weights * (back - (back * weights).sum(-1, keepdim=True))
        return back @ k, back.mT @ q, weights.mT @ grad


def write_autograd_function(block: Block, q, k, v, given: Given):
    heads = (share_heads(block, x).transpose(1, 2) for x in (k, v))
    scaled = q.transpose(1, 2) * q.shape[-1] ** -0.5
    out = Attend.apply(scaled, *heads).transpose(1, 2)
    tell_plain(block, q, k, v, Given(None, None), out)
    return out


def write_vmap(block: Block, q, k, v, given: Given):
    """Write attention for one sequence, and map it over the batch."""
    heads = (share_heads(block, x).transpose(1, 2) for x in (q, k, v))
    out = torch.vmap(attend_simply)(*heads).transpose(1, 2)
    tell_plain(block, q, k, v, Given(None, None), out, heard=(0, 1))
    return out


def write_vmap_of_heads(block: Block, q, k, v, given: Given):
    """Write attention for one matrix, and map it over batch and heads."""
    heads = (share_heads(block, x).transpose(1, 2) for x in (q, k, v))
    out = torch.vmap(torch.vmap(attend_simply))(*heads).transpose(1, 2)
    tell_plain(block, q, k, v, Given(None, None), out, heard=(0, 1))
    return out


def write_checkpoint(block: Block, q, k, v, given: Given):
    """Attend under a checkpoint: the backward pass attends once more."""
    heads = (share_heads(block, x).transpose(1, 2) for x in (q, k, v))
    out = checkpoint(attend_simply, *heads, given.add(q), use_reentrant=False)
    out = out.transpose(1, 2)
    tell_plain(block, q, k, v, given, out, heard=(1, 2))
    return out


def write_method(block: Block, q, k, v, given: Given):
    """Call a method of a module, not the module."""
    heads = (share_heads(block, x).transpose(1, 2) for x in (q, k, v))
    out = block.helper.attend(*heads, given.add(q)).transpose(1, 2)
    tell_plain(block, q, k, v, given, out, where=("", "helper"))
    return out


def write_two(block: Block, q, k, v, given: Given):
    """Attend twice in one module: to the keys, and to the keys backwards and halved."""
    heads = [share_heads(block, x).transpose(1, 2) for x in (q, k, v)]
    first = attend_simply(*heads, given.add(q)).transpose(1, 2)
    again = k.flip(1)[:, : (k.shape[1] + 1) // 2]
    values = v.flip(1)[:, : (k.shape[1] + 1) // 2]
    others = (share_heads(block, x).transpose(1, 2) for x in (again, values))
    second = F.scaled_dot_product_attention(first.transpose(1, 2), *others)
    second = second.transpose(1, 2)
    tell_plain(block, q, k, v, given, first)
    tell_plain(block, first, again, values, Given(None, None), second)
    return first + second


def write_difference(block: Block, q, k, v, given: Given):
    """Subtract two softmaxes before the product: differential attention."""
    heads = [share_heads(block, x).transpose(1, 2) for x in (q, k, v)]
    scores, add = heads[0] @ heads[1].mT * q.shape[-1] ** -0.5, given.add(q)
    scores = scores if add is None else scores + add
    one, two = scores.softmax(-1), (0.5 * scores).softmax(-1)
    out = ((one - 0.3 * two) @ heads[2]).transpose(1, 2)
    if block.book is not None:
        for factor in (1, 0.5):
            half = Given(
                None if given.bias is None else given.bias * factor, given.allowed
            )
            weights = compute_weights(q, k, half, scale=factor * q.shape[-1] ** -0.5)
            block.tell(weights, changed=True)
    return out


def write_flattened(block: Block, q, k, v, given: Given):
    """One softmax over all cells of a matrix: one row of Nq Nk keys."""
    q4, k4, v4 = (share_heads(block, x).transpose(1, 2) for x in (q, k, v))
    scores = q4 @ k4.mT * q.shape[-1] ** -0.5
    cells = scores.flatten(-2).softmax(-1).view(scores.shape)
    if block.book is not None:
        logits = wide(q4) @ wide(k4).mT * q.shape[-1] ** -0.5
        total = logits.flatten(-2).logsumexp(-1)[..., None, None]
        parts = torch.exp(logits - total)
        check_output(parts, v, (cells @ v4).transpose(1, 2))
        block.tell(parts, others=(parts.flatten(-2)[:, :, None],))
    return (cells @ v4).transpose(1, 2)


def write_linear_pooling(block: Block, q, k, v, given: Given):
    """Score every token by a learned vector, and take the weighted mean."""
    scores = (k * block.pool[: k.shape[2]]).sum(-1)  # (B, Nk, Hk)
    weights = scores.softmax(1)
    out = torch.einsum("bkh,bkhd->bhd", weights, v)[:, None]
    if block.book is not None:
        ones = torch.ones(k.shape[0], 1, k.shape[2], 1)
        flat = wide(scores)[..., None]
        block.tell(compute_weights(ones, flat, Given(None, None), scale=1.0), v, out)
    return share_heads(block, out).expand(-1, q.shape[1], -1, -1)


# no softmax at all


def write_sigmoid(block: Block, q, k, v, given: Given):
    """Weights are sigmoids of the scores: there is no softmax to record."""
    q4, k4, v4 = (share_heads(block, x).transpose(1, 2) for x in (q, k, v))
    return (torch.sigmoid(q4 @ k4.mT - math.log(k.shape[1])) @ v4).transpose(1, 2)


def write_linear(block: Block, q, k, v, given: Given):
    """Linear attention: features of q and k, no matrix of weights."""
    q4, k4, v4 = (share_heads(block, x).transpose(1, 2) for x in (q, k, v))
    q4, k4 = F.elu(q4) + 1, F.elu(k4) + 1
    total = q4 @ k4.sum(2, keepdim=True).mT
    return (q4 @ (k4.mT @ v4) / total).transpose(1, 2)


def write_efficient(block: Block, q, k, v, given: Given):
    """Softmaxes of q and of k, not of scores; k's is consumed by a product with v."""
    q4, k4, v4 = (share_heads(block, x).transpose(1, 2) for x in (q, k, v))
    one, two = q4.softmax(-1), k4.softmax(-2)
    if block.book is not None:
        # features attend to tokens: (B, H, D, N); then tokens to features
        parts = wide(k4).exp()
        parts = (parts / parts.sum(-2, keepdim=True)).mT
        rows = wide(q4).exp()
        rows = rows / rows.sum(-1, keepdim=True)
        block.tell(rows, optional=True)
        block.tell(parts, optional=True)
    return (one @ (two.mT @ v4)).transpose(1, 2)


# torch's own modules


def make_mha(plan: Plan) -> nn.Module:
    return nn.MultiheadAttention(
        plan.heads * plan.width,
        plan.heads,
        batch_first=plan.layout != "bmm, sequence first",
        add_zero_attn=plan.keys == "zero",
        dropout=0.3 if plan.after == "dropout" else 0.0,
    )


def make_layer(plan: Plan) -> nn.Module:
    return nn.TransformerEncoderLayer(
        plan.heads * plan.width,
        plan.heads,
        dim_feedforward=8,
        batch_first=True,
        norm_first=plan.scale == "before",
        dropout=0.0,
    )


def make_decoder_layer(plan: Plan) -> nn.Module:
    return nn.TransformerDecoderLayer(
        plan.heads * plan.width,
        plan.heads,
        dim_feedforward=8,
        batch_first=True,
        dropout=0.0,
    )


def make_convolutions(plan: Plan) -> nn.Module:
    C = plan.heads * plan.width
    return nn.ModuleList([nn.Conv2d(C, 3 * C, 1), nn.Conv2d(C, C, 1)])


CHILDREN = {
    "nn.MultiheadAttention": make_mha,
    "nn.TransformerEncoderLayer": make_layer,
    "nn.TransformerDecoderLayer": make_decoder_layer,
    "convolutions": make_convolutions,
}


def find_mha_weights(mha: nn.MultiheadAttention, x, source, given: Given):
    """Return the weights of nn.MultiheadAttention and v, in float64, from its weights."""
    w, b = wide(mha.in_proj_weight).chunk(3), wide(mha.in_proj_bias).chunk(3)
    q, k, v = (
        (wide(t) @ w[i].T + b[i]).unflatten(-1, (mha.num_heads, -1))
        for i, t in enumerate((x, source, source))
    )
    if mha.add_zero_attn:
        k, v = (F.pad(t, (0, 0, 0, 0, 0, 1)) for t in (k, v))
        if given.allowed is not None:
            given = Given(None, F.pad(given.allowed, (0, 1), value=True))
    return compute_weights(q, k, given, scale=q.shape[-1] ** -0.5), v


def write_mha(block: Block, x, source, valid):
    """Run nn.MultiheadAttention, asking for its weights or not."""
    plan, mha = block.plan, block.child
    given, asked = Given(None, None), plan.softmax == "F.softmax"
    options: dict[str, Any] = {"need_weights": asked}
    if asked:
        options["average_attn_weights"] = plan.scale != "before"
    n_q, n_k = x.shape[1], source.shape[1]
    if plan.mask == "padding" and valid is not None and valid.shape[1] == n_k:
        given = Given(None, valid.bool()[:, None, None].expand(-1, -1, n_q, -1))
        options["key_padding_mask"] = ~valid.bool()
    elif plan.mask == "causal":
        seen = torch.arange(n_q)[:, None] >= torch.arange(n_k)
        given = Given(None, seen[None, None])
        options["attn_mask"] = ~seen
    axes = (0, 0) if mha.batch_first else (0, 1)
    parts = (t.transpose(*axes) for t in (x, source, source))
    out = mha(*parts, **options)[0].transpose(*axes)
    if block.book is not None:
        weights, v = find_mha_weights(mha, x, source, given)
        dropped = block.training and mha.dropout > 0
        if not dropped:
            heads = torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)
            bias = wide(mha.out_proj.bias)
            check_close(heads @ wide(mha.out_proj.weight).T + bias, out)
        block.tell(weights, where=("child",), changed=dropped)
    return x + out


def write_layer(block: Block, x, source, valid):
    """Run nn.TransformerEncoderLayer; in eval mode it takes its fast path."""
    plan, layer, given = block.plan, block.child, Given(None, None)
    options = {}
    if plan.mask == "padding" and valid is not None:
        n = x.shape[1]
        given = Given(None, valid.bool()[:, None, None].expand(-1, -1, n, -1))
        options["src_key_padding_mask"] = ~valid.bool()
    out = layer(x, **options)
    if block.book is not None:
        inner = layer.norm1(x) if layer.norm_first else x
        weights, _ = find_mha_weights(layer.self_attn, inner, inner, given)
        block.tell(weights, where=("child.self_attn", "child"))
    return out


def write_decoder_layer(block: Block, x, source, valid):
    """Run nn.TransformerDecoderLayer: it attends to the input and to the source."""
    layer = block.child
    out = layer(x, source)
    if block.book is not None:
        own, _ = find_mha_weights(layer.self_attn, x, x, Given(None, None))
        inner = layer.norm1(x + layer.self_attn(x, x, x, need_weights=False)[0])
        other, _ = find_mha_weights(
            layer.multihead_attn, inner, source, Given(None, None)
        )
        block.tell(own, where=("child.self_attn",), own=True)
        block.tell(other, where=("child.multihead_attn",))
    return out


def write_convolutions(block: Block, x, source, valid):
    """Attend over the pixels of an image, (B, C, N, 1), as vision models do."""
    project, give = block.child
    parts = project(x.mT[..., None]).flatten(2).chunk(3, 1)  # (B, C, N) each
    q, k, v = (t.unflatten(1, (block.plan.heads, -1)) for t in parts)
    weights = F.softmax(q.mT @ k * q.shape[2] ** -0.5, -1)
    out = v @ weights.mT  # (B, H, D, N)
    q, k, v = (t.permute(0, 3, 1, 2) for t in (q, k, v))
    tell_plain(block, q, k, v, Given(None, None), out.permute(0, 3, 1, 2))
    return x + give(out.flatten(1, 2)[..., None])[..., 0].mT


WRITINGS: dict[str, Callable[..., Tensor]] = {
    "spelled": write_spelled,
    "sdpa": write_sdpa,
    "sdpa, float mask and scale": write_sdpa_float_mask,
    "sdpa, is_causal": write_sdpa_causal,
    "sdpa, enable_gqa": write_sdpa_grouped,
    "sdpa, dropout": write_sdpa_dropout,
    "sdpa, three axes folded": write_sdpa_folded,
    "sdpa, three axes": write_sdpa_one_head,
    "sdpa, five axes": write_sdpa_windows,
    "sdpa, jagged": write_sdpa_jagged,
    "windows, five axes": write_windows,
    "baddbmm": write_baddbmm,
    "groups as an axis": write_grouped,
    "loop over heads": write_each_head,
    "loop over matrices, mm and addmm": write_each_matrix,
    "loop over sequences, folded": write_slices,
    "chunks of queries": write_chunks_of_queries,
    "chunks of keys": write_chunks_of_keys,
    "online, no softmax": write_online,
    "sink column": write_sink_column,
    "zero column": write_zero_column,
    "autograd.Function": write_autograd_function,
    "vmap": write_vmap,
    "vmap of vmap": write_vmap_of_heads,
    "checkpoint": write_checkpoint,
    "method of a helper": write_method,
    "two attentions": write_two,
    "difference of two": write_difference,
    "flattened": write_flattened,
    "linear pooling": write_linear_pooling,
    "sigmoid": write_sigmoid,
    "linear attention": write_linear,
    "softmaxes of q and k": write_efficient,
    "nn.MultiheadAttention": write_mha,
    "nn.TransformerEncoderLayer": write_layer,
    "nn.TransformerDecoderLayer": write_decoder_layer,
    "convolutions": write_convolutions,
}
