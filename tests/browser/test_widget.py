"""The widget: the real Python side and the real page, with a wire of our own between.

A notebook's wire is a comm; `comm.create_comm` is where a front end brings its own.
"""

import base64
import json
import queue
import re
import time

import comm
import pytest
from comm.base_comm import BaseComm
from recordings import RECORDINGS, make_recording

from regard.errors import OptionError
from regard.masks.patterns import causal

HOST = """([state, text]) => {
  const heard = {};
  globalThis.state = state;
  globalThis.outbox = [];
  const model = {
    get: (name) => globalThis.state[name],
    set: (name, value) => (globalThis.state[name] = value),
    save_changes: () => globalThis.outbox.push({ method: "update", state: { address: globalThis.state.address } }),
    on: (name, act) => (heard[name] ??= []).push(act),
    off: (name, act) => (heard[name] = heard[name].filter((x) => x !== act)),
    send: (content) => globalThis.outbox.push({ method: "custom", content }),
  };
  globalThis.tell = (name, ...given) => (heard[name] ?? []).forEach((act) => act(...given));
  const style = document.createElement("style");
  style.textContent = state._css;
  document.head.append(style);
  const blob = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
  return import(blob).then(({ default: { render } }) => {
    globalThis.leave = render({ model, el: document.body });
  });
}"""
HEAR = """([content, texts]) => {
  const views = texts.map((text) => new DataView(Uint8Array.from(atob(text), (x) => x.charCodeAt(0)).buffer));
  globalThis.tell("msg:custom", content, views);
}"""


class Wire(BaseComm):
    """What a widget sends, in the order in which it does."""

    def __init__(self, *args, **options):
        self.sent = queue.SimpleQueue()
        super().__init__(*args, **options)

    def publish_msg(self, _, data=None, metadata=None, buffers=None, **__):
        json.dumps(data, ensure_ascii=False).encode()  # as a notebook's wire does
        self.sent.put((data, buffers or []))


class Cell:
    """A cell that shows a widget."""

    def __init__(self, page, widget):
        self.page, self.widget, self.troubles = page, widget, []
        page.on("console", lambda x: x.type == "error" and self.troubles.append(x.text))
        page.on("pageerror", lambda error: self.troubles.append(str(error)))
        page.on("dialog", lambda dialog: self.troubles.append(dialog.message))
        page.on(
            "request",
            lambda x: x.url[:5] in ("http:", "https") and self.troubles.append(x.url),
        )
        state = widget.get_state()
        wanted = {name: state[name] for name in ("body", "address", "height", "_css")}
        page.evaluate(HOST, [wanted, state["_esm"]])

    def carry(self, until, seconds=20):
        """Carry messages both ways until something holds."""
        end = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < end, (self.troubles, self.page.inner_text("body"))
            for data in self.page.evaluate("() => globalThis.outbox.splice(0)"):
                self.widget.comm.handle_msg({"content": {"data": data}, "buffers": []})
            while not self.widget.comm.sent.empty():
                data, buffers = self.widget.comm.sent.get()
                if data.get("method") == "custom":
                    texts = [base64.b64encode(x).decode() for x in buffers]
                    self.page.evaluate(HEAR, [data["content"], texts])
            self.page.wait_for_timeout(10)

    def text(self, name):
        return self.page.locator(f"[data-at={name}]").text_content()


@pytest.fixture
def show(browser, monkeypatch):
    monkeypatch.setattr(comm, "create_comm", Wire)
    cells = []

    def open_it(name, **options):
        seen = RECORDINGS[name]()[0] if isinstance(name, str) else name
        widget = seen.widget(**options)
        cells.append(Cell(browser.new_page(), widget))
        return cells[-1]

    yield open_it
    for cell in cells:
        cell.page.close()
        cell.widget.close()
        assert cell.troubles == []


def test_a_cell_shows_all_heads_and_opens_one(show):
    cell = show("causal", address="v=heads")
    cards = cell.page.locator("a.card canvas")
    cell.carry(lambda: cards.count() == 6)
    cell.page.locator("a.card").nth(4).click()
    badge = cell.page.locator("[data-at=badge][data-state=exact]")
    cell.carry(lambda: badge.count() == 1)
    assert cell.page.url == "about:blank"  # the address bar is not ours
    cell.carry(lambda: "l=1&h=1" in cell.widget.address)
    _, weights = RECORDINGS["causal"]()
    box = cell.page.locator("canvas.plane").bounding_box()
    cell.page.mouse.click(box["x"] + 140, box["y"] + 300)
    cell.carry(lambda: "weights add to 1" in cell.text("row"))
    query = int(cell.text("row").split("query ")[1].split()[0])
    top = weights[0, 1][1, query].copy()
    top[top != top] = 0
    shown = cell.page.locator("[data-at=row] tr:has(td)").first.inner_text().split()
    assert int(shown[0]) == top.argmax()
    assert float(shown[-1]) == pytest.approx(top.max(), rel=1e-3)


