"""How every command speaks: help, errors, exit codes, progress.

    0    done
    1    it could not be done, or the answer is no; one sentence says why
    2    the command line is wrong
    130  Ctrl-C
    141  nobody reads on: regard … | head -1

A command that writes to stdout ends with 1 if stdout is closed (>&-) or its disk is
full. Without stderr (2>&-) errors are not printed, and the exit code is the same.

Next: commands/show.py
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn, TextIO

import click

from regard.errors import FileError, RegardError

STOPPED, UNREAD = 130, 141  # 128 and the number of the signal, as shells count
FILE_NAME = re.compile(r"\S+\.[a-z]\w{1,4}")  # notes.txt, and no word or number
PARTS = {  # the modules that an extra brings
    "torch": ("torch", "safetensors", "gguf", "tokenizers", "jinja2"),
    "hf": ("transformers",),
    "show": ("matplotlib",),
    "serve": ("starlette", "uvicorn"),
    "notebook": ("anywidget",),
    "atlas": ("pyarrow", "ray"),
}


class Commands(click.Group):
    """Commands in the order they were added, whose errors are sentences."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with end_well(ctx):  # --help and --version write here
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with end_well(ctx):
            return super().invoke(ctx)


@contextmanager
def end_well(ctx: click.Context) -> Iterator[None]:
    """Turn what ends a command into an exit code and at most one sentence."""
    prepare_streams()
    try:
        yield
        sys.stdout.flush()  # an error at interpreter shutdown would be noise
    except KeyboardInterrupt as stopped:
        click.echo(f"\n{str(stopped) or 'stopped.'}", err=True)
        sys.exit(STOPPED)
    except (RegardError, ImportError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            stop_writing(error)
        if isinstance(error, OSError) and not can_write():
            stop_writing(error)
        if is_debugged(ctx):
            raise
        command = ctx.info_name if ctx.parent else ctx.invoked_subcommand
        reason = write_reason(error, command)  # of a group: atlas, not atlas run
        raise click.ClickException(reason) from error


def is_debugged(ctx: click.Context | None = None) -> bool:
    """Tell whether a user wrote regard --debug, to see where errors come from."""
    ctx = ctx or click.get_current_context()
    return bool(ctx.find_root().params.get("debug"))


@contextmanager
def blame_options() -> Iterator[None]:
    """Let what is refused inside count as a wrong command line."""
    try:
        yield
    except RegardError as error:
        if is_debugged():
            raise
        raise click.UsageError(str(error)) from error


def can_write() -> bool:
    """Tell whether stdout accepts what is in its buffer."""
    try:
        sys.stdout.flush()
    except OSError:
        return False
    return True


def stop_writing(error: OSError) -> NoReturn:
    """End because stdout cannot be written: silently if its reader has left."""
    unread = isinstance(error, BrokenPipeError)
    if not unread:
        reason = str(error.strerror).lower()
        if error.errno == errno.EBADF:
            reason = "it is closed. To discard the output, write >/dev/null"
        click.echo(f"Error: stdout cannot be written: {reason}.", err=True)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())  # the rest of the buffer goes there
    sys.exit(UNREAD if unread else 1)


def write_reason(error: Exception, command: str | None) -> str:
    """Return what a user reads of an error."""
    if isinstance(error, ModuleNotFoundError):
        module = (error.name or "").partition(".")[0]
        extras = [extra for extra, parts in PARTS.items() if module in parts]
        if not extras:
            return f"there is no module {error.name}."
        wanted = "atlas" if command == "atlas" else extras[0]  # atlas brings the rest
        return f'this needs {error.name}: pip install "regard[{wanted}]"'
    if isinstance(error, OSError) and error.strerror:
        place = error.filename or "a file"
        return f"{place} cannot be used: {error.strerror.lower()}."
    return str(error)


