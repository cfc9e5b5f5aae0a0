"""regard check: test an attention implementation for common pitfalls.

    module:function, and its convention → the test cases of a level → a report
    exit code 0: all passed, 1: some failed, 2: it could not be tested,
    3: nothing failed, but the signature could not be read

The output of the function goes to stderr, including what C code or a child process
writes to file descriptor 1, so that stdout contains only the report.

Next: judge/run_check.py
"""

from __future__ import annotations

import ctypes
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from regard.errors import OptionError, RegardError
from regard.terminal import NewFile, is_debugged, write_epilog

if TYPE_CHECKING:
    from regard.judge.convention import Attention, Convention
    from regard.judge.report import Report


class NotTestable(click.ClickException):
    """The function could not be tested (exit code 2; 1 means that tests failed)."""

    exit_code = 2


@click.command(
    short_help="Test an attention implementation for pitfalls.",
    epilog=write_epilog(
        "regard check my_code:attend --layout bnhd --level basic",
        "docs/check.md lists all cases, also for use in your own tests.",
    ),
)
@click.argument("place")
@click.option(
    "--level", default="complete", show_default=True, help="basic, complete or kernel."
)
@click.option("--layout", help="Axes of q, k, v: bhnd, bnhd, hnd, bnd, nd, bn(hd), …")
@click.option("--out-layout", help="Axes of out, if they differ.")
@click.option("--order", help="qkv or qvk.")
@click.option("--library", help="numpy, torch or jax.")
@click.option("--device", help="cpu, cuda, …")
@click.option("--precisions", help="Input dtypes: float32,float16,… Default: all.")
@click.option("--true-means", help="What True in a mask means: attend, hide or added.")
@click.option("--mask-axes", help="bhqk, bqk, qk or bk.")
@click.option("--causal-from", help="Alignment of row 0 if Nq < Nk: start or end.")
@click.option("--returns", help="out; out,weights; out,lse; …")
@click.option("--lse-base", help="Base of the logarithm in lse: e or 2.")
@click.option("--shared-heads", is_flag=True, default=None, help="It supports Hk < H.")
@click.option("--head-order", help="Shared heads: grouped (default) or interleaved.")
@click.option(
    "--always-causal", is_flag=True, default=None, help="It is causal in every call."
)
@click.option(
    "--float-mask", is_flag=True, default=None, help="A mask of numbers is added."
)
@click.option("--window-counts", help="What a window counts: others or all.")
@click.option(
    "--gradients/--no-gradients", default=None, help="Test the backward pass."
)
@click.option("--other-lengths/--same-lengths", default=None, help="Nk may be ≠ Nq.")
@click.option("--other-widths/--same-widths", default=None, help="Dv may be ≠ D.")
@click.option("--storage", help="Keys and values: varlen, paged or cache.")
@click.option("--page-size", type=int, help="Keys per page, if paged.  [default: 4]")
@click.option("--convention", help="module:name of a Convention; options override it.")
@click.option("--seed", default=0, show_default=True, help="Seed of the random arrays.")
@click.option("--limit", default=30.0, show_default=True, help="Seconds per call.")
@click.option("--for", "search", default="0", help="Search random calls: 5m, 90s, 1h.")
@click.option("--like", default="", help="Sizes to search: q=8x32x1024x128,kv=8.")
@click.option("--start", default=0, help="Number of the first call, to continue.")
@click.option(
    "--markdown", type=NewFile(dash=True), help='Report as Markdown; "-" prints it.'
)
@click.option("--json", type=NewFile(dash=True), help="Report as JSON.")
@click.option("--junit", type=NewFile(dash=True), help="Report as JUnit XML, for CI.")
def check(*, place: str, level: str, convention: str | None, **options: Any) -> None:
    """Test an attention implementation for pitfalls; PLACE is module:function.

    Exits with 0 if all tests pass, 1 if some fail, 2 if it cannot be tested, and 3 if
    nothing fails, but its signature cannot be read, so its options were not tested.
    """
    from regard.judge.convention import Convention, read_convention
    from regard.judge.run_check import check as judge
    from regard.judge.run_check import load_attention

    files = {name: options.pop(name) for name in ("markdown", "json", "junit")}
    run = {name: options.pop(name) for name in ("seed", "limit", "search", "like")}
    run["start"] = options.pop("start")
    for name in ("returns", "precisions"):
        if options[name] is not None:
            options[name] = tuple(x.strip() for x in options[name].split(","))
    given = {name: value for name, value in options.items() if value is not None}
    try:
        with print_to_stderr():
            fn = load_attention(place)
            words = load_attention(convention) if convention else read_convention(fn)
            if not isinstance(words, Convention):
                kind = type(words).__name__
                raise NotTestable(f"{convention} is a {kind}, not a Convention.")
            words = declare_options(fn, words, given)
            report = judge(fn, words, level=level, **run)
    except (RegardError, ModuleNotFoundError) as error:
        if is_debugged():
            raise
        raise NotTestable(str(error)) from error
    write_report(report, files)
    sys.exit((3 if report.unread else 0) if report.ok else 1)


def declare_options(
    fn: Attention, words: Convention, given: dict[str, Any]
) -> Convention:
    """Return the convention with the options of the command line."""
    from regard.judge.convention import declare_storage, read_names
    from regard.judge.storage import read_storage

    kind, page = given.pop("storage", None), given.pop("page_size", None)
    if kind or (page and words.storage):
        names = read_names(fn) or []
        kept = words.storage.kind if words.storage else None
        stored = read_storage(names, kind or kept, page=page or 4)
        words = declare_storage(words, stored)
    if page and (words.storage is None or words.storage.kind != "paged"):
        raise OptionError(f"page_size={page}, but the storage is not paged.")
    return replace(words, **given)


@contextmanager
def print_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr, both in Python and for file descriptor 1."""
    there = sys.stderr or io.StringIO()  # sys.stderr is None if it is closed
    if sys.stdout is not None:
        sys.stdout.flush()
    kept = None
    with suppress(OSError):  # one of them is closed
        kept = os.dup(1)
    with suppress(OSError):
        os.dup2(2, 1)
    try:
        with redirect_stdout(there):
            yield
    finally:
        with suppress(OSError, AttributeError, TypeError):  # not on every system
            ctypes.CDLL(None).fflush(None)  # flush the buffers of C code
        with suppress(OSError):
            os.close(1) if kept is None else os.dup2(kept, 1)
        if kept is not None:
            os.close(kept)


def write_report(report: Report, files: dict[str, str | None]) -> None:
    """Write the report files; print the report unless a file is "-" (stdout)."""
    written = {
        "markdown": report.to_markdown,
        "json": report.to_json,
        "junit": report.to_junit,
    }
    if "-" not in files.values():
        report.show()
    for kind, path in files.items():
        if path == "-":
            click.echo(written[kind]())
        elif path is not None:
            Path(path).write_text(written[kind](), encoding="utf-8")
