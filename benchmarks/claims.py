"""Every number that the README claims, and where it comes from: docs/benchmarks.md.

    python benchmarks/claims.py        writes the tables and the dates (claims.json)

A claim is a sentence of the README with placeholders. Their values are read from a
committed result or counted in the source, never typed. A result gets a new date when
its file changes. tests/test_site_docs.py checks that README, results and page agree.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from marks import fill

from regard.judge.run_check import order_cases
from regard.learn.course import ORDER

HERE = Path(__file__).parent
NOT_RUN = "not run"  # already out of memory at half the length
ROOT = HERE.parent
MARK = "<!-- benchmark:claims -->"
BESIDE = "<!-- benchmark:beside -->"
PAPER = r"(?:Kimi Team|\w+ et al\.) 20\d\d"
SCORES = ("head_scores", "text_scores", "cache_scores")
WORDS = (
    "no one two three four five six seven eight nine ten eleven twelve thirteen "
    "fourteen fifteen sixteen seventeen eighteen nineteen twenty"
)


def list_papers() -> set[str]:
    """Return the papers that the scores name, each once."""
    files = (f"src/regard/stats/{name}.py" for name in SCORES)
    return {paper for file in files for paper in find(file, PAPER)}


class Claim(NamedTuple):
    """A sentence of the README, and the script and result behind it."""

    says: str  # {} is the placeholder of a number
    script: str  # produces the result
    result: str  # the JSON file of the result, or the file that is counted
    read: Callable[[], tuple[object, ...]]  # returns the placeholder values
    when: str = "every CI run"  # unless the result has a date


def load(name: str) -> Any:
    """Return a committed result."""
    return json.loads((HERE / name).read_text("utf-8"))


def find(path: str, pattern: str) -> list[Any]:
    """Return what a pattern finds in a file of the project."""
    return re.findall(pattern, (ROOT / path).read_text("utf-8"))


def count_families() -> tuple[object, ...]:
    """Count the models whose outputs are the same, and refuse if one is not."""
    found = load("families.json")
    different = [name for name, x in found.items() if not x["same_bits"]]
    if different:
        raise SystemExit(f"not bit-identical under the lens: {different}")
    return (len(found), sum(x["seen"] > 0 for x in found.values()))


def count_field() -> tuple[object, ...]:
    """Count the cases of the field that ran, and those recorded or reported."""
    found = json.loads((ROOT / "tests/wild/results.json").read_text("utf-8"))
    kinds = ("correct", "reported", "wrong", "broke")
    counts = [sum(len(x.get(kind, ())) for x in found.values()) for kind in kinds]
    if any(counts[2:]):
        raise SystemExit("a model of the field is wrong, or broke")
    return (sum(counts), counts[0], counts[1])


def count_mutations() -> tuple[object, ...]:
    """Count the deliberate errors in the lists that tests/mutate.py runs."""
    lists = ROOT.glob("tests/mutations/*.diff")
    return (sum(len(find(str(path), r"(?m)^# ")) for path in lists),)


def count_combinations() -> tuple[object, ...]:
    """Multiply the lengths of the lists that the engine's test goes through."""
    names = {"MASKS", "OPTIONS", "DTYPES", "HEADS", "WIDTHS"}
    tree = ast.parse((ROOT / "tests/test_engine.py").read_text("utf-8"))
    found = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    sizes = [len(vars(found[x]).get("elts") or vars(found[x])["keys"]) for x in names]
    return (f"{math.prod(sizes):,}",)


def count_standard() -> tuple[object, ...]:
    """Return how many cases of the standard run, and how many on the strict library."""
    (numbers,) = find("tests/test_onnx.py", r"len\(cases\) for .* == \[(\d+), (\d+)")
    return (numbers[0], numbers[0], numbers[1], numbers[1])


def count_lessons() -> tuple[object, ...]:
    """Count the lessons, as a word."""
    return (WORDS.split()[len([*ROOT.glob("lessons/[0-9]*.py")])].capitalize(),)


def measure_picture() -> tuple[object, ...]:
    """Return the next word in the picture at the top, and the heads of the model."""
    heads = {re.sub(r" heads.*", "", key) for key in load("page.json")["pages"]}
    (word,) = find("docs/pictures.py", r'next_word == " (\w+)"')
    return (word, max(map(int, heads)))


