"""The deliberate errors are located by syntax: renaming, rewording and moving lose none."""

import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from mutations.edits import (
    Edit,
    apply,
    change,
    compiles,
    follow_files,
    locate,
    read_list,
    read_lists,
    read_sources,
)
from mutations.locate import NotLocatedError, Source, read_every_token
from mutations.rename import find_defined, rename

HERE = Path(__file__).parent
# read when the first test asks: every process of pytest-xdist imports this file


@cache
def read_all_sources():
    return read_sources()


@cache
def read_edits():
    return follow_files(read_lists(), read_all_sources())


def group_by_file():
    paths = sorted({edit.file for edit in read_edits()})
    return {path: [x for x in read_edits() if x.file == path] for path in paths}


@cache
def find_place(edit):
    return locate(edit, read_all_sources())


def test_every_edit_is_located_and_makes_a_source_that_differs_and_compiles():
    for edit in read_edits():
        place = find_place(edit)
        made = apply(edit, place)
        assert "".join(made.split()) != "".join(place.source.text.split()), edit
        assert not place.source.path.endswith(".py") or compiles(made), edit


def test_every_edit_has_tests_and_a_name_of_its_own():
    assert all(
        edit.test_files and all(x.exists() for x in edit.test_files)
        for edit in read_edits()
    )
    assert len({(edit.name, edit.file) for edit in read_edits()}) == len(read_edits())


def rename_sources(defined_by):
    """Yield each edit with its place, and its place in a source with other names and texts."""
    for path in {find_place(edit).source.path for edit in read_edits()}:
        source = read_all_sources()[path]
        other = Source.read(
            path, rename(source.text, defined_by(source), Path(path).suffix)
        )
        sources = {**read_all_sources(), path: other}
        for edit in read_edits():
            if find_place(edit).source is source:
                yield edit, find_place(edit), locate(edit, sources)


@cache
def find_own_of(path):
    return find_defined(read_all_sources()[path].text, Path(path).suffix)


def find_own(source):
    return find_own_of(source.path)


def test_renaming_and_rewording_all_of_a_module_loses_no_edit():
    """Each edit finds the same tokens, and what it makes of them has the new names."""
    seen, compiled = 0, set()
    for edit, place, found in rename_sources(find_own):
        assert (found.source.path, found.at[-1]) == (place.source.path, place.at[-1]), (
            edit
        )
        start, _, made = change(edit, place)
        dot = "." * (place.source.text[start - 1] == ".")
        wanted = rename(dot + made, find_own(place.source), Path(edit.file).suffix)
        assert hide_texts(wanted[len(dot) :], edit) == hide_texts(
            change(edit, found)[2], edit
        ), edit
        if edit.file.endswith(".py") and edit.file not in compiled:
            assert compiles(found.source.text), edit
            assert found.source.text != place.source.text
            compiled.add(edit.file)
        seen += 1
    assert seen == len(read_edits())


def hide_texts(text, edit):
    """Return tokens, every text the same: those of the edit itself are not reworded."""
    tokens = read_every_token(text, Path(edit.file).suffix)
    return ["TEXT" if x.kind == "text" else x.text for x in tokens]


def test_renaming_all_that_the_package_defines_loses_no_edit():
    every = set().union(*map(find_own, read_all_sources().values()))
    places = [*rename_sources(lambda _: every)]
    assert all(
        a.source.path == b.source.path and a.at[-1] == b.at[-1] for _, a, b in places
    )
    assert len(places) == len(read_edits())


def test_renaming_a_module_loses_no_edit():
    for path, edits in group_by_file().items():
        new = f"somewhere/else{Path(path).suffix}"
        moved = {
            new if x == path else x: replace(y, path=new) if x == path else y
            for x, y in read_all_sources().items()
        }
        for edit, before in zip(follow_files(edits, moved), edits, strict=True):
            found, place = locate(edit, moved), find_place(before)
            assert found.at == place.at, edit
            assert found.source.path == (
                new if place.source.path == path else place.source.path
            ), edit


SMALL = "def scale(q, k):\n    x = q * k\n    return x / 2\n\n\ndef other(a, b):\n    y = a * b\n    return y / 3\n"


def find(old, new="", text=SMALL, file="a.py"):
    edit = Edit("an edit", file, old, new)
    sources = {"a.py": Source.read("a.py", text)}
    (edit,) = follow_files([edit], sources)
    return apply(edit, locate(edit, sources))


