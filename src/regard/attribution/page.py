"""One HTML file of an answer and its documents, side by side, without any script.

    answer: one radio button for it and for each of its sentences
    documents: coloured by their effect on the chosen one, with their numbers

        share of the colour = 50 % · |effect| / largest |effect| on the chosen one

What is shown is decided by style rules, such as `:has(#p2:checked) #d0`. The policy of
the page allows its one style by hash and nothing else, and all text is escaped, so no
stranger's token can run or load anything. Of a recording, the mass is coloured.

Next: ../commands/why.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from regard.display import escape_text
from regard.show.page_file import hash_source, write_head

STYLE = Path(__file__).parent / "assets" / "sources.css"
LONGEST = 100_000  # characters of a line
STRONGEST = 50  # percent of a colour: the text stays readable


def write_sources_page(data: Mapping[str, Any]) -> bytes:
    """Return the HTML file of what Sources.to_dict returned."""
    whole, sentences = data["answer"], data["sentences"]
    parts = [whole, *(sentences if len(sentences) > 1 else [])]
    style = STYLE.read_text("utf-8") + "".join(list_rules(parts))
    policy = f"default-src 'none'; style-src {hash_source(style)}; img-src data:; "
    policy += "base-uri 'none'; form-action 'none'"
    by = "mass" if whole["effect"] is None else "effect"
    lines = [
        *write_head("sources of an answer · regard", policy, style),
        "<body>",
        "<header><h1>Sources of an answer</h1>",
        f"<p>{describe_colours(by, int(data['passes']))}</p></header>",
        "<main>",
        "<section><h2>Answer</h2>",
        "<fieldset><legend>choose a sentence</legend>",
        *(write_choice(i, part) for i, part in enumerate(parts)),
        "</fieldset>",
        *(write_warning(i, part) for i, part in enumerate(parts)),
        "</section>",
        "<section><h2>Documents</h2>",
        *(write_document(i, x, parts) for i, x in enumerate(data["documents"])),
        "</section>",
        "</main>",
        "</body>",
        "</html>",
    ]
    return "\n".join(lines).encode()


def describe_colours(by: str, passes: int) -> str:
    """Return what the colours mean."""
    if by == "mass":
        return (
            "Colour: attention mass of the answer on a document. This is a recording: "
            "without the model, the effect of hiding a document is not known."
        )
    return (
        "Colour: by how many nats the log-probability of the chosen sentence falls if "
        "the document is hidden. <b>Orange</b>: it supports the sentence. "
        f"<b>Blue</b>: it speaks against it. Measured in {passes} forward passes."
    )


def list_rules(parts: list[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the style rules of each chosen part: colours, and what is shown."""
    for i, part in enumerate(parts):
        values = part["mass"] if part["effect"] is None else part["effect"]
        most = max(map(abs, values)) or 1
        chosen = f"body:has(#p{i}:checked)"
        yield f"{chosen} .of{i}{{display:block}}\n"
        for j, x in enumerate(values):
            colour = "warm" if x > 0 else "cold"
            share = f"{STRONGEST * abs(x) / most:.1f}%"
            yield f"{chosen} #d{j}{{--hue:var(--{colour});--share:{share}}}\n"


def write_choice(i: int, part: Mapping[str, Any]) -> str:
    """Return the radio button of a part."""
    checked = "" if i else " checked"
    title = f"sentence {i}" if i else "whole answer"
    log = part["logprob"]
    log = "" if log is None else f"log-probability {log:.2f}"
    return (
        f'<label><input type="radio" name="part" id="p{i}"{checked}>'
        f"<span><small>{title} {log}</small>{write_lines(part['text'])}</span></label>"
    )


def write_warning(i: int, part: Mapping[str, Any]) -> str:
    """Return the warning of a part, shown while it is chosen."""
    if not part["warning"]:
        return ""
    text = escape_text(part["warning"], LONGEST)
    return f'<p class="warning of of{i}"><b>Warning:</b> {text}</p>'


def write_document(
    j: int, document: Mapping[str, Any], parts: list[Mapping[str, Any]]
) -> str:
    """Return a document, with its numbers for every part."""
    numbers = "".join(write_numbers(i, j, part) for i, part in enumerate(parts))
    name = escape_text(document["name"])
    text = write_lines(document["text"])
    return f'<article id="d{j}"><h3><bdi>{name}</bdi></h3>{numbers}{text}</article>'


def write_numbers(i: int, j: int, part: Mapping[str, Any]) -> str:
    """Return mass and effect of a document on a part, shown while it is chosen."""
    said = []
    for name, unit in (("effect", " nats"), ("mass", "")):
        values = part[name]
        if values is not None:
            most = " (largest)" if values[j] == max(values) else ""
            digits = 2 if name == "effect" else 3
            said.append(f"{name} {values[j]:.{digits}f}{unit}{most}")
    return f'<p class="numbers of of{i}">{", ".join(said)}</p>'


def write_lines(text: str) -> str:
    """Return a text as HTML, line by line."""
    lines = (escape_text(x, LONGEST) for x in text.strip().split("\n"))
    return f'<span class="text" dir="auto">{"<br>".join(lines)}</span>'
