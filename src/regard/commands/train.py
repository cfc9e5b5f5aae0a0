"""regard train: train a small model on a puzzle or a text, in minutes.

    task → batches → nn/train.py → loss curve, held-out accuracy, three samples

Next: nn/train.py
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from regard.terminal import (
    raise_usage_errors,
    remove_control,
    require_extras,
    write_epilog,
)

if TYPE_CHECKING:
    from regard.nn.tasks import Task

SIZES = ("layers", "width", "heads", "dropout")
TASKS = ("copy", "reverse", "sort", "addition", "text")
STEPS = {"copy": 400, "reverse": 400, "sort": 2000, "addition": 2000, "text": 2000}
COUNT = click.IntRange(min=1)
TOKENS, LENGTH = "bytes", 128


@click.command(
    short_help="Train a small model on a puzzle or a text.",
    epilog=write_epilog(
        "regard train copy", "run the same command again to resume a stopped run."
    ),
)
@click.argument("task", type=click.Choice(TASKS))
@click.argument("file", required=False, type=click.Path())
@click.option(
    "--folder", type=click.Path(), help="Folder of the run; by default runs/TASK."
)
@click.option(
    "--tokens",
    default=TOKENS,
    show_default=True,
    help="Tokens of a text: bytes, characters, or a model, to use its tokenizer.",
)
@click.option(
    "--steps", type=COUNT, help="Training steps; the default depends on the task."
)
@click.option(
    "--batch", type=COUNT, default=64, show_default=True, help="Examples per step."
)
@click.option("--rate", default=3e-3, show_default=True, help="Peak learning rate.")
@click.option(
    "--layers", type=COUNT, default=2, show_default=True, help="Number of layers."
)
@click.option(
    "--width", type=COUNT, default=64, show_default=True, help="Width of the model."
)
@click.option(
    "--heads", type=COUNT, default=4, show_default=True, help="Heads per layer."
)
@click.option(
    "--length",
    type=COUNT,
    default=LENGTH,
    show_default=True,
    help="Sequence length for a text, in tokens.",
)
@click.option(
    "--dropout",
    default=0.0,
    show_default=True,
    help="Dropout rate.",
)
@click.option(
    "--precision",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Dtype of the forward pass.",
)
@click.option(
    "--seed", default=0, show_default=True, help="Seed of weights and batches."
)
def train(
    *,
    task: str,
    file: str | None,
    folder: str | None,
    tokens: str,
    steps: int | None,
    length: int,
    **options: Any,
) -> None:
    """Train a small model on TASK; text needs a FILE. A stopped run can be resumed."""
    require_extras("torch")
    import torch

    from regard.nn.decoder import CausalTransformer
    from regard.nn.train import Plan
    from regard.nn.train import train as run
    from regard.plain.config import Config
    from regard.show.loss_curve import draw_curve

    chosen = read_task(task, file, tokens, length)
    place = Path(folder or f"runs/{task}")
    sizes = {name: options.pop(name) for name in SIZES}
    count = steps or STEPS[task]
    warmup = min(100, count // 4)
    with raise_usage_errors():
        config = Config(vocabulary=chosen.vocabulary, context=chosen.length, **sizes)
        plan = Plan(steps=count, warmup=warmup, save_every=100, **options)
    if options["seed"] >= 2**63:
        raise click.UsageError(f"--seed {options['seed']}, expected below 2**63.")
    torch.manual_seed(options["seed"])
    model = CausalTransformer(config)
    losses = run(model, chosen, plan, place)
    if os.environ.get("RANK", "0") != "0":  # under torchrun only rank 0 prints
        return
    click.echo(draw_curve(losses))
    report(model, chosen)
    save_figure(task, losses, place)


def read_task(task: str, file: str | None, tokens: str, length: int) -> Task:
    """Return the task that the arguments name."""
    from regard.nn.tasks import PUZZLES, read_text
    from regard.nn.weights import load

    if task != "text":
        if file is not None:
            raise click.UsageError(f"{task} generates its data, but got {file}.")
        if (tokens, length) != (TOKENS, LENGTH):
            raise click.UsageError(f"--tokens and --length do not apply to {task}.")
        return PUZZLES[task]()
    if file is None:
        raise click.UsageError("FILE is missing. Write: regard train text FILE")
    if tokens not in ("bytes", "characters"):
        return read_text(file, load(tokens)[1], length=length)
    return read_text(file, cast(Any, tokens), length=length)


def report(model: Any, task: Any) -> None:
    """Print the held-out loss or accuracy of the model, and three samples."""
    from regard.nn.generation import generate
    from regard.nn.tasks import Text, measure_accuracy
    from regard.nn.train import evaluate_loss

    shown, _ = task.batch(3, 0, 0, held_out=True)
    if isinstance(task, Text):
        click.echo(
            f"loss on the held-out tenth: {evaluate_loss(model, task):.4f} per token"
        )
        start = task.length // 2
    else:
        right = measure_accuracy(model, task)
        click.echo(f"{right:.1%} of 1,000 held-out answers are exactly right")
        start = task.prompt
    for row in shown.tolist():
        (new,) = generate(model, [row[:start]], task.length - start)
        prompt, answer = (remove_control(task.show(x)) for x in (row[:start], new))
        click.echo(f"  {prompt}▸{answer}")


def save_figure(name: str, losses: list[float], folder: Path) -> None:
    """Save the loss curve in the run's folder, if matplotlib is installed."""
    from regard.show.loss_curve import plot

    try:
        plot({name: losses}).savefig(folder / "loss.png")
    except ImportError as missing:
        click.echo(f"no figure: {missing}", err=True)
    else:
        click.echo(f"the run and its loss curve are in {folder}")