def need_extras(*extras: str) -> None:
    """Refuse at once what would end at a missing module after minutes of work."""
    missing = {x: PARTS[x][0] for x in extras if find_spec(PARTS[x][0]) is None}
    if missing:
        names, wanted = " and ".join(missing.values()), ",".join(missing)
        raise click.ClickException(
            f'this needs {names}: pip install "regard[{wanted}]"'
        )


def need_model(path: str) -> None:
    """Refuse at once a model that is not there; torch takes seconds to come."""
    if not Path(path).exists():
        raise FileError(f"there is no file or folder {path}.")


def guide(example: str, then: str) -> str:
    """Return the last lines of a help: what one may type, and what comes after it."""
    return f"\b\nExample:  {example}\nThen:     {then}"


class StatisticsCommand(click.Command):
    """A command whose help also lists the statistics."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each statistic with its meaning, then the example."""
        from regard.stats.registry import list_statistics  # noqa: PLC0415 (for help)

        with formatter.section("Statistics of a head"):
            formatter.write_dl(
                [(x.name, f"{x.summary} ({x.unit})") for x in list_statistics()]
            )
        super().format_epilog(ctx, formatter)


class NewFile(click.Path):
    """A file to be written, in a folder that is there; asked before the work begins."""

    def __init__(self, *, dash: bool = False) -> None:
        super().__init__(dir_okay=False, writable=True, allow_dash=dash)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        path = str(super().convert(value, param, ctx))
        if path != "-" and not Path(path).absolute().parent.is_dir():
            folder = Path(path).parent
            self.fail(f"there is no folder {folder} to write {path} into.", param, ctx)
        return path


def read_text(text: str) -> str:
    """Return what a file holds; "-" is stdin, and what names no file is the text."""
    if text == "-":
        if sys.stdin is None:
            raise FileError(
                'stdin is closed, so "-" cannot be read. Pipe a text to it.'
            )
        return sys.stdin.read()
    if not os.path.isfile(text):  # noqa: PTH113 (a Path refuses long texts)
        if FILE_NAME.fullmatch(text):
            click.echo(f"there is no file {text}: it is read as a text", err=True)
        return text
    found = Path(text).read_text(encoding="utf-8", errors="replace")
    if "\0" in found:
        raise FileError(f"{text} is no text: it holds bytes of 0.")
    return found


def clean(text: str) -> str:
    """Drop control characters: a model must not steer the terminal."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


@contextmanager
def draw_progress(name: str, total: int | None) -> Iterator[Callable[[int, int], None]]:
    """Show a bar while something runs, where there is a terminal to show it.

    Without a total it moves and says nothing of how much is left.
    """
    from rich.console import Console  # noqa: PLC0415 (help comes at once)
    from rich.progress import Progress  # noqa: PLC0415

    console = Console(stderr=True)
    quiet = not console.is_terminal
    with Progress(console=console, transient=True, disable=quiet) as bar:
        line = bar.add_task(name, total=total)
        yield lambda done, _: bar.update(line, completed=done)


def prepare_streams() -> None:
    """Give a command the standard streams it expects, whatever it was started with."""
    sys.stdout = sys.stdout or open_closed(1, os.O_RDONLY)  # so that writing fails
    sys.stderr = sys.stderr or open_closed(2, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # "?" for what a terminal cannot show
            stream.reconfigure(errors="replace")
    width = os.environ.get("COLUMNS", "")
    if not width.isdecimal() or not int(width):  # 0 would print nothing
        os.environ.pop("COLUMNS", None)


def open_closed(number: int, how: int) -> TextIO:
    """Open a closed standard stream on the null device.

    Otherwise the next file to be opened would get its number, and what libraries
    print would go into that file.
    """
    found = os.open(os.devnull, how)
    try:
        os.fstat(number)  # already taken by a file
    except OSError:
        os.dup2(found, number)
        os.close(found)
        found = number
    return open(found, "w", encoding="utf-8")  # noqa: PTH123
