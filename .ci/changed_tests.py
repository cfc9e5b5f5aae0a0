"""List the tests of what changed since main: what .ci/quick runs.

    python .ci/changed_tests.py             the tests of all changes
    python .ci/changed_tests.py FILE ...    the tests of some files

Which tests belong to a package follows from names and imports, so there is no list to
maintain. A test file belongs to the package that it is named after (test_atlas_cli.py:
atlas); otherwise to the packages from which it imports the most names. Packages that
nearly every test imports (COMMON) count only where there is no other.

    src/regard/stats/plan.py      the tests of stats
    src/regard/show/assets/...    the tests of show in the browser
    src/regard/arrays.py          no test is about it: every test that imports it
    tests/test_walk.py            itself
    tests/spec.py                 the tests that import it
    docs, examples, lessons, ...  tests/test_docs.py and so on, named after the folder
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, TESTS = ROOT / "src" / "regard", ROOT / "tests"
BROWSER = TESTS / "browser"
COMMON = {"arrays", "errors", "masks", "recording", "seen", "__init__", "__main__"}
ALWAYS = TESTS / "test_architecture.py"  # sizes, imports and names of the whole source


def ask_git(*arguments: str) -> list[str]:
    """Return the lines that git prints."""
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def find_changes() -> list[Path]:
    """Return the files that differ from main, or else from the last commit."""
    heads = (ask_git("merge-base", "HEAD", x) for x in ("origin/main", "main"))
    base = next((x[0] for x in heads if x), "HEAD")
    new = ask_git("ls-files", "--others", "--exclude-standard")
    names = [*ask_git("diff", "--name-only", base), *new]
    return [ROOT / x for x in names or ask_git("diff", "--name-only", "HEAD~1")]


@cache
def read_imports(file: Path) -> Counter[str]:
    """Return the modules that a file imports, each with how many names of it."""
    found: Counter[str] = Counter()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "regard":
            found.update(f"regard.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found[node.module] += len(node.names)
    return found


def list_packages() -> list[str]:
    """Return the packages and modules directly under regard."""
    return sorted({x.stem for x in PACKAGE.iterdir()} - {"__pycache__", "py"})


def count_packages(test: Path) -> Counter[str]:
    """Return how many names a test imports from each package."""
    known, found = set(list_packages()), Counter[str]()
    for module, count in read_imports(test).items():
        top, _, rest = module.partition(".")
        if top == "regard" and (package := rest.partition(".")[0]) in known:
            found[package] += count
    return found


def find_owners(test: Path) -> set[str]:
    """Return the packages that a test file belongs to."""
    named = {x for x in list_packages() if f"{test.stem}_".startswith(f"test_{x}_")}
    if named:
        return named
    counts = count_packages(test)
    if not counts:  # the tests in the browser import through their fixtures
        counts = count_packages(test.parent / "conftest.py")
    own = {x: n for x, n in counts.items() if x not in COMMON} or counts
    return {x for x, n in own.items() if n == max(own.values())}


def find_tests(file: Path) -> Iterable[Path]:
    """Yield the test files of one file."""
    every = sorted(TESTS.rglob("test_*.py"))
    if file in every:
        yield file
    elif PACKAGE in file.parents:
        package = Path(file.relative_to(PACKAGE).parts[0]).stem
        in_browser = "assets" in file.parts
        own = [x for x in every if package in find_owners(x)]
        own = [x for x in own if (BROWSER in x.parents) == in_browser]
        yield from own or [x for x in every if count_packages(x)[package]]
    elif file.parent in {TESTS, *TESTS.glob("*/")}:
        yield from (x for x in every if file.stem in read_imports(x))
    else:
        folder = file.relative_to(ROOT).parts[0].removesuffix(".md").lower()
        name = {"readme": "docs", "contributing": "docs"}.get(folder, folder)
        yield from TESTS.glob(f"test_{name}.py")


def main() -> None:
    """Print the tests, one on each line."""
    files = [Path(x).resolve() for x in sys.argv[1:]] or find_changes()
    tests = {test for file in files for test in find_tests(file)}
    print(*sorted({ALWAYS, *tests}), sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
