"""Record a running model (`regard.watch` uses it).

What other packages take from it, to observe operators and to run the calls of adapters.

Next: watch.py
"""

from regard.lens.adapters.adapter import Adapter
from regard.lens.adapters.hear import describe_failure, run_muted
from regard.lens.adapters.registry import list_adapters, patch_places
from regard.lens.adapters.sdpa import SDPA, expect_sdpa
from regard.lens.captured_call import CapturedCall, arrange, compute_weights
from regard.lens.find_attention import AttentionFinder
from regard.lens.observer import Observer
from regard.lens.tally import Tallies
from regard.lens.trace import find_storages
from regard.lens.watch import capture

__all__ = [
    "SDPA",
    "Adapter",
    "AttentionFinder",
    "CapturedCall",
    "Observer",
    "Tallies",
    "arrange",
    "capture",
    "compute_weights",
    "describe_failure",
    "expect_sdpa",
    "find_storages",
    "list_adapters",
    "patch_places",
    "run_muted",
]
