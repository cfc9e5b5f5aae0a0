"""The gallery: scripts that import, sentences of computed numbers, an index to look at."""

import ast
import importlib
import json
import shutil
import string
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "gallery"
RESULTS = json.loads((FOLDER / "results.json").read_text("utf-8"))
NAMES = sorted(x.stem for x in FOLDER.glob("*.py") if x.stem not in {"build", "entry"})


@pytest.fixture(autouse=True)
def path(monkeypatch):
    """Import from the folder, and leave no module with a common name behind."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    for name in (*NAMES, "entry", "build"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in (*NAMES, "entry", "build"):
        sys.modules.pop(name, None)


def load(name):
    return importlib.import_module(name)


def test_there_are_ten_entries_and_all_are_listed():
    build = load("build")
    assert len(NAMES) == 10
    assert sorted(build.ORDER) == NAMES == sorted(RESULTS)
    assert list(RESULTS) == list(build.ORDER)


@pytest.mark.parametrize("name", NAMES)
def test_a_script_imports_without_running_a_model(name):
    assert callable(load(name).make)
    assert "Next: " in load(name).__doc__


@pytest.mark.parametrize("name", NAMES)
def test_a_sentence_has_no_number_of_its_own(name):
    tree = ast.parse((FOLDER / f"{name}.py").read_text("utf-8"))
    keywords = [x for x in ast.walk(tree) if isinstance(x, ast.keyword)]
    (node,) = (x.value for x in keywords if x.arg == "sentence")
    sentence = ast.literal_eval(node)
    literal = "".join(part[0] for part in string.Formatter().parse(sentence))
    assert not any(letter.isdigit() for letter in literal)
    fields = {part[1] for part in string.Formatter().parse(sentence)} - {None}
    assert fields == set(RESULTS[name]["numbers"])
    assert sentence.format(**RESULTS[name]["numbers"]) == RESULTS[name]["finding"]


def test_thumbnails_are_small():
    for name in NAMES:
        assert 1_000 < (FOLDER / "thumbnails" / f"{name}.webp").stat().st_size < 30_000


def test_the_document_has_the_sentences():
    text = (ROOT / "docs/gallery.md").read_text("utf-8")
    assert load("build").draw_table(load("build").read_results()) in text


def test_a_page_is_written_and_its_numbers_are_those_that_are_kept(tmp_path):
    entry = load("entry").make_entry("reversed_digits")
    kept = RESULTS["reversed_digits"]["numbers"]
    assert set(entry.numbers) == set(kept)
    assert entry.numbers["head"] == kept["head"]
    assert entry.numbers["share"] == pytest.approx(kept["share"], abs=0.02)
    entry.write(tmp_path / "page.html")
    assert b"Content-Security-Policy" in (tmp_path / "page.html").read_bytes()


def test_the_index_fits_a_phone_and_names_ten_entries(tmp_path, browser):
    build = load("build")
    (tmp_path / "index.html").write_text(build.draw_index(RESULTS), "utf-8")
    shutil.copytree(FOLDER / "thumbnails", tmp_path / "thumbnails")
    page = browser.new_page(viewport={"width": 390, "height": 800})
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "index.html").as_uri())
    cards = page.locator("li")
    assert cards.count() == 10
    for card, found in zip(cards.all(), RESULTS.values(), strict=True):
        assert found["finding"] in card.inner_text()
        assert card.bounding_box()["width"] <= 390
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    drawn = "Array.from(document.images).every(x => x.complete && x.naturalWidth > 0)"
    page.wait_for_function(drawn)
    assert all(url.startswith("file:") for url in asked)
    page.close()
