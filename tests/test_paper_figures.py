"""Figures for a paper: values, files, letters, text twins.

Every value is read back from the artists and from the SVG, and compared with dense
weights or with loops over the table.
"""

import itertools
import re
from dataclasses import replace
from xml.etree import ElementTree as ET

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.font_manager import findfont, get_font
from matplotlib.text import Text
from test_show import HOSTILE

import regard
from regard.errors import ArrayError, OptionError
from regard.masks import causal
from regard.recording.record import Record, Recording
from regard.seen import Seen
from regard.show.figure import plot_weights
from regard.show.figures import (
    draw_head_grid,
    draw_head_scatter,
    draw_layer_bars,
    draw_tinted_text,
    draw_token_arcs,
    journal,
    plot_head_grid,
    plot_head_scatter,
    plot_layer_bars,
    plot_tinted_text,
    plot_token_arcs,
)
from regard.show.figures.column_width import fit_width
from regard.show.figures.head_scatter import colour_layers
from regard.show.figures.journal import (
    MARKED,
    PALE,
    choose_ink,
    read_fonts,
    read_width,
    shorten_number,
    write_visible,
)
from regard.show.figures.text_lines import break_lines, is_from_right
from regard.show.figures.token_arcs import FAINT, THICK
from regard.show.palette import LinearScale, LogScale, Signed
from regard.show.text_tint import TextSelection
from regard.stats.table import HeadTable, make_fields

SVG = "{http://www.w3.org/2000/svg}"
WORDS = ("The", " cat", " sat", ".", "\n", "It", " un", "believ", "ably", " slept")


def make_seen(texts=WORDS, *, layers=2, heads=3, mask=None, seed=0):
    """Return what was seen of random layers, and their weights by the definition."""
    rng, n, records, dense = np.random.default_rng(seed), len(texts), [], []
    for layer in range(layers):
        q, k = rng.normal(size=(2, heads, n, 4)) * 2
        done = regard.attention(q, k, k, mask, see=("weights",))
        at = torch.arange(n)
        records.append(
            Record(
                name=f"layer {layer}",
                q=torch.from_numpy(q),
                k=torch.from_numpy(k),
                lse=torch.from_numpy(done.lse),
                scale=0.5,
                q_positions=at,
                k_positions=at,
                mask=mask,
            )
        )
        dense.append(done.weights)
    found = Recording(
        model="m", records=tuple(records), sequences=(0,) * layers,
        tokens=(tuple(range(n)),), texts=(tuple(texts),),
    )  # fmt: skip
    return Seen(found), np.stack(dense)


def make_table(values, *, others=0.25, sequence=0):
    """Return a table whose columns "previous" and "induction" are (layers, heads)."""
    first, second = values
    rows = np.zeros(np.size(first), make_fields(["layer 9"]))
    rows["sequence"] = sequence
    rows["layer"], rows["head"] = map(np.ravel, np.indices(np.shape(first)))
    for name in rows.dtype.names[4:-1]:
        rows[name] = others
    rows["previous"], rows["induction"] = np.ravel(first), np.ravel(second)
    return HeadTable(rows)


FIRST = np.asarray([[0.1, 0.2, 0.9], [0.3, 0.05, 0.0]])
SECOND = np.asarray([[0.5, 0.02, 0.04], [0.25, 0.75, 0.125]])
TABLE = make_table((FIRST, SECOND))


def read_svg(figure, path):
    """Return the groups of an SVG by their id."""
    figure.savefig(path)
    root = ET.parse(path).getroot()
    groups = {x.get("id"): x for x in root.iter() if x.get("id")}
    return root, groups


def find_styles(group):
    """Return the style of each path of a group, as a dict."""
    parts = [x.get("style", "") for x in group.iter(f"{SVG}path")]
    return [dict(re.findall(r"([\w-]+): ([^;]+)", part)) for part in parts]


def find_artist(figure, name):
    (found,) = (x for x in figure.findobj() if x.get_gid() == name)
    return found


def to_hex(colour):
    return "#" + "".join(f"{round(255 * x):02x}" for x in colour[:3])


def paint(scale, value):
    return to_hex(scale.colours()[round(float(scale.place(value)) * 255)] / 255)


# the tinted text


SELECTIONS = [
    (4, None, lambda w: w[:, :, 4].mean((0, 1))),
    ((3, 5), None, lambda w: w[:, :, 3:6].mean((0, 1, 2))),
    (7, {1: [2]}, lambda w: w[1, 2, 7]),
    (7, {0: None}, lambda w: w[0, :, 7].mean(0)),
    (TextSelection(2, 2, "attending"), None, lambda w: w[..., 2].mean((0, 1))),
    (TextSelection(2, 3, "attending"), None, lambda w: w[..., 2:4].sum(-1).mean((0, 1))),
    (TextSelection(6, 6, "attended", "max"), None, lambda w: w[:, :, 6].max((0, 1))),
]  # fmt: skip


