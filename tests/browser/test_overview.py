"""A page whose cells do not all fit: an overview of every head, and the cells of some."""

import numpy as np
import pytest
import torch
from test_held import ASK, read
from test_looks import find_violations

import regard
from regard.masks.patterns import causal, per_head, window
from regard.recording.record import Record, Recording
from regard.show.log_codes import decode
from regard.show.map_source import MapSource, Spot
from regard.show.page import EXACT, make_page

N, HEADS, LIMIT = 1100, 4, 946_000
TEXTS = tuple(f" w{i}" for i in range(N))


def make_record(layer):
    rng = np.random.default_rng(layer)
    q = torch.tensor(rng.normal(size=(HEADS, N, 8)) * 2)
    k = torch.tensor(rng.normal(size=(2, N, 8)) * 2)
    mask = per_head([causal(), causal() & window(50), causal(), causal() & window(9)])
    seen = regard.attention(q, k, k, mask, scale=0.4)
    return Record(
        name=f"layer.{layer}",
        q=q,
        k=k,
        lse=seen.lse,
        scale=0.4,
        q_positions=torch.arange(N),
        k_positions=torch.arange(N),
        mask=mask,
    )


@pytest.fixture(scope="module")
def recording():
    records = tuple(make_record(i) for i in range(3))
    return Recording(model="Tiny", records=records, sequences=(0,) * 3, texts=(TEXTS,))


@pytest.fixture(scope="module")
def page(recording):
    page = make_page(recording, limit=LIMIT)
    assert page.size <= LIMIT
    assert 0 < len(page.exact) < 12
    return page


@pytest.fixture
def url(page, tmp_path):
    page.write(tmp_path / "map.html")
    return (tmp_path / "map.html").as_uri()


def test_an_overview_and_its_cells_are_what_the_server_answers(module, page, recording):
    about, blobs = read(page)
    source = MapSource(recording)
    exact = {(x.layer, x.head) for x in page.exact}
    overview = about["records"][0]["overview"]
    for layer, head in [*exact, next(x for x in places() if x not in exact)]:
        place = {"sequence": 0, "layer": layer, "head": head}
        held = (layer, head) in exact
        for level in (0, 1, 2, overview, overview + 1):
            at = {"level": level, "x": 0, "y": (N - 1) // (256 << level)}
            for how in ("max", "mass") if held or level >= overview else ():
                asked = place | at | {"how": how}
                found = module.evaluate(ASK, [about, blobs, "tile", asked])
                right = source.tile(Spot(0, layer, head), **at, how=how).codes
                shown = decode(np.array(found["codes"], np.uint16).reshape(right.shape))
                off = 2 * EXACT if held else 2.8e-3
                np.testing.assert_allclose(shown, decode(right), rtol=off, atol=2e-9)
        for kind, at in (("row", {"query": 900}), ("column", {"key": 40})):
            if held:
                found = module.evaluate(ASK, [about, blobs, kind, place | at])
                right = getattr(source, kind)(Spot(0, layer, head), *at.values())
                assert found["total"] == pytest.approx(right["total"], rel=2 * EXACT)
                assert found["top"][0]["index"] == right["top"][0]["index"]
            else:
                with pytest.raises(Exception, match="an overview of this head"):
                    module.evaluate(ASK, [about, blobs, kind, place | at])
    small = module.evaluate(ASK, [about, blobs, "gallery", {"sequence": 0, "layer": 1}])
    right = decode(source.gallery(0, 1).codes)
    shape = small["heads"], small["rows"], small["columns"]
    shown = decode(np.array(small["codes"], np.uint16).reshape(shape))
    step = shown.shape[1] / right.shape[1]
    assert step == 1
    np.testing.assert_allclose(shown, right, rtol=2.8e-3, atol=2e-9)


def places():
    return [(layer, head) for layer in range(3) for head in range(HEADS)]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_says_what_is_an_overview(open_url, url, page, scheme, width):
    window = open_url(url, "v=heads", width=width, height=800, scheme=scheme)
    window.await_gallery(12)
    note = window.page.text_content(".note")
    cells = page.overview
    assert f"{cells} × {cells} cells" in note
    assert "an overview of every head" in note
    for x in page.exact:
        assert f"layer {x.layer} head {x.head} ({x.why})" in note
    assert window.page.locator(".tag.cells").count() == len(page.exact)
    assert window.overflow() == 0
    assert find_violations(window) == []
    window.go("v=text")
    window.await_text("mixWords", "^12 heads, mean")
    window.await_text("knownWords", f"^Means below {page.mean:g} are not in this file")
    window.go("v=heads")
    first = page.exact[0]
    window.page.locator(".note a").first.click()
    window.rest()
    assert (window.address["l"], window.address["h"]) == (
        str(first.layer),
        str(first.head),
    )
    assert "exact" in window.text("badge")
    layer, head = next(
        x for x in places() if x not in {(y.layer, y.head) for y in page.exact}
    )
    place = f"{url}#l={layer}&h={head}&i=900&j=880&z=20&pin=900"
    window.page.goto(place)
    window.await_text("badge", f"^overview, {cells} × {cells} cells per pixel$")
    window.await_text("row", "this page has an overview of this head")
    window.hover_middle()
    window.await_text("sentence", "^strongest link from queries|masked$")
    assert window.overflow() == 0
    assert find_violations(window) == []
