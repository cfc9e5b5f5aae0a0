"""regard generate: stream the output of a model.

    PROMPT → inputs of the model → pieces of text, as soon as they are complete

Next: models/generate_text.py
"""

from __future__ import annotations

import time
from typing import Any

import click

from regard.find_model import find_model
from regard.terminal import (
    DOWNLOAD,
    MODEL,
    draw_progress,
    limit_new_tokens,
    raise_usage_errors,
    read_argument,
    remove_control,
    require_extras,
    write_epilog,
)

EXAMPLE = 'regard generate "Why is the sky blue?" --model MODEL.gguf'


@click.command(
    short_help="Generate text from a prompt.",
    epilog=write_epilog(EXAMPLE, "regard show displays the attention of the model."),
)
@click.argument("prompt")
@click.option("--model", type=click.Path(), required=True, help=MODEL)
@DOWNLOAD
@limit_new_tokens(default=128)
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
    download: bool,
    **sampling: Any,
) -> None:
    """Generate text from PROMPT, a text or a file; "-" reads stdin."""
    require_extras("torch")
    from regard.plain.sample import Sampling

    if seed < 0:
        raise click.UsageError(f"--seed {seed}, expected 0 or more.")
    with raise_usage_errors():
        chosen = Sampling(**sampling)
    path = find_model(model, download=download)
    import torch

    from regard.models.generate_text import check_generates, generate_text
    from regard.models.inputs import (
        ModelInput,
        has_decoder,
        has_template,
        make_inputs,
        tell_kind,
    )
    from regard.models.load import load

    with draw_progress("loading the model", None):
        network, words = load(path, dtype=getattr(torch, dtype))
    check_generates(network)
    kind = tell_kind(network)
    text = read_argument(prompt) if kind == "text" else prompt
    given = ModelInput(**{kind: text})
    if kind == "text":
        if chat or (chat is None and has_template(words)):
            given = ModelInput(text=[{"role": "user", "content": text}])
        elif not has_decoder(network):
            click.echo(remove_control(text), nl=False)  # the text is continued
    named = make_inputs(network, words, given)
    began = time.perf_counter()

    def say(piece: str) -> None:
        click.echo(remove_control(piece), nl=False)

    count = generate_text(
        network, words, named, n_new, sampling=chosen, seed=seed, say=say
    )
    click.echo()
    speed = count / (time.perf_counter() - began)
    read = named["input_ids"].shape[1] if "input_ids" in named else 0
    click.echo(f"{read} tokens read, {count} new, {speed:.1f} per second", err=True)
