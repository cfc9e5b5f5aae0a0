"""The examples run on a real model, are short, and show what they say they show."""

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parent.parent / "examples"
JOBS = ("documents", "sinks", "eviction", "lookback", "monitor")


def run(name, capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def read(pattern, text):
    return [float(x) for x in re.findall(pattern, text)]


@pytest.mark.parametrize("name", JOBS)
def test_an_example_is_short(name):
    assert len((FOLDER / f"{name}.py").read_text("utf-8").splitlines()) < 40


def test_the_document_with_the_answer_matters_most(smollm, capsys, monkeypatch):
    text = run("documents", capsys, monkeypatch, smollm)
    assert "marzipan" in text
    changes = read(r"KL ([\d.]+)", text)
    assert int(np.argmax(changes)) == 1
    assert min(read(r"mass ([\d.]+)", text)) > 0


def test_the_figures_are_drawn(smollm, capsys, monkeypatch, tmp_path):
    run("figures", capsys, monkeypatch, smollm, tmp_path)
    sizes = {path.stem: path.stat().st_size for path in tmp_path.glob("*.png")}
    models = {"steps", "head", "gallery", "table"}
    assert sizes.keys() == models | {"scaling", "mistakes", "training", "patches"}
    assert min(sizes.values()) > 20_000  # none of them is empty


def test_most_heads_of_a_trained_model_are_sinks(smollm, capsys, monkeypatch):
    text = run("sinks", capsys, monkeypatch, smollm)
    ((n, of),) = re.findall(r"(\d+) of (\d+) heads are sinks", text)
    assert int(of) == 270
    assert 135 < int(n) < 270


def test_scores_of_keys_are_exported(smollm, capsys, monkeypatch, tmp_path):
    run("eviction", capsys, monkeypatch, smollm, tmp_path / "scores.npy")
    scores = np.load(tmp_path / "scores.npy")
    assert scores.shape[0] == 3
    assert (scores > 0).all()
    assert scores.sum(1).max() < 1  # means of rows that sum to 1, without the last keys


def test_every_new_token_has_a_lookback_ratio(smollm, capsys, monkeypatch):
    text = run("lookback", capsys, monkeypatch, smollm)
    ratios = read(r"(?m)^([\d.]+) #", text)
    assert len(ratios) == 11  # the last token was never read
    assert all(0.2 < x < 0.8 for x in ratios)
    assert "'1'" in text  # of 1871


def test_a_rate_that_is_too_high_shows_in_the_logits(smollm, capsys, monkeypatch):
    text = run("monitor", capsys, monkeypatch, smollm)
    logits = read(r"largest logit ([\d.]+)", text)
    assert len(logits) == 4
    assert logits[-1] > 100 * logits[0]
