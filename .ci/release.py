"""Rehearse a release, or make its files: everything but the tag and the upload.

    python .ci/release.py --rehearsal        before anything is decided
    python .ci/release.py                    before the tag, which it asks for
    python .ci/release.py --tag v1.2.3       on GitHub, when the tag is there

1. The tree is clean, and the first entry of CHANGELOG.md is of the version of the
   package, with a date (--rehearsal takes "unreleased" for one). It has no tag yet, or
   the one that --tag names.
2. Wheel and sdist are built, and hold that version. A second build, from a clone in
   another folder, gives the same bytes.
3. The wheel is installed into a clean venv, with no checkout in sight.
4. There the commands of the base and every example that needs no more are run.
5. The site of the documents is built, with warnings as errors: dist/site.tar.gz.
6. dist/sbom.json, the bill of materials; dist/SHA256SUMS, the sums of all files.
7. --rehearsal signs the sums with a key of its own, verifies them, and shows that a
   changed file is refused.
8. dist/notes.md: the entry of the changelog, with the sums of the files.

A tag starts .github/workflows/release.yml, which runs this file, attests what it made
and uploads it.

Next: .github/workflows/release.yml
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from pathlib import Path
from typing import NoReturn

import sign

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("--version", "--help", "learn list", "learn open softmax")


def refuse(reason: str) -> NoReturn:
    """End, and say why."""
    sys.exit(f"no release: {reason}")


def run(*command: str | Path, at: Path | None = None, **more: str) -> str:
    """Return what a program prints, with more in its environment; end if it fails."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | more
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


