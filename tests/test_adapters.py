"""A library of which the observer sees nothing, made known from outside by an adapter."""

import ast
import re
from dataclasses import replace
from pathlib import Path

import made_up_library
import pytest
import torch
from made_up_adapter import MADE_UP
from made_up_library import Decoder
from torch import nn

import regard
from regard.ablate import effect, knock_out
from regard.errors import OptionError
from regard.lens.adapters import Adapter, register
from regard.lens.adapters.registry import BUILT_IN, REGISTERED
from regard.lens.captured_call import CapturedCall
from regard.lens.passes import Passes
from regard.run.given import Given
from regard.run.monkeypatch import PATCHED
from regard.run.passes import Pass, State

HERE = Path(__file__).parent
SOURCE = Path(regard.__file__).parent
NAMES = ["layers.0", "layers.1"]
SAME = {"rtol": 0, "atol": 1e-12}  # the same formula, summed in another order


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = Decoder().double().eval()
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(torch.randn_like(x) * 0.4)
    return model


@pytest.fixture
def tokens():
    return torch.randint(0, 40, (2, 7), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def made_up():
    with register(MADE_UP) as adapter:
        yield adapter


def compute(model, tokens, *, keys=(), queries=(), heads=()):
    """Return logits and weights by the definition, with an ablation made by hand."""
    n = tokens.shape[1]
    x = model.embed(tokens) + model.place(torch.arange(n))
    allowed = torch.ones(n, n, dtype=torch.bool)
    if model.layers[0].causal:
        allowed = allowed.tril()
    for i in queries:
        allowed[i, list(keys)] = False
    found = []
    for number, layer in enumerate(model.layers):
        h, h_k, d = layer.sizes
        parts = layer.project(x).split([h * d, h_k * d, h_k * d], -1)
        q, k, v = (y.unflatten(-1, (-1, d)).transpose(1, 2) for y in parts)
        done = regard.attention(q, k, v, allowed, see=("weights",))
        found.append(done.weights)
        out = done.out.clone()
        for at, head in heads:
            if at == number:
                out[:, head] = 0
        out = layer.join(out.transpose(1, 2).flatten(2))
        x = x + out * model.gate(x).softmax(-1)[..., :1]
    return model.read(x), found


def check_records(seen, weights):
    """Compare every recorded weight with the definition."""
    for number, record in zip(seen.recording.sequences, seen.records, strict=True):
        layer = NAMES.index(record.name)
        torch.testing.assert_close(record.weights(), weights[layer][number], **SAME)


def is_clean():
    return (made_up_library.run_kernel.__name__, dict(PATCHED)) == ("run_kernel", {})


# --- without it, with it --------------------------------------------------------------


def test_without_an_adapter_nothing_is_heard(model, tokens):
    with torch.no_grad(), regard.watch(model) as seen:
        model(tokens)
    assert not seen.records
    assert {x.attention for x in seen.coverage()} == {False}


def test_the_adapter_is_short():
    assert len((HERE / "made_up_adapter.py").read_text().splitlines()) < 60


def test_its_calls_are_covered_and_recorded(model, tokens, made_up):
    plain = model(tokens)[0]
    original = made_up_library.run_kernel
    with regard.watch(model, keep="qkv") as seen:
        watched = model(tokens)[0]
        assert made_up_library.run_kernel is not original
    assert made_up_library.run_kernel is original
    assert is_clean()
    assert torch.equal(plain, watched)
    covered = [x for x in seen.coverage() if x.attention]
    assert [x.name for x in covered] == NAMES
    assert {(x.via, x.calls, x.kept, x.reason, x.note) for x in covered} == {
        ("made_up", 1, 1, "", "")
    }
    assert max(x.error for x in covered) < 1e-12
    check_records(seen, compute(model, tokens)[1])
    assert len(seen.records) == 4
    assert {x.v.shape for x in seen.records} == {(2, 7, 8)}  # of grouped heads
    assert {str(x.mask) for x in seen.records} == {str(regard.causal())}


def test_a_generation_is_one_record_per_sequence(model, tokens, made_up):
    with torch.no_grad():
        plain = model.generate(tokens, 5)
        with regard.watch(model) as seen:
            watched = model.generate(tokens, 5)
        _, weights = compute(model, watched[:, :-1])
    assert torch.equal(plain, watched)
    assert len(seen.records) == 4
    assert seen.recording.tokens == tuple(tuple(x[:-1].tolist()) for x in watched)
    assert {x.calls for x in seen.coverage() if x.attention} == {5}
    check_records(seen, weights)


def test_a_chunk_after_a_cache_is_placed_behind_it(model, tokens, made_up):
    with torch.no_grad(), regard.watch(model) as seen:
        _, caches = model(tokens[:, :3])
        model(tokens[:, 3:], caches)
    check_records(seen, compute(model, tokens)[1])
    assert len(seen.records) == 4


def test_the_audit_judges_it(model, tokens, made_up):
    with torch.no_grad(), regard.watch(model) as seen:
        model(tokens)
    assert not [x for x in seen.audit() if x.level == "error"]
    for layer in model.layers:
        layer.causal = False
    with torch.no_grad(), regard.watch(model) as seen:
        model(tokens)
    wrong = seen.audit(expect=regard.causal())
    assert {x.layer for x in wrong if x.level == "error"} == set(NAMES)


# --- ablation -------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [[(0, 1)], [(1, 0), (1, 3)], [(0, 2), (1, 2)]])
def test_heads_are_removed(model, tokens, made_up, heads):
    with torch.no_grad():
        plain = model(tokens)[0]
        with knock_out(model, heads):
            cut = model(tokens)[0]
        expected, _ = compute(model, tokens, heads=heads)
    torch.testing.assert_close(cut, expected, **SAME)
    assert (cut - plain).abs().max() > 1e-3
    assert is_clean()


@pytest.mark.parametrize("keys, queries", [([1], range(7)), ([0, 2], [3, 6])])
def test_keys_are_hidden_and_a_watch_sees_it(model, tokens, made_up, keys, queries):
    with torch.no_grad():
        with regard.watch(model) as seen, knock_out(model, keys=keys, queries=queries):
            cut = model(tokens)[0]
        expected, weights = compute(model, tokens, keys=keys, queries=queries)
    torch.testing.assert_close(cut, expected, **SAME)
    check_records(seen, weights)
    assert is_clean()


def test_a_generation_is_ablated_at_its_positions(model, tokens, made_up):
    cut = {"keys": [2, 8], "queries": range(4, 11)}
    with torch.no_grad():
        with knock_out(model, **cut):
            done = model.generate(tokens, 5)
        for n in range(7, 12):  # each token follows from those before it
            logits, _ = compute(
                model, done[:, :n], keys=[2, 8][: 1 + (n > 8)], queries=range(4, n)
            )
            assert torch.equal(logits[:, -1].argmax(-1), done[:, n])
    assert not torch.equal(done, model.generate(tokens, 5))


def test_the_effect_is_measured(model, tokens, made_up):
    found = effect(model, lambda m: m(tokens)[0], [(0, 1)])
    with torch.no_grad():
        before, after = (
            compute(model, tokens)[0],
            compute(model, tokens, heads=[(0, 1)])[0],
        )
    assert found.logits == pytest.approx(float((before - after).abs().max()), rel=1e-5)


# --- errors of an adapter -------------------------------------------------------------


def fail(*_args, **_named):
    raise RuntimeError("one of ours")


@pytest.mark.parametrize(
    "describe", [fail, lambda *_a, **_n: None, lambda *_a, **_n: 3]
)
def test_a_description_that_fails_is_a_reason(model, tokens, describe):
    plain = model(tokens)[0]
    with register(replace(MADE_UP, describe=describe)), regard.watch(model) as seen:
        watched = model(tokens)[0]
    assert torch.equal(plain, watched)
    covered = [x for x in seen.coverage() if x.attention]
    assert [(x.name, x.via, x.kept) for x in covered] == [
        (x, "made_up", 0) for x in NAMES
    ]
    assert all("made_up" in x.reason for x in covered)
    assert not seen.records


def test_a_text_says_why_a_call_is_not_kept(model, tokens):
    adapter = replace(MADE_UP, describe=lambda *_a, **_n: "paged keys are not read")
    with register(adapter), regard.watch(model) as seen:
        model(tokens)
    assert {x.reason for x in seen.coverage() if x.attention} == {
        "paged keys are not read"
    }


def test_a_wrong_description_is_refused(model, tokens):
    def describe(*args, **named):
        call = MADE_UP.describe(*args, **named)
        return replace(call, scale=2 * call.scale)

    with register(replace(MADE_UP, describe=describe)), regard.watch(model) as seen:
        model(tokens)
    assert not seen.records
    assert {x.reason for x in seen.coverage() if x.attention} == {
        "its output could not be rebuilt"
    }


def test_a_malformed_description_is_a_reason(model, tokens):
    def describe(*args, **named):
        call = MADE_UP.describe(*args, **named)
        return replace(call, k=call.k[0])

    plain = model(tokens)[0]
    with register(replace(MADE_UP, describe=describe)), regard.watch(model) as seen:
        assert torch.equal(plain, model(tokens)[0])
    assert [x.kept for x in seen.coverage() if x.attention] == [0, 0]
    assert all(x.reason for x in seen.coverage() if x.attention)


def test_an_output_that_is_not_given_is_noted(model, tokens):
    with register(replace(MADE_UP, out=False)), regard.watch(model) as seen:
        model(tokens)
    assert all("not compared" in x.note for x in seen.coverage() if x.attention)


@pytest.mark.parametrize("part", ["find", "expect", "run"])
def test_an_edit_that_fails_leaves_the_model_alone_and_is_reported(model, tokens, part):
    plain, found = model(tokens)[0], []
    with (
        register(replace(MADE_UP, **{part: fail})),
        pytest.raises(OptionError) as caught,
        knock_out(model, [(0, 1)]),
    ):
        found.append(model(tokens)[0])
    assert torch.equal(plain, found[0])
    assert "one of ours" in str(caught.value)
    assert is_clean()


def test_an_edit_that_fails_late_runs_the_kernel_once(model, tokens, monkeypatch):
    calls, kernel = [], made_up_library.run_kernel

    def count(*args, **named):
        calls.append(named)
        return kernel(*args, **named)

    def run(original, _edit, *args, **named):
        original(*args, **named)
        fail()

    monkeypatch.setattr(made_up_library, "run_kernel", count)
    plain = model(tokens)[0]
    calls.clear()
    with (
        register(replace(MADE_UP, run=run)),
        pytest.raises(OptionError),
        knock_out(model, [(0, 1)]),
    ):
        assert torch.equal(plain, model(tokens)[0])
    assert len(calls) == len(model.layers)


def test_what_cannot_be_edited_is_refused(model, tokens):
    with register(replace(MADE_UP, run=None)):
        with (
            pytest.raises(OptionError, match="cannot be edited"),
            knock_out(model, [(0, 1)]),
        ):
            model(tokens)
        with regard.watch(model) as seen:
            model(tokens)
    assert len(seen.records) == 4


def test_a_find_that_fails_is_reported_by_a_watch(model, tokens):
    with register(replace(MADE_UP, find=fail)), regard.watch(model) as seen:
        model(tokens)
    assert [x for x in seen.coverage() if "one of ours" in x.reason]


@pytest.mark.parametrize("context", [regard.watch, lambda m: knock_out(m, [(0, 1)])])
def test_the_library_s_own_error_is_the_model_s(
    model, tokens, made_up, context, monkeypatch
):
    monkeypatch.setattr(made_up_library, "run_kernel", fail)
    with pytest.raises(RuntimeError, match="one of ours"), context(model):
        model(tokens)
    assert made_up_library.run_kernel is fail
    assert not PATCHED


# --- the observer inside of a call ----------------------------------------------------


class Written(nn.Module):
    """Attention of which the observer sees every operator."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        return self.attend(q, k, v)

    def attend(self, q, k, v):
        return (q @ k.mT / 8**0.5).softmax(-1) @ v


def describe_written(result, _module, q, k, v):
    q, k, v = (x[:, None] for x in (q, k, v))
    call = MADE_UP.describe(
        None, *(x.transpose(1, 2) for x in (k, v, q)), causal=False, temperature=8**0.5
    )
    return replace(call, out=None if result is None else result[:, None])


def test_operators_inside_of_a_call_are_not_recorded_again():
    torch.manual_seed(0)
    model, x = Written(), torch.randn(2, 5, 8)
    adapter = Adapter(
        name="written",
        find=lambda _model: [(Written, "attend")] * 2,  # once
        describe=describe_written,
        out=True,
    )
    with register(adapter), regard.watch(model) as seen:
        model(x)
    assert [(x.name, x.via, x.calls) for x in seen.coverage()] == [("", "written", 1)]
    with regard.watch(model) as seen:
        model(x)
    assert [(x.name, x.via, x.calls) for x in seen.coverage()] == [("", "softmax", 1)]


class Heard(Written):
    """The same, in a function that no adapter patches."""

    def attend(self, q, k, v):
        return (q @ k.mT / 8**0.5).softmax(-1) @ v


def test_what_comes_after_a_call_is_heard():
    torch.manual_seed(0)
    model, x = nn.Sequential(Written(), Heard()), torch.randn(2, 5, 8)
    adapter = Adapter(
        name="written",
        find=lambda _model: [(Written, "attend")],
        describe=describe_written,
        out=True,
    )
    with register(adapter), regard.watch(model) as seen:
        model(x)
    assert [(x.name, x.via) for x in seen.coverage()] == [
        ("0", "written"),
        ("1", "softmax"),
    ]


# --- the protocol ---------------------------------------------------------------------


def test_an_adapter_may_stay_registered():
    registration = register(MADE_UP)
    assert MADE_UP in REGISTERED
    registration.__exit__()
    assert MADE_UP not in REGISTERED


def find_branches(text):
    """Return the comparisons of `.via` with a text."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            via = any(isinstance(x, ast.Attribute) and x.attr == "via" for x in sides)
            texts = any(
                isinstance(x, ast.Constant) and isinstance(x.value, str) and x.value
                for y in sides
                for x in ast.walk(y)
            )
            found += [ast.unparse(node)] if via and texts else []
    return found


def test_no_other_module_branches_on_an_adapter_s_name():
    files = [x for x in SOURCE.rglob("*.py") if "adapters" not in x.parts]
    assert not {x: y for x in files if (y := find_branches(x.read_text("utf-8")))}
    assert find_branches('if call.via != "softmax": pass')  # it can fail
    assert find_branches('call.via in ("sdpa", "flex")')


def test_the_protocol_is_short():
    file = SOURCE / "lens" / "adapters" / "adapter.py"
    assert len(file.read_text("utf-8").splitlines()) < 120


def test_each_adapter_has_a_file_and_says_what_it_gives():
    for adapter in BUILT_IN:
        assert adapter.can_watch or adapter.can_edit
        assert adapter.can_watch or not (adapter.lse or adapter.v or adapter.out)
        function = adapter.run or adapter.describe
        assert function.__module__.startswith("regard.lens.adapters.")
    files = {x.run.__module__ for x in BUILT_IN}
    assert len(files) == len(BUILT_IN)


# --- the design page ------------------------------------------------------------------


def read_table(first):
    """Return the cells of the table of the design page whose first column is this."""
    text = (HERE.parent / "docs" / "lens_design.md").read_text("utf-8")
    (table,) = [x for x in text.split("\n\n") if x.startswith(f"| {first} |")]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return [[cell.strip() for cell in row] for row in rows]


def make_call(n_q, first, n_k):
    """Return a call with keys that are numbered."""
    k = torch.arange(first, first + n_k)[None, None, :, None].expand(-1, -1, -1, 8)
    q = torch.zeros(1, 1, n_q, 8)
    return CapturedCall(q=q, k=k.double(), lse=torch.zeros(1, 1, n_q), scale=1.0)


def run_every_transition():
    """Yield (state, next, sessions that begin) of passes that do what the page lists."""
    now = Pass()
    passes, before = Passes(now), 0
    tokens = torch.zeros(1, 3, dtype=torch.long)

    def attend(name, call):
        passes.add(now.name_layer(name), call, keep_v=False)

    def begin(tokens, model=""):
        if now.begin(model, Given(tokens)):
            passes.begin()

    def end():
        passes.end()
        now.end()

    for act in (
        lambda: attend("encoder", make_call(2, 0, 2)),
        lambda: begin(tokens),
        lambda: attend("layer", make_call(3, 0, 3)),
        lambda: attend("other", make_call(3, 0, 3)),
        end,
        lambda: begin(tokens[:, :1]),
        lambda: attend("layer", make_call(1, 0, 4)),
        end,
        lambda: begin(tokens),
        lambda: attend("layer", make_call(3, 9, 3)),
        end,
        lambda: begin(tokens),
        end,
        # a wrapper that calls a model twice
        lambda: begin(tokens),
        lambda: attend("layer", make_call(3, 20, 3)),
        lambda: begin(tokens, "lm"),
        lambda: attend("layer", make_call(3, 30, 3)),
        now.end,
        lambda: begin(tokens, "lm"),
        lambda: attend("layer", make_call(3, 40, 3)),
        now.end,
        end,
    ):
        state = now.state
        act()
        yield state.name, now.state.name, len(passes.sessions) - before
        before = len(passes.sessions)


def test_the_state_table_of_the_design_page_is_that_of_the_code():
    rows = read_table("state")
    assert {x for row in rows for x in (row[0], row[2])} == {x.name for x in State}
    done = list(run_every_transition())
    assert {x[:2] for x in done} == {(row[0], row[2]) for row in rows}
    # BEGUN -> RUNNING: a run that continues, and one that begins
    assert [x[2] for x in done if x[:2] == ("BEGUN", "RUNNING")] == [1, 0, 1, 1, 1]
    assert sum(x[2] for x in done) == 4


def test_the_adapter_table_of_the_design_page_is_the_registry():
    said = {False: "no", True: "yes"}
    rows = [
        [
            x.name,
            f"`{x.run.__module__.rpartition('.')[2]}.py`",
            *(said[y] for y in (x.can_watch, x.can_edit, x.lse, x.v, x.out)),
        ]
        for x in BUILT_IN
    ]
    assert read_table("adapter") == rows


def test_the_design_page_names_files_that_exist():
    text = (HERE.parent / "docs" / "lens_design.md").read_text("utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    packages = ("", "lens", "lens/adapters", "run", "ablate")
    places = [SOURCE / x for x in packages]
    places.append(HERE.parent)  # SOURCE may be a copy
    missing = {x for x in named if not any((y / x).exists() for y in places)}
    assert not missing
    for package in ("lens", "run"):
        steps = {x.name for x in (SOURCE / package).glob("*.py")} - {"__init__.py"}
        assert {x for x in steps - named if f"{package}/{x}" not in named} == set()
