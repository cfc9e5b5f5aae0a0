"""Attention maps in terminals, figures, browsers and notebooks.

Next: loss_curve.py
"""
