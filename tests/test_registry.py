"""One entry per statistic, and no other list of their names."""

import ast
import json
import pickle
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from extra_statistic import THIRD
from test_atlas import plan_for, write_corpus

import regard
from regard.__main__ import main
from regard.atlas.job import run_atlas
from regard.atlas.runners import RunnerOptions
from regard.atlas.settings import Settings
from regard.atlas.table import read_table
from regard.atlas.terminal_table import draw_atlas_table as draw_atlas
from regard.atlas.terminal_table import draw_head
from regard.errors import OptionError
from regard.masks.patterns import causal
from regard.recording.record import Record, Recording
from regard.seen import Seen
from regard.show.page import make_page
from regard.show.terminal_map import draw_table
from regard.stats import published
from regard.stats.registry import (
    STATISTICS,
    Statistic,
    find_statistic,
    list_statistics,
    register,
    registered,
    unregister,
)
from regard.stats.table import make_table

SOURCE = Path(regard.__file__).parent
DOCS = SOURCE.parent.parent / "docs"
REGISTRY = SOURCE / "stats/registry.py"


@pytest.fixture
def third():
    with registered(THIRD):
        yield
    assert "third" not in STATISTICS


def make_seen(n=8):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, n, 4)) for _ in range(3))
    lse = regard.attention(q, k, v, causal()).lse
    at = np.arange(n)
    record = Record(
        name="layer",
        q=q,
        k=k,
        lse=np.asarray(lse),
        scale=0.5,
        q_positions=at,
        k_positions=at,
        mask=causal(),
    )
    tokens = (tuple(range(n)),)
    return Seen(Recording(model="", records=(record,), sequences=(0,), tokens=tokens))


# -- a statistic that is registered at run time is everywhere ---------------------------------


def test_it_is_a_column_of_the_table_and_of_the_terminal(third):
    seen = make_seen()
    table = make_table(seen.recording)
    weights = np.asarray(seen.layer(0).weights())[:, :, 2]
    np.testing.assert_allclose(table.rows["third"], weights.mean(1), rtol=1e-6)
    assert table.columns[-2:] == ("third", "nan_rows")
    assert "third" in str(table).splitlines()[0]
    assert table.list_rows()[0]["third"] == table.rows["third"][0]
    drawn = draw_table(table).splitlines()
    assert [x.split()[0] for x in drawn[1:]] == ["entropy", "sink", "distance", "third"]
    assert drawn[-1].endswith("of the weight")


def test_it_is_in_the_data_of_the_map(third):
    html = make_page(make_seen().recording).html.decode()
    data = json.loads(re.search('id="meta">(.*?)</script>', html)[1])
    assert data["statistics"][-1] == THIRD.pack()
    assert data["statistics"][-1]["badge"]["least"] == 0.001
    assert all(row["third"] > 0 for row in data["table"])


def test_it_is_in_an_atlas_whose_workers_are_other_processes(tmp_path, third):
    plan = plan_for(write_corpus(tmp_path / "texts", 2), shard=1)
    assert plan.statistics[-1] == "third"
    run_atlas(tmp_path / "a", crew=RunnerOptions(runner="pool", workers=2), plan=plan)
    table = read_table(tmp_path / "a")
    assert table.about["documents"] == 2
    mean = table.mean("third")
    assert (mean > 0).all() and (mean < 1).all()
    assert table.unit("third") == "weight"
    assert "third: weight on the third key, mean over queries" in draw_atlas(table, "third")  # fmt: skip
    assert "weight: weight on the third key" in draw_head(table, 0, 0)
    page = tmp_path / "page.html"
    done = CliRunner().invoke(main, ["atlas", "show", str(tmp_path / "a"), "--page", str(page)])  # fmt: skip
    assert done.exit_code == 0, done.output
    assert '"description":"weight on the third key"' in page.read_text("utf-8")
    run_atlas(tmp_path / "b", crew=RunnerOptions(runner="loop"), plan=plan)
    np.testing.assert_array_equal(read_table(tmp_path / "b").mean("third"), mean)


