"""regard why: which documents the answer of a model is based on.

    QUESTION DOCUMENT… ─▶ documents and question in one prompt ─▶ answer
    mass and effect of each document on the answer, and on each of its sentences
    --passages: of each paragraph, which is between two empty lines

Next: ../attribution/sources.py
"""

from __future__ import annotations

import json as json_text
import re
from collections import Counter
from pathlib import Path

import click

from regard.errors import FileError
from regard.find_model import find_model
from regard.terminal import (
    DOWNLOAD,
    MODEL,
    NewFile,
    draw_progress,
    limit_new_tokens,
    read_text,
    remove_control,
    require_extras,
    write_epilog,
)


@click.command(
    short_help="Show which documents an answer is based on.",
    epilog=write_epilog(
        'regard why "When does it open?" a.txt b.txt --model MODEL.gguf',
        "add --page FILE to see answer and documents side by side.",
    ),
)
@click.argument("question")
@click.argument("documents", type=click.Path(), nargs=-1, required=True)
@click.option("--model", type=click.Path(), required=True, help=MODEL)
@DOWNLOAD
@limit_new_tokens(default=64)
@click.option(
    "--passages", is_flag=True, help="Hide one paragraph at a time, not a whole file."
)
@click.option("--page", type=NewFile(), help="Write answer and documents as HTML.")
@click.option("--json", is_flag=True, help="Print all numbers, as JSON.")
def why(
    *,
    question: str,
    documents: tuple[str, ...],
    model: str,
    download: bool,
    n_new: int,
    passages: bool,
    page: str | None,
    json: bool,
) -> None:
    """Answer QUESTION from DOCUMENTS, text files, and say which of them mattered.

    Mass is the attention that the answer pays to a document. Effect is by how much the
    log-probability of the answer falls if the document is hidden, in nats.
    """
    require_extras("torch")
    texts = read_files(documents)
    texts = split_passages(texts) if passages else texts
    path = find_model(model, download=download)
    with draw_progress("loading the model", None):
        from regard.attribution.sources import sources
        from regard.models.load import load

        network, words = load(path)
    content = "\n\n".join([*texts.values(), question])
    messages = [{"role": "user", "content": content}]
    with draw_progress("hiding documents", None):
        found = sources(network, words, messages, texts, n_new=n_new)
    if json:
        click.echo(json_text.dumps(found.to_dict(), allow_nan=False))
    else:
        click.echo(remove_control(str(found)))
    if page:
        found.page(page)
        click.echo(f"the page is in {page}", err=json)


def read_files(paths: tuple[str, ...]) -> dict[str, str]:
    """Return the texts of files by their names, or by their paths if names repeat."""
    names = Counter(Path(path).name for path in paths)
    texts = {}
    for path in map(Path, paths):
        name = path.name if names[path.name] == 1 else str(path)
        if name in texts:
            raise FileError(f"{path} is given twice. Name each document once.")
        texts[name] = read_text(str(path)).strip()
        if not texts[name]:
            raise FileError(f"{path} is empty, expected the text of a document.")
    return texts


def split_passages(texts: dict[str, str]) -> dict[str, str]:
    """Return the paragraphs of texts; a number is added to their names."""
    found: dict[str, str] = {}
    for name, text in texts.items():
        parts = [x for x in re.split(r"\n\s*\n", text) if x.strip()]
        found |= {f"{name} {i}": part for i, part in enumerate(parts, 1)}
    return found
