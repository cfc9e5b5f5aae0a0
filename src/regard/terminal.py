"""What all commands share: help, error messages, exit codes, progress bars.

    0    success
    1    failure, or a negative result; one sentence on stderr states why
    2    invalid command line
    130  Ctrl-C
    141  broken pipe: regard … | head -1

A command that writes to stdout exits with 1 if stdout is closed (>&-) or its disk is
full. Without stderr (2>&-) errors are not printed, but the exit code is the same.

Next: commands/show.py
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from io import TextIOWrapper, UnsupportedOperation
from pathlib import Path
from typing import Any, NoReturn, TextIO

import click

from regard.errors import FileError, RegardError

STOPPED, UNREAD = 130, 141  # 128 + signal number, as in shells
FILE_NAME = re.compile(r"\S+\.[a-z]\w{1,4}")  # matches notes.txt, not words or numbers
MODEL = "A GGUF file, a folder, or a Hugging Face name."
DOWNLOAD = click.option(
    "--download", is_flag=True, help="Download the model if it is not in the cache."
)
limit_new_tokens = partial(  # with a default of the command's own
    click.option,
    "-n",
    "--n-new",
    type=click.IntRange(min=1),
    show_default=True,
    help="Maximum number of new tokens.",
)
PARTS = {  # the modules that each extra installs
    "torch": ("torch", "safetensors", "gguf", "tokenizers", "jinja2"),
    "hf": ("transformers",),
    "show": ("matplotlib",),
    "serve": ("starlette", "uvicorn"),
    "notebook": ("anywidget",),
    "atlas": ("pyarrow", "ray"),
}


class Commands(click.Group):
    """A command group that keeps the order of its commands and formats errors."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with convert_errors(ctx):  # --help and --version write here
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with convert_errors(ctx):
            return super().invoke(ctx)


@contextmanager
def convert_errors(ctx: click.Context) -> Iterator[None]:
    """Convert exceptions of a command to an exit code and a short message."""
    prepare_streams()
    try:
        yield
        sys.stdout.flush()  # at interpreter shutdown, an error would print a traceback
    except KeyboardInterrupt as stopped:
        click.echo(f"\n{str(stopped) or 'stopped.'}", err=True)
        sys.exit(STOPPED)
    except (RegardError, ImportError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            exit_unwritable(error)
        if isinstance(error, OSError) and not can_write_stdout():
            exit_unwritable(error)
        if is_debugged(ctx):
            raise
        command = ctx.info_name if ctx.parent else ctx.invoked_subcommand
        reason = write_reason(error, command)  # command: atlas, not atlas run
        raise click.ClickException(reason) from error


def is_debugged(ctx: click.Context | None = None) -> bool:
    """Return whether the command was run with regard --debug."""
    ctx = ctx or click.get_current_context()
    return bool(ctx.find_root().params.get("debug"))


@contextmanager
def raise_usage_errors() -> Iterator[None]:
    """Convert a RegardError to a usage error (exit code 2)."""
    try:
        yield
    except RegardError as error:
        if is_debugged():
            raise
        raise click.UsageError(str(error)) from error


def can_write_stdout() -> bool:
    """Return whether stdout can be written."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"")  # what did not fit the buffer is not flushed
    except UnsupportedOperation:  # not a file: a test, or a notebook
        return True
    except OSError:
        return False
    return True


def exit_unwritable(error: OSError) -> NoReturn:
    """Exit because stdout cannot be written; silently for a broken pipe."""
    unread = isinstance(error, BrokenPipeError)
    if not unread:
        reason = str(error.strerror).lower()
        if error.errno == errno.EBADF:
            reason = "it is closed. To discard the output, write >/dev/null"
        click.echo(f"Error: stdout cannot be written: {reason}.", err=True)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())  # discards the rest of the buffer
    sys.exit(UNREAD if unread else 1)


def write_reason(error: Exception, command: str | None) -> str:
    """Return the message that a user sees for an error."""
    if isinstance(error, ModuleNotFoundError):
        module = (error.name or "").partition(".")[0]
        extras = [extra for extra, parts in PARTS.items() if module in parts]
        if not extras:
            return f"there is no module {error.name}."
        wanted = "atlas" if command == "atlas" else extras[0]  # atlas includes others
        return f'this needs {error.name}: pip install "regard[{wanted}]"'
    if isinstance(error, OSError) and error.strerror:
        place = error.filename or "a file"
        return f"{place} cannot be used: {error.strerror.lower()}."
    return str(error)


def require_extras(*extras: str) -> None:
    """Raise an error early if an extra is not installed."""
    missing = {x: PARTS[x][0] for x in extras if find_spec(PARTS[x][0]) is None}
    if missing:
        names, wanted = " and ".join(missing.values()), ",".join(missing)
        raise click.ClickException(
            f'this needs {names}: pip install "regard[{wanted}]"'
        )


def write_epilog(example: str, then: str) -> str:
    """Return the last lines of a help text: an example, and the next step."""
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
    """The path of a file to write; its folder must exist, which is checked early."""

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


def read_argument(text: str) -> str:
    """Return the contents of a file or of stdin ("-"), or else the argument itself."""
    if text == "-" and sys.stdin is None:
        raise FileError('stdin is closed, so "-" cannot be read. Pipe a text to it.')
    if text == "-" or os.path.lexists(text):  # also a folder, or a link to nothing
        return read_text(text)
    if FILE_NAME.fullmatch(text):
        click.echo(f"there is no file {text}: using it as the text", err=True)
    return text


def read_text(path: str) -> str:
    """Return the text of a file, or of stdin ("-"); raise FileError if it is none."""
    try:
        with click.open_file(path, encoding="utf-8") as file:
            found: str = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(
            f"{path} cannot be read as text: {reason}. Write the name of a file in "
            "UTF-8."
        ) from error
    if "\0" in found:
        raise FileError(f"{path} is not a text file: it contains null bytes.")
    return found


def remove_control(text: str) -> str:
    """Remove control characters, so that a model cannot send terminal escapes."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


@contextmanager
def draw_progress(name: str, total: int | None) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr, if it is a terminal.

    total: None for an indeterminate bar
    """
    from rich.console import Console  # noqa: PLC0415 (keeps --help fast)
    from rich.progress import Progress  # noqa: PLC0415

    console = Console(stderr=True)
    quiet = not console.is_terminal
    with Progress(console=console, transient=True, disable=quiet) as bar:
        line = bar.add_task(name, total=total)
        yield lambda done, _: bar.update(line, completed=done)


def prepare_streams() -> None:
    """Replace closed standard streams, and fix an invalid COLUMNS."""
    # stderr first: if 1 is taken, 2 is the next number, and libraries write to it
    sys.stderr = sys.stderr or reopen_stream(2, os.O_WRONLY)
    sys.stdout = sys.stdout or reopen_stream(1, os.O_RDONLY)  # so that writing fails
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # "?" for characters it cannot encode
            stream.reconfigure(errors="replace")
    width = os.environ.get("COLUMNS", "")
    if not width.isdecimal() or not int(width):  # 0 would print nothing
        os.environ.pop("COLUMNS", None)


def reopen_stream(number: int, how: int) -> TextIO:
    """Open a closed standard stream on the null device.

    Otherwise the next opened file would get its file descriptor, and the output of
    libraries would be written to that file.
    """
    found = os.open(os.devnull, how)
    try:
        os.fstat(number)  # already taken by a file
    except OSError:
        os.dup2(found, number)
        os.close(found)
        found = number
    return open(found, "w", encoding="utf-8")  # noqa: PTH123
