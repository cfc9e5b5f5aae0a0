"""Watch a running model.

Next: watch.py
"""

from regard.lens.watch import watch

__all__ = ["watch"]
