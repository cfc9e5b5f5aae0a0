"""The commands of `regard learn`; the work is in runner.py.

    regard learn                what is solved, what comes next
    regard learn watch          write in your editor; every save is graded
    regard learn hint           one more each time

Next: course.py
"""

from __future__ import annotations

from pathlib import Path

import click

NAME = click.argument("name", required=False)


@click.group(invoke_without_command=True)
@click.option(
    "--folder",
    default="regard-exercises",
    show_default=True,
    help="Where you write, and where your progress is kept.",
)
@click.option("--course", help="A folder of your own exercises.")
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


@learn.command("list")
@click.pass_context
def list_course(ctx: click.Context) -> None:
    """Show what is solved and what comes next."""
    ctx.obj.list()


@learn.command("open")
@NAME
@click.pass_context
def open_exercise(ctx: click.Context, name: str | None) -> None:
    """Show an exercise and write its stub, unless you began already."""
    ctx.obj.open(name)
    click.echo("Then write: regard learn watch")


@learn.command()
@NAME
@click.pass_context
def watch(ctx: click.Context, name: str | None) -> None:
    """Grade your file on every save; Ctrl-C ends."""
    try:
        ctx.obj.watch(name)
    except KeyboardInterrupt:
        click.echo("\nGo on later with: regard learn watch")


@learn.command()
@NAME
@click.pass_context
def check(ctx: click.Context, name: str | None) -> None:
    """Grade your file once; exits with 1 if it is not right."""
    exercise = ctx.obj.find(name)
    if not ctx.obj.grade(exercise).passed:
        ctx.exit(1)


@learn.command()
@NAME
@click.pass_context
def hint(ctx: click.Context, name: str | None) -> None:
    """Tell a little more each time, three times."""
    ctx.obj.hint(name)


@learn.command()
@NAME
@click.pass_context
def reset(ctx: click.Context, name: str | None) -> None:
    """Put the stub back; what you wrote is kept beside it."""
    ctx.obj.reset(name)


@learn.command("next")
@click.pass_context
def go_on(ctx: click.Context) -> None:
    """Leave this exercise and open the one after it."""
    ctx.obj.next()


if __name__ == "__main__":
    learn()