def test_a_cell_opens_with_the_text(show):
    cell = show("causal", address="sel=90&hs=1.2")
    tinted = cell.page.locator("[data-at=reading][data-state=exact]")
    cell.carry(lambda: tinted.count() == 1)
    cell.page.hover("[data-token='33']")
    _, weights = RECORDINGS["causal"]()
    shown = cell.text("sentence").rpartition(": ")[2]
    assert float(shown) == pytest.approx(weights[0, 1][2, 90, 33], rel=5e-4)
    cell.page.click("[data-token='40']")
    cell.carry(lambda: "sel=40" in cell.widget.address)
    cell.carry(lambda: cell.text("sentence").startswith("40 “·the” attends most to"))


def test_a_cell_has_pictures_beside_the_text(show):
    cell = show("images", address="v=text&sel=28")
    pictures = cell.page.locator("[data-at=images] canvas")
    cell.carry(lambda: "attention is on this picture" in cell.text("images"))
    assert pictures.count() == 2
    box = pictures.nth(1).bounding_box()
    cell.page.mouse.click(box["x"] + 5, box["y"] + 5)
    cell.carry(lambda: "sel=18" in cell.widget.address)
    cell.carry(lambda: "picture2(0,0)" in cell.text("chosen"))


def test_a_cell_has_words_over_the_time_of_a_sound(show):
    cell = show("sound", address="v=text")
    rows = cell.page.locator("[data-at=strongest] tr")
    cell.carry(lambda: rows.count() == 16)


def test_a_cell_has_the_difference_of_two_recordings(show):
    (one, dense), (other, more) = (
        make_recording((9, 9), layers=1, heads=2, mask=causal(), seed=x) for x in (0, 5)
    )
    cell = show(one.beside(other), address="v=text&sel=8&two=diff")
    ready = cell.page.locator("[data-at=reading][data-state=exact]")
    cell.carry(lambda: ready.count() == 1)
    cell.page.locator("[data-token='3']").hover()
    change = (more[0, 0] - dense[0, 0])[:, 8, 3].mean()
    cell.carry(lambda: " → 3 “·on”: " in cell.text("sentence"))
    found = re.search(r": ([+−-]?[\d.e-]+) \(A", cell.text("sentence"))[1]
    assert float(found) == pytest.approx(change, rel=2e-3, abs=1e-5)


def test_python_may_move_the_map(show):
    cell = show("causal", address="l=0&h=2")
    badge = cell.page.locator("[data-at=badge][data-state=exact]")
    cell.carry(lambda: badge.count() == 1)
    assert cell.page.locator("[data-at=head]").input_value() == "2"
    cell.page.evaluate("() => { state.address = 'l=1&h=0'; tell('change:address'); }")
    cell.carry(lambda: cell.page.locator("[data-at=layer]").input_value() == "1")


def test_no_token_is_run_or_breaks_the_wire(show):
    cell = show("hostile", address="v=heads")
    cell.carry(lambda: cell.page.locator("a.card canvas").count() == 2)
    cell.page.locator("a.card").first.click()
    cell.carry(
        lambda: cell.page.locator("[data-at=badge][data-state=exact]").count() == 1
    )
    cell.page.locator("canvas.plane").click(position={"x": 200, "y": 200})
    cell.carry(lambda: "weights add" in cell.text("row"))
    assert cell.page.evaluate("() => window.hacked") is None


def test_what_cannot_be_answered_is_said(show):
    cell = show("causal")
    for name, place, words in (
        ("row", {"sequence": 0, "layer": 9, "head": 0, "query": 0}, "no layer 9"),
        ("files", {}, "cannot be asked"),
        (
            "row",
            {"sequence": 0, "layer": 0, "head": 0, "query": "../x"},
            "whole number",
        ),
    ):
        cell.widget.reply({"id": "mine", "name": name, "place": place})
        found = []
        while not found or found[-1].get("id") != "mine":
            found.append(cell.widget.comm.sent.get(timeout=5)[0].get("content", {}))
        assert words in found[-1]["error"]


def test_without_widgets_there_is_a_page_or_a_sentence(show):
    short, _ = show("five").widget._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in short
    assert short["text/html"].startswith("<iframe")
    assert (
        "<script>alert"
        not in show("hostile").widget._repr_mimebundle_()[0]["text/html"]
    )


def test_a_cell_has_a_height():
    with pytest.raises(OptionError, match="expected pixels"):
        RECORDINGS["five"]()[0].widget(height=0)
