"""The scaling experiment and the common mistakes: numbers, text twins, figures."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from regard.errors import OptionError
from regard.show import scaling_demo as experiment
from regard.show.scaling_demo import BARE, SCALED


def softmax(scores):
    """Return weights by definition, in float64."""
    scores = np.asarray(scores, np.float64)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_the_first_draw_is_the_table_of_the_documents():
    found = experiment.measure_scaling()
    scaled = [0.6650, 0.4708, 0.4617, 0.7101, 0.7490]
    bare = [0.9048, 0.8828, 0.9888, 1.0, 1.0]
    np.testing.assert_allclose(found[SCALED][0], scaled, atol=5e-5)
    np.testing.assert_allclose(found[BARE][0], bare, atol=5e-5)


def test_every_draw_is_the_largest_weight_by_definition():
    found = experiment.measure_scaling((4, 9), (7, 8, 9))
    for i, seed in enumerate((7, 8, 9)):
        state = np.random.RandomState(seed)
        for j, width in enumerate((4, 9)):
            q, k = state.randn(4, width), state.randn(4, width)
            assert found[BARE][i, j] == pytest.approx(softmax(q @ k.T).max(), rel=1e-12)
            scaled = softmax(q @ k.T / np.sqrt(width)).max()
            assert found[SCALED][i, j] == pytest.approx(scaled, rel=1e-12)


def test_without_the_scale_a_wider_head_saturates_and_with_it_it_does_not():
    found = experiment.measure_scaling()
    bare, scaled = (np.median(found[name], 0) for name in (BARE, SCALED))
    assert bare[-1] > 0.999
    assert found[BARE][:, -1].min() > 0.99
    assert np.ptp(scaled) < 0.1


SCALING = """\
largest weight        d_k = 4   d_k = 16   d_k = 64
scaled by 1/√d_k       0.6650     0.4708     0.4617
  median of 3          0.6180     0.5123     0.5658
  lowest               0.4748     0.4708     0.4617
  highest              0.6650     0.5957     0.7412
not scaled             0.9048     0.8828     0.9888
  median of 3          0.8686     0.8828     0.9986
  lowest               0.6798     0.6896     0.9888
  highest              0.9048     0.9851     1.0000
random q and k of 4 tokens, of variance 1; the first rows are of seed 42"""


def test_the_text_of_the_scaling_is_exact():
    assert experiment.draw_scaling((4, 16, 64), (42, 43, 44)) == SCALING


def test_the_figure_of_the_scaling_has_medians_all_draws_and_the_first(tmp_path):
    found = experiment.measure_scaling()
    drawn = experiment.plot_scaling()
    (axes,) = drawn.axes
    for i, name in enumerate((SCALED, BARE)):
        middle, first, key = axes.lines[3 * i : 3 * i + 3]
        assert middle.get_xdata().tolist() == list(experiment.WIDTHS)
        np.testing.assert_array_equal(middle.get_ydata(), np.median(found[name], 0))
        np.testing.assert_array_equal(first.get_ydata(), found[name][0])
        assert first.get_linestyle() == "None"
        assert key.get_label().startswith(name.split("1")[0])
        (edge,) = axes.collections[i].get_paths()
        low, high = edge.vertices[:, 1].min(), edge.vertices[:, 1].max()
        assert (low, high) == (found[name].min(), found[name].max())
    marks = {line.get_marker() for line in axes.lines} - {"None"}
    assert len(marks) == 2  # told apart in grey, too
    assert [x.get_text() for x in axes.get_xticklabels()] == ["4", "16", "64", "256", "512"]  # fmt: skip
    for name in ("a.png", "a.svg", "a.pdf"):
        drawn.savefig(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5_000


@pytest.mark.parametrize(("widths", "seeds"), [((), (1,)), ((4,), ()), ((0,), (1,))])
def test_an_experiment_without_widths_or_seeds_is_refused(widths, seeds):
    with pytest.raises(OptionError, match="expected at least one of each"):
        experiment.measure_scaling(widths, seeds)


# mistakes


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy])
def test_each_mistake_is_made_and_no_other(make):
    q, k, v = experiment.make_example(5, 9, 4)
    right, bare, other, late = experiment.list_mistakes(make(q), make(k), make(v))
    below = np.where(np.tril(np.ones((5, 5), bool)), 0, -np.inf)
    for found, scale in ((right, 1 / 3), (bare, 1), (other, 1 / 2)):
        expected = softmax(q @ k.T * scale + below)
        np.testing.assert_allclose(found.weights, expected, atol=1e-14)
    expected = np.tril(softmax(q @ k.T / 3))
    np.testing.assert_allclose(late.weights, expected, atol=1e-14)
    np.testing.assert_allclose(right.weights.sum(-1), 1, atol=1e-15)
    assert (late.weights.sum(-1)[:-1] < 0.99).all()
    renormalised = late.weights / late.weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(renormalised, right.weights, atol=1e-14)


MISTAKES = """\
  right               no scale            scale by d_v        mask after softmax
  0 1 2 3 4 5         0 1 2 3 4 5         0 1 2 3 4 5         0 1 2 3 4 5
