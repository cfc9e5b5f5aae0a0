"""A learner's function is graded in words, whatever it does."""

import json
import math
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from regard.errors import FileError, OptionError
from regard.learn.exercise import list_exercises, read_exercise
from regard.learn.grade import grade
from regard.learn.notebook import check
from regard.learn.written_call import draw_call, write_call

SOFTMAX, SCORES = read_exercise("softmax"), read_exercise("scores")

OWN = '''"""Double it

The number that is given, twice.

Next: nothing.py
"""

import numpy as np

NAME = "double"
MINUTES = 1
NEEDS = ()
EXTRA = ""
STUB = """def double(x):
    raise NotImplementedError
"""
HINTS = ("a", "b", "c")


def spec(x):
    return [2 * v for v in x]


def reference(x):
    return x + x


def draw(rng):
    for n in (3, 1, 2, 4, 5):
        yield (rng.normal(size=n).round(2) + 5,)


def check(fn, rng):
    once = fn(np.array([3.0]))
    return None if once == fn(np.array([3.0])) else "The second answer is another."


def mistake_square(x):
    """That is the square."""
    return x * x


def mistake_half(x):
    """That is
    the half."""
    return x / 2


def mistake_same(x):
    """That is the same."""
    return x
'''


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "double.py"
    path.write_text(OWN, encoding="utf-8")
    return read_exercise(path)


def test_an_exercise_has_the_parts_of_its_file(own):
    assert (own.name, own.title, own.function) == ("double", "Double it", "double")
    assert own.text == "The number that is given, twice."
    assert own.arguments == ("x",)
    assert own.solution == "def double(x):\n    return x + x\n"
    assert [m.sentence for m in own.mistakes][1] == "That is the half."
    assert own.atol == 1e-6
    assert SOFTMAX.atol == 1e-12


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('NAME = "double"', "", "NAME is nothing, expected a str"),
        ("MINUTES = 1", 'MINUTES = "1"', "MINUTES is a str, expected a int"),
        ("def spec(", "def other(", "spec is nothing, expected a function"),
        ('("a", "b", "c")', '("a", "b")', "HINTS has 2 hints, expected 3"),
        ('EXTRA = ""', 'EXTRA = "jax"', 'EXTRA is "jax", expected one of'),
        ("def double(x)", "def triple(x)", "STUB does not define double"),
        ("def mistake_same", "def same", "has 2 mistake_ functions, expected 3"),
        ('"""That is the same."""', "", "mistake_same has no docstring"),
        ("import numpy as np", "1 / 0", "raised ZeroDivisionError: division by zero"),
        ("def draw(rng):", "def draw(rng:", "raised SyntaxError"),
        ("Double it\n", "Double it", "a docstring of title, empty line and text"),
    ],
)
def test_a_file_that_lacks_a_part_is_refused_by_name(tmp_path, old, new, message):
    path = tmp_path / "double.py"
    assert old in OWN
    path.write_text(OWN.replace(old, new), encoding="utf-8")
    with pytest.raises(FileError) as refused:
        read_exercise(path)
    assert message in str(refused.value)
    assert str(path) in str(refused.value)


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(OptionError, match='no exercise "sofmax", expected one of one'):
        read_exercise("sofmax")
    with pytest.raises(FileError, match="cannot read"):
        read_exercise(tmp_path / "none.py")
    with pytest.raises(FileError, match="has no exercises"):
        list_exercises(tmp_path)


def test_a_folder_of_a_teacher_is_listed_by_file_name(tmp_path):
    for name in ("b", "a", "_kept"):
        (tmp_path / f"{name}.py").write_text(OWN, encoding="utf-8")
    assert [x.name for x in list_exercises(tmp_path)] == ["a", "b"]


def test_the_smallest_failing_call_is_shown(own):
    found = grade(own, lambda x: x + x if len(x) < 2 else x - 1)
    assert not found.passed
    assert len(found.difference.arguments[0]) == 2
    assert found.difference.expected.shape == (1, 2)
    values = found.difference.arguments[0]
    assert found.call == (
        f"import numpy as np\n\nx = np.array([{values[0]}, {values[1]}])\ndouble(x)"
    )
    worst = values[1]  # x + 1 apart
    assert worst > values[0]
    assert f"answer[1] is {worst - 1:.6g}, expected {2 * worst:.6g}" in found.sentence


