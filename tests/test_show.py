"""Maps: the pixels are the weights, the text twin is exact, the figure says the same."""

import re
import sys
import textwrap
import unicodedata
from dataclasses import replace
from itertools import pairwise

import matplotlib.image
import numpy as np
import pytest
import torch

import regard
from regard.arrays import to_numpy
from regard.errors import ArrayError, MaskError, OptionError, ShapeError
from regard.masks import alibi, causal, per_head, where, window
from regard.recording.record import Record, Recording
from regard.seen import Seen
from regard.show import figure, palette
from regard.show import terminal_map as text
from regard.show.palette import (
    LinearScale,
    LogScale,
    Signed,
    fit_signed,
    fit_weights,
    read_panels,
)
from regard.stats.columns import cut_rows

WORDS = ["the", "cat", "sat", "down"]
HOSTILE = [
    "a\x1b[2Jb",  # clears the screen
    "new\nline",
    "\r",
    "\u202eright",  # turns everything around
    "שלום",
    "مرحبا",
    "\u0301mark",  # joins what stands before it
    "漢字漢字漢字",
    "👩‍🚀",
    "👍🏽",
    "🇩🇪",
    "❤\ufe0f",
    "\ud83d",  # half an emoji
    "\u200bzero",
    "\ufffd",
    "$x^2",
    "$\\frac{1}{2$",
    "<img onerror=x>",
    "x" * 10_000,
    "   ",
    "",
]
# protan, deutan, tritan: Machado, Oliveira and Fernandes 2009, severity 1
BLIND = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}  # fmt: skip


def luminance(colours, blindness):
    """Return how bright colours (n, 3) of 0 to 255 are to someone."""
    x = np.asarray(colours) / 255
    light = np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)
    seen = np.clip(light @ np.asarray(BLIND[blindness]).T, 0, 1)
    return seen @ [0.2126, 0.7152, 0.0722]


def pool(x, down, across):
    """Return the largest of every block, by loops."""
    rows, keys = range(0, len(x), down), range(0, len(x[0]), across)
    return np.asarray(
        [[x[i : i + down, j : j + across].max() for j in keys] for i in rows]
    )


