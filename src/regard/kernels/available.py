"""Which arrays the kernels can read: the rule, in one place.

The tensors are on a GPU of AMD, or of NVIDIA from Ampere on (torch calls both "cuda"),
in one dtype of up to 32 bits, with D up to 256, without gradients; and Triton is
installed. All others take the engine's kernels (stats/replay.py). Neither torch nor
Triton is imported here.

Next: ../stats/kernel_pass.py
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from regard.arrays import Array, is_torch

DEVICES = ("cuda",)  # tests add "cpu", where Triton's interpreter runs
DTYPES = ("torch.float16", "torch.bfloat16", "torch.float32")
OLDEST = (8, 0)  # compute capability of NVIDIA's Ampere
WIDEST = 256  # the largest D
FEATURES = 8  # summed in one pass


def can_run(q: Array, k: Array) -> bool:
    """Return whether the kernels compute the statistics of these arrays."""
    return (
        is_torch(q)
        and is_torch(k)
        and {q.device.type, k.device.type} <= set(DEVICES)
        and q.dtype == k.dtype
        and str(q.dtype) in DTYPES
        and q.shape[-1] <= WIDEST
        and not (q.requires_grad or k.requires_grad)
        and find_spec("triton") is not None
        and is_supported(q)
    )


def is_supported(q: Array) -> bool:
    """Return whether Triton compiles for the GPU of a tensor."""
    torch = sys.modules["torch"]
    if q.device.type != "cuda" or torch.version.hip:
        return True
    return bool(torch.cuda.get_device_capability(q.device) >= OLDEST)
