"""regard generate: stream the output of a model.

    PROMPT → tokens → stream(network, …) → pieces of text, as soon as they are complete

Next: nn/generation.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import click

from regard.terminal import (
    draw_progress,
    raise_usage_errors,
    read_argument,
    remove_control,
    require_extras,
    require_model,
    write_epilog,
)

EXAMPLE = 'regard generate "Why is the sky blue?" --model MODEL.gguf'


@click.command(
    short_help="Generate text from a prompt.",
    epilog=write_epilog(EXAMPLE, "regard show displays the attention of the model."),
)
@click.argument("prompt")
@click.option(
    "--model",
    type=click.Path(),
    required=True,
    help="A GGUF file or a safetensors folder.",
)
@click.option(
    "-n",
    "--n-new",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Maximum number of new tokens.",
)
@click.option("--chat/--raw", default=None, help="Use the chat template, or raw text.")
@click.option("--temperature", default=0.0, help="0, the default, is greedy.")
@click.option("--top-k", type=int, help="Only the k most likely tokens.")
@click.option("--top-p", type=float, help="Only the most likely tokens, up to mass p.")
@click.option(
    "--min-p", type=float, help="Minimum probability, relative to the maximum."
)
@click.option("--repetition", default=1.0, help="Repetition penalty; 1 is none.")
@click.option("--seed", default=0, show_default=True, help="Seed of the sampling.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Dtype of the weights.",
)
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
    """Generate text from PROMPT, a text or a file; "-" reads stdin."""
    require_extras("torch")
    from regard.plain.sample import Sampling

    if seed < 0:
        raise click.UsageError(f"--seed {seed}, expected 0 or more.")
    with raise_usage_errors():
        chosen = Sampling(**sampling)
    require_model(model)
    import torch

    from regard.nn.generation import stream
    from regard.nn.weights import load

    with draw_progress("loading the model", None):
        network, tokenizer = load(model, dtype=getattr(torch, dtype))
    text = read_argument(prompt)
    if chat or (chat is None and tokenizer.template is not None):
        text = tokenizer.chat([{"role": "user", "content": text}])
        tokens = tokenizer.encode(text, whole=False)
    else:
        tokens = tokenizer.encode(text)
        click.echo(remove_control(text), nl=False)
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
        click.echo(remove_control(piece), nl=False)
    click.echo()
    speed = count / (time.perf_counter() - began)
    click.echo(
        f"{len(tokens)} tokens read, {count} new, {speed:.1f} per second", err=True
    )
