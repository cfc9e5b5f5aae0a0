"""Learn attention by implementing it: exercises with feedback in plain words.

    regard learn                               in a terminal
    from regard.learn import check; check(fn)  in a notebook

Next: course.py
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.learn.exercise import list_exercises, read_exercise
    from regard.learn.notebook import check
    from regard.learn.written_call import draw_call
else:

    def __getattr__(name: str) -> Any:
        """Import names lazily, so that the command line starts fast."""
        if name not in LATER:
            raise AttributeError(f"module 'regard.learn' has no attribute '{name}'")
        return getattr(import_module(LATER[name]), name)


LATER = {
    "check": "regard.learn.notebook",
    "draw_call": "regard.learn.written_call",
    "list_exercises": "regard.learn.exercise",
    "read_exercise": "regard.learn.exercise",
}

__all__ = ["check", "draw_call", "list_exercises", "read_exercise"]
