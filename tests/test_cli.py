"""The command line, run as a user runs it."""

import contextlib
import fcntl
import importlib.util
import json
import math
import os
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from test_weights import build, write_gguf

import regard
from regard.__main__ import main
from regard.commands.train import TASKS
from regard.commands.why import read_files
from regard.errors import FileError
from regard.learn.course import ORDER
from regard.nn.generation import generate
from regard.nn.tasks import PUZZLES
from regard.nn.weights import load
from regard.plain.sample import Sampling
from regard.recording.record import Record, Recording
from regard.seen import Seen
from regard.terminal import read_argument, remove_control, write_reason

RESULTS_BY = "test"  # see .ci/kept_results.py

PAGE = Path(__file__).parent.parent / ".ci/cli_page.py"
SPEC = importlib.util.spec_from_file_location("cli_page", PAGE)
cli_page = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(cli_page)
COMMANDS = dict(cli_page.walk(main, "regard"))
START = "import sys; from regard.__main__ import main; main(sys.argv[1:])"


def run(*arguments, **options):
    return CliRunner().invoke(main, [str(a) for a in arguments], **options)


def run_apart(*arguments, code=START, env=None, **options):
    """Run a command in a process of its own, without a terminal."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        check=False,
        text=True,
        env=os.environ | (env or {}),
        **({"capture_output": True} | options),
    )


def test_help_comes_without_torch():
    code = "import sys; sys.argv = ['regard', '--help']\ntry:\n import regard.__main__ as m; m.main()\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "missing", "extras"),
    [
        ("train copy", "torch", "torch"),
        ("show hello --model x.gguf", "torch", "torch"),
        ("show hello --model x.gguf --map", "torch and starlette", "torch,serve"),
        ("show hello --model x.gguf --map", "starlette", "serve"),
        ("show seen.regard", "starlette", "serve"),
        ("generate hello --model x.gguf", "torch", "torch"),
        ("why hello a.txt --model x.gguf", "torch", "torch"),
        ("atlas show atlas", "pyarrow", "atlas"),
        ("atlas run new --model x.gguf --corpus .", "torch", "atlas"),
    ],
)
def test_what_is_not_installed_is_named_with_its_line(
    arguments, missing, extras, tmp_path
):
    code = "import sys\n"
    for module in missing.split(" and "):
        code += f"sys.modules[{module!r}] = None\n"
    done = run_apart(*arguments.split(), code=code + START, cwd=tmp_path)
    assert done.returncode == 1
    assert (
        done.stderr == f'Error: this needs {missing}: pip install "regard[{extras}]"\n'
    )


def test_a_module_of_someone_else_is_not_ours_to_install():
    wanted = ModuleNotFoundError("No module named 'their.code'", name="their.code")
    assert write_reason(wanted, "atlas") == "there is no module their.code."
    inside = ModuleNotFoundError("No module named 'torch.new'", name="torch.new")
    assert write_reason(inside, "show") == (
        'this needs torch.new: pip install "regard[torch]"'
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_is_a_sentence_an_example_and_what_comes_next(name):
    done = run(*name.split()[1:], "--help", env={"COLUMNS": "80"})
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2].strip()[0].isupper()
    assert COMMANDS[name].help.split("\n\n")[0].endswith(".")
    assert lines[-2].startswith("  Example:  regard")
    assert lines[-1].startswith("  Then:     ")
    assert "..." not in "".join(lines[1:])  # no sentence of a list is cut off
    for option in COMMANDS[name].params:
        assert isinstance(option, click.Argument) or option.help, option.name


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_of_a_command_is_accepted(name):
    example, _ = cli_page.read_guide(COMMANDS[name])
    words = shlex.split(example)[1:]
    command = main
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    assert command is COMMANDS[name] or name in ("regard", "regard atlas")
    command.make_context("regard", words)  # raises what is wrong with it


def test_the_page_of_the_commands_is_what_they_say():
    assert cli_page.PAGE.read_text("utf-8") == cli_page.render(), (
        "run python .ci/cli_page.py"
    )


def test_commands_stand_in_the_order_in_which_one_meets_them():
    names = ["learn", "show", "compare", "why", "generate", "train", "check", "atlas"]
    lines = run("--help").stdout.split("Commands:\n")[1].splitlines()
    assert [line.split()[0] for line in lines[: len(names)]] == names


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [("shwo x", "show"), ("learn wach", "watch"), ("show x --modle y", "--model")],
)
def test_what_is_misspelt_is_asked_about(arguments, meant):
    done = run(*arguments.split())
    assert done.exit_code == 2
    assert f"Did you mean '{meant}'?" in done.stderr or f"{meant}?" in done.stderr


def test_generate_streams_the_model(smollm):
    raw = ("generate", "--model", smollm, "--raw", "-n", 6, "The capital of France is")
    done = run(*raw)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("The capital of France is Paris")
    assert "5 tokens read, 6 new" in done.stderr or "2 new" in done.stderr
    asked = run("generate", "--model", smollm, "-n", 5, "-", input="What is 2+2?")
    assert asked.exit_code == 0
    assert asked.stdout == "The answer to this classic\n"


def test_why_says_which_file_an_answer_is_based_on(smollm, tmp_path):
    one, other = tmp_path / "bakery.txt", tmp_path / "library.txt"
    one.write_text("The bakery opens at six.\n\nIt sells rye bread.\n", "utf-8")
    other.write_text("The code word of the library is marzipan.\n", "utf-8")
    ask = ("why", "What is the code word of the library?", one, other)
    page = tmp_path / "why.html"
    done = run(*ask, "--model", smollm, "-n", 16, "--json", "--page", page)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert "marzipan" in found["answer"]["text"]
    assert [x["name"] for x in found["documents"]] == ["bakery.txt", "library.txt"]
    effect = found["answer"]["effect"]
    assert effect[1] > 5 > effect[0]
    assert found["passes"] == 3
    assert done.stderr == f"the page is in {page}\n"
    assert b"marzipan" in page.read_bytes()
    done = run(*ask, "--model", smollm, "-n", 16, "--passages")
    names = ("bakery.txt 1 ", "bakery.txt 2 ", "library.txt 1 ")
    assert all(f"\n{name}" in done.stdout for name in names)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read as text"), (b" \n", "is empty"), (b"\xff\xfe", "as text")],
)
def test_why_refuses_files_that_are_no_text(content, words, tmp_path):
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_bytes(content)
    done = run("why", "What?", path, "--model", "x.gguf")
    assert done.exit_code == 1
    assert words in done.stderr


def test_why_refuses_a_file_that_is_given_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("one", "utf-8")
    Path("copy.txt").write_text("one", "utf-8")
    for twice in ("a.txt", "./a.txt"):
        done = run("why", "What?", "a.txt", "copy.txt", twice, "--model", "x.gguf")
        assert done.exit_code == 1
        assert done.stderr == (
            "Error: a.txt is given twice. Name each document once.\n"
        )
    assert read_files(("a.txt", "copy.txt")) == {"a.txt": "one", "copy.txt": "one"}


def test_generate_samples_what_the_library_samples_in_a_batch(smollm):
    text, others = "The capital of France is", ["One", "Seven plus five is"]
    done = run(
        *("generate", "--model", smollm, "--raw", "-n", 6, text, "--seed", 3),
        *("--temperature", 1, "--top-k", 40, "--top-p", 0.9, "--repetition", 1.1),
    )
    assert done.exit_code == 0, done.output
    model, tokenizer = load(smollm)
    prompts = [tokenizer.encode(x) for x in (others[0], text, others[1])]
    sampling = Sampling(temperature=1, top_k=40, top_p=0.9, repetition=1.1)
    stop = tokenizer.stop
    new = generate(model, prompts, 6, sampling=sampling, seed=3, stop=stop)
    assert done.stdout == f"{text}{tokenizer.decode(new[1])}\n"


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


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a saved recording of two layers with four heads."""
    torch.manual_seed(0)
    at, records = torch.arange(200), []
    for i in range(2):
        q, k = torch.randn(4, 200, 16), torch.randn(4, 200, 16)
        lse = regard.attention(q, k, k, regard.causal(), scale=0.25).lse
        about = {"q_positions": at, "k_positions": at, "mask": regard.causal()}
        records.append(Record(name=f"{i}", q=q, k=k, lse=lse, scale=0.25, **about))
    recording = Recording(model="Tiny", records=tuple(records), sequences=(0, 0))
    path = tmp_path_factory.mktemp("saved") / "tiny.regard"
    Seen(recording).save(path)
    return path