@pytest.mark.parametrize(("select", "heads", "expect"), SELECTIONS)
@pytest.mark.parametrize("scale", [None, LogScale(1e-3, 1)], ids=["linear", "log"])
def test_boxes_have_the_colours_of_the_weights(tmp_path, select, heads, expect, scale):
    seen, weights = make_seen()
    expected = expect(weights)
    figure = plot_tinted_text(seen, select, heads=heads, scale=scale)
    _, groups = read_svg(figure, tmp_path / "a.svg")
    scale = scale or LinearScale(0, expected.max())
    for i, value in enumerate(expected):
        wanted = paint(scale, value)
        assert to_hex(find_artist(figure, f"box-{i}").get_facecolor()) == wanted
        assert find_styles(groups[f"box-{i}"])[0]["fill"] == wanted


def test_masked_tokens_are_grey_and_the_selection_is_framed(tmp_path):
    seen, weights = make_seen(mask=causal())
    figure = plot_tinted_text(seen, (2, 3))
    _, groups = read_svg(figure, tmp_path / "a.svg")
    value = weights[:, :, 2:4].mean((0, 1, 2))
    assert value[4:].sum() == 0
    for i in range(len(WORDS)):
        box, (style, *_) = (
            find_artist(figure, f"box-{i}"),
            find_styles(groups[f"box-{i}"]),
        )
        framed = box.get_linewidth() > 0
        assert framed == (i in (2, 3)) == (style.get("stroke") == MARKED.lower())
        assert (style["fill"] == "none") == (i > 3)
        if i > 3:
            assert find_artist(figure, f"token-{i}").get_color() == PALE
    inks = {find_artist(figure, f"token-{i}").get_color() for i in range(4)}
    assert inks <= {"black", "white"}


@pytest.mark.parametrize("place", np.linspace(0, 1, 52))
def test_letters_are_readable_on_every_colour(place):
    colour = LinearScale(0, 1).colours()[round(place * 255)] / 255
    light = np.where(
        colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4
    )
    bright = light @ [0.2126, 0.7152, 0.0722]
    ink = {"black": 0, "white": 1}[choose_ink(colour)]
    high, low = max(ink, bright), min(ink, bright)
    assert (high + 0.05) / (low + 0.05) >= 4.5


def test_a_sink_ends_the_colours_and_is_told():
    texts = [f" w{i}" for i in range(12)]
    seen, _weights = make_seen(texts, layers=1, heads=1)
    record = seen.layer(0)
    k = record.k.clone()
    k[0, 0] = 40 * record.q[0, 5] / record.q[0, 5].norm() ** 2
    lse = (0.5 * record.q @ k.mT).logsumexp(-1)
    sunk = replace(record, k=k, lse=lse)
    found = Seen(replace(seen.recording, records=(sunk,)))
    value = torch.exp(0.5 * sunk.q @ k.mT - lse[..., None])[0, 5].numpy()
    figure = plot_tinted_text(found, 5)
    assert value[0] > 0.9
    end = max(value[1:].max(), 0.01)
    assert to_hex(find_artist(figure, "box-0").get_facecolor()) == paint(
        LinearScale(0, end), end
    )
    assert (
        f"Token 0 (·w0) has {shorten_number(value[0])}; colours end at" in figure.twin
    )
    assert any("colours end at" in x.get_text() for x in figure.findobj(Text))
    assert (
        draw_tinted_text(found, 5, span=(1, 11)).count("is on tokens that are not") == 1
    )


def test_a_span_is_a_part_with_the_same_numbers():
    seen, weights = make_seen()
    value = weights[:, :, 4].mean((0, 1))
    figure = plot_tinted_text(seen, 4, span=(5, 8), scale=LinearScale(0, 1))
    assert to_hex(find_artist(figure, "box-6").get_facecolor()) == paint(
        LinearScale(0, 1), value[6]
    )
    outside = value[:5].sum() + value[9:].sum()
    assert f"{outside:.2f} is on tokens that are not drawn." in figure.twin
    assert not any(x.get_gid() == "box-4" for x in figure.findobj())


def test_lines_are_broken_between_words():
    at = break_lines(WORDS, [10.0] * 10, 35)
    assert at == ([0, 0, 1, 1, 1, 2, 3, 3, 3, 4], 5)  # words stay together
    assert break_lines(["a", "\n\n", "b"], [1, 1, 1], 9) == ([0, 0, 2], 3)
    assert break_lines(["aaa", "bbb", "ccc"], [3.0] * 3, 7) == ([0, 0, 1], 2)
    assert break_lines(["a b", "bbb", "ccc", "d"], [3.0] * 4, 7)[0] == [0, 0, 1, 1]
    assert break_lines([" a", "##b", "##c", " d"], [2.0] * 4, 5)[0] == [0, 0, 1, 1]
    assert break_lines(["un", "##be", "lie"], [3.0] * 3, 7)[0] == [0, 0, 1]
    assert break_lines(["it", "un", "##be"], [3.0] * 3, 7)[0] == [0, 1, 1]
    assert break_lines([" ab", "cdefgh"], [3.0, 6.0], 7)[0] == [0, 1]
    assert break_lines([" x", " ab", "cdefgh"], [3.0, 3.0, 6.0], 7)[0] == [0, 1, 2]
    assert is_from_right(["שלום", " a"])
    assert not is_from_right(["ab", " ש"])


