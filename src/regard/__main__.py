"""The command line: regard generate, show, check, train, learn.

A command loads what it needs when it runs, so that help comes at once. What a user did
wrong is said in one sentence, without a traceback; `regard --debug …` shows it.

Next: nn/generation.py
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from regard.errors import RegardError
from regard.learn.__main__ import learn

if TYPE_CHECKING:
    from regard.nn.tasks import Task
    from regard.seen import Seen

SIZES = ("layers", "width", "heads", "dropout")
TASKS = ("copy", "reverse", "sort", "addition", "text")
STEPS = {"copy": 400, "reverse": 400, "sort": 2000, "addition": 2000, "text": 2000}


class OneSentence(click.Group):
    """Commands whose errors are sentences."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (RegardError, ImportError) as error:
            if ctx.params.get("debug"):
                raise
            reason = str(error)
            if isinstance(error, ModuleNotFoundError):
                reason = f'this needs {error.name}: pip install "regard[torch]"'
            raise click.ClickException(reason) from error


@click.group(cls=OneSentence)
@click.option("--debug", is_flag=True, help="Show where an error comes from.")
@click.version_option(package_name="regard")
def main(*, debug: bool) -> None:
    """Attention you can read, see and scale."""


main.add_command(learn)


@main.command()
@click.argument("prompt")
@click.option("--model", required=True, help="A GGUF file or a safetensors folder.")
@click.option("-n", "--n-new", default=128, show_default=True, help="New tokens.")
@click.option("--chat/--raw", default=None, help="Ask, or let it go on with the text.")
@click.option("--temperature", default=0.0, help="0, the default, is greedy.")
@click.option("--top-k", type=int, help="Only the k likeliest tokens.")
@click.option("--top-p", type=float, help="Only the likeliest that reach p together.")
@click.option("--min-p", type=float, help="Only those with min-p of the likeliest.")
@click.option("--repetition", default=1.0, help="Above 1: repeats are less likely.")
@click.option("--seed", default=0, show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32")
def generate(
    *,
    prompt: str,
    model: str,
    n_new: int,
    chat: bool | None,
    seed: int,
    dtype: str,
    **sampling: Any,
) -> None:
    """Stream what a model says to PROMPT; "-" reads the prompt from stdin."""
    import torch

    from regard.nn.generation import stream
    from regard.nn.weights import load
    from regard.plain.sample import Sampling

    chosen = Sampling(**sampling)
    network, tokenizer = load(model, dtype=getattr(torch, dtype))
    text = sys.stdin.read() if prompt == "-" else prompt
    if chat or (chat is None and tokenizer.template is not None):
        text = tokenizer.chat([{"role": "user", "content": text}])
        tokens = tokenizer.encode(text, whole=False)
    else:
        tokens = tokenizer.encode(text)
        click.echo(clean(text), nl=False)
    began, count = time.perf_counter(), 0

    def listen() -> Iterator[int]:
        nonlocal count
        stop = tokenizer.stop
        steps = stream(network, [tokens], n_new, sampling=chosen, seed=seed, stop=stop)
        for (token,) in steps:
            count += 1
            if token is not None:
                yield token

    for piece in tokenizer.stream(listen()):
        click.echo(clean(piece), nl=False)
    click.echo()
    speed = count / (time.perf_counter() - began)
    click.echo(
        f"{len(tokens)} tokens read, {count} new, {speed:.1f} a second", err=True
    )


@main.command()
@click.argument("text")
@click.option("--model", help="A GGUF file or a safetensors folder.")
@click.option("-n", "--n-new", default=0, help="Let it go on with so many tokens.")
@click.option("--save", type=click.Path(), help="Keep the recording in this file.")
@click.option("--page", type=click.Path(), help="Write the map as one HTML file.")
@click.option("--map", "draw", is_flag=True, help="Show the map in a browser.")
def show(
    *,
    text: str,
    model: str | None,
    n_new: int,
    save: str | None,
    page: str | None,
    draw: bool,
) -> None:
    """Run a model on TEXT, or on a file, and say what its attention did.

    Without a model, TEXT is a recording that was saved, and its map is shown.
    """
    from regard.seen import open_seen

    if model is None:
        opened = open_seen(text)
        if page:
            write_page(opened, page)
        if draw or not page:
            opened.show()
        return
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from regard.lens.watch import watch
    from regard.nn.generation import generate as go_on
    from regard.nn.weights import load

    if Path(text).is_file():
        text = Path(text).read_text(encoding="utf-8", errors="replace")
    network, tokenizer = load(model)
    tokens = tokenizer.encode(text)[: network.config.context - n_new]
    with watch(network) as seen, torch.inference_mode():
        if n_new:
            (new,) = go_on(network, [tokens], n_new, stop=tokenizer.stop)
            click.echo(clean(tokenizer.decode(new)))
        else:
            network(torch.tensor([tokens]))
    seen = seen.label(tokenizer.decode)
    click.echo(str(seen).splitlines()[0])
    with Progress(console=Console(stderr=True), transient=True) as bar:
        line = bar.add_task("statistics", total=len(seen.records))
        table = seen.table(progress=lambda n, _: bar.update(line, completed=n))
    click.echo(str(table.by_layer()))
    for name in ("sink", "previous", "induction"):
        first = table.sort(name).rows[0]
        place = f"layer {first['layer']} head {first['head']}, {first[name]:.3f}"
        known = first[name] == first[name]  # nan is no number, not even itself
        click.echo(f"most {name}: {place if known else '–'}")
    if save:
        seen.save(save)
        click.echo(f"the recording is in {save}: regard show {save}")
    if page:
        write_page(seen, page)
    if draw:
        seen.show()


def write_page(seen: Seen, path: str) -> None:
    """Write the map as a file, after saying how large it is."""
    from rich.console import Console
    from rich.progress import Progress

    from regard.show.page import make_page

    with Progress(console=Console(stderr=True), transient=True) as bar:
        line = bar.add_task("page", total=len(seen.records))
        page = make_page(seen, progress=lambda n, _: bar.update(line, completed=n))
    click.echo(str(page))
    page.write(path)
    click.echo(f"the map is in {path}, with the text that the model read")


class Refused(click.ClickException):
    """What cannot be judged at all; 1 is for what was judged and failed."""

    exit_code = 2


@main.command()
@click.argument("place")
@click.option("--level", default="complete", help="basic, complete or kernel.")
@click.option("--layout", help="Axes of q, k, v: bhnd, bnhd, hnd, bnd, nd, bn(hd), …")
@click.option("--order", help="qkv or qvk.")
@click.option("--library", help="numpy, torch or jax.")
@click.option("--device", help="cpu, cuda, …")
@click.option("--true-means", help="Of a mask: attend, hide or added.")
@click.option("--mask-axes", help="bhqk, bqk, qk or bk.")
@click.option("--causal-from", help="Where row 0 stands if Nq < Nk: start or end.")
@click.option("--returns", help="out; out,weights; out,lse; …")
@click.option("--shared-heads", is_flag=True, default=None, help="It takes Hk < H.")
@click.option("--convention", help="module:name of a Convention, for all the rest.")
@click.option("--seed", default=0, show_default=True)
@click.option("--limit", default=30.0, show_default=True, help="Seconds for a call.")
@click.option("--markdown", type=click.Path(), help="Write the report to this file.")
@click.option("--json", type=click.Path(), help="The same for programs.")
@click.option("--junit", type=click.Path(), help="The same for CI.")
def check(*, place: str, level: str, convention: str | None, **options: Any) -> None:
    """Name the pitfalls that an attention falls into; PLACE is module:function.

    Exits with 0 if it falls into none, 1 if into some, 2 if it cannot be judged.
    """
    from dataclasses import replace

    from regard.judge.convention import Convention, read_convention
    from regard.judge.judgement import check as judge
    from regard.judge.judgement import load_attention

    files = {name: options.pop(name) for name in ("markdown", "json", "junit")}
    seed, limit = options.pop("seed"), options.pop("limit")
    try:
        fn = load_attention(place)
        words = load_attention(convention) if convention else read_convention(fn)
        if not isinstance(words, Convention):
            raise Refused(f"{convention} is a {type(words).__name__}, no Convention.")
        if options["returns"] is not None:
            options["returns"] = tuple(options["returns"].split(","))
        given = {name: value for name, value in options.items() if value is not None}
        report = judge(fn, replace(words, **given), level=level, seed=seed, limit=limit)
    except (RegardError, ModuleNotFoundError) as error:
        raise Refused(str(error)) from error
    report.show()
    written = {
        "markdown": report.to_markdown,
        "json": report.to_json,
        "junit": report.to_junit,
    }
    for kind, path in files.items():
        if path is not None:
            Path(path).write_text(written[kind](), encoding="utf-8")
    sys.exit(0 if report.ok else 1)


def clean(text: str) -> str:
    """Drop control characters: a model must not steer the terminal."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


@main.command()
@click.argument("task", type=click.Choice(TASKS))
@click.argument("file", required=False)
@click.option("--folder", help="Where the run is kept; runs/TASK unless given.")
@click.option(
    "--tokens",
    default="bytes",
    show_default=True,
    help="Of a text: bytes, characters, or a model whose tokenizer to use.",
)
@click.option("--steps", type=int, help="Steps of training; each task has its own.")
@click.option("--batch", default=64, show_default=True)
@click.option("--rate", default=3e-3, show_default=True)
@click.option("--layers", default=2, show_default=True)
@click.option("--width", default=64, show_default=True)
@click.option("--heads", default=4, show_default=True)
@click.option("--length", default=128, show_default=True, help="Of a window of text.")
@click.option("--dropout", default=0.0, show_default=True)
@click.option(
    "--precision",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
)
@click.option("--seed", default=0, show_default=True)
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
    """Train a small model on TASK; on text, give FILE. Stopped, it goes on later."""
    import torch

    from regard.nn.decoder import CausalTransformer
    from regard.nn.train import Plan
    from regard.nn.train import train as run
    from regard.plain.config import Config
    from regard.show.curve import draw

    chosen = read_task(task, file, tokens, length)
    place = Path(folder or f"runs/{task}")
    sizes = {name: options.pop(name) for name in SIZES}
    torch.manual_seed(options["seed"])
    model = CausalTransformer(
        Config(vocabulary=chosen.vocabulary, context=chosen.length, **sizes)
    )
    count = steps or STEPS[task]
    plan = Plan(steps=count, warmup=min(100, count // 4), save_every=100, **options)
    try:
        losses = run(model, chosen, plan, place)
    except KeyboardInterrupt as stopped:
        raise click.ClickException(str(stopped) or "stopped.") from None
    if os.environ.get("RANK", "0") != "0":  # started by torchrun: one speaks
        return
    click.echo(draw(losses))
    report(model, chosen)
    save_figure(task, losses, place)


def read_task(task: str, file: str | None, tokens: str, length: int) -> Task:
    """Return the task that the arguments name."""
    from regard.nn.tasks import PUZZLES, read_text
    from regard.nn.weights import load

    if task != "text":
        if file is not None:
            raise click.UsageError(f"{task} makes its own data, given {file}.")
        return PUZZLES[task]()
    if file is None:
        raise click.UsageError("which text? Write: regard train text FILE")
    if tokens not in ("bytes", "characters"):
        return read_text(file, load(tokens)[1], length=length)
    return read_text(file, cast(Any, tokens), length=length)


def report(model: Any, task: Any) -> None:
    """Print how good the model is on what it has not seen."""
    from regard.nn.generation import generate
    from regard.nn.tasks import Text, measure
    from regard.nn.train import evaluate

    shown, _ = task.batch(3, 0, 0, held_out=True)
    if isinstance(task, Text):
        click.echo(f"loss of the held-out tenth: {evaluate(model, task):.4f} a token")
        start = task.length // 2
    else:
        right = measure(model, task)
        click.echo(f"{right:.1%} of 1,000 held-out answers are exactly right")
        start = task.prompt
    for row in shown.tolist():
        (new,) = generate(model, [row[:start]], task.length - start)
        click.echo(f"  {clean(task.show(row[:start]))}▸{clean(task.show(new))}")


def save_figure(name: str, losses: list[float], folder: Path) -> None:
    """Keep the loss curve beside the run, if matplotlib is there."""
    from regard.show.curve import plot

    try:
        plot({name: losses}).savefig(folder / "loss.png")
    except ImportError as missing:
        click.echo(f"no figure: {missing}", err=True)
    else:
        click.echo(f"the run and its loss curve are in {folder}")


if __name__ == "__main__":
    main()
