"""`regard learn`, pytest --regard-exercises: driven as a learner and a teacher do."""

import csv
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points

import pytest
from click.testing import CliRunner
from rich.console import Console

from regard.__main__ import main
from regard.errors import FileError, OptionError
from regard.learn.exercise import list_exercises, read_exercise
from regard.learn.grade_file import attempt
from regard.learn.workspace import Workspace

SOFTMAX = read_exercise("softmax")
RIGHT = {x.name: f"import numpy as np\n\n\n{x.solution}" for x in list_exercises()[:3]}
WRONG = "def one_score(q, k):\n    print('here')\n    return q * k\n"


@pytest.fixture
def desk(tmp_path):
    return start(tmp_path / "mine")


def start(folder):
    console = Console(file=io.StringIO(), width=100, highlight=False)
    return Workspace(folder, console=console)


def printed(desk):
    return desk.console.file.getvalue()


def solve(desk, name):
    desk.open(name)
    desk.path(desk.find(name)).write_text(RIGHT[name], encoding="utf-8")
    return desk.grade(desk.find(name))


def test_an_exercise_is_opened_as_a_file_with_its_stub(desk):
    desk.open()
    path = desk.folder / "one_score.py"
    assert path.read_text("utf-8") == read_exercise("one_score").stub
    assert "One query, one key" in printed(desk)
    assert "[1, 2]" in printed(desk)
    path.write_text("mine = 1\n", encoding="utf-8")
    desk.open("1")
    assert path.read_text("utf-8") == "mine = 1\n"  # never overwritten


def test_a_text_is_wrapped_between_words_and_formulas_are_left_alone(tmp_path):
    narrow = Workspace(tmp_path, console=Console(file=io.StringIO(), width=60))
    narrow.open("scores")
    lines = printed(narrow).splitlines()
    # a path is not broken: it is clicked, or copied
    assert all(len(line) <= 60 for line in lines if "lessons/" not in line)
    assert "    scores[i, j] = q[i] · k[j]        a table of shape (N, M)"[:59] in (
        line[:59] for line in lines
    )
    text = " ".join(printed(narrow).split())
    assert "They are stacked as the rows of two matrices, q of shape (N, d)" in text


def test_headings_of_a_text_come_without_marks(desk):
    desk.open("softmax")
    assert "\nLarge scores\n" in printed(desk)
    assert "#" not in printed(desk)


def test_progress_is_kept_and_resumed(desk):
    assert solve(desk, "one_score").passed
    assert desk.find().name == "scores"
    desk.open("softmax")
    again = start(desk.folder)
    assert again.find().name == "softmax"  # where one stopped
    assert again.progress.solved == ["one_score"]
    again.list()
    rows = [line.split() for line in printed(again).splitlines()]
    assert [row[0] for row in rows[1:5]] == ["✓", "2", "→", "4"]
    assert f"1 of {len(again.exercises)} solved" in printed(again)


def test_a_wrong_file_is_not_solved(desk):
    desk.open()
    (desk.folder / "one_score.py").write_text(WRONG, encoding="utf-8")
    found = desk.grade(desk.find())
    assert found.mistake == "no_sum"
    assert found.printed.startswith("here\n")
    assert "✗ That gives the d products of the pairs of numbers" in printed(desk)
    assert "one_score(q, k)" in printed(desk)
    assert start(desk.folder).progress.tries == {"one_score": 1}
    assert not desk.progress.solved


def test_each_hint_tells_one_more(desk):
    for n in (1, 2, 3, 3):
        before = len(printed(desk))
        desk.hint()
        told = printed(desk)[before:]
        assert told.count("Hint ") == n
    assert start(desk.folder).progress.hints == {"one_score": 3}


def test_reset_brings_the_stub_back_and_keeps_what_was_written(desk):
    solve(desk, "one_score")
    desk.reset("one_score")
    assert desk.find().name == "one_score"
    stub = (desk.folder / "one_score.py").read_text("utf-8")
    assert "NotImplementedError" in stub
    assert (desk.folder / "one_score.old").read_text("utf-8") == RIGHT["one_score"]
    desk.reset("one_score")  # nothing was written since
    assert (desk.folder / "one_score.old").read_text("utf-8") == RIGHT["one_score"]
    for name in ("one_score.old1", "one_score.old2"):
        (desk.folder / "one_score.py").write_text(name, encoding="utf-8")
        desk.reset("one_score")
        assert (desk.folder / name).read_text("utf-8") == name
    assert (desk.folder / "one_score.old").read_text("utf-8") == RIGHT["one_score"]


def test_next_skips_what_is_solved_and_comes_back(desk):
    solve(desk, "scores")
    desk.open("one_score")
    desk.next()
    assert desk.find().name == "softmax"
    last = list(desk.exercises)[-1]
    assert desk.follow(desk.find(last)).name == "one_score"
    desk.progress.solved[:] = list(desk.exercises)
    assert desk.follow(desk.find(last)) is None


