"""Lets torchvision be imported beside a torch without CUDA.

The wheel of the package index is built for CUDA. Its library of operators does not load
beside a CPU build of torch, and the import fails because it describes two of them. No
model here runs them (boxes of a detector), so it is enough that their names exist.
"""

import importlib.util
from pathlib import Path

import torch

BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare() -> None:
    """Declare the operators that torchvision describes, unless it has its own."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    try:
        torch.ops.load_library(str(Path(found.origin).with_name("_C.so")))
    except OSError:
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", BOXES)
