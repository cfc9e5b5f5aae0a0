"""Read the code of a notebook file, and run it cell by cell to get a function.

    cells = read_code_cells(Path("softmax.ipynb"))       the code cells, as Python
    load_from_notebook(path, "softmax", run)        runs them all; returns the function

A cell that fails does not stop the others, because notebooks contain experiments: only
if the function is missing at the end is the first error reported. Lines for IPython,
such as %timeit, !pip or name?, become comments.

Next: submissions.py
"""

from __future__ import annotations

import json
import linecache
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from regard.errors import FileError

KEEP = ("%%time", "%%timeit", "%%capture")  # cell magics whose cell is Python
LINE = re.compile(r"^(\s*)([%!?].*|.*[\w\])]\?{1,2})$")  # %magic, !shell, name?
ASSIGNED = re.compile(r"^(\s*)(\w+\s*=\s*)[%!].*$")  # x = !ls


def read_code_cells(path: Path) -> list[str]:
    """Return the code cells of a notebook, as Python."""
    try:
        told = json.loads(path.read_text(encoding="utf-8-sig"))
        cells = [x for x in told["cells"] if x["cell_type"] == "code"]
        sources = [x["source"] for x in cells]
        texts = [x if isinstance(x, str) else "".join(x) for x in sources]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileError(
            f"{path.name} is not a notebook ({type(error).__name__}), expected the "
            "JSON of Jupyter, version 4."
        ) from None
    return [drop_magics(text) for text in texts]


def drop_magics(text: str) -> str:
    """Turn lines for IPython into comments; the lines keep their numbers.

    >>> drop_magics("%matplotlib inline")
    '# %matplotlib inline'
    """
    first = text.lstrip().split(maxsplit=1)[0] if text.strip() else ""
    if first.startswith("%%") and first not in KEEP:
        return "\n".join(f"# {line}" for line in text.split("\n"))
    if is_python(text):
        return text
    lines = [LINE.sub(r"\1pass  # \2", line) for line in text.split("\n")]
    lines = [ASSIGNED.sub(r"\1\2None", line) for line in lines]
    return "\n".join(re.sub(r"^pass  # ", "# ", line) for line in lines)


def is_python(text: str) -> bool:
    """Return whether Python can read a text."""
    try:
        compile(text, "cell", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def load_from_notebook(
    path: Path, name: str, run: Callable[[str, str, ModuleType], None]
) -> Any:
    """Run the cells of a notebook and return the function of this name.

    run: runs a source text of a place in a module; raises a FileError if that fails
    """
    module = ModuleType("__regard_exercise__")
    module.__file__ = str(path)
    trouble = ""
    for number, text in enumerate(read_code_cells(path), 1):
        place = f"{path}, cell {number}"
        linecache.cache[place] = (
            len(text),
            None,
            text.splitlines(keepends=True),
            place,
        )
        try:
            run(text, place, module)
        except FileError as error:
            trouble = trouble or f" Cell {number}: {error}"
    found = getattr(module, name, None)
    if not callable(found):
        raise FileError(
            f"there is no function {name} in {path.name}: write def {name}.{trouble}"
        )
    return found
