"""`regard atlas` as one types it: a model of one's own, whom it trusts, what it refuses."""

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from regard.__main__ import main

MODEL = Path(__file__).parent / "atlas_model.py"


def regard(*words):
    return CliRunner().invoke(main, ["atlas", *map(str, words)])


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with a model of one's own, and nothing of it in Python's path."""
    text = 'from pathlib import Path\nPath("called").touch()\n'
    (tmp_path / "my_model.py").write_text(text + MODEL.read_text())
    (tmp_path / "texts").mkdir()
    for i in range(12):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"{i} one two three one two {i}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    yield tmp_path
    sys.modules.pop("my_model", None)


def run(*words):
    return regard("run", "atlas", "--runner", "loop", *words)


NAMED = ("--model", "my_model:make")


def test_a_model_of_ones_own_is_found_where_one_stands(home):
    done = run(*NAMED, "--corpus", "texts")
    assert done.exit_code == 0, done.output
    assert "12 documents" in done.output
    found = json.loads(regard("show", "atlas", "--json").output)["atlas"]
    assert len(found["rows"]) == 7 * 8
    assert found["about"]["interval"] == "student"
    assert "" not in sys.path


def test_what_is_left_out_is_shown_everywhere(home):
    (home / "texts" / "copy.txt").write_text((home / "texts" / "3.txt").read_text())
    (home / "texts" / "empty.txt").write_text("")
    (home / "texts" / "short.txt").write_text("x")
    (home / "texts" / "crash.txt").write_text("a CRASH of the model")
    empty = "it is empty, or white space alone"
    told = (
        f"Not in these numbers: 1 item left out of the corpus (1: {empty}); 1 exact "
        "copy left out; 2 documents set aside (1: RuntimeError: a document that breaks "
        "the model; 1: ValueError: it has fewer than two tokens)."
    )
    assert told in run(*NAMED, "--corpus", "texts").output
    shutil.copytree("atlas", "other")
    for words, count in (
        ((), 1),
        (("--layer", 0, "--head", 1), 1),
        (("other",), 2),
    ):
        output = " ".join(regard("show", "atlas", *words).output.split())
        assert output.count(told) == count, words
    about = json.loads(regard("show", "atlas", "--json").output)["atlas"]["about"]
    assert about["left_out"] == {empty: 1}
    assert (about["copies"], about["aside"]) == (1, 2)
    assert sum(about["reasons"].values()) == 2
    for words in ((), ("other",)):
        assert regard("show", "atlas", *words, "--page", "a.html").exit_code == 0
        assert (home / "a.html").read_text("utf-8").count(told) == 1 + len(words)


def test_any_width_of_a_terminal_will_do(home):
    assert run(*NAMED, "--corpus", "texts").exit_code == 0
    for columns, words in itertools.product(
        ("0", "1", "5", "-3", "many", "99999999", ""),
        (("atlas",), ("atlas", "atlas"), ("atlas", "--layer", "0", "--head", "0")),
    ):
        given = ["atlas", "show", *words]
        done = CliRunner(env={"COLUMNS": columns}).invoke(main, given)
        assert done.exit_code == 0, (columns, words, done.output)
        assert "layer 0" in done.output


def test_a_function_that_only_a_file_names_is_not_called(home):
    assert run(*NAMED, "--corpus", "texts").exit_code == 0
    (home / "plan.toml").write_text('model = "my_model:make"\ncorpus = ["texts"]\n')
    (home / "called").unlink()
    where = ("--layer", 1, "--head", 2, "--save", "one.regard")
    for words in (
        ("run", "atlas", "--runner", "loop"),
        ("run", "atlas", "--runner", "loop", "--model", "another:make"),
        ("run", "other", "--runner", "loop", "--plan", "plan.toml"),
        ("record", "atlas", *where),
        ("record", "atlas", *where, "--model", "another:make"),
    ):
        sys.modules.pop("my_model", None)
        done = regard(*words)
        assert done.exit_code == 1, words
        assert "name it too: --model my_model:make" in done.output
        assert not (home / "called").exists(), words
    assert regard("record", "atlas", *where, *NAMED).exit_code == 0
    shutil.rmtree(home / "atlas" / "results")
    assert "12 documents" in run(*NAMED).output


def test_one_head_is_a_layer_and_a_head(home):
    done = regard("show", "atlas", "--layer", 1)
    assert done.exit_code == 2
    assert "--layer and --head name one head together: give both." in done.output
    for other in (["atlas"], ["--json"], ["--page", "a.html"]):
        done = regard("show", "atlas", *other, "--layer", 1, "--head", 0)
        assert done.exit_code == 2
        assert "--layer and --head print one head of one atlas, alone." in done.output


def test_a_folder_without_an_atlas_says_how_to_begin(home):
    done = run()
    assert done.exit_code == 1
    assert "regard atlas run atlas --model MODEL --corpus TEXTS" in done.output


def test_two_folders_of_one_name_are_told_apart(home):
    assert run(*NAMED, "--corpus", "texts").exit_code == 0
    shutil.copytree("atlas", "other/atlas")
    rows = json.loads(regard("show", "atlas", "other/atlas", "--json").output)
    assert list(rows) == ["atlas", "other/atlas"]


def test_an_atlas_of_nothing_says_so(home):
    for path in (home / "texts").iterdir():
        path.write_text("x" if path.stem == "0" else "")
    assert "1 set aside" in run(*NAMED, "--corpus", "texts").output
    for words in ((), ("--layer", 0, "--head", 0)):
        done = regard("show", "atlas", *words)
        assert done.exit_code == 1
        assert "nothing to show: all documents were set aside." in done.output
        assert "1: ValueError: it has fewer than two tokens" in done.output


def test_to_show_an_atlas_needs_no_torch(home):
    assert run(*NAMED, "--corpus", "texts").exit_code == 0
    code = (
        "import sys; from regard.__main__ import main\n"
        "main(['atlas', 'show', 'atlas'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert b"entropy" in done.stdout
