"""`explain`: every step is right, and its text can be read for 4 tokens and 4,000."""

import re

import numpy as np
import pytest

import regard
from regard.definition.steps import measure_width, shorten
from regard.errors import OptionError, ShapeError
from regard.masks import alibi, causal, keys, window

FOUR = """\
q        given   (4, 3)
          the   0.13  -0.13   0.64
          cat   0.10  -0.54   0.36
          sat   1.30   0.95  -0.70
         down  -1.27  -0.62   0.04

k        given   (4, 3)
          the   0.13  -0.13   0.64
          cat   0.10  -0.54   0.36
          sat   1.30   0.95  -0.70
         down  -1.27  -0.62   0.04

v        given   (4, 3)
          the   0.13  -0.13   0.64
          cat   0.10  -0.54   0.36
          sat   1.30   0.95  -0.70
         down  -1.27  -0.62   0.04

dots     q kᵀ   (4, 4)
                 the    cat    sat   down
          the   0.44   0.32  -0.41  -0.05
          cat   0.32   0.43  -0.62   0.22
          sat  -0.41  -0.62   3.09  -2.27
         down  -0.05   0.22  -2.27   1.99

scores   dots × scale (scale = 0.5774, 1 / √3)   (4, 4)
                 the    cat    sat   down
          the   0.26   0.18  -0.24  -0.03
          cat   0.18   0.25  -0.36   0.12
          sat  -0.24  -0.36   1.79  -1.31
         down  -0.03   0.12  -1.31   1.15

logits   scores, −∞ outside causal()   (4, 4)
                 the    cat    sat  down
          the   0.26     −∞     −∞    −∞
          cat   0.18   0.25     −∞    −∞
          sat  -0.24  -0.36   1.79    −∞
         down  -0.03   0.12  -1.31  1.15

weights  exp(logits) / Σ exp(logits)   (4, 4)
                the   cat   sat  down
          the  1.00     0     0     0
          cat  0.48  0.52     0     0
          sat  0.11  0.09  0.80     0
         down  0.18  0.20  0.05  0.57

lse      log(Σ exp(logits))   (4,)
          the  0.26
          cat  0.91
          sat  2.01
         down  1.71

out      weights v   (4, 3)
          the   0.13  -0.13   0.64
          cat   0.11  -0.34   0.50
          sat   1.07   0.69  -0.46
         down  -0.62  -0.44   0.18"""


def test_four_tokens_are_printed_in_full(rng):
    x = rng.normal(size=(4, 3))
    tokens = ["the", "cat", "sat", "down"]
    assert str(regard.explain(x, x, x, causal(), tokens=tokens)) == FOUR


def test_four_thousand_tokens_fit_on_two_screens(rng):
    x = rng.normal(size=(1, 2, 4000, 16)).astype(np.float32)
    steps = regard.explain(
        1.5 * x,
        1.5 * x,
        x,
        window(900) | keys(0, 1),
        softcap=30.0,
        bias=alibi([0.01, 0.05]),
        sink=[0.0, 1.0],
    )
    text = str(steps)
    assert len(text.splitlines()) < 130
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith("batch and head: 0 of 1, 0 of 2\n\nq        given")
    drawn = steps["weights"].text().splitlines()
    assert drawn[0] == (
        "weights  exp(logits) / (Σ exp(logits) + exp(sink))   (1, 2, 4000, 4000)"
    )
    assert drawn[-18] == " " * 9 + "████" + "·" * 60
    assert re.fullmatch(" {9}░·{44}[░▒▓█]{15}████", drawn[-3])
    assert drawn[-2].endswith("each character: the largest of up to 250 × 63 weights")


def test_the_map_shows_the_largest_weight_of_its_cells():
    q, k = np.zeros((1000, 1)), np.zeros((1000, 1))
    one = np.zeros((1000, 1000))
    one[990, 5] = 50.0  # a single strong weight among a million
    steps = regard.explain(q, k, k, bias=one)
    drawn = [line.strip() for line in steps["weights"].text().splitlines()[-18:-2]]
    assert [line.count("█") for line in drawn] == [0] * 15 + [1]
    assert drawn[-1][0] == "█"


def test_steps_are_those_of_attention(library, rng):
    q = rng.normal(size=(2, 4, 5, 3))
    k, v = rng.normal(size=(2, 2, 2, 5, 3))
    arrays = [library.make(x) for x in (q, k, v)]
    names = ("scores", "capped", "logits", "weights")
    seen = regard.attention(*arrays, causal(), softcap=2.0, see=names)
    steps = regard.explain(*arrays, causal(), softcap=2.0)
    order = ["q", "k", "v", "dots", *names, "lse", "out"]
    assert [step.name for step in steps] == order
    for name in (*names, "lse", "out"):
        assert np.array_equal(
            np.asarray(steps[name].values), np.asarray(getattr(seen, name))
        )
    dots = q @ np.repeat(k, 2, axis=1).transpose(0, 1, 3, 2)
    np.testing.assert_allclose(np.asarray(steps["dots"].values), dots, atol=1e-13)


