"""The page of an atlas and its text twin: every number, every mark, and no markup."""

import base64
import json
import re
import unicodedata
import zlib

import numpy as np
import pytest

from regard.atlas.page import AROUND, write_page
from regard.atlas.table import AtlasTable, Example, compare_atlases
from regard.atlas.tally import merge_tallies, tally_document
from regard.atlas.terminal_table import (
    INTERVALS,
    describe_atlas,
    draw_atlas_table,
    draw_difference,
    draw_head,
    fit_scale,
    tell_left_out,
    write_pair,
)
from regard.errors import FileError, OptionError
from regard.show.palette import LinearScale

ABOUT = {
    "model": "tiny",
    "corpus": "notes",
    "documents": 16,
    "tokens": 12_800,
    "length": 1024,
    "packed": False,
    "precision": "float32",
    "aside": 2,
    "reasons": {"ArithmeticError: NaN in layers.0": 2},
    "left_out": {"it is no UTF-8": 2, "it is empty": 10},
    "copies": 1,
    "whole": True,
}
MEANS = {
    "sink": [[0.1, 0.5, 0.9], [0.3]],
    "entropy": [[4.0, 5.0, 6.0], [5.5]],
}
HOSTILE = "</script><script>alert(1)</script><!-- script -->"


def make_table(means=MEANS, spread=0.01, about=ABOUT, found=None, documents=16):
    """Return a table whose means are these; each document is spread above or below."""
    layers = [f"layers.{i}" for i in range(len(next(iter(means.values()))))]
    tallies = []
    for n in range(documents):
        off = spread * (1 if n % 2 else -1)
        numbers = [
            {name: np.full((4, len(x[i])), np.array(x[i])).T + off for name, x in means.items()}
            for i in range(len(layers))
        ]  # fmt: skip
        tallies.append(tally_document(layers, numbers, list(means), document=n))
    return AtlasTable(about, merge_tallies(tallies, keep=1), found or {})


def read_page(path):
    """Return the data of a page, and its examples by id."""
    html = path.read_text("utf-8")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', html)
    held = re.findall(r'<script type="text/plain" id="([\w-]+)">(.*?)</script>', html)
    return json.loads(data[1]), {
        name: json.loads(zlib.decompress(base64.b64decode(text))) for name, text in held
    }


# ---- the text twin


def test_a_table_is_drawn_as_shades_and_a_list():
    drawn = draw_atlas_table(make_table(), "sink", width=60)
    assert (
        drawn
        == """\
sink: weight on the first key, mean over queries
tiny over notes: 16 documents, 12,800 tokens, at most 1,024
tokens at once, one document in a sequence, float32
Not in these numbers: 12 items left out of the corpus (10:
it is empty; 2: it is no UTF-8); 1 exact copy left out; 2
documents set aside (2: ArithmeticError: NaN in layers.0).

           heads 0 to 2, from left to right
layer 0    ····· ▒▒▒▒▒ █████
layer 1    ░░░░░
· less   ░ 0.18   ▒ 0.36   ▓ 0.54   █ 0.72 or more   blank: no value

largest, in weight, ± half of a 95 % Student interval over
documents (too narrow if few of them carry the mean):
layer 0 head 2      0.9000 ± 0.0055
layer 0 head 1      0.5000 ± 0.0055
layer 1 head 0      0.3000 ± 0.0055
layer 0 head 0      0.1000 ± 0.0055"""
    )


def test_a_head_that_few_documents_carry_is_named_and_equal_ones_are_not_sure():
    means = {"sink": [[0.2, 0.4, 0.6]]}
    tallies = [
        tally_document(
            ["layers.0"],
            [
                {
                    "sink": np.array(
                        [[0.2 + 0.7 * (n == 5)], [0.4], [0.6 + 0.01 * (n % 3)]]
                    )
                }
            ],
            ["sink"],
            document=n,
        )
        for n in range(30)
    ]
    table = AtlasTable(ABOUT, merge_tallies(tallies, keep=1), {})
    few, equal = "few documents differ", "all documents are equal"
    drawn = draw_atlas_table(table, "sink").splitlines()[-3:]
    assert drawn[0].startswith("layer 0 head 2      0.6100 ± ")
    assert drawn[0][-1].isdecimal()
    assert drawn[1:] == [
        f"layer 0 head 1      0.4 ± ? ({equal})",
        f"layer 0 head 0      0.223 ± 0.048 ({few})",
    ]
    assert f"sink  0.4 ± ? ({equal}) weight: " in draw_head(table, 0, 1)
    rows = table.list_rows()
    assert [row["note"] for row in rows] == [few, equal, ""]
    assert [row["half"] is None for row in rows] == [False, True, False]
    other = make_table({"sink": [[0.9, 0.9, 0.9]]})
    drawn = draw_difference(table, other, "sink", "ab")
    assert f"a 0.223 ± 0.048 ({few})   b 0.9000 ± 0.0055" in drawn
    assert not compare_atlases(table, other, "sink").marked[0, 1]  # it is not known
    stopped = AtlasTable(ABOUT | {"interval": "sequence", "pieces": 1}, table.tally, {})
    assert [row["note"] for row in stopped.list_rows()] == ["", "", ""]
    assert make_table(means).doubt("sink").tolist() == [[0, 0, 0]]