def test_a_known_mistake_is_named(own):
    found = grade(own, lambda x: x**2)
    assert (found.sentence, found.mistake) == ("That is the square.", "square")


def test_of_two_mistakes_that_fit_the_one_that_fits_more_calls_is_named():
    scaling = read_exercise("scaling")
    found = grade(scaling, lambda q, k: q @ k.T / np.sqrt(len(k)))
    assert "\nq = np.array([[0.63, 0.37]])\n" in found.call  # one key: no scale
    assert found.mistake == "by_keys"


def test_a_stub_is_not_an_error():
    space = {}
    exec(SOFTMAX.stub, space)
    found = grade(SOFTMAX, space["softmax"])
    assert str(found) == "softmax is not written yet."


def test_a_mistake_that_agrees_by_chance_is_not_named(own):
    found = grade(own, lambda x: x * x if len(x) == 1 else x - 7)
    assert found.mistake == ""
    assert found.sentence.startswith("Some of your numbers are not right: answer[0] is")


def test_a_mistake_that_raises_is_named_too():
    found = grade(SCORES, np.matmul)
    assert found.mistake == "no_transpose"


def raise_here(scores):
    return np.zeros(3)[7]


def exit_here(scores):
    raise SystemExit(3)


def change(scores):
    scores[:] = 0
    return scores


def steer(scores):
    raise ValueError("a\x1b[31m\nb")


@pytest.mark.parametrize(
    ("fn", "sentence"),
    [
        (raise_here, "softmax raised IndexError in line"),
        (raise_here, "(return np.zeros(3)[7]): index 7 is out of bounds"),
        (exit_here, "softmax raised SystemExit in line"),
        (steer, "a[31m b"),
        (change, "softmax changes its argument scores, which the caller still needs"),
        (lambda scores: None, "softmax returned None: is there a return statement?"),
        (lambda scores: "no", "answer is a str, expected numbers."),
        (lambda scores: {}, "answer is a dict, expected numbers."),
        (lambda scores: [[1], [2, 3]], "a list of rows of different lengths"),
        (lambda scores: (scores, scores), "it returned 2 values, expected 1."),
        (lambda scores: scores[0], "answer has shape (1,), expected (1, 1)."),
        (lambda scores: scores * np.nan, "Your answer has NaN, which is 0 / 0 or"),
        (lambda: 3, "softmax raised TypeError"),
        (3, "softmax raised TypeError: 'int' object is not callable"),
    ],
)
def test_whatever_it_does_is_one_sentence(fn, sentence):
    found = grade(SOFTMAX, fn)
    assert not found.passed
    assert sentence in found.sentence
    assert "\n" not in found.sentence
    assert "Traceback" not in str(found)


def test_swapped_rows_and_columns_are_told():
    found = grade(SOFTMAX, lambda s: SOFTMAX.reference(s).T)
    assert "answer has shape (2, 1), expected (1, 2)." in found.sentence

    def swapped(scores):
        weights = SOFTMAX.reference(scores)
        return weights.T if len(scores) == scores.shape[1] else weights

    found = grade(SOFTMAX, swapped)
    assert found.sentence.startswith("The numbers are right, but rows and columns are")


def test_lists_are_as_good_as_arrays():
    assert grade(SOFTMAX, lambda scores: SOFTMAX.reference(scores).tolist()).passed


def test_several_answers_may_be_a_list_as_of_np_split():
    qkv = read_exercise("fused_qkv")
    assert grade(qkv, lambda *given: list(qkv.reference(*given))).passed
    found = grade(qkv, lambda *given: list(qkv.mistakes[0].function(*given)))
    assert found.mistake == qkv.mistakes[0].name


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (str, "a str"),
        (lambda x: np.asarray(x).astype("U32"), "an array of <U32"),
        (lambda x: np.asarray(x).astype(object), "an array of object"),
    ],
)
def test_texts_and_objects_are_not_taken_for_numbers(answer, what):
    one = read_exercise("one_score")
    found = grade(one, lambda q, k: answer(q @ k))
    assert not found.passed
    expected = f"This is not the expected kind of answer: the answer is {what}, expected numbers."
    assert found.sentence == expected


def test_complex_numbers_are_not_taken_for_their_real_parts():
    rotary = read_exercise("rotary")
    found = grade(rotary, lambda *given: rotary.reference(*given) + 1j)
    assert found.sentence.endswith("these are complex numbers, expected real numbers.")