def test_a_page_has_the_heads_and_the_size_that_are_asked_for(saved, tmp_path):
    page = tmp_path / "map.html"
    done = run("show", saved, "--page", page, "--heads", "1.2, 1.0,1.2,0")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("6 heads, 0.")
    assert "weights exact" in done.stdout
    assert '"heads":[2,0]' in page.read_text("utf-8")  # of layer 1
    done = run("show", saved, "--page", page, "--limit", 0.248)
    assert done.exit_code == 0, done.output
    assert page.stat().st_size <= 248_000
    assert "8 heads, 0.2 MB: too many cells, so an overview of all heads" in done.stdout
    assert "give --heads or a higher --limit." in done.stdout
    done = run("show", saved, "--page", page, "--heads", "7")
    assert (done.exit_code, "there is no layer 7" in done.stderr) == (1, True)
    done = run("show", saved, "--page", page, "--limit", 0.01)
    assert (done.exit_code, "limit is 0.01 MB" in done.stderr) == (1, True)


SHADED = """\
the·cat⏎
░░░█████
   ^^^^^
sat·<b>\\u001b[2J
Weight from token 1 (·cat⏎) on each token, mean of 4 heads.
· less   ░ 0.15   ▒ 0.3   ▓ 0.45   █ 0.6 or more   blank: masked
largest: 1 ·cat⏎ 0.75, 0 the 0.25
"""
BOTH = """\
the·cat⏎
░░░█████
sat·<b>\\u001b[2J
░░░·············
^^^^^^^^^^^^^^^^
Weight from tokens 2 to 3 (sat·<b>\\u001b[2J) on each token, layer 0, head 1.
· less   ░ 0.11   ▒ 0.22   ▓ 0.33   █ 0.44 or more   blank: masked
largest: 1 ·cat⏎ 0.55, 0 the 0.18, 2 sat 0.18, 3 ·<b>\\u001b[2J 0.083
self (weight)
0.53 ┤                                                           4
     │
     │
     │
     │
     │
     │
     │
     │
     │
     │
     │
     │
     │
     │
   0 ┤
     └────────────────────────────────────────────────────────────
      0                                                       0.40
                                                     sink (weight)
a digit: how many heads, + for ten or more
0.0: sink 0.40, self 0.53
0.1: sink 0.40, self 0.53
0.2: sink 0.40, self 0.53
"""