def test_a_difference_is_drawn_with_its_marks():
    moved = MEANS | {"sink": [[0.1, 0.7, 0.505], [0.3]]}
    drawn = draw_difference(
        make_table(),
        make_table(moved, about={"corpus": "code"}),
        "sink",
        ("notes", "code"),
        width=70,
    )
    assert (
        drawn
        == """\
sink: weight on the first key, mean over queries; code less notes
tiny over notes: 16 documents, 12,800 tokens, at most 1,024 tokens at
once, one document in a sequence, float32
Not in these numbers: 12 items left out of the corpus (10: it is
empty; 2: it is no UTF-8); 1 exact copy left out; 2 documents set
aside (2: ArithmeticError: NaN in layers.0).
code

           heads 0 to 2, from left to right
layer 0    ····  ▒▒▒▒+ ████-
layer 1    ····
· less   ░ 0.079   ▒ 0.16   ▓ 0.24   █ 0.32 or more   blank: no value
+ marked, more in code   - marked, more in notes
2 of 4 heads are marked: they differ by more than an interval that
holds for all heads at once (if nothing differed, 1 comparison in 20
would mark any). 2 differ by more than their own 95 % interval; by
chance about 0.2 would.

largest that are marked, in weight, ± half of a 95 % Student interval
over documents (too narrow if few of them carry the mean):
layer 0 head 2      -0.3950 ± 0.0078   notes 0.9000 ± 0.0055   code 0.5050 ± 0.0055
layer 0 head 1      0.2000 ± 0.0078   notes 0.5000 ± 0.0055   code 0.7000 ± 0.0055"""
    )


def test_colour_says_the_same_as_shades():
    table = make_table()
    tints = fit_scale(table.mean("sink")).paint(0.9, dark=True).tolist()
    drawn = draw_atlas_table(table, "sink", color="dark")
    r, g, b = tints
    assert f"\x1b[48;2;{r};{g};{b};38;2;0;0;0m     \x1b[0m" in drawn  # black on bright
    moved = make_table(MEANS | {"sink": [[0.1, 0.7, 0.505], [0.3]]})
    two = draw_difference(table, moved, "sink", ("a", "b"), color="light")
    bare = re.sub(r"\x1b\[[\d;]*m", "", two).splitlines()
    assert f"{'layer 0':<11}        +     -  " in bare
    assert "\x1b[0m" in two


def test_many_heads_are_drawn_in_bands_that_fit():
    table = make_table({"sink": [[0.5] * 100]})
    moved = make_table({"sink": [[0.5] * 99 + [0.9]]})
    one = draw_atlas_table(table, "sink", width=60).splitlines()
    two = draw_difference(table, moved, "sink", ("a", "b"), width=60).splitlines()
    for lines in (one, two):
        grid = [x for x in lines if x.startswith(("layer 0  ", " "))]
        assert max(map(len, grid)) <= 60
    assert "           heads 49 to 97, from left to right" in one
    assert two[two.index("           heads 96 to 99, from left to right") + 1] == (
        "layer 0    · · · █+"
    )


def test_names_and_models_cannot_steer_the_terminal():
    table = make_table(about={"model": "a\x1b[2J\nb", "corpus": "\u202ec"})
    drawn = draw_difference(table, table, "sink", ("x\x1b[1m\n", "\u2066y"))
    for text in (drawn, draw_atlas_table(table, "sink")):
        rest = text.replace("\n", "")
        assert not [c for c in rest if unicodedata.category(c) in ("Cc", "Cf")]


def test_a_scale_fits_its_numbers():
    nan = np.nan
    assert fit_scale(np.array([[0.2, nan, 0.8]])) == LinearScale(0, 0.8)
    assert fit_scale(np.array([[4.0, 6.0]])) == LinearScale(4, 6)  # far from 0
    assert fit_scale(np.array([[-3.0, 2.0]]), np.array([[5.0]])) == LinearScale(-3, 5)
    assert fit_scale(np.array([[0.7]])) == LinearScale(0, 0.7)
    assert fit_scale(np.array([[0.0, 0.0]])) == LinearScale(0, 1)
    assert fit_scale(np.array([[-2.0]])) == LinearScale(-2, -1)
    assert fit_scale(np.array([[nan, -np.inf]])) == LinearScale(0, 1)