@pytest.mark.parametrize("width", ["column", "page", 2])
@pytest.mark.parametrize(
    "texts", [WORDS * 5, HOSTILE, ["word"] * 30, ["שלום", " עולם"] * 9]
)
def test_boxes_do_not_overlap_and_stay_inside(width, texts):
    seen, _ = make_seen(texts, layers=1, heads=1)
    figure = plot_tinted_text(seen, 0, width=width)
    boxes = [find_artist(figure, f"box-{i}") for i in range(len(texts))]
    places = [(b.get_x(), b.get_y(), b.get_x() + b.get_width()) for b in boxes]
    room = read_width(width) * 72
    assert all(x >= -1 and end <= room for x, _, end in places)
    for y in {y for _, y, _ in places}:
        line = sorted((x, end) for x, at, end in places if at == y)
        assert all(b[0] >= a[1] - 1e-9 for a, b in itertools.pairwise(line))


def test_lines_of_hebrew_run_from_the_right():
    seen, _ = make_seen(["שלום", " עולם", "\n", "ab", " cd"], layers=1, heads=1)
    figure = plot_tinted_text(seen, 0)
    x = [find_artist(figure, f"box-{i}").get_x() for i in range(5)]
    ends = [find_artist(figure, f"box-{i}").get_width() for i in range(5)]
    assert x[0] > x[1] > x[2]
    assert x[0] + ends[0] == pytest.approx(3.25 * 72 - 2, abs=1)
    assert x[3] < x[4]
    dots = [t for t in figure.axes[0].texts if t.get_text() == "·"]
    assert dots[0].get_position()[0] > x[1] + ends[1] / 2  # a space precedes its word
    assert dots[1].get_position()[0] < x[4] + ends[4] / 2


def test_the_text_of_the_tinted_text_is_exact():
    seen, weights = make_seen(mask=causal())
    value = weights[:, :, 2].mean((0, 1))
    figure = plot_tinted_text(seen, 2)
    assert figure.twin == draw_tinted_text(seen, 2) == str(figure)
    order = np.argsort(-value, kind="stable")[:3]
    names = ["The", "·cat", "·sat"]
    most = ", ".join(f"{i} {names[i]} {shorten_number(value[i])}" for i in order)
    ends = [f"{x * value.max() / 5:.2g}" for x in range(1, 5)]
    legend = "· less   ░ {}   ▒ {}   ▓ {}   █ {} or more   blank: masked".format(*ends)
    marks = ["·░▒▓█"[min(4, int(5 * x / value.max()))] for x in value[:3]]
    shades = "".join(m * n for m, n in zip(marks, (3, 4, 4), strict=True))
    assert figure.twin.splitlines() == [
        "The·cat·sat.⏎",
        shades,
        "       ^^^^",
        "It·unbelievably·slept",
        "Weight from token 2 (·sat) on each token, mean of 6 heads.",
        legend,
        f"largest: {most}",
    ]


# heads


def test_dots_are_the_two_statistics(tmp_path):
    figure = plot_head_scatter(TABLE, "previous", "induction")
    dots = find_artist(figure, "heads")
    expected = [(FIRST[i, h], SECOND[i, h]) for i in range(2) for h in range(3)]
    np.testing.assert_array_equal(np.asarray(dots.get_offsets()), expected)
    colours = [to_hex(x) for x in dots.get_facecolors()]
    table = LinearScale(0, 1).colours() / 255
    assert colours == [to_hex(table[64])] * 3 + [to_hex(table[255])] * 3
    _, groups = read_svg(figure, tmp_path / "a.svg")
    drawn = [
        (float(x.get("x")), float(x.get("y")), find_styles_of(x)["fill"])
        for x in groups["heads"].iter(f"{SVG}use")
    ]
    assert [x[2] for x in drawn] == colours
    places = np.asarray([x[:2] for x in drawn])
    for axis, values in enumerate((FIRST, SECOND)):
        slope, start = np.polyfit(values.ravel(), places[:, axis], 1)
        np.testing.assert_allclose(
            start + slope * values.ravel(), places[:, axis], atol=1e-3
        )
        assert (slope > 0) == (axis == 0)  # y grows downwards in an SVG
    # the axes say which number is where
    axes = figure.axes[0]
    left = float(places[:, 0].min())
    pixel = axes.transData.transform((FIRST.min(), 0))[0] * 72 / figure.dpi
    assert left == pytest.approx(pixel, abs=1e-3)
    assert (axes.get_xlabel(), axes.get_ylabel()) == (
        "previous (weight)",
        "induction (weight)",
    )