def test_text_and_plot_are_printed_in_the_terminal(tmp_path):
    q, k = torch.zeros(4, 4, 2), torch.zeros(4, 4, 2)
    q[..., 0], k[:, 1, 0] = 1, math.log(3)  # token 1 has three times the weight
    lse = regard.attention(q, k, k, regard.causal(), scale=1).lse
    at = torch.arange(4)
    about = {"q_positions": at, "k_positions": at, "mask": regard.causal()}
    record = Record(name="0", q=q, k=k, lse=lse, scale=1, **about)
    path = tmp_path / "four.regard"
    texts = (("the", " cat\n", "sat", " <b>\x1b[2J"),)
    about = {"records": (record,), "sequences": (0,), "tokens": ((1, 2, 3, 4),)}
    Seen(Recording(model="Tiny", texts=texts, **about)).save(path)
    done = run("show", path, "--token", "1")
    assert done.exit_code == 0, done.output
    assert done.stdout == SHADED
    done = run("show", path, "--token", "2-3", "--heads", "0.1", "--plot", "sink,self")
    assert done.stdout == BOTH
    for wrong, words in [
        (("--token", "x"), "'x' is no token, expected its number"),
        (("--token", "9"), "token 9 is selected, expected 0 to 3"),
        (("--plot", "sink"), "'sink', expected two statistics"),
        (("--plot", "sink,tables"), "expected some of entropy, sink, previous"),
        (("--token", "1", "--limit", "3"), "--limit is for a page: add --page FILE."),
    ]:
        done = run("show", path, *wrong)
        assert done.exit_code != 0
        assert words in done.stderr


def test_the_map_listens_where_it_is_told(saved, monkeypatch):
    asked = []
    monkeypatch.setattr(Seen, "show", lambda _, **options: asked.append(options))
    for arguments in ((), ("--port", 8000), ("--map", "--host", "localhost")):
        assert run("show", saved, *arguments).exit_code == 0
    assert asked == [
        {"host": None, "port": 0},
        {"host": None, "port": 8000},
        {"host": "localhost", "port": 0},
    ]


