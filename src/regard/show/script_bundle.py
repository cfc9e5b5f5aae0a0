"""The JavaScript modules of the map as one script, for pages without a server.

    join_modules("offline_page.js")   the module and its imports, dependencies first
    join_modules("atlas.js", x)       the same for another page, with its files in x
    read_body()                       the elements of index.html

    import { a } from "./b.js"  becomes  const { a } = b_js;
    a module b.js               becomes  const b_js = (() => { …; return { a }; })();

Every page has the script in it: comments on lines of their own, and indentation, are
left out, a fifth of it.

Next: page.py
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
SPARE = re.compile(r"^[ \t]*(?:/\*.*?\*/\s*\n)?[ \t]*", re.MULTILINE | re.DOTALL)
EXPORT = re.compile(r"^export (?=(?:class|function|const) (\w+))", re.MULTILINE)


def read_asset(name: str, folder: Path = ASSETS) -> str:
    """Return the text of a file in a folder, or in the map's assets if not there."""
    own = folder / name
    return (own if own.exists() else ASSETS / name).read_text("utf-8")


@cache
def join_modules(entry: str, folder: Path = ASSETS) -> str:
    """Return a module and everything it imports as one module."""
    joined: dict[str, str] = {}

    def add(name: str) -> str:
        text = SPARE.sub("", read_asset(f"{name}.js", folder))
        for _, other in IMPORT.findall(text):
            if other not in joined:
                told = ", ".join(EXPORT.findall(read_asset(f"{other}.js", folder)))
                body = f"{EXPORT.sub('', add(other))}\nreturn {{ {told} }};"
                joined[other] = f"const {other}_js = (() => {{\n{body}\n}})();"
        return IMPORT.sub(r"const \1 = \2_js;", text)

    last = add(entry.removesuffix(".js"))
    return "\n".join([*joined.values(), last])


def read_body() -> str:
    """Return the elements in the body of index.html."""
    page = read_asset("index.html")
    return page[page.index("<header>") : page.index("</body>")]
