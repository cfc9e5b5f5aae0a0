"""Watch a running model, and cut something out of it.

Next: watch.py
"""

from regard.lens.intervene import effect, knock_out
from regard.lens.watch import watch

__all__ = ["effect", "knock_out", "watch"]
