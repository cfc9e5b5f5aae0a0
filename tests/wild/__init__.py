"""Models of the field: the lens is right about each of them, or says what it lacks.

Next: run.py
"""
