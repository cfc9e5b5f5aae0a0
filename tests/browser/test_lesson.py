"""The course in a real browser, offline: Python runs there, and nothing leaves it.

Set REGARD_PYODIDE to a folder with Pyodide and its NumPy wheel: docs/learn-site.md.
"""

import importlib.util
import json
import logging
import os
import re
import threading
import time
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from window import PIXELS, is_own

from regard.learn.build_site import build_site
from regard.learn.course import ORDER
from regard.learn.exercise import read_exercise
from regard.learn.grade_class import grade_folder

FOLDER = os.environ.get("REGARD_PYODIDE")
pytestmark = pytest.mark.skipif(
    not FOLDER,
    reason="set REGARD_PYODIDE to a folder with Pyodide and NumPy: docs/learn-site.md",
)
(axe,) = importlib.util.find_spec("axe_playwright_python").submodule_search_locations
AXE = (Path(axe) / "axe.min.js").read_text("utf-8")
LOG = logging.getLogger(__name__)  # shown by --log-cli-level=INFO
FIRST, LATER = 25, 1  # seconds, on a machine that has nothing else to do
BOOT = 120_000  # ms after which a test gives up


FIVE = {
    "one_score": (
        "def one_score(q, k):\n    return q * k\n",
        "a score is one number, their sum",
        "def one_score(q, k):\n    return sum(a * b for a, b in zip(q, k))\n",
    ),
    "softmax": (
        "import numpy as np\ndef softmax(s):\n    e = np.exp(s)\n    return e / e.sum(-1, keepdims=True)\n",
        "subtract the largest score of each row before exp",
        "import numpy as np\ndef softmax(s):\n    e = np.exp(s - s.max(1)[:, None])\n    return e / e.sum(1)[:, None]\n",
    ),
    "causal_mask": (
        "import numpy as np\ndef causal_weights(s):\n    e = np.exp(s - s.max(-1, keepdims=True))\n    return np.tril(e / e.sum(-1, keepdims=True))\n",
        "the rows no longer sum to 1",
        "import numpy as np\ndef causal_weights(s):\n    s = np.where(np.tri(len(s)) == 1, s, -np.inf)\n    e = np.exp(s - s.max(-1, keepdims=True))\n    return e / e.sum(-1, keepdims=True)\n",
    ),
    "heads_split": (
        "def split_heads(x, heads):\n    n, width = x.shape\n    return x.reshape(heads, n, width // heads)\n",
        "each head holds whole tokens",
        "import numpy as np\ndef split_heads(x, heads):\n    return np.stack(np.split(x, heads, axis=1))\n",
    ),
    "merge_parts": (
        "import numpy as np\ndef merge_parts(a, la, b, lb):\n    return (a + b) / 2, np.logaddexp(la, lb)\n",
        "Both parts have the same weight",
        "import numpy as np\ndef merge_parts(a, la, b, lb):\n    lse = np.logaddexp(la, lb)\n    s = np.where(np.isinf(lse), 0, lse)\n    return a * np.exp(la - s)[:, None] + b * np.exp(lb - s)[:, None], lse\n",
    ),
}


class Server(ThreadingHTTPServer):
    def handle_error(self, *_):
        """Say nothing of who hangs up: a worker is ended while it reads."""


class Quiet(SimpleHTTPRequestHandler):
    """A plain file server, as `python -m http.server` is."""

    asked = None  # a list of paths

    def log_message(self, *_):
        if self.asked is not None:
            self.asked.append(self.path)


