"""The command line: regard learn, show, compare, why, generate, train, check, ….

Each command is a file in commands/; learn and atlas define their own. An error is one
sentence on stderr; `regard --debug …` shows the traceback.

Next: terminal.py
"""

from __future__ import annotations

import click

from regard.atlas.__main__ import atlas
from regard.commands.check import check
from regard.commands.compare import compare
from regard.commands.doctor import doctor
from regard.commands.generate import generate
from regard.commands.recordings import recordings
from regard.commands.show import show
from regard.commands.train import train
from regard.commands.why import why
from regard.learn.__main__ import learn
from regard.terminal import Commands, write_epilog


@click.group(
    cls=Commands,
    epilog=write_epilog("regard learn", "regard COMMAND --help describes a command."),
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name="regard")
def main(*, debug: bool) -> None:
    """Attention you can read, see and scale."""


ALL = (learn, show, compare, why, generate, train, check, atlas, recordings, doctor)
for command in ALL:
    main.add_command(command)


if __name__ == "__main__":
    main(prog_name="regard")
