"""Command line of `regard learn`; the implementation is in workspace.py.

    regard learn                what is solved, what comes next
    regard learn watch          write in your editor; every save is graded
    regard learn hint           one more hint each time

Next: course.py
"""

from __future__ import annotations

import json as json_text
import sys
from pathlib import Path
from typing import IO

import click
from click.shell_completion import CompletionItem

from regard.errors import OptionError
from regard.terminal import Commands, write_epilog


def complete_name(
    _ctx: click.Context, _param: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Return the exercises that start with the typed text, for shell completion."""
    from regard.learn.exercise import list_exercises  # noqa: PLC0415 (only for a shell)

    known = ((x.name, x.title) for x in list_exercises(None))
    return [CompletionItem(x, help=what) for x, what in known if x.startswith(typed)]


NAME = click.argument("name", required=False, shell_complete=complete_name)
EXAMPLES = {
    "list": write_epilog(
        "regard learn list", "regard learn watch continues the course."
    ),
    "open": write_epilog("regard learn open softmax", "regard learn watch grades it."),
    "watch": write_epilog(
        "regard learn watch", "regard learn hint, in another terminal."
    ),
    "check": write_epilog(
        "regard learn check softmax", "regard learn hint, if it is wrong."
    ),
    "hint": write_epilog("regard learn hint", "write, and regard learn check."),
    "reset": write_epilog("regard learn reset softmax", "regard learn watch softmax"),
    "next": write_epilog("regard learn next", "regard learn watch"),
    "grade": write_epilog(
        "regard learn grade submissions --csv results.csv",
        "docs/learn.md, for teachers.",
    ),
}


@click.group(
    cls=Commands,
    invoke_without_command=True,
    short_help="Learn attention by writing it; every save is graded.",
    epilog=write_epilog(
        "regard learn", "regard learn watch, and write in your editor."
    ),
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False),
    default="regard-exercises",
    show_default=True,
    help="Folder for your files and your progress.",
)
@click.option("--course", type=click.Path(), help="A folder of your own exercises.")
@click.option("--build", metavar="DIR", help="Write the course as a web site.")
@click.option(
    "--pyodide",
    metavar="DIR",
    help="Python for browsers, for --build; by default downloaded once.",
)
@click.pass_context
def learn(
    ctx: click.Context,
    *,
    folder: str,
    course: str | None,
    build: str | None,
    pyodide: str | None,
) -> None:
    """Learn attention by writing it; every save is graded, in words.

    NAME is the name or number of an exercise; by default the current one.
    """
    if build is not None:
        build_course(build, pyodide=pyodide, course=course)
        return
    from regard.learn.workspace import Workspace  # noqa: PLC0415 (help comes at once)

    ctx.obj = Workspace(Path(folder), course=Path(course) if course else None)
    if ctx.invoked_subcommand is None:
        ctx.obj.list()


def build_course(folder: str, *, pyodide: str | None, course: str | None) -> None:
    """Write the site; Python for browsers is downloaded unless it is there."""
    from regard.learn.build_site import build_site, has_runtime  # noqa: PLC0415
    from regard.learn.pyodide_files import fetch_runtime  # noqa: PLC0415 (when asked)

    runtime: str | Path | None = pyodide
    if pyodide is None and not has_runtime(folder):
        try:
            runtime = fetch_runtime(show_download)
        finally:
            show_download("")
    click.echo(build_site(folder, pyodide=runtime, course=course))


def show_download(line: str) -> None:
    """Write a line over the last one; to a file, only the start of a download."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{line}", nl=False, err=True)
    elif line.endswith("…"):
        click.echo(line, err=True)


