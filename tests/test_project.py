"""What a newcomer relies on: templates, policies, workflows, roadmap, support matrix."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from regard.lens import about_model

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("[0-9]*.yml"))
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]


def read(path):
    return (ROOT / path).read_text("utf-8")


def load(path):
    return yaml.safe_load(path.read_text("utf-8"))


def test_the_newest_tested_versions_are_those_that_are_tested():
    lock, newest = read(".ci/lock.txt"), read("tests/newest/requirements.txt")
    (torch,) = re.findall(r"^torch==(\d+\.\d+)", newest, re.MULTILINE)
    (transformers,) = re.findall(r"^transformers==(\d+\.\d+)", lock, re.MULTILINE)
    assert {"torch": torch, "transformers": transformers} == about_model.TESTED


# -- reports -------------------------------------------------------------------------------


def test_a_wrong_number_is_the_first_form():
    assert [path.stem for path in FORMS] == [
        "1-wrong-number",
        "2-bug",
        "3-model",
        "4-question",
    ]
    assert "Highest priority" in load(FORMS[0])["description"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_one_that_github_shows(path):
    form = load(path)
    assert {"name", "description", "body"} <= set(form)
    kinds = [part["type"] for part in form["body"]]
    assert set(kinds) <= {"markdown", "textarea", "input", "dropdown", "checkboxes"}
    ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 0
    if path.stem != "4-question":
        doctor = next(part for part in form["body"] if part.get("id") == "doctor")
        assert "`regard doctor`" in doctor["attributes"]["label"]
        assert doctor["validations"]["required"] is True


def test_policies_name_no_single_person():
    for name in ("SECURITY.md", "CODE_OF_CONDUCT.md"):
        text = read(name)
        assert not re.search(r"\S+@\S+\.\w+", text), name  # an address is one person's
        assert "very\nmaintainer" in text or "very maintainer" in text
    assert "SECURITY.md" in read("docs/security.md")


# -- workflows -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_pinned_and_may_do_nothing_by_default(path):
    found = load(path)
    assert found["permissions"] == {}
    for name, job in found["jobs"].items():
        assert job["timeout-minutes"] <= 120, name
        assert job["permissions"], name
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"]), step
    for line in path.read_text("utf-8").splitlines():
        if "uses:" in line:
            assert re.search(r"# v\d+\.\d+\.\d+$", line), line


def test_every_file_that_a_workflow_runs_exists():
    text = "".join(path.read_text("utf-8") for path in WORKFLOWS)
    files = set(re.findall(r"(?:\.ci|benchmarks)/[\w.]+", text))
    assert {".ci/run", ".ci/release", "benchmarks/support.py"} <= files
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_no_job_of_a_release_may_do_more_than_its_part():
    jobs = load(GITHUB / "workflows/release.yml")["jobs"]
    assert {name: job["permissions"] for name, job in jobs.items()} == {
        "build": {"contents": "read"},
        "pypi": {"id-token": "write"},  # signs the attestations, too
        "github": {"contents": "write"},
    }
    assert [jobs[x]["needs"] for x in ("pypi", "github")] == ["build", "pypi"]


# -- roadmap -------------------------------------------------------------------------------


def test_every_file_of_the_roadmap_exists():
    text = read("docs/roadmap.md")
    names = re.findall(r"`([\w./-]+\.(?:py|md|yml))`", text)
    assert len(names) > 30
    assert [name for name in names if not (ROOT / name).exists()] == []
    rows = text[text.index("| issue |") :].splitlines()[2:]
    assert len(rows) == 10
    for row in rows:
        _, what, files, tests, _ = row.split("|")
        assert re.findall(r"`[^`]+`", files), what
        assert all(
            re.match(r"`tests/(\w+/)?test_", x) for x in tests.strip().split(", ")
        ), what


DECISIONS = sorted(
    x
    for x in (ROOT / "docs/decisions").glob("*.md")
    if x.stem not in ("index", "failed")
)


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_is_short_and_says_when_why_and_where_it_is_tested(path):
    text = path.read_text("utf-8")
    assert re.match(r"# .+\n\n\d{4}-\d\d-\d\d\n\n", text)
    assert len(text.splitlines()) <= 25
    assert len(re.findall(r"\d+", text)) > 3  # a number decided it
    cited = re.findall(r"`((?:tests|benchmarks|fuzz|\.ci)/[\w./]+)`", text)
    assert cited
    assert [name for name in cited if not (ROOT / name).exists()] == []


def test_failed_attempts_are_one_table_in_the_order_of_their_dates():
    assert len(DECISIONS) > 30
    lines = read("docs/decisions/failed.md").splitlines()
    rows = [x.strip("| ").split(" | ") for x in lines if x.startswith("| 2")]
    assert len(rows) > 70
    assert all(len(row) == 3 and all(row) for row in rows)
    assert rows == sorted(rows, key=lambda row: row[0])


# -- versions ------------------------------------------------------------------------------


def test_the_oldest_versions_that_are_promised_were_run_and_passed():
    rows = json.loads(read("benchmarks/libraries.json"))
    oldest = read("tests/oldest/requirements.txt")
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    for name, extra in (("torch", "torch"), ("transformers", "hf")):
        (least,) = re.findall(rf"{name}>=([\d.]+)", " ".join(extras[extra]))
        assert f"{name}=={least}." in oldest
        assert f"{name} {least} or newer" in read("docs/install.md")
        assert rows[0]["packages"][name].startswith(f"{least}.")
    assert not [x for row in rows for x in row["areas"].values() if x["failed"]]
    for row in rows:
        torch, transformers = (row["packages"][x] for x in ("torch", "transformers"))
        assert f"| {torch} | {transformers} |" in read("docs/install.md")


def test_every_version_that_is_promised_was_run_and_passed():
    results = json.loads(read("benchmarks/support.json"))
    run = sorted(x["python"].rpartition(".")[0] for x in results)
    assert run == PYTHONS
    for row in results:
        for area, found in row["areas"].items():
            assert found["failed"] == 0, (row["python"], area)
            assert found["passed"] > 0, (row["python"], area)
        assert row["python"] in read("docs/install.md")
    table = tomllib.loads(read("pyproject.toml"))["project"]
    named = [x.rpartition(" ")[2] for x in table["classifiers"] if ":: 3." in x]
    assert named == PYTHONS
    assert table["requires-python"] == f">={PYTHONS[0]}"
    matrix = load(GITHUB / "workflows/ci.yml")["jobs"]["versions"]["strategy"]["matrix"]
    assert matrix["python"] == PYTHONS