def make_record(n=6, heads=2, name="layer", seed=0):
    """Return a causal record and its weights by definition."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, heads, n, 4)) * 3
    done = regard.attention(q, k, k, causal(), see=("weights",))
    at = torch.arange(n)
    record = Record(
        name=name, q=torch.from_numpy(q), k=torch.from_numpy(k), lse=torch.from_numpy(done.lse),
        scale=0.5, q_positions=at, k_positions=at, mask=causal(),
    )  # fmt: skip
    return record, done.weights


def poison(record):
    q = to_numpy(record.q).copy()
    q[1, 2] = np.nan
    return replace(record, q=torch.from_numpy(q))


def make_seen(layers=2, n=6, heads=2):
    pairs = [make_record(n, heads, f"layer {i}", i) for i in range(layers)]
    records = tuple(record for record, _ in pairs)
    found = Recording(model="m", records=records, sequences=(0,) * layers)
    return Seen(found), [weights for _, weights in pairs]


def explain_four(mask=None):
    x = np.asarray([[1.0, 0], [0, 1], [1, 1], [-1, 0]])
    return regard.explain(2 * x, x, x, mask, tokens=WORDS)


# palette


@pytest.mark.parametrize("name", ["LIGHT", "DARK", "PALE_TWO", "DEEP_TWO"])
def test_every_colour_is_one_that_a_screen_has(name):
    path = palette.walk_path(getattr(palette, name))
    assert path.min() >= 0
    assert path.max() <= 1


@pytest.mark.parametrize("blindness", BLIND)
def test_brightness_only_falls_on_light_and_only_rises_on_dark(blindness):
    for dark, sign in ((False, -1), (True, 1)):
        steps = sign * np.diff(
            luminance(LinearScale(0, 1).colours(dark=dark), blindness)
        )
        assert steps.min() > -5e-4  # colours are whole numbers of 0 to 255
        assert steps.sum() > 0.75
        ends = np.diff(luminance(Signed(1).colours(dark=dark), blindness))
        assert (sign * ends[128:]).min() > -5e-4
        assert (-sign * ends[:127]).min() > -5e-4


def test_the_test_of_brightness_can_fail():
    rainbow = matplotlib.colormaps["jet"](np.linspace(0, 1, 256))[:, :3] * 255
    steps = np.diff(luminance(rainbow, "none"))
    assert steps.min() < -5e-4 < 5e-4 < steps.max()


def test_the_first_and_last_colours_are_these():
    table = LinearScale(0, 1).colours()
    assert table[[0, 255]].tolist() == [[252, 251, 232], [24, 27, 83]]
    table = LinearScale(0, 1).colours(dark=True)
    assert table[[0, 255]].tolist() == [[7, 6, 16], [254, 247, 201]]
    red, green, blue = Signed(1).colours()[128].astype(int)
    assert max(red, green, blue) - min(red, green, blue) < 5  # nothing in the middle


def test_scales_place_numbers_where_they_say():
    assert LinearScale(0, 2).place([-1, 0, 0.5, 2, 9]).tolist() == [0, 0, 0.25, 1, 1]
    np.testing.assert_allclose(
        LogScale(1e-4, 1).place([0, 1e-4, 1e-2, 1, 2]), [0, 0, 0.5, 1, 1]
    )
    assert Signed(3).place([-3, 0, 1.5]).tolist() == [0, 0.5, 0.75]
    for scale in (LinearScale(1, 3), LogScale(1e-3, 1), Signed(2)):
        places = np.linspace(0, 1, 7)
        np.testing.assert_allclose(scale.place(scale.read(places)), places, atol=1e-12)
    assert (
        "".join(LinearScale(0, 1).shade([0, 0.19, 0.2, 0.5, 0.79, 0.8, 1])) == "··░▒▓██"
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LinearScale(1, 1), "low below the high"),
        (lambda: LinearScale(0, np.inf), "both finite"),
        (lambda: LogScale(0, 1), r"low > 0: write LogScale\(1e-4, 1\)"),
    ],
)
def test_a_scale_that_is_none_is_refused(make, words):
    with pytest.raises(OptionError, match=words):
        make()


def make_sink(n, share, elsewhere):
    """Return weights that give a share to key 0, and something to one other key."""
    x = np.zeros((n, n))
    x[:, 0] = share
    x[0, 0], x[n - 1, 2] = 1, elsewhere
    return x


def test_the_scale_starts_after_a_sink_and_tells_its_share():
    scale, note = fit_weights(read_panels(make_sink(10, 0.75, 0.2)), "The")
    assert (scale.low, scale.high) == (0, 0.2)
    assert note == (
        "key 0 (The) takes 0.75 of the weight on average; the largest weight from "
        "key 1 on is 0.2, colours end at 0.2"
    )
    # a faint rest stays faint; a strong one needs no other scale; a sink needs weight
    assert fit_weights(read_panels(make_sink(10, 0.99, 1e-6)))[0].high == 0.01
    assert fit_weights(read_panels(make_sink(10, 0.75, 0.6)))[0].high == 1
    assert fit_weights(read_panels(make_sink(10, 0.25, 0.2))) == (
        LinearScale(0, 1),
        "",
    )
    assert fit_weights(read_panels(make_sink(8, 0.75, 0.2))) == (
        LinearScale(0, 1),
        "",
    )
    both = {"a": make_sink(10, 0.75, 0.2), "b": make_sink(10, 0.5, 0.3)}
    scale, note = fit_weights(read_panels(both))
    assert scale.high == 0.3
    assert note.startswith("key 0 takes 0.50 to 0.75 of the weight")


def test_the_share_of_a_sink_is_a_mean_though_pixels_are_maxima():
    record, weights = make_record(n=20)
    for panel, x in zip(read_panels(record, (7, 5)), weights, strict=True):
        assert panel.first == pytest.approx(x[1:, 0].mean())
    for panel, x in zip(read_panels(weights, (7, 5)), weights, strict=True):
        assert panel.first == pytest.approx(x[1:, 0].mean())
    assert (
        "from key 5 on" in fit_weights(read_panels(make_sink(10, 0.9, 0.1), (2, 5)))[1]
    )


def test_signed_numbers_have_nothing_in_the_middle():
    assert fit_signed([[1, -4], [-np.inf, 2]]) == Signed(4)
    assert fit_signed([[-np.inf]]) == Signed(1)


# pixels


@pytest.mark.parametrize("cells", [(1, 1), (2, 3), (7, 4), (50, 50)])
def test_a_pixel_is_the_largest_of_its_cells(cells):
    record, weights = make_record(n=17)
    seen = np.tril(np.ones((17, 17), bool))
    for panels in (
        read_panels(record, cells),
        read_panels(weights, cells, mask=causal()),
    ):
        assert [panel.title for panel in panels] == ["head 0", "head 1"]
        for panel, x in zip(panels, weights, strict=True):
            np.testing.assert_allclose(panel.values, pool(x, *cells), atol=1e-12)
            assert (panel.allowed == pool(seen, *cells)).all()
            assert (panel.cells, panel.shape) == (cells, (17, 17))


def test_masks_come_as_formulas_arrays_and_minus_infinity():
    x = np.arange(18.0).reshape(2, 3, 3)
    each = per_head([causal(), window(0, 0)])
    expected = [np.tril(np.ones((3, 3))), np.eye(3)]
    for mask in (each, each.dense((2, 3, 3)), torch.tensor(each.dense((2, 3, 3)))):
        panels = read_panels(x, mask=mask)
        assert [panel.allowed.tolist() for panel in panels] == [
            y.tolist() for y in expected
        ]
        (second,) = read_panels(x, mask=mask, heads=[1])
        assert (second.allowed == expected[1]).all()
        assert (second.values == x[1] * expected[1]).all()
    (hidden,) = read_panels(np.where(expected[0], x[0], -np.inf))
    assert (hidden.allowed == expected[0]).all()
    named = read_panels({"all": x[0], "past": (x[1], causal())})
    assert [panel.title for panel in named] == ["all", "past"]
    assert [panel.allowed.sum() for panel in named] == [9, 6]


@pytest.mark.parametrize(
    ("source", "options", "error", "words"),
    [
        (np.zeros((1, 2, 3, 3)), {}, ShapeError, r"\(1, 2, 3, 3\).*Write weights\[0\]"),
        (np.zeros((0, 3)), {}, ShapeError, "at least one query"),
        ({"a": np.zeros((2, 2)), "b": np.zeros((3, 3))}, {}, ShapeError, "same shape"),
        ({}, {}, ShapeError, "one or more"),
        (np.asarray([[0, 1], [np.nan, 0]]), {}, ArrayError, "NaN at query 1, key 0"),
        (np.zeros((2, 3, 3)), {"heads": [2]}, OptionError, r"heads=\[2\]"),
        (np.zeros((3, 3)), {"heads": [0]}, OptionError, r"heads=\[0\]"),
        (make_record()[0], {"heads": []}, ShapeError, "one or more"),
        (make_record()[0], {"mask": causal()}, OptionError, "which has its own"),
        (poison(make_record()[0]), {}, ArrayError, "head 1: NaN by query 2, key 0"),
        (np.zeros((3, 3)), {"mask": np.eye(2)}, ShapeError, r"mask \(2, 2\), expected"),
        (np.zeros((3, 2, 2)), {"mask": np.ones((2, 2, 2))}, ShapeError, r"mask \(2, 2"),
        (np.zeros((3, 3)), {"rows": ["a"]}, ShapeError, "rows has 1 labels, expected 3"),
        (np.zeros((3, 3)), {"keys": ["a"]}, ShapeError, "keys has 1 labels, expected 3"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused_in_a_sentence(source, options, error, words):
    for draw in (text.draw_weights, figure.plot_weights):
        with pytest.raises(error, match=words):
            draw(source, **options)


# text


WEIGHTS = np.asarray(
    [[1, 0, 0, 0], [0.3, 0.7, 0, 0], [0.1, 0.5, 0.4, 0], [0.25, 0.05, 0.1, 0.6]]
)
NAMED = """\
        the   cat   sat   down
