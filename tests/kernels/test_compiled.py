"""The kernels compile for a GPU of each vendor, to what the committed table says."""

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
RESULT = json.loads((BENCHMARKS / "compile_kernels.json").read_text("utf-8"))


def test_a_target_of_each_vendor_compiles_to_what_the_table_says():
    settings = {x: y for x, y in os.environ.items() if x != "TRITON_INTERPRET"}
    command = [sys.executable, "compile_kernels.py", "sm_90", "gfx942"]
    done = subprocess.run(
        command,
        cwd=BENCHMARKS,
        env=settings,
        check=True,
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)
    assert len(found) == 4
    assert all(x in RESULT["programs"] for x in found), found


def test_nothing_is_spilled_up_to_a_width_of_128():
    narrow = [x for x in RESULT["programs"] if x["D"] <= 128]
    assert len({x["target"] for x in narrow}) == 5
    assert len({x["dtype"] for x in narrow}) == 3
    assert not [x for x in narrow if x["spilled_bytes"]]
    assert all(x["instructions"] for x in RESULT["programs"])