def find_styles_of(node):
    return dict(re.findall(r"([\w-]+): ([^;]+)", node.get("style", "")))


def test_names_of_heads_stand_beside_their_dots_and_do_not_overlap():
    rng = np.random.default_rng(0)
    table = make_table(rng.uniform(0, 1, (2, 8, 6)) ** 3)
    figure = plot_head_scatter(table, "previous", "induction", named=8)
    names = [x for x in figure.axes[0].texts if x.get_text()]
    assert len(names) > 8
    boxes = [x.get_window_extent() for x in names]
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])
    rows = {
        f"{r['layer']}.{r['head']}": (r["previous"], r["induction"]) for r in table.rows
    }
    largest = (
        sorted(rows, key=lambda x: -rows[x][0])[:8]
        + sorted(rows, key=lambda x: -rows[x][1])[:8]
    )
    for text in names:
        assert text.xy == rows[text.get_text()]
        assert text.get_text() in largest
    assert (
        len(plot_head_scatter(table, "previous", "induction", named=0).axes[0].texts)
        == 0
    )


SCATTER_TWIN = """\
induction (weight)
0.75 ┤   1
     │
     │
     │
     │
     │      1
     │
     │
     │
     │
     │                    1
     │
     │
     │1
     │
   0 ┤             1                                             1
     └────────────────────────────────────────────────────────────
      0                                                       0.90
                                                 previous (weight)
a digit: how many heads, + for ten or more
0.2: previous 0.90, induction 0.040
1.1: previous 0.050, induction 0.75"""


def test_the_text_of_the_scatter_is_exact():
    assert draw_head_scatter(TABLE, "previous", "induction", named=1) == SCATTER_TWIN
    assert (
        plot_head_scatter(TABLE, "previous", "induction", named=1).twin == SCATTER_TWIN
    )


def test_bars_are_means_of_heads_and_dots_are_heads(tmp_path):
    figure = plot_layer_bars(TABLE, ["previous", "induction"])
    _, groups = read_svg(figure, tmp_path / "a.svg")
    for axes, name, values in zip(
        figure.axes, ("previous", "induction"), (FIRST, SECOND), strict=True
    ):
        means = [sum(row) / 3 for row in values]
        bars = [find_artist(figure, f"{name}-{i}") for i in (0, 1)]
        assert [x.get_height() for x in bars] == pytest.approx(means)
        assert [x.get_x() + x.get_width() / 2 for x in bars] == pytest.approx([0, 1])
        dots = np.asarray(axes.collections[0].get_offsets())
        assert dots.tolist() == [[i, values[i, h]] for i in (0, 1) for h in range(3)]
        high = []
        for i in (0, 1):
            (path,) = groups[f"{name}-{i}"].iter(f"{SVG}path")
            ys = [float(y) for y in re.findall(r"[ML] \S+ (\S+)", path.get("d"))]
            high.append(max(ys) - min(ys))
        assert high[0] / high[1] == pytest.approx(means[0] / means[1], rel=1e-4)
        assert axes.get_ylim()[0] == 0
        assert axes.get_ylim()[1] > values.max()
    assert figure.axes[0].get_ylabel() == "previous (weight)"


def test_a_statistic_that_is_a_maximum_has_the_largest_as_its_bar():
    table = make_table((FIRST, SECOND))
    table.rows["logit"] = SECOND.ravel() * 10
    figure = plot_layer_bars(table, "logit")
    assert find_artist(figure, "logit-0").get_height() == 5.0
    assert "Bar: the largest of the heads" in figure.twin
    assert "of logit the largest" in draw_layer_bars(table, ["previous", "logit"])


BARS_TWIN = """\
induction (weight)   bar   least to largest head
  0 │████████████████████                        0.19  0.020 to 0.50
  1 │████████████████████████████████████████    0.38  0.12 to 0.75
Bar: the mean of the heads; dot: a head."""


def test_the_text_of_the_bars_is_exact():
    assert draw_layer_bars(TABLE, "induction") == BARS_TWIN
    assert plot_layer_bars(TABLE, "induction").twin == BARS_TWIN


def test_cells_of_the_grid_are_the_statistic(tmp_path):
    figure = plot_head_grid(TABLE, "induction")
    mesh = find_artist(figure, "heads")
    assert mesh.get_array().tolist() == SECOND.tolist()
    scale = LinearScale(0, 0.75)
    _, groups = read_svg(figure, tmp_path / "a.svg")
    fills = [
        x["fill"]
        for x in find_styles(groups["heads"])
        if x.get("fill", "none") != "none"
    ]
    fills = fills or [
        find_styles_of(x)["fill"] for x in groups["heads"].iter(f"{SVG}use")
    ]
    wanted = [scale.colours()[min(255, int(v / 0.75 * 256))] for v in SECOND.ravel()]
    assert fills == [to_hex(x / 255) for x in wanted]
    axes = figure.axes[0]
    assert axes.get_ylim() == (1.5, -0.5)  # layer 0 is above
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("head", "layer")


