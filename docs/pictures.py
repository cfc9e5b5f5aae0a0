# ruff: noqa: T201 (it is no part of a package)
"""Photograph the page in a real browser: text, heads, map, dark, narrow, other models.

python docs/pictures.py SmolLM2-135M-Instruct.Q4_1.gguf MiniLM-folder docs/pictures
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import which

import torch
from coloured_squares import name_colours
from figures import watch_vision
from playwright.sync_api import Browser, sync_playwright
from tones import hear_tones
from torch.nn import functional as F  # noqa: N812
from transformers import (
    AutoModel,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
)

import regard
from regard.seen import Seen
from regard.show.page import make_page
from regard.show.server import start_server

TEXT, STORY = (Path(__file__).parent / x for x in ("pitfalls.md", "story.txt"))
FIRST, AGAIN = 900, 450  # tokens; the last ones repeat the first ones
CHANNELS = 64  # of a small model that learns to pick every second letter
READY = """() => document.querySelector("[data-view=text]")
  ? document.querySelector("[data-at=reading][data-state=exact]")
  : document.querySelector("[data-view=map]")
  ? document.querySelector("[data-at=badge][data-state=exact]")
    && document.querySelector("[data-at=numbers] dd").textContent !== "–"
  : !/to come/.test(document.querySelector("[data-at=status]").textContent)
    && document.querySelectorAll("a.card").length > 0
    && !document.querySelector("a.card .small:empty")"""


@dataclass(frozen=True)
class Shot:
    """One picture: of which recording, at which address, in which window."""

    name: str
    seen: str
    address: str = ""
    size: tuple[int, int] = (1280, 860)
    dark: bool = False
    point: tuple[float, float] | None = None  # of the map, where the pointer is
    file: bool = False  # a page without a server


CELLS = f"l=17&h=5&i={FIRST + 203}&j=204&z=21&pin={FIRST + 203}&lo=-4"
TEXT_VIEW = f"v=text&sel={FIRST + 203}&mix=max&tl=-1"
PASSAGE = f"v=text&sel={FIRST + 200}-{FIRST + 210}&mix=max&tl=-1"
PLOT = "px=entropy&py=induction&box=,,0.05,"
SHOTS = (
    Shot("story", "story", "v=text&sel=147&mix=max&tl=-1", size=(1280, 440)),
    Shot("text", "smollm", TEXT_VIEW, size=(1280, 760)),
    Shot("text-dark", "smollm", PASSAGE, size=(1280, 760), dark=True),
    Shot("text-narrow", "smollm", TEXT_VIEW, size=(390, 800)),
    Shot("heads", "smollm", "v=heads", size=(1280, 1440)),
    Shot("heads-dark", "smollm", "v=heads", size=(1280, 1440), dark=True),
    Shot("plot", "smollm", f"v=heads&{PLOT}", size=(1280, 900), dark=True),
    Shot("map", "smollm", "l=17&h=5&lo=-4", point=(0.35, 0.75)),
    Shot("map-dark", "smollm", "l=17&h=5&cmp=side&vs=16.0&lo=-4", dark=True),
    Shot("difference", "smollm", "l=17&h=5&cmp=diff&vs=17.6&lo=-4"),
    Shot("cells", "smollm", CELLS, point=(0.5, 0.55)),
    Shot("narrow", "smollm", CELLS, size=(850, 600), point=(0.5, 0.6)),
    Shot("page", "bert", "v=heads", size=(1000, 620), file=True),
    Shot("bert", "bert", "q=0&l=2&h=6&pin=9&lo=-3", size=(1280, 760)),
    Shot("across", "pair", "l=2&h=1&pin=6&lo=-3", size=(1280, 600), point=(0.5, 0.6)),
    Shot("vit", "vit", "l=0&h=0&pin=0"),
    Shot("images", "images", "v=text&mix=max&sel=43&tl=-1", size=(1280, 520)),
    Shot("sound", "sound", "v=text&sel=2", size=(1280, 520)),
)


def main(smollm: str, minilm: str, folder: str) -> None:
    """Write all pictures."""
    torch.manual_seed(0)
    seen = {
        "story": read_story(smollm),
        "smollm": read_page(smollm),
        "bert": read_sentences(minilm),
        "pair": pick_letters(),
        "vit": look_at_square(),
        "images": name_colours(),
        "sound": hear(),
    }
    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=which("chromium"))
        for shot in SHOTS:
            take(browser, shot, seen[shot.seen], Path(folder))
        browser.close()


def take(browser: Browser, shot: Shot, seen: Seen, folder: Path) -> None:
    """Open the page as a reader would, and write the picture."""
    page = browser.new_page(
        viewport={"width": shot.size[0], "height": shot.size[1]},
        color_scheme="dark" if shot.dark else "light",
        reduced_motion="reduce",
    )
    with host(shot, seen) as url:
        page.goto(f"{url}#{shot.address}")
        page.wait_for_function(READY, timeout=120_000)
        if shot.point:
            box = page.locator("[data-at=plane]").bounding_box()
            assert box
            x, y = shot.point
            page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
        page.wait_for_timeout(700)
        page.screenshot(path=folder / f"{shot.name}.png")
    page.close()


@contextmanager
def host(shot: Shot, seen: Seen) -> Iterator[str]:
    """Give the address of a server, or of a file."""
    if not shot.file:
        with start_server(seen.recording) as running:
            yield running.url
        return
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "map.html"
        make_page(seen.recording).write(path)
        yield path.as_uri()


def read_page(path: str) -> Seen:
    """Watch SmolLM2 read a page of these documents, and its beginning once more."""
    model, tokenizer = regard.load(path)
    tokens = tokenizer.encode(TEXT.read_text("utf-8"))[:FIRST]
    tokens += tokens[:AGAIN]
    with regard.watch(model) as seen, torch.inference_mode():
        model(torch.tensor([tokens]))
    return seen.label(tokenizer.decode)


def read_story(path: str) -> Seen:
    """Watch SmolLM2 read a story up to the word before "stone"."""
    model, tokenizer = regard.load(path)
    tokens = tokenizer.encode(STORY.read_text("utf-8").strip())
    with regard.watch(model) as seen, torch.inference_mode():
        logits = model(torch.tensor([tokens]))
    next_word = tokenizer.decode([int(logits[0, -1].argmax())])
    assert next_word == " stone", next_word
    return seen.label(tokenizer.decode)


def read_sentences(folder: str) -> Seen:
    """Watch MiniLM read two sentences, the shorter one padded."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    text = [
        "The old bridge across the river was closed, because the ice had damaged it.",
        "The cat sat on the mat.",
    ]
    inputs = tokenizer(text, padding=True, return_tensors="pt")
    with regard.watch(model) as seen, torch.inference_mode():
        model(**inputs)
    return seen.label(lambda ids: str(tokenizer.decode(ids)))


