"""A kept result is reused until something that it depends on changes, and only then."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parent.parent / ".ci"
FILES = {
    "pyproject.toml": "",
    "house/__init__.py": "",
    "house/door.py": "def turn():\n    from house import key\n    return key.TEETH\n",
    "house/key.py": "TEETH = 3\n",
    "house/cellar.py": "print(1)\n",
    "house/attic.py": "WIDTH = 2\n",
    "house/sign.html": "welcome\n",
    "house/unrelated.py": "",
    "rooms/hall.txt": "12\n",
    "tests/conftest.py": "",
    "tests/far/conftest.py": "import pytest\n@pytest.fixture\ndef one(): return 1\n",
    "tests/far/test_fixture.py": "def test(one): assert one == 1\n",
    "tests/test_import.py": (
        "from house.door import turn\ndef test(): assert turn() == 3\n"
    ),
    "tests/test_process.py": (
        "import subprocess, sys\n"
        "def test():\n"
        "    subprocess.run([sys.executable, '-m', 'house.cellar'], check=True)\n"
    ),
    "tests/test_killed.py": (
        "import subprocess, sys\n"
        "CODE = 'import os, house.cellar; os.kill(os.getpid(), 9)'\n"
        "def test(): assert subprocess.run([sys.executable, '-c', CODE]).returncode\n"
    ),
    "tests/test_string.py": (
        "from importlib import import_module\n"
        "def test(): assert import_module('house.' + 'attic').WIDTH == 2\n"
    ),
    "tests/test_template.py": (
        "from importlib.resources import files\n"
        "def test(): assert 'wel' in (files('house') / 'sign.html').read_text()\n"
    ),
    "tests/test_folder.py": (
        "from pathlib import Path\ndef test(): assert list(Path('rooms').glob('*'))\n"
    ),
    "tests/test_exists.py": (
        "from pathlib import Path\n"
        "def test():\n"
        "    assert not Path('rooms/bath.txt').exists()\n"
        "    for name in ('x' * 999, 'a\\0b', '\\ud83d'):\n"  # no file can have it
        "        try: open(name)\n"
        "        except (OSError, ValueError): pass\n"
    ),
    "tests/test_missing.py": (
        "def test():\n"
        "    try: import colorsys, house.lift\n"
        "    except ImportError: pass\n"
    ),
    "house/roof.py": "TILES = 7\n",
    "house/gate.py": "BARS = 8\n",
    "tests/test_each.py": (
        "import pytest\n"
        "from importlib import import_module\n"
        "RESULTS_BY = 'test'\n"
        "@pytest.mark.parametrize('name', ['roof.TILES', 'gate.BARS'])\n"
        "def test(name, tmp_path):\n"
        "    module, _, name = name.partition('.')\n"
        "    assert vars(import_module(f'house.{module}'))[name] in (7, 8)\n"
        "def test_alone(): pass\n"
    ),
    "tests/test_shell.py": (
        "import subprocess\ndef test(): subprocess.run(['true'], check=True)\n"
    ),
    "tests/test_blind.py": (
        "import subprocess, sys\n"
        "def test(): subprocess.run([sys.executable, '-c', ''], env={}, check=True)\n"
    ),
    "tests/test_outside.py": (
        "import os, pathlib\n"
        "def test(): assert not pathlib.Path(os.environ['HOME'], 'flood').exists()\n"
    ),
}
ALL = {x for x in FILES if "/test_" in x}
BLIND = {"tests/test_shell.py", "tests/test_blind.py"}  # they may read anything


class House:
    """A repository with tests, and a cache of its own."""

    def __init__(self, folder):
        self.root, self.cache = folder / "house", folder / "cache"
        for name, text in FILES.items():
            self.write(name, text)
        (self.root / ".ci").mkdir()
        for name in ("kept_results.py", "reads.py"):
            shutil.copy(CI / name, self.root / ".ci")
        self.write(".gitignore", "__pycache__\n")
        self.git("init", "-q")
        self.commit()

    def write(self, name, text):
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def git(self, *words):
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *who, *words], cwd=self.root, check=True)

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-qm", "a change", "--allow-empty")

    def ask(self, *words, root=None):
        root = root or self.root
        tool = [sys.executable, str(root / ".ci" / "kept_results.py"), *words]
        more = {"XDG_CACHE_HOME": str(self.cache), "HOME": str(self.cache.parent)}
        more["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # ours would be found: slow
        options = {"env": os.environ | more, "capture_output": True, "text": True}
        done = subprocess.run(tool, cwd=root, check=False, **options)
        return done.returncode, done.stdout + done.stderr

    def run(self, root=None):
        return self.ask("run", "all", "tests", f"--tally={self.cache}/tally", root=root)

    def plan(self, root=None):
        """Return the files that would run."""
        code, text = self.ask("plan", "all", "tests", root=root)
        assert code == 0, text
        return {x.partition(": ")[0] for x in text.splitlines() if x}


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    house = House(tmp_path_factory.mktemp("kept"))
    assert house.plan() == ALL
    code, text = house.run()
    assert code == 0, text
    assert f"all: {len(ALL)} files run, 0 of them again; 0 reused" in text
    return house


EDITS = {
    "house/door.py": {"tests/test_import.py"},
    "house/key.py": {"tests/test_import.py"},  # imported in a function
    "house/cellar.py": {"tests/test_process.py", "tests/test_killed.py"},
    "house/attic.py": {"tests/test_string.py"},
    "house/sign.html": {"tests/test_template.py"},
    "house/lift.py": {"tests/test_missing.py"},
    "house/roof.py": {"tests/test_each.py"},
    "tests/colorsys.py": {"tests/test_missing.py"},  # would be imported instead
    "rooms/bath.txt": {"tests/test_folder.py", "tests/test_exists.py"},
    "tests/far/conftest.py": {"tests/far/test_fixture.py"},
    "tests/test_string.py": {"tests/test_string.py"},
    "tests/conftest.py": ALL,
    "house/unrelated.py": set(),
    "rooms/hall.txt": set(),  # listed, never read
}


@pytest.mark.parametrize("name", EDITS)
def test_what_depends_on_a_change_runs_again(house, name):
    path = house.root / name
    before = path.read_text() if path.exists() else None
    house.write(name, (before or "") + "\n# changed\n")
    changed = house.plan()
    path.unlink()
    if before is not None:
        house.write(name, before)
    assert changed == EDITS[name] | BLIND


@pytest.mark.parametrize("name", ["house/attic.py", "rooms/hall.txt"])
def test_what_depends_on_a_deleted_file_runs_again(house, name):
    (house.root / name).unlink()
    changed = house.plan()
    house.write(name, FILES[name])
    lists = {"tests/test_folder.py"} if name == "rooms/hall.txt" else set()
    assert changed == EDITS[name] | lists | BLIND
    assert house.plan() == set()


def test_a_clone_at_another_path_reuses_the_results(house, tmp_path):
    house.git("clone", "-q", str(house.root), str(tmp_path / "clone"))
    assert house.plan(tmp_path / "clone") == set()
    code, text = house.run(tmp_path / "clone")
    assert code == 0, text
    assert "(again)" in text  # at least one runs
    closing = house.ask("close", f"--tally={house.cache}/tally")[1].splitlines()
    assert closing[-1] == f"{2 * (len(ALL) + 2)} passed, 0 failed, 0 skipped"


def test_a_file_may_have_a_result_for_each_of_its_tests(house):
    house.write("house/roof.py", "TILES = 9\n")
    code, text = house.ask("run", "all", "tests/test_each.py")
    assert code == 1
    assert "tests/test_each.py: 2 passed, 1 failed" in text
    assert "(2 tests reused; house/roof.py changed)" in text
    assert "assert 9 in (7, 8)" in text
    house.write("house/roof.py", "import os, signal; os.kill(os.getpid(), 9)\n")
    code, text = house.ask("run", "all", "tests/test_each.py")
    assert (code, "2 passed, 1 failed" in text) == (1, True)
    house.write("house/roof.py", "TILES = 8\n")
    house.commit()
    code, text = house.ask("run", "all", "tests/test_each.py")
    assert (code, "3 passed, 0 failed" in text) == (0, True)
    assert house.plan() == BLIND
    house.git("reset", "-q", "--hard", "HEAD~1")
    assert house.plan() == set()  # both branches have their results
    house.write("tests/test_each.py", FILES["tests/test_each.py"] + "# changed\n")
    assert "house/roof.py" not in house.ask("plan", "all", "tests")[1]
    house.git("checkout", "-q", "tests/test_each.py")


def test_results_of_changed_files_are_not_kept(house):
    house.write("house/attic.py", "WIDTH = 2  # metres\n")
    code, text = house.run()
    assert code == 0
    assert "results not kept: files are not committed" in text
    assert "tests/test_string.py" in house.plan()
    house.git("checkout", "-q", "house/attic.py")
    assert house.plan() == set()


def test_a_kept_result_that_is_wrong_fails_the_run(house):
    flood = house.cache.parent / "flood"  # not in the repository: nothing changed
    flood.touch()
    code, text = house.ask(
        "run", "all", "tests/test_outside.py"
    )  # alone: it runs again
    assert code == 1
    assert "!! tests/test_outside.py passed at" in text
    assert "tests/test_outside.py" in house.plan()  # and was dropped
    flood.unlink()


def test_a_failure_is_never_reused_and_a_group_may_be_skipped(house):
    house.write("house/attic.py", "WIDTH = 5\n")
    house.commit()
    for _ in range(2):
        code, text = house.run()
        assert code == 1
        assert "assert 5 == 2" in text
        assert "; failed: tests/test_string.py" in text
    tally = f"--tally={house.cache}/other"
    house.ask("say", "vLLM", "skipped: could not be installed", tally)
    text = house.ask("close", tally)[1]
    assert (
        text == "vLLM: skipped: could not be installed\n0 passed, 0 failed, 0 skipped\n"
    )
