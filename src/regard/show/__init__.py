"""Pictures: as text in a terminal, and as figures for a paper.

Next: loss_curve.py
"""
