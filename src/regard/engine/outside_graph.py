"""Call a function outside of the graph that torch.compile makes.

Loading torch's compiler takes as long as loading torch. This file is imported while
something is being compiled, when the compiler is there already.

Next: flash.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def call(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Return `function(*args, **named)`."""
    return function(*args, **named)


call_outside_graph = torch.compiler.disable(call)  # masks and biases are planned there
