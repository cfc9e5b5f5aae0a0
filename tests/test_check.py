"""The judge: right attentions pass, each broken one is named, and by its own mistake."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import broken.combined
import broken.gradients
import broken.masks
import broken.options
import broken.sizes
import broken.storage
import broken.tutorials
import broken.values
import jax
import numpy as np
import pytest
import torch
from broken.modules import MODULE, Heads
from broken.registry import BROKEN, right, scores, softmax
from click.testing import CliRunner
from torch import nn

import regard
from regard.__main__ import main
from regard.engine import attend
from regard.errors import OptionError
from regard.judge.case import LEVELS
from regard.judge.convention import (
    Convention,
    Projections,
    describe_convention,
    read_convention,
)
from regard.judge.difference import compare_arrays, find_difference
from regard.judge.inputs import Inputs, compute_expected, expect_gradients, round_to
from regard.judge.layout import arrange_axes, restore
from regard.judge.run_check import CASES, check, judge, order_cases
from regard.judge.subject import Subject

# what any attention does that multiplies by v and broadcasts masks without a thought
NAIVE = {"garbage_in_masked_keys", "padding_mask_is_not_rows"}
ALSO = {  # mistakes that are two mistakes
    "adds_float_masks": {"int_mask_is_not_added"},
    "drops_causal_when_looked_at": {"weights_are_shown_as_defined"},
    "gives_padding_some_weight": {"mask_per_head"},
    "masks_by_a_filler_in_single": {"long_masked_matches"},
    "repairs_nan_forwards_only": {"nan_is_not_hidden"},
}
LEVEL = {case.name: case.level for case in CASES}
BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "check.py"
PLACE = importlib.util.spec_from_file_location("benchmark_check", BENCHMARK)
OTHERS = importlib.util.module_from_spec(PLACE)
PLACE.loader.exec_module(OTHERS)
EVERYTHING, define, speak = OTHERS.OURS, OTHERS.define, OTHERS.speak


@pytest.fixture(autouse=True)
def search_briefly(request, monkeypatch):
    if "random" not in request.node.name and "forgets_a_mask" not in request.node.name:
        monkeypatch.setattr("regard.judge.search.FEW", 5)


def names(report):
    return [verdict.name for verdict in report.failed]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "library"),
    [(define, "numpy"), (define, "torch"), (attend, "torch")],
    ids=["definition numpy", "definition torch", "engine"],
)
def test_our_own_attentions_pass_every_case(run, library):
    report = check(speak(run), replace(EVERYTHING, library=library), level="kernel")
    assert report.ok, str(report)
    assert report.counts["waiting"] == 0
    asked = {x.name for x in report.verdicts if x.status == "passed"}
    assert len(asked) >= 80
    assert ("gradient_of_large_scores" in asked) == (library == "torch")
    assert report.seconds < 60


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_jax_is_judged_with_gradients_and_16_bits(seed):
    def plain(q, k, v, causal=False):
        wide = [x.astype(jax.numpy.float32) for x in (q, k, v)]
        if jax.config.jax_enable_x64 and q.dtype == np.float64:
            wide = [q, k, v]
        x = wide[0] * q.shape[-1] ** -0.5 @ wide[1].swapaxes(-1, -2)
        if causal:
            x = jax.numpy.where(np.tri(*x.shape[-2:], dtype=bool), x, -np.inf)
        return (jax.nn.softmax(x) @ wide[2]).astype(q.dtype)

    words = Convention(library="jax", causal="causal")
    cases = (
        "gradient_of_q",
        "gradient_of_k",
        "half_scores_do_not_overflow",
        "it_answers",
    )
    found = {x.name: x.status for x in run_cases(plain, words, cases, seed)}
    assert set(found.values()) == {"passed"}
    halved = run_cases(
        lambda q, k, v: plain(q, jax.lax.stop_gradient(k), v),
        Convention(library="jax"),
        cases,
        seed,
    )
    assert [x.name for x in halved if x.status == "failed"] == ["gradient_of_k"]


def run_cases(fn, words, cases, seed=0):
    subject = Subject(
        fn, words, limit=120
    )  # the first call may compile, on a busy machine
    return [judge(subject, case, seed) for case in CASES if case.name in cases]


@pytest.mark.parametrize("guilty", BROKEN, ids=lambda x: x.name)
def test_each_mistake_is_named_and_no_other(guilty):
    report = check(guilty.fn, guilty.convention, level=LEVEL[guilty.case], limit=20)
    failed = names(report)
    assert guilty.case in failed, str(report)
    basic = [name for name in failed if LEVEL[name] == "basic"]
    assert basic in ([], [guilty.case]), str(report)
    others = set(failed) - {guilty.case} - ALSO.get(guilty.name, set())
    assert others <= NAIVE, str(report)
    (verdict,) = (x for x in report.failed if x.name == guilty.case)
    assert verdict.says
    assert verdict.case.mend


def test_every_case_has_a_mistake_that_it_names():
    assert len(BROKEN) >= 40
    assert {x.case for x in BROKEN} == {case.name for case in CASES}
    assert len({x.name for x in BROKEN}) == len(BROKEN)


@pytest.mark.slow
def test_verdicts_do_not_depend_on_the_seed():
    for each in BROKEN[::9]:
        found = {
            tuple(
                (x.name, x.status) for x in report.verdicts if x.name != "random_calls"
            )
            for report in (
                check(each.fn, each.convention, level="complete", seed=seed)
                for seed in (0, 12345)
            )
        }
        assert len(found) == 1, each.name
    for seed in (0, 12345):
        assert check(speak(define), EVERYTHING, level="complete", seed=seed).ok


def test_the_errors_of_the_source_documents_are_named():
    by_name = {x.name: x for x in BROKEN}
    for name, case, words in (
        ("multiplies_by_infinity", "mask_makes_no_nan", "is NaN"),
        ("adds_an_epsilon", "rows_sum_to_one", "values of 1 average to 1 - 3.3e-11"),
        ("SwapsMatrices", "keys_answer_queries", "expected"),
        ("swaps_arguments", "keys_answer_queries", "expected"),
        ("forgets_the_scale", "scale_is_one_over_root_width", "a scale of 1 gives"),
        ("scales_by_the_values", "scale_ignores_the_values", "expected"),
        ("masks_after_the_softmax", "mask_before_softmax", "sum to less than 1"),
    ):
        report = check(by_name[name].fn, by_name[name].convention, level="basic")
        assert names(report) == [case]
        assert words in report.failed[0].says


def test_a_right_attention_of_numpy_passes_and_is_quick():
    began = time.process_time()
    report = check(right, Convention(mask="mask", causal="causal", shared_heads=True))
    assert report.ok, str(report)
    assert time.process_time() - began < 10


def test_conventions_are_not_held_against_a_function():
    def hides(query, value, key, attn_mask=None):
        q, k, v = (x.swapaxes(1, 2) for x in (query, key, value))
        mask = None if attn_mask is None else ~attn_mask.astype(bool)
        return right(q, k, v, mask).swapaxes(1, 2)

    words = replace(read_convention(hides), library="numpy")
    words = replace(words, layout="bnhd", true_means="hide")
    assert (words.order, words.mask) == ("qvk", "attn_mask")
    assert check(hides, words).ok
    wrong = replace(words, true_means="attend")
    assert names(check(hides, wrong, level="basic")) == ["true_means_attend"]
    assert "argument_order" in names(check(hides, replace(words, order="qkv")))

    def adds(q, k, v, bias=0):
        return softmax(scores(q, k) + bias) @ v

    words = Convention(mask="bias", true_means="added", layout="hnd")
    assert check(adds, replace(words, precisions=("float64",))).ok


def test_what_is_declared_away_is_not_asked():
    report = check(
        right, Convention(other_lengths=False, shared_heads=False), level="kernel"
    )
    why = {x.name: x.says for x in report.verdicts if x.status == "not asked"}
    assert why["lengths_may_differ"] == "it takes as many keys as queries"
    assert why["true_means_attend"] == "it has no mask argument"
    assert why["gqa_group_is_contiguous"] == "its heads do not share keys"
    assert why["gradient_of_q"] == "it has no gradients"
    assert report.counts["not asked"] == len(why)
    assert report.counts["waiting"] == 0
    assert f"{len(why)} not asked" in str(report)


def test_an_always_causal_function_is_judged_as_such():
    def attend_causally(q, k, v):
        return right(q, k, v, causal=True)

    words = Convention(always_causal=True, causal_from="start", precisions=("float64",))
    report = check(attend_causally, words)
    assert report.ok, str(report)
    assert "future_never_leaks" in [
        x.name for x in report.verdicts if x.status == "passed"
    ]
    leak = check(right, words, level="basic")
    assert names(leak) == ["causal_as_declared"]
    undeclared = check(attend_causally, Convention(precisions=("float64",)))
    assert names(undeclared) == ["causal_as_declared"]
    hint = "passes as always causal: add --always-causal --causal-from start"
    assert undeclared.failed[0].hint == hint


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda q, k, v: 1 / 0, "it raised ZeroDivisionError: division by zero"),
        (
            lambda q, k, v: q[..., :2],
            "out has shape (1, 1, 3, 2), expected (1, 1, 3, 8)",
        ),
        (lambda q, k, v: None, "out is a NoneType, expected an array of numpy"),
        (
            lambda q, k, v: torch.tensor(q),
            "out is a Tensor, expected an array of numpy",
        ),
        (lambda q, k, v: (), "it returned nothing"),
        (lambda q, k, v: sys.exit(3), "it raised SystemExit: 3"),
    ],
)
def test_whatever_a_function_does_becomes_a_sentence(fn, words):
    report = check(fn, Convention(), level="kernel")
    assert names(report) == ["it_answers"]
    assert words in report.failed[0].says
    waiting = [x.says for x in report.verdicts if x.status == "waiting"]
    assert waiting == ["it_answers"] * (len(report.verdicts) - 1)


def test_a_function_that_hangs_is_given_up():
    stop = []

    def hang(q, k, v):
        while not stop:
            time.sleep(0.01)
        return q

    began = time.perf_counter()
    report = check(hang, Convention(), level="basic", limit=0.2)
    stop.append(True)
    assert time.perf_counter() - began < 3
    assert report.failed[0].says == "it did not answer within 0.2 seconds."
    assert "an infinite loop" in str(report)


def test_one_that_hangs_now_and_then_is_not_asked_forever():
    def slow_with_options(q, k, v, scale=None, softcap=None, sink=None, bias=None):
        if any(x is not None for x in (scale, softcap, sink, bias)):
            time.sleep(0.5)
        return right(q, k, v)

    words = read_convention(slow_with_options)
    words = replace(words, library="numpy", precisions=("float64",))
    report = check(slow_with_options, words, level="complete", limit=0.1)
    assert len(report.failed) == 3
    assert {x.says for x in report.failed} == {"it did not answer within 0.1 seconds."}
    rest = [x for x in report.verdicts if "3 times" in x.says]
    assert "mask_per_head" in [x.name for x in rest]
    assert {x.status for x in rest} == {"not asked"}


def test_modules_are_judged_through_their_matrices():
    torch.manual_seed(0)
    report = check(Heads(), MODULE, level="complete")
    assert report.ok, str(report)
    passed = {x.name for x in report.verdicts if x.status == "passed"}
    assert {"projection_biases_apply", "output_projection_applies"} <= passed
    assert {"heads_do_not_mix", "keys_answer_queries", "lengths_may_differ"} <= passed
    kernel = check(Heads(), replace(MODULE, mask=None), level="kernel")
    assert kernel.ok, str(kernel)
    assert "gradient_of_k" in {x.name for x in kernel.verdicts if x.status == "passed"}


class Fused(nn.Module):
    """Self-attention as small language models have it."""

    def __init__(self, wide=24, heads=3):
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(0.3)
        self.c_attn, self.c_proj = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)

    def forward(self, x):
        parts = self.c_attn(x).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        scores = self.scale(q @ k.mT).masked_fill(
            torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -torch.inf
        )
        out = self.dropout(scores.softmax(-1)) @ v
        return self.c_proj(out.transpose(1, 2).flatten(2))

    def scale(self, scores):
        return scores * (self.c_attn.in_features // self.heads) ** -0.5


def test_a_fused_causal_module_is_judged_out_of_training():
    words = Convention(
        layout="bne",
        order="x",
        library="torch",
        precisions=("float64", "float32"),
        always_causal=True,
        projections=Projections(heads=3, qkv="c_attn.weight", out="c_proj.weight"),
    )
    module = Fused().train()
    report = check(module, words, level="kernel")
    assert report.ok, str(report)
    assert module.training  # it was a copy that was judged
    passed = {x.name for x in report.verdicts if x.status == "passed"}
    assert {"future_never_leaks", "gradient_of_v", "projection_biases_apply"} <= passed
    module.scale = lambda scores: scores
    assert names(check(module, words)) == ["scale_is_one_over_root_width"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float16", "bfloat16", "float32"])
def test_a_kernel_of_one_precision_is_judged_in_it(precision):
    words = replace(EVERYTHING, library="torch", precisions=(precision,))
    for run in (define, attend):
        report = check(speak(run), words, level="kernel")
        assert report.ok, str(report)
        assert report.counts["passed"] >= 80


def test_torch_multihead_attention_is_told_from_its_documentation():
    """Looking at its weights turns empty rows into NaN; the rest is as documented."""
    mha = nn.MultiheadAttention(16, 2, batch_first=True)
    words = Convention(
        layout="bne",
        library="torch",
        precisions=("float64", "float32"),
        mask="key_padding_mask",
        mask_axes="bk",
        true_means="hide",
        look="need_weights",
        returns=("out", "mean_weights"),
        projections=Projections(heads=2, qkv="in_proj_weight", out="out_proj.weight"),
    )
    report = check(mha, words)
    assert set(names(report)) == {"empty_row_is_zero", "looking_changes_nothing"}
    (looked,) = (x for x in report.failed if x.name == "looking_changes_nothing")
    assert "is nan, expected 0" in looked.says
    passed = {x.name for x in report.verdicts if x.status == "passed"}
    assert {
        "projection_biases_apply",
        "mask_per_sequence",
        "true_means_attend",
    } <= passed
    assert "weights_are_shown_as_defined" in passed


def test_torch_kernel_is_told_apart_by_its_alignment():
    sdpa = nn.functional.scaled_dot_product_attention
    words = Convention(
        library="torch",
        mask="attn_mask",
        float_mask=True,
        causal="is_causal",
        causal_from="start",
        scale="scale",
        precisions=("float64", "float32"),
    )
    report = check(sdpa, words)
    assert "causal_alignment" not in names(report)
    at_the_end = check(sdpa, replace(words, causal_from="end"))
    assert "causal_alignment" in names(at_the_end)
    assert "decode_one_token_sees_all" in names(at_the_end)


def test_gradients_by_hand_are_those_of_torch(rng):
    q = rng.normal(size=(2, 4, 3, 5))
    k, v = rng.normal(size=(2, 2, 2, 6, 5))
    mask = rng.random((2, 1, 3, 6)) < 0.6
    mask[0, 0, 1] = False
    inputs = Inputs(q=q, k=k, v=v, mask=mask, scale=0.7)
    g = rng.normal(size=(2, 4, 3, 5))
    leaves = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    out = regard.attention(*leaves, torch.tensor(mask), scale=0.7).out
    (out * torch.tensor(g)).sum().backward()
    for mine, leaf in zip(expect_gradients(inputs, g), leaves, strict=True):
        np.testing.assert_allclose(mine, leaf.grad.numpy(), atol=1e-12)
    np.testing.assert_allclose(
        compute_expected(inputs).out, out.detach().numpy(), atol=1e-12
    )


def test_layouts_are_undone(rng):
    x = rng.normal(size=(2, 3, 4, 5))
    shapes = {"bnhd": (2, 4, 3, 5), "nbhd": (4, 2, 3, 5), "bn(hd)": (2, 4, 15)}
    for layout, shape in shapes.items():
        there = arrange_axes(x, layout)
        assert there.shape == shape
        assert np.array_equal(restore(there, layout, x.shape), x)
    assert np.array_equal(arrange_axes(x, "bn(hd)")[1, 2, 5:10], x[1, 1, 2])
    assert np.array_equal(arrange_axes(x[:1, :1], "nd"), x[0, 0])


def test_rounding_is_that_of_torch(rng):
    x = np.concatenate(
        [rng.normal(size=500) * 10.0 ** rng.integers(-6, 6, 500), [np.inf]]
    )
    for name in ("bfloat16", "float16", "float32"):
        there = torch.tensor(x).to(torch.float32).to(getattr(torch, name)).double()
        np.testing.assert_array_equal(round_to(round_to(x, "float32"), name), there)


def test_the_smallest_difference_is_found(rng):
    calls = [(rng.normal(size=(n, n)),) for n in (5, 2, 3)]
    found = find_difference(lambda x: x @ x, lambda x: x @ x.T, calls)
    assert found.arguments[0].shape == (2, 2)
    np.testing.assert_allclose(found.difference, found.yours - found.expected)
    np.testing.assert_allclose(found.expected, calls[1][0] @ calls[1][0].T)
    assert found.says.startswith("out[")
    assert find_difference(lambda x: x + x, lambda x: 2 * x, calls) is None

    def spoil(x):
        x += 1
        return x

    changed = find_difference(spoil, lambda x: x + 1, calls)
    assert changed.says == "argument 0 is changed by the call, expected a copy."
    late = find_difference(lambda x: x if len(x) < 4 else x + 1, lambda x: x, calls)
    assert late.arguments[0].shape == (5, 5)
    assert "ValueError" in find_difference(lambda x: int("a"), lambda x: x, calls).says
    assert "expected 2" in find_difference(lambda x: x, lambda x: (x, x), calls).says
    words = find_difference(lambda x: "four", lambda x: x, calls)
    assert words.says == "out is a str, expected numbers."


def test_the_smallest_difference_needs_no_torch():
    code = (
        "import builtins, sys; real = builtins.__import__\n"
        "def guard(name, *rest):\n"
        "    assert name.split('.')[0] not in ('torch', 'jax'), name\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = guard\n"
        "import regard; from regard.judge.difference import find_difference;"
        "from regard.judge import Convention; import numpy as np;"
        "f = lambda q, k, v: regard.attention(q, k, v).out;"
        "assert regard.check(f, level='kernel').ok;"
        "assert 'torch' not in sys.modules;"
        "assert find_difference(abs, np.abs, [(np.eye(2),)]) is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_and_infinity_are_compared():
    nan, inf = np.nan, np.inf
    assert compare_arrays([inf, -inf], [inf, -inf]) is None
    assert compare_arrays([1.0, nan], [1.0, 2.0]).says.startswith(
        "out[1] is nan, expected 2"
    )
    assert compare_arrays([inf], [1.0]).says == "out[0] is inf, expected 1."
    assert compare_arrays([1.0 + 1e-10], [1.0]) is None
    assert compare_arrays([1e6 + 1e-4], [1e6]) is None  # relative above 1
    assert "shape (1,), expected (2,)" in compare_arrays([1.0], [1.0, 2.0]).says


def test_a_failure_shows_maps_and_what_to_change():
    (guilty,) = (x for x in BROKEN if x.name == "ignores_causal")
    report = check(guilty.fn, guilty.convention, level="basic")
    text = str(report)
    assert (
        "future_never_leaks: With causal, a query attends to keys after itself." in text
    )
    assert "query 0, key 1 is in the future, but has the weight 0.3333." in text
    assert "    yours     expected\n" in text
    assert "what to change: Hide keys k > q" in text
    verdict = report.failed[0]
    np.testing.assert_allclose(verdict.difference.yours, np.full((3, 3), 1 / 3))
    np.testing.assert_allclose(verdict.difference.expected[1], [0.5, 0.5, 0])
    assert "waiting until future_never_leaks is right: causal_sees_itself" in text


def test_the_report_is_also_markdown_json_and_junit():
    (guilty,) = (x for x in BROKEN if x.name == "is_nan")
    report = check(guilty.fn, guilty.convention, level="basic")
    page = report.to_markdown()
    assert "| it_answers | basic | failed | It fails, or does not return" in page
    assert "| future_never_leaks | basic | waiting | waits until it_answers is" in page
    data = json.loads(report.to_json())
    assert data["ok"] is False
    assert data["cases"][0]["case"] == "it_answers"
    assert data["cases"][0]["yours"][0][0] is None  # NaN
    assert data["counts"] == report.counts
    suite = ET.fromstring(report.to_junit())
    assert suite.get("tests") == str(len(report.verdicts))
    assert suite.get("failures") == "1"
    assert int(suite.get("skipped")) == len(report.verdicts) - 1
    told = suite.find("testcase/failure").text
    assert "blank: NaN or -inf" in told
    assert "yours - expected" not in told  # it would be NaN throughout


def test_a_report_in_colour_holds_the_same_words(capsys):
    (guilty,) = (x for x in BROKEN if x.name == "ignores_causal")
    report = check(guilty.fn, guilty.convention, level="basic")
    report.show(width=100)
    printed = capsys.readouterr().out
    assert (
        "✗ future_never_leaks: With causal, a query attends to keys after itself."
        in printed
    )
    assert printed.startswith("ignores_causal, level basic: wrong in 1; ")
    assert printed.count("not asked:") == 1
    assert "yours - expected" in printed


def test_a_terminal_with_colours_gets_them(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    (guilty,) = (x for x in BROKEN if x.name == "ignores_causal")
    check(guilty.fn, guilty.convention, level="basic").show(width=100)
    printed = capsys.readouterr().out
    assert "48;2;" in printed  # cells are painted
    assert "░" not in printed
    assert "what to change: Hide keys k > q" in printed


def test_the_page_counts_the_cases():
    page = (Path(__file__).parent.parent / "docs" / "check.md").read_text("utf-8")
    for level in LEVELS:
        (line,) = (x for x in page.splitlines() if x.startswith(f"| {level} | "))
        assert line.endswith(f" | {len(order_cases(level))} |")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine_to_check.py").write_text(
        "import numpy as np\n"
        "from regard.judge.convention import Convention\n"
        "WORDS = Convention(layout='nd')\n"
        "def good(q, k, v):\n"
        "    x = q @ k.T * q.shape[-1] ** -0.5\n"
        "    w = np.exp(x - x.max(-1, keepdims=True))\n"
        "    return w / w.sum(-1, keepdims=True) @ v\n"
        "def bad(q, k, v):\n"
        "    return good(k, q, v)\n"
        "class Kind: pass\n"
    )
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("mine_to_check", None)


def test_the_command_line_answers_with_its_exit_code(folder):
    def run(*arguments):
        return CliRunner().invoke(main, ["check", *arguments])

    done = run("mine_to_check:good", "--layout", "nd", "--level", "basic")
    assert done.exit_code == 0, done.output
    assert "good, level basic: " in done.output
    files = ("--json", "a.json", "--junit", "a.xml", "--markdown", "a.md")
    done = run("mine_to_check:bad", "--convention", "mine_to_check:WORDS", *files)
    assert done.exit_code == 1
    assert "✗ keys_answer_queries" in done.output
    found = json.loads((folder / "a.json").read_text("utf-8"))["cases"]
    failed = [x["case"] for x in found if x["status"] == "failed"]
    assert failed[0] == "keys_answer_queries"
    assert ET.parse(folder / "a.xml").getroot().get("failures") == str(len(failed))
    assert (folder / "a.md").read_text("utf-8").startswith("## bad, level complete")
    for arguments, words in (
        (("mine_to_check:absent",), "cannot be loaded, AttributeError"),
        (("nowhere_to_be_found:x",), "cannot be loaded, ModuleNotFoundError"),
        (("mine_to_check",), "expected module:function"),
        (("mine_to_check:Kind",), "is a class, expected a function or a module"),
        (("mine_to_check:good", "--layout", "dn"), 'layout "dn", expected one of bhnd'),
        (
            ("mine_to_check:good", "--level", "all"),
            'level="all", expected one of basic',
        ),
        (("mine_to_check:good", "--true-means", "no"), "expected one of attend, hide"),
        (
            ("mine_to_check:good", "--convention", "mine_to_check:np"),
            "not a Convention",
        ),
    ):
        done = run(*arguments)
        assert done.exit_code == 2, done.output
        assert words in done.output.replace("\n", " ")
        assert "Traceback" not in done.output


def test_a_convention_that_does_not_fit_is_refused():
    for words, message in (
        ({"mask": "attn"}, 'has an argument "attn", the function has q, k, v'),
        ({"returns": ("weights",)}, "out comes first"),
        ({"order": "xc"}, "name their matrices in"),
        ({"library": "tensorflow"}, "expected one of numpy, torch, jax"),
        ({"causal_from": "bottom"}, 'causal_from="bottom", expected one of start, end'),
        ({"window_counts": "both"}, 'window_counts="both", expected one of others'),
        ({"precisions": ("fp16",)}, 'precisions="fp16", expected one of float64'),
        ({"mask_axes": "bnk"}, 'mask_axes="n", expected one of b, h, q, k'),
    ):
        with pytest.raises(OptionError, match=message):
            check(right, Convention(**words))
    with pytest.raises(OptionError, match="expected q, k and v, or one qkv"):
        Projections(heads=2, q="a")
    with pytest.raises(
        OptionError, match=r'no parameter "w", expected one of to_q\.weight'
    ):
        where = Projections(heads=2, q="w", k="w", v="w")
        check(Heads(), replace(MODULE, projections=where))
    with pytest.raises(OptionError, match="cannot be called"):
        check(3)
    shared = Heads()
    shared.to_k = nn.Linear(16, 8)
    with pytest.raises(
        OptionError, match=r"shapes \[\(16, 16\), \(8, 16\), \(16, 16\)"
    ):
        check(shared, MODULE)


def test_a_part_of_an_answer_may_be_nothing():
    report = check(
        lambda q, k, v: (right(q, k, v), None), Convention(precisions=("float64",))
    )
    assert report.ok, str(report)
    assert "one_token" in {x.name for x in report.verdicts if x.status == "passed"}


@pytest.mark.parametrize("name", ["to_k", "to_v"])  # Whisper's keys have none
def test_a_matrix_without_a_bias_is_judged(name):
    torch.manual_seed(0)
    module = Heads()
    setattr(module, name, nn.Linear(16, 16, bias=False))
    (found,) = run_cases(module, MODULE, ("projection_biases_apply",))
    assert found.status == "passed", found.says


def test_an_attribute_is_not_taken_for_what_the_file_calls_so():
    def attend(q, k, v):  # nn is torch's in this file
        return jax.nn.softmax(q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5) @ v

    assert read_convention(attend).library == "jax"
    assert read_convention(jax.jit(attend)).library == "jax"


def test_the_signature_tells_the_names_and_the_library():
    assert read_convention(right) == Convention(mask="mask", causal="causal")
    assert read_convention(broken.gradients.attend).library == "torch"
    assert read_convention(Heads()).library == "torch"
    assert (
        read_convention(nn.functional.scaled_dot_product_attention).library == "torch"
    )
    assert describe_convention(Convention()) == "layout='bhnd', library='numpy'"


def test_levels_contain_each_other_and_cases_come_after_what_they_await():
    sizes = [len(order_cases(level)) for level in LEVELS]
    assert sizes == sorted(set(sizes))
    order = [case.name for case in order_cases("kernel")]
    plain = [case for case in CASES if not case.storage]
    assert len(order) == len(set(order)) == len(plain)
    for case in CASES:
        order = [x.name for x in order_cases("kernel", case.storage)]
        assert set(case.after) <= set(order), case.name
        assert all(order.index(n) < order.index(case.name) for n in case.after)


def test_the_plugin_makes_a_test_of_every_case(pytester_folder):
    done = pytester_folder(
        "from regard.judge.convention import Convention\n"
        "from regard.judge.plugin import AttentionCases\n"
        "import regard\n"
        "def mine(q, k, v):\n"
        "    return regard.attention(q, k, v, scale=1.0).out\n"
        "class TestMine(AttentionCases):\n"
        "    attention = staticmethod(mine)\n"
        "    convention = Convention(layout='nd')\n"
        "    level = 'basic'\n"
        "def test_all(regard_check):\n"
        "    regard_check(lambda q, k, v: regard.attention(q, k, v).out)\n"
        "def test_some(regard_check):\n"
        "    regard_check(mine, level='basic')\n"
    )
    assert "test_attention[scale_is_one_over_root_width]" in done.stdout
    assert "a scale of 1 gives (D = 8)" in done.stdout
    assert "waits until scale_is_one_over_root_width is right" in done.stdout
    assert "2 failed" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.fixture
def pytester_folder(tmp_path):
    def run(code):
        (tmp_path / "test_mine.py").write_text(code)
        arguments = ["-p", "no:cacheprovider", "-p", "regard.judge.plugin", "-rsf"]
        alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return subprocess.run(
            [sys.executable, "-m", "pytest", *arguments, str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env=alone,
        )

    return run


def test_the_name_and_the_package_do_not_clash():
    assert regard.check is check
    assert regard.judge.Convention is Convention
