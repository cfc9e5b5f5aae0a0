"""The deliberate errors still apply, and each has tests that could see it."""

from mutate import MUTATIONS, ROOT, find_tests


def test_every_edit_applies_and_changes_something():
    for edit in MUTATIONS:
        text = (ROOT / "src" / "regard" / edit.file).read_text("utf-8")
        assert edit.old in text, edit
        assert edit.old != edit.new, edit


def test_every_edit_has_tests_and_a_name_of_its_own():
    assert all(path.exists() for edit in MUTATIONS for path in find_tests(edit))
    names = [(edit.name, edit.file) for edit in MUTATIONS]
    assert len({*names}) == len(names)
