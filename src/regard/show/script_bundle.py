"""The files of the map as one script, for where there is no server to fetch them from.

    join_modules("offline_page.js")   the module and its imports, dependencies first
    join_modules("atlas.js", x)       the same for another page, whose files are in x
    read_body()                       the elements of index.html

    import { a } from "./b.js"  becomes  const { a } = b_js;
    a module b.js               becomes  const b_js = (() => { …; return { a }; })();

Next: page.py
"""

from __future__ import annotations

import re
from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:class|function|const) (\w+))", re.MULTILINE)


def read_asset(name: str, folder: Path = ASSETS) -> str:
    """Return a file of a folder, or of the map if it has none of that name."""
    own = folder / name
    return (own if own.exists() else ASSETS / name).read_text("utf-8")


def join_modules(entry: str, folder: Path = ASSETS) -> str:
    """Return a module and all that it imports as one."""
    joined: dict[str, str] = {}

    def add(name: str) -> str:
        text = read_asset(f"{name}.js", folder)
        for _, other in IMPORT.findall(text):
            if other not in joined:
                told = ", ".join(EXPORT.findall(read_asset(f"{other}.js", folder)))
                body = f"{EXPORT.sub('', add(other))}\nreturn {{ {told} }};"
                joined[other] = f"const {other}_js = (() => {{\n{body}\n}})();"
        return IMPORT.sub(r"const \1 = \2_js;", text)

    last = add(entry.removesuffix(".js"))
    return "\n".join([*joined.values(), last])


def read_body() -> str:
    """Return what index.html has in its body."""
    page = read_asset("index.html")
    return page[page.index("<header>") : page.index("</body>")]
