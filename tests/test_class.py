"""A teacher builds the course, serves it and grades a class, with all that goes wrong."""

import csv
import json
import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from urllib.request import urlopen
from zipfile import ZipFile

import pytest
from click.testing import CliRunner

from regard.__main__ import main
from regard.errors import FileError
from regard.learn.exercise import list_exercises
from regard.learn.grade_class import explain_name, grade_folder, grade_submissions
from regard.learn.notebook_file import drop_magics, read_code_cells
from regard.learn.submissions import open_submissions

DOCS = Path(__file__).parent.parent / "docs"
COURSE = {exercise.name: exercise for exercise in list_exercises()}
SCORE = "def one_score(q, k):\n    return q @ k\n"
SOFTMAX = """import numpy as np
def softmax(scores):
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
"""


NOT_A_NAME = "this is not the name of an exercise; it is not graded.\n"


def write_notebook(path, *cells):
    code = [{"cell_type": "code", "source": x.splitlines(keepends=True)} for x in cells]
    text = [{"cell_type": "markdown", "source": ["def one_score(q, k): return 0"]}]
    path.write_text(json.dumps({"nbformat": 4, "cells": text + code}), "utf-8")


@pytest.fixture(scope="module")
def submissions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("class")
    for name in ("ada", "ben", "cyd", ".git", "ada/.ipynb_checkpoints"):
        (folder / name).mkdir()
    (folder / "README.md").write_text("our class")
    (folder / ".git" / "softmax.py").write_text(SOFTMAX)
    (folder / "ada" / ".ipynb_checkpoints" / "softmax.py").write_text("1 / 0")
    (folder / "ada" / "progress.json").write_text("{}")
    (folder / "ada" / "one_score.py").write_text(SCORE)
    write_notebook(
        folder / "ada" / "softmax.ipynb",
        "%matplotlib inline\n!pip install numpy\nprint(undefined)\n",
        SOFTMAX,
        "softmax(1, 2, 3)\n",
    )
    write_notebook(
        folder / "ben" / "one_score.ipynb",
        "x = 1",
        "def one_score(q, k):\n    return q * z\n",
    )
    (folder / "ben" / "Softmax (final).py").write_text(SOFTMAX)
    (folder / "ben" / "work.py").write_text(SOFTMAX)
    (folder / "ben" / "notes.txt").write_text("=1+1")
    return folder


@pytest.fixture(scope="module")
def graded(submissions, tmp_path_factory):
    """Grade as a teacher does; return what was printed, the CSV and the JSON."""
    place = tmp_path_factory.mktemp("results")
    (place / "names.txt").write_text("ada\nben\ncyd\n=dan\n")
    command = [
        "learn",
        "grade",
        str(submissions),
        "--learners",
        str(place / "names.txt"),
    ]
    done = CliRunner().invoke(main, [*command, "--csv", str(place / "results.csv")])
    assert done.exit_code == 0, done.output
    return done.output, (place / "results.csv").read_text("utf-8")


def test_the_summary_is_per_learner_and_per_exercise(graded):
    assert graded[0] == (
        "learner  right\n"
        "=dan     0 of 2   missing: one_score, softmax\n"
        "ada      2 of 2\n"
        "ben      0 of 2   missing: softmax\n"
        "cyd      0 of 2   missing: one_score, softmax\n"
        "\n"
        "exercise   right\n"
        "one_score  1 of 4   1× one_score raised NameError in cell 2, line 2 (return "
        "q * z)…\n"
        "softmax    1 of 4\n"
        "\n"
        "README.md: this is not the name of an exercise; it is not graded.\n"
        "ben/Softmax (final).py: this is not the name of an exercise; expected "
        "softmax.py?\n"
        "ben/notes.txt: this is not the name of an exercise; it is not graded.\n"
        "ben/work.py: this is not the name of an exercise; expected softmax.py?\n"
    )


def test_every_learner_has_a_row_for_every_exercise_in_the_table(graded):
    rows = list(csv.DictReader(StringIO(graded[1])))
    found = {(x["learner"], x["exercise"]): x["status"] for x in rows if x["exercise"]}
    assert found == {
        ("'=dan", "one_score"): "missing",
        ("'=dan", "softmax"): "missing",
        ("ada", "one_score"): "right",
        ("ada", "softmax"): "right",
        ("ben", "one_score"): "wrong",
        ("ben", "softmax"): "missing",
        ("cyd", "one_score"): "missing",
        ("cyd", "softmax"): "missing",
    }
    assert [x["file"] for x in rows if x["status"] == "misnamed"] == [
        "README.md",
        "ben/Softmax (final).py",
        "ben/notes.txt",
        "ben/work.py",
    ]
    assert not [x for row in rows for x in row.values() if x.startswith("=")]