def test_rounded_numbers_are_not_said_to_be_swapped():
    for name in ("softmax", "feed_forward"):
        one = read_exercise(name)
        found = grade(one, lambda *given, one=one: np.float32(one.reference(*given)))
        assert found.sentence.startswith(
            "Your numbers are nearly right, as if computed in flo"
        )


class SilentError(Exception):
    def __str__(self):
        raise ValueError("no text")


class NoArray:
    def __array__(self, *_, **__):
        raise RuntimeError


class NoLength:
    def __len__(self):
        raise KeyboardInterrupt


LOOP: list = []
LOOP.append(LOOP)


def fail(error):
    def function(*_):
        raise error

    return function


@pytest.mark.parametrize(
    "answer",
    [
        *(object(), b"", {}, {1}, int, (), ((1, 2), (3,)), 10**400, LOOP, NoArray()),
        *(NoLength(), np.array(None), np.array([object()]), np.datetime64("2026")),
        *(np.zeros(2, [("a", int)]), np.broadcast_to(1.0, (10**6, 10**6)), [None]),
        *(fail(SilentError()), fail(SystemExit(0)), fail(KeyboardInterrupt())),
        *(fail(GeneratorExit()), fail(MemoryError()), fail(StopIteration())),
    ],
    ids=lambda x: type(x).__name__,
)
@pytest.mark.parametrize("name", ["softmax", "fused_qkv", "mask_algebra"])
def test_nothing_that_a_learner_returns_or_raises_ends_the_grader(name, answer):
    fails = getattr(answer, "__qualname__", "").startswith("fail.")
    fn = answer if fails else lambda *_: answer
    found = grade(read_exercise(name), fn, limit=math.inf)
    assert not found.passed
    assert found.sentence
    assert found.call
    assert json.loads(found.to_json())
    assert str(found)


def test_an_error_without_a_text_is_told():
    found = grade(SOFTMAX, fail(SilentError()))
    assert "a SilentError whose message cannot be read" in found.sentence


def test_an_endless_loop_is_ended():
    running = []

    def loop(scores):
        running.append(threading.current_thread())
        while True:
            pass

    found = grade(SOFTMAX, loop, limit=0.2)
    assert (
        found.sentence
        == "It did not answer within 0.2 seconds: is there an endless loop?"
    )
    for _ in range(100):
        if not running[0].is_alive():
            break
        time.sleep(0.05)
    assert not running[0].is_alive()  # nothing burns on


def test_without_a_limit_no_thread_is_started():
    seen = set()

    def watched(scores):
        seen.add(threading.current_thread())
        return SOFTMAX.reference(scores)

    assert grade(SOFTMAX, watched, limit=math.inf).passed
    assert seen == {threading.main_thread()}
    assert grade(SOFTMAX, watched, limit=9).passed
    assert len(seen) > 1


def test_a_property_that_values_do_not_show_is_checked(own):
    asked = []

    def counts(x):
        asked.append(1)
        return 2 * x + (len(asked) > 6)

    assert grade(own, own.reference).passed
    assert grade(own, counts).sentence == "The second answer is another."

    def breaks(x):
        asked.append(1)
        if len(asked) > 5:
            raise OSError("gone")
        return 2 * x

    asked.clear()
    found = grade(own, breaks)
    assert (
        found.sentence
        == "The values are right, but in a further check it raised OSError: gone"
    )


def test_answers_are_drawn_side_by_side():
    def wrong(scores):
        out = SOFTMAX.reference(scores)
        out[:, -1] += 1e-3 * (scores.shape[1] > 2)
        return out

    found = grade(SOFTMAX, wrong)
    lines = found.draw().splitlines()
    at = next(i for i, line in enumerate(lines) if "Yours" in line)
    assert lines[at].split() == ["Yours", "Specification", "Difference"]
    difference = [line[32:] for line in lines[at + 2 : at + 4]]
    assert difference == ["    ··", "    ··"]  # blank where they agree
    assert "blank: nan, or equal" in found.draw()
    numbers = found.difference.yours[0]
    assert f"{numbers[0]:.2f}" in found.draw()
    assert "\x1b[" in found.draw(color=True)
    assert "\x1b[" not in found.draw()


