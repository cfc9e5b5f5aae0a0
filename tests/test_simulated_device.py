"""Everything of regard on an accelerator that is simulated, in a process of its own.

on_device/simulated_device.py says what it is. Its tests compare with the CPU, and fail
on a tensor that was left on the host.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "on_device"
PARTS = ("device_engine.py", "device_lens.py", "device_tools.py", "device_doctor.py")


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler"
)
def test_everything_runs_on_the_simulated_device():
    command = [sys.executable, "-m", "pytest", "-q", "--confcutdir", str(HERE)]
    command += ["-p", "no:cacheprovider", *(str(HERE / part) for part in PARTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
