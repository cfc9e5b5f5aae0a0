"""Write one or two atlases as a single HTML file: no server, no network.

    write_page("atlas.html", [table], names=["prose"])
    write_page("two.html", [prose, code], names=["prose", "code"])

    assets ──────────────────────────▶ one script, one style, allowed by their hashes
    tables ─▶ means and intervals ───▶ JSON, numbers in full precision
           ─▶ examples ──────────────▶ compressed, unpacked when a head is selected

If not all examples fit, each head keeps its first ones, and the page says so. Texts are
never parsed as markup: they are escaped here, and inserted as text nodes in the page.

Next: assets/atlas.js
"""

from __future__ import annotations

import base64
import json
import re
import shlex
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.atlas.table import AtlasDifference, AtlasTable, Example, compare_atlases
from regard.atlas.terminal_table import (
    describe_atlas,
    fit_scale,
    fit_signs,
    tell_interval,
    tell_left_out,
    tell_marked,
)
from regard.errors import FileError, OptionError
from regard.show.page_file import hash_source
from regard.show.script_bundle import join_modules, read_asset
from regard.show.terminal_map import clean_title
from regard.stats.registry import find_statistic

ASSETS = Path(__file__).parent / "assets"
MARKER = re.compile(r"<!-- (\w+) -->")
EXAMPLES = 60_000  # approximate total of all heads, statistics and tables
AROUND = 160  # characters on each side of a token


def write_page(
    path: str | Path, tables: Sequence[AtlasTable], *, names: Sequence[str]
) -> None:
    """Write the page of one atlas, or of two that are compared.

    names: the display name of each, such as "prose" and "code"
    """
    if len(tables) not in (1, 2) or len(names) != len(tables):
        raise OptionError(
            f"{len(tables)} tables with {len(names)} names, expected one or two tables "
            'and a name for each: write_page(path, [a, b], names=["a", "b"]).'
        )
    page = make_html(tables, names)
    try:
        Path(path).write_bytes(page)
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror}.") from None


def make_html(tables: Sequence[AtlasTable], names: Sequence[str]) -> bytes:
    """Return the page as bytes."""
    first = tables[0]
    statistics = [x for x in first.statistics if x in tables[-1].statistics]
    if not statistics or not sum(first.heads):
        raise OptionError("there is nothing to show: no head has any statistic.")
    each = max(1, EXAMPLES // (sum(first.heads) * len(statistics) * len(tables)))
    data = {
        "title": write_title(tables),
        "names": list(names),
        "about": [
            words
            for table in tables
            for words in (describe_atlas(table.about), tell_left_out(table.about))
            if words
        ],
        "interval": tell_interval(tables),
        "folders": [name_folder(table) for table in tables],
        "layers": list(first.layers),
        "heads": list(first.heads),
        "statistics": [pack_statistic(tables, name) for name in statistics],
        "cut": each if count_most(tables) > each else None,
    }
    held = (
        f'<script type="text/plain" id="examples-{t}-{s}">'
        f"{pack_examples(table, name, each)}</script>"
        for t, table in enumerate(tables)
        for s, name in enumerate(statistics)
    )
    script = join_modules("atlas.js", ASSETS)
    style = read_asset("map.css") + read_asset("atlas.css", ASSETS)
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    parts = {
        "policy": f"default-src 'none'; script-src {hash_source(script)}; style-src "
        f"{hash_source(style)}; img-src data:; base-uri 'none'; form-action 'none'",
        "style": style,
        "data": text.replace("<", "\\u003c"),  # no text can close the element
        "examples": "\n".join(held),
        "script": script,
    }
    page = read_asset("page.html", ASSETS)
    return MARKER.sub(lambda found: parts[found[1]], page).encode()


def write_title(tables: Sequence[AtlasTable]) -> str:
    """Return the title of the page."""
    models = dict.fromkeys(clean_title(str(x.about.get("model", ""))) for x in tables)
    return f"Atlas of {' and '.join(filter(None, models)) or 'a model'}"


def name_folder(table: AtlasTable) -> str | None:
    """Return the folder of an atlas quoted for a shell, or None if unknown."""
    folder = table.about.get("folder")
    return None if folder is None else shlex.quote(str(folder))


def pack_statistic(tables: Sequence[AtlasTable], name: str) -> dict[str, Any]:
    """Return the numbers of a statistic for each table, and their difference."""
    scale = fit_scale(*(table.mean(name) for table in tables))
    entry = find_statistic(name)
    packed = {
        **entry.pack(),
        "told": entry.summary,
        "scale": [scale.low, scale.high],
        "tables": [
            {
                "mean": list_values(table, table.mean(name)),
                "half": list_values(table, table.half(name)),
                "count": list_values(table, table.count(name)),
                "doubt": list_values(table, table.doubt(name)),
            }
            for table in tables
        ],
    }
    if len(tables) == 1:
        return packed
    found = compare_atlases(tables[0], tables[1], name)
    return packed | {"difference": pack_difference(tables[0], found)}


def pack_difference(table: AtlasTable, found: AtlasDifference) -> dict[str, Any]:
    """Return the differences between two tables, and which ones are marked."""
    scale = fit_signs(found)
    return {
        "mean": list_values(table, found.difference),
        "half": list_values(table, found.half),
        "marked": list_values(table, found.marked),
        "told": tell_marked(found),
        "scale": [scale.low, scale.high],
    }


def list_values(table: AtlasTable, grid: NDArray[Any]) -> list[list[float | None]]:
    """Return the numbers of each layer, one per head; None if unknown."""
    numbers = np.asarray(grid, np.float64)
    return [
        [x if np.isfinite(x) else None for x in row[:count].tolist()]
        for row, count in zip(numbers, table.heads, strict=True)
    ]


def count_most(tables: Sequence[AtlasTable]) -> int:
    """Return the largest number of examples of any head."""
    return max((len(x) for table in tables for x in table.found.values()), default=0)


def pack_examples(table: AtlasTable, statistic: str, each: int) -> str:
    """Return the first examples of every head, compressed: [layer][head] -> list."""
    found = [
        [
            [list_example(x) for x in table.examples(statistic, layer, head)[:each]]
            for head in range(count)
        ]
        for layer, count in enumerate(table.heads)
    ]
    text = json.dumps(found, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def list_example(x: Example) -> list[Any]:
    """Return an example as the page reads it, with its texts truncated."""
    texts = [x.before[-AROUND:], x.token[:AROUND], x.after[:AROUND]]
    return [x.value, x.document[:AROUND], x.piece, x.position, *texts]