def test_the_assigned_exercises_can_be_named(submissions):
    report = grade_folder(submissions, COURSE, assigned=("attend",))
    found = {
        (row.learner, row.status) for row in report.rows if row.exercise == "attend"
    }
    assert found == {("ada", "missing"), ("ben", "missing"), ("cyd", "missing")}
    (row,) = [row for row in report.rows if row.file == "ada/one_score.py"]
    assert (row.exercise, row.status) == ("one_score", "unassigned")
    assert row.sentence == (
        "one_score is not one of the assigned exercises; it is not graded."
    )
    assert report.summarize().endswith(
        "\nnot graded, because it was not assigned: one_score (2), softmax (1)\n"
    )
    assert report.count("exercise").keys() == {"attend"}
    with pytest.raises(FileError, match='no exercise "atend", expected one of one_sc'):
        grade_folder(submissions, COURSE, assigned=("atend",))
    with pytest.raises(FileError, match="there is no folder"):
        grade_folder(submissions / "nobody", COURSE)


def save_work(**codes):
    """Return a file as the site saves it; test_lesson.py grades a real one."""
    exercises = {name: {"code": code, "hints": 1} for name, code in codes.items()}
    told = {"format": "regard-learn-work-1", "exercises": exercises}
    return json.dumps(told | {"extra": 1})


def test_saved_work_and_zips_are_graded_like_folders(tmp_path):
    inner = tmp_path / "inner.zip"
    with ZipFile(inner, "w") as file:
        file.writestr("src/one_score.py", SCORE)
        file.writestr("__MACOSX/src/._one_score.py", "1 / 0")
    nested = inner.read_bytes()
    with ZipFile(inner, "a") as file:
        file.writestr("again.zip", nested)  # might contain itself
    with ZipFile(tmp_path / "class.zip", "w") as file:
        file.writestr("hw1/ada/regard-work.json", save_work(one_score=SCORE, scores=""))
        file.writestr("hw1/ben.zip", inner.read_bytes())
        file.writestr("hw1/cyd/", "")
        file.writestr("hw1/dan.json", save_work())
    command = ["learn", "grade", str(tmp_path / "class.zip"), "--exercise", "one_score"]
    done = CliRunner().invoke(main, command)
    assert done.output == (
        "learner  right\n"
        "ada      1 of 1\n"
        "ben      1 of 1\n"
        "cyd      0 of 1   missing: one_score\n"
        "\n"
        "exercise   right\n"
        "one_score  2 of 3\n"
        "\n"
        f"dan.json: {NOT_A_NAME}"
        f"ben.zip/again.zip: {NOT_A_NAME}"
        "not graded, because it was not assigned: scores (1)\n"
    )
    (tmp_path / "ada.json").write_text(save_work(**{"../softmx": "1"}))
    done = CliRunner().invoke(main, ["learn", "grade", str(tmp_path / "ada.json")])
    assert done.output.endswith("ada.json/.._softmx.py: " + NOT_A_NAME)


def test_a_zip_stays_in_its_place_and_may_not_be_huge(tmp_path, monkeypatch):
    with ZipFile(tmp_path / "a.zip", "w") as file:
        for name in ("../../up.py", "/root.py", "c:\\..\\x.py", "ada/more.zip"):
            file.writestr(name, "1")
    with open_submissions(tmp_path / "a.zip") as handed:
        places = [x.path for x in handed.files]
        assert [x.file for x in handed.files] == [
            *("root.py", "up.py", "ada/more.zip", "c_/x.py")
        ]
        assert (
            len({x.parents[1 + (x.parent.name in ("ada", "c_"))] for x in places}) == 1
        )
    assert not any(x.exists() for x in places)
    (tmp_path / "a.zip").rename(tmp_path / "softmax.zip")
    monkeypatch.setattr("regard.learn.submissions.MANY", 3)
    with pytest.raises(
        FileError, match=r"has 4 files of 4 bytes, expected at most 3 f"
    ):
        grade_folder(tmp_path / "softmax.zip", COURSE)
    with open_submissions(tmp_path) as handed:  # is reported as any other file
        assert [x.file for x in handed.files] == ["softmax.zip"]


def test_the_json_of_the_page_is_what_is_printed():
    page = (DOCS / "learn.md").read_text("utf-8")
    request, answer = re.findall(r"^```json\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    done = CliRunner().invoke(main, ["learn", "grade", "-", "--json"], input=request)
    assert done.output == answer
    table = page.partition("| status |")[2].partition("\n\n")[0]
    statuses = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    assert re.findall(r"\w+", " ".join(statuses)) == [
        *("right", "wrong", "unwritten", "missing", "misnamed", "unassigned")
    ]
    told = json.loads(answer)
    space = {}
    exec(json.loads(request)["submissions"][0]["source"], space)
    exec(told["results"][0]["call"], space)  # can be pasted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the submissions are not JSON: "),
        ("[" * 100_000, "the submissions are not JSON: "),
        ("[]", '"format" is null, expected "regard-learn-1".'),
        ('{"format": "regard-learn-1"}', '"submissions" is missing, expected a list.'),
        (
            '{"format": "regard-learn-1", "submissions": [], "learners": [1]}',
            '"learners" is not a list of names.',
        ),
        (
            '{"format": "regard-learn-1", "submissions": [{"learner": "a"}]}',
            'submission 0 needs texts "learner", "exercise" and "source", or a '
            '"notebook" instead of the last.',
        ),
    ],
)
def test_a_request_that_is_wrong_is_refused(text, message):
    with pytest.raises(FileError) as error:
        grade_submissions(text, COURSE)
    assert str(error.value).startswith(message)


