"""The examples run as a person runs them, and print what their page shows."""

import ast
import contextlib
import io
import os
import re
import runpy
import signal
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from test_docs import agree, load_once

from regard.atlas.table import read_table
from regard.nn import weights

RESULTS_BY = "test"  # see .ci/kept_results.py

pytestmark = pytest.mark.slow  # each runs a whole program

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples"
PAGE = (ROOT / "docs" / "examples.md").read_text("utf-8")
NAMES = sorted(x.stem for x in FOLDER.glob("*.py") if x.stem != "models")


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """Sit in an empty folder, with one model for all examples of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("desk"))
        patch.syspath_prepend(FOLDER)
        patch.setattr(weights, "load", load_once)
        yield Path.cwd()


def run(name):
    """Run an example without arguments; what it prints begins as its page says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name])
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    compare(name, out.getvalue())
    return out.getvalue()


def compare(name, printed):
    shown, lines = read_page(name), printed.splitlines()
    for wanted, line in zip(shown, lines, strict=False):
        assert agree(wanted.rstrip(), line.rstrip()), f"{name} prints\n{printed}"
    assert len(lines) >= len(shown)


def read_page(name):
    """Return the lines that the page shows below the command."""
    block = rf"```console\n\$ python examples/{name}\.py\n```\n\n```text\n(.*?)```"
    (text,) = re.findall(block, PAGE, flags=re.DOTALL)
    assert 3 <= len(text.splitlines()) < 40
    return text.splitlines()


def read(pattern, text):
    return [float(x) for x in re.findall(pattern, text)]


# -- what they are ------------------------------------------------------------------------


