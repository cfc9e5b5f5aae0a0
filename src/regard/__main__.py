"""The command line: regard learn, show, generate, train, check, atlas.

A command is a file of commands/; those of learn and atlas are beside their work. What
a user did wrong is said in one sentence; `regard --debug …` shows where it comes from.

Next: terminal.py
"""

from __future__ import annotations

import click

from regard.atlas.__main__ import atlas
from regard.commands.check import check
from regard.commands.generate import generate
from regard.commands.show import show
from regard.commands.train import train
from regard.learn.__main__ import learn
from regard.terminal import Commands, guide


@click.group(
    cls=Commands,
    epilog=guide("regard learn", "regard COMMAND --help says what a command can do."),
)
@click.option("--debug", is_flag=True, help="Show where an error comes from.")
@click.version_option(package_name="regard")
def main(*, debug: bool) -> None:
    """Attention you can read, see and scale."""


for command in (learn, show, generate, train, check, atlas):
    main.add_command(command)


if __name__ == "__main__":
    main(prog_name="regard")
