"""The exceptions. A message states what was given, what was expected, and the fix.

Next: arrays.py
"""


class RegardError(Exception):
    """The base class of all exceptions that this library raises."""


class CallError(RegardError, TypeError):
    """Arguments that do not match a signature, or an object that cannot be used so."""


class ArrayError(RegardError, TypeError):
    """Not an array, an array of the wrong dtype, or arrays of different libraries."""


class ShapeError(RegardError, ValueError):
    """Array shapes that do not match."""


class MaskError(RegardError, ValueError):
    """A mask or bias that is ambiguous or invalid."""


class PositionError(RegardError, ValueError):
    """Positions are compared, but the position of the queries was not given."""


class OptionError(RegardError, ValueError):
    """An option that does not exist, or cannot be combined with another one."""


class GradientError(RegardError, RuntimeError):
    """A gradient that cannot be computed, or would belong to a different call."""


class FileError(RegardError, ValueError):
    """A file that is damaged, truncated, of the wrong type, or untrusted."""