def check_order(version: str) -> None:
    """Refuse a changelog that begins with another version, or repeats one."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    entries = re.findall(r"^## (\S+)", text, flags=re.MULTILINE)
    if entries[0] != version:
        refuse(f"CHANGELOG.md begins with {entries[0]}, expected {version}.")
    if len(set(entries)) < len(entries):
        refuse("CHANGELOG.md has two entries of one version.")


def check_tag(version: str, tag: str = "") -> None:
    """Refuse a tag of another version and, without one, a version that has a tag."""
    if tag and tag != f"v{version}":
        refuse(f"the tag is {tag}, but __version__ is {version}.")
    if not tag and run("git", "tag", "--list", f"v{version}").strip():
        refuse(f"the tag v{version} exists: raise __version__.")


def check_tree() -> str:
    """Return the commit; refuse a tree with changes that are not in it."""
    changed = run("git", "status", "--porcelain").splitlines()
    if changed:
        refuse(f"{len(changed)} files are not committed, {changed[0][3:]} among them.")
    return run("git", "rev-parse", "--short", "HEAD").strip()


def build(folder: Path, version: str, *, at: Path) -> list[Path]:
    """Return the wheel and the sdist of the version, built from a checkout."""
    # files in the archives have the time of the commit, not that of the build
    epoch = run("git", "log", "-1", "--format=%ct", at=at).strip()
    command = (sys.executable, "-m", "hatchling", "build", "-c", "-d", folder)
    run(*command, at=at, SOURCE_DATE_EPOCH=epoch)
    files = [
        folder / f"regard-{version}-py3-none-any.whl",
        folder / f"regard-{version}.tar.gz",
    ]
    missing = [path.name for path in files if not path.exists()]
    return refuse(f"{missing[0]} was not built.") if missing else files


def build_again(files: list[Path], version: str) -> None:
    """Refuse files that a clone elsewhere does not build again, byte for byte."""
    with tempfile.TemporaryDirectory() as temporary:
        clone = Path(temporary) / "a-clone"
        run("git", "clone", "-q", ROOT, clone)
        run("git", "checkout", "-q", run("git", "rev-parse", "HEAD").strip(), at=clone)
        for path in build(Path(temporary) / "again", version, at=clone):
            (first,) = (x for x in files if x.name == path.name)
            if first.read_bytes() != path.read_bytes():
                refuse(f"{path.name} is not the same when it is built again.")


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


def build_site(folder: Path) -> Path:
    """Return the archive of the documents, built with warnings as errors."""
    with tempfile.TemporaryDirectory() as temporary:
        pages, trees = Path(temporary) / "html", Path(temporary) / "trees"
        source = {"PYTHONPATH": str(ROOT / "src")}
        command = (sys.executable, "-m", "sphinx", "-W", "-q", "-E", "-d", trees)
        run(*command, ROOT / "docs", pages, **source)
        say("site", f"{len(list(pages.rglob('*.html')))} pages without a warning")
        with tarfile.open(folder / "site.tar.gz", "w:gz") as archive:
            archive.add(pages, arcname="site")
    return folder / "site.tar.gz"


def rehearse_signature(folder: Path, changed: Path) -> None:
    """Sign with a key for this once; verify; verify a changed file, which must fail."""
    if shutil.which("ssh-keygen") is None:
        say("signed", "no: ssh-keygen is not installed")
        return
    with tempfile.TemporaryDirectory() as temporary:
        key, signers = sign.make_key(Path(temporary))
        sign.sign(folder, key)
        n = sign.verify(folder, signers)
        content = changed.read_bytes()
        try:
            changed.write_bytes(content + b"x")
            sign.verify(folder, signers)
        except sign.SignatureError as error:
            say("signed", f"{n} files verified; with one byte more: {error}")
        else:
            refuse(f"{changed.name} was changed, and its signature still held.")
        finally:
            changed.write_bytes(content)
    (folder / f"{sign.SUMS}.sig").unlink()  # of a key that is gone


def write_notes(folder: Path, version: str, entry: str) -> Path:
    """Write what a release says of itself."""
    sums = (folder / sign.SUMS).read_text(encoding="utf-8")
    notes = folder / "notes.md"
    text = f"# regard {version}\n\n{entry}\n\n## Files\n\n```text\n{sums}```\n"
    notes.write_text(text, encoding="utf-8")
    return notes


def try_wheel(wheel: Path) -> None:
    """Install the wheel where nothing else is, and use it."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        say("installed", install(wheel, place))
        for command in COMMANDS:
            lines = run(place / "bin/regard", *command.split(), at=place).splitlines()
            say("command", f"regard {command}: {len(lines)} lines")
        run_examples(place)


def read_arguments() -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rehearsal", action="store_true", help="nothing is decided")
    which.add_argument("--tag", default="", help="the tag that is released")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    return parser.parse_args()


def main() -> None:
    """Do all of it, and say what was found."""
    began, asked = time.perf_counter(), read_arguments()
    rehearsal, folder = asked.rehearsal, asked.folder.resolve()
    version = read_version()
    entry = read_entry(version, rehearsal=rehearsal)
    check_order(version)
    say("version", f"{version}, {entry.count(chr(10) + '- ')} lines of the changelog")
    say("tree", f"clean at {check_tree()}")
    if not rehearsal:
        check_tag(version, asked.tag)
    files = build(folder, version, at=ROOT)
    for path in files:
        say("built", f"{path.name}, {path.stat().st_size / 1e6:.1f} MB")
    build_again(files, version)
    say("again", "a clone in another folder builds the same bytes")
    try_wheel(files[0])
    site = build_site(folder)
    run(sys.executable, ROOT / ".ci/sbom.py", folder / "sbom.json")
    sums = sign.write_sums(folder, [*files, site, folder / "sbom.json"])
    for line in sums.read_text(encoding="utf-8").splitlines():
        say("sum", line)
    if rehearsal:
        rehearse_signature(folder, files[0])
    say("notes", write_notes(folder, version, entry).name)
    say("took", f"{time.perf_counter() - began:.0f} s")
    if not rehearsal and not asked.tag:
        say("now", f"git tag v{version} && git push origin v{version}")


if __name__ == "__main__":
    main()
