"""Plan the kernel calls of many statistics, and their cost, before anything runs.

    plan = make_plan({"system": ask_mass(record, x), "entropy": ask_entropy(record)})
    print(plan)           the kernel calls; a forward call of the record costs 1
    found = plan.run()    {"system": …, "entropy": …}

An Ask requests a statistic: features of the keys, or of the queries, and a function of
their sums. Asks of the same record, side and mask are concatenated up to the width of
the kernel, so 64 features cost as much as one. A DirectAsk does not use the kernel. On
a GPU, a pass (kernel_pass.py) replaces that kernel, and a RowMeasure the features.

Next: rows.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from regard.arrays import Array, namespace
from regard.errors import OptionError
from regard.kernels.available import FEATURES
from regard.masks.algebra import Mask
from regard.recording.record import Record
from regard.recording.row_sums import blank_wrong_sums
from regard.stats.kernel_pass import KernelPass, RowMeasure, has_kernels
from regard.stats.mask_layout import count_cells
from regard.stats.named_array import NamedArray
from regard.stats.replay import KernelReplay, replay_columns, replay_rows

Finish = Callable[[Array, Array], NamedArray]  # of sums (H, N, F) and totals (H, N)


@dataclass(frozen=True, kw_only=True, eq=False)
class Ask:
    """A request for a statistic on the kernel: the features, and how to finish."""

    record: Record
    side: Literal["rows", "columns"]
    features: Array | RowMeasure | None  # (1 or heads, N, F); None: the weights alone
    finish: Finish
    within: Mask | None = None  # restricts the cells, if side is "rows"
    unit: Record | None = None  # whose forward call costs 1; by default, `record`

    @property
    def width(self) -> int:
        """The number of features."""
        if isinstance(self.features, RowMeasure):
            return 1
        return 0 if self.features is None else int(self.features.shape[-1])


@dataclass(frozen=True, kw_only=True, eq=False)
class DirectAsk:
    """A request for a statistic that does not need the kernel, or cannot use it."""

    what: str
    cost: float  # in forward calls
    compute: Callable[[], NamedArray]


@dataclass(frozen=True)
class FeatureBlock:
    """Some features of one statistic."""

    name: str
    ask: Ask
    first: int
    last: int  # one past it

    def cut(self) -> Array | RowMeasure | None:
        """Return these features, (1 or heads, N, F)."""
        found = self.ask.features
        if found is None or isinstance(found, RowMeasure):
            return found
        return found[..., self.first : self.last]


@dataclass(frozen=True)
class KernelCall:
    """One call of the kernel."""

    pieces: tuple[FeatureBlock, ...]

    @property
    def ask(self) -> Ask:
        """The first of the asks that share the call."""
        return self.pieces[0].ask

    @property
    def cost(self) -> float:
        """The cells that it computes, as a fraction of those of the forward call."""
        ask = self.ask
        if ask.within is None and ask.unit is None:
            return 1.0
        whole = count_cells(ask.record if ask.unit is None else ask.unit)
        return count_cells(ask.record, ask.within) / max(1, whole)

    def __str__(self) -> str:
        ask, n = self.ask, sum(piece.last - piece.first for piece in self.pieces)
        width = find_width(ask)
        sums = f"{n} of {width} features" if n else "lse alone"
        roles = "the keys look" if ask.side == "columns" else "the queries look"
        inside = "" if ask.within is None else f" within {ask.within!r}"
        return f"{ask.record.name}: {roles}{inside}, {sums}"

    def run(
        self, call: KernelReplay | KernelPass
    ) -> Iterator[tuple[str, Array, Array]]:
        """Yield the sums and the totals of each piece."""
        sums, total = call.answer([piece.cut() for piece in self.pieces])
        if self.ask.side == "rows" and self.ask.within is None:
            sums, total = blank_wrong_sums(self.ask.record, sums, total)
        at = 0
        for piece in self.pieces:
            n = piece.last - piece.first
            yield piece.name, sums[..., at : at + n], total
            at += n


@dataclass(frozen=True)
class KernelPlan:
    """The kernel calls that compute all requested statistics."""

    asks: Mapping[str, Ask | DirectAsk]
    steps: tuple[KernelCall, ...]

    @property
    def cost(self) -> float:
        """The total cost in forward calls of the record, or of all records together."""
        direct = [ask.cost for ask in self.asks.values() if isinstance(ask, DirectAsk)]
        return sum(step.cost for step in self.steps) + sum(direct)

    def run(self) -> dict[str, NamedArray]:
        """Compute every statistic."""
        parts: dict[str, list[tuple[Array, Array]]] = {}
        call, key = None, None
        for step in self.steps:
            if call is None or name_call(step.ask) != key:
                call, key = make_call(step.ask), name_call(step.ask)
            for name, sums, total in step.run(call):
                parts.setdefault(name, []).append((sums, total))
        return {name: self.finish(name, parts.get(name, [])) for name in self.asks}

    def finish(self, name: str, parts: list[tuple[Array, Array]]) -> NamedArray:
        """Return a statistic, computed from its sums."""
        ask = self.asks[name]
        if isinstance(ask, DirectAsk):
            return ask.compute()
        sums, total = parts[0]
        if len(parts) > 1:
            sums = namespace(x=sums).concat([part for part, _ in parts], axis=-1)
        return ask.finish(sums, total)

    def __str__(self) -> str:
        lines = [
            f"{step.cost:6.2f}  {step}: {', '.join(p.name for p in step.pieces)}"
            for step in self.steps
        ]
        lines += [
            f"{ask.cost:6.2f}  {ask.what}: {name}"
            for name, ask in self.asks.items()
            if isinstance(ask, DirectAsk)
        ]
        return "\n".join([*lines, f"{self.cost:6.2f}  forward calls in all"])


def make_plan(asks: Mapping[str, Ask | DirectAsk]) -> KernelPlan:
    """Concatenate the features of all asks into as few kernel calls as possible."""
    groups: dict[tuple[object, ...], list[FeatureBlock]] = {}
    for name, ask in asks.items():
        if isinstance(ask, Ask):
            groups.setdefault(name_call(ask), []).append(
                FeatureBlock(name, ask, 0, ask.width)
            )
        elif not isinstance(ask, DirectAsk):
            raise OptionError(
                f"{name} is a {type(ask).__name__}, expected a question. "
                "Write ask_entropy(record), not entropy(record)."
            )
    steps = [step for pieces in groups.values() for step in fill_steps(pieces)]
    return KernelPlan(asks, tuple(steps))


def fill_steps(pieces: list[FeatureBlock]) -> list[KernelCall]:
    """Split features into calls of at most the kernel's width, the widest first."""
    width = room = find_width(pieces[0].ask)
    calls: list[list[FeatureBlock]] = [[]]
    for piece in sorted(pieces, key=lambda piece: -piece.last):
        first = 0
        while first < piece.last:
            if not room:
                calls.append([])
                room = width
            last = min(piece.last, first + room)
            calls[-1].append(replace(piece, first=first, last=last))
            room, first = room - (last - first), last
    calls[0] += [piece for piece in pieces if not piece.last]  # all calls return totals
    return [KernelCall(tuple(call)) for call in calls]


def name_call(ask: Ask) -> tuple[object, ...]:
    """Return a key; asks with equal keys can share calls."""
    return id(ask.record), ask.side, ask.within


def make_call(ask: Ask) -> KernelReplay | KernelPass:
    """Prepare the arrays of a call."""
    if has_kernels(ask.record):
        return KernelPass(ask.record, ask.side, ask.within)
    if ask.side == "columns":
        return replay_columns(ask.record)
    return replay_rows(ask.record, ask.within)


def find_width(ask: Ask) -> int:
    """Return how many features fit in one call."""
    if has_kernels(ask.record):
        return FEATURES
    more = ask.side == "columns" and ask.record.softcap is None
    return int(ask.record.q.shape[-1]) + more


def answer_one(ask: Ask | DirectAsk) -> NamedArray:
    """Compute a single statistic."""
    return make_plan({"": ask}).run()[""]
