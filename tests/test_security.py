"""The threat model holds: a test for every line of it that has none elsewhere."""

import ast
import importlib.util
import json
import re
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_server import RECORDING
from tokenizers import Tokenizer as Core
from tokenizers.models import BPE

from regard.errors import FileError, OptionError
from regard.learn.exercise import read_exercise
from regard.learn.grade_file import attempt, run_program
from regard.nn import chat_template
from regard.nn.tokens import Tokenizer
from regard.nn.weights import load
from regard.recording.evidence import Covered
from regard.recording.file import open_recording, save_recording
from regard.recording.record import Recording
from regard.show.page import make_page
from regard.show.server import start_server

ROOT = Path(__file__).parent.parent
SOURCE, CORPUS = ROOT / "src" / "regard", ROOT / "fuzz" / "corpus"
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


# The page


def test_every_test_that_the_page_names_exists():
    found = NAMED.findall(PAGE)
    assert len(found) > 50
    for file, name in found:
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        tests = {x.name for x in tree.body if isinstance(x, ast.FunctionDef)}
        assert name in tests, f"{file}::{name}"


def test_every_threat_has_an_answer_and_a_test():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    threats = [row for row in rows if not row.startswith("| what could happen")]
    assert len(threats) > 40
    for row in threats:
        _, threat, answer, shown, _ = row.split("|")
        assert threat.strip()
        assert answer.strip()
        assert NAMED.search(shown), row


def test_every_part_says_what_is_not_protected():
    parts = [x for x in re.split(r"^## ", PAGE, flags=re.MULTILINE) if "|---|" in x]
    assert len(parts) == 6
    assert all("Not protected against:" in part for part in parts)


# Files of strangers

ALLOWED = {
    ("learn/exercise.py", "exec"),  # exercises are programs
    ("learn/grade_file.py", "exec"),
    ("learn/written_call.py", "eval"),  # of code that the same file wrote
    ("atlas/runners.py", "pickle"),  # between our own processes
}


def find_loaders(tree):
    """Yield what could run a program that stands in a file."""
    modules = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle", "code"}
    for x in ast.walk(tree):
        if isinstance(x, ast.Import):
            yield from modules & {name.name for name in x.names}
        elif isinstance(x, ast.ImportFrom) and x.module in modules:
            yield x.module
        elif isinstance(x, ast.Call) and isinstance(x.func, ast.Name):
            yield from {"exec", "eval", "__import__"} & {x.func.id}
        elif isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute):
            call = ast.unparse(x.func)
            yield from {"torch.load", "np.load", "numpy.load", "os.system"} & {call}
            options = {option.arg for option in x.keywords}
            yield from {"shell", "allow_pickle", "trust_remote_code"} & options


