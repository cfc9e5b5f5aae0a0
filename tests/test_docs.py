"""The documents say what is true: their code runs, their numbers are measured."""

import doctest
import importlib.util
import json
import pkgutil
import re
from pathlib import Path

import pytest

import regard

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODULES = [
    module.name
    for module in pkgutil.walk_packages(regard.__path__, "regard.")
    if not module.name.endswith("__main__")
]


def run_code(path):
    """Run the Python of a page, block after block, as a reader would."""
    scope = {}
    text = path.read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, path.name, "exec"), scope)


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/*.md")), ids=lambda p: p.stem)
def test_the_code_of_the_pages_runs(path):
    run_code(path)


def test_the_code_of_the_readme_runs(capsys):
    run_code(ROOT / "README.md")
    printed = capsys.readouterr().out
    shown = re.findall(r"```text\n(.*?)```", README, flags=re.DOTALL)
    assert len(shown) == 2
    assert all(text.strip() in printed for text in shown)


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("masks", "README.md"),
        ("engine", "docs/engine.md"),
        ("ring", "docs/engine.md"),
        ("generate", "docs/models.md"),
        ("training", "docs/models.md"),
        ("tasks", "docs/models.md"),
        ("heads", "docs/models.md"),
        ("families", "docs/families.md"),
        ("lens", "docs/lens.md"),
        ("check", "docs/check.md"),
        ("stats", "docs/stats.md"),
        ("map", "docs/show.md"),
        ("page", "docs/show.md"),
    ],
)
def test_the_numbers_of_the_pages_were_measured(name, page, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    path = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    result = json.loads(path.with_suffix(".json").read_text("utf-8"))
    assert benchmark.render(result) in (ROOT / page).read_text("utf-8")


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_links_of_the_documents_lead_somewhere():
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
        for target in re.findall(r"`((?:docs|tests|benchmarks|src)/[\w/.]+)`", text):
            assert (ROOT / target).exists(), f"{path.name}: {target}"


def test_the_version_stands_in_the_changelog():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {regard.__version__}" in changelog