CLAIMS = (
    Claim(
        'its next word is "{}". The colours are the largest weight that any of its {} '
        "heads gives to a word",
        "docs/pictures.py",
        "docs/pictures/story.png",
        measure_picture,
    ),
    Claim(
        "The outputs of {} small models, of many families and styles, are "
        "bit-identical under the lens; it records the attention of {} of them",
        "benchmarks/families.py",
        "benchmarks/families.json",
        count_families,
    ),
    Claim(
        "Of {} models and generations of transformers, timm and other libraries, {} "
        "are recorded completely; for the other {}, the report says what is missing",
        "tests/wild/run.py",
        "tests/wild/results.json",
        count_field,
    ),
    Claim(
        "every weight of all {} heads available afterwards",
        "benchmarks/lens.py",
        "benchmarks/lens.json",
        lambda: measure_picture()[1:],
    ),
    Claim(
        "with a limit of {} GB",
        "benchmarks/peers.py",
        "benchmarks/peers.json",
        lambda: (load("peers.json")["about"]["limit_GB"],),
    ),
    Claim(
        "generation under the lens takes {} times as long",
        "benchmarks/lens.py",
        "benchmarks/lens.json",
        lambda: (f"{load('lens.json')['generation']['ratio']:.2f}",),
    ),
    Claim(
        "the scores of {} papers",
        "tests/test_presets.py",
        "src/regard/stats/published.py",
        lambda: (WORDS.split()[len(list_papers())],),
    ),
    Claim(
        "{} cases, each the smallest inputs that show one pitfall",
        "benchmarks/check.py",
        "benchmarks/check.json",
        lambda: (len(order_cases("kernel")),),
    ),
    Claim(
        "{} exercises, from one dot product to a head in a real model",
        "tests/test_exercises.py",
        "src/regard/learn/course.py",
        lambda: (len(ORDER),),
    ),
    Claim(
        "{} short lessons to read first",
        "tests/test_lessons.py",
        "lessons/build.py",
        count_lessons,
    ),
    Claim(
        "{} of the {} ONNX Attention node tests on NumPy, PyTorch and JAX; {} of the "
        "{} that apply on array-api-strict",
        "tests/test_onnx.py",
        "tests/test_onnx.py",
        count_standard,
    ),
    Claim(
        "{} deliberate errors (mutations) that the tests must catch",
        "tests/mutate.py",
        "tests/mutate.py",
        count_mutations,
        "core mutations in every CI run, each one when it was written",
    ),
    Claim(
        "{} combinations of masks, dtypes, head counts, widths, biases and sinks",
        "tests/test_engine.py",
        "tests/test_engine.py",
        count_combinations,
    ),
    Claim(
        "the {} mistakes that people make with attention",
        "tests/test_pitfalls.py",
        "docs/pitfalls.md",
        lambda: (len(find("docs/pitfalls.md", r"(?m)^\| [a-z]\w+ \| ")) - 1,),
    ),
)


def find_page(name: str) -> str | None:
    """Return the page of docs/ that shows a result: where its script writes it."""
    shown = {"peers": "lens"}.get(name, name)  # theirs stand beside ours
    docs = ROOT / "docs"
    for path in (*sorted(docs.glob("*.md")), *sorted(docs.glob("howto/*.md"))):
        if f"<!-- benchmark:{shown} -->" in path.read_text("utf-8"):
            return str(path.relative_to(docs))
    return None


def write_sentence(claim: Claim) -> str:
    """Return the words of a claim with its numbers."""
    return claim.says.format(*claim.read())


def hash_results() -> dict[str, str]:
    """Return a digest of every committed result."""
    paths = (path for path in sorted(HERE.glob("*.json")) if path.stem != "claims")
    return {x.name: hashlib.sha256(x.read_bytes()).hexdigest()[:12] for x in paths}


def date_results(known: dict[str, Any], today: str) -> dict[str, Any]:
    """Return the digest and date of every result; what changed gets a new date."""
    found = hash_results()
    return {
        name: known[name]
        if known.get(name, {}).get("sha256") == digest
        else {"sha256": digest, "date": today}
        for name, digest in found.items()
    }


def render(dates: dict[str, Any]) -> str:
    """Return both tables as Markdown."""
    lines = ["| claim in the README | script | result | date |", "|---|---|---|---|"]
    for claim in CLAIMS:
        name = Path(claim.result).name
        date = dates[name]["date"] if name in dates else claim.when
        sentence = write_sentence(claim)
        lines.append(f"| {sentence} | `{claim.script}` | `{claim.result}` | {date} |")
    lines += ["", "Other measurements, shown on their own pages:", ""]
    lines += ["| page | script | result | date |", "|---|---|---|---|"]
    for name, result in dates.items():
        stem = Path(name).stem
        page = find_page(stem)
        if page is not None:
            script = "support" if stem == "libraries" else stem  # it has two tables
            made = f"`benchmarks/{script}.py` | `benchmarks/{name}`"
            lines.append(f"| [{Path(page).stem}]({page}) | {made} | {result['date']} |")
    return "\n".join(lines)


def render_beside() -> str:
    """Return the table that compares memory and time with other tools."""
    ours, theirs = load("lens.json")["sizes"], load("peers.json")["sizes"]
    sizes = sorted(ours, key=int)
    rows = {
        "regard": [f"{ours[n]['watched']['MB']:,.0f} MB" for n in sizes],
        "regard, time": [f"{ours[n]['ratio']:.2f}" for n in sizes],
        "transformers, `output_attentions`": [
            write_size(ours[n].get("eager")) for n in sizes
        ],
        "TransformerLens, patterns only": [
            write_size(theirs.get(n, {}).get("transformer_lens", NOT_RUN))
            for n in sizes
        ],
        "nnsight": [
            write_size(theirs.get(n, {}).get("nnsight", NOT_RUN)) for n in sizes
        ],
    }
    head = ["tokens", *(f"{int(n):,}" for n in sizes)]
    table = [head, ["---"] * len(head), *([name, *x] for name, x in rows.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in table)


def write_size(found: Any) -> str:
    """Return the peak memory of a peer, or OOM."""
    if found == NOT_RUN:
        return NOT_RUN
    return f"{found['MB']:,.0f} MB" if isinstance(found, dict) else "OOM"


def main() -> None:
    """Date the results and write the tables."""
    for page in ("README.md", "docs/related.md"):
        fill(page, BESIDE, render_beside())
    path = HERE / "claims.json"
    known = load("claims.json") if path.exists() else {}
    dates = date_results(known, datetime.now(tz=UTC).date().isoformat())
    path.write_text(json.dumps(dates, indent=1) + "\n", "utf-8")
    fill("docs/benchmarks.md", MARK, render(dates))


if __name__ == "__main__":
    main()
