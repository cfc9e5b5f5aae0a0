"""Search: draw calls at random until one is wrong, and find the smallest such call.

    Search(seconds=300, like=read_like("q=8x32x1024x128,kv=8"), seed=0, start=0)

The call with number i depends only on the seed and on i, so a search can be continued
at any number, and repeated. Sizes are next to multiples of tiles, or given.

Next: call_cases.py
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from regard.errors import OptionError
from regard.judge.calls import AttentionCall, ask_call, fit_call
from regard.judge.case import Examiner
from regard.judge.convention import Attention, Convention, describe_convention
from regard.judge.difference import Difference
from regard.judge.inputs import NotAskedError
from regard.judge.precision import settle_precision
from regard.judge.subject import Subject

TILES = (8, 16, 32, 64, 128, 256, 512, 1024)
SHARES = (1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)  # query heads of a key head
WIDTHS = (1, 2, 4, 8, 16, 24, 32, 40, 64, 72, 80, 96, 100, 128, 160, 192, 256, 320)
CELLS = 2**17  # maximum number of scores of a call; 64 times that with given sizes
FEW, FEW_COMPILED = 250, 12  # calls of a level
TRIES = 500  # calls to make a wrong one smaller
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


@dataclass
class Search:
    """How long to search, for what, and how far it came."""

    seconds: float = 0  # 0: a fixed number of calls
    like: AttentionCall | None = None  # sizes to prefer
    seed: int = 0
    start: int = 0  # number of the first call
    asked: int = 0

    def __str__(self) -> str:
        if not self.asked:
            return "none"
        then = self.start + self.asked
        says = f"searched {self.asked:,} calls, seed {self.seed}"
        return f"{says}; continue with --start {then}" if self.seconds else says

    def ask(self, e: Examiner) -> Difference | None:
        """Ask calls until one is wrong or the time is over; return the smallest."""
        end, few = time.monotonic() + self.seconds, FEW
        if e.subject.library.compiles:
            few = FEW_COMPILED
        while time.monotonic() < end if self.seconds else self.asked < few:
            rng = np.random.default_rng([self.seed, self.start + self.asked])
            self.asked += 1
            call = draw_random(rng, e.subject.offered)
            if self.like is not None:
                call = prefer_sizes(rng, call, self.like)
            large = CELLS * (64 if self.like else 8 if self.seconds else 1)
            call = fit_call(e, limit_size(call, large))
            try:
                found = ask_call(e, call)
            except NotAskedError:
                continue
            if found is not None:
                return shrink(e, found)
        return None


def draw_random(rng: np.random.Generator, precisions: tuple[str, ...]) -> AttentionCall:
    """Return a random call: most options are off, so that a few meet."""

    def chance(p: float) -> bool:
        return bool(rng.random() < p)

    def pick(values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    group, shared, width = pick(SHARES), pick((1, 2, 2, 3, 4, 5, 8)), pick(WIDTHS)
    n_q, n_k = 1 if chance(0.25) else draw_count(rng), draw_count(rng)
    call = AttentionCall(
        batch=pick((1, 1, 2, 2, 3, 4, 5, 8, 17)),
        heads=group * shared,
        shared=shared,
        n_q=n_k if chance(0.3) else n_q,
        n_k=n_k,
        width=width,
        columns=width if chance(0.7) else pick(WIDTHS),
        causal=chance(0.45),
        window=pick((0, 1, 3, 16, 63, 64, 128, 200)) if chance(0.25) else None,
        mask=pick(("cells", "rows")) if chance(0.25) else "",
        bias=chance(0.15),
        one=pick(("b", "h", "bh", "hq", "bhq")) if chance(0.3) else "",
        softcap=pick((1.5, 20.0)) if chance(0.12) else None,
        sink=chance(0.12),
        scale=pick((0.5, 0.8, 1.5)) * width**-0.5 if chance(0.15) else None,
        values=pick(("", "ties", "aimed")),
        precision=pick(precisions) if chance(0.35) else "",
        seed=int(rng.integers(2**31)),
    )
    if chance(0.3):
        hows = ("swapped", "part", "grown", "columns", "expanded")
        names = [x for x in ("q", "k", "v", "mask", "bias") if chance(0.4)]
        call = replace(call, strides=tuple((x, pick(hows)) for x in names))
    if chance(0.3):
        only = pick(("q", "k", "v", "qk", "kv")) if chance(0.4) else "qkv"
        how = pick(("", "", "ones", "swapped", "twice"))
        call = replace(call, backward=how, only=only)
    return call if call.mask or call.bias else replace(call, one="")


def draw_count(rng: np.random.Generator) -> int:
    """Return a small number of tokens, or one next to a multiple of a tile."""
    if rng.random() < 0.3:
        return int(rng.integers(1, 18))
    tile = int(rng.choice(TILES))
    times = int(rng.integers(1, 1 + max(1, 512 // tile)))
    return tile * times + int(rng.choice((-1, 0, 0, 1)))


def prefer_sizes(
    rng: np.random.Generator, call: AttentionCall, like: AttentionCall
) -> AttentionCall:
    """Return the call with some of the sizes of another."""
    pairs = {"heads": "shared", "width": "columns"}
    for name in ("batch", "heads", "n_q", "n_k", "width"):
        if rng.random() < 0.6:
            for each in {name, pairs.get(name, name)}:
                call = change(call, each, getattr(like, each))
    return call


def limit_size(call: AttentionCall, cells: int) -> AttentionCall:
    """Return the call with fewer sequences, heads, or tokens if it is too large."""
    while True:
        tokens = call.n_q * call.n_k + (call.n_q + call.n_k) * call.width
        if call.batch * call.heads * tokens <= cells or call.n_q == call.n_k == 1:
            return call
        if call.batch > 1:
            call = replace(call, batch=call.batch // 2)
        elif call.shared > 1 or (call.heads > 1 and not call.shared):
            half = max(1, (call.shared or call.heads) // 2)
            group = call.heads // (call.shared or call.heads)
            kept = half if call.shared else 0
            call = replace(call, heads=half * group, shared=kept)
        elif call.n_q >= call.n_k:
            call = replace(call, n_q=max(1, call.n_q // 2))
        else:
            call = replace(call, n_k=call.n_k // 2)


def read_like(text: str) -> AttentionCall:
    """Return the sizes in "q=8x32x1024x128,kv=8": B, H, Nq, D, and the key heads."""
    match = re.fullmatch(r"q=(\d+)x(\d+)x(\d+)x(\d+)(?:,kv=(\d+))?", text)
    sizes = [int(n or 0) for n in match.groups()] if match else [0]
    if not all(sizes[:4]) or sizes[1] % (sizes[4] or 1):
        raise OptionError(
            f'like="{text}", expected B x H x Nq x D, and the number of key heads, '
            'which divides H. Write like="q=8x32x1024x128,kv=8".'
        )
    batch, heads, n, width, shared = sizes
    call = AttentionCall(batch=batch, heads=heads, shared=shared, n_q=n, n_k=n)
    return replace(call, width=width, columns=width)


def read_seconds(given: str | float) -> float:
    """Return the seconds in "5m", "90s", "1h" or a number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(given).strip())
    if not match:
        raise OptionError(f'search="{given}", expected a time. Write search="5m".')
    return float(match[1]) * UNITS[match[2]]


