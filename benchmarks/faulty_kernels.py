"""Kernels with one fault each, drawn at random: what a judge of kernels must notice.

    fault = draw_fault(np.random.default_rng(seed))
    fn, convention = fault.kernel()          right but for the fault

A fault is a stage of the computation, a condition, and what happens where it holds:

    stage       q, k, v, scores, allowed, weights, out, lse; or a gradient of q, k, v
    condition   an index (head >= 8), a size (Nq == 1), a dtype, a value (score > 500)
    effect      zero, negated, halved, copied from index 0, shifted by one, …

Some change nothing, such as "negated where it is 0": faults.py looks for a call that
shows the fault. Nothing here knows the cases of the judge.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from regard.judge.convention import Convention

KINDS = ("index", "size", "dtype", "value")
AXES = {"q": "bhid", "k": "bgjd", "v": "bgje", "scores": "bhij", "allowed": "bhij",
        "weights": "bhij", "out": "bhie", "lse": "bhi"}  # fmt: skip
RANGES = {"b": 64, "h": 64, "g": 64, "i": 4096, "j": 4096, "d": 512, "e": 512}
NAMES = {"b": "batch", "h": "head", "g": "key head", "i": "query", "j": "key",
         "d": "column of q and k", "e": "column of v"}  # fmt: skip
SIZES = {"B": "b", "H": "h", "Nq": "i", "Nk": "j", "D": "d", "Dv": "e"}
TYPICAL = (*range(1, 17), 20, 24, 32, 40, 48, 64, 80, 96, 100, 128, 192, 200, 256, 512,
           1000, 1024, 2048, 4096)  # fmt: skip
DTYPES = {"numpy": ("float64", "float32", "float16"),
          "torch": ("float64", "float32", "float16", "bfloat16")}  # fmt: skip
SIGNATURES = {
    "plain": {},
    "masked": {"mask": "mask", "causal": "causal"},
    "full": {"mask": "mask", "causal": "causal", "q_start": "q_start", "bias": "bias",
             "scale": "scale", "softcap": "softcap", "sink": "sink"},
}  # fmt: skip
Test = Callable[[Any, "Call"], Any]  # the array of a stage to where the fault is
Rule = Callable[[Any], Any]
Condition = tuple[str, Test, dict[str, Any]]


@dataclass(frozen=True)
class Call:
    """What a condition may look at besides the array of its stage."""

    sizes: dict[str, int]  # B, H, Hk, Nq, Nk, D, Dv
    dtype: str
    scale: float


@dataclass(frozen=True)
class Fault:
    """One fault, in words and as functions."""

    kind: str
    library: str
    signature: str
    stage: str
    backward: bool  # only the gradient is wrong
    condition: str
    effect: str
    test: Test = field(repr=False, compare=False)
    change: Callable[[Any], Any] = field(repr=False, compare=False)
    wants: dict[str, Any] = field(repr=False, compare=False)  # of a call that shows it

    def __str__(self) -> str:
        what = f"the gradient of {self.stage}" if self.backward else self.stage
        where = f"{self.condition} ({self.library}, {self.signature})"
        return f"{what} {self.effect} where {where}"

    def apply(self, stage: str, x: Any, call: Call) -> Any:
        """Return the array of a stage, with the fault if it is the one."""
        if stage != self.stage:
            return x
        where = self.test(x, call)
        if self.library == "torch":
            where = torch.as_tensor(where)
            changed = x.detach() if self.backward else self.change(x)
            return torch.where(where, changed, x)
        return np.where(where, self.change(x), x).astype(x.dtype)

    def kernel(self) -> tuple[Callable[..., Any], Convention]:
        """Return the faulty kernel and its convention."""
        return make_kernel(self.library, self.signature, self.apply)


def make_kernel(
    library: str, signature: str, see: Callable[[str, Any, Call], Any]
) -> tuple[Callable[..., Any], Convention]:
    """Return an attention that shows every stage to a function, which may change it."""
    words: dict[str, Any] = dict(SIGNATURES[signature])
    convention = Convention(
        library=library,  # type: ignore[arg-type]
        shared_heads=True,
        returns=("out", "lse"),
        **words,
    )

    def plain(q: Any, k: Any, v: Any) -> Any:
        return attend(see, q, k, v)

    def masked(q: Any, k: Any, v: Any, *, mask: Any = None, causal: Any = False) -> Any:
        return attend(see, q, k, v, mask=mask, causal=causal)

    def full(
        q: Any, k: Any, v: Any, *, mask: Any = None, causal: Any = False,
        q_start: int = 0, bias: Any = None, scale: Any = None, softcap: Any = None,
        sink: Any = None,
    ) -> Any:  # fmt: skip
        options = {"mask": mask, "causal": causal, "q_start": q_start, "bias": bias}
        options |= {"scale": scale, "softcap": softcap, "sink": sink}
        return attend(see, q, k, v, **options)

    found = {"plain": plain, "masked": masked, "full": full}
    return found[signature], convention


def attend(
    see: Callable[[str, Any, Call], Any], q: Any, k: Any, v: Any, **options: Any
) -> Any:
    """The textbook attention, (B, H, N, D), in NumPy or PyTorch; out and lse."""
    tensor = isinstance(q, torch.Tensor)
    xp: Any = torch if tensor else np
    dtype = str(q.dtype).split(".")[-1]
    (batch, heads, n_q, width), (_, shared, n_k, _) = q.shape, k.shape
    scale = options.get("scale")
    scale = width**-0.5 if scale is None else scale
    sizes = {"B": batch, "H": heads, "Hk": shared, "Nq": n_q, "Nk": n_k, "D": width}
    call = Call(sizes | {"Dv": v.shape[-1]}, dtype, scale)
    q, k, v = (see(name, x, call) for name, x in (("q", q), ("k", k), ("v", v)))
    wide = xp.float64 if dtype == "float64" else xp.float32
    q, k, v = ((x.to(wide) if tensor else x.astype(wide)) for x in (q, k, v))
    repeat = torch.Tensor.repeat_interleave if tensor else np.repeat
    k, v = (repeat(x, heads // shared, 1) for x in (k, v))
    scores = see("scores", q * scale @ xp.swapaxes(k, -1, -2), call)
    cap, bias, sink = (options.get(name) for name in ("softcap", "bias", "sink"))
    logits = scores if cap is None else cap * xp.tanh(scores / cap)
    logits = logits if bias is None else logits + bias
    allowed = options.get("mask")
    if allowed is not None and (allowed.ndim != 4 or allowed.dtype != xp.bool):
        raise ValueError("mask: expected bool, (B, H, Nq, Nk)")
    if options.get("causal"):
        rows = xp.arange(n_q)[:, None] + options.get("q_start", 0)
        before = (xp.arange(n_k) <= rows)[None, None]
        allowed = before if allowed is None else allowed & before
    if allowed is not None:
        shape = (batch, heads, n_q, n_k)
        allowed = see("allowed", xp.broadcast_to(allowed, shape), call)
        unseen = ~allowed.any(1).any(1)[:, None, :, None]  # 0 · NaN
        v = xp.where(unseen, xp.zeros_like(v), v)
        low = xp.full_like(logits, -math.inf)
        logits = xp.where(allowed, xp.where(unseen[:, :, None, :, 0], low, logits), low)
    top = xp.amax(logits, -1)[..., None]
    if sink is not None:
        sink = sink.reshape(1, heads, 1, 1)
        top = xp.where(sink > top, sink, top)
    top = xp.where(xp.isneginf(top), xp.zeros_like(top), top)
    parts = xp.exp(logits - top)
    total = parts.sum(-1)[..., None]
    total = total if sink is None else total + xp.exp(sink - top)
    empty = total == 0
    total = xp.where(empty, xp.ones_like(total), total)
    weights = see("weights", parts / total, call)
    lse = xp.where(empty, xp.full_like(total, -math.inf), xp.log(total) + top)[..., 0]
    out = weights @ v
    out = out.to(getattr(torch, dtype)) if tensor else out.astype(dtype)
    return see("out", out, call), see("lse", lse, call)


def draw_fault(rng: np.random.Generator, kind: str) -> Fault:
    """Return a fault of a kind; it may be one that changes nothing."""
    library = str(rng.choice(["numpy", "torch"]))
    signature = str(rng.choice(list(SIGNATURES)))
    backward = library == "torch" and kind != "value" and rng.random() < 0.25
    stages = ["q", "k", "v"] if backward else list(AXES)
    if kind == "value" and rng.random() < 0.5:
        stages = ["scores"]
    stage = str(rng.choice(stages))
    make = {"index": by_index, "size": by_size, "dtype": by_dtype, "value": by_value}
    condition, test, wants = make[kind](rng, stage, library)
    if stage == "allowed":
        effect, change = draw_flip(rng)
    else:
        effect, change = draw_change(rng, stage)
    if backward:
        effect = "is lost"
    return Fault(kind, library, signature, stage, backward, condition, effect, test,
                 change, wants)  # fmt: skip


def log_uniform(rng: np.random.Generator, high: int) -> int:
    """Return a number from 1 to high, small ones as likely as large ones."""
    return int(np.exp(rng.uniform(0, np.log(high + 1))))


def by_index(rng: np.random.Generator, stage: str, _: str) -> Condition:
    """A condition on the index along one axis."""
    axes = AXES[stage]
    axis = str(rng.choice(list(axes)))
    relation = str(rng.choice([">=", "==", "%"]))
    at = log_uniform(rng, RANGES[axis] - 1)
    period = int(rng.integers(2, 17))
    rest = int(rng.integers(0, period))

    def test(x: Any, _: Call) -> Any:
        n = np.arange(x.shape[axes.index(axis)])
        found = {">=": n >= at, "==": n == at, "%": n % period == rest}[relation]
        return found.reshape([-1 if a == axis else 1 for a in axes])

    words = f"% {period} == {rest}" if relation == "%" else f"{relation} {at}"
    reach = period + 1 if relation == "%" else at + 2
    return f"{NAMES[axis]} {words}", test, {axis: reach}


def by_size(rng: np.random.Generator, _: str, __: str) -> Condition:
    """A condition on the sizes of a call."""
    name = str(rng.choice(list(SIZES)))
    axis = SIZES[name]
    high = RANGES[axis]
    n = int(rng.choice([x for x in TYPICAL if x <= high]))
    n = log_uniform(rng, high) if rng.random() < 0.2 else n
    block = int(rng.choice([2, 4, 8, 16, 32, 64, 128]))
    more = log_uniform(rng, high - 1)
    rules: list[tuple[str, Callable[[dict[str, int]], bool], dict[str, Any]]] = [
        (f"{name} == {n}", lambda s: s[name] == n, {axis: n}),
        (f"{name} > {more}", lambda s: s[name] > more, {axis: more + 2}),
        (f"{name} % {block}", lambda s: s[name] % block != 0, {axis: block + 1}),
        (f"not {name} % {block}", lambda s: s[name] % block == 0, {axis: block}),
        ("Nq == 1", lambda s: s["Nq"] == 1, {"i": 1, "j": 7}),
        ("Nq == 1 and Nk > 1", lambda s: s["Nq"] == 1 < s["Nk"], {"i": 1, "j": 9}),
        ("Nq != Nk", lambda s: s["Nq"] != s["Nk"], {"i": 3, "j": 5}),
        ("Nq < Nk", lambda s: s["Nq"] < s["Nk"], {"i": 3, "j": 5}),
        ("Nq > Nk", lambda s: s["Nq"] > s["Nk"], {"i": 5, "j": 3}),
        ("H != Hk", lambda s: s["H"] != s["Hk"], {"h": 4, "g": 2}),
        ("H == 4 Hk", lambda s: s["H"] == 4 * s["Hk"], {"h": 8, "g": 2}),
        ("Dv != D", lambda s: s["D"] != s["Dv"], {"d": 4, "e": 6}),
        ("Dv > D", lambda s: s["D"] < s["Dv"], {"d": 4, "e": 6}),
        ("B > 1 and H > 1", lambda s: s["B"] > 1 < s["H"], {"b": 2, "h": 3}),
        ("B · H > 200", lambda s: s["B"] * s["H"] > 200, {"b": 17, "h": 17}),
    ]
    weights = np.asarray([4, 4, 2, 2] + [1] * (len(rules) - 4), float)
    words, rule, wants = rules[rng.choice(len(rules), p=weights / weights.sum())]

    def test(_: Any, call: Call) -> Any:
        return np.asarray(rule(call.sizes))

    return words, test, wants


def by_dtype(rng: np.random.Generator, stage: str, library: str) -> Condition:
    """A condition on the dtype, and sometimes on an index as well."""
    dtype = str(rng.choice(DTYPES[library]))
    if rng.random() < 0.5:
        return dtype, lambda _, c: np.asarray(c.dtype == dtype), {"dtype": dtype}
    axis = str(rng.choice(list(AXES[stage])))
    at = min(log_uniform(rng, RANGES[axis] // 4), 128)

    def test(x: Any, call: Call) -> Any:
        n = np.arange(x.shape[AXES[stage].index(axis)]) >= at
        shape = [-1 if a == axis else 1 for a in AXES[stage]]
        return (n & (call.dtype == dtype)).reshape(shape)

    return f"{dtype} and {NAMES[axis]} >= {at}", test, {axis: at + 2, "dtype": dtype}


def by_value(rng: np.random.Generator, stage: str, library: str) -> Condition:
    """A condition on the numbers of a stage, or on the scale."""
    if rng.random() < 0.2:
        scale = float(rng.choice([0.0, -0.5]))

        def test(_: Any, call: Call) -> Any:
            return np.asarray(call.scale == 0 if scale == 0 else call.scale < 0)

        return (
            f"the scale is {'0' if scale == 0 else 'negative'}",
            test,
            {"scale": scale},
        )
    rules = list_mask_rules() if stage == "allowed" else list_rules(rng, stage, library)
    words, rule, wants = rules[rng.integers(len(rules))]
    return words, lambda x, _: rule(x), wants


def list_mask_rules() -> list[tuple[str, Rule, dict[str, Any]]]:
    """Return what may be special about a mask."""
    return [
        ("a row sees nothing", lambda x: ~x.any(-1)[..., None], {}),
        ("a row sees one key", lambda x: (x.sum(-1) == 1)[..., None], {}),
        ("a row sees all keys", lambda x: x.all(-1)[..., None], {}),
        ("a key is hidden from all", lambda x: ~x.any(-2)[..., None, :], {}),
        ("a head differs from head 0", lambda x: x != x[:, :1], {"h": 3}),
        ("a sequence differs from the first", lambda x: x != x[:1], {"b": 3}),
    ]


def list_rules(
    rng: np.random.Generator, stage: str, library: str
) -> list[tuple[str, Rule, dict[str, Any]]]:
    """Return what may be special about numbers."""
    xp: Any = torch if library == "torch" else np
    high = float(round(10 ** rng.uniform(0, 4), 1))  # of scores
    some = float(round(10 ** rng.uniform(-3, 2), 3))

    def tied(x: Any) -> Any:
        return (x == xp.amax(x, -1)[..., None]).sum(-1)[..., None] > 1

    found: list[tuple[str, Rule, dict[str, Any]]] = [
        (f"it is > {some}", lambda x: x > some, {"size": some}),
        (f"it is < -{some}", lambda x: x < -some, {"size": some}),
        ("it is 0", lambda x: x == 0, {"zeros": True}),
        ("it is negative", lambda x: x < 0, {}),
        ("it is NaN", xp.isnan, {"nan": True}),
        (f"it is within {some / 10:g}", lambda x: abs(x) < some / 10, {}),
    ]
    if stage != "scores":
        return found
    up, down = {"high": high}, {"high": -high}
    return found + 2 * [
        (f"it is > {high}", lambda x: x > high, up),
        (f"it is < -{high}", lambda x: x < -high, down),
        (f"all of a row are > {high}", lambda x: (x > high).all(-1)[..., None], up),
        (f"all of a row are < -{high}", lambda x: (x < -high).all(-1)[..., None], down),
        ("two are the largest", tied, {"zeros": True}),
    ]


def draw_flip(rng: np.random.Generator) -> tuple[str, Callable[[Any], Any]]:
    """What may happen to a mask."""
    found: list[tuple[str, Callable[[Any], Any]]] = [
        ("is ignored", lambda x: x | True),
        ("hides everything", lambda x: x & False),
        ("is inverted", lambda x: ~x),
        ("is read one query later", lambda x: roll(x, 2)),
        ("is read one key later", lambda x: roll(x, 3)),
        ("is that of head 0", lambda x: (x | True) & x[:, :1]),
        ("is that of the first sequence", lambda x: (x | True) & x[:1]),
    ]
    return found[rng.integers(len(found))]


def draw_change(
    rng: np.random.Generator, stage: str
) -> tuple[str, Callable[[Any], Any]]:
    """What may happen to numbers."""
    axis = int(rng.integers(len(AXES[stage])))
    name, size = NAMES[AXES[stage][axis]], float(rng.choice([0.5, 2.0, 0.9, 1.01]))
    found: list[tuple[str, Callable[[Any], Any]]] = [
        ("is 0", fill),
        ("is negated", lambda x: -x),
        (f"is multiplied by {size}", lambda x: size * x),
        (f"is copied from {name} 0", lambda x: first(x, axis)),
        (f"is that of the {name} before", lambda x: roll(x, axis)),
        (f"is averaged over {name}", lambda x: average(x, axis)),
        ("is clipped to 1", lambda x: x.clip(-1, 1)),
    ]  # fmt: skip
    if stage == "scores":
        found += [("is capped at 500", lambda x: x.clip(-500, 500)),
                  ("is hidden", lambda x: fill(x) - 1e9),
                  ("is scaled twice", lambda x: x / x.shape[-1] ** 0.5)]  # fmt: skip
    return found[rng.integers(len(found))]


def fill(x: Any) -> Any:
    """Return zeros, also where x is NaN."""
    return torch.zeros_like(x) if isinstance(x, torch.Tensor) else np.zeros_like(x)


def first(x: Any, axis: int) -> Any:
    """Return x with index 0 of an axis everywhere."""
    return fill(x) + x[(slice(None),) * axis + (slice(0, 1),)]


def average(x: Any, axis: int) -> Any:
    """Return the mean over an axis, everywhere."""
    return fill(x) + x.mean(axis)[(slice(None),) * axis + (None,)]


def roll(x: Any, axis: int) -> Any:
    """Return x moved by one along an axis."""
    return (
        torch.roll(x, 1, axis) if isinstance(x, torch.Tensor) else np.roll(x, 1, axis)
    )
