"""Fast attention: the same results on PyTorch's fused kernels, with any mask.

Next: engine/choose.py
"""

from regard.engine.choose import attend, choose

__all__ = ["attend", "choose"]