def test_no_code_is_taken_from_files():
    found = {
        (path.relative_to(SOURCE).as_posix(), name)
        for path in SOURCE.rglob("*.py")
        for name in find_loaders(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found - ALLOWED == set()
    assert {x for x in ALLOWED if x[0].startswith("learn")} <= found  # it sees them


def lay_out(name, folder):
    """Write one of the folders of the corpus."""
    spec = importlib.util.spec_from_file_location("folder", ROOT / "fuzz" / "folder.py")
    sys.path.append(str(ROOT / "fuzz"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder.mkdir()
    for file, part in module.split((CORPUS / "folder" / name).read_bytes()):
        (folder / file).write_bytes(part)
    return folder


def test_code_that_lies_beside_weights_is_never_run(tmp_path):
    folder, trace = lay_out("llama", tmp_path / "model"), tmp_path / "ran"
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    config["trust_remote_code"] = True
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("modeling_evil", "configuration_evil", "tokenization_evil"):
        (folder / f"{name}.py").write_text(f"open({str(trace)!r}, 'w')")
    model, _ = load(folder)
    assert model.config.layers == 1
    assert not trace.exists()


WATCHED = """
import json, sys
from pathlib import Path
heard = []
def hear(event, _):
    if event.startswith(("socket.", "subprocess.", "os.system", "os.exec", "os.fork",
                         "os.posix_spawn", "urllib.", "http.", "ftplib.", "smtplib.")):
        heard.append(event)
import regard.show.page, regard.nn.weights, regard.seen, transformers
sys.addaudithook(hear)
for path in sys.argv[1:]:
    if path.endswith(".regard"):
        regard.show.page.make_page(regard.open(path).recording)
    else:
        regard.nn.weights.load(path)
quiet = list(heard)
import socket
socket.socket().close()  # the hook hears
print(json.dumps({"quiet": quiet, "after": heard}))
"""


def test_opening_files_of_strangers_opens_no_connection_and_no_process(
    tmp_path, run_apart
):
    folder = lay_out("llama", tmp_path / "model")
    gguf = shutil.copy(CORPUS / "gguf_model" / "llama", tmp_path / "model.gguf")
    saved = shutil.copy(CORPUS / "recording" / "causal", tmp_path / "a.regard")
    found = run_apart(WATCHED, str(folder), str(gguf), str(saved))
    assert found["quiet"] == []
    assert "socket.__new__" in found["after"]


def chat(template):
    core = Core(BPE({"a": 0}, []))
    return Tokenizer(core, template).chat([{"role": "user", "content": "Hi"}] * 3)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
        "{{ f(99) }}",
        "{% macro g() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        + 40 * "{% call g() %}"
        + 40 * "{% endcall %}",
    ],
    ids=["loops", "macros", "callers"],
)
def test_a_chat_template_that_never_ends_is_ended(template, monkeypatch):
    monkeypatch.setattr(chat_template, "PATIENCE", 0.3)
    begun = time.monotonic()
    with pytest.raises(OptionError, match=r"it takes more than 0\.3 seconds"):
        chat(template)
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    "product",
    [
        "'a' * 10**10",
        "10**10 * [1]",
        "10 ** (10 ** 8)",
        "namespace(a=10**200000).a * 10**200000 * 10**200000",
    ],
)
def test_a_product_that_would_fill_everything_is_refused(product):
    with pytest.raises(OptionError, match=r"a product of \d+ bits or items"):
        chat("{{ (" + product + ")|length }}")


def test_small_products_and_loops_of_templates_are_as_before():
    assert chat("{{ 'ab' * 3 }}{{ 3 * [1] }}{{ 2 ** 10 }}{{ 2.5 ** 2 }}") == (
        "ababab[1, 1, 1]10246.25"
    )
    loop = "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}"
    assert chat(loop) == "1Hi2Hi3Hi"


@pytest.mark.parametrize("verb", ["encode", "decode"])
def test_a_tokenizer_that_panics_is_told_in_a_sentence(verb, tmp_path):
    _, tokenizer = load(lay_out(f"was-PanicException-{verb}", tmp_path / "model"))
    with pytest.raises(
        OptionError, match=r"no entry found|index out of bounds"
    ) as said:
        tokenizer.encode("hello") if verb == "encode" else tokenizer.decode([])
    assert str(said.value).isprintable()


def test_names_in_a_recording_cannot_steer_the_terminal(tmp_path):
    record, path = RECORDING.records[0], tmp_path / "a"
    covered = Covered(name="a", via="sdpa", reason="it\n\tis so")
    good = Recording(model="M", records=(record,), sequences=(0,), coverage=(covered,))
    save_recording(path, good)
    assert open_recording(path).coverage == (covered,)
    for bad in (
        replace(good, model="\x1b[2J"),
        replace(good, model="M" * 501),
        replace(good, records=(replace(record, name="\x9b2J"),)),
        replace(good, coverage=(replace(covered, name="\x1b]0;x\x07"),)),
    ):
        with pytest.raises(FileError, match="not a valid name") as refused:
            save_recording(path, bad)
        assert str(refused.value).isprintable()
    # a reason may hold the words of any error: what is not printable is replaced
    said = replace(good, coverage=(replace(covered, reason="\x1b]0;x\x07"),))
    save_recording(path, said)
    assert open_recording(path).coverage[0].reason == "?]0;x?"


def test_a_page_says_that_it_holds_the_text():
    small = replace(
        RECORDING,
        records=(
            replace(
                RECORDING.records[0],
                q=torch.zeros(2, 3, 8),
                k=torch.zeros(1, 3, 8),
                lse=torch.zeros(2, 3),
                q_positions=torch.arange(3),
                k_positions=torch.arange(3),
            ),
        ),
    )
    html = make_page(small).html
    assert b'"note":"this file holds the text that the model read"' in html


def test_the_map_listens_at_this_machine_alone():
    with start_server(RECORDING) as running:
        until = time.monotonic() + 10
        while not running.server.started and time.monotonic() < until:
            time.sleep(0.01)
        doors = [x.getsockname() for y in running.server.servers for x in y.sockets]
    assert [host for host, _ in doors] == ["127.0.0.1"]


# Code of exercises


def test_endless_printing_fills_no_memory(tmp_path):
    ended, heard = run_program(
        [sys.executable, "-c", "while True: print('x' * 10**5)"], 0.5
    )
    assert not ended
    assert heard == b"x" * 8_000
    path = tmp_path / "one_score.py"
    path.write_text("def one_score(q, k):\n    while True: print('x' * 10**5)\n")
    found = attempt(read_exercise("one_score"), path, limits=(0.5, 20.0))
    assert "is there an endless loop?" in found.sentence
    assert found.printed == "x" * 2_000 + "\n…"


@pytest.mark.skipif(sys.platform != "linux", reason="a limit of Linux")
def test_a_learner_who_fills_the_memory_is_told(tmp_path):
    path = tmp_path / "one_score.py"
    path.write_text("def one_score(q, k):\n    return bytearray(2**32)\n")
    found = attempt(read_exercise("one_score"), path)
    assert not found.passed
    assert "MemoryError" in found.sentence
    path.write_text("held = bytearray(2**29)\ndef one_score(q, k):\n    return q @ k\n")
    assert attempt(read_exercise("one_score"), path).passed