def test_heads_without_a_value_are_hatched_and_counted():
    values = SECOND.copy()
    values[1, 1] = np.nan
    table = make_table((FIRST, values))
    short = HeadTable(table.rows[:-1])  # the last layer has two heads
    figure = plot_head_grid(short, "induction")
    mesh = find_artist(figure, "heads").get_array()
    assert mesh.mask.tolist() == [[False] * 3, [False, True, True]]
    (lost,) = (x for x in figure.axes[0].patches if x.get_hatch())
    assert lost.get_xy() == (0.5, 0.5)
    assert figure.twin.splitlines()[2:4] == ["    0  ██····", "    1  ▒▒??"]
    assert "1 head has no value." in figure.twin
    dots = plot_head_scatter(table, "previous", "induction")
    assert len(find_artist(dots, "heads").get_offsets()) == 5
    assert "1 head has no value." in dots.twin
    assert (
        draw_layer_bars(table, "induction")
        .splitlines()[2]
        .endswith("0.19  0.12 to 0.25")
    )


def test_values_below_zero_have_two_colours():
    table = make_table((FIRST, SECOND))
    table.rows["distance"] = [-2, 1, 0, 3, -1, 2]
    figure = plot_head_grid(table, "distance")
    norm = find_artist(figure, "heads").norm
    assert (norm.vmin, norm.vmax) == (-3, 3)
    assert find_artist(figure, "heads").cmap(0.5)[:3] == pytest.approx(
        Signed(3).colours()[128] / 255
    )
    bars = plot_layer_bars(table, "distance")
    assert bars.axes[0].get_ylim()[0] < -2
    scatter = plot_head_scatter(table, "distance", "induction")
    assert scatter.axes[0].get_xlim()[0] < -2


GRID_TWIN = """\
induction (weight)
layer  heads from left to right
    0  ▓▓····
    1  ░░██··
· less   ░ 0.15   ▒ 0.3   ▓ 0.45   █ 0.6 or more
Largest (layer.head): 1.1 0.75, 0.0 0.50, 1.0 0.25."""


def test_the_text_of_the_grid_is_exact():
    assert draw_head_grid(TABLE, "induction") == GRID_TWIN
    assert plot_head_grid(TABLE, "induction").twin == GRID_TWIN


# arcs


@pytest.mark.parametrize("mask", [None, causal()], ids=["both ways", "causal"])
@pytest.mark.parametrize("least", [0.1, 0.3])
def test_arcs_are_the_weights_from_a_threshold_on(tmp_path, mask, least):
    seen, weights = make_seen(mask=mask)
    figure = plot_token_arcs(seen, 1, 2, least=least)
    expected = {
        f"arc-{q}-{k}": weights[1, 2, q, k]
        for q in range(10)
        for k in range(10)
        if weights[1, 2, q, k] >= least
    }
    drawn = {x.get_gid(): x for x in figure.axes[0].patches}
    assert drawn.keys() == expected.keys()
    _, groups = read_svg(figure, tmp_path / "a.svg")
    for name, weight in expected.items():
        assert drawn[name].get_linewidth() == pytest.approx(THICK * weight)
        (style,) = find_styles(groups[name])
        assert float(style["stroke-width"]) == pytest.approx(THICK * weight, rel=1e-4)
        q, k = map(int, name.split("-")[1:])
        if q == k:
            continue
        ends = [find_artist(figure, f"token-{i}").get_position()[0] for i in (q, k)]
        path = drawn[name].get_path().vertices
        assert [path[0, 0], path[-1, 0]] == pytest.approx(ends)
        assert (path[1, 1] < path[0, 1]) == (
            k < q
        )  # y grows downwards: above is earlier
    share = sum(expected.values()) / 10
    assert f"{share:.2f} of all weight." in figure.twin
    assert ("below: a later one." in read_words(figure)) == any(
        int(x.split("-")[2]) > int(x.split("-")[1]) for x in expected
    )


def read_words(figure):
    return " ".join(" ".join(x.get_text() for x in figure.findobj(Text)).split())


def test_arcs_of_a_part_keep_their_positions():
    seen, weights = make_seen()
    figure = plot_token_arcs(seen, 0, 1, span=(3, 6), least=0.05)
    expected = {
        f"arc-{q}-{k}"
        for q in range(3, 7)
        for k in range(3, 7)
        if weights[0, 1, q, k] >= 0.05
    }
    assert {x.get_gid() for x in figure.axes[0].patches} == expected
    labels = [find_artist(figure, f"token-{i}").get_text() for i in range(3, 7)]
    assert labels == [".", "⏎", "It", "·un"]