def test_every_head_can_be_printed(rng):
    q = rng.normal(size=(2, 4, 3, 2))
    k, v = rng.normal(size=(2, 2, 2, 3, 2))
    steps = regard.explain(q, k, v)
    shown = steps["k"].text(at=(1, 3)).splitlines()[1].split()[1:]
    assert [float(x) for x in shown] == pytest.approx(k[1, 1, 0], abs=5e-3)
    assert steps.text(at=(1, 3)).startswith("batch and head: 1 of 2, 3 of 4\n")
    with pytest.raises(OptionError, match=r"at=\(1,\), expected an index for each of"):
        steps.text(at=(1,))
    with pytest.raises(OptionError) as caught:
        steps["weights"].text(at=(1, 4))
    words = "at=(1, 4), expected an index for each of (2, 4), counted from 0."
    assert str(caught.value) == words
    assert steps["q"].text(at=(-1, -1)) == steps["q"].text(at=(1, 3))


def test_steps_that_do_nothing_are_left_out(rng):
    x = rng.normal(size=(3, 2))
    names = [step.name for step in regard.explain(x, x, x)]
    assert names == ["q", "k", "v", "dots", "scores", "weights", "lse", "out"]
    with pytest.raises(OptionError, match='there is no step "capped"; there are q, k'):
        regard.explain(x, x, x)["capped"]


def test_queries_are_named_by_their_place_among_the_keys(rng):
    x = rng.normal(size=(3, 2))
    words = ["a", "b", "c"]
    steps = regard.explain(x[2:], x, x, causal(), q_start=2, tokens=words)
    assert steps["weights"].rows == ("c",)
    cross = regard.explain(x[:2], x, x, tokens=(["x", "y"], words))
    assert (cross["weights"].rows, cross["weights"].columns) == (
        ("x", "y"),
        tuple("abc"),
    )
    with pytest.raises(
        ShapeError, match="tokens give 2 labels for 3 queries and 2 for"
    ):
        regard.explain(x, x, x, tokens=["a", "b"])


def test_queries_are_named_wherever_their_start_comes_from(library, rng):
    x, words = library.make(rng.normal(size=(1, 1, 3, 2))), ["a", "b", "c"]
    for start in (np.int64(2), library.asarray(2), library.asarray([2])):
        steps = regard.explain(x[:, :, 2:, :], x, x, causal(), q_start=start)
        assert steps["weights"].rows == ("2",)
        steps = regard.explain(
            x[:, :, 2:, :], x, x, causal(), q_start=start, tokens=words
        )
        assert steps["weights"].rows == ("c",)


def test_one_list_cannot_name_queries_that_start_apart(rng):
    x, words = rng.normal(size=(2, 1, 3, 2)), ["a", "b", "c"]
    one, starts = x[:, :, :1], [0, 2]
    steps = regard.explain(one, x, x, causal(), q_start=starts)
    assert steps["weights"].rows == ("+0",)
    with pytest.raises(ShapeError) as caught:
        regard.explain(one, x, x, causal(), q_start=starts, tokens=words)
    assert str(caught.value) == (
        "queries start at [0 2], so one list of tokens cannot label them. Write "
        "tokens=(tokens_of_queries, tokens_of_keys)."
    )
    with pytest.raises(ShapeError, match="start at -1, so one list of tokens cannot"):
        regard.explain(one, x, x, causal(), q_start=-1, tokens=words)


def test_no_keys_and_no_queries_are_explained(library, rng):
    x = library.make(rng.normal(size=(20, 2)))
    steps = regard.explain(x, x[:0, :], x[:0, :])
    assert steps["weights"].shape == (20, 0)
    assert np.isneginf(np.asarray(steps["lse"].values)).all()
    assert not np.asarray(steps["out"].values).any()
    assert "log(Σ exp(scores))   (20,)" in str(steps)
    none = regard.explain(x[:0, :], x, x)
    assert none["out"].shape == (0, 2)
    assert "weights v   (0, 2)" in str(none)


def test_hostile_tokens_stay_in_their_column(rng):
    tokens = ["</script>", "\u202eabc", "日本語の長い単語", "\ud83d", "a\nb\x1b[31m"]
    assert [shorten(t) for t in tokens] == [
        "</scrip…",
        "\\u202ea…",
        "日本語 …",
        "\\ud83d",
        "a\\u000a…",
    ]
    x = rng.normal(size=(5, 2))
    lines = regard.explain(x, x, x, tokens=tokens)["weights"].text().splitlines()[1:]
    assert len(lines) == 6
    assert len({measure_width(line) for line in lines}) == 1
