"""The registry of head statistics, one entry each: the only list of their names.

    request      (record, tokens) -> what to compute for each query, (H, Nq)
                 Ask, DirectAsk runs in one plan with the others (plan.py)
                 a reducer      reads every weight, in one walk (tile_walk.py)
                 None           the record does not have the statistic
    reduction    one number for each head: the mean, or the max, over its queries;
                 queries without a value (NamedArray.missing) are skipped
    enough       how many queries need a value; with fewer, the number is shown with
                 the words `too_few`, and there is no badge (few_queries.py)

The table, the terminal, the map, the atlas, the command line and the documentation read
these entries, in this order. To add a statistic, add an entry here, or register one at
run time, in a module that the worker processes of an atlas can import:

    register(Statistic(name="last", unit="weight", request=ask_last, description="…"))

Next: table.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from regard.arrays import to_numpy
from regard.errors import OptionError
from regard.masks.patterns import window
from regard.recording.record import Record
from regard.stats.cells import ask_induction, ask_offset
from regard.stats.kernel_pass import has_kernels
from regard.stats.named_array import NamedArray
from regard.stats.over_queries import to_float64
from regard.stats.plan import Ask, DirectAsk
from regard.stats.rows import (
    ask_entropy,
    ask_masked_mass,
    ask_mass,
    ask_mean_distance,
    ask_measure,
)

Tokens = Sequence[int]  # of the whole sequence, by position; () if unknown
PLACE = ("sequence", "layer", "name", "head")  # the first columns of a table
LOST = "nan_rows"  # the last column: how many queries have NaN in some statistic
NEAR = 64  # tokens that count as local
# n values from 0 to 1 have a mean with a standard error of at most 0.5 / √n: here 0.1,
# which is the threshold of the badge
REPEATS = 25


@dataclass(frozen=True, kw_only=True)
class Badge:
    """A label for heads whose value is at least a threshold."""

    label: str
    least: float
    light: str = "#5b5f66"  # colour on a light page
    dark: str = "#c3c7ce"
    keys: int = 0  # minimum length; shorter sequences have no badge
    unless: str = ""  # a statistic whose badge implies this one


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """The definition of one statistic and how it is displayed."""

    name: str  # of the column and the option
    description: str  # of the value of one query
    request: Callable[[Record, Tokens], Any]
    unit: str = "weight"  # a share of the attention; until_interval waits for these
    reduction: Literal["mean", "max"] = "mean"
    limits: Callable[[int], tuple[float, float]] | None = None  # of a query, by length
    forced: int = 1  # first queries with a trivial value: no examples in an atlas
    label: str = ""  # in menus; defaults to the name
    ascending: bool = False  # sort heads from the smallest value
    badge: Badge | None = None
    charted: bool = False  # drawn by default by draw_table and plot_table
    ranked: bool = False  # `regard show` names the head with the largest value
    in_atlas: bool = True  # measured by an atlas by default
    enough: int = 0  # queries that need a value
    too_few: str = "too few queries have a value to tell"

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name in (*PLACE, LOST):
            raise OptionError(
                f"a statistic is named {self.name!r}, expected a Python identifier "
                f"other than {', '.join((*PLACE, LOST))}."
            )
        if self.reduction not in ("mean", "max"):
            raise OptionError(
                f'{self.name} has the reduction {self.reduction!r}, expected "mean" or '
                '"max".'
            )

    @property
    def is_weight(self) -> bool:
        """Whether the value is a share of the attention, between 0 and 1."""
        return self.unit == "weight"

    def bound(self, length: int) -> tuple[float, float]:
        """Return the smallest and largest possible value of a query, by length."""
        if self.limits is not None:
            return self.limits(length)
        return (0.0, 1.0) if self.is_weight else (-math.inf, math.inf)

    @property
    def counted(self) -> str:
        """The unit as written after a number."""
        return "of the weight" if self.is_weight else self.unit

    @property
    def summary(self) -> str:
        """The description of a head's value."""
        mean = ", mean over queries" if self.reduction == "mean" else ""
        return self.description + mean

    def pack(self) -> dict[str, Any]:
        """Return what a web page needs, ready for JSON."""
        names = ("name", "unit", "description", "summary", "ascending")
        packed = {name: getattr(self, name) for name in names}
        badge = None if self.badge is None else asdict(self.badge)
        few = {"enough": self.enough, "tooFew": self.too_few}
        return packed | few | {"label": self.label or self.name, "badge": badge}


STATISTICS: dict[str, Statistic] = {}


def register(statistic: Statistic) -> None:
    """Add a statistic to every table, view, atlas and help text of this process."""
    if statistic.name in STATISTICS:
        raise OptionError(
            f"there is a statistic {statistic.name!r} already, expected another name. "
            f"To replace it, write unregister({statistic.name!r}) first."
        )
    STATISTICS[statistic.name] = statistic


