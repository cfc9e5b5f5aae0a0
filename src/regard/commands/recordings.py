"""regard recordings: list and prune what a server recorded.

    regard recordings FOLDER                 name, size and time, newest first
    regard recordings FOLDER --prune 100     delete all but the newest 100

Next: ../recording/folder.py
"""

from __future__ import annotations

import json as json_text
from datetime import datetime
from pathlib import Path

import click

from regard.errors import FileError
from regard.recording.folder import RecordingFolder, SavedRequest
from regard.terminal import write_epilog


@click.command(
    short_help="List and prune the recordings of a server.",
    epilog=write_epilog(
        "regard recordings /var/recordings --prune 100",
        "regard show FILE shows the map of one of them.",
    ),
)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--prune",
    type=click.IntRange(min=0),
    metavar="N",
    help="Delete all recordings but the newest N.",
)
@click.option("--json", is_flag=True, help="Print the list as JSON.")
def recordings(*, folder: Path, prune: int | None, json: bool) -> None:
    """List the recordings in FOLDER, newest first."""
    if not folder.is_dir():
        raise FileError(f"{folder} is no folder, expected that of REGARD_RECORD_DIR.")
    place = RecordingFolder(path=folder)
    if prune is not None:
        gone = place.prune(prune)
        freed = sum(x.size for x in gone)
        click.echo(f"deleted {len(gone)} recordings, {freed:,} bytes", err=json)
    found = place.list_recordings()[::-1]
    if json:
        rows = [
            {"name": x.path.name, "bytes": x.size, "written": x.written} for x in found
        ]
        click.echo(json_text.dumps(rows))
        return
    for x in found:
        click.echo(write_row(x))
    total = sum(x.size for x in found)
    click.echo(f"{len(found)} recordings, {total:,} bytes")


def write_row(saved: SavedRequest) -> str:
    """Return the line of a recording."""
    when = datetime.fromtimestamp(saved.written).astimezone()
    return f"{when:%Y-%m-%d %H:%M:%S}  {saved.size:>13,}  {saved.path.name}"
