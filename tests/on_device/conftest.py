"""A process with the simulated device: tests of this folder run in one of their own.

    python -m pytest --confcutdir tests/on_device tests/on_device/device_*.py

tests/test_simulated_device.py does so. Next: device_engine.py
"""

import copy
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.append(str(Path(__file__).parent.parent))

import device_kernels
import pytest
import simulated_device
import torch

simulated_device.load_device()
device_kernels.register_kernels()


def move(x, device):
    """Return tensors, also those in dicts and lists, and models on a device."""
    if isinstance(x, torch.nn.Module):
        return copy.deepcopy(x).to(device)
    if isinstance(x, dict):
        return {name: move(y, device) for name, y in x.items()}
    if isinstance(x, tuple | list):
        return type(x)(move(y, device) for y in x)
    return x.to(device) if isinstance(x, torch.Tensor) else x


@pytest.fixture
def run_on_both():
    """Return a function that calls another with arguments on the CPU, then on sim."""

    def run(function, *given):
        return tuple(function(*move(given, device)) for device in ("cpu", "sim"))

    return run
