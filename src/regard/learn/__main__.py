"""The commands of `regard learn`; the work is in runner.py.

    regard learn                what is solved, what comes next
    regard learn watch          write in your editor; every save is graded
    regard learn hint           one more each time

Next: course.py
"""

from __future__ import annotations

import json as json_text
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from regard.terminal import Commands, guide


def complete_name(
    _ctx: click.Context, _param: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Return the exercises that begin with what was typed, for a shell."""
    from regard.learn.exercise import list_exercises  # noqa: PLC0415 (only for a shell)

    known = ((x.name, x.title) for x in list_exercises(None))
    return [CompletionItem(x, help=what) for x, what in known if x.startswith(typed)]


NAME = click.argument("name", required=False, shell_complete=complete_name)
EXAMPLES = {
    "list": guide("regard learn list", "regard learn watch goes on where you stopped."),
    "open": guide("regard learn open softmax", "regard learn watch grades it."),
    "watch": guide("regard learn watch", "regard learn hint, in another terminal."),
    "check": guide("regard learn check softmax", "regard learn hint, if it is wrong."),
    "hint": guide("regard learn hint", "write, and regard learn check."),
    "reset": guide("regard learn reset softmax", "regard learn watch softmax"),
    "next": guide("regard learn next", "regard learn watch"),
}


@click.group(
    cls=Commands,
    invoke_without_command=True,
    short_help="Learn attention by writing it; every save is graded.",
    epilog=guide("regard learn", "regard learn watch, and write in your editor."),
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False),
    default="regard-exercises",
    show_default=True,
    help="Where you write, and where your progress is kept.",
)
@click.option("--course", type=click.Path(), help="A folder of your own exercises.")
@click.option("--build", metavar="DIR", help="Write the course as a web site.")
@click.option("--pyodide", metavar="DIR", help="Python for browsers, for --build.")
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

    NAME of a command is an exercise, by name or number; unless given, the one to go
    on with.
    """
    if build is not None:
        from regard.learn.browser import build_site  # noqa: PLC0415 (only when asked)

        click.echo(build_site(build, pyodide=pyodide, course=course))
        return
    from regard.learn.runner import Desk  # noqa: PLC0415 (help comes at once)

    ctx.obj = Desk(Path(folder), course=Path(course) if course else None)
    if ctx.invoked_subcommand is None:
        ctx.obj.list()


@learn.command("list", epilog=EXAMPLES["list"])
@click.option("--json", is_flag=True, help="Print it for programs.")
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
    """Show an exercise and write its stub, unless you began already."""
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
        click.echo("\nGo on later with: regard learn watch")


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
        click.echo(f"Go on with: regard learn open {following.name}")


@learn.command(epilog=EXAMPLES["hint"])
@NAME
@click.pass_context
def hint(ctx: click.Context, name: str | None) -> None:
    """Tell a little more each time, three times."""
    ctx.obj.hint(name)


@learn.command(epilog=EXAMPLES["reset"])
@NAME
@click.pass_context
def reset(ctx: click.Context, name: str | None) -> None:
    """Put the stub back; what you wrote is kept beside it."""
    ctx.obj.reset(name)


@learn.command("next", epilog=EXAMPLES["next"])
@click.pass_context
def go_on(ctx: click.Context) -> None:
    """Leave this exercise and open the one after it."""
    ctx.obj.next()


if __name__ == "__main__":
    learn(prog_name="regard learn")