@contextmanager
def serve(folder, asked=None):
    handler = type("Handler", (Quiet,), {"asked": asked})
    server = Server(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def busy():
    """Return how many times slower this machine is for what others do on it."""
    return max(1, os.getloadavg()[0] / os.cpu_count())


class Lesson:
    """The page, used as a learner does."""

    def __init__(self, page, url):
        self.page, self.url, self.troubles = page, url, []
        page.on("console", self.hear)
        page.on("pageerror", lambda error: self.troubles.append(f"error: {error}"))
        page.context.on("request", self.watch)

    def hear(self, message):
        if message.type in ("error", "warning"):
            self.troubles.append(f"console: {message.text}")

    def watch(self, request):
        own = is_own(self.url, request.url) or request.url.startswith(
            ("data:", "blob:")
        )
        if not own:
            self.troubles.append(f"request to {request.url}")

    def at(self, name):
        return self.page.locator(f"[data-at={name}]")

    def text(self, name):
        return self.at(name).text_content()

    def go(self, name):
        self.page.goto(f"{self.url}#{name}")
        self.page.wait_for_selector(f"li[data-name={name}] [aria-current]")

    def await_python(self):
        self.page.wait_for_selector("[data-at=state][data-state=ready]", timeout=BOOT)

    def ask(self, text=None, button="check"):
        """Press a button; return what is said, and after how many seconds."""
        if text is not None:
            self.at("code").fill(text)
        began = time.monotonic()
        self.at(button).click()
        self.page.wait_for_selector("[data-at=check]:enabled", timeout=BOOT)
        return self.text("verdict"), time.monotonic() - began

    def state(self, name):
        return self.page.get_attribute(f"li[data-name={name}]", "data-state")

    def maps(self):
        """Return the numbers of the tables, by name, as the page writes them."""
        tables = self.page.locator("details table").all()
        rows = "(table) => [...table.rows].slice(1).map((row) => [...row.cells].slice(1).map((x) => x.textContent))"
        return {x.locator("caption").text_content(): x.evaluate(rows) for x in tables}

    def pixels(self, name):
        """Return the colours of a map."""
        found = self.page.locator(f"figure:has(b:text-is('{name}')) canvas").evaluate(
            PIXELS
        )
        shape = found["height"], found["width"], 4
        return np.array(found["data"], np.uint8).reshape(shape)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Serve the site as a subfolder of something else."""
    root = tmp_path_factory.mktemp("root")
    build_site(root / "some where" / "course", pyodide=FOLDER)
    with serve(root) as host:
        yield f"{host}/some%20where/course/"


@contextmanager
def open_lesson(browser, url, **options):
    context = browser.new_context(viewport={"width": 1280, "height": 860}, **options)
    lesson = Lesson(context.new_page(), url)
    try:
        yield lesson
    finally:
        context.close()
    assert lesson.troubles == []


@pytest.fixture(scope="module")
def started(browser, site):
    """Return a page, and after how many seconds it gave the first answer."""
    with open_lesson(browser, site) as lesson:
        began = time.monotonic()
        lesson.go("one_score")
        said, _ = lesson.ask(FIVE["one_score"][0])
        assert FIVE["one_score"][1] in said
        yield lesson, time.monotonic() - began


@pytest.fixture
def lesson(started):
    lesson, _ = started
    lesson.await_python()
    yield lesson
    assert lesson.troubles == []


def test_the_first_answer_comes_soon(started):
    _, seconds = started
    LOG.info("first answer after %.1f s, load %.1f", seconds, os.getloadavg()[0])
    assert seconds < FIRST * busy()


@pytest.mark.parametrize("name", FIVE)
def test_a_learner_is_wrong_takes_a_hint_and_is_right(lesson, name):
    wrong, sentence, right = FIVE[name]
    exercise = read_exercise(name)
    lesson.go(name)
    solved = int(lesson.text("done").split()[0])
    assert lesson.state(name) == ("started" if name == "one_score" else "")

    said, _ = lesson.ask(wrong)
    assert sentence in said
    assert lesson.state(name) == "started"
    assert f"{exercise.function}(" in lesson.text("more")

    assert exercise.hints[0] not in lesson.text("hints")
    lesson.at("hint").click()
    assert exercise.hints[0] in lesson.text("hints")
    assert exercise.hints[1] not in lesson.text("hints")

    said, _ = lesson.ask(right)
    assert said == "Right."
    assert lesson.state(name) == "solved"
    assert lesson.text("done") == f"{solved + 1} of {len(ORDER)} solved"
    following = read_exercise(ORDER[ORDER.index(name) + 1])
    lesson.page.get_by_role("link", name=f"Next: {following.title}").click()
    lesson.page.wait_for_selector(f"li[data-name={following.name}] [aria-current]")
    assert lesson.text("title").endswith(following.title)


def test_every_exercise_loads_and_knows_right_from_wrong(lesson):
    times = []
    for name in ORDER:
        exercise = read_exercise(name)
        lesson.go(name)
        assert lesson.text("title").endswith(f". {exercise.title}")
        (shown,) = lesson.page.locator("[data-lesson]:visible").all()
        assert shown.get_attribute("data-lesson") == name
        assert len(shown.text_content().split()) >= 40
        if exercise.extra:
            continue
        assert lesson.at("code").input_value() == exercise.stub or name in FIVE
        if ORDER.index(name) % 3 == 0:  # test_site.py has all, with the same files
            source, first = exercise.path.read_text("utf-8"), exercise.mistakes[0]
            wrong = f"{source}\n{exercise.function} = mistake_{first.name}\n"
            said, seconds = lesson.ask(wrong)
            assert (name, said) == (name, first.sentence)
            times.append(seconds)
        start = exercise.stub.partition(f"def {exercise.function}(")[0]
        said, seconds = lesson.ask(start + exercise.solution)  # as it is shown
        assert (name, said) == (name, "Right.")
        times.append(seconds)
        assert lesson.state(name) == "solved"
    told = np.median(times), max(times), os.getloadavg()[0]
    LOG.info("later: median %.2f s, longest %.2f s, load %.1f", *told)
    assert len(times) >= 30
    assert max(times) < LATER * busy()


def test_the_first_steps_of_a_student(browser, site, tmp_path):
    with open_lesson(browser, site) as lesson:
        lesson.page.goto(lesson.url)  # the first exercise is open
        lesson.page.wait_for_selector("li[data-name=one_score] [aria-current]")
        assert not lesson.page.locator(".unserved").count()
        said, _ = lesson.ask(FIVE["one_score"][0])
        assert FIVE["one_score"][1] in said
        assert "The smallest call that shows it" in lesson.text("more")
        lesson.at("hint").click()
        lesson.at("hint").click()
        mine = "def one_score(q, k):\n    return q @ k  # mine\n"
        assert lesson.ask(mine)[0] == "Right."
        lesson.page.get_by_role("link", name="Next: ").click()
        lesson.page.wait_for_selector("li[data-name=scores] [aria-current]")
        lesson.at("code").fill("begun")

        lesson.page.goto("about:blank")
        # from here on Python is not needed, and starting it takes seconds
        lesson.page.context.route("**/pyodide/**", lambda _: None)
        lesson.page.goto(lesson.url)  # opens where the student was
        lesson.page.wait_for_selector("li[data-name=scores] [aria-current]")
        assert lesson.at("code").input_value() == "begun"
        states = lesson.state("one_score"), lesson.state("scores")
        assert states == ("solved", "started")
        assert lesson.text("done") == f"1 of {len(ORDER)} solved"
        lesson.go("one_score")
        assert lesson.at("code").input_value() == mine
        assert lesson.at("hints").locator("li").count() == 2
        lesson.at("reset").click()
        assert lesson.at("code").input_value() == read_exercise("one_score").stub
        lesson.page.reload()
        lesson.at("reset").click()  # undo
        assert lesson.at("code").input_value() == mine
        assert lesson.text("reset") == "Reset"

        with lesson.page.expect_download() as download:
            lesson.at("save").click()
        assert download.value.suggested_filename == "regard-work.json"
        saved = tmp_path / "ada.json"
        download.value.save_as(saved)
        lesson.page.context.unroute_all(behavior="ignoreErrors")
    check_saved_work(browser, site, saved, mine)


def check_saved_work(browser, site, saved, mine):
    """Open saved work on another computer, and hand it in."""
    with open_lesson(browser, site) as lesson:
        lesson.page.context.route("**/pyodide/**", lambda _: None)
        lesson.go("one_score")
        lesson.at("file").set_input_files(saved)
        lesson.page.wait_for_function(
            "() => document.querySelector('[data-at=told]').textContent"
        )
        assert lesson.text("told") == "Opened ada.json: 2 exercises."
        assert lesson.at("code").input_value() == mine
        assert lesson.at("hints").locator("li").count() == 2
        assert lesson.text("done") == f"1 of {len(ORDER)} solved"

        lesson.at("code").fill("newer")
        asked = []
        lesson.page.once("dialog", lambda x: (asked.append(x.message), x.dismiss()))
        lesson.at("file").set_input_files(saved)
        title = read_exercise("one_score").title
        for _ in range(100):
            if asked:
                break
            lesson.page.wait_for_timeout(50)
        assert asked == [f"This replaces your code of: {title}."]
        assert lesson.at("code").input_value() == "newer"
        wrong = saved.with_name("other.json")
        wrong.write_text('{"format": "another"}')
        lesson.at("file").set_input_files(wrong)
        lesson.page.get_by_text(
            "That is not saved work: choose a regard-work"
        ).wait_for()
        lesson.page.context.unroute_all(behavior="ignoreErrors")
    course = {name: read_exercise(name) for name in ORDER}
    rows = grade_folder(saved, course, assigned=("one_score",)).rows
    found = [(row.learner, row.exercise, row.status) for row in rows]
    assert found == [("ada", "one_score", "right"), ("ada", "scores", "unassigned")]


def test_opened_as_a_file_the_page_says_what_to_do(browser, tmp_path):
    build_site(tmp_path)
    context = browser.new_context(viewport={"width": 390, "height": 700})
    page = context.new_page()
    page.goto((tmp_path / "index.html").as_uri())
    said = page.locator(".unserved")
    said.wait_for(state="visible", timeout=5000)
    assert "python -m http.server" in said.inner_text()
    assert not page.get_by_role("button", name="Check").is_visible()
    assert "is loading" not in page.locator("body").inner_text()
    assert page.evaluate("() => document.documentElement.scrollWidth") == 390
    context.close()


def test_an_endless_loop_is_ended_by_the_page_in_the_end(lesson):
    lesson.go("softmax")
    lesson.page.clock.install()
    lesson.at("code").fill("def softmax(x):\n    while True: pass\n")
    lesson.at("check").click()
    lesson.page.clock.run_for(19_000)
    assert lesson.at("check").is_disabled()
    lesson.page.clock.run_for(2_000)
    assert lesson.text("verdict") == (
        "It did not answer within 20 seconds: is there an endless loop?"
    )
    lesson.page.clock.resume()
    lesson.await_python()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "def softmax(x) return x",
            r"Python cannot read line 1 \(def softmax\(x\) ret",
        ),
        ("import sys; sys.exit(3)", "The file raised SystemExit in line 1"),
        ("x = input()", "The file raised EOFError in line 1"),
        ("def other(x): pass", "there is no function softmax"),
        ("def softmax(x):\n    return softmax(x)", "raised RecursionError in line 2"),
        ("def softmax(x):\n    return x / nothing", "raised NameError in line 2"),
    ],
)
def test_whatever_a_text_does_is_one_sentence(lesson, text, sentence):
    lesson.go("softmax")
    said, _ = lesson.ask(text)
    assert re.search(sentence, said), said
    assert "Traceback" not in lesson.page.content()


def test_run_shows_what_is_printed_and_grades_nothing(lesson):
    lesson.go("softmax")
    said, _ = lesson.ask("print('<b>hello</b>')\ndef softmax(x): pass\n", "run")
    assert said == "It ran to its end."
    assert "<b>hello</b>" in lesson.text("more")
    assert lesson.page.locator("[data-at=more] pre").all_text_contents() == [
        "<b>hello</b>\n"
    ]


def test_a_learners_code_reaches_no_other_host(lesson, tmp_path):
    asked = []
    with serve(tmp_path, asked) as elsewhere:
        lesson.go("softmax")
        text = f"import js\nx = js.XMLHttpRequest.new()\nx.open('GET', '{elsewhere}/secret', False)\nx.send()\n"
        said, _ = lesson.ask(text, "run")
        assert "NetworkError" in said
        lesson.troubles = [x for x in lesson.troubles if elsewhere not in x]
    assert asked == []  # not even asked: without a policy it would be


def test_answers_are_drawn_and_written(lesson):
    lesson.go("causal_mask")
    source = read_exercise("causal_mask").path.read_text("utf-8")
    lesson.ask(f"{source}\ncausal_weights = mistake_not_itself\n")
    maps = lesson.maps()
    assert maps["Yours"] == [["NaN"]]
    assert maps["Specification"] == [["1"]]
    hatched = lesson.pixels("Yours")
    assert 0 < np.count_nonzero(hatched[..., 3]) < hatched[..., 3].size
    full = lesson.pixels("Specification")
    assert (full == full[0, 0]).all()

    lesson.ask(f"{source}\ncausal_weights = mistake_one_ahead\n")
    yours, expected, apart = lesson.maps().values()
    assert expected[0] == ["1", "0"]
    assert apart[1] == ["=", "="]
    for x, y, d in zip(yours[0], expected[0], apart[0], strict=True):
        assert float(x) - float(y) == pytest.approx(float(d), abs=1e-3)
    drawn = lesson.pixels("Difference")
    height, width, _ = drawn.shape
    assert not drawn[height // 2 + 1 :, :, 3].any()  # bare where they agree
    first, second = drawn[2, 2].astype(int), drawn[2, width - 3].astype(int)
    assert first[2] > first[0]  # blue: less than expected
    assert second[0] > second[2]
    label = lesson.page.get_by_role("img", name="Difference: 2 × 2, 2 of 4 differ")
    assert label.count() == 1


def test_the_editor_is_used_with_keys_alone(lesson):
    lesson.go("scaling")
    keys, code = lesson.page.keyboard, lesson.at("code")
    code.fill("")
    code.focus()
    keys.type("def f(x):")
    keys.press("Enter")
    keys.type("if x:")
    keys.press("Enter")
    keys.press("Backspace")
    keys.type("y")
    keys.press("End")
    keys.press("Tab")
    assert code.input_value() == "def f(x):\n    if x:\n    y   "
    keys.press("Control+z")
    assert code.input_value() == "def f(x):\n    if x:\n    y"
    keys.press("Control+a")
    keys.press("Tab")
    assert code.input_value() == "    def f(x):\n        if x:\n        y"
    keys.press("Shift+Tab")
    assert code.input_value() == "def f(x):\n    if x:\n    y"
    assert lesson.text("lines") == "1\n2\n3"
    keys.press("Escape")
    keys.press("Tab")
    assert lesson.page.evaluate("() => document.activeElement.dataset.at") == "check"
    keys.press("Shift+Tab")
    keys.press("Control+Enter")
    lesson.page.wait_for_selector("[data-kind=wrong]")
    assert "is there" in lesson.text("verdict") or "line" in lesson.text("verdict")


def test_what_needs_a_real_python_says_so(lesson):
    lesson.go("induction_head")
    assert lesson.at("note").is_visible()
    assert "regard learn open induction_head" in lesson.text("command")
    assert not lesson.at("work").is_visible()
    assert lesson.state("induction_head") == "needs Python with PyTorch"
    lesson.go("softmax")
    assert not lesson.at("note").is_visible()


def test_a_lesson_has_its_own_tab_and_leads_back(lesson):
    lesson.go("softmax")
    with lesson.page.context.expect_page() as opened:
        lesson.page.locator("article:visible a[target=lesson]").click()
    tab = opened.value
    tab.wait_for_load_state()
    assert "/lessons/" in tab.url
    assert lesson.text("title").endswith(read_exercise("softmax").title)
    tab.get_by_role("link", name="scaling").click()
    lesson.page.wait_for_selector("li[data-name=scaling] [aria-current]")
    assert lesson.at("state").get_attribute("data-state") == "ready"  # not loaded anew
    assert len(lesson.page.context.pages) == 2
    tab.close()


def test_it_is_readable_by_all_and_at_all_widths(lesson):
    lesson.go("softmax")
    lesson.ask(
        "def softmax(x):\n    print(x)\n    return x / x.sum(-1, keepdims=True)\n"
    )
    if lesson.at("hint").is_enabled():
        lesson.at("hint").click()
    assert lesson.maps()
    shade = "() => getComputedStyle(document.body).backgroundColor"
    lesson.page.evaluate(AXE)
    for scheme in ("dark", "light"):
        lesson.page.emulate_media(color_scheme=scheme)
        same = "===" if scheme == "light" else "!=="
        lesson.page.wait_for_function(f"({shade})() {same} 'rgb(255, 255, 255)'")
        found = lesson.page.evaluate("() => axe.run()")
        assert len(found["passes"]) > 10
        serious = [x for x in found["violations"] if x["impact"] != "minor"]
        assert [(x["id"], [n["html"] for n in x["nodes"]]) for x in serious] == []
    lesson.at("theme").click()
    assert lesson.page.evaluate(shade) != "rgb(255, 255, 255)"
    for width in (1280, 900, 360):
        lesson.page.set_viewport_size({"width": width, "height": 700})
        wider = "() => document.documentElement.scrollWidth - innerWidth"
        assert lesson.page.evaluate(wider) <= 0
    assert lesson.page.locator("nav").bounding_box()["height"] < 130  # of 700
    lesson.page.evaluate(
        "() => scrollTo(0, document.querySelector('.buttons').offsetTop - 660)"
    )
    lesson.ask()
    box = lesson.at("verdict").bounding_box()
    assert 0 < box["y"] < 700 - box["height"]
    lesson.page.set_viewport_size({"width": 1280, "height": 860})


def test_a_site_without_python_still_teaches_and_says_what_is_missing(
    browser, tmp_path
):
    build_site(tmp_path)
    with serve(tmp_path) as host, open_lesson(browser, f"{host}/") as lesson:
        lesson.go("softmax")
        lesson.page.wait_for_selector("[data-at=state][data-state=failed]")
        said, _ = lesson.ask()
        assert said == lesson.text("state")
        assert said == (
            "Python is missing: put Pyodide and its NumPy wheel into the folder "
            "pyodide/ next to index.html."
        )
        lesson.page.evaluate(
            "() => { Storage.prototype.setItem = () => { throw new Error(); }; }"
        )
        lesson.at("code").fill("kept nowhere")
        assert lesson.text("told").startswith("This browser stores nothing: save your ")
        assert (
            "exp(scores[i, j])" in lesson.page.locator("article:visible").inner_text()
        )
        lesson.troubles = [x for x in lesson.troubles if "404" not in x]


def test_a_course_of_a_teacher_runs_and_is_never_markup(browser, tmp_path):
    course = tmp_path / "mine"
    course.mkdir()
    source = read_exercise("one_score").path.read_text("utf-8")
    source = source.replace('"""', '"""<img src=x onerror=alert(1)> ', 1)
    source = source.replace('"Multiply the two', '"<b>Multiply</b> the two')
    (course / "mine.py").write_text(source, "utf-8")
    build_site(tmp_path / "site", pyodide=FOLDER, course=course)
    with serve(tmp_path / "site") as host, open_lesson(browser, f"{host}/") as lesson:
        lesson.go("mine")
        assert lesson.text("title").startswith("1. <img src=x onerror=alert(1)> ")
        lesson.at("hint").click()
        assert "<b>Multiply</b> the two" in lesson.text("hints")
        assert lesson.ask("def one_score(q, k): return q @ k")[0] == "Right."
        kept = json.loads(lesson.page.evaluate("() => Object.values(localStorage)[0]"))
        assert kept["exercises"]["mine"]["solved"]
        lost = lambda route: route.fulfill(status=404, body="")  # noqa: E731
        lesson.page.context.route("**/pyodide/numpy*", lost)
        said, _ = lesson.ask("import os; os._exit(1)")  # last: Python starts again
        assert said.startswith("Python crashed and is restarting")
        lesson.page.wait_for_selector("[data-at=state][data-state=loading]")
        lesson.page.wait_for_selector(
            "[data-at=state][data-state=failed]", timeout=BOOT
        )
        assert lesson.text("state").startswith("NumPy did not load: ")
        assert "Reload the page." in lesson.text("state")
        lesson.troubles = [x for x in lesson.troubles if "numpy" not in x.lower()]
        lesson.page.context.unroute_all(behavior="ignoreErrors")


def test_a_learner_who_is_stuck_stops_the_check(lesson):
    lesson.go("softmax")
    endless = "while True:\n    pass\n"
    lesson.at("code").fill(endless)
    lesson.at("check").click()
    lesson.page.wait_for_timeout(300)
    assert lesson.at("check").is_disabled()
    (hung,) = lesson.page.workers
    lesson.at("stop").click()
    assert lesson.text("verdict") == "Stopped. Your code is unchanged."
    assert lesson.at("code").input_value() == endless
    lesson.page.wait_for_selector("[data-at=state][data-state=loading]")
    for _ in range(100):
        if hung not in lesson.page.workers:
            break
        lesson.page.wait_for_timeout(50)
    assert hung not in lesson.page.workers