def shrink(e: Examiner, found: Difference) -> Difference:
    """Return the difference of the smallest wrong call that can be reached."""
    tries = 0
    while tries < TRIES:
        for smaller in list_simpler(found.call):
            call = fit_call(e, smaller)
            if call == found.call or weigh(call) >= weigh(found.call):
                continue
            tries += 1
            try:
                other = ask_call(e, call)
            except NotAskedError:
                continue
            if other is not None:
                found = other
                break
        else:
            return found
    return found


def write_repeated(subject: Subject, call: AttentionCall) -> str:
    """Return code that asks a call again."""
    fn = subject.form.fn
    name = getattr(fn, "__name__", "attend")
    own = (x for x in fields(call) if getattr(call, x.name) != x.default)
    given = ", ".join(f"{x.name}={getattr(call, x.name)!r}" for x in own)
    return (
        "from regard.judge import AttentionCall, Convention, Projections, Storage\n"
        "from regard.judge import repeat_call\n"
        f"from {getattr(fn, '__module__', 'my_code')} import {name}\n\n"
        f"convention = Convention({describe_convention(subject.convention)})\n"
        f"found = repeat_call({name}, convention, AttentionCall({given}))\n"
        "print(found.says, found.yours, found.expected, sep='\\n')\n"
        "found.arguments.q, found.arguments.k, found.arguments.v  # as NumPy arrays"
    )


def repeat_call(
    fn: Attention, convention: Convention, call: AttentionCall
) -> Difference | None:
    """Return how the answer to one call differs from the definition, or None."""
    subject = Subject(fn, convention)
    settle_precision(subject)
    return ask_call(Examiner(subject, np.random.default_rng(0)), call)


def weigh(call: AttentionCall) -> tuple[int, int]:
    """Return how large a call is: the number of its options, then its sizes."""
    sizes = (call.batch, call.heads, call.shared, call.n_q, call.n_k, call.width)
    return len(call.options()) + bool(call.values), sum(sizes) + call.columns


def list_simpler(call: AttentionCall) -> Iterator[AttentionCall]:
    """Yield calls with one option less, or with one size that is smaller."""
    for name in call.options():
        default = AttentionCall.__dataclass_fields__[name].default
        yield change(call, name, default)
    yield replace(call, values="")
    if len(call.strides) > 1:
        yield from (replace(call, strides=(x,)) for x in call.strides)
    group = call.heads // (call.shared or 1)
    for n in smaller_numbers(call.shared or call.heads):
        yield replace(
            call, heads=n * group if call.shared else n, shared=n * bool(call.shared)
        )
    if call.shared:
        yield replace(call, heads=call.shared, shared=0)
        for n in smaller_numbers(group):
            yield replace(call, heads=n * call.shared)
    for n in smaller_numbers(max(call.n_q, call.n_k)):
        yield replace(call, n_q=min(n, call.n_q), n_k=min(n, call.n_k))
    for n in smaller_numbers(max(call.width, call.columns)):
        yield replace(call, width=min(n, call.width), columns=min(n, call.columns))
    for name in ("batch", "n_q", "n_k", "width", "columns"):
        for n in smaller_numbers(getattr(call, name)):
            yield change(call, name, n)


def change(call: AttentionCall, name: str, value: Any) -> AttentionCall:
    """Return the call with another value of one field."""
    return replace(call, **{name: value})


def smaller_numbers(n: int) -> Iterator[int]:
    """Yield numbers from 1 to n - 1: the smallest, then ever closer to n."""
    step = max(0, n - 1)
    while step:
        yield n - step
        step //= 2
