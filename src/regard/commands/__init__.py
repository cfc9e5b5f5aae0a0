"""The commands, a file for each: what they ask, what they print, what they load.

A command loads what it needs when it runs, so that help comes at once.

Next: commands/show.py
"""
