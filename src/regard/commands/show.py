"""regard show: record the attention of a model on a text, and display it.

    TEXT --model M     run the model, print a table of its layers (--json: of its heads)
                       TEXT is a picture or a sound for a model that reads these
                       --save writes the recording, --page and --map show the map
    FILE               show the map of a saved recording

Next: lens/watch.py
"""

from __future__ import annotations

import json as json_text
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from regard.errors import FileError, OptionError
from regard.find_model import find_model
from regard.terminal import (
    DOWNLOAD,
    MODEL,
    NewFile,
    StatisticsCommand,
    draw_progress,
    read_argument,
    remove_control,
    require_extras,
    write_epilog,
)

if TYPE_CHECKING:
    from regard.seen import Seen
    from regard.stats.table import HeadTable

MEDIA = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".wav")


@click.command(
    cls=StatisticsCommand,
    short_help="Show the attention of a model on a text.",
    epilog=write_epilog(
        'regard show "The cat sat on the mat" --model MODEL.gguf',
        "add --map to see every head, --save FILE to save the recording.",
    ),
)
@click.argument("text")
@click.option("--model", type=click.Path(), help=MODEL)
@DOWNLOAD
@click.option("--chat", is_flag=True, help="Use the chat template of the model.")
@click.option(
    "-n",
    "--n-new",
    type=click.IntRange(min=0),
    default=0,
    help="Number of tokens to generate.",
)
@click.option("--save", type=NewFile(), help="Save the recording to this file.")
@click.option("--page", type=NewFile(), help="Write the map as one HTML file.")
@click.option("--map", "draw", is_flag=True, help="Show the map in a browser.")
@click.option("--json", is_flag=True, help="Print one row per head, as JSON.")
def show(
    *,
    text: str,
    model: str | None,
    n_new: int,
    save: str | None,
    page: str | None,
    draw: bool,
    json: bool,
    **how: bool,
) -> None:
    """Run a model on TEXT, or on a file, and summarize its attention.

    Without --model, TEXT is a saved recording, and its map is shown.
    """
    draw = draw or (model is None and not (page or json))
    require_extras("torch", *(["serve"] if draw else []))
    if model is None:
        seen = open_argument(text)
    else:
        text = text if text.lower().endswith(MEDIA) else read_argument(text)
        path = find_model(model, download=how["download"])
        seen, new = run_model(path, text, n_new, chat=how["chat"])
        if new:
            click.echo(remove_control(new), err=json)
    if json:
        click.echo(json_text.dumps(compute_table(seen).list_rows(), allow_nan=False))
    elif model is not None:
        print_table(seen)
    if save:
        seen.save(save)
        click.echo(f"the recording is in {save}: regard show {save}", err=json)
    if page:
        write_map_page(seen, page, aside=json)
    if draw:
        seen.show()


def open_argument(path: str) -> Seen:
    """Open a recording; if there is none, the error message mentions --model."""
    from regard.seen import open_seen

    how = "To run a model on a text: regard show TEXT --model FILE"
    if not os.path.exists(path):  # noqa: PTH110 (Path raises on long texts)
        raise FileError(f"there is no recording {path[:60]}. {how}")
    try:
        return open_seen(path)
    except FileError as error:
        raise FileError(f"{error} {how}") from error


def run_model(path: Path, text: str, n_new: int, *, chat: bool) -> tuple[Seen, str]:
    """Return the recording of a model on a text, and the generated text."""
    with draw_progress("loading the model", None):
        import torch

        from regard.models.generate_text import generate_text
        from regard.models.inputs import tell_kind
        from regard.models.load import load
        from regard.models.read import label_inputs, read
        from regard.seen import watch

        pair = network, words = load(path)
    wait = draw_progress("running the model", None)
    if tell_kind(network) != "text" and not n_new:
        with wait:
            return read(text, model=pair), ""
    given, named = prepare_input(network, words, text, n_new, chat=chat)
    if not n_new:
        with wait:
            return read(named, model=pair), ""
    new: list[str] = []
    with wait, watch(network) as seen, torch.inference_mode():
        generate_text(network, words, named, n_new, say=new.append)
    return label_inputs(seen, network, words, [given]), "".join(new)


def prepare_input(
    network: Any, words: Any, text: str, n_new: int, *, chat: bool
) -> tuple[Any, dict[str, Any]]:
    """Return the input of a model, and the tensors made of it, cut to its context."""
    from regard.models.inputs import (
        ModelInput,
        encode_string,
        has_decoder,
        make_inputs,
        measure_context,
        tell_kind,
        write_chat,
    )

    if (kind := tell_kind(network)) != "text":
        given = ModelInput(**{kind: text})
        return given, make_inputs(network, words, given)
    if text.lower().endswith(MEDIA) and os.path.isfile(text):  # noqa: PTH113
        raise OptionError(
            f"{text} is no text, but a {type(network).__name__} reads text."
        )
    if chat:
        text = write_chat(words, [{"role": "user", "content": text}])
    limit = measure_context(network, words)
    room = limit if has_decoder(network) else limit - n_new
    if room < 1:
        raise OptionError(
            f"--n-new {n_new}, but the context of this model is "
            f"{limit} tokens, including the text. Use a lower number."
        )
    tokens = encode_string(words, text, whole=not chat)
    if len(tokens) > room:
        click.echo(f"using the first {room:,} of {len(tokens):,} tokens", err=True)
        tokens = encode_string(words, text, whole=not chat, limit=room)
    given = ModelInput(text=tokens)
    return given, make_inputs(network, words, given)


def compute_table(seen: Seen) -> HeadTable:
    """Return the table of all heads."""
    with draw_progress("statistics", len(seen.records)) as progress:
        return seen.table(progress=progress)


def print_table(seen: Seen) -> None:
    """Print a table of the layers, and the strongest heads."""
    from regard.stats.registry import list_statistics

    click.echo(str(seen).splitlines()[0])
    table = compute_table(seen)
    click.echo(str(table.by_layer()))
    for statistic in (x for x in list_statistics() if x.ranked):
        name, which = statistic.name, "least" if statistic.ascending else "most"
        first = table.sort(name).rows[0]
        place = f"layer {first['layer']} head {first['head']}, {first[name]:.3f}"
        known = first[name] == first[name]  # False for NaN
        click.echo(f"{which} {name}: {place if known else '–'}")


def write_map_page(seen: Seen, path: str, *, aside: bool) -> None:
    """Write the map to a file, and print its size."""
    from regard.show.page import make_page

    with draw_progress("page", len(seen.records)) as progress:
        page = make_page(seen.recording, progress=progress)
    click.echo(str(page), err=aside)
    page.write(path)
    click.echo(f"the map is in {path}; it includes the input text", err=aside)
