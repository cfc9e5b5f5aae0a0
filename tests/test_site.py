"""The course as a site: what is written, and that it grades with NumPy alone."""

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from regard.errors import FileError
from regard.learn import pyodide_files
from regard.learn.build_site import ASSETS, build_site
from regard.learn.course import ORDER
from regard.learn.exercise import read_exercise
from regard.learn.grade_file import PRINTED
from regard.learn.in_browser import LimitedOutput
from regard.learn.pyodide_files import list_runtime

HOSTILE = '''"""One <b>bold</b> title & "quotes"

A text with <script>alert(1)</script>, <img src=x onerror=alert(2)>, *emphasis*,
[a link](javascript:alert(3)), ![a picture](https://elsewhere.test/x.png) and `a < b`.

    x = [1, 2]

- one
- two

## More

Next: other.py
"""
NAME = "same"
MINUTES = 1
NEEDS = ()
EXTRA = ""
STUB = "def same(x):\\n    raise NotImplementedError\\n"
HINTS = ("<i>one</i>", "two", "three")


def spec(x):
    return x


reference = spec


def draw(rng):
    for n in range(1, 6):
        yield (rng.normal(size=n) + 1,)


def mistake_double(x):
    """It is <u>doubled</u>."""
    return 2 * x


def mistake_negative(x):
    """It is negative."""
    return -x


def mistake_none(x):
    """It is one more."""
    return x + 1
'''
# what Pyodide does: the zip, NumPy, and nothing else of ours
GRADE = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("rich", "click", "markdown_it", "pytest", "torch", "matplotlib"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
sys.path[:] = [x for x in sys.path if not x.endswith("src")]
sys.path.insert(0, sys.argv[1])
import regard
assert regard.__file__.startswith(sys.argv[1]), regard.__file__
import array_api_compat
assert array_api_compat.__file__.startswith(sys.argv[1])
from regard.learn import in_browser as sandbox
import json
for place, function, wanted in json.loads(sys.argv[2]):
    text = open(place, encoding="utf-8").read() + f"\\n{function} = {wanted}\\n"
    print(sandbox.grade_text(place, text))
print(sandbox.run_text(place, "print('a' * 5000)"))
print(sandbox.run_text(place, "x ="))
print(sandbox.grade_text(place, "import sys; sys.exit()"))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "course"
    build_site(folder)
    return folder


def unpack(site, folder):
    with zipfile.ZipFile(site / "regard.zip") as file:
        file.extractall(folder)
    return folder


def test_the_zip_grades_with_numpy_and_nothing_else(site, tmp_path):
    folder, asked, wanted = unpack(site, tmp_path), [], []
    for name in ORDER:
        exercise = read_exercise(name)
        if not exercise.extra:
            place = str(folder / "regard/learn/exercises" / f"{name}.py")
            first = exercise.mistakes[0]
            asked.append((place, exercise.function, "reference"))
            asked.append((place, exercise.function, f"mistake_{first.name}"))
            wanted += [(name, True, "Right."), (name, False, first.sentence)]
    run = subprocess.run(
        [sys.executable, "-c", GRADE, str(folder), json.dumps(asked)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stderr == ""
    *graded, printed, unread, ended = map(json.loads, run.stdout.splitlines())
    found = [(x["exercise"], x["passed"], x["sentence"]) for x in graded]
    assert found == wanted
    assert len(found) >= 40
    assert printed == {"sentence": printed["sentence"], "printed": "a" * 2000 + "\n…"}
    assert unread["sentence"] == "Python cannot read line 1 (x =): invalid syntax."
    assert ended["sentence"].startswith("The file raised SystemExit in line 1")


def test_the_zip_says_whose_the_rest_is(site, tmp_path):
    (path,) = unpack(site, tmp_path).rglob("METADATA")
    assert re.search(r"^License\S*: MIT", path.read_text("utf-8"), re.MULTILINE)


def test_the_page_has_every_lesson_and_asks_no_other_host(site):
    page = (site / "index.html").read_text("utf-8")
    assert re.findall(r'data-lesson="(\w+)"', page) == list(ORDER)
    assert "<em>before</em> the softmax" in page
    assert "<code>softmax(scores)</code>" in page
    assert "<pre><code><span>weights[i, j] = exp(scores[i, j])" in page
    for path in (*site.glob("*.js"), *site.glob("*.css"), site / "index.html"):
        # an address in a comment is read by people
        code = re.sub(r"/\*.*?\*/", "", path.read_text("utf-8"), flags=re.DOTALL)
        assert not re.search(r"https?://|innerHTML|\beval\(", code), path.name
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    rules = dict(x.strip().split(" ", 1) for x in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert "unsafe-inline" not in policy
    assert "'unsafe-eval'" not in policy


def test_the_page_asks_for_its_modules_at_once(site):
    page = (site / "index.html").read_text("utf-8")
    asked = {"lesson.js", *re.findall(r'<link rel="modulepreload" href="(.*?)">', page)}
    own = ("worker.js",)  # of another thread
    assert asked == {x.name for x in site.glob("*.js")} - {*own}


def test_every_exercise_links_to_its_lesson_and_back(site):
    page = (site / "index.html").read_text("utf-8")
    articles = re.findall(r'data-lesson="(\w+)".*?href="(lessons/\w+\.html)"', page, re.DOTALL)  # fmt: skip
    assert [name for name, _ in articles] == list(ORDER)
    for name, place in articles:
        lesson = (site / place).read_text("utf-8")
        assert f'<a href="../#{name}" target="course">{name}</a>' in lesson
        assert 'class="language-python"' in lesson
        assert "assert" in lesson
        assert "default-src 'none'" in lesson
        assert not re.search(r"<script|https?://|# %%", lesson)


def test_modules_import_what_the_site_has(site):
    for path in site.glob("*.js"):
        for name in re.findall(r'from "\./([\w.]+)"', path.read_text("utf-8")):
            assert (site / name).exists(), f"{path.name}: {name}"
    for path in ASSETS.glob("*.js"):
        (following,) = re.findall(r"Next: (\S+) \*/", path.read_text("utf-8"))
        assert (site / following).exists(), f"{path.name}: {following}"


def test_what_the_page_knows_is_what_the_exercises_say(site):
    told = json.loads((site / "exercises.json").read_text("utf-8"))
    assert [x["name"] for x in told] == list(ORDER)
    for one in told:
        exercise = read_exercise(one["name"])
        assert one["stub"] == exercise.stub
        assert one["hints"] == list(exercise.hints)
        assert one["atol"] == exercise.atol
        assert f"def {exercise.function}(" in one["solution"]
    assert [x["name"] for x in told if x["extra"]] == [
        "induction_head",
        "read_head",
        "ablate_head",
        "find_document",
    ]


def test_two_builds_are_the_same_bytes(site, tmp_path):
    build_site(tmp_path)
    for path in site.iterdir():
        if path.is_file():
            assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_course_of_a_teacher_is_text_and_never_markup(tmp_path):
    course, site = tmp_path / "mine", tmp_path / "site"
    course.mkdir()
    (course / "same.py").write_text(HOSTILE, "utf-8")
    assert "has 1 exercises" in build_site(site, course=course)
    page = (site / "index.html").read_text("utf-8")
    lesson = page[page.index("<article") : page.index("</article>")]
    tags = set(re.findall(r"<(\w+)", lesson))
    block = {"article", "h2", "p", "pre", "ul", "li"}
    assert tags == block | {"a", "code", "em", "span"}
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in lesson
    assert re.findall(r'(?:href|src)="([^"]*)"', lesson) == ["https://elsewhere.test/x.png"]  # fmt: skip
    (told,) = json.loads((site / "exercises.json").read_text("utf-8"))
    assert told["title"] == 'One <b>bold</b> title & "quotes"'
    assert told["place"] == "course/same.py"
    assert "course/same.py" in zipfile.ZipFile(site / "regard.zip").namelist()


def test_a_site_without_python_says_what_is_missing_and_where_it_goes(tmp_path):
    said = build_site(tmp_path / "a" / "b")
    assert said.endswith(
        "Python for browsers is missing: put Pyodide and its NumPy wheel into "
        f"{tmp_path / 'a' / 'b' / 'pyodide'}, as described in docs/learn-site.md."
    )
    (tmp_path / "a" / "b" / "pyodide" / "pyodide-lock.json").write_text("{}")
    assert "python -m http.server" in build_site(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "pyodide" / "pyodide-lock.json").read_text() == "{}"


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "taken").write_text("x")
    with pytest.raises(FileError, match="is a file, expected a folder"):
        build_site(tmp_path / "taken")


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """Make a folder of the right names, and hashes that fit what is in it."""
    folder = tmp_path / "runtime"
    folder.mkdir()
    (folder / "numpy-1.whl").write_text("a wheel")
    digest = hashlib.sha256(b"a wheel").hexdigest()
    lock = {"packages": {"numpy": {"file_name": "numpy-1.whl", "sha256": digest}}}
    lines = []
    for name in pyodide_files.read_hashes():
        text = json.dumps(lock) if name == pyodide_files.LOCK else f"this is {name}"
        (folder / name).write_text(text)
        lines.append(f"{hashlib.sha256(text.encode()).hexdigest()}  {name}")
    (tmp_path / "hashes").write_text("\n".join(lines))
    monkeypatch.setattr(pyodide_files, "HASHES", tmp_path / "hashes")
    (folder / "other.whl").write_text("not needed")
    return folder


def test_pyodide_is_copied_and_only_what_is_needed_of_it(runtime, tmp_path):
    build_site(tmp_path / "site", pyodide=runtime)
    copied = {x.name for x in (tmp_path / "site" / "pyodide").iterdir()}
    assert copied == {x.name for x in runtime.iterdir()} - {"other.whl"}
    assert len(copied) == 6
    build_site(tmp_path / "site", pyodide=tmp_path / "site" / "pyodide")  # onto itself
    assert (tmp_path / "site" / "pyodide" / "numpy-1.whl").read_text() == "a wheel"


@pytest.mark.parametrize("name", ["pyodide.asm.wasm", "pyodide.mjs", "numpy-1.whl"])
def test_a_file_of_pyodide_that_was_changed_is_refused(runtime, tmp_path, name):
    (runtime / name).write_text("changed")
    with pytest.raises(FileError, match=rf"{re.escape(name)} has the sha256 \w+, exp"):
        build_site(tmp_path / "site", pyodide=runtime)
    assert not (tmp_path / "site").exists()


def test_a_file_of_pyodide_that_is_missing_is_named(runtime):
    (runtime / "python_stdlib.zip").unlink()
    with pytest.raises(FileError, match=r"lacks python_stdlib.zip of Pyodide 314.0.3"):
        list_runtime(runtime)


@pytest.mark.parametrize("lock", [None, "[]", "{", '{"packages": {}}'])
def test_a_folder_that_is_not_pyodide_is_refused(tmp_path, lock):
    if lock is not None:
        (tmp_path / "pyodide-lock.json").write_text(lock)
    with pytest.raises(FileError, match="does not list NumPy"):
        list_runtime(tmp_path)


def test_a_wheel_elsewhere_is_not_reached_for(runtime):
    lock = json.loads((runtime / "pyodide-lock.json").read_text())
    lock["packages"]["numpy"]["file_name"] = "../hashes"
    (runtime / "pyodide-lock.json").write_text(json.dumps(lock))
    with pytest.raises(FileError, match="lacks hashes"):
        list_runtime(runtime)


def test_the_page_of_the_docs_has_the_hashes_that_are_checked():
    page = (Path(__file__).parent.parent / "docs" / "learn-site.md").read_text("utf-8")
    for line in pyodide_files.HASHES.read_text("utf-8").splitlines():
        digest, name = line.split()
        assert re.search(
            rf"^\| `{re.escape(name)}` \|.*`{digest}` \|$", page, re.MULTILINE
        )
    assert f"`pyodide` {pyodide_files.VERSION}" in page
    policy = re.search(r'content="(default-src[^"]*)"', (ASSETS / "index.html").read_text())[1]  # fmt: skip
    for rule in ("script-src", "worker-src", "connect-src"):
        (allowed,) = [
            x.strip() for x in policy.split(";") if x.strip().startswith(rule)
        ]
        assert f"`{allowed}`" in page


def test_endless_printing_does_not_fill_the_memory():
    paper = LimitedOutput()
    for _ in range(5000):
        paper.write("ab\n")
    assert paper.text == ("ab\n" * 5000)[: PRINTED + 1]
