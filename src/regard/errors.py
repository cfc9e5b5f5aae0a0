"""The exceptions: each says what was given, what was expected, what to write instead.

Next: arrays.py
"""


class RegardError(Exception):
    """Everything this library refuses, so that one `except` can catch it all."""


class ArrayError(RegardError, TypeError):
    """Not an array, of the wrong kind, or of two libraries at once."""


class ShapeError(RegardError, ValueError):
    """Axes that do not fit together."""


class MaskError(RegardError, ValueError):
    """A mask or bias that could be read in two ways, or in none."""


class PositionError(RegardError, ValueError):
    """Positions are compared, but nobody said where the queries stand."""


class OptionError(RegardError, ValueError):
    """An option that does not exist, or does not go with another one."""


class GradientError(RegardError, RuntimeError):
    """A gradient that is not computed, or would be that of another call."""


class FileError(RegardError, ValueError):
    """A file that is damaged, cut off, of another kind, or not to be trusted."""
