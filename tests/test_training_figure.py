"""Attention along a training run: watched without a trace, drawn exactly."""

import copy

import numpy as np
import pytest
import torch

import regard
from regard.errors import OptionError, ShapeError
from regard.nn.decoder import CausalTransformer
from regard.nn.tasks import Copy
from regard.nn.train import Plan, train
from regard.plain.config import Config
from regard.recording.record import Record, Recording
from regard.show.loss_curve import draw_curve
from regard.show.training import Film, draw_training, plot_training

TASK = Copy(8)
PLAN = Plan(steps=60, batch=64, rate=1e-2, warmup=20)


def make_model(task=TASK, dropout=0.0):
    torch.manual_seed(0)
    sizes = {"vocabulary": task.vocabulary, "context": task.length, "width": 32}
    config = Config(**sizes, layers=2, heads=2, position="rotary", dropout=dropout)
    return CausalTransformer(config)


def weigh(record):
    """Return causal weights by definition, in float64."""
    q, k = (x.double().numpy() for x in (record.q, record.k))
    scores = q @ k.swapaxes(-1, -2) * record.scale
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.fixture(scope="module")
def run():
    """Train a model on the copy task; keep its film, its losses, and its weights."""
    model = make_model()
    tokens, _ = TASK.batch(1, 0, 0, held_out=True)
    film, states = Film(model, tokens, (0, 25, 60)), {}

    def watch(step, loss):
        film(step, loss)
        if step + 1 == 25:
            states[25] = copy.deepcopy(model.state_dict())

    losses = train(model, TASK, PLAN, show=False, watch=watch)
    return film, losses, states, tokens


def test_the_maps_are_those_of_their_step_by_definition(run):
    film, _, states, tokens = run
    model = make_model()
    for taken in (0, 25):
        model.load_state_dict(states.get(taken, model.state_dict()))
        with regard.watch(model) as seen, torch.inference_mode():
            model(tokens)
        for layer in (0, 1):
            expected = weigh(seen.layer(layer))
            for head in (0, 1):
                panels = film.read(layer, head)
                assert list(panels) == [0, 25, 60]
                error = np.abs(panels[taken].values - expected[head]).max()
                assert error < 1e-6
                assert (panels[taken].allowed == np.tril(np.ones((17, 17)))).all()


def test_a_head_that_copies_is_seen_to_appear(run):
    film, losses, *_ = run
    assert losses[-1] < 0.1 < 2 < losses[0]
    mass = {}  # of each answer's query on the token to be copied
    for taken, panel in film.read(0, 0).items():
        mass[taken] = np.diagonal(panel.values, -8)[1:].mean()
    assert mass[0] < 0.15
    assert mass[60] > 0.6


def test_a_run_that_is_filmed_gives_the_same_losses_to_the_bit():
    plan = Plan(steps=6, batch=8, warmup=2)
    plain = train(make_model(dropout=0.2), TASK, plan, show=False)
    model = make_model(dropout=0.2)
    film = Film(model, TASK.batch(1, 0, 0)[0], (0, 1, 3))
    assert train(model, TASK, plan, show=False, watch=film) == plain
    assert list(film.seen) == [0, 1, 3]


def test_a_film_leaves_the_model_in_its_mode_even_if_it_cannot_read():
    model = make_model(dropout=0.5)
    for mode in (True, False):
        model.train(mode)
        film = Film(model, list(range(5)), (0,))
        assert model.training == mode
        again = Film(model, torch.arange(5), (0,))  # without dropout
        first, second = (x.read(1, 0)[0].values for x in (film, again))
        assert (first == second).all()
    model.train()
    with pytest.raises(ShapeError, match="this model reads 17 at most"):
        Film(model, torch.zeros(99, dtype=torch.int64), (0,))
    assert model.training


# drawing


def make_film(*steps):
    """Return a film of records that were made by hand, and their weights."""
    seen, weights = {}, {}
    for n in steps:
        rng = np.random.default_rng(n)
        q, k = (torch.from_numpy(x) for x in rng.normal(size=(2, 2, 4, 3)) * n)
        at = torch.arange(4)
        done = regard.attention(q, k, k, regard.causal(), scale=1.0, see=("weights",))
        record = Record(
            name="blocks.1", q=q, k=k, lse=done.lse, scale=1.0,
            q_positions=at, k_positions=at, mask=regard.causal(),
        )  # fmt: skip
        seen[n] = Recording(model="m", records=(record,), sequences=(0,))
        weights[n] = weigh(record)
    return Film(None, np.arange(4), steps, seen), weights


