"""One rank of test_ring.py:  python ring_worker.py check|circle <rank> <world> <folder>

`check` compares every case with the definition, in groups of 2, 3 and 4 of the ranks,
and writes the errors down. `circle` goes round and round, until a rank is killed.
"""

import json
import sys
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

import regard
from regard import causal, masks, same, window
from regard.engine import ring

GROUPS = {2: [1, 3], 3: [0, 1, 3], 4: [0, 1, 2, 3]}  # a rank's number may change
START, PATIENCE = 100, 4  # seconds: for all to start, for a neighbour to answer
DOUBLE, SINGLE, HALF = torch.float64, torch.float32, torch.bfloat16


def stripes(n, world):
    """A placement of our own: many short runs, in no order."""
    runs = [range(i, min(i + 7, n)) for i in range(0, n, 7)]
    return tuple(tuple(reversed(runs[r::world])) for r in range(world))


def documents(n):
    return same(torch.arange(n) // 9 + 3 * (torch.arange(n) > n // 2))


BOTH = {"contiguous": ring.contiguous, "zigzag": ring.zigzag}
PLACES = BOTH | {"stripes": stripes}
MASKS = {
    "none": lambda n: None,
    "causal": lambda n: causal(),
    "window": lambda n: causal() & window(11),
    "documents": lambda n: causal() & documents(n),
    "empty rows": lambda n: causal() & ~window(3),
    "far apart": lambda n: causal() & (window(11) | masks.keys(0, 4)),
    "per head": lambda n: masks.per_head([causal(), window(5, 5), ~causal(), causal()]),
    "padding": lambda n: masks.padding(lengths=torch.tensor([n, n // 3])),
    "function": lambda n: regard.where(lambda b, h, q, k: (q + 2 * k) % 3 == 0),
}
SPARSE = ("causal", "window", "documents", "far apart")


@dataclass(frozen=True)
class Case:
    mask: str = "causal"
    n: int = 37
    place: str = "zigzag"
    shape: tuple[int, ...] = (2, 4, 2, 8, 8)  # B, H, Hk, D, Dv
    dtype: torch.dtype = DOUBLE
    sink: bool = False
    bias: bool = False
    scale: float | None = None

    @property
    def formula(self):
        return MASKS[self.mask](self.n)

    @property
    def slopes(self):
        heads = torch.arange(self.shape[1])
        return masks.alibi(2.0**-heads) if self.bias else None


CASES = [
    *(Case(m, 37, p) for m in MASKS for p in BOTH),
    *(Case(m, n, p) for m in list(MASKS)[:5] for n in (50, 64) for p in BOTH),
    *(Case(m, place="stripes") for m in MASKS),
    *(Case(m, 700, p, (1, 2, 1, 8, 8)) for m in SPARSE for p in BOTH),  # many tiles
    *(Case(n=n, place=p) for n in (1, 5) for p in PLACES),  # some ranks hold nothing
    *(Case(shape=s) for s in [(1, 4, 1, 8, 8), (1, 3, 3, 8, 5), (1, 2, 1, 4, 8)]),
    *(Case(m, sink=True) for m in ("causal", "empty rows")),
    *(Case(m, place=p, bias=True) for m in ("none", "causal") for p in PLACES),
    *(Case(m, 64, dtype=d) for m in ("causal", "window") for d in (SINGLE, HALF)),
    *(Case(m, scale=s) for m in ("causal", "window") for s in (-1.0, 0.0)),
]


def run(attend, arrays, pulls):
    """Return out, lse and the gradients of the arrays, all in float64."""
    leaves = [x.detach().clone().requires_grad_() for x in arrays]
    done = attend(*leaves)
    slopes = torch.autograd.grad((done.out, done.lse), leaves, pulls)
    return [x.detach().double() for x in (done.out, done.lse, *slopes)]


@cache  # the same for all groups
def define(case):
    """Return the whole sequence, what pulls at out and lse, and what must come out."""
    b, h, hk, d, dv = case.shape
    torch.manual_seed(case.n)
    sizes = (b, h, case.n, d), (b, hk, case.n, d), (b, hk, case.n, dv)
    arrays = [torch.randn(size).to(case.dtype).double() for size in sizes]
    arrays += [torch.randn(h, dtype=DOUBLE)] if case.sink else []

    def attend(q, k, v, sink=None):
        options = {"bias": case.slopes, "sink": sink, "scale": case.scale}
        return regard.attention(q, k, v, case.formula, **options)

    lse = attend(*arrays).lse
    pull = torch.where(lse == -torch.inf, 0, torch.randn(lse.shape, dtype=DOUBLE))
    pulls = [torch.randn(b, h, case.n, dv, dtype=DOUBLE), pull]
    return arrays, pulls, run(attend, arrays, pulls)


def measure(case, group):
    """Return how far each result of this rank is from the definition."""
    places = PLACES[case.place](case.n, dist.get_world_size(group))
    mine = ring.list_positions(places[dist.get_rank(group)])

    def attend(q, k, v, sink=None):
        options = {"bias": case.slopes, "sink": sink, "scale": case.scale}
        options["group"] = group
        return ring.attend(q, k, v, case.formula, places=places, **options)

    (q, k, v, *sinks), (pull, pull_lse), expected = define(case)
    *qkv, pull = (x[:, :, mine].to(case.dtype) for x in (q, k, v, pull))
    wide = SINGLE if case.dtype == HALF else case.dtype  # of lse and sinks
    *sinks, pull_lse = (x.to(wide) for x in (*sinks, pull_lse[:, :, mine]))
    found = run(attend, [*qkv, *sinks], [pull, pull_lse])
    if case.sink:  # it is shared: every rank has a part of its gradient
        dist.all_reduce(found[5], group=group)
    expected = [*(x[:, :, mine] for x in expected[:5]), *expected[5:]]
    names = ("out", "lse", "dq", "dk", "dv", "dsink")[: len(expected)]
    return dict(zip(names, map(find_error, found, expected), strict=True))


def find_error(x, y):
    """Return the largest difference; infinities must be the same."""
    finite = y.isfinite()
    if x.shape != y.shape or not torch.equal(x[~finite], y[~finite]):
        return torch.inf
    return (
        (x - y)[finite].abs().nan_to_num(torch.inf).max().item() if finite.any() else 0
    )


def check(rank, folder):
    groups = {world: dist.new_group(ranks) for world, ranks in GROUPS.items()}
    rows = [
        {"world": world, "rank": rank, "case": str(case), "dtype": str(case.dtype)}
        | {"errors": measure(case, groups[world])}
        for world, ranks in GROUPS.items()
        if rank in ranks
        for case in CASES
    ]
    (folder / f"result{rank}.json").write_text(json.dumps(rows))
    dist.barrier()


def circle(rank, folder):
    group = dist.new_group(timeout=timedelta(seconds=PATIENCE))
    places = ring.zigzag(3000, dist.get_world_size())
    n = len(ring.list_positions(places[rank]))
    x = torch.randn(1, 2, n, 16, requires_grad=True)
    try:
        while True:
            done = ring.attend(x, x, x, causal(), places=places, group=group)
            (done.out.sum() + done.lse.sum()).backward()
            (folder / f"round{rank}").touch()
    except RuntimeError as error:
        (folder / f"error{rank}").write_text(str(error))


if __name__ == "__main__":
    mode, rank, world, folder = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=int(rank),
        world_size=int(world),
        timeout=timedelta(seconds=START),
    )
    {"check": check, "circle": circle}[mode](int(rank), Path(folder))
