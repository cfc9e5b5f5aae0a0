"""Fast attention: the same results on PyTorch's fused kernels, with any mask.

Next: engine/choose.py
"""

from typing import TYPE_CHECKING, Any

from regard.arguments import name_missing
from regard.engine.choose import attend, choose

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Say what a function is called here."""
        raise name_missing("regard.engine", name, __all__)


__all__ = ["attend", "choose"]