the    ██████
cat    ░░░░░░▓▓▓▓▓▓
sat    ······▒▒▒▒▒▒▒▒▒▒▒▒
down   ░░░░░░············▓▓▓▓▓▓
· less   ░ 0.2   ▒ 0.4   ▓ 0.6   █ 0.8 or more   blank: masked"""
PLAIN = """\
  0 1 2 3
0 ██······
1 ░░▓▓····
2 ··▒▒▒▒··
3 ░░····▓▓
· less   ░ 0.2   ▒ 0.4   ▓ 0.6   █ 0.8 or more   blank: masked"""
SIDE_BY_SIDE = """\
       no mask   causal()
       0 1 2 3   0 1 2 3
0 the  ██······  ██
1 cat  ░░▓▓····  ░░▓▓
2 sat  ··▒▒▒▒··  ··▒▒▒▒
3 down ░░····▓▓  ░░····▓▓
· less   ░ 0.2   ▒ 0.4   ▓ 0.6   █ 0.8 or more   blank: masked"""
CROSS = """\
     0 1 2 3
0 un ██······
1 le ░░▓▓····
keys: 0 the 1 cat
      2 sat 3 down
· less   ░ 0.2   ▒ 0.4   ▓ 0.6   █ 0.8 or more   blank: masked"""


def test_a_few_tokens_stand_above_their_columns():
    drawn = text.draw_weights(WEIGHTS, rows=WORDS, keys=WORDS, mask=causal())
    assert drawn == NAMED


def test_positions_stand_there_if_no_tokens_are_known():
    assert text.draw_weights(WEIGHTS) == PLAIN
    assert text.draw_weights(torch.tensor(WEIGHTS, dtype=torch.bfloat16)) == PLAIN
    assert text.draw_weights(WEIGHTS.tolist()) == PLAIN


def test_maps_stand_side_by_side_with_and_without_a_mask():
    both = {"no mask": WEIGHTS, "causal()": (WEIGHTS, causal())}
    assert text.draw_weights(both, rows=WORDS, keys=WORDS, width=40) == SIDE_BY_SIDE
    alone = text.draw_weights(both, rows=WORDS, keys=WORDS, width=20).splitlines()
    assert [line.strip() for line in alone[:7:6]] == ["no mask", "causal()"]


def test_a_title_wider_than_its_map_moves_the_others():
    maps = {"a": WEIGHTS, "wider than it": WEIGHTS, "c": WEIGHTS}
    titles, _, first, *_ = text.draw_weights(maps).splitlines()
    assert titles.index("wider") == first.index("█", 5)
    assert titles.index("c") == first.rindex("██")
    long = text.draw_weights({"x" * 100: WEIGHTS}).splitlines()[0]
    assert long == "  " + "x" * 59 + "…"


def test_keys_that_are_not_the_rows_are_listed():
    drawn = text.draw_weights(WEIGHTS[:2], rows=["un", "le"], keys=WORDS, width=20)
    assert drawn == CROSS


@pytest.mark.parametrize("color", [False, "dark"])
def test_keys_are_listed_if_pooled_rows_do_not_name_them(color):
    names = [f"t{i}" for i in range(60)]
    drawn = text.draw_weights(np.eye(60), rows=names, keys=names, color=color)
    assert "keys: 0 t0 1 t1" in drawn
    assert " 59 t59\n" in drawn


def test_a_large_map_is_pooled_and_says_so():
    x = np.zeros((60, 60))
    x[37, 3], x[59, 59] = 0.5, 1
    lines = text.draw_weights(x, width=34).splitlines()
    assert lines[0] == "   0    10   20   30   40   50"
    assert lines[10] == "36 ·▒" + "·" * 28
    assert lines[15] == "56 " + "·" * 29 + "█"
    assert lines[16:] == [
        "· less   ░ 0.2   ▒ 0.4   ▓ 0.6   █ 0.8 or more   blank: masked",
        "each pixel: the largest of up to 4",
        "× 2 weights (query × key)",
    ]


def test_every_line_of_a_long_record_fits_the_width():
    record, weights = make_record(n=300)
    drawn = text.draw_weights(record, width=60).splitlines()
    assert max(map(len, drawn)) <= 62  # a legend of shades has a width of its own
    shades = LinearScale(0, weights.max()).shade(pool(weights[1], 25, 12))
    assert drawn[-2].startswith("each pixel: the largest of up to 25 × 12 weights")
    for i in range(12):  # head 1, beside head 0
        assert drawn[3 + i][4 + 25 + 2 :].ljust(25).replace(" ", "") == "".join(
            mark for j, mark in enumerate(shades[i]) if j * 12 < (i + 1) * 25
        )


def test_a_sink_is_told_in_numbers_below_the_map():
    x = make_sink(12, 0.75, 0.2)
    drawn = text.draw_weights(x, keys=["The", *"abcdefghijk"], width=72).splitlines()
    assert drawn[-2:] == [
        "key 0 (The) takes 0.75 of the weight on average; the largest weight from",
        "key 1 on is 0.2, colours end at 0.2",
    ]


def test_colours_are_those_of_the_palette_and_masked_cells_are_bare():
    x = np.asarray([[1.0, 0], [0.5, 0.5]])
    lines = text.draw_weights(x, mask=causal(), color="light").splitlines()
    full, half = LinearScale(0, 1).paint([1, 0.5]).tolist()
    one, two = (f"\x1b[48;2;{r};{g};{b}m  " for r, g, b in (full, half))
    assert lines[1] == f"0 {one}\x1b[0m  \x1b[0m"
    assert lines[2] == f"1 {two}{two}\x1b[0m"
    assert full == [24, 27, 83]
    assert re.sub(r"\x1b\[[\d;]*m", "", lines[3]) == f"0 {' ' * 24} 1   bare: masked"
    dark = text.draw_weights(x, color=True)
    assert "\x1b[48;2;254;247;201m" in dark
    assert dark == text.draw_weights(x, color="dark")


def test_two_rows_share_a_line_of_half_blocks():
    x = np.zeros((49, 1))
    x[0], x[3] = 1, 1
    mask = np.ones((49, 1), bool)
    mask[4], mask[7] = False, False
    lines = text.draw_weights(
        x, mask=mask, color="light", scale=LinearScale(0, 1)
    ).splitlines()
    ((a, b, c), (d, e, f)) = LinearScale(0, 1).paint([1, 0]).tolist()
    high, low = f"{a};{b};{c}m", f"{d};{e};{f}m"
    assert lines[1] == f"0  \x1b[38;2;{high}\x1b[48;2;{low}▀▀\x1b[0m"
    assert lines[2] == f"2  \x1b[38;2;{low}\x1b[48;2;{high}▀▀\x1b[0m"
    assert lines[3] == f"4  \x1b[0m\x1b[38;2;{low}▄▄\x1b[0m"
    assert lines[4] == f"6  \x1b[38;2;{low}\x1b[49m▀▀\x1b[0m"
    assert lines[5] == f"8  \x1b[48;2;{low}  \x1b[0m"
    assert lines[25] == f"48 \x1b[38;2;{low}\x1b[49m▀▀\x1b[0m"  # nothing below


def test_a_token_can_neither_steer_nor_break_a_line():
    n = len(HOSTILE)
    drawn = text.draw_weights(np.eye(n), rows=HOSTILE, keys=HOSTILE, width=100)
    lines = drawn.splitlines()
    assert len(lines) == n + 2
    for c in drawn:
        assert c in "\n\u200e" or unicodedata.category(c)[0] != "C", hex(ord(c))
    starts = set()
    for i, line in enumerate(lines[1 : n + 1]):
        before = line[: line.index("█")]
        starts.add(text.measure_plain_width(before) - 2 * i)
        assert before.count("\u200e") == 2 * (i in (4, 5))  # letters from the right
    assert len(starts) == 1  # every diagonal cell is where it belongs
    labels = [line[:14] for line in lines[1:]]
    assert labels[0].startswith(" 0 a\\u001b…")
    assert labels[6].startswith(" 6 ◌\u0301mark")
    assert labels[10].startswith("10 DE ")
    assert labels[11].startswith("11 ❤ ")
    assert labels[12].startswith("12 \\ud83d")
    assert labels[18].startswith("18 xxxxxxx… ")
    assert labels[19].startswith("19 ␣␣␣ ")
    drawn.replace("\u200e", "").encode("utf-8")


def test_marks_take_no_column_and_wide_letters_two():
    widths = {
        "cafe\u0301": 4,
        "ก\u0e31": 1,
        "\u200eא\u200e": 1,
        "漢字": 4,
        "👍": 2,
        "": 0,
    }
    assert {word: text.measure_plain_width(word) for word in widths} == widths
    assert text.centre("漢", 5) == " 漢  "


def test_a_title_cannot_steer_either():
    drawn = text.draw_weights({"\x1b[2J\n\u202eA": np.eye(2)})
    assert drawn.splitlines()[0] == "  [2JA"


def test_the_text_of_the_steps_is_exact():
    x = np.asarray([[1.0, 0], [-1, 1]])
    steps = regard.explain(x, x, x, causal(), scale=1.0, tokens=["a", "b"])
    assert text.draw_steps(steps) == STEPS
    assert text.draw_steps(steps, names=["weights"]) in STEPS
    with pytest.raises(OptionError, match=r"at=\(0, 0\), expected an index for each"):
        text.draw_steps(steps, at=(0, 0))
    with pytest.raises(OptionError, match="expected some of"):
        text.draw_steps(steps, names=["nothing"])


STEPS = """\
dots  q kᵀ   (2, 2)
     a  b
