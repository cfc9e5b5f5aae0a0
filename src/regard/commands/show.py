"""regard show: record the attention of a model on a text, and display it.

    TEXT --model M     run the model, print a table of its layers (--json: of its heads)
                       TEXT is a picture or a sound for a model that reads these
                       --save writes the recording, --page and --map show the map
    FILE               show the map of a saved recording
    --token 12-15      the text in the terminal, shaded by what these tokens attend to
    --plot X,Y         two statistics of all heads in the terminal

Next: lens/watch.py
"""

from __future__ import annotations

import json as json_text
import os
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, kw_only=True)
class MapOptions:
    """Where the map is shown, and what of it."""

    page: str | None = None
    heads: dict[int, list[int] | None] | None = None
    limit: float | None = None
    draw: bool = False
    port: int | None = None
    host: str | None = None
    token: tuple[int, int] | None = None
    plot: tuple[str, str] | None = None


class TokenRange(click.ParamType):  # type: ignore[type-arg]
    """A token, or the first and the last one of a passage: 12 or 12-15."""

    name = "tokens"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        first, dash, last = str(value).partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            self.fail(
                f"{str(value)[:40]!r} is no token, expected its number, or the first "
                "and the last of a passage. Write --token 12 or --token 12-15",
                param,
                ctx,
            )
        return int(first), int(last if dash else first)


class StatisticPair(click.ParamType):  # type: ignore[type-arg]
    """Two names of statistics with a comma between them."""

    name = "statistics"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        names = [x.strip() for x in str(value).split(",")]
        if len(names) != 2 or not all(names):
            self.fail(
                f"{str(value)[:40]!r}, expected two statistics. Write --plot "
                "previous,induction",
                param,
                ctx,
            )
        return names[0], names[1]


class HeadList(click.ParamType):  # type: ignore[type-arg]
    """Heads as LAYER.HEAD, or LAYER for all of its heads, separated by commas."""

    name = "heads"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[int, list[int] | None]:
        found: dict[int, list[int] | None] = {}
        for part in str(value).split(","):
            layer, dot, head = part.strip().partition(".")
            if not layer.isdecimal() or (dot and not head.isdecimal()):
                self.fail(
                    f"{part.strip()[:40]!r} is no head, expected LAYER.HEAD, or LAYER "
                    "for all of its heads. Write --heads 18.7,18.8,3",
                    param,
                    ctx,
                )
            known = found.setdefault(int(layer), [])
            if not dot or known is None:
                found[int(layer)] = None
            elif int(head) not in known:
                known.append(int(head))
        return found


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
@click.option(
    "--heads",
    type=HeadList(),
    metavar="LAYER.HEAD,…",
    help="Heads of --page or --token: 18.7,18.8; 18 for all heads of a layer.",
)
@click.option(
    "--limit",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MB",
    help="Most megabytes of the page; 15 by default.",
)
@click.option("--map", "draw", is_flag=True, help="Show the map in a browser.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port of the map; by default, any free one.",
)
@click.option("--host", help="Address on which the map listens; 127.0.0.1 by default.")
@click.option(
    "--token",
    type=TokenRange(),
    metavar="N[-M]",
    help="Print the text, shaded by what token N, or N to M, attends to.",
)
@click.option(
    "--plot",
    type=StatisticPair(),
    metavar="X,Y",
    help="Print all heads as points: previous,induction.",
)
@click.option("--json", is_flag=True, help="Print one row per head, as JSON.")
def show(
    *,
    text: str,
    model: str | None,
    n_new: int,
    save: str | None,
    json: bool,
    download: bool,
    chat: bool,
    **options: Any,
) -> None:
    """Run a model on TEXT, or on a file, and summarize its attention.

    Without --model, TEXT is a saved recording, and its map is shown.
    """
    view = read_view(MapOptions(**options), alone=model is None and not json)
    require_extras("torch", *(["serve"] if view.draw else []))
    if model is None:
        seen = open_argument(text)
    else:
        text = text if text.lower().endswith(MEDIA) else read_argument(text)
        path = find_model(model, download=download)
        seen, new = run_model(path, text, n_new, chat=chat)
        if new:
            click.echo(remove_control(new), err=json)
    wanted = json or model is not None or view.plot
    table = compute_table(seen) if wanted else None
    if json and table is not None:
        click.echo(json_text.dumps(table.list_rows(), allow_nan=False))
    elif table is not None and model is not None:
        print_table(seen, table)
    print_pictures(seen, view, table, aside=json)
    if save:
        seen.save(save)
        click.echo(f"the recording is in {save}: regard show {save}", err=json)
    if view.page:
        write_map_page(seen, view, table, aside=json)
    if view.draw:
        seen.show(host=view.host, port=view.port or 0)


def read_view(view: MapOptions, *, alone: bool) -> MapOptions:
    """Return the options with the default view; raise if an option has no use.

    alone: whether the command prints nothing, so that the map is shown by default
    """
    shown = view.page or view.token or view.plot
    view = replace(view, draw=view.draw or (alone and not shown))
    for name, used in (("heads", view.page or view.token), ("limit", view.page)):
        if getattr(view, name) is not None and not used:
            raise click.UsageError(f"--{name} is for a page: add --page FILE.")
    for name in ("port", "host"):
        if getattr(view, name) is not None and not view.draw:
            raise click.UsageError(f"--{name} is for the map in a browser: add --map.")
    return view


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
    return label_inputs(seen, network, words, [given], [named]), "".join(new)


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


def print_table(seen: Seen, table: HeadTable) -> None:
    """Print a table of the layers, and the strongest heads."""
    from regard.stats.registry import list_statistics

    click.echo(str(seen).splitlines()[0])
    click.echo(str(table.by_layer()))
    for statistic in (x for x in list_statistics() if x.ranked):
        name, which = statistic.name, "least" if statistic.ascending else "most"
        few = {(x.sequence, x.layer): x for x in table.few if x.statistic == name}
        told = [
            row
            for row in table.sort(name).rows
            if (row["sequence"], row["layer"]) not in few and row[name] == row[name]
        ]  # no NaN, which comes last, and no number of too few queries
        said = str(next(iter(few.values()), "–"))
        if told:
            first = told[0]
            said = f"layer {first['layer']} head {first['head']}, {first[name]:.3f}"
        click.echo(f"{which} {name}: {said}")


def print_pictures(
    seen: Seen, view: MapOptions, table: HeadTable | None, *, aside: bool
) -> None:
    """Print the text view and the plot of two statistics, as text."""
    from regard.show.figures.head_scatter import draw_head_scatter
    from regard.show.figures.tinted_text import draw_tinted_text

    if view.token is not None:
        click.echo(draw_tinted_text(seen, view.token, heads=view.heads), err=aside)
    if view.plot is not None and table is not None:
        click.echo(draw_head_scatter(table, *view.plot), err=aside)


def write_map_page(
    seen: Seen, view: MapOptions, table: HeadTable | None, *, aside: bool
) -> None:
    """Write the map to a file, and print what it holds."""
    from regard.show.page import make_page

    limit = None if view.limit is None else max(1, round(view.limit * 1e6))
    with draw_progress("page", len(seen.records)) as progress:
        page = make_page(
            seen.recording,
            heads=view.heads,
            limit=limit,
            table=table,
            progress=progress,
        )
    told = str(page).replace("heads= or a higher limit=", "--heads or a higher --limit")
    click.echo(told, err=aside)
    page.write(str(view.page))
    click.echo(f"the map is in {view.page}; it includes the input text", err=aside)
