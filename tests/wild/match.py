"""Find every recorded matrix among the softmaxes of the same module.

A record is (H, Nq, Nk). The softmax of its call may have batch and heads in one axis, or
its axes in another order; padding may be removed from the record; a generation is one
record of many calls. So each head is looked for:

    1. in one call, as it is
    2. in one call, some rows and columns of it (what is left out must have no weight)
    3. in the rows of several calls, one after the other

Heads must be found in the order of their axis, sequences too. A softmax that is in no
record must have a reason.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from wild.oracle import Softmax

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5}  # else 2e-2
PIECES = re.compile(r"pieces|continue|cannot be followed|packed")  # a note that tells
PROBES = 5  # rows of a head that are looked for before all are
CELLS = 2**27  # of one comparison, at most


@dataclass(frozen=True)
class Problem:
    """What is not as it should be, and whether the coverage tells."""

    text: str
    told: bool


@dataclass(frozen=True)
class Found:
    """Where a record was found: the first call, and of each head matrix and rows."""

    call: int
    axis: int  # which axis was the queries'
    leads: tuple[int, ...]
    cells: tuple[tuple[int, int, int], ...]  # call, matrix, rows that were found
    columns: int  # left out
    total: int = 0  # matrices of a call


def list_layouts(weights: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (axis, (L, Nq, Nk)) for every axis that may be the queries'."""
    if weights.ndim == 1:
        weights = weights[None]
    for axis in range(weights.ndim - 2, -1, -1):
        moved = weights.movedim(axis, -2)
        yield axis, moved.reshape(-1, *moved.shape[-2:])
    for count in range(2, weights.ndim):  # several axes of queries: an image
        rows = math.prod(weights.shape[-1 - count : -1])
        yield -count - 1, weights.reshape(-1, rows, weights.shape[-1])
    yield -1, weights.reshape(-1, 1, weights.shape[-1])  # none: one query


def clean(weights: Any) -> Tensor:
    """Return weights to compare, 0 in rows that see nothing."""
    return torch.as_tensor(weights).detach().double().nan_to_num(0.0)