def test_names_decide_between_places_of_the_same_syntax():
    assert "y = a + b" in find("y = a * b", "y = a + b")
    assert "x = q + k" in find("x = q * k", "x = q + k")
    assert "y = b * a" in find("y = a * b\nreturn y / 3", "y = b * a\nreturn y / 3")
    assert "p = s * r" in find(
        "x = q * k\nreturn x / 2", "x = k * q\nreturn x / 2", "p = r * s\nreturn p / 2"
    )


@pytest.mark.parametrize(
    ("old", "says"),
    [
        ("u = v * w", "2 places fit equally well: a.py:2, a.py:7"),
        ("x = q - k", "nothing in the source has this syntax"),
        ("x = q * q", "nothing in the source has this syntax"),
        ("return x / 4", "nothing in the source has this syntax"),
    ],
)
def test_a_tie_and_no_place_at_all_are_errors(old, says):
    with pytest.raises(NotLocatedError, match=says):
        find(old)


def test_a_file_that_is_gone_and_fits_nowhere_is_an_error():
    with pytest.raises(NotLocatedError, match=r"b\.py is gone"):
        find("for x in y: pass", file="b.py")


def test_formatting_does_not_count():
    text = "def f(a):\n    return (\n        g(  # why\n            a,\n            'b'\n            'c',\n        )\n        + 1\n    )\n"
    assert compiles(find('return g(a, "b c") + 1', "return 1", text))
    assert (
        "g(  # why\n            a,\n            'b'\n            'c',\n        )\n        - 1"
        in find('g(a, "") + 1', 'g(a, "") - 1', text)
    )


def test_a_tuple_of_one_is_no_parenthesis():
    assert "in (1, ):" in find(
        "for x in (1, 2):", "for x in (1,):", "for z in (1, 2):\n    pass\n"
    )


def test_what_is_deleted_leaves_a_source_that_compiles():
    assert compiles(find("x = q * k", "", "def f(q, k):\n    x = q * k\n"))


def test_a_gap_skips_to_the_place_in_the_same_function():
    assert "return y / 3 + a" in find(
        "def other(a, b):\n...\nreturn y / 3", "def other(a, b):\n...\nreturn y / 3 + a"
    )


def test_a_list_reads_like_a_diff():
    (one, two) = read_list(
        "tests: a b\n== x.py\n# first\n stay\n-old\n+new\n# second\n-gone\n== y.py\n"
    )
    assert (one.old, one.new, one.tests) == ("stay\nold", "stay\nnew", ("a", "b"))
    assert (two.old, two.new) == ("gone", "")
    with pytest.raises(ValueError, match="expected ' ', '-' or"):
        read_list("== x.py\n# first\nold\n")


RUN = """
import os, sys, time
from dataclasses import replace
from pathlib import Path
from mutations import run
from mutations.edits import read_lists

def ask(tests, source, pipe):
    os.setsid()
    name = tests[-1][-1]
    print("asks", Path(name).stem, tests[0][0], flush=True)
    pipe.send(("runs", "tests/test_a.py::test_b"))
    if "spans" in name:
        pipe.send(("done", "tests/test_spans.py::test_c"))
    elif "steps" in name:
        time.sleep(600)
    elif "cost" in name:
        pipe.send(("done", "(exit 0)"))

run.ask_tests = ask
edits = [replace(x, tests=(y,)) for x, y in zip(read_lists(), ("spans", "steps", "cost", "masks"))]
results = Path(sys.argv[1])
for fresh in (False, False, True):
    print("--", flush=True)
    for x in run.Runner(results, 2, 10).run(edits[:1] if fresh else edits, fresh=fresh):
        print(x.seen, x.seen_by, flush=True)
    with results.open("a") as file:
        file.write('{"key": "cut off')
"""


def test_a_run_goes_on_where_it_was_and_a_loop_ends(tmp_path):
    """A result is kept; a timeout counts as seen; a process that vanished runs again."""
    command = [sys.executable, "-c", RUN, str(tmp_path / "new" / "results.jsonl")]
    said = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True)
    first, second, third = (x.splitlines()[1:] for x in said.stdout.split("--")[1:])
    results = [
        "False (ended by itself (0) in tests/test_a.py::test_b)",
        "False (exit 0)",
        "True tests/test_spans.py::test_c",
        "True timeout of 10 s in tests/test_a.py::test_b",
    ]
    asks = [f"asks test_{x} -k" for x in ("cost", "masks", "spans", "steps")]
    assert sorted(first) == sorted([*results, *asks])
    assert sorted(second) == sorted([*results, "asks test_masks -k"])
    assert "asks test_spans tests/test_spans.py::test_c" in third  # it runs first
