"""The command line, run as a user runs it."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

import regard
from regard.__main__ import TASKS, clean, main
from regard.nn.tasks import PUZZLES


def run(*arguments, **options):
    return CliRunner().invoke(main, [str(a) for a in arguments], **options)


def test_help_comes_without_torch():
    code = "import sys; sys.argv = ['regard', '--help']\ntry:\n import regard.__main__ as m; m.main()\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout


def test_a_missing_torch_is_named_in_one_sentence():
    code = "import sys; sys.modules['torch'] = None; from regard.__main__ import main; main(['train', 'copy'])"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == 'Error: this needs torch: pip install "regard[torch]"\n'


def test_generate_streams_the_model(smollm):
    raw = ("generate", "--model", smollm, "--raw", "-n", 6, "The capital of France is")
    done = run(*raw)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("The capital of France is Paris")
    assert "5 tokens read, 6 new" in done.stderr or "2 new" in done.stderr
    asked = run("generate", "--model", smollm, "-n", 5, "-", input="What is 2+2?")
    assert asked.exit_code == 0
    assert asked.stdout == "The answer to this classic\n"


def test_show_says_what_attention_did(smollm, tmp_path):
    path = tmp_path / "seen.safetensors"
    text = "The cat sat on the mat because it was"
    done = run("show", text, "--model", smollm, "-n", 4, "--save", path)
    assert done.exit_code == 0, done.output
    text = done.stdout[done.stdout.index("CausalTransformer: 30 of 30 attention") :]
    _, names, *layers = text.splitlines()
    assert names.split()[:5] == ["layer", "head", "entropy", "sink", "previous"]
    layer, heads, _, sink, *_ = layers[21].split()
    assert (layer, heads) == ("21", "all")
    assert float(sink) > 0.5  # it rests on the first token
    assert "most sink: layer 18 head 8, 1.000" in text
    again = regard.open(path)
    assert again.layer(21).q.shape == (9, 12, 64)


def test_show_prints_a_dash_where_a_text_has_no_such_number(smollm):
    done = run("show", "Hello", "--model", smollm)  # no token before it, none again
    assert done.exit_code == 0, done.output
    assert "nan" not in done.stdout
    *layers, sink, previous, induction = done.stdout.splitlines()
    assert layers[-1].split()[4] == "–"
    assert sink.startswith("most sink: layer ")
    assert (previous, induction) == ("most previous: –", "most induction: –")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "nothing.regard"], "nothing.regard"),
        (["generate", "--model", "nothing.gguf", "hi"], "there is no file or folder"),
        (
            ["generate", "--model", "x.gguf", "--top-k", "3", "hi"],
            "without a temperature",
        ),
        (["train", "text"], "Write: regard train text FILE"),
        (["train", "copy", "file.txt"], "copy makes its own data"),
        (["train", "text", "nothing.txt"], "cannot read nothing.txt"),
    ],
)
def test_what_went_wrong_is_one_sentence(arguments, message):
    done = run(*arguments)
    assert done.exit_code in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.output


def test_debug_shows_where_an_error_comes_from():
    done = run("--debug", "generate", "--model", "nothing.gguf", "hi")
    assert type(done.exception).__name__ == "FileError"


def test_every_puzzle_has_a_command():
    assert set(TASKS) == {*PUZZLES, "text"}


def test_a_run_is_kept_drawn_and_resumed(tmp_path):
    arguments = ("train", "copy", "--width", 16, "--heads", 2, "--folder", tmp_path)
    done = run(*arguments, "--steps", 12)
    assert done.exit_code == 0, done.output
    assert "held-out answers are exactly right" in done.output
    assert "12 steps" in done.output
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    again = run(*arguments, "--steps", 12)  # nothing is left to do
    assert again.output.splitlines()[-5:] == done.output.splitlines()[-5:]
    other = run(*arguments, "--steps", 13)
    assert other.exit_code == 1
    assert "holds another run" in other.stderr


@pytest.mark.parametrize("tokens", ["bytes", "characters"])
def test_a_text_is_learned_from_a_file(tmp_path, tokens):
    text = tmp_path / "text.txt"
    text.write_text(
        "the cat sat on the mat, and the dog sat on the log. " * 60, "utf-8"
    )
    done = run(
        *("train", "text", text, "--tokens", tokens, "--steps", 30, "--length", 32),
        *("--width", 32, "--folder", tmp_path / "run"),
    )
    assert done.exit_code == 0, done.output
    assert "loss of the held-out tenth" in done.output


def test_a_model_cannot_steer_the_terminal():
    assert clean("a\x1b[31mb\r\nc\td\x07") == "a[31mb\nc\td"