@dataclass(frozen=True)
class Sought:
    """The weights of a record, (H, Nq, Nk), and how near is equal."""

    weights: Tensor
    lost: Tensor  # (H, Nq), what a sink took
    tolerance: float

    def compare(self, matrices: Tensor) -> Tensor:
        """Return (H, L): which matrix equals which head."""
        goal, all_ = self.weights.flatten(1), matrices.flatten(1)
        if not goal.numel():
            return torch.ones(len(goal), len(all_), dtype=torch.bool)
        some = torch.linspace(0, goal.shape[1] - 1, 17).long()  # a few cells of each
        near = (goal[:, None, some] - all_[None, :, some]).abs() <= self.tolerance
        fits = near.all(-1)
        for h, lead in fits.nonzero().tolist():
            fits[h, lead] = bool(((goal[h] - all_[lead]).abs() <= self.tolerance).all())
        return fits

    def compare_rows(self, head: int, some: Tensor, rest: Tensor) -> Tensor:
        """Return (Nq, R): which row of a matrix equals which row of a head.

        some: (R, Nk), some columns of the matrix
        rest: (R,), the weight of the columns that are left out: the sink's, or none
        """
        goal, lost = self.weights[head], self.lost[head]
        near = torch.cdist(goal, some, p=math.inf) <= self.tolerance
        return near & ((lost[:, None] - rest).abs() <= 4 * self.tolerance)

    def find_one(
        self, head: int, some: Tensor, rest: Tensor
    ) -> dict[int, tuple[int, ...]]:
        """Return in which matrices a head is, and in which of their rows.

        some, rest: as for `compare_rows`, of each matrix
        """
        _, Nq, Nk = self.weights.shape
        probes = torch.linspace(0, Nq - 1, PROBES).long().unique()
        cells = torch.linspace(0, Nk - 1, 3 * PROBES).long().unique()
        goal, part = self.weights[head, probes][:, cells], some[..., cells]
        few = torch.cdist(goal, part, p=math.inf) <= self.tolerance
        found = {}
        for lead in few.any(-1).all(-1).nonzero().flatten().tolist():
            rows = self.find_block(head, few[lead, 0], some[lead], rest[lead])
            if rows is None:
                rows = climb(self.compare_rows(head, some[lead], rest[lead]))
            if rows is not None:
                found[lead] = rows
        return found

    def find_block(
        self, head: int, begins: Tensor, some: Tensor, rest: Tensor
    ) -> tuple[int, ...] | None:
        """Return the rows of one matrix that equal a head, if they are neighbours.

        begins: (R,), the rows that may equal the first one
        """
        goal, lost = self.weights[head], self.lost[head]
        n = len(goal)
        for at in begins.nonzero().flatten().tolist():
            if at + n > len(some):
                return None
            near = (some[at : at + n] - goal).abs() <= self.tolerance
            left = (rest[at : at + n] - lost).abs() <= 4 * self.tolerance
            if bool(near.all()) and bool(left.all()):
                return tuple(range(at, at + n))
        return None

    def find_rows(
        self, matrices: Tensor, used: list[int], sums: Tensor | None = None
    ) -> tuple[tuple[int, ...], list[list[int]], int] | None:
        """Find the rows of each head, in order, in some columns of a matrix.

        sums: (L, R), of the rows of the matrices, if more than their columns
        Returns the matrix of each head, its rows, and how many columns are left out.
        """
        extra = int(sums is None and bool(self.lost.any()))  # the column of the sink
        sums = matrices.sum(-1) if sums is None else sums
        (H, Nq, Nk), (L, R, C) = self.weights.shape, matrices.shape
        if Nq > R or Nk > C or H > L or not H * Nq * Nk:
            return None
        for first in range(C - Nk + 1):
            some = matrices[:, :, first : first + Nk]
            rest = sums - some.sum(-1)
            rows, whole = {}, torch.zeros(H, L, dtype=torch.bool)
            for h in range(H):
                for lead, found in self.find_one(h, some, rest).items():
                    whole[h, lead] = lead not in used
                    rows[h, lead] = list(found)
                if not whole[h].any():
                    break
            leads = climb(whole)
            if leads is not None:
                some_rows = [rows[h, lead] for h, lead in enumerate(leads)]
                return leads, some_rows, C - Nk - extra
        return None


