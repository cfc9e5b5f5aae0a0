"""Record a running model (`regard.watch` uses it).

Next: watch.py
"""
