"""regard doctor: check the promises of the README on the devices of this machine.

    regard doctor                    the CPU, and the accelerator that torch finds
    regard doctor --device cuda:1    another device; may be given several times
    regard doctor --report FILE      also write a report that can be shared

Exit code 0: every promise that was tried holds; 1: some are broken.

Next: ../doctor/examine.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from regard.terminal import NewFile, draw_progress, require_extras, write_epilog

SHARE = (
    "It has versions, names of devices and the results above: no names, paths or "
    "addresses, and nothing was sent. To share it, read it, then attach it to an issue "
    "of the project with the title of your device."
)


@click.command(
    short_help="Check the promises of the README on this machine.",
    epilog=write_epilog(
        "regard doctor --report doctor.json",
        "docs/accelerators.md says what has been run on which device.",
    ),
)
@click.option(
    "--device", "devices", multiple=True, help="cpu, cuda, mps, … [default: all]"
)
@click.option("--report", type=NewFile(), help="Write the results here, as JSON.")
def doctor(*, devices: tuple[str, ...], report: str | None) -> None:
    """Check the promises of the README on the devices of this machine.

    Watched models must compute the same bits; the engine, the recorded weights and the
    statistics must agree with the definition; memory must be linear in the sequence
    length; times are compared with those of the bare kernel. Takes a few minutes.
    """
    require_extras("torch")
    from regard.doctor.examine import CHECKS, examine_devices, find_devices

    names = devices or find_devices()
    with draw_progress("examining", len(CHECKS) * len(names)) as progress:
        found = examine_devices(names, progress=progress)
    click.echo(str(found))
    if report:
        Path(report).write_text(found.to_json(), encoding="utf-8")
        click.echo(f"\nThe report is in {report}. {SHARE}")
    sys.exit(0 if found.ok else 1)
