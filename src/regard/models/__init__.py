"""Models of any kind by their name: decoders of ours, and every model of transformers.

Next: load.py
"""
