"""The definition of attention.

Next: definition/attention.py
"""