def test_a_number_has_the_digits_of_its_interval():
    assert write_pair(0.30172, 0.0114) == "0.302 ± 0.011"
    assert write_pair(-411.7, 23.4) == "-412 ± 23"
    assert write_pair(3.25, np.nan) == "3.25 ± ?"
    assert write_pair(np.nan, 1.0) == "no value"
    assert write_pair(1.0, 0.0) == "1.000 ± 0.000"
    assert write_pair(1.234e-6, 4e-8) == "1.23e-06 ± 4e-08"


def test_an_atlas_is_described_as_far_as_it_is_known():
    assert describe_atlas({}) == "an atlas"
    assert describe_atlas({"model": "m"}) == "m"
    told = describe_atlas({"documents": 3, "packed": True, "aside": 1, "whole": False})
    assert told == (
        "an atlas: 3 documents, several documents in a sequence, a random part of it"
    )


def test_what_is_left_out_is_told_with_its_reasons():
    assert tell_left_out({}) == ""
    assert tell_left_out({"left_out": {}, "copies": 0, "aside": 0, "missed": {}}) == ""
    reasons = {f"why {i}": 10 - i for i in range(7)}
    found = tell_left_out({"aside": 52, "reasons": reasons, "missed": {"a": "no lse"}})
    assert found == (
        "Not in these numbers: 52 documents set aside (10: why 0; 9: why 1; 8: why 2; "
        "7: why 3; 18: other reasons); 1 layer not measured (1: no lse)."
    )
    old = {"aside": 3, "set_aside": [["a", "bad\x1b[2J"], ["b", "worse"]]}
    assert tell_left_out(old) == (
        "Not in these numbers: 3 documents set aside (1: bad[2J; 1: other reasons; "
        "1: worse)."
    )


@pytest.mark.parametrize("width", [-1, 0, 1, 5, 10, 11, 12, 79, 10**9])
def test_a_terminal_of_any_width_shows_every_head(width):
    table = make_table()
    for drawn in (
        draw_atlas_table(table, "sink", width=width),
        draw_difference(table, table, "sink", "ab", width=width),
        draw_head(table, 0, 2, width=width),
    ):
        assert "layer 0" in drawn
        assert "Student" in drawn
    drawn = (
        draw_atlas_table(table, "sink", width=width).split("largest")[0].splitlines()
    )
    cells = "".join(line for line in drawn if line.startswith("layer"))
    assert {*"·▒█░"} <= {*cells}


# ---- the page


def test_every_number_of_a_page_is_the_number_of_its_table(tmp_path):
    random = np.random.default_rng(0)
    heads = (3, 1, 2)
    means = {
        name: [random.normal(size=n).tolist() for n in heads]
        for name in ("self", "local")
    }
    a = make_table(means)
    b = make_table({k: [(np.array(r) + 0.1).tolist() for r in x] for k, x in means.items()}, 0.2)  # fmt: skip
    write_page(tmp_path / "page.html", [a, b], names=["a", "b"])
    data, _ = read_page(tmp_path / "page.html")
    assert data["heads"] == [3, 1, 2]
    assert data["interval"] == INTERVALS["student"]
    assert data["about"][1] == data["about"][3] == tell_left_out(ABOUT)
    assert [x["name"] for x in data["statistics"]] == ["self", "local"]
    for packed in data["statistics"]:
        name = packed["name"]
        found = compare_atlases(a, b, name)
        both = np.stack([a.mean(name), b.mean(name)])
        assert packed["scale"] == [np.nanmin(both), np.nanmax(both)]
        grids = [
            *((x.mean(name), y["mean"]) for x, y in zip((a, b), packed["tables"], strict=True)),
            *((x.half(name), y["half"]) for x, y in zip((a, b), packed["tables"], strict=True)),
            (found.difference, packed["difference"]["mean"]),
            (found.half, packed["difference"]["half"]),
            (found.marked, packed["difference"]["marked"]),
        ]  # fmt: skip
        for grid, rows in grids:
            assert [len(row) for row in rows] == [3, 1, 2]
            for layer, row in enumerate(rows):
                assert row == grid[layer, : len(row)].tolist()  # bit by bit
        assert packed["tables"][0]["count"] == [[16] * 3, [16], [16] * 2]
        top = np.nanmax(np.abs(found.difference))
        assert packed["difference"]["scale"] == [-top, top]