def test_a_submission_of_a_platform_stays_in_its_place():
    one = {"learner": "../../x", "exercise": "../../softmax", "source": SOFTMAX}
    two = {"learner": "b", "exercise": "one_score", "notebook": ["no", "notebook"]}
    three = {"learner": "b", "exercise": "scores", "source": COURSE["scores"].stub}
    request = {"format": "regard-learn-1", "submissions": [one, two, three]}
    report = grade_submissions(json.dumps(request), COURSE)
    found = {(x.learner, x.file or x.exercise): x.status for x in report.rows}
    assert found == {
        ("../../x", "../../softmax.py"): "misnamed",
        ("../../x", "one_score"): "missing",
        ("../../x", "scores"): "missing",
        ("b", "one_score.ipynb"): "wrong",
        ("b", "scores.py"): "unwritten",
    }
    (row,) = [x for x in report.rows if x.file == "one_score.ipynb"]
    assert row.sentence == (
        "one_score.ipynb is not a notebook (TypeError), expected the JSON of Jupyter, "
        "version 4."
    )


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("sofmax.py", "", "expected softmax.py?"),
        ("softmax.py.txt", "", "expected softmax.py?"),
        ("softmax_assignsubmission_ada.ipynb", "", "expected softmax.ipynb?"),
        ("a1.py", "def scaled_scores(q, k):\n", "expected scaling.py?"),
        ("all.py", "def softmax(s):\n    1\ndef attend(q):\n", "it is not graded."),
        ("softmax.zip", "\0\xff", "expected softmax.py?"),
        ("x.ipynb", "[" * 9_999, "it is not graded."),
    ],
)
def test_a_misnamed_file_is_told_its_name(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text, "latin-1")
    assert explain_name(tmp_path / name, COURSE).endswith(f"; {expected}")


def test_lines_for_ipython_are_skipped(tmp_path):
    assert drop_magics("%%bash\nls\n") == "# %%bash\n# ls\n# "
    assert drop_magics("%%time\nx = 1") == "# %%time\nx = 1"
    assert drop_magics("if x:\n    !ls\ny = !ls") == "if x:\n    pass  # !ls\ny = None"
    assert drop_magics("np.exp?\nx = 7\\\n% 3") == "# np.exp?\nx = 7\\\n# % 3"
    assert drop_magics("x = (7\n% 3)") == "x = (7\n% 3)"  # Python as it is
    write_notebook(tmp_path / "a.ipynb", "a?\n")
    assert read_code_cells(tmp_path / "a.ipynb") == ["# a?\n"]


@pytest.mark.skipif(not os.environ.get("REGARD_PYODIDE"), reason="needs Pyodide")
def test_a_teacher_builds_and_serves_the_course(tmp_path):
    command = ["--build", str(tmp_path), "--pyodide", os.environ["REGARD_PYODIDE"]]
    done = CliRunner().invoke(main, ["learn", *command])
    assert done.exit_code == 0, done.output
    assert done.output.endswith(f"To see it: python -m http.server -d {tmp_path}\n")
    served = [sys.executable, "-u", "-m", "http.server", "-d", str(tmp_path), "0"]
    with subprocess.Popen(served, stdout=subprocess.PIPE, text=True) as server:
        try:
            port = re.search(r"port (\d+)", server.stdout.readline())[1]
            for name, kind in {
                "index.html": "text/html",
                "lesson.js": "text/javascript",
                "pyodide/pyodide.mjs": "text/javascript",
                "pyodide/pyodide.asm.wasm": "application/wasm",
            }.items():
                with urlopen(f"http://127.0.0.1:{port}/{name}") as answer:
                    assert answer.headers.get_content_type() == kind
        finally:
            server.terminate()


def test_a_build_without_network_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("regard.learn.pyodide_files.NPM", "http://127.0.0.1:9/a.tgz")
    done = CliRunner().invoke(main, ["learn", "--build", str(tmp_path / "site")])
    assert done.exit_code == 1
    assert "could not be downloaded from npm: npm is not installed" in done.output
    assert "build with --pyodide FOLDER" in done.output
    assert not (tmp_path / "site").exists()
