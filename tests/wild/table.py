"""The results of all models, as a file of the project, and the page that shows them.

    results.json     of each library, the models by verdict, and why
    docs/wild.md     the table and the lists, between marks; the rest is written by hand

Next: run.py
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from wild.judge_model import VERDICTS, Verdict

ROOT = Path(__file__).parent.parent.parent
RESULTS, PAGE = Path(__file__).parent / "results.json", ROOT / "docs" / "wild.md"
MARKS = {"table": "<!-- wild:table -->", "lists": "<!-- wild:lists -->"}
TITLES = {
    "wrong": "Wrong",
    "broke": "Broke",
    "reported": "Reported",
    "not built": "Not built",
}
LENGTH = 160  # of a text in a list
Results = dict[str, dict[str, dict[str, str]]]  # library, verdict, model: why


def save_results(found: Iterable[Verdict], path: Path = RESULTS) -> Results:
    """Write the verdicts as a file, and return them."""
    results: Results = {}
    for x in sorted(found, key=lambda x: (place(x.library), x.name)):
        models = results.setdefault(x.library, {}).setdefault(x.verdict, {})
        models[x.name] = "" if x.verdict == "correct" else x.text
    path.write_text(json.dumps(results, indent=0, ensure_ascii=False) + "\n", "utf-8")
    return results


def load_results(path: Path = RESULTS) -> Results:
    """Return the results of the project."""
    results: Results = json.loads(path.read_text("utf-8"))
    return results


def place(library: str) -> tuple[int, str]:
    """Return where a library stands: transformers and timm first, then by name."""
    first = ("transformers", "timm")
    return (first.index(library) if library in first else len(first)), library


def fill_page(results: Results, page: Path = PAGE) -> None:
    """Write table and lists between the marks of the page."""
    text = page.read_text("utf-8")
    for name, part in (("table", show_table(results)), ("lists", show_lists(results))):
        before, _, after = text.split(MARKS[name])
        text = f"{before}{MARKS[name]}\n{part}\n{MARKS[name]}{after}"
    page.write_text(text, "utf-8")


def show_table(results: Results) -> str:
    """Return how many models of each library have each verdict, as Markdown."""
    rows = {name: count(models) for name, models in split_runs(results)}
    rows["**all**"] = sum(rows.values(), Counter())
    head = ["library", "cases", *VERDICTS]
    lines = [make_row(head), make_rule(len(head))]
    lines += [
        make_row([name, row.total(), *(row[x] for x in VERDICTS)])
        for name, row in rows.items()
    ]
    total = rows["**all**"]
    ran = total.total() - total["not built"]
    good = total["correct"] + total["reported"]
    lines += ["", f"Of {ran} cases that ran, {good} ({good / ran:.1%}) are correct or "]
    lines[-1] += f"reported; {total['wrong']} are wrong, {total['broke']} broke."
    return "\n".join(lines)


def split_runs(results: Results) -> Iterator[tuple[str, dict[str, dict[str, str]]]]:
    """Yield each library with its models; generations of transformers on their own."""
    for library, models in results.items():
        if library != "transformers":
            yield library, models
            continue
        for kind, is_one in (("forward", False), ("generate", True)):
            some = {
                verdict: {x: y for x, y in one.items() if (":" in x) == is_one}
                for verdict, one in models.items()
            }
            yield f"{library}, {kind}", some


def count(models: dict[str, dict[str, str]]) -> Counter[str]:
    """Return how many models have each verdict."""
    return Counter({verdict: len(some) for verdict, some in models.items()})


def show_lists(results: Results) -> str:
    """Return what is not simply correct, and why, as Markdown."""
    lines: list[str] = []
    for verdict, title in TITLES.items():
        some = [
            (library, name, text)
            for library, models in results.items()
            for name, text in models.get(verdict, {}).items()
        ]
        lines += [f"### {title} ({len(some)})", ""]
        if some:
            lines += [make_row(["model", "what"]), make_rule(2)]
        else:
            lines.append("None.")
        lines += [make_row([f"{a}/{b}", shorten(text)]) for a, b, text in some]
        lines.append("")
    return "\n".join(lines).rstrip()


def shorten(text: str) -> str:
    """Return the beginning of a text."""
    return text if len(text) <= LENGTH else f"{text[:LENGTH].rstrip()} …"


def make_row(cells: Iterable[Any]) -> str:
    """Return one row of a table."""
    clean = (str(x).replace("|", "\\|").replace("<", "&lt;") for x in cells)
    return f"| {' | '.join(clean)} |"


def make_rule(n: int) -> str:
    """Return the line below the head of a table."""
    return f"|{'---|' * n}"