def test_show_prints_a_dash_where_a_text_has_no_such_number(smollm):
    done = run("show", "Hello", "--model", smollm, "-n", 9000)
    assert done.exit_code == 1
    assert "--n-new 9000, but the context of this model is 8192 tokens" in done.stderr
    done = run("show", "Hello", "--model", smollm)  # no token before it, none again
    assert done.exit_code == 0, done.output
    assert "nan" not in done.stdout
    *layers, few, sink, previous, induction = done.stdout.splitlines()
    told = "tokens repeat too rarely to tell: 0 of 1 queries, 25 needed"
    assert layers[-1].split()[4] == "–"
    assert few == f"induction: {told}"
    assert sink.startswith("most sink: layer ")
    assert (previous, induction) == ("most previous: –", f"most induction: {told}")


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
        (["train", "copy", "file.txt"], "copy generates its data"),
        (["train", "text", "nothing.txt"], "cannot read nothing.txt"),
    ],
)
def test_what_went_wrong_is_one_sentence(arguments, message):
    done = run(*arguments)
    assert done.exit_code in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("show hello", 1, "there is no recording hello. To run a model on a text:"),
        ("show text.txt", 1, "safetensors file. To run a model on a text: regard show"),
        (
            "show zeros --model x.gguf",
            1,
            "zeros is not a text file: it contains null bytes.",
        ),
        ("show hello --model x --save no/x", 2, "there is no folder no to write no/x"),
        ("show hello --model x --page no/x", 2, "there is no folder no to write no/x"),
        ("show x --page x --heads 1-2", 2, "'1-2' is no head, expected LAYER.HEAD, or"),
        ("show x --page x --heads 1.2,", 2, "'' is no head, expected LAYER.HEAD, or"),
        ("show x --heads 1.2", 2, "--heads is for a page: add --page FILE."),
        ("show x --json --limit 3", 2, "--limit is for a page: add --page FILE."),
        ("show x --page x --limit 0", 2, "0.0 is not in the range x>0"),
        ("show x --json --port 3", 2, "--port is for the map in a browser: add --map."),
        ("show x --page x --host y", 2, "--host is for the map in a browser: add"),
        ("show x --port 65536", 2, "65536 is not in the range 0<=x<=65535"),
        ("check math:sqrt --json no/x", 2, "there is no folder no to write no/x"),
        ("generate hello --model x -n 0", 2, "0 is not in the range x>=1"),
        ("generate hello --model x --temperature -1", 2, "temperature=-1.0, expected"),
        ("generate hello --model x --seed -1", 2, "--seed -1, expected 0 or more."),
        ("train copy --seed 9223372036854775808", 2, "expected below 2**63."),
        (
            "train copy --length 9",
            2,
            "--tokens and --length do not apply to copy.",
        ),
        ("train copy --heads 3", 2, "a width of 64 cannot be split into 3 heads"),
        ("learn --folder text.txt open", 2, "'text.txt' is a file"),
        ("learn --folder text.txt/x open", 1, "text.txt/x cannot be used: not a dir"),
    ],
)
def test_the_exit_code_says_who_is_to_blame(
    arguments, code, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a text", "utf-8")
    Path("zeros").write_bytes(b"GGUF\0\0")
    done = run(*arguments.split())
    assert done.exit_code == code, done.output
    assert message in " ".join(done.stderr.split())
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("generate --model nothing.gguf hi", "FileError"),
        ("generate --model nothing.gguf --top-k 3 hi", "OptionError"),
        ("check nowhere_to_be_found:x", "OptionError"),
        ("learn open sofmax", "OptionError"),
    ],
)
def test_debug_shows_where_an_error_comes_from(arguments, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("--debug", *arguments.split())
    assert type(done.exception).__name__ == error


def test_a_text_may_be_long_or_a_file_or_come_from_stdin(smollm, tmp_path):
    long = "a text too long for the name of a file " * 10
    assert read_argument(long) == long
    (tmp_path / "long.txt").write_text(long, "utf-8")
    assert read_argument(str(tmp_path / "long.txt")) == long
    done = run("show", "-", "--model", smollm, "--json", input=long)
    first, *_ = json.loads(done.stdout)
    assert first["name"] == "blocks.0.attention"
    assert 4 < first["distance"] < 100  # 100 tokens were read


def test_what_is_there_and_is_no_text_is_refused(tmp_path, monkeypatch):
    """It is not read as text with U+FFFD for its bytes, nor is its name the text."""
    monkeypatch.chdir(tmp_path)
    Path("latin.txt").write_bytes("Gr\u00fc\u00dfe".encode("latin-1"))
    Path("folder").mkdir()
    Path("loop").symlink_to("loop")
    Path("gone").symlink_to("nowhere")
    last = ". Write the name of a file in UTF-8."
    for name, reason in {
        "latin.txt": "'utf-8' codec can't decode byte 0xfc in position 2: invalid "
        "start byte",
        "folder": "Is a directory",
        "loop": "Too many levels of symbolic links",
        "gone": "No such file or directory",
    }.items():
        with pytest.raises(FileError) as raised:
            read_argument(name)
        assert str(raised.value) == f"{name} cannot be read as text: {reason}{last}"
        for command in ("show", name), ("why", "What?", name):
            done = run(*command, "--model", "x.gguf")
            assert done.exit_code == 1
            assert f"Error: {name} cannot be read as text: " in done.stderr
    done = run("show", "-", "--model", "x.gguf", input=b"\xff")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "Error: - cannot be read as text: 'utf-8'" in done.stderr


def test_a_text_may_come_from_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    threading.Thread(target=(tmp_path / "pipe").write_text, args=("a text",)).start()
    assert read_argument(str(tmp_path / "pipe")) == "a text"


def test_a_name_of_no_file_is_read_as_a_text_and_that_is_said(capsys):
    assert read_argument("artikel.txt") == "artikel.txt"
    assert capsys.readouterr().err == (
        "there is no file artikel.txt: using it as the text\n"
    )
    for text in ("hello", "Hello there.txt", "3.14", "e.g.", "Yes."):
        assert read_argument(text) == text
    assert capsys.readouterr().err == ""


def test_a_model_that_is_not_there_is_named_before_torch_comes():
    code = "import sys; from regard.__main__ import main\ntry: main(sys.argv[1:])\n"
    code += "finally: assert 'torch' not in sys.modules"
    for command in ("show", "generate"):
        done = run_apart(command, "hello", "--model", "nothing.gguf", code=code)
        assert done.stderr == "Error: there is no file or folder nothing.gguf.\n"
        assert done.returncode == 1


def test_rows_for_programs_are_alone_on_stdout(smollm, tmp_path):
    path = tmp_path / "seen.regard"
    text = "The cat sat on the mat because it was"
    options = ("--model", smollm, "-n", 4, "--save", path, "--json")
    done = run("show", text, *options)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert len(rows) == 30 * 9
    strongest = max(rows, key=lambda row: row["sink"])
    assert (strongest["layer"], strongest["head"]) == (18, 8)
    assert "the recording is in" in done.stderr
    again = json.loads(run("show", path, "--json").stdout)  # no map, no model
    for one, other in zip(again, rows, strict=True):
        assert one.pop("name") == other.pop("name")
        assert one == pytest.approx(other, rel=1e-5, abs=1e-5)
    short = json.loads(run("show", "Hello", "--model", smollm, "--json").stdout)
    assert short[0]["induction"] is None


def test_the_course_for_programs(tmp_path):
    done = run("learn", "--folder", tmp_path, "list", "--json")
    rows = json.loads(done.stdout)
    assert [row["number"] for row in rows] == list(range(1, len(ORDER) + 1))
    assert [row["name"] for row in rows if row["current"]] == ["one_score"]
    kept = {"solved": ["one_score"], "hints": {}, "tries": {}, "current": "one_score"}
    (tmp_path / "progress.json").write_text(json.dumps(kept))
    rows = json.loads(run("learn", "--folder", tmp_path, "list", "--json").stdout)
    assert [row["name"] for row in rows if row["solved"]] == ["one_score"]
    assert [row["name"] for row in rows if row["current"]] == ["scores"]


def test_a_report_for_programs_is_alone_on_stdout():
    done = run("check", "math:sqrt", "--json", "-")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["cases"][0]["status"] == "failed"


def test_nobody_reads_on():
    read, write = os.pipe()
    os.close(read)
    for arguments in (("learn", "list", "--json"), ("learn", "list"), ("--help",)):
        done = run_apart(
            *arguments, capture_output=False, stdout=write, stderr=subprocess.PIPE
        )
        assert done.returncode == 141
        assert done.stderr == ""
    os.close(write)


def redirect(how, *arguments, env=None):
    """Run a command with the redirections of a shell, such as >&-."""
    words = [sys.executable, "-c", START, *map(str, arguments)]
    return subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" "$@" {how}', *words],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | (env or {}),
    )