def test_what_is_not_there_is_said(desk):
    with pytest.raises(OptionError, match='no exercise "99"; expected one of one_sc'):
        desk.find("99")
    for odd in ("²", "9" * 5_000):
        with pytest.raises(OptionError, match="no exercise"):
            desk.find(odd)


@pytest.mark.parametrize(
    "told",
    [
        '{"solved": 3}',
        '{"solved": [], "hints": {"masks": Infinity}, "tries": {}, "current": ""}',
        "[" * 100_000,
    ],
)
def test_a_damaged_file_of_progress_is_refused(desk, told):
    desk.open()
    desk.progress.path.write_text(told, encoding="utf-8")
    with pytest.raises(FileError, match=r"progress\.json cannot be read .* Remove it"):
        start(desk.folder)


def test_a_count_of_hints_below_none_tells_the_first(desk):
    desk.progress.hints["one_score"] = -7
    desk.hint()
    assert "Hint 1 of 3" in printed(desk)


def test_watching_grades_on_every_save_and_goes_on(desk):
    """Each step is what the learner does after the last output."""
    steps = iter(
        [
            lambda: None,
            lambda: "hint",
            lambda: write("one_score", WRONG),
            lambda: "what?",
            lambda: write("one_score", RIGHT["one_score"]),
            lambda: None,
            lambda: "next",
            lambda: write("softmax", RIGHT["softmax"]),
            lambda: "quit",
        ]
    )

    def write(name, text):
        (desk.folder / f"{name}.py").write_text(text, encoding="utf-8")

    def hear():
        return next(steps)()

    desk.watch(listen=lambda: hear)
    assert desk.progress.solved == ["one_score", "softmax"]
    told = [
        "one_score is not written yet.",
        "Hint 1 of 3",
        "✗ That gives the d products",
        "Enter one of: hint",
        "✓ Right.",
        "return q @ k",
        "2. All queries and all keys",
        "scores is not written yet.",
        "3. Softmax",
        "✓ Right.",
    ]
    text = printed(desk)
    at = 0
    for part in told:
        assert part in text[at:], part
        at = text.index(part, at) + 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def softmax(:", "Python cannot read line 1 (def softmax(:):"),
        ("a = 1\nb = a / 0\n", "raised ZeroDivisionError in line 2 (b = a / 0)"),
        ("import sys\nsys.exit()\n", "raised SystemExit in line 2 (sys.exit())."),
        ("import os\nos._exit(0)\n", "Python ended before the function was graded"),
        ("x = 1\n", "there is no function softmax in softmax.py: write def softmax."),
        ("from numpi import x\n", "No module named 'numpi'"),
        ("a\0b", "Python cannot read line"),
        (
            "def softmax(s):\n    while 1: pass\n",
            "It did not answer within 0.5 seconds",
        ),
        (
            "while True: pass\n",
            "It took more than 3 seconds: is there an endless loop?",
        ),
        (
            "import os\ndef softmax(s): os.kill(os.getpid(), 9)",
            "Python ended before the function was graded",
        ),
    ],
)
def test_no_file_can_take_the_runner_down(tmp_path, text, sentence):
    path = tmp_path / "softmax.py"
    path.write_text(text, encoding="utf-8")
    whole = 3 if text.startswith("while") else 20
    found = attempt(SOFTMAX, path, limits=(0.5, whole))
    assert not found.passed
    assert sentence in found.sentence
    assert "Traceback" not in found.sentence


def test_a_file_may_begin_with_the_mark_of_an_editor(tmp_path):
    path = tmp_path / "softmax.py"
    path.write_text(RIGHT["softmax"], encoding="utf-8-sig")
    assert attempt(SOFTMAX, path).passed


def test_a_file_that_is_not_there_is_said(tmp_path):
    found = attempt(SOFTMAX, tmp_path / "softmax.py")
    told = "softmax.py does not exist yet: regard learn open softmax creates it."
    assert found.sentence == told


