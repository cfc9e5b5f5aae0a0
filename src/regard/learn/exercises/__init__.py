"""The exercises, one file each, in the order of course.py.

Next: one_score.py
"""