class Layer:
    """The softmaxes of one module, in order."""

    def __init__(self, calls: list[Softmax]) -> None:
        self.calls = calls
        self.weights = [clean(x.weights) for x in calls]
        self.used: dict[int, set[tuple[int, int]]] = defaultdict(set)
        self.cells = [0] * len(calls)  # rows that are in a record

    def tolerate(self, record: Any) -> float:
        """Return the difference to allow: 1e-5, or what rounds off of large logits."""
        largest = max((x.largest for x in self.calls), default=0.0)
        least = TOLERANCE.get(record.q.dtype, 2e-2)
        return max(least, 4 * torch.finfo(torch.float32).eps * largest)

    def find(self, record: Any) -> Found | None:
        """Return where a record is, if it is anywhere; where no other is, if possible."""
        weights, lost, near = (
            clean(record.weights()),
            lose_to_sink(record),
            self.tolerate(record),
        )
        forms = [Sought(weights, lost, near)]
        if record.sink is not None:  # it may scale the output, after the softmax
            whole = weights / weights.sum(-1, keepdim=True)
            forms.append(Sought(clean(whole), torch.zeros_like(lost), near))
        searches = (self.find_whole, self.find_part, self.find_steps)
        for fresh, sought, search in product((True, False), forms, searches):
            found = search(sought, fresh=fresh)
            if found is not None:
                return found
        return None

    def list_used(self, number: int, axis: int, *, fresh: bool) -> list[int]:
        """Return the matrices of a call that are in a record, if they may not be again."""
        return [lead for a, lead in self.used[number] if a == axis and fresh]

    def list_calls(self, *, fresh: bool) -> list[tuple[int, Tensor]]:
        """Return the calls with their weights; if fresh, those not all in records."""
        calls = list(enumerate(self.weights))
        return [x for x in calls if not fresh or not self.is_whole(x[0])]

    def is_whole(self, number: int) -> bool:
        """Return whether all rows of a call are in records."""
        weights = self.weights[number]
        return self.cells[number] >= weights.numel() // max(weights.shape[-1], 1)

    def find_whole(self, sought: Sought, *, fresh: bool) -> Found | None:
        """Look for a record in one call, as it is."""
        rows = sought.weights.shape[1]
        for number, weights in self.list_calls(fresh=fresh):
            for axis, matrices in list_layouts(weights):
                if matrices.shape[1:] != sought.weights.shape[1:]:
                    continue
                fits = sought.compare(matrices)
                fits[:, self.list_used(number, axis, fresh=fresh)] = False
                leads = climb(fits)
                if leads is not None:
                    cells = tuple((number, lead, rows) for lead in leads)
                    return Found(number, axis, leads, cells, 0, len(matrices))
        return None

    def find_part(self, sought: Sought, *, fresh: bool) -> Found | None:
        """Look for a record in some rows and columns of one call."""
        for number, weights in self.list_calls(fresh=fresh):
            for axis, matrices in list_layouts(weights):
                used = self.list_used(number, axis, fresh=fresh)
                found = sought.find_rows(matrices, used)
                if found is None:
                    continue
                leads, rows, columns = found
                missing = matrices.shape[1] - min(map(len, rows))
                if missing <= columns:  # rows of padding go with its columns
                    pairs = zip(leads, rows, strict=True)
                    cells = tuple((number, lead, len(some)) for lead, some in pairs)
                    return Found(number, axis, leads, cells, columns, len(matrices))
        return None

    def find_steps(self, sought: Sought, *, fresh: bool) -> Found | None:
        """Look for a record in the rows of several calls."""
        for step in range(1, 5):
            for first in range(step):
                numbers = list(range(first, len(self.weights), step))
                found = self.find_stacked(sought, numbers, fresh=fresh)
                if found is not None:
                    return found
        return None

    def find_stacked(
        self, sought: Sought, numbers: list[int], *, fresh: bool
    ) -> Found | None:
        """Look for a record in these calls, one below the other."""
        if len(numbers) < 2:
            return None
        parts = [(i, next(list_layouts(self.weights[i]))[1]) for i in numbers]
        same = [(i, x) for i, x in parts if len(x) == len(parts[0][1])]
        sums = torch.cat([x.sum(-1) for _, x in same], 1)
        if bool(sought.lost.any()):  # the last column is the sink's, in each call
            same = [(i, x[..., :-1]) for i, x in same]
        matrices, owners = stack(same)
        axis = max(self.weights[numbers[0]].ndim - 2, 0)
        used = self.list_used(numbers[0], axis, fresh=fresh)
        found = sought.find_rows(matrices, used, sums)
        if found is None:
            return None
        leads, rows, columns = found
        missing = matrices.shape[1] - min(map(len, rows))
        again = (
            matrices.shape[1] - matrices.shape[2]
        )  # rows of tokens that were taken back
        if missing > max(columns, again):
            return None
        cells = [
            (i, lead, sum(owners[r] == i for r in some))
            for lead, some in zip(leads, rows, strict=True)
            for i, _ in same
        ]
        return Found(numbers[0], axis, leads, tuple(cells), columns, len(matrices))

    def mark(self, found: Found) -> None:
        """Note that the cells of a record are found."""
        for number, lead, rows in found.cells:
            if (found.axis, lead) in self.used[number] and not found.columns:
                continue
            self.used[number].add((found.axis, lead))
            self.cells[number] += rows

    def list_missing(self) -> list[int]:
        """Return the calls of which nothing, or not all, is in a record."""
        left = []
        for number in range(len(self.weights)):
            matrices = len({lead for _, lead in self.used[number]})
            if not self.is_whole(number) and not self.is_padded(number, matrices):
                left.append(number)
        return [i for i in left if not self.is_repeated(i, {*left})]

    def is_repeated(self, number: int, missing: set[int]) -> bool:
        """Return whether a later call, which is in a record, begins with all its rows.

        A generation without a cache computes every row again. Rows of padding average
        over all keys, which are more in a later call.
        """
        weights = self.weights[number]
        rows, keys = weights.shape[-2:] if weights.ndim > 1 else (0, 0)
        for later in range(number + 1, len(self.weights)):
            other = self.weights[later]
            if later in missing or other.shape[:-2] != weights.shape[:-2]:
                continue
            block, near = other[..., :rows, :keys], TOLERANCE[torch.float32]
            if block.shape != weights.shape or not keys:
                continue
            same = ((block - weights).abs() <= near).all(-1)
            average = ((weights - 1 / keys).abs() <= near).all(-1)
            if bool((same | average).all()):
                return True
        return False

    def is_padded(self, number: int, matrices: int) -> bool:
        """Return whether every matrix is there, though not every row."""
        axes = {axis for axis, _ in self.used[number]}
        counts = {axis: len(x) for axis, x in list_layouts(self.weights[number])}
        return any(matrices >= counts.get(axis, math.inf) for axis in axes)