def test_arcs_to_a_sink_are_grey():
    texts = [f" w{i}" for i in range(12)]
    seen, _ = make_seen(texts, layers=1, heads=1)
    record = seen.layer(0)
    q, k = record.q.clone(), record.k.clone()
    q[0, :, 0] = 4
    k[0, 0] = torch.tensor([3.0, 0, 0, 0])
    logits = 0.5 * q @ k.mT
    sunk = replace(record, q=q, k=k, lse=logits.logsumexp(-1))
    figure = plot_token_arcs(Seen(replace(seen.recording, records=(sunk,))), 0, 0)
    share = logits.softmax(-1)[0, 1:, 0].mean()
    assert share > 0.3
    assert f"Grey: to token 0, which takes {share:.2f} on average." in figure.twin
    for arc in figure.axes[0].patches:
        grey = to_hex(arc.get_edgecolor()) == FAINT.lower()
        assert grey == arc.get_gid().endswith("-0")


ARCS_TWIN = """\
Layer 0, head 0: weights of at least 0.30, 0.85 of all weight.
0 a → 0 a 1.00
1 ·b → 0 a 0.60, 1 ·b 0.40
2 ⏎ → 2 ⏎ 0.55"""


def test_the_text_of_the_arcs_is_exact():
    weights = np.asarray([[1, 1e-9, 1e-9], [0.6, 0.4, 1e-9], [0.2, 0.25, 0.55]])
    q, k = (
        torch.from_numpy(np.log(weights))[None],
        torch.eye(3, dtype=torch.float64)[None],
    )
    at = torch.arange(3)
    record = Record(
        name="x", q=q, k=k, lse=(q @ k.mT).logsumexp(-1), scale=1.0, q_positions=at,
        k_positions=at, mask=causal(),
    )  # fmt: skip
    record = replace(
        record, lse=torch.from_numpy(np.log(np.tril(weights).sum(-1)))[None]
    )
    found = Recording(
        model="m", records=(record,), sequences=(0,), tokens=((1, 2, 3),), texts=(("a", " b", "\n"),)
    )  # fmt: skip
    assert draw_token_arcs(Seen(found), 0, 0, least=0.3) == ARCS_TWIN
    assert plot_token_arcs(Seen(found), 0, 0, least=0.3).twin == ARCS_TWIN


# files and letters


def draw_all(seen=None, width="column"):
    seen = seen or make_seen()[0]
    return {
        "text": plot_tinted_text(seen, 4, width=width),
        "scatter": plot_head_scatter(TABLE, "previous", "induction", width=width),
        "bars": plot_layer_bars(TABLE, ["previous", "induction"], width=width),
        "grid": plot_head_grid(TABLE, "induction", width=width),
        "arcs": plot_token_arcs(seen, 0, 0, width=width),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "inches"), [("column", 3.25), ("page", 6.75), (5, 5)]
)
def test_files_have_the_width_that_was_asked_for(tmp_path, width, inches):
    for name, figure in draw_all(width=width).items():
        with mpl.rc_context({"savefig.bbox": "tight"}):  # as users may have it
            svg, pdf, png, twin = figure.save(tmp_path / name)
        size = re.search(r'width="([\d.]+)pt"', svg.read_text("utf-8"))[1]
        assert float(size) == pytest.approx(inches * 72)
        box = re.search(rb"/MediaBox \[ ?0 0 ([\d.]+)", pdf.read_bytes())[1]
        assert float(box) == pytest.approx(inches * 72)
        assert mpl.image.imread(png).shape[1] == inches * 600
        assert twin.read_text("utf-8") == figure.twin + "\n"
        letters = [x for x in figure.findobj(Text) if x.get_text()]
        assert min(x.get_fontsize() for x in letters) >= 6
        figure.draw_without_rendering()
        for text in (x for x in letters if x.get_visible()):
            box = text.get_window_extent().padded(-2)
            inside = figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
            inside = inside and figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1
            ticks = {
                x
                for a in figure.axes
                for x in (*a.get_xticklabels(), *a.get_yticklabels())
            }
            assert inside or text in ticks, (name, text.get_text())


@pytest.mark.slow
def test_letters_are_letters_and_files_are_the_same_each_time(tmp_path):
    for name, figure in draw_all().items():
        one = figure.save(tmp_path / name)
        again = figure.save(tmp_path / f"{name} again.svg")
        assert [x.suffix for x in one] == [".svg", ".pdf", ".png", ".txt"]
        for a, b in zip(one, again, strict=True):
            assert a.read_bytes() == b.read_bytes(), a
        pdf = one[1].read_bytes()
        assert b"/CIDFontType2" in pdf or b"/TrueType" in pdf
        assert b"/Type3" not in pdf
        svg = one[0].read_text("utf-8")
        assert "<text" in svg
        assert svg.count("@font-face") == 1
        assert "data:font/woff;base64," in svg
        assert not re.search(r"url\((?!data:|#)", svg)


def test_every_token_is_in_the_svg_as_text(tmp_path):
    seen, _ = make_seen()
    root, _ = read_svg(plot_tinted_text(seen, 4), tmp_path / "a.svg")
    texts = [x.text for x in root.iter(f"{SVG}text")]
    for word in ("The", "cat", "sat", ".", "⏎", "It", "un", "believ", "ably", "slept"):
        assert word in texts
    assert texts.count("·") == sum(word.startswith(" ") for word in WORDS)