a   ▓▓▓░░░
b   ░░░███
· less   ░ -1.2   ▒ -0.4   ▓ 0.4   █ 1.2 or more   blank: masked

scores  dots × scale (scale = 1)   (2, 2)
     a  b
a   ▓▓▓░░░
b   ░░░███
· less   ░ -1.2   ▒ -0.4   ▓ 0.4   █ 1.2 or more   blank: masked

logits  scores, −∞ outside causal()   (2, 2)
     a  b
a   ▓▓▓
b   ░░░███
· less   ░ -1.2   ▒ -0.4   ▓ 0.4   █ 1.2 or more   blank: masked

weights  exp(logits) / Σ exp(logits)   (2, 2)
     a  b
a   ███
b   ···███
· less   ░ 0.2   ▒ 0.4   ▓ 0.6   █ 0.8 or more   blank: masked

out  weights v   (2, 2)
    0 1
0 a ██▒▒
1 b ··██
· less   ░ -0.6   ▒ -0.2   ▓ 0.2   █ 0.6 or more   blank: masked"""


def test_the_steps_of_a_shared_head_are_those_of_its_group(rng):
    q, k = rng.normal(size=(4, 3, 2)), rng.normal(size=(2, 3, 2))
    steps = regard.explain(q, k, k, causal())
    for h in range(4):
        panel = palette.read_step(steps, steps["weights"], (h,))
        expected = regard.attention(
            q[h], k[h // 2], k[h // 2], causal(), see=("weights",)
        )
        np.testing.assert_allclose(panel.values, expected.weights)
        assert (panel.allowed == np.tril(np.ones((3, 3)))).all()
        assert (palette.read_step(steps, steps["k"], (h,)).values == k[h // 2]).all()
    with pytest.raises(OptionError, match=r"at=\(4,\), expected an index for each of"):
        palette.read_step(steps, steps["weights"], (4,))


GALLERY = """\
layer 0  █·       █░
0–1      ████     ·███
         █▓█·░█   ░█·███
         ·█▒██▓█· ·█░·███·

