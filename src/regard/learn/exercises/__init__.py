"""The exercises, one per file, in the order of course.py.

Next: one_score.py
"""