@pytest.mark.slow
@pytest.mark.filterwarnings("error")  # a missing glyph is a warning
@pytest.mark.parametrize("usetex", [False, True])
def test_hostile_tokens_are_drawn_as_they_are(tmp_path, usetex):
    texts = [
        *HOSTILE,
        "<script>alert(1)</script>",
        "]]>",
        "&lt;",
        "\\alpha",
        "\x00",
        "a b ",
    ]
    seen, _ = make_seen(texts, layers=1, heads=1)
    with mpl.rc_context({"text.usetex": usetex}):
        for name, figure in draw_hostile(seen).items():
            figure.save(tmp_path / name)
    for name in ("text", "arcs"):
        root = ET.parse(tmp_path / f"{name}.svg").getroot()
        assert not list(root.iter(f"{SVG}script"))
        shown = "".join("".join(x.itertext()) for x in root.iter(f"{SVG}text"))
        for token in (
            "$x^2",
            "$\\frac{1}{2$",
            "\\u001b",
            "\\alpha",
            "&lt;",
            "]]>",
            "\\u0000",
        ):
            assert token in shown, token
        assert "\x1b" not in shown
        assert "\\u6f22" in shown or "漢" in shown
    assert "<script>alert(1)</script>" in (tmp_path / "text.txt").read_text("utf-8")
    for text in draw_hostile(seen)["text"].findobj(Text):
        assert not text.get_parse_math() or not re.search(r"[$\\]", text.get_text())


def draw_hostile(seen):
    return {
        "text": plot_tinted_text(seen, 0),
        "arcs": plot_token_arcs(seen, 0, 0, width="page"),
    }


def test_characters_without_a_font_are_named(monkeypatch):
    own = journal.read_letters("DejaVu Sans")
    monkeypatch.setattr(journal, "read_letters", lambda _: own)  # nobody has another
    never = "\U00016fe4"  # a mark of Khitan, in no common font
    fonts = read_fonts([f"a{never}"])
    assert fonts.missing == (never,)
    if fonts.missing:
        assert fonts.write(f"a{never}") == "a\\U00016fe4"
        assert (
            fonts.note
            == "1 character has no font here, and a number instead: \\U00016fe4."
        )
        seen, _ = make_seen(["a", never], layers=1, heads=1)
        figure = plot_tinted_text(seen, 0)
        assert fonts.note in read_words(figure)
        assert never in figure.twin or "\\U" in figure.twin
    assert read_fonts(["abc"]).note == ""


def test_another_installed_font_is_used_before_giving_up(tmp_path):
    own, other = (
        set(get_font(findfont(x)).get_charmap()) for x in ("DejaVu Sans", "STIXGeneral")
    )
    letter = chr(min(c for c in other - own if chr(c).isalpha()))
    fonts = read_fonts([letter])
    assert fonts.missing == ()
    assert len(fonts.families) > 1
    assert fonts.write(letter) == letter
    seen, _ = make_seen(["a", letter], layers=1, heads=1)
    root, _ = read_svg(plot_tinted_text(seen, 0), tmp_path / "a.svg")
    assert letter in [x.text for x in root.iter(f"{SVG}text")]
    assert (tmp_path / "a.svg").read_text("utf-8").count("@font-face") == 2


def test_a_font_of_the_user_comes_first():
    with mpl.rc_context({"font.family": "STIXGeneral"}):
        seen, _ = make_seen()
        for figure in draw_all(seen).values():
            figure.draw_without_rendering()
            names = {
                x.get_fontfamily()[0] for x in figure.findobj(Text) if x.get_text()
            }
            assert names == {"STIXGeneral"}


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (" a", "·a"),
        ("\n\n", "⏎⏎"),
        ("\t", "⇥"),
        ("\u00a0", "\\u00a0"),
        ("\u200b", "\\u200b"),
        ("\ud83d", "\\ud83d"),
        ("\u0301x", "◌\u0301x"),
        ("x" * 50, "x" * 40 + "…"),
        ("", ""),
    ],
)
def test_every_character_of_a_token_can_be_seen(token, shown):
    assert write_visible(token) == shown


def test_a_notebook_shows_a_figure_whose_fonts_stay_its_own():
    figure = draw_all()["scatter"]
    bundle = figure._repr_mimebundle_()
    assert bundle["text/plain"] == figure.twin
    assert "@font-face" not in bundle.get("image/svg+xml", "")