layer 1  █▓       ██
0–1      ▓███     ██░░
         ████▓▓   ▒█·▒▓·
         ▒▓████░█ ░█░▓▒▓█·

· less   ░ 0.00063   ▒ 0.004   ▓ 0.025   █ 0.16 or more   blank: masked
heads from left to right; of each, queries down, keys across; each pixel: the largest of up to 4 × 2 weights (query × key)"""


def test_the_text_of_a_gallery_is_exact():
    seen, weights = make_seen(n=16)
    drawn = text.draw_gallery(seen)
    assert drawn == GALLERY
    assert drawn == text.draw_gallery(seen.recording, pixels=8)
    shades = LogScale(1e-4, 1).shade(pool(weights[1][0], 4, 2))
    assert drawn.splitlines()[8].split()[0] == "".join(shades[3])
    narrow = text.draw_gallery(seen, width=17).splitlines()
    assert [line[:9].strip() for line in narrow[1:7:3]] == ["0–0", "1–1"]
    bright = text.draw_gallery(seen, color="dark", pixels=4).splitlines()
    assert "▀" in bright[1]
    assert bright[-1].endswith(
        "each pixel: the largest of up to 4 × 4 weights (query × key)"
    )
    with pytest.raises(OptionError, match="no sequence 3"):
        text.draw_gallery(seen, sequence=3)
    for draw in (text.draw_gallery, figure.plot_gallery):
        with pytest.raises(OptionError, match="pixels=0, expected 1 or more"):
            draw(seen, pixels=0)


def test_a_gallery_numbers_layers_as_seen_does_and_tells_its_coarsest_pixel():
    tall, wide = (make_record(n, 2, f"layer {i}", i)[0] for i, n in ((1, 4), (2, 8)))
    empty = cut_rows(make_record(4, 2, "layer 0", 0)[0], np.zeros(0, int))
    records = (empty, tall, wide, tall, replace(tall, q=2 * tall.q))
    found = Recording(model="m", records=records, sequences=(0, 0, 0, 1, 1))
    drawn = text.draw_gallery(found, pixels=4)
    assert re.findall("layer .", drawn) == ["layer 1", "layer 2"]  # 0 has no cells
    assert drawn.endswith("the largest of up to 4 × 2 weights (query × key)")
    shown = figure.plot_gallery(found, pixels=4)
    assert read_labels(shown.axes[0].yaxis) == ["1", "2"]
    assert "up to 2 × 2 weights" in shown.axes[1].get_ylabel()
    alone = text.draw_gallery(found, sequence=1, pixels=8, color="dark")
    assert re.findall("layer .", alone) == ["layer 1"]  # of two records the first
    assert alone.endswith("of each, queries down, keys across")


TABLE = """\
          layers 0 to 3, mean of heads