@pytest.mark.parametrize("command", [["show"], ["atlas", "run"]])
def test_it_is_in_the_help(third, command):
    said = CliRunner().invoke(main, [*command, "--help"]).output
    for entry in list_statistics():
        assert re.search(rf"\n  {entry.name} +{entry.description[:30]}", said), said
    unregister("third")
    try:
        assert "third" not in CliRunner().invoke(main, [*command, "--help"]).output
    finally:
        register(THIRD)


def test_what_is_not_registered_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(
        OptionError, match=r"'third', expected one of entropy, .*import"
    ):
        find_statistic("third")
    with pytest.raises(OptionError, match="'third', expected each once of entropy"):
        Settings(model="m:f", corpus=("x",), statistics=("third",))
    with pytest.raises(OptionError, match="is a statistic 'sink' already"):
        register(find_statistic("sink"))
    for name in ("head", "nan_rows", "two words"):
        with pytest.raises(OptionError, match=f"named '{name}', expected a Python"):
            Statistic(name=name, unit="", description="", request=print)
    with pytest.raises(OptionError, match="the reduction 'sum', expected"):
        Statistic(name="x", unit="", description="", request=print, reduction="sum")


def test_an_atlas_with_an_unknown_statistic_is_refused_and_says_why(tmp_path):
    with registered(THIRD):
        plan = plan_for(write_corpus(tmp_path / "texts", 2), statistics=("third",))
        run_atlas(tmp_path / "a", crew=RunnerOptions(runner="loop"), plan=plan)
    done = CliRunner().invoke(main, ["atlas", "show", str(tmp_path / "a")])
    assert done.exit_code == 1
    assert "no statistic 'third', expected one of entropy" in done.output
    assert "import the module that registers it" in done.output


def ask_here(record, tokens):
    """Stand for a function of a script, which another process cannot import."""


ask_here.__module__ = "__main__"


@pytest.mark.parametrize(
    "change",
    [
        {"request": lambda *_: None},
        {"request": ask_here},
        {"limits": lambda n: (0, n)},
    ],
)
def test_a_statistic_that_cannot_travel_is_refused_before_any_work(change):
    with registered(replace(THIRD, **change)):
        plan = Settings(model="m:f", corpus=("x",), statistics=("third",))
        with pytest.raises(OptionError, match=r"'third' cannot be sent .* top of a"):
            pickle.dumps(plan)


def test_a_plan_brings_its_statistics_along():
    with registered(THIRD):
        packed = pickle.dumps(plan := Settings(model="m:f", corpus=("x",)))
    assert "third" not in STATISTICS
    assert pickle.loads(packed) == plan
    assert find_statistic("third") == THIRD
    unregister("third")


def test_a_record_without_the_statistic_has_no_value():
    nothing = Statistic(
        name="nothing", unit="", description="", request=lambda *_: None
    )
    most = Statistic(name="most", unit="", description="", request=lambda *_: None, reduction="max")  # fmt: skip
    with registered(nothing), registered(most):
        table = make_table(make_seen().recording)
        assert np.isnan(table.rows["nothing"]).all() and np.isnan(table.rows["most"]).all()  # fmt: skip
        assert (table.rows["nan_rows"] == 0).all()
        assert str(table.by_layer()).splitlines()[1].split()[-2:] == ["–", "–"]


def test_the_sort_order_is_that_of_the_entry():
    few = Statistic(name="few", unit="", description="", request=THIRD.request, ascending=True)  # fmt: skip
    with registered(few):
        table = make_table(make_seen().recording)
        assert (np.diff(table.sort("few").rows["few"]) >= 0).all()
        assert (np.diff(table.sort("few", up=False).rows["few"]) <= 0).all()


# -- there is no other list of names ----------------------------------------------------------

STRING = r'"(?:[^"\\]|\\.)*"' + r"|'(?:[^'\\]|\\.)*'|`(?:[^`\\]|\\.)*`"
SCRIPT = re.compile(rf"/\*.*?\*/|//[^\n]*|({STRING})|([A-Za-z_$][\w$]*)|([{{}}()\[\];])", re.DOTALL)  # fmt: skip


