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
        return "\n".join([*lines, f"  what to change: {self.mend}"])

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
        """Return one line with the counts."""
        counts = ", ".join(f"{n} {status}" for status, n in self.counts.items() if n)
        return f"{self.name}, level {self.level}: {counts} ({self.seconds:.1f} s)"

    def __str__(self) -> str:
        lines = [self.summary(), f"convention: {self.convention}"]
        lines += [f"precision: {self.precision}", ""]
        lines += [x.explain() + "\n" for x in self.failed]
        for status in ("waiting", "not asked"):
            lines += [*self.gather(status)]
        lines += self.list_hints()
        return "\n".join(lines).rstrip()

    def gather(self, status: Status) -> Iterator[str]:
        """Yield one line per reason for a status, with the cases that share it."""
        reasons: dict[str, list[str]] = {}
        for each in self.verdicts:
            if each.status == status:
                reasons.setdefault(each.says, []).append(each.name)
        for reason, names in reasons.items():
            about = f"{status}, {reason}" if reason else status
            words = f"waiting until {reason} is right" if status == "waiting" else about
            more = f" and {len(names) - MANY} more" if len(names) > MANY else ""
            listed = ", ".join(names[:MANY])
            yield f"{words}: {listed}{more}"

    def list_hints(self) -> list[str]:
        """Return one line per case that would pass if an option were declared."""
        asked = (x for x in self.verdicts if x.hint and x.status != "failed")
        return [f"not declared: {x.name} {x.hint}" for x in asked]

    def show(self, color: Color = "dark", width: int | None = None) -> None:
        """Print the report, in colour if the terminal supports it."""
        from rich.console import Console  # noqa: PLC0415 (only to draw)
        from rich.text import Text  # noqa: PLC0415

        console = Console(width=width, highlight=False)
        tinted: Color = color if console.color_system == "truecolor" else False
        for each in self.failed:
            first, *lines = each.explain(color=tinted).splitlines()
            head = Text(f"{MARKS['failed']} {each.name}", COLOURS["failed"])
            console.print(head, Text(first.partition(": ")[2]))
            for line in lines:
                console.print(Text.from_ansi(line))
            console.print()
        for status in ("passed", "waiting", "not asked"):
            for line in self.gather(status):
                console.print(Text(line, COLOURS[status]))
        for line in self.list_hints():
            console.print(Text(line, COLOURS["waiting"]))
        console.print(Text(self.summary(), COLOURS["passed" if self.ok else "failed"]))
        console.print(Text(f"convention: {self.convention}", "dim"))
        style = COLOURS["waiting"] if self.note else "dim"
        console.print(Text(f"precision: {self.precision}", style))

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