def pick_letters() -> Seen:
    """Watch a small BART that learned to write every second letter that it read."""
    config = BartConfig(
        vocab_size=40,
        d_model=CHANNELS,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=CHANNELS,
        decoder_ffn_dim=CHANNELS,
        dropout=0.0,
        max_position_embeddings=32,
        init_std=0.12,  # with the usual 0.02 it learns much later
    )
    model = BartForConditionalGeneration(config)
    steps = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(300):
        inputs, answer = draw_letters(32)
        logits = model(**inputs).logits
        loss = F.cross_entropy(logits.flatten(0, 1), answer.flatten())
        steps.zero_grad()
        loss.backward()
        steps.step()
    print(f"loss of the small BART: {loss.item():.3f}")
    inputs, _ = draw_letters(1)
    model.train(mode=False)
    with regard.watch(model) as seen, torch.inference_mode():
        model(**inputs)
    return seen


def draw_letters(count: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return 24 letters with what was written so far, and every second of them."""
    tokens = torch.randint(3, 40, (count, 24))
    answer = tokens[:, ::2]
    before = F.pad(answer[:, :-1], (1, 0), value=2)
    return {"input_ids": tokens, "decoder_input_ids": before}, answer


def look_at_square() -> Seen:
    """Watch a small ViT that learned to name the colour of a square."""
    seen, picture = watch_vision()
    return seen.picture(picture)


def hear() -> Seen:
    """Watch a small Whisper that learned to name tones."""
    seen, words, sound = hear_tones()
    return seen.sound(sound, 1, words=words)


if __name__ == "__main__":
    main(*sys.argv[1:])