def unregister(name: str) -> None:
    """Remove a statistic."""
    del STATISTICS[find_statistic(name).name]


@contextmanager
def registered(statistic: Statistic) -> Iterator[None]:
    """Register a statistic for the duration of a with block."""
    register(statistic)
    try:
        yield
    finally:
        unregister(statistic.name)


def find_statistic(name: str) -> Statistic:
    """Return the entry of a statistic."""
    if name not in STATISTICS:
        raise OptionError(
            f"there is no statistic {name!r:.40}, expected one of "
            f"{', '.join(STATISTICS)}. If it is yours, import the module that "
            "registers it."
        )
    return STATISTICS[name]


def list_statistics() -> tuple[Statistic, ...]:
    """Return all entries in column order."""
    return tuple(STATISTICS.values())


def list_added(names: Iterable[str]) -> list[Statistic]:
    """Return the entries to send to a worker process, which has the built-in ones."""
    added = [x for x in map(find_statistic, names) if BUILT_IN.get(x.name) is not x]
    for entry in added:
        for function in filter(None, (entry.request, entry.limits)):
            name = f"{function.__module__}.{getattr(function, '__qualname__', '<>')}"
            if "<" in name or name.startswith("__main__."):  # <lambda>, <locals>
                raise OptionError(
                    f"the statistic {entry.name!r} cannot be sent to a worker process, "
                    f"which cannot import {name}. Define it at the top of a module, or "
                    'use the runner "loop".'
                )
    return added


def ask_bits(record: Record) -> Ask | DirectAsk:
    """Return a request for the entropy of the rows in bits."""
    ask = ask_entropy(record)

    def convert(named: NamedArray) -> NamedArray:
        return replace(named, values=to_float64(named) / math.log(2))

    if isinstance(ask, DirectAsk):
        return replace(ask, compute=lambda: convert(ask.compute()))
    return replace(ask, finish=lambda *sums: convert(ask.finish(*sums)))


def ask_if_known(record: Record, tokens: Tokens) -> Ask | DirectAsk | None:
    """Return a request for the weights on induction targets, if tokens are known."""
    last = int(to_numpy(record.q_positions).max(initial=-1))
    return ask_induction(record, tokens) if len(tokens) > last else None


def reduce_logits(record: Record, _: Tokens) -> Any:
    """Return a request for the largest logit, or the reducer that finds it."""
    if has_kernels(record):
        return ask_measure(record, "largest_logit")
    from regard.stats.reducers import LargestLogit  # noqa: PLC0415 (it needs torch)

    return LargestLogit()


for entry in (
    Statistic(
        name="entropy",
        unit="bits",
        description="entropy of the query's weights",
        request=lambda record, _: ask_bits(record),
        limits=lambda length: (0.0, math.log2(length)),
        charted=True,
    ),
    Statistic(
        name="sink",
        description="weight on the first key",
        request=lambda record, _: ask_mass(
            record, (to_numpy(record.k_positions) == 0)[:, None]
        ),
        badge=Badge(label="sink", least=0.5),
        charted=True,
        ranked=True,
    ),
    Statistic(
        name="previous",
        description="weight on the token before",
        request=lambda record, _: ask_offset(record, 1),
        forced=2,  # the second token's only earlier key may be a sink
        label="previous token",
        badge=Badge(label="prev", least=0.3, light="#0b61a4", dark="#8cc7ff"),
        ranked=True,
    ),
    Statistic(
        name="self",
        description="weight on the token itself",
        request=lambda record, _: ask_offset(record, 0),
    ),
    Statistic(
        name="induction",
        description="weight on the key after the last same token",
        request=ask_if_known,
        badge=Badge(label="ind", least=0.1, light="#a8320a", dark="#ffb08a"),
        ranked=True,
        enough=REPEATS,
        too_few="tokens repeat too rarely to tell",
    ),
    Statistic(
        name="local",
        description=f"weight on the last {NEAR} tokens",
        request=lambda record, _: ask_masked_mass(record, window(NEAR - 1)),
        forced=NEAR,
        badge=Badge(
            label="local",
            least=0.8,
            light="#1c6e45",
            dark="#8ee0b0",
            keys=4 * NEAR,  # in a short text, 64 tokens are everything
            unless="previous",  # a previous-token head is always local
        ),
    ),
    Statistic(
        name="distance",
        unit="tokens",
        description="how far back the mean key is",
        request=lambda record, _: ask_mean_distance(record),
        limits=lambda length: (1.0 - length, length - 1.0),  # keys may be later
        charted=True,
    ),
    Statistic(
        name="logit",
        unit="logit",
        description="the largest logit of all queries, after a softcap and with a bias",
        request=reduce_logits,
        reduction="max",
        label="largest logit",
        in_atlas=False,  # needs a walk, and its mean has little meaning
    ),
):
    register(entry)

BUILT_IN = dict(STATISTICS)
