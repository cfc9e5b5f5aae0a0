"""Models that run in an engine of their own, and are watched while they serve.

Next: engine.py
"""
