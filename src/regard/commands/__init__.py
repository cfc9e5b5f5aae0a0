"""The commands, one file each: their options and their output.

A command imports what it needs when it runs, so that --help is fast.

Next: commands/show.py
"""
