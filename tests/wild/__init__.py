"""Models of the field: the lens is right about each of them, or says what it lacks.

Next: run.py
"""

from wild.torchvision_operators import declare

declare()  # before anyone asks whether torchvision can be imported