def test_what_is_not_known_is_null(tmp_path):
    table = make_table({"sink": [[0.5, np.nan]], "logit": [[7.0, np.nan]]}, documents=4)
    write_page(tmp_path / "page.html", [table], names=["x"])
    data, held = read_page(tmp_path / "page.html")
    sink, logit = (x["tables"][0] for x in data["statistics"])
    known = {"count": [[4, 0]], "doubt": [[0, 0]]}
    assert sink == {"mean": [[0.5, None]], "half": [[None, None]], **known}
    assert logit["mean"][0][1] is None
    assert held == {"examples-0-0": [[[], []]], "examples-0-1": [[[], []]]}
    assert data["folders"] == [None]


def test_hostile_texts_are_escaped_and_come_back(tmp_path):
    texts = [HOSTILE, "\u202e\u05e9", "\ud83d", "\x00\u2028\ufeff", "", "\\\"'`${1}"]
    found = {
        ("sink", 0, 1): tuple(Example(0.5, x, 1, 7, x, x, x) for x in texts),
    }
    about = ABOUT | {"model": HOSTILE, "folder": "my atlas; rm"}
    table = make_table(about=about, found=found)
    write_page(tmp_path / "page.html", [table], names=[HOSTILE])
    html = (tmp_path / "page.html").read_text("utf-8")
    assert html.lower().count("</script") == html.lower().count("<script") == 4
    assert "alert(1)</script" not in html
    assert not re.search(r"\b(src|href)=\"(?!data:)", html)
    assert "default-src 'none'" in html
    data, held = read_page(tmp_path / "page.html")
    assert data["names"] == [HOSTILE]
    assert data["folders"] == ["'my atlas; rm'"]
    assert held["examples-0-0"][0][1] == [[0.5, x, 1, 7, x, x, x] for x in texts]
    assert held["examples-0-0"][0][0] == held["examples-0-1"][0][1] == []


def test_a_long_text_keeps_what_is_next_to_its_token(tmp_path):
    example = Example(1.0, "d", 0, 3, "x" * 900 + "near", "t", "next" + "y" * 900)
    table = make_table(found={("sink", 1, 0): (example,)})
    write_page(tmp_path / "page.html", [table], names=["x"])
    _, held = read_page(tmp_path / "page.html")
    (_, _, _, _, before, token, after) = held["examples-0-0"][1][0][0]
    assert before.endswith("near")
    assert after.startswith("next")
    assert token == "t"
    assert len(before) == len(after) == AROUND


def test_of_too_many_examples_the_first_are_kept_and_that_is_said(
    tmp_path, monkeypatch
):
    found = {("sink", 0, 0): tuple(Example(1 - n / 9, f"{n}") for n in range(5))}
    table = make_table(found=found)
    write_page(tmp_path / "all.html", [table], names=["x"])
    data, held = read_page(tmp_path / "all.html")
    assert data["cut"] is None
    assert len(held["examples-0-0"][0][0]) == 5
    monkeypatch.setattr("regard.atlas.page.EXAMPLES", 4 * 2 * 3)  # three of each
    write_page(tmp_path / "some.html", [table], names=["x"])
    data, held = read_page(tmp_path / "some.html")
    assert data["cut"] == 3
    assert [x[1] for x in held["examples-0-0"][0][0]] == ["0", "1", "2"]


def test_a_page_has_what_both_atlases_have(tmp_path):
    b = make_table({"entropy": MEANS["entropy"]})
    write_page(tmp_path / "page.html", [make_table(), b], names=["a", "b"])
    data, held = read_page(tmp_path / "page.html")
    assert [x["name"] for x in data["statistics"]] == ["entropy"]
    assert held.keys() == {"examples-0-0", "examples-1-0"}


def test_what_cannot_be_shown_is_refused(tmp_path):
    table, path = make_table(), tmp_path / "page.html"
    with pytest.raises(OptionError, match="3 tables with 3 names, expected one or two"):
        write_page(path, [table] * 3, names="abc")
    with pytest.raises(OptionError, match="1 tables with 2 names"):
        write_page(path, [table], names="ab")
    with pytest.raises(OptionError, match="expected the same heads"):
        write_page(path, [table, make_table({"sink": [[1.0]]})], names="ab")
    with pytest.raises(OptionError, match="there is nothing to show"):
        write_page(path, [table, make_table({"self": MEANS["sink"]})], names="ab")
    with pytest.raises(FileError, match="cannot be written: No such file"):
        write_page(tmp_path / "no" / "page.html", [table], names="a")