def lose_to_sink(record: Any) -> Tensor:
    """Return the weight that a sink takes of each row, (H, Nq)."""
    lse = clean(record.lse)
    if record.sink is None:
        return torch.zeros_like(lse)
    return (torch.as_tensor(record.sink).double()[:, None] - lse).exp()


def climb(fits: Tensor) -> tuple[int, ...] | None:
    """Return a matrix for each head, in the order of the matrices, if there is one."""
    leads, last = [], -1
    for row in fits.tolist():
        last = next((i for i in range(last + 1, len(row)) if row[i]), -1)
        if last < 0:
            return None
        leads.append(last)
    return tuple(leads)


def stack(parts: list[tuple[int, Tensor]]) -> tuple[Tensor, list[int]]:
    """Return the rows of several calls as one (L, R, C), and the call of each row.

    The keys of a call end at its last query, unless there are too many of them: then
    they begin at 0, as in a cross-attention or a cache of a fixed size.
    """
    placed, owners, end, width = [], [], 0, 0
    for number, x in parts:
        end += x.shape[1]
        offset = max(0, end - x.shape[2])
        placed.append((offset, x))
        owners += [number] * x.shape[1]
        width = max(width, offset + x.shape[2])
    whole = [
        torch.nn.functional.pad(x, (at, width - at - x.shape[2])) for at, x in placed
    ]
    return torch.cat(whole, 1), owners


