"""Audit what a model attended to, and compare two runs.

Next: audit.py
"""
