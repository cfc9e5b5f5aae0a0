"""Find mask errors in recorded attention: weight on cells that should have none.

    for finding in audit(seen.recording, expect=causal() & window(4095)):
        print(finding)

Every number is a mass, exact for each head and row (row_summary.py): on padding, on the
future, on other documents, on all cells that `expect` forbids. A row must sum to 1;
otherwise it used other keys than its mask allows. Errors that only show in comparison
with a correct run of the same tokens are found by compare.py.

Next: compare.py
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from regard.audit.audited_record import (
    FUTURE,
    OUTSIDE,
    add_knowledge,
    read_audited_record,
)
from regard.audit.finding import Finding, Level, combine, tell
from regard.audit.row_summary import RowSummary, summarize_rows
from regard.audit.told_padding import find_real, judge_told, read_kept
from regard.errors import OptionError
from regard.recording.hidden_tokens import list_told
from regard.recording.record import Recording

LEAK = 1e-6  # a larger mass is not a rounding error
WHOLE = 0.999  # a larger share of a row counts as all of it
EVEN = 1e-3  # relative deviation of a dead head's weights from 1 / keys
MOST = 0.9  # fraction of the rows of a saturated head
SINK = 0.95  # share of a head's weight on the first token
Option = Any  # a value, or a mapping from patterns of layer names to values


@dataclass(frozen=True, kw_only=True)
class Trait:
    """Properties of a record that are compared with those of other layers."""

    name: str
    sequence: int
    causal: bool | None  # None if not applicable
    widths: tuple[int | None, ...]  # the window of each head, if it has one
    ahead: tuple[Finding, ...]  # weight on the future, which may be correct


def audit(
    recording: Recording,
    *,
    valid: Option = None,
    pad: int | None = None,
    documents: Option = None,
    expect: Option = None,
) -> tuple[Finding, ...]:
    """Return the findings of an audit of a recording, errors first.

    valid: (B, N), True for tokens, False for padding; one row for each sequence
    pad: the id of the padding token, instead of `valid`, if tokens were recorded
    documents: ids (N,) or (B, N) of packed documents
    expect: the expected mask, at the positions of the records

    Each may be a mapping from patterns of layer names to values, as in
    expect={"decoder.*.SelfAttention": causal()}. `valid` and `documents` cover all
    tokens of the input, including padding that an attention mask removed from records.
    """
    if valid is not None and pad is not None:
        raise OptionError("valid= and pad= together: give one of them.")
    names = list(dict.fromkeys(record.name for record in recording.records))
    options = {"valid": valid, "documents": documents, "expect": expect}
    for name, option in options.items():
        check_patterns(name, option, names)
    found, traits = [*judge_coverage(recording), *judge_told(recording, valid, pad)], []
    told = {x.sequence: x for x in list_told(recording)}
    if not names and not found:
        raise OptionError(
            "the recording holds no layers, so there is nothing to audit. Run the "
            "model inside of `with regard.watch(model) as seen:`, and print(seen)."
        )
    for record, sequence in zip(recording.records, recording.sequences, strict=True):
        if not record.q.shape[1]:  # the sequence is all padding
            continue
        known = {name: pick(option, record.name) for name, option in options.items()}
        n = record.k.shape[1]
        if sequence in told:
            known["valid"] = read_kept(told[sequence], known["valid"], pad, n)
        if known["valid"] is None:
            known["valid"] = find_padding_kept(recording, sequence, n)
        if pad is not None and n and known["valid"] is None:
            real = find_padding(recording, sequence, pad)
            known["valid"] = real if len(real) == n else None  # else of an encoder
        case = read_audited_record(record, sequence)
        if known["expect"] is not None and not case.placed:
            known["expect"] = None
            what, rows = "queries not placed", case.sees
            found += tell(case, what, rows, case.at_q, unit="last", level="note")
        look = summarize_rows(add_knowledge(case, *known.values()))
        found += audit_record(look)
        traits.append(find_trait(look))
    found += judge_layers(recording.model, traits)
    return combine(found, [x.name for x in recording.coverage] or names)


def check_patterns(name: str, option: Option, layers: Iterable[str]) -> None:
    """Raise OptionError for patterns that match no layer and would check nothing."""
    for pattern in option if isinstance(option, Mapping) else ():
        if not any(fnmatchcase(layer, pattern) for layer in layers):
            raise OptionError(
                f'{name}: no layer is called "{pattern}". There are: '
                f"{', '.join(layers)}. A * stands for any letters."
            )


def pick(option: Option, layer: str) -> Any:
    """Return the value of an option for a layer."""
    if not isinstance(option, Mapping):
        return option
    fits = (x for pattern, x in option.items() if fnmatchcase(layer, pattern))
    return next(fits, None)


def find_padding(recording: Recording, sequence: int, pad: int) -> Tensor:
    """Return which tokens are not leading or trailing `pad`; inside, it ends a text."""
    if not any(recording.tokens[sequence : sequence + 1]):
        raise OptionError(
            f"pad={pad}, but the tokens of sequence {sequence} are not known. Give "
            "valid= (B, N) instead."
        )
    return find_real(recording.tokens[sequence], pad)


def find_padding_kept(recording: Recording, sequence: int, n: int) -> Tensor | None:
    """Return which of n keys are padding that is in a record, as the model was told.

    It is in the record because some head attends to it.
    """
    told = recording.notes.get("valid")
    if not isinstance(told, list) or sequence >= len(told):
        return None
    row = told[sequence]
    if not isinstance(row, list) or len(row) != n or not n:
        return None
    return torch.tensor([x == 1 for x in row])


def judge_coverage(recording: Recording) -> Iterator[Finding]:
    """Yield a finding for each layer that was not kept.

    Gates and routers are no attention; an entry without `via` is a failure of the lens.
    """
    for x in recording.coverage:
        expected = x.reason == "not asked for" or (x.via and not x.attention)
        if x.reason and not expected:
            odd = not math.isfinite(x.error)
            yield Finding(
                what="not finite" if odd else "not audited",
                layer=x.name,
                numbers={"error": x.error, "calls": x.calls},
                level="error" if odd else "warning",
            )


def audit_record(look: RowSummary) -> Iterator[Finding]:
    """Yield the findings of a single record."""
    yield from judge_numbers(look)
    yield from judge_sums(look)
    yield from judge_regions(look)
    yield from judge_reach(look)
    yield from judge_heads(look)
    case, what = look.case, "positions do not start at 0"
    if int(case.at_q[:1].sum()) or int(case.at_k[:1].sum()):
        yield from tell(case, what, look.good, case.at_q, unit="last", level="note")


def judge_numbers(look: RowSummary) -> Iterator[Finding]:
    """Find rows that are not finite, or have no keys."""
    case, record = look.case, look.case.record
    odd = ~(record.lse < math.inf) | ~record.q.isfinite().all(-1)
    yield from tell(case, "not finite", odd & case.real, case.at_q, unit="last")
    group = record.heads // record.k.shape[0]
    keys = ~record.k.isfinite().flatten(1).all(1).repeat_interleave(group)  # (H,)
    behind = (keys & ~odd.any(1))[:, None] & case.real  # masked, so harmless
    yield from tell(case, "not finite", behind, case.at_q, unit="last", level="warning")
    empty = look.empty & ~odd
    level: Level = "error" if case.told else "warning"
    yield from tell(case, "empty rows", empty, case.at_q, unit="last", level=level)


def judge_sums(look: RowSummary) -> Iterator[Finding]:
    """Find rows that do not sum to 1, and which keys they used instead."""
    case, record, total = look.case, look.case.record, look.total
    if record.sink is not None:
        total = total + (record.sink[:, None] - record.lse).exp()
    slack = torch.full_like(total, 1e-3)
    if not case.from_logits:  # float32 rounding of large logits
        longest = record.k.norm(dim=-1).max() if record.k.numel() else 0.0
        slack = slack + 3e-7 * record.q.norm(dim=-1) * longest * abs(record.scale)
    lost = 1 - total
    off = look.good & (lost.abs() > slack) & (slack < 0.1)
    rows = off.any(0).nonzero()[:, 0]
    if not len(rows):
        return
    few = torch.linspace(0, len(rows) - 1, min(8, len(rows))).long()
    if all(is_prefix(look, row) for row in rows[few].tolist()):
        yield from tell(case, "cache misaligned", off, lost.abs(), unit="off by")
        return
    if bool((lost < 0)[off].any()):
        what, gap = "rows do not sum to 1", lost.abs()
        yield from tell(case, what, off, gap, unit="off by", level="warning")
        return
    flipped = ((total < 1 - WHOLE) | ~look.good).all(1, keepdim=True) & off
    yield from tell(case, "mask polarity flipped", flipped, lost)
    yield from tell(case, "weight on padding", off & ~flipped, lost)


def is_prefix(look: RowSummary, row: int) -> bool:
    """Return whether a row attended to a prefix of the keys, not that of its mask."""
    record, good = look.case.record, look.good[:, row]
    s = replace(record, mask=None).logits(slice(row, row + 1))[good, 0]  # (H, Nk)
    off = s.logcumsumexp(-1) - record.lse[good, row, None]
    return bool((off.abs().amax(0) < 2e-3).any())


def judge_regions(look: RowSummary) -> Iterator[Finding]:
    """Report the mass on forbidden cells, named after its likely cause."""
    case = look.case
    for name, mass in look.mass.items():
        if name == FUTURE and not case.square:
            continue
        hit = look.good & (mass > LEAK)
        flipped, soft = look.is_flipped(name)[:, None], look.is_soft(name)[:, None]
        yield from tell(case, "mask polarity flipped", hit & flipped, mass)
        yield from tell(case, "softcap after the mask", hit & soft & ~flipped, mass)
        hit = hit & ~soft & ~flipped
        if name == OUTSIDE:
            yield from judge_outside(look, hit)
        elif name != FUTURE:  # the future may be allowed: see judge_layers
            yield from tell(case, name, hit, mass)


def judge_outside(look: RowSummary, hit: Tensor) -> Iterator[Finding]:
    """Separate the future and a window that is too wide from other keys."""
    case, mass, ahead = look.case, look.mass[OUTSIDE], look.mass[FUTURE]
    first, last = look.due
    if bool((last <= case.at_q)[hit].all()):  # the future is forbidden
        yield from tell(case, FUTURE, hit & (ahead > LEAK), ahead)
        hit = hit & (look.cells[OUTSIDE] > look.cells[FUTURE])
        mass = mass - ahead
    early = first - look.seen[0]
    if is_window(look, hit) and bool((early > 0)[hit].all()):
        yield from tell(case, "window too wide", hit, early, unit="keys")
    else:
        yield from tell(case, OUTSIDE, hit, mass)


def is_window(look: RowSummary, hit: Tensor) -> bool:
    """Return whether these rows use consecutive keys, and expect equal windows."""
    first, last = look.seen
    run = (last - first + 1 == look.count)[hit].all()
    reach = (look.case.at_q - look.due[0])[hit]
    return bool(run) and len(reach.unique()) == 1


def judge_reach(look: RowSummary) -> Iterator[Finding]:
    """Find keys that rows should attend to but do not."""
    case, (first, last) = look.case, look.seen
    if case.expected is None:
        short = case.at_q - last
        hit = look.good & (short > 0) & torch.isin(case.at_q, case.at_k)
        level: Level = "error" if case.told else "warning"
        ahead = look.good & (look.mass[FUTURE] > LEAK)
        if case.placed and not bool(ahead.any()):  # seems causal
            yield from judge_short(look, hit, short, level)
        return
    hit = look.good & (look.missed > 0) & ~look.is_flipped(OUTSIDE)[:, None]
    late, short = first - look.due[0], look.due[1] - last
    if bool(((short > 0) & (late == 0))[hit].all()):
        yield from judge_short(look, hit, short, "error")
    elif is_window(look, hit) and bool(((late > 0) & (short == 0))[hit].all()):
        yield from tell(case, "window too narrow", hit, late, unit="keys")
    else:
        what, keys = "expected keys hidden", look.missed  # not a leak
        yield from tell(case, what, hit, keys, unit="keys", level="warning")


def judge_short(
    look: RowSummary, hit: Tensor, short: Tensor, level: Level
) -> Iterator[Finding]:
    """Distinguish rows that miss only their own token from misaligned rows."""
    all_rows = look.good & hit.any(1, keepdim=True)
    own = bool((short == 1)[all_rows].all())
    what = "own token hidden" if own else "cache misaligned"
    yield from tell(look.case, what, hit, short, unit="keys", level=level)


def judge_heads(look: RowSummary) -> Iterator[Finding]:
    """Find heads with the same pattern in all rows that have several keys."""
    case = look.case
    rows = look.good & (look.count > 1) & (look.total > 0)
    many = rows.sum(1).clamp(min=1)
    rows = rows & (many > 2)[:, None]
    top = look.top / look.total
    uneven = (top * look.count - 1).masked_fill(~rows, 0)
    dead = (uneven <= EVEN).all(1, keepdim=True) & rows
    yield from tell(case, "dead head", dead, uneven, unit="uneven", level="warning")
    share = (look.first / look.total).masked_fill(~rows, 0).sum(1) / many
    sink = (share > SINK)[:, None] & rows & ~dead
    yield from tell(case, "sink", sink, share[:, None], unit="share", level="note")
    sharp = ((top > WHOLE) & rows).sum(1) >= MOST * many
    stuck = sharp[:, None] & rows & ~sink
    logit = case.record.lse + look.top.log()
    yield from tell(case, "saturated head", stuck, logit, unit="logit", level="warning")


def find_trait(look: RowSummary) -> Trait:
    """Return the properties that are compared across layers."""
    case, (first, last) = look.case, look.seen
    asked = case.square and case.expected is None
    known = look.is_flipped(FUTURE) | look.is_soft(FUTURE)  # other findings
    hit = look.good & (look.mass[FUTURE] > LEAK) & ~known[:, None]
    ahead = tell(case, FUTURE, hit, look.mass[FUTURE], level="warning") if asked else ()
    lost = look.good & (first > int(case.at_k[:1].sum())) & (last == case.at_q)
    reach = [x[some].unique() for x, some in zip(case.at_q - first, lost, strict=True)]
    return Trait(
        name=case.record.name,
        sequence=case.sequence,
        causal=not bool(hit.any()) if asked else None,
        widths=tuple(int(x) if len(x) == 1 else None for x in reach),
        ahead=tuple(ahead),
    )


def judge_layers(model: str, traits: list[Trait]) -> Iterator[Finding]:
    """Compare layers of the same kind: their names differ only in a number."""
    kinds, sequences = defaultdict(list), defaultdict(list)
    for x in traits:
        kinds[x.sequence, re.sub(r"\d+", "#", x.name)].append(x)
        sequences[x.sequence].append(x)
    for some in kinds.values():
        if any(x.causal for x in some):
            yield from (finding for x in some for finding in x.ahead)
        yield from judge_widths(some)
    for some in sequences.values():
        if re.search("Causal|LMHead", model) and not any(x.causal for x in some):
            yield from (finding for x in some for finding in x.ahead)


def judge_widths(some: list[Trait]) -> Iterator[Finding]:
    """Find heads whose window differs by one key from the most common one."""
    counts = Counter(w for x in some for w in x.widths if w is not None)
    ((usual, _),) = counts.most_common(1) or ((0, 0),)
    for x in some:
        odd = {h: w for h, w in enumerate(x.widths) if w and abs(w - usual) == 1}
        if odd and usual:
            yield Finding(
                what="windows differ by one",
                layer=x.name,
                worst=dict(odd),
                numbers={"keys": min(odd.values()), "others": usual},
                level="warning",
            )
