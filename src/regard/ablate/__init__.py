"""Ablate heads, or attention to some keys, in a running model; measure the effect.

Next: knock_out.py
"""

from regard.ablate.effect import effect
from regard.ablate.knock_out import knock_out

__all__ = ["effect", "knock_out"]
