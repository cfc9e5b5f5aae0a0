"""The commands of `regard atlas`; the work is in job.py and search_pairs.py.

    regard atlas run DIR --model M --corpus TEXTS    start a run, which can be resumed
    regard atlas run DIR                             resume it
    regard atlas show DIR                            print the table in the terminal
    regard atlas show DIR OTHER --page x.html        compare two atlases on a page
    regard atlas record DIR --layer 18 --head 8      record an example and show its map
    regard atlas search M PAIRS --out DIR            patch every head, over many pairs

Next: settings.py
"""

from __future__ import annotations

import json as json_text
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from regard.errors import OptionError
from regard.find_model import find_model
from regard.terminal import (
    DOWNLOAD,
    MODEL,
    Commands,
    NewFile,
    StatisticsCommand,
    draw_progress,
    require_extras,
    write_epilog,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regard.atlas.job import Standing
    from regard.atlas.search_pairs import SearchProgress
    from regard.atlas.settings import Settings

FOLDER = click.argument("folder", type=click.Path(path_type=Path))
CREW = (
    click.option(
        "--runner", default="pool", show_default=True, help="loop, pool or ray."
    ),
    click.option("--workers", type=int, help="Processes or actors; one for each core."),
    click.option(
        "--threads", default=1, show_default=True, help="Threads of torch in each."
    ),
    click.option("--address", help="A Ray cluster: auto, or host:port."),
)


def take_crew(command: Any) -> Any:
    """Add the options of RunnerOptions to a command."""
    for option in reversed(CREW):
        command = option(command)
    return command


def pop_crew(options: dict[str, Any]) -> Any:
    """Remove the options of RunnerOptions from a dict, and return them as one."""
    from regard.atlas.runners import RunnerOptions  # noqa: PLC0415

    names = ("runner", "workers", "threads", "address")
    return RunnerOptions(**{name: options.pop(name) for name in names})


BEGIN = write_epilog(
    "regard atlas run prose --model MODEL.gguf --corpus prose.jsonl",
    "regard atlas show prose",
)


@click.group(cls=Commands, epilog=BEGIN)
def atlas() -> None:
    """Measure what every head of a model does, over many documents."""


@atlas.command(cls=StatisticsCommand, epilog=BEGIN)
@FOLDER
@click.option("--plan", "file", type=click.Path(exists=True), help="A TOML file.")
@click.option("--model", help=MODEL.rstrip(".") + "; or module:function.")
@DOWNLOAD
@click.option("--corpus", multiple=True, help="Text, .jsonl, .parquet, or a folder.")
@click.option("--field", help="The field of JSONL and Parquet that holds the text.")
@click.option(
    "--statistics", help="Of those below, with commas; all means unless given."
)
@click.option("--length", type=int, help="Tokens of a piece at most  [512]")
@click.option("--pieces", type=int, help="Pieces of a document at most  [1]")
@click.option("--packed", is_flag=True, default=None, help="Documents end to end.")
@click.option("--batch", type=int, help="Pieces that run at once  [1]")
@click.option("--precision", help="float32, bfloat16, …")
@click.option("--device", help="cpu, cuda, …")
@click.option(
    "--shard", type=int, help="Documents of a shard, kept when all are done  [8]"
)
@click.option("--examples", type=int, help="Places kept for a head  [4]")
@click.option("--documents", type=int, help="A random sample of so many.")
@click.option("--tokens", type=int, help="Stop after so many.")
@click.option("--until-interval", type=float, help="Stop when weights are ± so narrow.")
@take_crew
def run(*, folder: Path, file: str | None, download: bool, **options: Any) -> None:
    """Begin an atlas in FOLDER, or go on with the one that is there.

    It may be stopped at any time, by Ctrl-C or worse: what was done is kept.
    """
    require_extras("atlas")
    from regard.atlas.job import run_atlas as do  # noqa: PLC0415 (keeps --help fast)
    from regard.atlas.table import read_table  # noqa: PLC0415
    from regard.atlas.terminal_table import tell_left_out  # noqa: PLC0415

    crew = pop_crew(options)
    given = {k: v for k, v in options.items() if v not in (None, ())}
    plan = choose_plan(folder, file, given)
    if download:  # the workers find it in the cache
        find_model(plan.model, download=True)
    began = time.monotonic()
    try:
        with draw_atlas_progress() as (progress, reading):
            end = do(folder, crew=crew, plan=plan, progress=progress, reading=reading)
    except KeyboardInterrupt:
        told = f"stopped. What was done is kept; go on: regard atlas run {folder}"
        raise KeyboardInterrupt(told) from None
    for words in end.damaged:
        click.echo(f"a damaged result was set aside, and done again: {words}")
    minutes = (time.monotonic() - began) / 60
    click.echo(
        f"{end.documents:,} documents, {end.tokens:,} tokens, {end.aside:,} set aside, "
        f"{minutes:.1f} minutes: {end.ended}."
    )
    if told := tell_left_out(read_table(folder).about):
        click.echo(told)
    click.echo(f"Now: regard atlas show {folder}")


def choose_plan(folder: Path, file: str | None, given: dict[str, Any]) -> Settings:
    """Return the plan from a file and options, or the one stored in the folder."""
    from regard.atlas.settings import make_settings, read_about, read_plan  # noqa: PLC0415

    if "statistics" in given:
        given["statistics"] = given["statistics"].split(",")
    about = folder / "about.json"
    if file is not None or (about.exists() and given.keys() <= {"model"}):
        known = read_about(about)[0] if file is None else read_plan(file)
        trust(known.model, given.get("model"))
        return make_settings(asdict(known) | given)
    if not given:
        raise OptionError(
            f"{folder} holds no atlas yet. Write: "
            f"regard atlas run {folder} --model MODEL --corpus TEXTS"
        )
    for name in ("model", "corpus"):
        if name not in given:
            raise click.UsageError(
                f"--{name} is missing. To go on with an atlas give its folder alone, "
                "without options of the plan."
            )
    return make_settings(given)


def trust(model: str, given: str | None) -> None:
    """Refuse a function named only in a file: calling it would run untrusted code."""
    from regard.atlas.model import is_function  # noqa: PLC0415 (it needs torch)

    if model != given and is_function(model):
        raise OptionError(
            f"the plan names the model {model!r}, and there is no such file. If it is "
            f"a function of yours, name it too: --model {model}"
        )


@contextmanager
def draw_atlas_progress() -> Iterator[tuple[Any, Any]]:
    """Show the progress, speed and remaining time of a run."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[told]}"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bars:
        read = bars.add_task("corpus", total=None, told="", visible=False)
        line = bars.add_task("starting", total=None, told="")
        first: list[tuple[float, int]] = []

        def reading(done: int, total: int) -> None:
            told = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
            seen = done < total
            bars.update(read, completed=done, total=total, told=told, visible=seen)

        def progress(now: Standing) -> None:
            first.append((time.monotonic(), now.tokens)) if not first else None
            seconds = time.monotonic() - first[0][0]
            speed = (now.tokens - first[0][1]) / seconds if seconds > 0 else 0.0
            told = f"{now.tokens:,} tokens, {speed:,.0f} a second"
            if now.aside:
                told += f", {now.aside} documents set aside"
            bars.update(
                line,
                description="shards",
                completed=now.shards,
                total=now.of,
                told=f"{now.shards} of {now.of}, {told}",
            )

        yield progress, reading


@atlas.command(
    epilog=write_epilog(
        "regard atlas show prose --statistic sink",
        "regard atlas record prose --statistic sink --layer 18 --head 8",
    )
)
@FOLDER
@click.argument("other", required=False, type=click.Path(path_type=Path))
@click.option("--statistic", help="One of those that were measured; the first.")
@click.option("--layer", type=int, help="With --head: one head, and its examples.")
@click.option("--head", type=int, help="With --layer.")
@click.option("--page", type=NewFile(), help="Write an HTML file.")
@click.option("--json", is_flag=True, help="Print it for a program.")
def show(
    *,
    folder: Path,
    other: Path | None,
    statistic: str | None,
    layer: int | None,
    head: int | None,
    page: str | None,
    json: bool,
) -> None:
    """Show the atlas in FOLDER; with OTHER, what is different there.

    The table itself is FOLDER/table.parquet, for pandas, polars or DuckDB.
    """
    require_extras("atlas")
    if (layer is None) != (head is None):
        raise click.UsageError("--layer and --head name one head together: give both.")
    if layer is not None and (other or page or json):
        raise click.UsageError("--layer and --head print one head of one atlas, alone.")
    from rich.console import Console  # noqa: PLC0415

    from regard.atlas.table import read_table  # noqa: PLC0415
    from regard.atlas.terminal_table import (  # noqa: PLC0415
        draw_atlas_table,
        draw_difference,
        draw_head,
        tell_left_out,
    )

    tables = [read_table(x) for x in (folder, other) if x is not None]
    names = [x.name or str(x) for x in (folder, other) if x is not None]
    if len({*names}) < len(names):  # a/prose and b/prose
        names = [str(x) for x in (folder, other)]
    name = statistic or tables[0].statistics[0]
    if page is not None:
        from regard.atlas.page import write_page  # noqa: PLC0415

        write_page(page, tables, names=names)
        click.echo(f"the page is in {page}, with words of the documents")
        return
    if json:
        found = {
            x: {"about": y.about, "rows": y.list_rows()}
            for x, y in zip(names, tables, strict=True)
        }
        click.echo(json_text.dumps(found, allow_nan=False))
        return
    if not all(x.heads for x in tables):
        told = " ".join(tell_left_out(x.about) for x in tables if not x.heads)
        raise OptionError(
            f"there is nothing to show: all documents were set aside. {told}"
        )
    width = Console().width
    if len(tables) == 2:
        click.echo(draw_difference(tables[0], tables[1], name, names, width=width))
    elif layer is not None and head is not None:
        click.echo(draw_head(tables[0], layer, head, width=width))
    else:
        click.echo(draw_atlas_table(tables[0], name, width=width))


@atlas.command(
    epilog=write_epilog(
        "regard atlas record prose --layer 17 --head 5 --save one.regard",
        "regard show one.regard",
    )
)
@FOLDER
@click.option(
    "--statistic", default="induction", show_default=True, help="What it did most."
)
@click.option("--layer", type=int, required=True, help="Of the head, from 0.")
@click.option("--head", type=int, required=True, help="In its layer, from 0.")
@click.option("--rank", default=0, show_default=True, help="0 is the strongest.")
@click.option("--model", help="Only if it is a function of yours: its name again.")
@click.option("--save", type=NewFile(), help="Keep the recording in this file.")
def record(*, folder: Path, model: str | None, save: str | None, **which: Any) -> None:
    """Run the model on an example of a head again, and show its map."""
    require_extras("atlas")
    from regard.atlas.example import Place, record_example  # noqa: PLC0415
    from regard.atlas.settings import read_about  # noqa: PLC0415

    trust(read_about(folder / "about.json")[0].model, model)
    seen = record_example(folder, Place(**which))
    if save is None:
        seen.show()
        return
    seen.save(save)
    click.echo(f"the recording is in {save}: regard show {save}")


@atlas.command(
    epilog=write_epilog(
        "regard atlas search MODEL.gguf pairs.jsonl --out names",
        'regard show "a clean prompt" --model MODEL.gguf',
    )
)
@click.argument("model")
@click.argument("pairs", type=click.Path(dir_okay=False))
@click.option("--out", required=True, type=click.Path(), help="Folder of the results.")
@DOWNLOAD
@click.option("--batch", default=16, show_default=True, help="Heads that run at once.")
@click.option("--precision", default="float32", show_default=True, help="bfloat16, …")
@click.option("--device", default="cpu", show_default=True, help="cuda, …")
@take_crew
def search(*, model: str, pairs: str, out: str, download: bool, **options: Any) -> None:
    """Patch every head over many pairs of prompts.

    Each line of PAIRS is JSON with four texts: clean, corrupted, answer and wrong. You
    can stop at any time: the same command goes on with what is missing.
    """
    require_extras("atlas")
    from regard.atlas.pairs import read_prompt_pairs  # noqa: PLC0415
    from regard.atlas.search_pairs import search_pairs  # noqa: PLC0415

    crew = pop_crew(options)
    if download:  # the workers find it in the cache
        find_model(model, download=True)
    began, seen = time.monotonic(), []

    def tell(now: SearchProgress) -> None:
        seen.append(now)
        update(now.done, now.of)

    try:
        known = read_prompt_pairs(pairs)
        with draw_progress("pairs", len(known)) as update:
            found = search_pairs(model, known, out, crew=crew, progress=tell, **options)
    except KeyboardInterrupt:
        told = "stopped. What was done is kept; give the same command to go on."
        raise KeyboardInterrupt(told) from None
    for name in seen[0].damaged:
        click.echo(f"a damaged result was set aside, and done again: {name}")
    click.echo(found)
    minutes = (time.monotonic() - began) / 60
    new = seen[-1].done - seen[0].done
    click.echo(f"\n{new} pairs were run now, in {minutes:.1f} minutes.")
    click.echo(f"All heads: {out}/heads.csv, all pairs: {out}/pairs.csv")
