"""Faults put into the reference solutions of the exercises.

Next: run.py
"""
