"""What was recorded of a running model, in memory and on disk.

Next: record.py
"""