CLOSED = "Error: stdout cannot be written: it is closed. To discard the output, write"
FULL = "Error: stdout cannot be written: no space left on device.\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "arguments",
    [("learn", "list"), ("learn", "list", "--json"), ("--help",), ("train", "--help")],
    ids=" ".join,
)
def test_stdout_that_cannot_be_written_is_said(arguments, unbuffered):
    env = {"PYTHONUNBUFFERED": unbuffered}
    closed = redirect(">&-", *arguments, env=env)
    assert (closed.returncode, closed.stderr) == (1, f"{CLOSED} >/dev/null.\n")
    full = redirect(">/dev/full", *arguments, env=env)
    assert full.returncode == 1
    assert "no space left on device" in full.stderr
    if not unbuffered:
        assert full.stderr == FULL
    assert redirect(">&- 2>&- <&-", *arguments, env=env).returncode == 1


def test_models_run_where_streams_are_closed(tmp_path):
    model = write_gguf(tmp_path / "model.gguf", build("llama"))
    for command in (("show",), ("generate", "--raw")):
        closed = redirect(">&-", *command, "hello", "--model", model)
        assert (closed.returncode, closed.stderr) == (1, f"{CLOSED} >/dev/null.\n")
        none = redirect("<&-", *command, "-", "--model", model)
        assert none.returncode == 1
        assert none.stderr.startswith('Error: stdin is closed, so "-" cannot be read.')
    alone = redirect("2>&- <&-", "show", "hello", "--model", model)
    assert alone.returncode == 0
    assert alone.stdout == run("show", "hello", "--model", model).stdout


