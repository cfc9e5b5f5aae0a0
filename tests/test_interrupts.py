"""An interrupt leaves nothing behind, wherever it comes while a block begins or ends."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "interrupts.py"


@pytest.mark.slow
def test_an_interrupt_leaves_nothing_behind():
    command = [sys.executable, str(SCRIPT), "--places", "50", "--times", "50"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for block in json.loads(done.stdout).values():
        assert block["interrupted"] == block["random times"] == 50
        assert block["left behind"] == {}


def test_the_committed_result_left_nothing_behind():
    result = json.loads(SCRIPT.with_suffix(".json").read_text("utf-8"))
    assert set(result) == {"watch", "knock_out"}
    for block in result.values():
        assert block["interrupted"] == block["opcodes"] > 1_000
        assert block["left behind"] == {}