0 ██                  ██                  ██                  ░░
1 ▒▒▒▒                ██··                ▓▓░░                ····
2 ▒▒··░░              ██····              ▓▓··░░              ░░····
3 ░░··░░░░            ██······            ▒▒····░░            ░░··░░░░
4 ░░····░░··          ······██··          ░░····░░··          ······░░··
5 ··░░····░░··        ··██········        ··▒▒····░░··        ··░░····░░··
· less   ░ 0.2   ▒ 0.4   ▓ 0.6   █ 0.8 or more   blank: masked
right               rows sum to 1, largest of a row: 0.43 on average
no scale            rows sum to 1, largest of a row: 0.92 on average
scale by d_v        rows sum to 1, largest of a row: 0.56 on average
mask after softmax  rows sum to 0.19 … 1, largest of a row: 0.28 on average"""


def test_the_text_of_the_mistakes_is_exact():
    assert experiment.draw_mistakes() == MISTAKES
    mine = experiment.list_mistakes(*experiment.make_example())
    assert experiment.draw_mistakes(mine) == MISTAKES
    assert "\x1b[48;2;" in experiment.draw_mistakes(color="dark")


def test_what_is_told_of_a_mistake_is_counted():
    weights = np.asarray([[0.5, 0, 0], [0.25, 0.5, 0], [0.1, 0.2, 0.7]])
    told = experiment.Variant("x", weights).tell()
    assert told == ("rows sum to 0.5 … 1", "largest of a row: 0.60 on average")


@pytest.mark.slow
def test_the_figure_of_the_mistakes_has_their_weights_and_no_title_overlaps(tmp_path):
    mistakes = experiment.list_mistakes(*experiment.make_example())
    drawn = experiment.plot_mistakes()
    *maps, bar = drawn.axes
    for axes, mistake in zip(maps, mistakes, strict=True):
        image = axes.images[0].get_array()
        assert (image.mask == ~np.tril(np.ones((6, 6), bool))).all()
        np.testing.assert_array_equal(image.filled(0), mistake.weights)
        assert axes.get_title().splitlines() == [mistake.title, *mistake.tell()]
    assert bar.get_ylim() == (0, 1)
    drawn.draw_without_rendering()
    boxes = sorted(axes.title.get_window_extent().intervalx.tolist() for axes in maps)
    assert all(a[1] < b[0] for a, b in pairwise(boxes))
    for name in ("a.png", "a.svg", "a.pdf"):
        drawn.savefig(tmp_path / name)
    assert experiment.plot_mistakes(mistakes, dark=True).get_facecolor()[0] < 0.2


def test_mistakes_of_more_than_one_head_are_refused():
    x = np.zeros((1, 2, 4, 8))
    with pytest.raises(OptionError, match=r"write q\[0, 0\]"):
        experiment.list_mistakes(x, x, x)
