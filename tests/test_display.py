"""What a notebook shows of our objects: escaped, small, and the text of print()."""

import base64
import re
import struct
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure

import regard
from regard import display
from regard.audit.finding import Finding, Findings
from regard.masks.mask_picture import find_part, shade_cells
from regard.recording.coverage import Coverage
from regard.recording.evidence import Covered
from regard.recording.record import Record, Recording
from regard.seen import Seen
from regard.show import notebook_figure
from regard.show.figure import plot_mask, plot_table, plot_weights
from regard.show.loss_curve import plot
from regard.show.page import make_page
from regard.stats.table import make_table, shade_column

HOSTILE = {
    "script": "<script>alert(1)</script>",
    "end of style": "</style></table></div><img src=x onerror=alert(1)>",
    "attribute": "\" onmouseover='alert(1)' x=\"",
    "direction": "\u202eabc\u2066",
    "zero": "a\x00b",
    "lines": "a\nb\u2028c",
    "stack": "a" + "\u0301" * 500,
    "long": "x" * 100_000,
    "half of a pair": "\ud83d",
}
TAGS = [
    "div",
    "p",
    "pre",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "figure",
    "figcaption",
    "img",
    "strong",
    "code",
]


def make_record(name="layer", n=5, heads=4, seed=0, **options):
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(heads, n, 3)), rng.normal(size=(heads // 2, n, 3))
    mask = options.get("mask", regard.causal())
    lse = regard.attention(q, k, k, mask, scale=0.5).lse
    at = {"q_positions": np.arange(n), "k_positions": np.arange(n)}
    return Record(
        name=name, q=q, k=k, lse=lse, scale=0.5, **{"mask": mask} | options, **at
    )


def make_seen(name="layer", records=2, **options):
    every = tuple(make_record(f"{name}{i}", seed=i) for i in range(records))
    cover = [Covered(name=x.name, via="sdpa", calls=1, kept=1) for x in every]
    cover.append(Covered(name=f"lost {name}", via="", reason=f"because {name}"))
    known = {"coverage": tuple(cover), "tokens": ((1, 2, 3, 4, 5),), "model": name}
    return Seen(Recording(records=every, sequences=(0,) * records, **known | options))


def make_objects(word="word"):
    """Return one of each kind, with a word wherever a stranger may have put it."""
    seen = make_seen(word)
    x = np.eye(5)
    found = Finding(what="sink", layer=word, numbers={"mass": 0.5})
    return {
        "seen": seen,
        "table": seen.table(),
        "record": seen.layer(0),
        "steps": regard.explain(x, x, x, tokens=[word, "b", "c", "d", "e"]),
        "step": regard.explain(x, x, x, tokens=[word, "b", "c", "d", "e"])["weights"],
        "coverage": seen.coverage(),
        "mask": regard.causal() & regard.window(2),
        "bias": regard.masks.alibi([0.5, 0.25]),
        "findings": Findings([found]),
        "page": make_page(seen.recording),
    }


class Reader(HTMLParser):
    """Collects the tags, attributes and text of HTML; every tag must be closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.cells, self.open = [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag != "img":
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


@pytest.mark.parametrize("word", HOSTILE)
def test_nothing_that_a_stranger_wrote_becomes_html(word):
    for name, shown in make_objects(HOSTILE[word]).items():
        text = shown._repr_html_()
        assert len(text.encode()) < 50_000, name  # so it can be encoded at all
        read = Reader(text)
        for tag, attributes in read.tags:
            assert tag in TAGS, name
            assert not {x for x in attributes if x.startswith("on")}, name
            assert attributes.get("src", "data:image/png").startswith("data:image/png")
        assert not re.search("[\x00\u202e\u2066\u2028]", text), name
        assert "\u0301" * 4 not in text, name
        assert "http" not in text and "url(" not in text and "<style" not in text


@pytest.mark.parametrize("name", make_objects())
def test_the_text_is_that_of_print(name, capsys):
    shown = make_objects()[name]
    found = shown._repr_mimebundle_(include=None, exclude=None)
    print(shown)  # noqa: T201
    assert found["text/plain"] + "\n" == capsys.readouterr().out
    assert found["text/html"] == shown._repr_html_()
    assert sorted(found) == ["text/html", "text/plain"]


def test_colours_are_those_of_the_notebook():
    for name, shown in make_objects().items():
        for _, attributes in Reader(shown._repr_html_()).tags:
            style = attributes.get("style", "")
            assert not re.search(r"(?<!-)\bcolor:(?!inherit)", style), name
            behind = re.findall(r"background:([^;]+)", style)
            assert all(x == "transparent" or x.startswith("rgba(") for x in behind), (
                name
            )


def test_text_is_escaped_shortened_and_readable():
    assert display.escape_text("a & <b> \"'") == "a &amp; &lt;b&gt; &quot;&#x27;"
    assert display.escape_text("a\u202eb\x00") == r"a\u202eb\u0000"
    assert display.escape_text("\ud83d") == r"\ud83d"
    assert display.escape_text("नमस्ते ก็ é 日本 👩") == "नमस्ते ก็ é 日本 👩"
    assert (
        display.escape_text("abcdef", 3) == "abc…"
        and display.escape_text("abc", 3) == "abc"
    )


def test_long_text_is_cut_and_says_so():
    lines = "\n".join(f"line {i}" for i in range(9_000))
    cut = display.cut_text(lines)
    *kept, last = cut.split("\n")
    assert len(cut) < display.LONGEST + 100
    assert lines.startswith("\n".join(kept) + "\n")
    assert last == f"… and {9_000 - len(kept)} more lines; print() shows all of them"
    assert display.cut_text("short\ntext") == "short\ntext"


def read_png(data):
    """Return the pixels of a PNG of ours; checks its checksums."""
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    at, chunks = 8, {}
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        name, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        (sum_,) = struct.unpack(">I", data[at + 8 + size : at + 12 + size])
        assert sum_ == zlib.crc32(name + body)
        chunks[name], at = body, at + 12 + size
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8)
    return lines.reshape(height, 1 + 4 * width)[:, 1:].reshape(height, width, 4)


def test_a_picture_has_the_opacity_that_it_was_given():
    opacity = np.array([[0, 1, 0.5], [np.nan, 2, -1]])
    pixels = read_png(display.encode_png(opacity))
    expected = np.array([[0, 255, 127], [0, 255, 0]])
    assert (
        np.abs(pixels[..., 3].astype(int) - expected).max()
        <= 255 / display.LEVELS / 2 + 1
    )
    assert (pixels[..., :3] == display.INK).all()


def test_weights_are_pooled_by_their_largest_on_a_logarithmic_scale():
    found = display.shade_weights(np.array([[1.0, 1e-3], [10**-1.5, 1e-9]]))
    np.testing.assert_allclose(found, [[1, 0], [0.5, 0]], atol=1e-9)
    weights = np.zeros((200, 130))
    weights[150, 100] = 1.0
    found = display.shade_weights(weights)
    assert found.shape == (48, 48) and found.sum() == 1
    place = (
        max(i for i in range(48) if i * n // 48 <= at)
        for at, n in ((150, 200), (100, 130))
    )
    assert found[tuple(place)] == 1


def test_the_first_rows_of_a_table_are_shown_and_the_others_counted():
    table = make_table(make_seen(records=8).recording)
    read = Reader(table._repr_html_())
    body = read.cells[2 + len(table.statistics) :]
    width = 2 + len(table.statistics)
    assert len(body) == 20 * width
    expected = [f"{x:.3f}" for x in table["entropy"][:20]]
    assert body[2::width] == expected
    assert "12 more rows:" in "".join(read.words)
    rows = [0.0, np.nan, 2.0, 1.0, np.inf]
    np.testing.assert_array_equal(shade_column(np.array(rows)), [0, 0, 1, 0.5, 1])
    np.testing.assert_array_equal(shade_column(np.array([3.0, 3.0])), [0, 0])


def test_a_record_draws_its_heads_or_says_how():
    record = make_record(n=6)
    text = record._repr_html_()
    pictures = re.findall(r'alt="head (\d)".*?base64,([^"]+)"', text)
    assert [int(h) for h, _ in pictures] == [0, 1, 2, 3]
    for h, data in pictures:
        pixels = read_png(base64.b64decode(data))[..., 3] / 255
        expected = display.shade_weights(record.weights(heads=int(h)))
        assert np.abs(pixels - expected).max() < 0.6 / display.LEVELS
    assert "4 of queries, 2 of keys" in text and "causal()" in text
    long = make_record(n=1500, heads=2)
    assert "<img" not in long._repr_html_() and "seen.widget()" in long._repr_html_()
    assert "<img" not in make_record(n=0)._repr_html_()
    many = make_record(heads=12)._repr_html_()
    assert many.count("<img") == 8 and "8 of 12 heads" in many


def test_print_tells_the_facts_of_a_record():
    record = make_record("model.layers.3", softcap=20.0)
    assert str(record).splitlines() == [
        "model.layers.3",
        "  heads: 4 of queries, 2 of keys",
        "  queries, keys: 5, 5",
        "  arrays: q and k, numpy, float64, 3 numbers per head",
        "  scale: 0.5",
        "  mask: causal()",
        "  softcap: 20.0",
    ]


@pytest.mark.parametrize(
    ("formula", "shape", "start"),
    [
        (regard.causal(), (1, 1, 16, 16), 0),
        (regard.padding(lengths=[3, 5]), (2, 1, 16, 16), 0),
        (regard.masks.per_head([regard.causal()] * 6), (1, 6, 16, 16), 0),
        (regard.same(np.arange(20)), (1, 1, 20, 20), 0),
        (regard.masks.array(np.ones((7, 9), bool), q_start=2), (1, 1, 7, 9), 2),
    ],
)
def test_a_formula_is_drawn_where_its_data_is(formula, shape, start):
    assert find_part(formula) == (shape, start)
    cells = formula.dense(shape, q_start=start)[0, 0]
    text = formula._repr_html_()
    data = re.findall(r'base64,([^"]+)"', text)
    assert len(data) == min(4, 1 if "per_head" in repr(formula) else len(data))
    np.testing.assert_array_equal(
        read_png(base64.b64decode(data[0]))[..., 3] > 0, cells
    )


def test_a_bias_is_shaded_from_its_least_to_its_largest():
    cells = np.array([[0.0, -2.0], [-4.0, -np.inf]])
    np.testing.assert_allclose(shade_cells(cells), [[1, 0.55], [0.1, 0]])
    assert (
        "blue from -7.5 (faint) to 0 (full)" in regard.masks.alibi([0.5])._repr_html_()
    )


def test_a_function_that_differs_by_an_axis_shows_its_first():
    for function, told in (
        (lambda b, h, q, k: (h == 0) | (k <= q), "; head 0 only"),
        (lambda b, h, q, k: (b == h) | (k <= q), "; batch 0 only; head 0 only"),
        (lambda b, h, q, k: k <= q, "may attend"),
    ):
        words = Reader(regard.where(function)._repr_html_()).words
        assert words[-1].endswith(told)


def test_a_function_that_cannot_be_drawn_is_written():
    def fail(b, h, q, k):
        raise ZeroDivisionError

    assert "<img" not in regard.where(fail)._repr_html_()
    assert "where" in regard.where(fail)._repr_html_()


def test_steps_show_the_numbers_of_the_text():
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 4, 3))
    steps = regard.explain(q, q, q, regard.causal(), tokens=["a", "b", "c", "d"])
    read = Reader(steps["weights"]._repr_html_())
    printed = [x.split()[1:] for x in str(steps["weights"]).splitlines()[2:]]
    assert [x for x in read.cells[5:] if x not in "abcd"] == [
        x for row in printed for x in row
    ]
    large = rng.normal(size=(20, 3))
    text = regard.explain(large, large, large)["weights"]._repr_html_()
    assert text.count("<img") == 1 and "⋮" in text
    assert "head: 0 of 2" in steps._repr_html_()


def test_coverage_prints_and_lists_what_is_missing_first():
    fine = [Covered(name=f"layer {i}", via="sdpa", calls=1) for i in range(60)]
    lost = [Covered(name="odd", via="", reason="not heard")]
    gate = [Covered(name="gate", via="softmax", calls=7, attention=False)]
    coverage = Coverage((*fine, *lost, *gate))
    assert coverage == (*fine, *lost, *gate)
    assert str(coverage).splitlines()[60] == "odd: not heard"
    read = Reader(coverage._repr_html_())
    assert read.cells[5] == "odd" and "not heard" in read.cells
    words = "".join(read.words)
    assert "and 21 more layers" in words and "7 other softmaxes" in words
    assert "no attention was seen" in Coverage(())._repr_html_()


def test_what_is_seen_says_how_to_label_and_waits_for_its_end():
    assert "seen.label(tokenizer.decode)" in make_seen()._repr_html_()
    labelled = make_seen().label(lambda ids: str(ids[0]))
    assert "tokenizer.decode" not in labelled._repr_html_()
    early = Seen()._repr_mimebundle_()
    assert "still being watched" in early["text/plain"]
    assert "still being watched" in early["text/html"]


def test_findings_are_a_table_and_none_is_said():
    assert Findings(()) == () and not Findings(())
    assert (
        "nothing found" in Findings(())._repr_html_()
        and str(Findings(())) == "nothing found"
    )
    found = Finding(what="sink", layer="a", worst={0: 0.5}, numbers={"mass": 0.5})
    text = "error: sink in a, heads 0: mass 0.5. " + found.advice
    assert str(found) == text == str(Findings([found]))
    cells = Reader(Findings([found] * 50)._repr_html_()).cells
    assert cells[5:10] == ["error", "sink", "a", "heads 0: mass 0.5", found.advice]
    assert len(cells) == 5 * 41
    bare = Finding(what="sink", layer="", numbers={"mass": 0.5})
    assert str(bare) == f"error: sink in the model itself: mass 0.5. {found.advice}"


def test_a_page_is_no_megabytes_of_text():
    page = make_page(make_seen().recording)
    assert len(repr(page)) < 200 and "<!doctype" not in page._repr_html_()


def test_figures_show_themselves(monkeypatch):
    rng = np.random.default_rng(0)
    figures = [
        plot_weights(rng.random((4, 4))),
        plot_mask(regard.causal()),
        plot_table(make_seen().table()),  # wide
        plot({"loss": np.arange(1, 9)}),
    ]
    for figure in figures:
        assert isinstance(figure, Figure)
        found = figure._repr_mimebundle_(include=None, exclude=None)
        assert found["text/plain"] == str(figure)
        svg = found["image/svg+xml"]
        assert svg.startswith("<svg") and len(svg) <= 50_000 and "<text" not in svg
        width, height = (
            float(re.search(f'^<svg[^>]* {x}="([0-9]+)"', svg)[1])
            for x in ("width", "height")
        )
        inches = figure.get_size_inches()
        assert width == pytest.approx(min(660, 96 * inches[0]), abs=1)
        assert height / width == pytest.approx(inches[1] / inches[0], rel=0.01)
        assert "<script" not in svg and figure._mime_()[0] == "image/svg+xml"
    monkeypatch.setattr(notebook_figure, "LARGE", 100)
    found = figures[1]._repr_mimebundle_()
    assert sorted(found) == ["image/png", "text/plain"]
    data = base64.b64decode(found["image/png"])
    assert data.startswith(b"\x89PNG")
    kind, link = figures[1]._mime_()
    assert kind == "image/png" and link == f"data:image/png;base64,{found['image/png']}"


def test_a_table_prints_in_a_notebook_too(monkeypatch):
    """Rich asks IPython whether it is in a notebook, and then draws on its own."""
    table = make_seen().table()
    before = str(table)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(table) == before and "entropy" in before
