"""Measure every attention head of a model over many documents.

    files ─▶ corpus ─▶ shards ─▶ workers ─▶ a tally of each shard ─▶ one table ─▶ a page

Next: corpus.py
"""