def find_lists(path):
    """Yield the names of statistics that stand together in one place of a file."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        yield from find_python_lists(ast.parse(text))
    elif path.suffix == ".js":
        yield from find_script_lists(text)
    else:  # HTML and CSS: words of values, names and selectors
        words = re.findall(r'value="(\w+)"|--(\w+)|\.(\w+)', text)
        yield {word for found in words for word in found} & {*STATISTICS}


def find_python_lists(tree):
    """Yield the names in each collection, call and comparison, and in each branch."""
    assigned = [x for x in ast.walk(tree) if isinstance(x, ast.Assign)]
    functions = [x for x in assigned if ast.unparse(x.targets[0]) == "__all__"]
    for node in ast.walk(tree):
        if node in [x.value for x in functions]:
            continue
        if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict | ast.Call):
            yield find_constants(node)
        if isinstance(node, ast.FunctionDef | ast.Match):  # if and match by name
            tests = [x for x in ast.walk(node) if isinstance(x, ast.Compare | ast.match_case)]  # fmt: skip
            yield set().union(*map(find_constants, tests))


def find_constants(node):
    found = (x.value for x in ast.walk(node) if isinstance(x, ast.Constant))
    return {word for x in found if isinstance(x, str) for word in x.split(",")} & {*STATISTICS}  # fmt: skip


def find_script_lists(text):
    """Yield the names in each bracket, as strings or as keys, without those inside."""
    stack = [set()]
    for string, word, bracket in SCRIPT.findall(text):
        if bracket and bracket in "{([":
            stack.append(set())
        elif bracket and bracket in "})]":
            names = stack.pop()
            yield names
            stack[-1] |= names if bracket == "]" else set()  # [["a", 1], ["b", 2]]
        else:
            stack[-1] |= {string[1:-1], word} & {*STATISTICS}
    yield from stack


def list_sources():
    return sorted(
        path
        for path in SOURCE.rglob("*")
        if path.suffix in (".py", ".js", ".html", ".css") and path != REGISTRY
    )


def test_no_other_list_of_names_exists():
    found = {
        (str(path.relative_to(SOURCE)), *sorted(names))
        for path in list_sources()
        for names in find_lists(path)
        if len(names) > 1
    }
    assert found == set()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", 'X = ("entropy", "sink")'),
        ("a.py", 'X = {"sink": 1, "other": 2, "local": 3}'),
        ("a.py", 'X = dict.fromkeys(["sink"]) | f("self", "local")'),
        ("a.py", 'X = "sink,local".split(",")'),
        ("a.py", 'def f(x):\n    if x == "sink": return 1\n    return x in ["local"]'),
        ("a.py", 'match x:\n    case "sink": 1\n    case "local": 2'),
        ("a.js", 'const X = ["entropy", "x", "sink"];'),
        ("a.js", "const X = { sink: 1, local: { keys: 2 } };"),
        ("a.js", 'const X = [["sink", 1], ["local", 2]];'),
        ("a.js", 'switch (x) { case "sink": f(); break; case `local`: g(); }'),
        ("a.html", '<option value="sink">a</option><option value="local">b</option>'),
        ("a.css", ".tag.sink { color: red; } .tag.local { color: blue; }"),
    ],
)
def test_a_second_list_of_names_is_found(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert any(len(names) > 1 for names in find_lists(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", '"""entropy, sink"""\nX = ("entropy", "x")\nY = f(y, sink=local)'),
        ("a.py", '__all__ = ["entropy", "induction"]'),
        ("a.js", '/* "entropy", "sink" */ const X = ["sink"]; // "local"'),
    ],
)
def test_single_names_and_comments_are_no_list(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert not any(len(names) > 1 for names in find_lists(tmp_path / name))


# -- the documentation ------------------------------------------------------------------------


def test_the_table_of_the_documentation_is_the_registry():
    page = (DOCS / "stats.md").read_text("utf-8")
    rows = [f"| `{x.name}` | {x.unit} | {x.reduction} | {x.description} |" for x in list_statistics()]  # fmt: skip
    assert "\n".join(["|---|---|---|---|", *rows]) in page


def test_every_published_score_is_in_the_documentation_once():
    page = (DOCS / "stats.md").read_text("utf-8")
    table = page[page.index("| score | definition | variant |") :].partition("\n\n")[0]
    names = re.findall(r"`(\w+)`", table)
    assert sorted(names) == published.__all__
