"""Attention that ATen operators do not tell: one file for each library or function.

Next: adapter.py
"""

from regard.lens.adapters.adapter import Adapter
from regard.lens.adapters.registry import register

__all__ = ["Adapter", "register"]
