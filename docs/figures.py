"""Draw every kind of figure: steps, heads, numbers, an experiment, training, a picture.

python docs/figures.py SmolLM2-135M-Instruct.Q4_1.gguf docs/pictures
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import regard
from regard.nn.decoder import CausalTransformer
from regard.nn.tasks import Copy
from regard.nn.train import Plan, train
from regard.plain.config import Config
from regard.seen import Seen
from regard.show.figure import plot_gallery, plot_steps, plot_table, plot_weights
from regard.show.patch_overlay import plot_patches
from regard.show.scaling_demo import plot_mistakes, plot_scaling
from regard.show.training import Film, plot_training

TEXT = (
    "The cat sat on the mat because it was warm. The dog, which had chased the cat all "
    "day, sat on the floor because the cat sat on the mat."
)
SIDE, PATCH = 8, 6  # patches of a picture, pixels of a patch


def main(path: str, folder: str) -> None:
    """Write eight figures."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    words = ["Life", "is", "short", "eat", "dessert", "first"]
    x = np.random.default_rng(0).normal(size=(len(words), 4))
    steps = regard.explain(x, x, x, regard.causal(), tokens=words)
    plot_steps(steps).savefig(out / "steps.png", dpi=100)
    model, tokenizer = regard.load(path)
    tokens = tokenizer.encode(TEXT)
    with regard.watch(model) as seen, torch.inference_mode():
        model(torch.tensor([tokens]))
    labels = [tokenizer.decode([i]) for i in tokens]
    head = plot_weights(seen.layer(17), rows=labels, keys=labels, heads=[5])
    head.savefig(out / "head.png", dpi=100)
    plot_gallery(seen).savefig(out / "gallery.png", dpi=110)
    plot_table(seen.table()).savefig(out / "table.png", dpi=100)
    plot_scaling().savefig(out / "scaling.png", dpi=130)
    plot_mistakes().savefig(out / "mistakes.png", dpi=100)
    film_copying(out / "training.png")
    look_at_picture(out / "patches.png")


def film_copying(path: Path) -> None:
    """Draw a head that learns to copy."""
    task = Copy(8)
    sizes = {"vocabulary": task.vocabulary, "context": task.length, "width": 32}
    torch.manual_seed(0)
    model = CausalTransformer(Config(**sizes, layers=2, heads=2, position="rotary"))
    tokens, _ = task.batch(1, 0, 0, held_out=True)
    film = Film(model, tokens, (0, 15, 25, 100))
    plan = Plan(steps=120, rate=1e-2, warmup=20)
    losses = train(model, task, plan, show=False, watch=film)
    labels = list(task.show(tokens[0]))
    figure = plot_training(losses, film, layer=0, head=0, labels=labels)
    figure.savefig(path, dpi=100)


def look_at_picture(path: Path) -> None:
    """Draw where a vision transformer looks that says which colour the square has."""
    seen, picture = watch_vision()
    plot_patches(seen.layer(0), picture=picture).savefig(path, dpi=100)


def watch_vision() -> tuple[Seen, Tensor]:
    """Teach a small ViT to name the colour of the square, and watch it do so."""
    from transformers import ViTConfig, ViTForImageClassification  # noqa: PLC0415

    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_attention_heads": 3, "intermediate_size": 96}
    sizes |= {"num_hidden_layers": 2, "image_size": SIDE * PATCH, "patch_size": PATCH}
    config = ViTConfig(**sizes, num_labels=3, initializer_range=0.1)
    model = ViTForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    pictures, colours = make_pictures(1024)
    for _ in range(200):
        some = torch.randint(1024, (64,))
        loss = F.cross_entropy(model(pictures[some]).logits, colours[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    new, _ = make_pictures(1)  # one it was not trained on
    with regard.watch(model.eval()) as seen, torch.inference_mode():
        model(new)
    return seen, new[0]


def make_pictures(n: int) -> tuple[Tensor, Tensor]:
    """Return noise with one square and six crosses, and the colour of each square."""
    pictures = torch.rand(n, 3, SIDE * PATCH, SIDE * PATCH) * 0.25 + 0.5
    square = torch.zeros(PATCH, PATCH, dtype=torch.bool)
    cross = square.clone()
    square[1:-1, 1:-1] = True
    cross[2:4], cross[:, 2:4] = True, True
    colours = torch.randint(3, (n, 7))
    for picture, row in zip(pictures, colours.tolist(), strict=True):
        places = torch.randperm(SIDE * SIDE)[:7].tolist()
        for m, (place, colour) in enumerate(zip(places, row, strict=True)):
            i, j = (PATCH * x for x in divmod(place, SIDE))
            shape = cross if m else square
            ink = torch.eye(3)[colour, :, None] * 0.8 + 0.1  # red, green or blue
            picture[:, i : i + PATCH, j : j + PATCH][:, shape] = ink
    return pictures, colours[:, 0]


if __name__ == "__main__":
    main(*sys.argv[1:])
