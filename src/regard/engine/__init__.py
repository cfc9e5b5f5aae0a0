"""Fast attention: the same results on PyTorch's fused kernels, with any mask.

    attend, choose        attention by regard, and which kernel it takes
    block_mask            a mask for torch's flex_attention
    sdpa_arguments        a mask for torch's scaled_dot_product_attention

Next: engine/choose.py
"""

from typing import TYPE_CHECKING, Any

from regard.arguments import name_missing
from regard.engine.choose import attend, choose
from regard.engine.flex import block_mask
from regard.engine.sdpa import sdpa_arguments

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Say what a function is called here."""
        raise name_missing("regard.engine", name, __all__)


__all__ = ["attend", "block_mask", "choose", "sdpa_arguments"]
