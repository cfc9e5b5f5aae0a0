"""The report of a check, as text, in colour, as Markdown, JSON and JUnit XML.

    print(report)                    plain text
    report.show()                    in colour, in a terminal
    report.to_markdown()  report.to_json()  report.to_junit()

A failure shows the pitfall, the place, small heatmaps of yours, expected and the
difference, and what to change.

Next: plugin.py
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal
from xml.etree import ElementTree as ET

import numpy as np

from regard.display import Displayed
from regard.judge.case import Case
from regard.judge.difference import Difference
from regard.judge.inputs import Inputs, Numbers
from regard.show.palette import LinearScale, Scale, fit_signed
from regard.show.terminal_map import Color, draw_weights

Status = Literal["passed", "failed", "not asked", "waiting"]
STATUSES: tuple[Status, ...] = ("passed", "failed", "not asked", "waiting")
MARKS = {"passed": "✓", "failed": "✗", "not asked": "–", "waiting": "…"}
COLOURS = {"passed": "green", "failed": "bold red", "not asked": "dim"}
COLOURS["waiting"] = "yellow"
MANY = 12  # maximum number of case names in a line
REASONS = 4  # that are named in the line about what was not asked
LARGEST = 10  # maximum rows and columns of a heatmap


@dataclass(frozen=True, eq=False)
class Verdict:
    """The outcome of one case."""

    case: Case
    status: Status
    says: str = ""  # the difference, the reason, or the failed case it depends on
    difference: Difference | None = None
    seconds: float = 0
    hint: str = ""  # "passes as bnhd: add --layout bnhd"

    @property
    def name(self) -> str:
        """The name of the case."""
        return self.case.name

    @property
    def holds_up(self) -> bool:
        """Whether cases that depend on this one are not run."""
        return self.status in ("failed", "waiting")

    @property
    def mend(self) -> str:
        """What to change; after a timeout, a hint about loops."""
        if "did not answer within" in self.says:
            return "Look for an infinite loop, or allow more time with limit=…."
        if "missing" in self.says and "required positional argument" in self.says:
            return "Give it a default value, or Convention(fixed={'name': value})."
        return self.case.mend

    def explain(self, *, color: Color = False) -> str:
        """Return the full text of a failure, with heatmaps."""
        lines = [f"{self.name}: {self.case.says}", f"  {self.says}"]
        lines += [f"  {self.hint}"] if self.hint else []
        if self.difference is not None:
            lines += [f"  {line}" for line in draw_maps(self.difference, color=color)]
        lines.append(f"  what to change: {self.mend}")
        if self.difference is not None and self.difference.code:
            lines += ["  as code:", *self.difference.code.splitlines()]
        return "\n".join(lines)

    def note(self) -> str:
        """Return a one-line explanation of the status."""
        words = {"failed": self.case.says, "not asked": f"not asked: {self.says}"}
        words["waiting"] = f"waits until {self.says} is right"
        return words.get(self.status, "")


@dataclass(frozen=True, eq=False)
class Report(Displayed):
    """All verdicts on one attention implementation."""

    name: str
    convention: str
    level: str
    verdicts: tuple[Verdict, ...] = field(repr=False)
    note: str = ""  # on the precision it computes in, if not the one that was given
    judged: str = ""  # the precisions it is checked in, and their tolerances
    searched: str = ""  # how many random calls were asked
    unread: bool = False  # no argument is known, as its signature cannot be read

    @property
    def failed(self) -> tuple[Verdict, ...]:
        """The verdicts of the failed cases."""
        return tuple(x for x in self.verdicts if x.status == "failed")

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failed

    @property
    def counts(self) -> dict[Status, int]:
        """Number of verdicts of each status."""
        return {s: sum(x.status == s for x in self.verdicts) for s in STATUSES}

    @property
    def precision(self) -> str:
        """The precisions that it is checked in, and why."""
        return self.note or self.judged

    @property
    def seconds(self) -> float:
        """Total run time in seconds."""
        return sum(x.seconds for x in self.verdicts)

    def summary(self) -> str:
        """Return one line: the verdict, the level and the counts."""
        said = "right" if self.ok else f"wrong in {len(self.failed)}"
        if self.unread:
            options = "mask, causal, bias, scale and other options were not asked"
            said = f"its signature cannot be read, so {options}; {said}"
        counts = ", ".join(f"{n} {status}" for status, n in self.counts.items() if n)
        counts = f"{counts} ({self.seconds:.1f} s)"
        return f"{self.name}, level {self.level}: {said}; {counts}"

    def __str__(self) -> str:
        return "\n".join(text for text, _ in self.compose()).rstrip()

    def compose(self, *, color: Color = False) -> Iterator[tuple[str, str]]:
        """Yield the lines of the report, each with a style; the verdict is first."""
        yield self.summary(), COLOURS["passed" if self.ok else "failed"]
        yield f"convention: {self.convention}", "dim"
        note = COLOURS["waiting"] if self.note else "dim"
        yield f"precision: {self.precision}", note
        yield f"random calls: {self.searched}", "dim"
        for each in self.failed:
            first, *lines = each.explain(color=color).splitlines()
            yield from (("", ""), (f"{MARKS['failed']} {first}", COLOURS["failed"]))
            yield from ((line, "") for line in lines)
        yield "", ""
        yield from ((line, COLOURS["waiting"]) for line in self.list_waiting())
        reasons = Counter(x.says for x in self.verdicts if x.status == "not asked")
        if reasons:
            common = reasons.most_common(REASONS)
            said = [f"{reason} ({n})" for reason, n in common]
            rest = reasons.total() - sum(n for _, n in common)
            why = "; ".join([*said, *([f"other reasons ({rest})"] if rest else [])])
            yield f"not asked: {why}", COLOURS["not asked"]
        asked = (x for x in self.verdicts if x.hint and x.status != "failed")
        for each in asked:
            yield f"not declared: {each.name} {each.hint}", COLOURS["waiting"]

    def list_waiting(self) -> Iterator[str]:
        """Yield one line per failed case that others depend on, with their names."""
        reasons: dict[str, list[str]] = {}
        for each in self.verdicts:
            if each.status == "waiting":
                reasons.setdefault(each.says, []).append(each.name)
        for reason, names in reasons.items():
            more = f" and {len(names) - MANY} more" if len(names) > MANY else ""
            yield f"waiting until {reason} is right: {', '.join(names[:MANY])}{more}"

    def show(self, color: Color = "dark", width: int | None = None) -> None:
        """Print the report, in colour if the terminal supports it."""
        from rich.console import Console  # noqa: PLC0415 (only to draw)
        from rich.text import Text  # noqa: PLC0415

        console = Console(width=width, highlight=False)
        tinted: Color = color if console.color_system == "truecolor" else False
        for line, style in self.compose(color=tinted):
            console.print(Text(line, style) if style else Text.from_ansi(line))

    def to_markdown(self) -> str:
        """Return the report as Markdown, for example for a pull request."""
        lines = [f"## {self.summary()}", "", f"Convention: `{self.convention}`", ""]
        lines += [f"Precision: {self.precision}", ""]
        lines += ["| case | level | verdict | |", "|---|---|---|---|"]
        for each in self.verdicts:
            note = each.note().replace("|", "\\|")
            lines.append(
                f"| {each.name} | {each.case.level} | {each.status} | {note} |"
            )
        for each in self.failed:
            lines += ["", f"### {each.name}", "", "```text", each.explain(), "```"]
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """Return the report as JSON; arrays are nested lists, NaN is null."""
        return json.dumps(
            {
                "name": self.name,
                "convention": self.convention,
                "precision": self.precision,
                "level": self.level,
                "ok": self.ok,
                "signature_read": not self.unread,
                "searched": self.searched,
                "counts": self.counts,
                "cases": [export_verdict(each) for each in self.verdicts],
            },
            indent=1,
            allow_nan=False,
        )

    def to_junit(self) -> str:
        """Return the report as JUnit XML, for CI servers."""
        counts = self.counts
        skipped = counts["not asked"] + counts["waiting"]
        suite = ET.Element(
            "testsuite",
            name=f"regard check {self.name}",
            tests=str(len(self.verdicts)),
            failures=str(counts["failed"]),
            skipped=str(skipped),
            errors="0",
            time=f"{self.seconds:.3f}",
        )
        for each in self.verdicts:
            place = f"regard.{each.case.level}.{self.name}"
            test = ET.SubElement(
                suite,
                "testcase",
                name=each.name,
                classname=place,
                time=f"{each.seconds:.3f}",
            )
            if each.status == "failed":
                failure = ET.SubElement(test, "failure", message=each.says)
                failure.text = each.explain()
            elif each.status != "passed":
                ET.SubElement(test, "skipped", message=each.note())
        return ET.tostring(suite, encoding="unicode", xml_declaration=True)


def draw_maps(found: Difference, *, color: Color = False) -> list[str]:
    """Return the lines of three heatmaps: yours, expected, the difference."""
    if found.yours is None or found.expected is None or found.difference is None:
        return []
    rows, columns = crop_difference(found)
    maps = [x[rows, columns] for x in (found.yours, found.expected, found.difference)]
    yours, expected, apart = (np.where(np.isnan(x), -np.inf, x) for x in maps)
    both = np.stack([yours, expected])
    seen = both[np.isfinite(both)]
    scale: Scale = fit_signed(both)
    if seen.size and seen.min() >= 0 and seen.max() > 0:
        scale = LinearScale(0, float(seen.max()))
    sides = {"yours": yours, "expected": expected}
    drawn = {draw_weights({"": x}, scale=scale, color=color) for x in sides.values()}
    shown = []
    if len(drawn) > 1:  # two maps that look the same say nothing
        shown.append(draw_weights(sides, scale=scale, color=color))
    if np.isfinite(apart).any() or not shown:  # nor does a map that is NaN throughout
        gap = {"yours - expected": apart}
        shown.append(draw_weights(gap, scale=fit_signed(apart), color=color))
    text = "\n".join(shown)
    note = []
    if rows.start or columns.start or len(found.yours) != len(yours):
        note = [f"rows from {rows.start}, columns from {columns.start}"]
    return [*text.replace(": masked", ": NaN or -inf").splitlines(), *note]


def crop_difference(found: Difference) -> tuple[slice, slice]:
    """Return at most LARGEST rows and columns around the largest difference."""
    assert found.yours is not None
    assert found.expected is not None
    assert found.difference is not None
    apart = np.abs(np.nan_to_num(found.difference, nan=np.inf))
    used = np.asarray(found.yours != 0) | np.asarray(found.expected != 0)
    width = max(2, 1 + int(np.flatnonzero(used.any(0)).max(initial=0)))
    apart = apart[:, :width]  # drops trailing columns that are 0 in both
    at = np.unravel_index(int(np.argmax(apart)), apart.shape)
    firsts = [
        max(0, min(int(i) - 2, n - LARGEST))
        for i, n in zip(at, apart.shape, strict=True)
    ]
    stops = [min(i + LARGEST, n) for i, n in zip(firsts, apart.shape, strict=True)]
    return slice(firsts[0], stops[0]), slice(firsts[1], stops[1])


def export_verdict(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON values."""
    found = verdict.difference
    maps = {}
    if found is not None and found.yours is not None:
        rows, columns = crop_difference(found)
        for name in ("yours", "expected", "difference"):
            maps[name] = list_json_numbers(getattr(found, name)[rows, columns])
    sizes: dict[str, Any] = {}
    if found is not None and isinstance(found.arguments, Inputs):
        asked = found.arguments
        sizes = {name: list(getattr(asked, name).shape) for name in "qkv"}
    return {
        "case": verdict.name,
        "level": verdict.case.level,
        "status": verdict.status,
        "pitfall": verdict.case.says,
        "says": verdict.says,
        "hint": verdict.hint,
        "mend": verdict.mend if verdict.status == "failed" else "",
        "seconds": round(verdict.seconds, 4),
        "shapes": sizes,
        **maps,
    }


def list_json_numbers(x: Numbers) -> list[list[float | None]]:
    """Return a 2-d array as nested lists, with None for NaN and infinities."""
    return [[float(n) if np.isfinite(n) else None for n in row] for row in x]