SEEN = make_seen()[0]
LONG = make_seen(["word "] * 900, layers=1, heads=1)[0]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: plot_tinted_text(SEEN, 10), OptionError, "token 10 is selected, expected 0 to 9"),
        (lambda: plot_tinted_text(SEEN, (3, 2)), OptionError, "expected 0 <= first <= last"),
        (lambda: plot_tinted_text(SEEN, 1, span=(3, 12)), OptionError, r"span=\(3, 12\), expected"),
        (lambda: plot_tinted_text(SEEN, 1, heads={5: [0]}), OptionError, "there is no layer 5"),
        (lambda: plot_tinted_text(SEEN, 1, heads={}), OptionError, "names no head"),
        (lambda: plot_tinted_text(SEEN, 1, width="wide"), OptionError, '"column" .3.25 inches.'),
        (lambda: plot_tinted_text(SEEN, 1, width=0.5), OptionError, "inches from 1.5 to 20"),
        (lambda: plot_tinted_text(LONG, 1), OptionError, "inches tall, expected at most 9: write span="),
        (lambda: plot_token_arcs(LONG, 0, 0), OptionError, "900 tokens do not fit into 3.25 inches"),
        (lambda: plot_token_arcs(SEEN, 0, 7), OptionError, "there is no head 7"),
        (lambda: plot_token_arcs(SEEN, 0, 0, least=0), OptionError, "least=0, expected"),
        (lambda: plot_token_arcs(SEEN, 0, 0, span=(4, 3)), OptionError, "expected 0 <= first"),
        (lambda: plot_head_scatter(TABLE, "x", "y"), OptionError, "expected some of"),
        (lambda: plot_head_grid(TABLE, "x"), OptionError, "expected some of"),
        (lambda: plot_layer_bars(TABLE, []), OptionError, "expected some of"),
        (lambda: plot_head_grid(make_table((FIRST, SECOND * np.nan)), "induction"), OptionError, "no head has a value"),
        (lambda: plot_head_grid(make_table(np.ones((2, 1, 200))), "previous"), OptionError, "200 heads do not fit"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused_in_a_sentence(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_tokens_without_text_say_what_to_write():
    bare = Seen(replace(SEEN.recording, texts=()))
    with pytest.raises(OptionError, match=r"seen = seen.label\(tokenizer.decode\)"):
        plot_tinted_text(bare, 0)


def test_nan_is_an_error_and_no_colour():
    record = SEEN.layer(0)
    q = record.q.clone()
    q[1, 4] = torch.nan
    broken = Seen(
        replace(SEEN.recording, records=(replace(record, q=q), SEEN.layer(1)))
    )
    with pytest.raises(ArrayError, match="NaN"):
        plot_tinted_text(broken, 4)
    with pytest.raises(ArrayError, match="NaN at query 4"):
        plot_token_arcs(broken, 0, 1)


def test_importing_the_figures_is_cheap(run_apart):
    code = (
        "import sys, json, regard.show.figures;"
        "print(json.dumps([x in sys.modules for x in ('matplotlib', 'torch', 'fontTools')]))"
    )
    assert run_apart(code) == [False, False, False]


@pytest.mark.slow
def test_a_real_sentence_at_column_width(smollm, tmp_path):
    text = "The cat sat on the mat because it was warm."
    seen = regard.read(text, model=smollm.parent)
    weights = np.asarray(seen.weights(), np.float64)
    expected = weights[:, :, 7].mean((0, 1))
    figure = plot_tinted_text(seen, 7, scale=LinearScale(0, 1))
    for i in range(8):
        colour = find_artist(figure, f"box-{i}").get_facecolor()
        assert to_hex(colour) == paint(LinearScale(0, 1), expected[i])
    table = seen.table()
    layers = sorted({int(x) for x in table["layer"]})
    assert len(layers) == 30
    figure = plot_layer_bars(table, "sink")
    for layer in layers:
        mean = np.mean([r["sink"] for r in table.rows if r["layer"] == layer])
        assert find_artist(figure, f"sink-{layer}").get_height() == pytest.approx(mean)
    np.testing.assert_array_equal(
        find_artist(plot_head_grid(table, "sink"), "heads").get_array().ravel(),
        table["sink"],
    )
    assert colour_layers(np.arange(30)).shape == (30, 3)


@pytest.mark.parametrize(("width", "inches"), [("column", 3.25), ("page", 6.75)])
def test_maps_have_the_width_of_a_column(width, inches):
    weights = np.full((4, 40, 40), 1 / 40)
    names = [f"$w{i}" for i in range(40)]
    figure = fit_width(plot_weights(weights, rows=names, keys=names), width)
    assert figure.get_size_inches()[0] == inches
    figure.draw_without_rendering()
    for axes in figure.axes[:4]:
        box = axes.get_window_extent()
        assert box.height == pytest.approx(box.width, rel=0.01)
        shown = [x for x in axes.get_yticklabels() if x.get_visible() and x.get_text()]
        boxes = [x.get_window_extent() for x in shown]
        assert all(a.y0 > b.y1 - 2 for a, b in itertools.pairwise(boxes))
        assert [x.get_text() for x in shown][:1] in ([], ["$w0"])
    with pytest.raises(OptionError, match="expected a figure of plot_weights"):
        fit_width(plot_head_grid(TABLE, "induction"), width)