@learn.command("list", epilog=EXAMPLES["list"])
@click.option("--json", is_flag=True, help="Print JSON.")
@click.pass_context
def list_course(ctx: click.Context, *, json: bool) -> None:
    """Show what is solved and what comes next."""
    if not json:
        ctx.obj.list()
        return
    desk = ctx.obj
    current, solved = desk.find().name, desk.progress.solved
    rows = [
        {
            "number": number,
            "name": exercise.name,
            "title": exercise.title,
            "minutes": exercise.minutes,
            "extra": exercise.extra,
            "solved": exercise.name in solved,
            "current": exercise.name == current,
        }
        for number, exercise in enumerate(desk.exercises.values(), 1)
    ]
    click.echo(json_text.dumps(rows, ensure_ascii=False))


@learn.command("open", epilog=EXAMPLES["open"])
@NAME
@click.pass_context
def open_exercise(ctx: click.Context, name: str | None) -> None:
    """Show an exercise and write its stub, unless your file exists."""
    ctx.obj.open(name)
    click.echo("Then write: regard learn watch")


@learn.command(epilog=EXAMPLES["watch"])
@NAME
@click.pass_context
def watch(ctx: click.Context, name: str | None) -> None:
    """Grade your file on every save; Ctrl-C ends."""
    try:
        ctx.obj.watch(name)
    except KeyboardInterrupt:
        click.echo("\nContinue later with: regard learn watch")


@learn.command(epilog=EXAMPLES["check"])
@NAME
@click.pass_context
def check(ctx: click.Context, name: str | None) -> None:
    """Grade your file once; exits with 1 if it is not right."""
    exercise = ctx.obj.find(name)
    if not ctx.obj.grade(exercise).passed:
        ctx.exit(1)
    following = ctx.obj.follow(exercise)
    if following is not None:
        click.echo(f"Continue with: regard learn open {following.name}")


@learn.command(epilog=EXAMPLES["hint"])
@NAME
@click.pass_context
def hint(ctx: click.Context, name: str | None) -> None:
    """Show one more hint each time, up to three."""
    ctx.obj.hint(name)


@learn.command(epilog=EXAMPLES["reset"])
@NAME
@click.pass_context
def reset(ctx: click.Context, name: str | None) -> None:
    """Restore the stub; your code is kept in another file."""
    ctx.obj.reset(name)


@learn.command("next", epilog=EXAMPLES["next"])
@click.pass_context
def go_on(ctx: click.Context) -> None:
    """Skip this exercise and open the next one."""
    ctx.obj.next()


@learn.command("grade", epilog=EXAMPLES["grade"])
@click.argument("submissions", type=click.Path(allow_dash=True))
@click.option("--exercise", "exercises", multiple=True, help="Assigned; repeatable.")
@click.option(
    "--learners",
    type=click.File(encoding="utf-8"),
    help="A file with one name per line; each gets a row for every exercise.",
)
@click.option("--csv", metavar="FILE", help="Write a table of the results.")
@click.option("--json", is_flag=True, help="Print JSON.")
@click.pass_context
def grade_class(
    ctx: click.Context,
    submissions: str,
    *,
    exercises: tuple[str, ...],
    learners: IO[str] | None,
    csv: str | None,
    json: bool,
) -> None:
    """Grade a class: a folder or zip of submissions.

    SUBMISSIONS has a folder per learner. It is a folder, a zip, a file saved in the
    browser, a JSON file, or - for JSON from standard input.
    """
    from regard.learn.grade_class import grade_folder, grade_submissions  # noqa: PLC0415
    from regard.learn.submissions import is_request  # noqa: PLC0415

    course = ctx.obj.exercises
    if submissions != "-" and not is_request(Path(submissions)):
        names = [] if learners is None else learners.read().split("\n")
        roster = [x.strip() for x in names if x.strip()]
        report = grade_folder(
            Path(submissions), course, assigned=exercises, learners=roster
        )
    elif exercises or learners:
        raise OptionError("JSON names its exercises and learners: omit the options.")
    else:
        with click.open_file(submissions, encoding="utf-8") as file:
            report = grade_submissions(file.read(), course)
    if csv is not None:
        Path(csv).write_text(report.to_csv(), encoding="utf-8", newline="")
    click.echo(report.to_json() if json else report.summarize(), nl=json)


if __name__ == "__main__":
    learn(prog_name="regard learn")
