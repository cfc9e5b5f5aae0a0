"""Record a running model (`regard.watch` uses it), and ablate parts of it.

Next: watch.py
"""

from regard.lens.intervene import effect, knock_out

__all__ = ["effect", "knock_out"]
