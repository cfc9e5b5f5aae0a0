"""regard compare: what differs between the heads of two saved recordings.

    regard compare A B                    the heads that changed most
    regard compare A B --parquet FILE     all of them, in a file

Next: ../stats/comparison.py
"""

from __future__ import annotations

import json as json_text

import click

from regard.commands.show import open_argument
from regard.terminal import NewFile, draw_progress, require_extras, write_epilog


@click.command(
    short_help="Compare two recordings, head by head.",
    epilog=write_epilog(
        "regard compare before.regard after.regard --sort entropy_change",
        "regard show FILE shows the map of one of them.",
    ),
)
@click.argument("one", type=click.Path())
@click.argument("other", type=click.Path())
@click.option("--sort", default="moved", help="Column to sort by, largest first.")
@click.option(
    "-n", "--heads", type=click.IntRange(min=1), default=10, help="Rows to print."
)
@click.option("--layers", is_flag=True, help="Print one row per layer.")
@click.option("--json", is_flag=True, help="Print all rows, as JSON.")
@click.option("--parquet", type=NewFile(), help="Write all rows to this file.")
def compare(
    *,
    one: str,
    other: str,
    sort: str,
    heads: int,
    layers: bool,
    json: bool,
    parquet: str | None,
) -> None:
    """Compare the recordings ONE and OTHER, which `regard show --save` wrote.

    The same tokens: how much weight of each head moved to other keys, from 0 to 1, as
    the mean over queries, the largest, and its query. Other tokens: the same, over the
    tokens that a diff finds in both.
    """
    require_extras("torch")
    both = [open_argument(path).recording for path in (one, other)]
    from regard.stats.comparison import compare_heads

    with draw_progress("comparing", len(both[0].records)) as progress:
        found = compare_heads(*both, progress=progress)
    table = (found.by_layer() if layers else found).sort(sort)
    if json:
        click.echo(json_text.dumps(table.list_rows(), allow_nan=False))
    else:
        click.echo(str(table.head(heads)))
    if parquet:
        found.to_parquet(parquet)
        click.echo(f"all {len(found)} rows are in {parquet}", err=json)
