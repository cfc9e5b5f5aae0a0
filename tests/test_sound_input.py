"""The sound of a page: its spectrogram, its words over time, and the path."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import build_whisper
from transformers.models.whisper.generation_whisper import _dynamic_time_warping

import regard
from regard.errors import OptionError, ShapeError
from regard.show.log_codes import decode
from regard.show.map_requests import answer
from regard.show.map_source import MapSource, MissingError
from regard.show.sound_input import draw_spectrum, note_sound
from regard.show.sound_path import find_times

WORDS = ["a", "b", "c", "d"]


def standardise(weights):
    return (weights - weights.mean(0)) / weights.std(0)


def list_cells(times):
    """Return the cells of a path, from the first and last key of each word."""
    return [(i, j) for i, (a, b) in enumerate(times) for j in range(a, b + 1)]


def test_the_path_is_the_best_of_all():
    rng = np.random.default_rng(0)
    for _ in range(20):
        weights = rng.random((3, 4))
        z, best = standardise(weights), -np.inf
        ends = itertools.product(range(4), range(2), range(4), range(2), range(4))
        for b0, s0, b1, s1, _ in ends:
            a1, a2 = b0 + s0, b1 + s1
            if b0 <= b1 <= 3 and a1 <= b1 and a2 <= 3:
                cells = list_cells([(0, b0), (a1, b1), (a2, 3)])
                best = max(best, sum(z[cell] for cell in cells))
        found = sum(z[cell] for cell in list_cells(find_times(weights)))
        assert found == pytest.approx(best)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (7, 40), (30, 25)])
def test_the_path_is_that_of_whisper(shape):
    weights = np.random.default_rng(1).random(shape)
    z = (weights - weights.mean(0)) / np.where(weights.std(0), weights.std(0), 1)
    rows, keys = _dynamic_time_warping(-z)
    mine = sum(z[cell] for cell in list_cells(find_times(weights)))
    assert mine == pytest.approx(z[rows, keys].sum())


def hear():
    """Return what was seen of a tiny Whisper, and its cross-attention."""
    torch.manual_seed(0)
    network, _ = build_whisper()
    network = network.eval()
    inputs = {
        "input_features": torch.randn(1, 8, 100),
        "decoder_input_ids": torch.arange(1, 5)[None],
    }
    with regard.watch(network) as seen, torch.inference_mode():
        network(**inputs)
    network.set_attn_implementation("eager")
    with torch.inference_mode():
        found = network(**inputs, output_attentions=True).cross_attentions
    return seen, inputs["input_features"][0], [x[0].double().numpy() for x in found]


def test_a_request_has_the_cross_attention():
    seen, sound, across = hear()
    source = MapSource(seen.sound(sound, 1, until=0.5, words=WORDS).recording)
    every = np.concatenate(across)
    for asked, expected in [
        ({}, every.mean(0)),
        ({"combine": "max"}, every.max(0)),
        ({"heads": "5"}, across[1].mean(0)),
        ({"heads": "3.1,5.0,5.0"}, (across[0][1] + across[1][0]) / 2),
    ]:
        sheet = answer(source, "sound", {"sequence": 0, **asked})
        np.testing.assert_allclose(decode(sheet.codes), expected, rtol=5e-4)
    for wrong, words in [("0", "layer 0: its queries do not"), ("2.1", "layer 2: its")]:
        with pytest.raises(MissingError, match=words):
            answer(source, "sound", {"sequence": 0, "heads": wrong})
    with pytest.raises(OptionError, match="combine='sum', expected"):
        answer(source, "sound", {"sequence": 0, "combine": "sum"})
    without = MapSource(seen.sound(sound, 1).recording)
    with pytest.raises(MissingError, match="no layer attend from words to the sound"):
        answer(without, "sound", {"sequence": 0})


def test_a_tone_is_a_line_at_its_frequency():
    time = np.arange(16_000) / 16_000
    found = draw_spectrum(np.sin(2 * np.pi * 2_000 * time), 1.0)
    assert set(found.argmax(0).tolist()) == {50}  # of 201, up to 8,000 Hz


@pytest.mark.parametrize(
    ("sound", "options", "error", "words"),
    [
        (np.zeros((2, 3, 4)), {}, ShapeError, r"shape \(2, 3, 4\), expected finite"),
        (np.array([np.nan, 1]), {}, ShapeError, "expected finite numbers"),
        (np.zeros(9), {"until": 2}, OptionError, "seconds=1 and until=2, expected 0 <"),
    ],
)
def test_a_wrong_sound_is_refused(sound, options, error, words):
    with pytest.raises(error, match=words):
        note_sound(sound, 1, keys=10, **options)


def test_a_sound_of_a_file_is_checked():
    seen, sound, _ = hear()
    found = seen.sound(sound, 1, until=0.5, words=WORDS).recording
    good = found.notes["sounds"]["0"]
    assert good["frames"] == 25
    assert MapSource(found).about["sounds"] == {"0": good}
    for wrong in (
        {"frames": 51},
        {"frames": 0},
        {"seconds": -1.0},
        {"grey": good["grey"][:-4]},
        {"words": [1]},
        {"rows": 0},
    ):
        notes = {"sounds": {"0": good | wrong, "x": good, "7": good}}
        assert MapSource(replace(found, notes=notes)).about["sounds"] == {}
