"""Faults in the reference solutions: the grader rejects all that change the function."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from faulty.behaviour import ANSWERS, wrap
from faulty.contracts import draw_calls
from faulty.run import RESULT
from faulty.trial import VERDICTS, read_fast, try_faults

from regard.learn.course import ORDER
from regard.learn.exercise import read_exercise
from regard.learn.grade import grade

RESULTS_BY = "test"  # see .ci/kept_results.py

SHARE = 20  # one fault in so many is tried here; faulty/run.py tries all
TEXTS = ("a string", "strings", "a list of strings", "bytes", "objects", "a dict")
EVERY = pytest.mark.parametrize("name", ORDER)


@EVERY
def test_no_fault_is_accepted(name):
    found = list(try_faults(name, seed=ORDER.index(name), share=SHARE))
    assert [x for x in found if x[-1] == "accepted"] == []
    assert sum(verdict == "rejected" for *_, verdict in found) >= 3


@EVERY
def test_the_reference_is_right_on_all_that_its_exercise_allows(name):
    exercise = read_exercise(name)
    calls = list(draw_calls(name, np.random.default_rng(1), 25))
    allowed = read_fast(name)
    object.__setattr__(allowed, "draw", lambda _: calls)
    object.__setattr__(allowed, "check", None)
    found = grade(allowed, exercise.reference, limit=math.inf)
    assert found.passed, str(found)


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("name", ["one_score", "softmax", "without_the_matrix"])
def test_an_answer_that_only_looks_like_numbers_is_refused(name, kind):
    exercise = read_fast(name)
    found = grade(exercise, wrap(exercise.reference, ANSWERS[kind], 0), limit=math.inf)
    assert not found.passed
    assert found.sentence.startswith(
        "This is not the expected kind of answer: the answer is a"
    )
    assert found.sentence.endswith("expected numbers.")


def test_a_negative_number_in_place_of_minus_infinity_is_named():
    exercise = read_exercise("causal_mask")
    for value in (-100.0, -1e4, -1e9):

        def hide(scores, value=value):
            logits = np.where(np.tri(len(scores)) > 0, scores, value)
            parts = np.exp(logits - logits.max(axis=-1, keepdims=True))
            return parts / parts.sum(axis=-1, keepdims=True)

        assert grade(exercise, hide).mistake == "finite"


def test_the_page_tells_what_was_counted():
    result = json.loads(RESULT.read_text("utf-8"))
    assert list(result["exercises"]) == list(ORDER)
    total = {v: sum(x[v] for x in result["exercises"].values()) for v in VERDICTS}
    assert result["all"] == total
    assert total["accepted"] == 0
    page = (Path(__file__).parent.parent / "docs" / "learn.md").read_text("utf-8")
    counted = sum(total.values())
    assert (
        f"Of {counted:,} faults, {total['equivalent']:,} do not change the function, "
        f"{total['crash']:,} raise on every call, and {total['rejected']:,} change it: "
        f"{total['accepted']} of these are accepted."
    ) in " ".join(page.split())
