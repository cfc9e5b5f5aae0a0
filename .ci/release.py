"""Rehearse a release, or make its files: everything but the tag and the upload.

    python .ci/release.py [--rehearsal] [FOLDER]      dist unless given

1. The tree is clean, and CHANGELOG.md has an entry for the version of the package, with
   a date; --rehearsal takes "unreleased" for one.
2. Wheel and sdist are built, and hold that version.
3. The wheel is installed into a clean venv, with no checkout in sight.
4. There the commands of the base and every example that needs no more are run.
5. FOLDER/notes.md: the entry of the changelog, with the sums of the files.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("--version", "--help", "learn list", "learn open softmax")


def refuse(reason: str) -> NoReturn:
    """End, and say why."""
    sys.exit(f"no release: {reason}")


def run(*command: str | Path, at: Path | None = None) -> str:
    """Return what a program prints; end if it fails."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    words = [str(x) for x in command]
    done = subprocess.run(
        words, cwd=at or ROOT, env=env, check=False, capture_output=True, text=True
    )
    if done.returncode:
        refuse(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def say(step: str, found: str) -> None:
    """Print what was found in a step."""
    print(f"{step:<10} {found}", flush=True)


def read_version() -> str:
    """Return the version, from the one place where it stands."""
    text = (ROOT / "src/regard/__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, flags=re.MULTILINE)
    return found[1] if found else refuse("src/regard/__init__.py has no __version__.")


def read_entry(version: str, *, rehearsal: bool) -> str:
    """Return what the changelog says about a version, without its heading."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    entry = rf"^## {re.escape(version)} \(([^)]+)\)\n(.*?)(?=^## |\Z)"
    found = re.search(entry, text, flags=re.MULTILINE | re.DOTALL)
    if found is None:
        refuse(f"CHANGELOG.md has no entry for {version}, expected ## {version} (date)")
    if not rehearsal and not re.fullmatch(r"\d{4}-\d\d-\d\d", found[1]):
        refuse(f"CHANGELOG.md dates {version} {found[1]!r}, expected YYYY-MM-DD.")
    if not found[2].strip():
        refuse(f"CHANGELOG.md says nothing about {version}.")
    return found[2].strip()


def check_tree() -> str:
    """Return the commit; refuse a tree with changes that are not in it."""
    changed = run("git", "status", "--porcelain").splitlines()
    if changed:
        refuse(f"{len(changed)} files are not committed, {changed[0][3:]} among them.")
    return run("git", "rev-parse", "--short", "HEAD").strip()


def build(folder: Path, version: str) -> list[Path]:
    """Return the wheel and the sdist of the version."""
    run(sys.executable, "-m", "hatchling", "build", "-c", "-d", folder)
    files = [
        folder / f"regard-{version}-py3-none-any.whl",
        folder / f"regard-{version}.tar.gz",
    ]
    missing = [path.name for path in files if not path.exists()]
    return refuse(f"{missing[0]} was not built.") if missing else files


def install(wheel: Path, place: Path) -> str:
    """Install a wheel into a clean venv; return what came with it."""
    venv.create(place, symlinks=True)
    pip = (sys.executable, "-m", "pip", "--python", str(place / "bin/python"))
    run(*pip, "install", "-q", wheel, at=place)
    listed = run(*pip, "list", "--format", "freeze", at=place)
    return ", ".join(listed.split())


def list_needs(example: Path) -> set[str]:
    """Return the modules that a script imports at once, also through its neighbours."""
    names = list_imports(example)
    beside = {x for x in names if example.with_name(f"{x}.py").exists()}
    below = (list_needs(example.with_name(f"{x}.py")) for x in beside)
    return (names - beside).union(*below)


def list_imports(script: Path) -> set[str]:
    """Return the modules that stand in the first imports of a script."""
    names: set[str] = set()
    for node in ast.parse(script.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def find_missing(python: Path, names: set[str]) -> str:
    """Return what a Python lacks of some modules; nothing if it has them all."""
    code = "".join(f"import {name}\n" for name in sorted(names))
    command = [str(python), "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    found = re.search(r"(?:No module named '|needs )([\w.]+)", done.stderr)
    return found[1] if found else ""


def run_examples(place: Path) -> None:
    """Run the examples that need only what is in a venv; name the others."""
    python, left = place / "bin/python", []
    scripts = sorted((ROOT / "examples").glob("*.py"))
    parts = set().union(*map(list_imports, scripts))  # of other examples
    for example in (x for x in scripts if x.stem not in parts):
        missing = find_missing(python, list_needs(example))
        if missing:
            left.append(f"{example.stem} ({missing})")
            continue
        began = time.perf_counter()
        lines = run(python, example, at=place).splitlines()
        took = time.perf_counter() - began
        say("example", f"{example.name}: {len(lines)} lines in {took:.1f} s")
    if left:
        say("left out", f"they need more: {', '.join(left)}")


def write_notes(folder: Path, version: str, entry: str, files: list[Path]) -> Path:
    """Write what a release says of itself."""
    sums = "\n".join(
        f"{hashlib.sha256(x.read_bytes()).hexdigest()}  {x.name}" for x in files
    )
    notes = folder / "notes.md"
    text = f"# regard {version}\n\n{entry}\n\n## Files\n\n```text\n{sums}\n```\n"
    notes.write_text(text, encoding="utf-8")
    return notes


def main() -> None:
    """Do all of it, and say what was found."""
    words = sys.argv[1:]
    rehearsal = "--rehearsal" in words
    places = [word for word in words if not word.startswith("-")]
    folder = Path(places[0] if places else ROOT / "dist").resolve()
    version = read_version()
    entry = read_entry(version, rehearsal=rehearsal)
    say("version", f"{version}, {entry.count(chr(10) + '- ')} lines of the changelog")
    say("tree", f"clean at {check_tree()}")
    files = build(folder, version)
    for path in files:
        say("built", f"{path.name}, {path.stat().st_size / 1e6:.1f} MB")
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        say("installed", install(files[0], place))
        for command in COMMANDS:
            lines = run(place / "bin/regard", *command.split(), at=place).splitlines()
            say("command", f"regard {command}: {len(lines)} lines")
        run_examples(place)
    say("notes", str(write_notes(folder, version, entry, files)))
    if not rehearsal:
        say("now", f"git tag v{version}, and upload the two files of {folder}")


if __name__ == "__main__":
    main()
