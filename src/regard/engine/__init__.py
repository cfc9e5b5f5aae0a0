"""The same numbers, fast: attention and its masks on PyTorch's fused kernels.

Next: engine/choose.py
"""

from regard.engine.choose import attend, choose

__all__ = ["attend", "choose"]
