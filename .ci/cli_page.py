"""Write docs/cli.md: every command with its help, from the commands themselves.

    python .ci/cli_page.py

What stands above the mark is written by hand, what is below it here; a test compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from regard.__main__ import main as regard
from regard.stats.registry import list_statistics
from regard.terminal import StatisticsCommand

PAGE = Path(__file__).parent.parent / "docs/cli.md"
MARK = "<!-- written by .ci/cli_page.py from here on -->\n"


def render(path: Path = PAGE) -> str:
    """Return the page as it should be."""
    above, mark, _ = path.read_text(encoding="utf-8").partition(MARK)
    return above + mark + "".join(map(describe, walk(regard, "regard")))


def walk(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield a command and all below it, with what one types."""
    yield name, command
    if isinstance(command, click.Group):
        for part, below in command.commands.items():
            yield from walk(below, f"{name} {part}")


def describe(pair: tuple[str, click.Command]) -> str:
    """Return a command as a part of the page."""
    name, command = pair
    words = [x.make_metavar(click.Context(command)) for x in list_arguments(command)]
    words += ["COMMAND"] if isinstance(command, click.Group) else []
    options = [x for x in command.params if isinstance(x, click.Option)]
    said = "\n\n".join(" ".join(x.split()) for x in (command.help or "").split("\n\n"))
    level = "##" if name.count(" ") < 2 else "###"
    parts = [f"\n{level} {name}\n", f"`{' '.join([name, *words])}`\n", f"{said}\n"]
    if options:
        rows = "\n".join(f"| {name_option(x)} | {tell(x)} |" for x in options)
        parts.append(f"| option | |\n|---|---|\n{rows}\n")
    if isinstance(command, StatisticsCommand):
        entries = list_statistics()
        rows = "\n".join(f"| `{x.name}` | {x.summary} ({x.unit}) |" for x in entries)
        parts.append(f"| statistic of a head | |\n|---|---|\n{rows}\n")
    example, then = read_guide(command)
    parts.append(f"```bash\n{example}\n```\n")
    parts.append(f"Then: {then}\n")
    return "\n".join(parts)


def list_arguments(command: click.Command) -> list[click.Parameter]:
    """Return what a command takes by place."""
    return [x for x in command.params if isinstance(x, click.Argument)]


def name_option(option: click.Option) -> str:
    """Return what one types, and what kind of thing comes after it."""
    typed = " / ".join([", ".join(option.opts), *option.secondary_opts])
    kind = (option.metavar or option.type.name.upper()).removesuffix(" RANGE")
    if isinstance(option.type, click.Choice):
        kind = " or ".join(option.type.choices)
    return f"`{typed}`" if option.is_flag else f"`{typed} {kind}`"


def tell(option: click.Option) -> str:
    """Return what an option does, and what holds without it."""
    said = (option.help or "") + (" Required." if option.required else "")
    if option.show_default and option.default is not None:
        said += f" Default: `{option.default}`."
    return said.strip().replace("|", r"\|")


def read_guide(command: click.Command) -> tuple[str, str]:
    """Return the example of a command and what comes after it."""
    _, example, then = (command.epilog or "").split("\n")
    return example.removeprefix("Example:").strip(), then.removeprefix("Then:").strip()


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