def test_there_are_twelve_examples_and_the_page_has_them_all():
    assert len(NAMES) == 12
    assert sorted(re.findall(r"(?m)^\| `(\w+)\.py` \|", PAGE)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_says_how_to_run_it_and_what_to_look_at(name):
    text = (FOLDER / f"{name}.py").read_text("utf-8")
    assert len(text.splitlines()) < 60
    about = ast.get_docstring(ast.parse(text))
    assert f"python examples/{name}.py" in about
    assert re.search(r'(?m)needs: pip install ("regard\[[a-z,]+\]"|regard)$', about)
    assert re.search(r"\b[Ll]ook at\b", about)


def test_every_extra_is_needed_by_an_example():
    about = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    extras = set(about["project"]["optional-dependencies"]) - {"all"}
    texts = [(FOLDER / f"{name}.py").read_text("utf-8") for name in NAMES]
    found = re.findall(r"needs: pip install \"regard\[([a-z,]+)\]", "\n".join(texts))
    assert {extra for some in found for extra in some.split(",")} == extras


def test_without_a_model_an_example_says_what_to_pass(desk, monkeypatch):
    import models  # noqa: PLC0415 (the desk leads to it)

    monkeypatch.setattr(models, "find_spec", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["sinks.py"])
    with pytest.raises(SystemExit, match=r"Pass a GGUF file .* pip install"):
        models.find_smollm()
    with pytest.raises(SystemExit, match="Pass a folder of a sentence encoder"):
        models.find_minilm()
    monkeypatch.setattr(sys, "argv", ["sinks.py", "mine.gguf"])
    assert models.find_smollm() == "mine.gguf"


# -- what they show -----------------------------------------------------------------------


def test_the_word_before_decides_what_bank_becomes(desk):
    text = run("four_tokens")
    (river, loan) = re.findall(r"bank is ([\d.]+) water, ([\d.]+) money", text)
    assert float(river[0]) > 2 * float(river[1])  # its own numbers are alike
    assert loan == river[::-1]


def test_the_variant_is_computed_alike_three_times(desk):
    text = run("variant")
    errors = read(r"(?:loops|definition): (\S+)", text)
    assert len(errors) == 2
    assert max(errors) < 1e-13
    assert len(read(r"(?:causal|idea) +(\d+) ms", text)) == 6
    assert text.splitlines()[-1].startswith("tiles: ")


def test_a_head_leads_it_to_what_it_stands_for(desk):
    text = run("pronoun")
    weight, *others = read(r"(?m)^([\d.]+) from it", text)
    assert weight > 0.5
    assert len(others) == 3
    assert (desk / "pronoun.png").stat().st_size > 20_000
    page = (desk / "pronoun.html").read_text("utf-8")
    assert "animal" in page
    assert re.search(r"pronoun.html#l=\d+&h=\d+&pin=8$", text.splitlines()[1])
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_forgotten_padding_is_found_and_mended(desk):
    text = run("padding")
    wrong, right = read(r"batch: ([\d.]+)", text)
    assert wrong < 0.95
    assert right > 0.9999
    assert read(r"(\d+) errors", text) == [6, 0]  # every layer, then none
    assert "weight on padding in encoder.layer.0" in text


def test_the_document_with_the_answer_matters_most(desk):
    text = run("documents")
    assert "marzipan" in text.splitlines()[0]
    changes, masses = read(r"KL ([\d.]+)", text), read(r"mass ([\d.]+)", text)
    assert int(np.argmax(changes)) == 1
    assert int(np.argmax(masses)) != 1  # as its docstring says
    assert min(masses) > 0


def test_most_heads_of_a_trained_model_are_sinks_whatever_comes_first(desk):
    text = run("sinks")
    ((n, of),) = re.findall(r"(\d+) of (\d+) heads are sinks", text)
    assert int(of) == 270
    assert 135 < int(n) < 270
    assert all(abs(x - 62) < 5 for x in read(r"(\d+)% when", text))
    assert "MapWidget" in text.splitlines()[-1]


def test_induction_heads_are_missed_and_their_map_is_served(desk, smollm):
    command = [sys.executable, "-u", "-W", "error", str(FOLDER / "induction.py")]
    env = os.environ | {"BROWSER": "true", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as running:
        lines = []
        while not (lines and lines[-1].startswith("It shows the text")):
            lines.append(running.stdout.readline())
            assert lines[-1], running.stderr.read()
        (url,) = re.findall(r"http://\S+", lines[-2])
        with urllib.request.urlopen(url.partition("#")[0], timeout=30) as page:
            assert b"<html" in page.read()
        with pytest.raises(urllib.error.HTTPError):  # who does not know the token
            urllib.request.urlopen(url.partition("?")[0], timeout=30)
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 0
    assert url.endswith("#l=18&h=6")
    text = "".join(lines)
    compare("induction", text)
    (whole,) = read(r"second half ([\d.]+)", text)
    rows = re.findall(r"(?m)^\d+ \w+ +([\d.]+) +([\d.]+)$", text)
    for i in (0, 1):  # ablated, patched
        one, many, others = (float(row[i]) for row in rows)
        assert whole < one < many
        assert others - whole < 0.1 * (many - whole)


def test_a_sink_that_is_hidden_late_is_missed_and_one_hidden_early_moves(desk):
    rows = re.findall(r"(?m) ([\d.]+) +(\d+)% +(\d+)%$", run("no_sinks"))
    plain, late, other, early, strong, weak = [[float(x) for x in row] for row in rows]
    assert late[0] > 1.5 * plain[0]
    assert max(other[0], early[0], strong[0]) < 1.1 * plain[0] < weak[0]
    assert plain[1] > 35 > 5 >= plain[2]
    assert early[2] > 35


def test_the_heads_that_decide_between_names_are_found_with_intervals(desk):
    text = run("names")
    assert "of 8 prompts" in text
    rows = re.findall(
        r"(?m)^ +\d+ +\d+ +([+-][\d.]+) +([+-][\d.]+) to ([+-][\d.]+)(?: \*)?$", text
    )
    assert len(rows) == 10
    for change, low, high in (map(float, row) for row in rows):
        assert low < change < high


def test_the_policy_that_asks_the_last_token_keeps_the_answer(desk):
    text = run("eviction")
    changes = dict(re.findall(r"(?m)^(\w+): KL ([\d.]+)", text))
    assert len(changes) == 5
    assert min(changes, key=lambda name: float(changes[name])) == "tova"
    assert float(changes["tova"]) < 0.1 * float(changes["recent"])
    assert re.search(r"tova: .* ' mar'", text)


def test_a_sick_run_shows_in_the_logits_before_the_loss(desk):
    text = run("training")
    steps = re.findall(r"step +(\d+): loss (\S+) entropy (\S+) logit (\S+)", text)
    runs = [[*map(float, row)] for row in steps]
    healthy, sick = runs[:4], runs[4:]
    assert healthy[-1][1] < 0.2
    assert abs(healthy[1][1] - sick[1][1]) < 0.5  # at step 10 the losses are alike
    assert sick[1][3] > 100 * healthy[1][3]
    assert sick[1][2] < 0.2 < healthy[1][2]


def test_an_atlas_marks_heads_that_differ_in_code(desk):
    text = run("atlas")
    marked = read(r"(\d+) of 270 heads are marked", text)
    assert len(marked) == 2
    assert min(marked) > 0
    assert "layer 18 head 6   +" in text  # the induction head of induction.py
    prose = read_table(desk / "atlas-prose")
    assert prose.about["documents"] == 12
    (change,) = read(r"layer 18 head 6   \+([\d.]+)", text)
    means = [
        read_table(desk / f"atlas-{x}").mean("induction") for x in ("prose", "code")
    ]
    assert abs(means[1][18, 6] - means[0][18, 6] - change) < 1e-3


# -- the scripts behind the documents -------------------------------------------------------


def test_the_figures_of_the_documents_are_drawn(desk, smollm, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["figures", str(smollm), str(tmp_path)])
    runpy.run_path(str(ROOT / "docs" / "figures.py"), run_name="__main__")
    sizes = {path.stem: path.stat().st_size for path in tmp_path.glob("*.png")}
    models = {"steps", "head", "gallery", "table"}
    assert sizes.keys() == models | {"scaling", "mistakes", "training", "patches"}
    assert min(sizes.values()) > 20_000  # none of them is empty


def test_the_ring_of_the_documents_runs():
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*start, "--nproc-per-node", "2", str(ROOT / "docs" / "ring.py")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert max(read(r"(\d\.\de-\d+) in", done.stdout)) < 1e-10
    assert read(r"most / least: ([\d.]+)", done.stdout)[0] < 1.01
