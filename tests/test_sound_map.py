"""Attention over a sound on a time axis: against the weights of Whisper, text, errors."""

import numpy as np
import pytest
import torch
from matplotlib.text import Text
from test_paper_figures import find_artist
from tiny_models import build_whisper

import regard
from regard.errors import ArrayError, OptionError, ShapeError
from regard.recording.record import Record
from regard.show.figures import draw_sound_map, plot_sound_map
from regard.show.figures.journal import shorten_number

HEARD = ["<s>", " so", " $x", " 漢", "\n", "<b>"]


@pytest.fixture(scope="module")
def whisper():
    """Return what was seen of a tiny Whisper, its weights, and the spectrogram."""
    torch.manual_seed(0)
    network, _ = build_whisper()
    network = network.eval()
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.25)
    sound = torch.randn(1, 8, 100)
    inputs = {"input_features": sound, "decoder_input_ids": torch.arange(1, 7)[None]}
    with regard.watch(network) as seen, torch.inference_mode():
        network(**inputs)
    network.set_attn_implementation("eager")
    with torch.inference_mode():
        found = network(**inputs, output_attentions=True)
    return seen, found, sound[0].numpy()


@pytest.mark.parametrize("heads", [None, [2], [0, 3]])
@pytest.mark.parametrize("until", [None, 0.31])
def test_the_alignment_is_the_cross_attention_of_whisper(
    tmp_path, whisper, heads, until
):
    seen, found, sound = whisper
    record = seen.layer("model.decoder.layers.1.encoder_attn")
    weights = found.cross_attentions[1][0].double().numpy()
    expected = weights[range(4) if heads is None else heads].mean(0)
    kept = 50 if until is None else 16  # 0.31 s of 0.02 s a key
    figure = plot_sound_map(
        record, 1, words=HEARD, heads=heads, until=until, sound=sound
    )
    image = find_artist(figure, "weights")
    np.testing.assert_allclose(image.get_array(), expected[:, :kept], atol=1e-6)
    assert image.get_extent() == pytest.approx([0, kept * 0.02, 6, 0])
    spectrum = find_artist(figure, "spectrum")
    frames = sound[:, : 2 * kept].astype(float)
    np.testing.assert_array_equal(spectrum.get_array(), frames)
    assert spectrum.get_extent()[1] == pytest.approx(kept * 0.02)
    assert image.axes.get_xlim() == spectrum.axes.get_xlim()
    assert image.axes.get_xlim() == pytest.approx((0, kept * 0.02))
    labels = [x.get_text() for x in image.axes.get_yticklabels()]
    assert labels[:3] == ["<s>", "·so", "·$x"]
    assert labels[4:] == ["⏎", "<b>"]
    told = f"{expected[:, kept:].sum(1).mean():.2f} of the weight is on what follows."
    assert (told in figure.twin) == (until is not None)
    figure.save(tmp_path / "a")
    lines = figure.twin.splitlines()[1:7]
    for line, row in zip(lines, expected[:, :kept], strict=True):
        j = row.argmax()
        when = f"{j * 0.02:.2f}–{(j + 1) * 0.02:.2f} s"
        assert f"{when}  {shorten_number(row[j])}" in line


def test_moments_of_an_encoder_have_time_on_both_axes(whisper):
    seen, found, _ = whisper
    record = seen.layer("model.encoder.layers.0.self_attn")
    weights = found.encoder_attentions[0][0].double().numpy().mean(0)
    figure = plot_sound_map(record, 1, until=0.5)
    image = find_artist(figure, "weights")
    np.testing.assert_allclose(image.get_array(), weights[:25, :25], atol=1e-6)
    assert image.get_extent() == pytest.approx([0, 0.5, 0.5, 0])
    assert image.axes.get_ylabel() == "query, time (s)"
    assert draw_sound_map(record, 1, until=0.5).splitlines()[2].startswith("0.02 s ")


def make_record(n_keys):
    """Return two queries: on a key after a quarter of the sound, one of them little."""
    k = torch.zeros(1, n_keys, 1, dtype=torch.float64)
    q = torch.tensor([[[1.0], [0.2]]], dtype=torch.float64)
    k[0, n_keys // 4] = 3
    at = torch.arange
    return Record(
        name="cross", q=q, k=k, lse=(q @ k.mT).logsumexp(-1), scale=1.0,
        q_positions=at(2), k_positions=at(n_keys),
    )  # fmt: skip


def test_a_long_sound_is_pooled_and_no_peak_is_lost():
    figure = plot_sound_map(make_record(1500), 30, words=["a", "b"])
    image = find_artist(figure, "weights").get_array()
    assert image.shape == (2, 375)
    assert image.max() == pytest.approx(np.exp(3) / (np.exp(3) + 1499))
    assert image[0].argmax() == 375 // 4
    words = " ".join(x.get_text() for x in figure.findobj(Text))
    assert "A cell is the largest of 4 keys." in words


TWIN = """\
cross, head 0. 0 to 2.00 s
a  ··█·····  0.50–0.75 s  0.74  path 0.00–0.25 s
·b ··░·····  0.50–0.75 s  0.21  path 0.00–2.00 s
· less   ░ 0.15   ▒ 0.3   ▓ 0.44   █ 0.59 or more"""


def test_the_text_of_the_sound_map_is_exact():
    record = make_record(8)
    assert draw_sound_map(record, 2, words=["a", " b"]) == TWIN
    assert plot_sound_map(record, 2, words=["a", " b"]).twin == TWIN


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"until": 3}, OptionError, "seconds=2 and until=3, expected 0 < until"),
        ({"words": ["a"]}, ShapeError, "1 words, expected one for each of 2 queries"),
        ({"heads": [1]}, OptionError, "expected some of 0 to 0"),
        ({"sound": np.zeros((1, 2, 3))}, ShapeError, r"expected \(features, frames\)"),
    ],
)
def test_a_sound_that_does_not_fit_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        plot_sound_map(make_record(8), 2, **options)


def test_nan_is_an_error():
    record = make_record(8)
    record.q[0, 1] = torch.nan
    with pytest.raises(ArrayError, match="NaN at query 1"):
        plot_sound_map(record, 2)