class Ledger:
    """All softmaxes and all records of one run."""

    def __init__(self, truth: list[Softmax], recording: Any) -> None:
        self.recording = recording
        names = {x.name.split("#")[0] for x in recording.coverage}
        names |= {x.name.split("#")[0] for x in recording.records}
        calls: dict[str, list[Softmax]] = defaultdict(list)
        for one in truth:
            calls[find_owner(one.module, names)].append(one)
        self.layers = {name: Layer(some) for name, some in calls.items()}
        self.entries = defaultdict(list)
        for entry in recording.coverage:
            self.entries[entry.name.split("#")[0]].append(entry)
        self.remarks: tuple[str, ...] = ()
        self.found: dict[str, list[tuple[Found, int]]] = defaultdict(list)  # with rows

    def compare(self) -> Iterator[Problem]:
        """Yield what is wrong with the records, and what is in none."""
        last: dict[str, tuple[int, int]] = {}
        for record in self.recording.records:
            yield from self.compare_record(record, last)
        for name, layer in self.layers.items():
            yield from self.find_missing(name, layer)
        yield from self.find_split()

    def find_split(self) -> Iterator[Problem]:
        """Yield layers whose generation is in pieces: a later token is a record."""
        for name, found in self.found.items():
            first, *more = found
            share = sum(len(x.leads) / x.total for x, _ in found)
            if share > 1.01 and any(x.call > first[0].call and n == 1 for x, n in more):
                text = f"split: {name} has {len(found)} records"
                yield Problem(text, told=self.tells_pieces(name))

    def compare_record(self, record: Any, last: dict) -> Iterator[Problem]:
        """Yield what is wrong with one record."""
        layer = self.layers.get(record.name.split("#")[0])
        if layer is None:
            yield Problem(f"weights: {record.name} ran no softmax", told=False)
            return
        found = layer.find(record)
        if found is None:
            text = f"weights: {record.name} {self.describe(record, layer)}"
            yield Problem(text, told=False)  # no note allows for other weights
            return
        layer.mark(found)
        self.found[record.name].append((found, int(record.q.shape[1])))
        if found.axis != max(layer.calls[found.call].weights.ndim - 2, 0):
            shape = tuple(layer.calls[found.call].weights.shape)
            remark = f"{record.name}: queries on axis {found.axis} of {shape}"
            self.remarks = tuple(dict.fromkeys([*self.remarks, remark]))
        place = (found.call, found.leads[0])
        if place < last.get(record.name, (-1, -1)) and found.columns == 0:
            text = f"weights: {record.name} has its sequences out of order"
            yield Problem(text, told=False)
        last[record.name] = place
        free = record.mask is None and record.sink is None and record.q.numel()
        near = max(1e-4, 4 * layer.tolerate(record))
        if free and (clean(record.weights()).sum(-1) - 1).abs().max() > near:
            text = f"weights: a row of {record.name} does not sum to 1"
            yield Problem(text, told=False)

    def describe(self, record: Any, layer: Layer) -> str:
        """Return how a record that was not found differs."""
        goal = clean(record.weights())
        shapes = sorted({tuple(x.weights.shape) for x in layer.calls})
        best = [
            float((goal[:, None] - x[None]).abs().flatten(2).amax(-1).amin(1).max())
            for w in layer.weights
            for _, x in list_layouts(w)
            if x.shape[1:] == goal.shape[1:] and 0 < goal.numel() * len(x) < CELLS
        ]
        off = f"off by {min(best):.1e}" if best else "not found"
        if best and min(best) <= layer.tolerate(record):
            off = "heads out of order"
        return f"{tuple(goal.shape)} in {', '.join(map(str, shapes[:3]))}: {off}"

    def tells_pieces(self, name: str) -> bool:
        """Return whether the coverage tells that a generation is in pieces."""
        entries = self.entries.get(name.split("#", maxsplit=1)[0], [])
        return any(PIECES.search(x.note) for x in entries if x.name == name)

    def find_missing(self, name: str, layer: Layer) -> Iterator[Problem]:
        """Yield the softmaxes of a module that are in no record."""
        missing, entries = layer.list_missing(), self.entries.get(name, [])
        kept, found = count_kept(entries), len(layer.calls) - len(missing)
        if kept is not None and kept > found:
            text = f"missing: {name or 'the model'} kept {kept}, {found} found"
            yield Problem(text, told=False)
        if not missing:
            return
        told = any(x.reason and x.attention for x in entries)
        aside = any(not x.attention for x in entries)
        plain = [i for i in missing if not layer.calls[i].attends]
        if told or (aside and len(plain) == len(missing)):
            return
        kind = "no attention, it says" if aside else "nothing said"
        one = layer.calls[next((i for i in missing if i not in plain), missing[0])]
        yield Problem(
            f"missing: {len(missing)} of {len(layer.calls)} softmaxes of "
            f"{name or 'the model'} {tuple(one.weights.shape)}, {kind}",
            told=False,
        )


def count_kept(entries: list[Any]) -> int | None:
    """Return how many calls a module says that it kept, if it says so."""
    said = [getattr(x, "kept", None) for x in entries]
    return None if None in said or not said else sum(said)


def find_owner(name: str, known: set[str]) -> str:
    """Return the innermost module around a name that is known, or the name itself."""
    owner = name
    while owner and owner not in known:
        owner = owner.rpartition(".")[0]
    return owner if owner in known else name