LOSSES = [4, 3, 2, 1.5, 1.2, 1]
TEXT = """\
loss
4 ┤█
  │█▄
  │██
  │███▂
  │████▆▄
0 ┤██████
  └──────
   1    6 steps

blocks.1 head 1
    after 1 step   after 6 steps
     a  b  c  a     a  b  c  a
a   ███            ███
b   ░░░▓▓▓         ···███
c   ▒▒▒░░░░░░      ······███
a   ······░░░▒▒▒   ···███······
· less   ░ 0.2   ▒ 0.4   ▓ 0.6   █ 0.8 or more   blank: masked"""


def test_the_text_of_a_run_is_exact():
    film, weights = make_film(1, 6)
    drawn = draw_training(LOSSES, film, layer=0, head=1, labels=[*"abca"], width=40)
    assert drawn == TEXT
    shades = np.asarray(list("·░▒▓█"))
    last = shades[np.minimum(weights[6][1, 3] * 5, 4).astype(int)]
    assert drawn.splitlines()[-2].endswith("".join(x * 3 for x in last))
    assert "\x1b[48;2;" in draw_training(LOSSES, film, layer=0, head=1, color=True)


def test_the_figure_of_a_run_has_its_loss_its_steps_and_its_maps(tmp_path):
    film, weights = make_film(1, 2, 6)
    drawn = plot_training(LOSSES, film, layer=0, head=1, labels=[*"abca"])
    curve, *maps, bar = drawn.axes
    assert curve.lines[0].get_ydata().tolist() == LOSSES
    assert curve.lines[0].get_xdata().tolist() == [1, 2, 3, 4, 5, 6]
    assert [line.get_xdata()[0] for line in curve.lines[1:]] == [1, 2, 6]
    titles = ["after 1 step", "after 2 steps", "after 6 steps"]
    assert [axes.get_title() for axes in maps] == titles
    for axes, n in zip(maps, (1, 2, 6), strict=True):
        image = axes.images[0].get_array()
        np.testing.assert_allclose(image.filled(0), weights[n][1], atol=1e-12)
        assert (image.mask == np.triu(np.ones((4, 4)), 1)).all()
        top = max(x[1].max() for x in weights.values())
        assert axes.images[0].norm.vmax == pytest.approx(top)
    assert [x.get_text() for x in maps[0].get_yticklabels()] == [*"abca"]
    above = ["blocks.1 head 1", "its weights at the dotted steps of the loss"]
    assert drawn.get_suptitle().splitlines() == above
    assert bar.get_ylabel() == "weight"
    for name in ("a.png", "a.svg", "a.pdf"):
        drawn.savefig(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5_000


def test_many_steps_fill_more_than_one_row():
    film, _ = make_film(*range(1, 7))
    drawn = plot_training(LOSSES, film, layer=0, head=0, columns=4)
    places = [axes.get_subplotspec().colspan.start for axes in drawn.axes[1:7]]
    assert places == [0, 1, 2, 0, 1, 2]  # three and three, not four and two


def test_the_figure_of_a_real_run_can_be_drawn(run, tmp_path):
    film, losses, _, tokens = run
    labels = [*TASK.show(tokens[0])]
    drawn = plot_training(losses, film, layer="blocks.0.attention", head=0, labels=labels)  # fmt: skip
    drawn.savefig(tmp_path / "a.png")
    assert drawn.axes[1].get_title() == "before training"
    text = draw_training(losses, film, layer=0, head=0, labels=labels)
    assert "blocks.0.attention head 0" in text


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Film(None, [1], ()), "expected one or more, from 0 on"),
        (lambda: Film(None, [1], (-1, 2)), "expected one or more, from 0 on"),
        (lambda: Film(None, [[1], [2]], (1,)), r"\(2, 1\), expected one sequence"),
        (
            lambda: Film(None, [1], (9,)).read(0, 0),
            r"nothing is on the film.*not \[9\]",
        ),
        (lambda: make_film(1)[0].read(0, 2), "head=2, expected 0 to 1"),
        (lambda: make_film(1)[0].read(7, 0), "there is no layer 7"),
    ],
)
def test_what_cannot_be_filmed_or_drawn_is_refused(make, words):
    with pytest.raises(OptionError, match=words):
        make()


def test_a_loss_that_is_no_number_is_left_out_and_told():
    for none in (np.nan, np.inf):
        drawn = draw_curve([4, none, 2], width=3, height=2).splitlines()
        assert drawn[:2] == ["4 ┤█", "0 ┤█ █"]
        assert drawn[-1].endswith("3 steps, blank: no number")
    with pytest.raises(ShapeError, match=r"\(2, 3\), expected those of a run"):
        draw_curve(np.ones((2, 3)))
