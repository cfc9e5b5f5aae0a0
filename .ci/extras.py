"""Install the base and every extra into a venv of its own, and measure them.

    python .ci/extras.py FOLDER

A venv that is in FOLDER already is measured as it is. The table goes into
docs/install.md, between its marks. Torch is installed first, and alone, so that it is
the build that this machine's index gives.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/install.md"
MARK = "<!-- measured by .ci/extras.py -->\n"
FOR = {
    "base": "the definition, masks, `explain`, `regard learn`, `regard check`",
    "show": "figures: `regard.show.figure`, loss curves",
    "torch": "the engine, models, `regard.watch`; `regard show`, `generate`, `train`",
    "serve": "the map in a browser: `seen.show()`, `regard show … --map`",
    "notebook": "the map in a cell: `seen.widget()`",
    "hf": "models that transformers runs",
    "atlas": "`regard atlas`: many documents, on one machine or many",
}
TORCH = {"torch", "serve", "notebook", "hf", "atlas"}


def pip(place: Path, *words: str) -> str:
    """Run pip for a venv and return what it prints."""
    command = [sys.executable, "-m", "pip", "--python", str(place / "bin/python")]
    done = subprocess.run(
        [*command, *words], check=True, capture_output=True, text=True
    )
    return done.stdout


def make(place: Path, extra: str) -> None:
    """Make a venv with an extra."""
    venv.create(place, symlinks=True)
    if extra in TORCH:
        pip(place, "install", "-q", "torch==2.13.0")
    pip(place, "install", "-q", str(ROOT) if extra == "base" else f"{ROOT}[{extra}]")


def measure(place: Path) -> tuple[int, float, str]:
    """Return packages, megabytes and the build of torch of a venv, without pip."""
    listed = json.loads(pip(place, "list", "--format", "json"))
    found = {x["name"]: x["version"] for x in listed}
    (packages,) = place.glob("lib/python*/site-packages")
    tools = ("pip", "setuptools")
    ours = (x for x in packages.iterdir() if not x.name.startswith(tools))
    files = (file for top in ours for file in (top, *top.rglob("*")) if file.is_file())
    used = [file.stat().st_size for file in files if file.suffix != ".pyc"]
    count = len(found.keys() - set(tools))
    return count, sum(used) / 1e6, found.get("torch", "")


def main() -> None:
    """Measure all, and write the table."""
    folder = Path(sys.argv[1]).resolve()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert FOR.keys() - {"base"} == project["optional-dependencies"].keys() - {"all"}
    rows, build = [], ""
    for extra, what in FOR.items():
        if not (folder / extra).exists():
            make(folder / extra, extra)
        count, size, torch = measure(folder / extra)
        build = torch or build
        name = "regard" if extra == "base" else f"regard[{extra}]"
        rows.append(f"| `{name}` | {what} | {count} | {size:,.0f} MB |")
        print(rows[-1], flush=True)
    version = ".".join(map(str, sys.version_info[:2]))
    head = "| install | for | packages | size |\n|---|---|---|---|\n"
    tail = f"\n\nPython {version}, torch {build}; including dependencies.\n"
    above, _, rest = PAGE.read_text("utf-8").partition(MARK)
    _, _, below = rest.partition(MARK)
    table = head + "\n".join(rows) + tail
    PAGE.write_text(f"{above}{MARK}{table}{MARK}{below}", encoding="utf-8")


if __name__ == "__main__":
    main()
