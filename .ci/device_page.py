"""Write the tables of docs/device_rules.md, from the rules of the engine.

    python .ci/device_page.py

What stands above the mark is written by hand, what is below it here; a test compares.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from regard.engine.choose import RULES
from regard.engine.compiled_flex import DEVICES, DTYPES, NARROWEST
from regard.engine.device_operators import BY_SDPA, OPERATORS, WITHOUT_LSE

PAGE = Path(__file__).parent.parent / "docs/device_rules.md"
MARK = "<!-- written by .ci/device_page.py from here on -->\n"


def render(path: Path = PAGE) -> str:
    """Return the page as it should be."""
    above, mark, _ = path.read_text(encoding="utf-8").partition(MARK)
    return above + mark + write_rules() + write_operators()


def write_rules() -> str:
    """Return the rules as a table."""
    rows = [
        (f"`{choice.kernel}`", choice.why, name_devices(choice.kernel, choice.why))
        for _, choice in RULES
    ]
    return write_table("The rules, in order", ("kernel", "because", "where"), rows)


def name_devices(kernel: str, why: str) -> str:
    """Return the devices on which a rule can apply."""
    if kernel == "flex":
        kinds = ", ".join(name_dtype(x) for x in DTYPES)
        return f"{', '.join(DEVICES)}; {kinds}; heads of at least {NARROWEST}"
    return "not on a CPU" if "this device" in why else "everywhere"


def write_operators() -> str:
    """Return the fused operators as a table."""
    rows = [
        (
            operator.name,
            ", ".join(map(name_dtype, operator.dtypes)),
            name_width(operator.widest),
            name_width(operator.widest_backward),
        )
        for operator in OPERATORS.values()
    ]
    rows.append((f"{BY_SDPA.name} ({', '.join(WITHOUT_LSE)})", "all", "any", "any"))
    names = ("operator", "dtypes", "widest head", "widest head with gradients")
    return write_table("The fused operators of devices", names, rows)


def name_dtype(dtype: object) -> str:
    """Return the name of a dtype without its library."""
    return str(dtype).removeprefix("torch.")


def name_width(width: float) -> str:
    """Return a width, or that there is no limit."""
    return "any" if width == math.inf else str(int(width))


def write_table(
    title: str, names: tuple[str, ...], rows: Iterable[tuple[str, ...]]
) -> str:
    """Return a section with a table."""
    lines = [names, ("---",) * len(names), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"\n## {title}\n\n{table}\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