def test_files_of_the_learner_can_be_used_but_hide_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("numpy", "sched"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError", encoding="utf-8")
    (tmp_path / "scores.py").write_text(RIGHT["softmax"], encoding="utf-8")
    path = tmp_path / "softmax.py"
    path.write_text("import sched\nfrom scores import softmax\n", encoding="utf-8")
    found = attempt(SOFTMAX, path)
    assert found.passed, found


def test_what_a_file_prints_cannot_steer_the_terminal(tmp_path):
    path = tmp_path / "softmax.py"
    path.write_text(f"print('\\x1b[2J' + 'x' * 5000)\n{RIGHT['softmax']}", "utf-8")
    found = attempt(SOFTMAX, path)
    assert found.passed
    assert found.printed.startswith("[2Jxxx")
    assert len(found.printed) < 2100


def run(*arguments, cwd):
    return CliRunner().invoke(main, ["learn", "--folder", str(cwd), *arguments])


def test_the_commands_work(tmp_path):
    assert "0 of" in run(cwd=tmp_path).output
    done = run("open", "3", cwd=tmp_path)
    assert done.exit_code == 0, done.output
    assert "Softmax" in done.output
    assert run("check", "3", cwd=tmp_path).exit_code == 1
    (tmp_path / "softmax.py").write_text(RIGHT["softmax"], encoding="utf-8")
    done = run("check", "softmax", cwd=tmp_path)
    assert done.exit_code == 0
    assert done.output.endswith("Right.\nContinue with: regard learn open scaling\n")
    assert "Hint 1 of 3 for one_score" in run("hint", cwd=tmp_path).output
    assert "2. All queries" in run("next", cwd=tmp_path).output
    again = run("reset", "softmax", cwd=tmp_path).output
    assert "is the stub again" in " ".join(again.split())
    wrong = run("open", "sofmax", cwd=tmp_path)
    assert wrong.exit_code == 1
    assert wrong.output.startswith('Error: no exercise "sofmax"; did you mean softmax?')


def read_until(master, pattern, seconds=90):
    """Read a terminal until something is printed."""
    text, end = "", time.monotonic() + seconds
    while time.monotonic() < end:
        if select.select([master], [], [], 0.2)[0]:
            text += os.read(master, 65536).decode("utf-8", "replace")
        if re.search(pattern, text):
            return text
    raise AssertionError(f"no {pattern!r} in {text!r}")


# a shell that starts tests in the background may have turned Ctrl-C off
HEAR_INTERRUPTS = """
import signal
from regard.__main__ import main
signal.signal(signal.SIGINT, signal.default_int_handler)
main(["learn", "watch"])
"""


def test_a_learner_at_a_plain_terminal(tmp_path):
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "vt100", "COLUMNS": "80", "NO_COLOR": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", HEAR_INTERRUPTS],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=tmp_path,
        env=environment,
    )
    try:
        read_until(master, r"not written yet")
        os.write(master, b"hint\n")
        read_until(master, r"Hint 1 of 3 for one_score")
        path = tmp_path / "regard-exercises" / "one_score.py"
        path.write_text(WRONG, encoding="utf-8")
        read_until(master, r"That gives the d products")
        new = path.with_suffix(".new")  # as editors save
        new.write_text(RIGHT["one_score"], encoding="utf-8")
        new.replace(path)
        text = read_until(master, r"scores is not written yet")
        assert "Right." in text
        process.send_signal(signal.SIGINT)  # Ctrl-C
        read_until(master, r"Continue later with: regard learn watch")
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)
    kept = json.loads((path.parent / "progress.json").read_text("utf-8"))
    assert kept["solved"] == ["one_score"]
    assert kept["current"] == "scores"


def grade_class(folder, *options):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"]
    plugin = () if "regard_learn" in list_plugins() else ("-p", "regard.learn.plugin")
    command += [*plugin, "--regard-exercises", str(folder), *map(str, options)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder.parent
    )


def list_plugins():
    return {point.name for point in entry_points(group="pytest11")}


def test_a_teacher_grades_a_class_and_gets_a_table(tmp_path):
    folder = tmp_path / "class"
    for learner, text in {"ann": RIGHT["softmax"], "=bob": SOFTMAX.stub}.items():
        (folder / learner).mkdir(parents=True)
        (folder / learner / "softmax.py").write_text(text, encoding="utf-8")
    (folder / "ann" / "one_score.py").write_text(WRONG, encoding="utf-8")
    (folder / "ann" / "notes.py").write_text("1 / 0", encoding="utf-8")
    for name in ("test_own", "conftest", "__init__"):  # to import one is to run it
        text = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()"
        (folder / "ann" / f"{name}.py").write_text(text, encoding="utf-8")
    table = tmp_path / "results.csv"
    done = grade_class(folder, "--regard-csv", table)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "That gives the d products of the pairs of numbers" in done.stdout
    assert "softmax is not written yet." in done.stdout
    assert "Traceback" not in done.stdout
    assert not (tmp_path / "ran").exists()
    rows = list(csv.DictReader(table.read_text("utf-8").splitlines()))
    found = [(x["learner"], x["exercise"], x["passed"], x["mistake"]) for x in rows]
    assert found == [
        ("'=bob", "softmax", "no", ""),
        ("ann", "one_score", "no", "no_sum"),
        ("ann", "softmax", "yes", ""),
    ]


def test_a_teacher_has_a_course_of_their_own(tmp_path):
    course = tmp_path / "course"
    course.mkdir()
    text = SOFTMAX.path.read_text("utf-8").replace("softmax", "weights")
    (course / "weigh.py").write_text(text, encoding="utf-8")
    folder = tmp_path / "class"
    folder.mkdir()
    (folder / "weigh.py").write_text(RIGHT["softmax"].replace("softmax", "weights"))
    (folder / "softmax.py").write_text("1 / 0")  # not of this course
    table = tmp_path / "results.csv"
    done = grade_class(folder, "--regard-course", course, "--regard-csv", table)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = csv.DictReader(table.read_text("utf-8").splitlines())
    assert (row["learner"], row["exercise"], row["passed"]) == ("", "weigh", "yes")
    gone = grade_class(folder / "gone")
    assert "there is no folder" in gone.stderr
