"""Hunt: results and tables of an atlas, as `regard atlas show` reads them.

    bytes ─▶ unpack_result ─▶ the same bits when packed again
          ─▶ read_table ─▶ the text and the page of it, alone and beside itself

Next: address.py
"""

from __future__ import annotations

import json
import random
import tempfile
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from damage import damage_bytes, damage_tree
from hunt import Target, main

from regard.atlas.page import write_page
from regard.atlas.store import pack_result, unpack_result
from regard.atlas.table import EXAMPLES, TABLE, read_table
from regard.atlas.terminal_table import draw_atlas_table, draw_difference, draw_head
from regard.errors import RegardError


def check(data: bytes) -> None:
    """Read a file as a result, and as a table; show it."""
    with suppress(RegardError):
        result = unpack_result(data)
        again = unpack_result(pack_result(result))
        assert again.tally.sums.tobytes() == result.tally.sums.tobytes()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / TABLE).write_bytes(data)
        (folder / EXAMPLES).write_bytes(b"[]")
        (folder / "about.json").write_text('{"plan": {}}', "utf-8")
        table = read_table(folder)
        for statistic in table.statistics:
            shown = draw_atlas_table(table, statistic)
            assert all(x.isprintable() or x == "\n" for x in shown)
            draw_difference(table, table, statistic, ["a", "b"])
        draw_head(table, 0, 0)
        write_page(folder / "x.html", [table], names=["a"])


def damage(rng: random.Random, data: bytes) -> bytes:
    """Change what the file says of itself, or a few bytes."""
    if rng.random() < 0.3:
        return damage_bytes(rng, data)
    try:
        table = pq.read_table(pa.BufferReader(data))
        told = json.loads(table.schema.metadata[b"regard"])
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
        return damage_bytes(rng, data)
    text = json.dumps(damage_tree(rng, told), ensure_ascii=False)
    words = {b"regard": text.encode("utf-8", "surrogatepass")}
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(words), sink)
    return bytes(sink.getvalue())


TARGET = Target("atlas_result", check, damage, longest=2**16)
if __name__ == "__main__":
    main(TARGET)