def test_nan_and_infinity_are_drawn_and_written():
    found = grade(SOFTMAX, lambda s: np.where(s > 0, np.nan, -np.inf))
    assert "nan" in found.draw() or "−∞" in found.draw()
    told = json.loads(found.to_json())
    assert told["yours"][0][0] in ("nan", "-inf")
    assert told["expected"] == [[1.0]]
    assert told["passed"] is False
    assert told["exercise"] == "softmax"
    assert json.loads(grade(SOFTMAX, SOFTMAX.reference).to_json())["yours"] is None


def test_a_large_argument_is_drawn_again():
    scaling = read_exercise("scaling")
    found = grade(scaling, lambda q, k: scaling.reference(q, k) + (k.size > 40), seed=3)
    assert found.call == (
        "from regard.learn import draw_call\n\n"
        "# shapes (3, 16), (5, 16)\n"
        'q, k = draw_call("scaling", 17, seed=3)\n'
        "scaled_scores(q, k)"
    )
    q, k = draw_call("scaling", 17, seed=3)
    np.testing.assert_array_equal(q, found.difference.arguments[0])
    np.testing.assert_array_equal(k, found.difference.arguments[1])


THIRD = np.array([[0.5], [1 / 3]])


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (THIRD, "np.array([[0.5   ],\n              [0.3333]])  # rounded"),
        (np.array([True, False]), "np.array([ True, False])"),
        (np.array([np.nan, -np.inf]), "np.array([ np.nan, -np.inf])"),
        (np.zeros((0, 2)), "np.zeros((0, 2), dtype=np.float64)"),
        (np.array([1, 2], np.int32), "np.array([1, 2], dtype=np.int32)"),
        (-math.inf, "-np.inf"),
        ((1, "a", None), "(1, 'a', None)"),
    ],
)
def test_every_value_is_written_as_code(own, x, code):
    found = write_call(own, [(x,)], 0, shows=lambda _: True)
    start = "import numpy as np\n\n" if "np." in code else ""
    assert found == f"{start}x = {code}\ndouble(x)"


def test_arguments_without_names_get_some(own):
    bare = replace(own, spec=lambda *x: x[0])
    assert write_call(bare, [(1, 2)], 0) == "x0 = 1\nx1 = 2\ndouble(x0, x1)"


@pytest.mark.parametrize("x", [object(), np.zeros(41), THIRD, np.array(["a"])])
def test_what_cannot_be_written_is_drawn_again(own, x):
    code = write_call(own, [(x,)], 0)
    assert f"x, = draw_call({json.dumps(str(own.path))}, 0)" in code
    assert len(draw_call(own.path, 0)) == 1


def test_the_part_of_an_answer_is_named(tmp_path):
    path = tmp_path / "double.py"
    pair = OWN.replace("return [2 * v for v in x]", "return x[0], 2 * x")
    path.write_text(pair, encoding="utf-8")
    found = grade(read_exercise(path), lambda x: (x[0], 3 * x))
    assert ": answer[1][0] is " in found.sentence
    found = grade(read_exercise(path), lambda x: (x[0] + 1, 2 * x))
    assert ": answer[0] is " in found.sentence


def test_check_finds_the_exercise_by_the_name():
    def softmax(scores):
        return np.exp(scores)

    found = check(softmax)
    assert not found.passed
    assert found.exercise.name == "softmax"
    assert check(SOFTMAX.reference, exercise="softmax").passed
    with pytest.raises(OptionError, match='no exercise has a function "<lambda>"'):
        check(lambda x: x)


def test_a_notebook_shows_coloured_tables_and_no_foreign_markup():
    def softmax(scores):
        raise ValueError("<script>alert(1)</script>")

    page = check(softmax)._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "<table>" not in page

    def scores(q, k):
        return q @ k.T + 1

    page = check(scores)._repr_html_()
    assert page.count("<table>") == 3
    assert "Specification" in page
    assert page.count(">1</td>") == 1  # the difference
    right = check(SCORES.reference, exercise="scores")._repr_html_()
    assert "Right." in right
    assert "return q @ k.T" in right


def test_a_notebook_can_use_a_folder_of_the_teacher(tmp_path):
    (tmp_path / "twice.py").write_text(OWN, encoding="utf-8")

    def double(x):
        return x * x

    assert check(double, course=Path(tmp_path)).grade.sentence == "That is the square."
