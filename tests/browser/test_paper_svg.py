"""An SVG for a paper in a real browser: its letters fit their boxes, with its own font."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import pytest
from test_paper_figures import WORDS, make_seen

from regard.show.figures import plot_tinted_text

MEASURE = """async () => {
  await document.fonts.ready;
  const sizeOf = (id) => document.getElementById(id).getBBox();
  const faces = [...document.fonts].map(({ family, status }) => [family.replaceAll('"', ""), status]);
  const tokens = [...document.querySelectorAll("[id^=box-]")].map(({ id }) => {
    const text = document.querySelector(`#${id.replace("box", "token")} text`);
    return [id, sizeOf(id).x, sizeOf(id).width, Number(text.getAttribute("x")), text.getComputedTextLength(), text.textContent];
  });
  return { faces, tokens };
}"""


def test_letters_fit_their_boxes_with_the_font_of_the_file(browser, tmp_path):
    seen, _ = make_seen()
    path = tmp_path / "a.svg"
    plot_tinted_text(seen, 4).savefig(path)
    path.write_text(
        path.read_text("utf-8").replace("DejaVu Sans", "Nowhere Sans"), "utf-8"
    )
    page = browser.new_page()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    found = page.evaluate(MEASURE)
    page.close()
    assert found["faces"] == [["Nowhere Sans", "loaded"]]  # no font of this machine
    assert [x for x in asked if not x.startswith(("file:", "data:"))] == []
    assert len(found["tokens"]) == len(WORDS)
    for name, x, width, text_x, text_width, text in found["tokens"]:
        assert text, name
        assert x <= text_x, name
        assert text_x + text_width == pytest.approx(x + width - 0.3, abs=0.5), name