entropy   ▅▇▄█ 0 to 0.464 bits
sink      ▆█▆▇ 0 to 0.344 of the weight
distance  ▆▆█▅ 0 to 2.03 tokens"""


def test_the_text_of_a_table_is_exact():
    seen, weights = make_seen(layers=4, n=8)
    table = seen.table()
    assert text.draw_table(table) == TABLE
    logs = [np.log2(x, where=x > 0, out=np.zeros_like(x)) for x in weights]
    means = [-(x * y).sum(-1).mean() for x, y in zip(weights, logs, strict=True)]
    assert f"{max(means):.3g}" == "0.464"
    with pytest.raises(OptionError, match="expected some of entropy, sink"):
        text.draw_table(table, numbers=["name"])
    with pytest.raises(OptionError, match="no sequence 1"):
        text.draw_table(table, sequence=1)
    below = replace(table, rows=table.rows.copy())
    below.rows["logit"] = -np.repeat([4.0, 2, 1, 3], 2)
    logits = text.draw_table(below, numbers=["logit"]).splitlines()[1]
    assert logits == "logit     ▁▄▆▂ -4 to 0 the largest"
    unknown = text.draw_table(table, numbers=["induction"])  # tokens were not kept
    assert unknown.splitlines()[1] == "induction      0 to 1"


def test_a_table_with_nan_says_so_in_text_and_figure():
    seen, _ = make_seen(layers=4, n=8)
    seen.records[2].lse[1, 5] = np.nan
    table = seen.table()
    drawn = text.draw_table(table).splitlines()
    assert [line.split()[1] for line in drawn[1:4]] == ["▅▇?█", "▆█?▇", "██?▆"]
    assert drawn[4:] == ["NaN in sequence 0, layer 2: 1 query"]
    note = figure.plot_table(table)._supxlabel.get_text()
    assert note == "NaN in sequence 0, layer 2, head 1: 1 query"
    assert figure.plot_table(make_seen(layers=4, n=8)[0].table())._supxlabel is None


def test_a_mask_draws_itself():
    assert text.draw_mask(causal() & window(1), 4) == (
        "causal() & window(1)\n■ · · ·\n■ ■ · ·\n· ■ ■ ·\n· · ■ ■"
    )


# figures


def read_labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def test_the_image_is_the_weights_and_the_axes_are_the_tokens(tmp_path):
    drawn = figure.plot_weights(WEIGHTS, rows=WORDS, keys=[*"abcd"], mask=causal())
    axes, bar = drawn.axes
    image = axes.images[0].get_array()
    assert (image.mask == ~np.tril(np.ones((4, 4), bool))).all()
    assert (image.filled(0) == WEIGHTS).all()
    assert (read_labels(axes.yaxis), read_labels(axes.xaxis)) == (WORDS, [*"abcd"])
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("query", "key")
    assert (bar.get_ylabel(), bar.get_ylim()) == ("weight", (0, 1))
    numbers = {x.get_position(): x.get_text() for x in axes.texts}
    assert numbers[1, 2] == "0.50"  # query 2, key 1
    assert len(numbers) == 10
    for name in ("a.png", "a.svg", "a.pdf"):
        drawn.savefig(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5_000


def look_at(drawn, path, axes, row, key):
    """Return the colour in the printed picture, a little beside the middle of a cell."""
    drawn.savefig(path)
    pixels = matplotlib.image.imread(path)
    x, y = axes.transData.transform((key - 0.4, row - 0.4))
    return (pixels[len(pixels) - int(y), int(x), :3] * 255).round().tolist()


@pytest.mark.parametrize("dark", [False, True])
def test_the_printed_colours_are_those_of_the_palette(tmp_path, dark):
    scale = LogScale(1e-3, 1)
    drawn = figure.plot_weights(WEIGHTS, scale=scale, dark=dark, mask=causal())
    table = scale.colours(dark=dark)
    for row, key in [(0, 0), (1, 0), (2, 1), (3, 1), (3, 3)]:
        place = scale.place(WEIGHTS[row, key])
        found = look_at(drawn, tmp_path / "a.png", drawn.axes[0], row, key)
        near = table[max(0, int(place * 256) - 2) : int(place * 256) + 2].astype(int)
        assert np.abs(near - found).sum(-1).min() <= 3
    hidden = look_at(drawn, tmp_path / "a.png", drawn.axes[0], 0, 3)
    assert np.ptp(hidden) < 12  # paper or hatching: grey, no colour of the scale
    assert drawn.axes[0].patch.get_hatch()


def test_heads_share_colours_and_only_the_outer_ones_are_labelled():
    record, weights = make_record(n=6, heads=5)
    drawn = figure.plot_weights(
        record, heads=[4, 0, 2], rows="abcdef", keys="abcdef", columns=2
    )
    *maps, bar = drawn.axes
    assert [axes.get_title() for axes in maps] == ["head 4", "head 0", "head 2"]
    for axes, h in zip(maps, (4, 0, 2), strict=True):
        np.testing.assert_allclose(
            axes.images[0].get_array().filled(0), weights[h], atol=1e-12
        )
        assert axes.images[0].norm.vmax == pytest.approx(weights[[4, 0, 2]].max())
    shown = [(a.yaxis.label.get_visible(), a.xaxis.label.get_visible()) for a in maps]
    assert shown == [(True, False), (False, True), (True, True)]
    assert bar.get_ylabel() == "weight"


def test_a_head_is_titled_with_its_layer_and_several_with_one_title_above():
    record, _ = make_record(heads=3, name="model.layers.17.self_attn")
    alone = figure.plot_weights(record, heads=[2])
    assert alone.axes[0].get_title() == "model.layers.17.self_attn head 2"
    assert alone.get_suptitle() == ""
    several = figure.plot_weights(record, heads=[2, 0])
    assert [a.get_title() for a in several.axes[:2]] == ["head 2", "head 0"]
    assert several.get_suptitle() == "model.layers.17.self_attn"
    lines = text.draw_weights(record, heads=[2]).splitlines()
    assert lines[0].strip() == "model.layers.17.self_attn head 2"
    lines = text.draw_weights(record, heads=[2, 0]).splitlines()
    assert lines[0] == "model.layers.17.self_attn"
    assert lines[1].split("  ")[1] == "head 2"
    hostile, _ = make_record(name="\x1b[2J$\\frac{")
    assert figure.plot_weights(hostile).get_suptitle() == "[2J$\\frac{"
    assert text.draw_weights(hostile).splitlines()[0] == "[2J$\\frac{"
    nameless, _ = make_record(name="")  # the model itself is the layer
    assert figure.plot_weights(nameless, heads=[1]).axes[0].get_title() == "head 1"


def test_a_large_map_is_pooled_and_its_bar_says_so():
    rng = np.random.default_rng(0)
    x = rng.dirichlet(np.full(1300, 0.01), 700)
    axes, bar = figure.plot_weights(x, scale=LogScale(1e-4, 1)).axes
    assert (axes.images[0].get_array() == pool(x, 2, 3)).all()
    assert (
        bar.get_ylabel()
        == "each pixel: the largest of up to 2 × 3 weights (query × key)"
    )
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("query position", "key position")
    assert axes.get_xlim() == (-0.5, 1299.5)
    assert axes.images[0].get_extent() == [-0.5, 434 * 3 - 0.5, 699.5, -0.5]


def test_a_sink_is_told_below_the_figure_and_has_an_arrow():
    drawn = figure.plot_weights(make_sink(12, 0.75, 0.2), keys=["The", *"abcdefghijk"])
    note = " ".join(drawn.get_supxlabel().split())
    assert note.startswith("key 0 (The) takes 0.75 of the weight on average;")
    assert drawn.axes[0].images[0].norm.vmax == 0.2
    assert drawn.axes[0].images[0].colorbar.extend == "max"
    assert figure.plot_weights(WEIGHTS).axes[0].images[0].colorbar.extend == "neither"


@pytest.mark.parametrize("n", [5, 30, 45, 90, 170, 400])
@pytest.mark.parametrize("several", [False, True])
def test_labels_never_overlap(n, several):
    words = [f"token{i}" for i in range(n)]
    source = np.eye(n)[None].repeat(2, 0) if several else np.eye(n)
    drawn = figure.plot_weights(source, rows=words, keys=words)
    drawn.draw_without_rendering()
    axes = drawn.axes[0]
    for axis, side in ((axes.xaxis, "x"), (axes.yaxis, "y")):
        ticks = sorted(axis.get_ticklabels(), key=lambda tick: tick.get_position())
        seen = [tick for tick in ticks if tick.get_text()]
        boxes = [getattr(tick.get_window_extent(), f"interval{side}") for tick in seen]
        boxes = sorted(map(sorted, boxes))
        gaps = [b[0] - a[1] for a, b in pairwise(boxes)]
        assert len(boxes) > 2
        assert min(gaps) > 0, (n, side)
    tokens = [tick.get_text() for tick in axes.yaxis.get_ticklabels()]
    if n <= 30 and not several:
        assert tokens == words
    if n == 400:
        assert "token0" not in tokens
        assert axes.get_ylabel() == "query position"


def test_hostile_tokens_do_not_break_a_figure(tmp_path):
    n = len(HOSTILE)
    drawn = figure.plot_weights(np.eye(n), rows=HOSTILE, keys=HOSTILE)
    for name in ("a.png", "a.svg", "a.pdf"):
        drawn.savefig(tmp_path / name)  # a missing glyph would be a warning
    labels = read_labels(drawn.axes[0].yaxis)
    assert labels[0] == "a\\u001b…"
    assert labels[15] == "$x^2"  # no formula
    assert not any(label.get_parse_math() for label in drawn.axes[0].get_xticklabels())
    assert max(map(len, labels)) <= 12
    title = figure.plot_weights({"$\\frac{\x1b": WEIGHTS})
    title.savefig(tmp_path / "b.png")
    assert title.axes[0].get_title() == "$\\frac{"


def test_the_figure_of_the_steps_has_every_step(tmp_path):
    steps = explain_four(causal())
    drawn = figure.plot_steps(steps)
    maps = [axes for axes in drawn.axes if axes.images]
    titles = [axes.get_title().splitlines() for axes in maps]
    assert [x[0] for x in titles] == ["dots", "scores", "logits", "weights", "out"]
    assert titles[2][1] == "scores, −∞ outside causal()"
    for axes, (name, *_) in zip(maps, titles, strict=True):
        image, values = axes.images[0].get_array(), steps[name].values
        seen = ~np.ma.getmaskarray(image)
        assert (image[seen] == values[seen]).all()
        assert seen.sum() == (10 if name in ("logits", "weights") else values.size)
        assert axes.get_xlabel() == ("feature" if name == "out" else "key")
        assert read_labels(axes.yaxis) == WORDS
    drawn.savefig(tmp_path / "steps.png")
    assert (
        len([a for a in figure.plot_steps(steps, names=["out"]).axes if a.images]) == 1
    )
    with pytest.raises(OptionError, match="expected some of"):
        figure.plot_steps(steps, names=["nothing"])


def test_the_figure_of_a_gallery_has_every_head_in_its_place(tmp_path):
    seen, weights = make_seen(layers=3, n=6, heads=2)
    drawn = figure.plot_gallery(seen)
    axes, bar = drawn.axes
    image = axes.images[0].get_array()
    assert image.shape == (3 * 8 - 2, 2 * 8 - 2)
    for i in range(3):
        for h in range(2):
            part = image[i * 8 : i * 8 + 6, h * 8 : h * 8 + 6]
            np.testing.assert_allclose(part.filled(0), weights[i][h], atol=1e-12)
            assert (~part.mask == np.tril(np.ones((6, 6)))).all()
    assert image.mask[6:8].all()
    assert read_labels(axes.yaxis) == ["0", "1", "2"]
    assert axes.get_yticks().tolist() == [2.5, 10.5, 18.5]  # the middles of the maps
    assert bar.get_ylabel() == "weight"
    drawn.savefig(tmp_path / "gallery.png")
    small = figure.plot_gallery(seen.recording, pixels=3, dark=True)
    np.testing.assert_allclose(
        small.axes[0].images[0].get_array()[5:8, :3].filled(0),
        pool(weights[1][0], 2, 2),
    )
    assert "largest of up to 2 × 2" in small.axes[1].get_ylabel()


def test_the_figure_of_a_table_has_a_dot_for_each_head_and_their_mean(tmp_path):
    seen, _ = make_seen(layers=4, n=8)
    table = seen.table()
    drawn = figure.plot_table(table)
    names = ("entropy", "sink", "distance")
    for axes, name in zip(drawn.axes, names, strict=True):
        dots = axes.collections[0].get_offsets()
        assert (dots[:, 0] == table.rows["layer"]).all()
        assert (dots[:, 1] == table.rows[name]).all()
        expected = table.rows[name].reshape(4, 2).mean(1)
        np.testing.assert_allclose(axes.lines[0].get_ydata(), expected)
        assert axes.get_ylim()[0] == 0
        assert axes.get_xlabel() == "layer"
    assert drawn.axes[0].get_ylabel() == "entropy (bits)"
    drawn.savefig(tmp_path / "table.png")
    assert figure.plot_table(table, numbers=["logit"]).axes[0].get_ylabel() == "logit"
    figure.plot_table(table, numbers=["induction"])  # none is known
    mixed = figure.plot_table(table, numbers=["sink", "logit"]).axes
    told = [x.get_legend().get_texts()[1].get_text() for x in mixed]
    assert told == ["their mean", "the largest"]


def test_the_figure_of_a_mask_is_its_cells():
    drawn = figure.plot_mask(causal() & window(2), 6)
    seen = ~drawn.axes[0].images[0].get_array().mask
    assert (seen == (causal() & window(2)).dense((6, 6))).all()
    assert drawn.axes[0].get_title().splitlines()[0] == "causal() & window(2)"
    axes, bar = figure.plot_mask(alibi([0.5]), 6).axes
    assert (axes.images[0].get_array() == alibi([0.5]).dense((1, 1, 6, 6))[0, 0]).all()
    assert bar.get_ylabel() == "added to scores"


BY_HEAD = where(lambda b, h, q, k: (h == 1) | (k <= q))
BY_BATCH = where(lambda b, h, q, k: (b == 1) | (k <= q))


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        (per_head([window(0), causal()]), "head 1 of 2"),
        (per_head([causal(), causal()]), ""),
        (BY_HEAD & causal(), "head 0 only"),
        (BY_BATCH, "batch 0 only"),
        (BY_BATCH & BY_HEAD, "batch 0 only; head 0 only"),
        (per_head([window(0), causal()]) & BY_HEAD, "head 1 of 2"),
        (where(lambda b, h, q, k: k <= q), ""),
    ],
)
def test_a_picture_of_one_head_says_so_if_others_differ(mask, told):
    past = "■ · ·\n■ ■ ·\n■ ■ ■"
    drawn = text.draw_mask(mask, 3)
    assert drawn == "\n".join(filter(None, (repr(mask), told, past)))
    title = figure.plot_mask(mask, 3).axes[0].get_title().splitlines()
    assert title[-2:] == [told, "hatched: may not see"] or not told
    assert len(title) == len(textwrap.wrap(repr(mask), 44)) + 1 + bool(told)


def test_each_map_has_the_cells_of_its_head():
    x, past = np.ones((2, 3, 3)), np.tri(3).tolist()
    for mask in (BY_HEAD, BY_HEAD.dense((2, 3, 3))):
        panels = read_panels(x, mask=mask)
        assert [y.allowed.tolist() for y in panels] == [past, np.ones((3, 3)).tolist()]
        for one in (x[0], {"one": x[0]}):  # of which head is not known
            with pytest.raises((MaskError, ShapeError), match=r"by head|or H of it"):
                read_panels(one, mask=mask)
    with pytest.raises(MaskError, match="may differ by batch"):
        read_panels(x, mask=BY_BATCH)


def test_a_figure_does_without_pyplot_and_text_without_torch_and_matplotlib(run_apart):
    code = (
        "import json, sys, regard.show.terminal_map as t; t.draw_weights([[1, 0], [0, 1]]);"
        "a = [x for x in ('torch', 'matplotlib') if x in sys.modules];"
        "import regard.show.figure as f; f.plot_weights([[1, 0], [0, 1]]);"
        "print(json.dumps([a, 'matplotlib.pyplot' in sys.modules]))"
    )
    assert run_apart(code) == [[], False]


def test_a_missing_matplotlib_is_named_with_what_to_install(monkeypatch):
    table = make_seen()[0].table()
    for name in [n for n in sys.modules if n.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for plot, source in (
        (figure.plot_weights, WEIGHTS),
        (figure.plot_table, table),
        (figure.plot_mask, causal()),
    ):
        with pytest.raises(
            ImportError, match=r'matplotlib.*pip install "regard\[show\]"'
        ):
            plot(source)