def test_a_closed_stderr_changes_no_exit_code(tmp_path):
    for arguments, code in (
        (("learn", "list"), 0),
        (("learn", "nosuch"), 2),
        (("show", "x", "--model", tmp_path / "none.gguf"), 1),
    ):
        done = redirect("2>&-", *arguments)
        assert done.returncode == code
        assert (done.stdout == "") == (code != 0)


# libffi 3.5 opens itself on import, and so has the number of a closed stdout
TAKE_ONE = "n = os.open(os.devnull, os.O_RDONLY); n == 2 and os.close(n);"


@pytest.mark.parametrize("before", ["", TAKE_ONE])
def test_no_file_takes_the_number_of_a_closed_stream(tmp_path, before):
    code = (
        f"import os, sys; from regard.terminal import prepare_streams; {before}"
        "prepare_streams(); file = open(sys.argv[1], 'w');"
        "os.write(2, b'noise'); sys.exit(file.fileno() < 3)"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "file")]
    shell = ["/bin/sh", "-c", 'exec "$0" "$@" >&- 2>&-', *words]
    assert subprocess.run(shell, check=False).returncode == 0
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize("columns", ["0", "00", "-5", "abc", ""])
def test_a_width_that_is_no_width_is_ignored(columns):
    usual = run_apart("learn", "list").stdout
    done = run_apart("learn", "list", env={"COLUMNS": columns})
    assert (done.returncode, done.stderr, done.stdout) == (0, "", usual)


def test_ctrl_c_ends_with_one_line():
    words = [sys.executable, "-c", START, "show", "-", "--model", "x.gguf"]
    # a shell that starts tests in the background may have turned Ctrl-C off
    words[2] = "import signal; signal.signal(2, signal.default_int_handler);" + START
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        process.stdin.write("a")
        process.stdin.flush()
        while struct.unpack("i", fcntl.ioctl(process.stdin, termios.FIONREAD, b"0000"))[
            0
        ]:
            time.sleep(0.05)  # until it reads, and waits for more
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr.read().strip() == "stopped."
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def test_there_is_no_colour_and_no_bar_where_there_is_no_terminal(smollm):
    kinds = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    for arguments in (("learn", "list"), ("show", "Hello", "--model", smollm)):
        done = run_apart(*arguments, env=kinds)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout
        assert done.stderr == ""


def test_a_terminal_without_a_character_is_given_another():
    done = run_apart("learn", "list", env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "  ?  one_score" in done.stdout.replace(" ?   one", "  ?  one")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("regard ge", "plain,generate"),
        ("regard learn open softm", "plain,softmax"),
        ("regard train rev", "plain,reverse"),
        ("regard show x --mo", "plain,--model"),
        ("regard show x --model S", "file,S"),
    ],
)
def test_the_shell_completes(typed, offered):
    words = typed.split()
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    code = START.replace("main(sys.argv[1:])", "main([], prog_name='regard')")
    done = run_apart(code=code, env=asked | {"_REGARD_COMPLETE": "bash_complete"})
    assert done.stdout.splitlines() == [offered]


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
    assert "loss on the held-out tenth" in done.output


def test_a_model_cannot_steer_the_terminal():
    assert remove_control("a\x1b[31mb\r\nc\td\x07") == "a[31mb\nc\td"
