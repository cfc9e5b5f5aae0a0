"""Attentions that are broken on purpose, each by one known mistake."""
