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


def test_the_code_of_the_readme_runs(capsys):
    scope = {}
    for block in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL):
        exec(compile(block, "README.md", "exec"), scope)
    printed = capsys.readouterr().out
    shown = re.findall(r"```text\n(.*?)```", README, flags=re.DOTALL)
    assert len(shown) == 2
    assert all(text.strip() in printed for text in shown)


def test_the_numbers_of_the_readme_were_measured():
    spec = importlib.util.spec_from_file_location("b", ROOT / "benchmarks" / "masks.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    results = json.loads((ROOT / "benchmarks" / "masks.json").read_text("utf-8"))
    assert benchmark.render(results["results"]) in README


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
