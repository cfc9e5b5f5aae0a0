"""docs/howto/with-other-tools.md, run with nnsight and TransformerLens (.venv.wild)."""

import runpy
from pathlib import Path

import pytest
import torch
import wild  # noqa: F401 (torchvision can be imported after it)
from test_docs import desk, give_lens, read_blocks  # noqa: F401 (a fixture)

import regard

PAGE = Path(__file__).parent.parent / "docs" / "howto" / "with-other-tools.md"
BLOCKS = read_blocks(PAGE)


@pytest.mark.parametrize(
    ("tool", "count"), [("nnsight", 2), ("TransformerLens", 3)], ids=str
)
def test_the_page_runs(tool, count, desk):  # noqa: F811
    pytest.importorskip({"TransformerLens": "transformer_lens"}.get(tool, tool))
    given = {**give_lens(), "torch": torch, "regard": regard}
    blocks = [x["text"] for x in BLOCKS if x["why"] and f"needs {tool}," in x["why"]]
    assert len(blocks) == count
    script = desk / "page.py"  # nnsight reads the source of its `with` blocks
    script.write_text("\n".join(blocks), "utf-8")
    runpy.run_path(str(script), given)
