"""Options that are suggested: the same case passes with them, on every way to give them."""

import math
import shlex
from dataclasses import replace

import broken.masks
import broken.options
import broken.tutorials  # noqa: F401 (fills BROKEN)
import numpy as np
import pytest
import torch
from broken.registry import BROKEN, hide, right, scores, softmax
from click.testing import CliRunner

import regard
from regard.__main__ import main
from regard.judge.convention import Convention, read_convention
from regard.judge.inputs import Inputs, compute_expected
from regard.judge.run_check import CASES, check, judge
from regard.judge.subject import Subject

LEVEL = {case.name: case.level for case in CASES}


def swap(x):
    return x.swapaxes(1, 2)


def tokens_first(q, k, v):
    return swap(right(swap(q), swap(k), swap(v)))


def tokens_before_batches(q, k, v):
    return right(*(x.transpose(1, 2, 0, 3) for x in (q, k, v))).transpose(2, 0, 1, 3)


def two_axes(q, k, v):
    assert q.ndim == 2
    return right(q, k, v)


def out_has_tokens_first(q, k, v):
    return swap(right(q, k, v))


def values_before_keys(q, a, b):
    return right(q, b, a)


def hides_where_true(q, k, v, mask=None):
    return softmax(hide(scores(q, k), True if mask is None else ~mask)) @ v


def adds_the_mask(q, k, v, mask=None):
    return softmax(scores(q, k) + (0.0 if mask is None else mask)) @ v


def aligned_with_the_first_key(q, k, v, causal=False):
    x = scores(q, k)
    return softmax(hide(x, np.tri(*x.shape[-2:], dtype=bool) | (not causal))) @ v


def aligned_with_the_last_key(q, k, v, causal=False):
    x = scores(q, k)
    n, m = x.shape[-2:]
    return softmax(hide(x, np.tri(n, m, m - n, dtype=bool) | (not causal))) @ v


def heads_in_turn(q, k, v):
    k, v = (np.tile(x, (1, q.shape[1] // x.shape[1], 1, 1)) for x in (k, v))
    return right(q, k, v)


def heads_in_groups(q, k, v):
    return right(q, k, v)


def log_of_base_two(q, k, v):
    x = scores(q, k)
    top = x.max(-1)
    total = np.exp(x - top[..., None]).sum(-1)
    return right(q, k, v), (top + np.log(total)) / math.log(2)


def window_with_itself(q, k, v, causal=False, window=None):
    x = scores(q, k)
    n, m = x.shape[-2:]
    near = np.arange(m) > np.arange(n)[:, None] + m - n - (window or m + n)
    return softmax(hide(x, (np.tri(n, m, m - n, dtype=bool) | (not causal)) & near)) @ v


ALONE = {"precisions": ("float64",)}
WRONG = [  # function, what is declared of it, failed case, what is suggested
    (tokens_first, {}, "equal_scores_equal_weights", "as bnhd: add --layout bnhd"),
    (tokens_before_batches, {}, "", "as nbhd: add --layout nbhd"),
    (two_axes, {}, "it_answers", "as nd: add --layout nd"),
    (
        out_has_tokens_first,
        {},
        "it_answers",
        "with out as bnhd: add --out-layout bnhd",
    ),
    (values_before_keys, {}, "argument_order", "as qvk: add --order qvk"),
    (
        hides_where_true,
        {},
        "true_means_attend",
        "if True means hide: add --true-means hide",
    ),
    (adds_the_mask, {}, "", "if True means added: add --true-means added"),
    (
        aligned_with_the_first_key,
        {"causal_from": "end"},
        "causal_alignment",
        "as start: add --causal-from start",
    ),
    (
        aligned_with_the_last_key,
        {"causal_from": "start"},
        "causal_alignment",
        "as end: add --causal-from end",
    ),
    (
        heads_in_turn,
        {"shared_heads": True},
        "gqa_group_is_contiguous",
        "as interleaved: add --head-order interleaved",
    ),
    (
        log_of_base_two,
        {"level": "kernel"},
        "lse_is_natural_log",
        "with base 2: add --lse-base 2",
    ),
    (
        window_with_itself,
        {"window": "window", "causal_from": "end"},
        "window_counts",
        "if the window counts all: add --window-counts all",
    ),
]


def read_options(hint):
    """Return the options of a suggestion as fields of the convention."""
    words = shlex.split(hint.partition(": add ")[2])
    found = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            after = words[i + 1 : i + 2]
            has_value = after and not after[0].startswith("--")
            name = word.removeprefix("--").replace("-", "_")
            found[name] = after[0] if has_value else True
    return found


@pytest.mark.parametrize(
    ("fn", "declared", "case", "hint"), WRONG, ids=[x[0].__name__ for x in WRONG]
)
def test_the_convention_of_a_right_function_is_suggested(fn, declared, case, hint):
    level = declared.get("level", "complete")
    given = {n: x for n, x in declared.items() if n != "level"}
    words = replace(read_convention(fn), **ALONE, **given)
    report = check(fn, words, level=level)
    failed = report.failed[0]
    assert case in ("", failed.name)
    assert failed.hint == f"passes {hint}"
    assert f"\n  passes {hint}\n" in str(report)
    repaired = replace(words, **read_options(failed.hint))
    assert judge(Subject(fn, repaired), failed.case).status == "passed"


@pytest.mark.parametrize(
    ("fn", "case", "hint"),
    [
        (
            aligned_with_the_first_key,
            "causal_alignment",
            "passes as start: add --causal-from start",
        ),
        (
            aligned_with_the_last_key,
            "causal_alignment",
            "passes as end: add --causal-from end",
        ),
    ],
)
def test_what_is_not_declared_is_suggested_too(fn, case, hint):
    words = replace(read_convention(fn), **ALONE)
    report = check(fn, words)
    assert report.ok
    found = {x.name: x for x in report.verdicts}
    assert found[case].hint == hint
    assert f"not declared: {case} {hint}" in str(report)
    again = Subject(fn, replace(words, **read_options(hint)))
    assert judge(again, found[case].case).status == "passed"


def test_the_order_of_shared_heads_is_observed_and_judged():
    words = replace(read_convention(heads_in_turn), **ALONE)
    (failed,) = check(heads_in_turn, words).failed
    assert failed.name == "gqa_group_is_contiguous"
    assert failed.hint == "passes as interleaved: add --head-order interleaved"
    assert check(heads_in_turn, replace(words, head_order="interleaved")).ok
    report = check(heads_in_groups, replace(words, head_order="grouped"))
    assert report.ok, str(report)
    status = {x.name: x.status for x in report.verdicts}
    assert status["groups_of_any_size"] == "passed"
    undeclared = check(heads_in_turn, replace(words, shared_heads=False), level="basic")
    assert undeclared.ok


def test_no_option_is_suggested_that_does_not_help():
    suggested = 0
    for each in BROKEN:
        if LEVEL[each.case] != "basic" or "mask" not in each.convention.arguments():
            continue
        if each.convention.projections or each.convention.library != "numpy":
            continue
        level = LEVEL[each.case]
        report = check(each.fn, each.convention, level=level)
        for failed in report.failed:
            if not failed.hint:
                continue
            suggested += 1
            words = replace(each.convention, **read_options(failed.hint))
            assert judge(Subject(each.fn, words), failed.case).status == "passed"
    assert suggested >= 1


def test_a_mistake_of_every_convention_has_no_suggestion():
    def forgets_the_scale(q, k, v):
        return softmax(q @ k.swapaxes(-1, -2)) @ v

    def averages_all_heads(q, k, v):
        return np.broadcast_to(right(q, k, v).mean(1, keepdims=True), q.shape)

    for fn in (forgets_the_scale, averages_all_heads):
        report = check(fn, Convention(**ALONE), level="basic")
        assert [x.hint for x in report.failed] == [""] * len(report.failed)
        assert not report.ok


def test_the_command_line_has_every_option(tmp_path, monkeypatch):
    (tmp_path / "kernels_to_check.py").write_text(
        "import numpy as np\n"
        "def attend(q, k, v):\n"
        "    k, v = (np.tile(x, (1, 1, q.shape[2] // x.shape[2], 1)) for x in (k, v))\n"
        "    q, k, v = (x.swapaxes(1, 2).astype(np.float32) for x in (q, k, v))\n"
        "    x = q @ k.swapaxes(-1, -2) * np.float32(q.shape[-1] ** -0.5)\n"
        "    top = x.max(-1, keepdims=True)\n"
        "    w = np.exp(x - top)\n"
        "    total = w.sum(-1, keepdims=True)\n"
        "    lse = (top + np.log(total))[..., 0] / np.log(2)\n"
        "    return (w / total @ v).swapaxes(1, 2), lse\n"
    )
    monkeypatch.chdir(tmp_path)

    def run(*options):
        place = ["check", "kernels_to_check:attend", "--level", "kernel"]
        return CliRunner().invoke(main, [*place, *options])

    options = ["--precisions", "float32"]
    for words in ("--layout bnhd", "--lse-base 2"):
        done = run(*options)
        assert done.exit_code == 1
        assert f"add {words}\n" in done.output
        options += words.split()
    options += ["--shared-heads", "--head-order", "interleaved"]
    done = run(*options)
    assert done.exit_code == 0, done.output
    assert "precision: judged in float32 (tolerance 1e-4)." in done.output
    done = run(*options, "--level", "basic", "--precisions", "float64, float32")
    assert done.exit_code == 1  # what is declared is judged
    assert "it computes in float32; it is judged as declared." in done.output
    for wrong, said in (
        (("--lse-base", "10"), 'lse_base="10", expected one of e, 2.'),
        (("--head-order", "mixed"), 'head_order="mixed", expected one of grouped'),
        (("--storage", "pages"), 'storage "pages", expected one of varlen, paged'),
        (("--page-size", "16"), "page_size=16, but the storage is not paged."),
        (("--precisions", "fp8"), 'precisions="fp8", expected one of float64'),
    ):
        done = run(*wrong)
        assert done.exit_code == 2, done.output
        assert said in done.output.replace("\n", " ")


def test_interleaved_heads_are_those_of_the_definition(rng):
    q, k, v = (rng.normal(size=(2, n, 3, 4)) for n in (6, 2, 2))
    mask = rng.random((2, 6, 3, 3)) < 0.7
    mask[..., 0] = True
    inputs = Inputs(q=q, k=k, v=v, mask=mask)

    def in_turn(q, k, v, mask=None):
        k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))
        x = q @ k.mT * q.shape[-1] ** -0.5
        x = x if mask is None else x.masked_fill(~mask, -torch.inf)
        return x.softmax(-1) @ v, x.softmax(-1), x.logsumexp(-1)

    words = Convention(
        library="torch",
        mask="mask",
        shared_heads=True,
        head_order="interleaved",
        returns=("out", "weights", "lse"),
    )
    answer, expected = Subject(in_turn, words).ask(inputs), compute_expected(inputs)
    for part in ("out", "weights", "lse"):
        np.testing.assert_allclose(
            getattr(answer, part), getattr(expected, part), atol=1e-12
        )
    cases = ("gradient_of_q", "gradient_sums_over_shared_heads", "mask_per_head")
    subject = Subject(in_turn, replace(words, precisions=("float64",)))
    found = [judge(subject, case) for case in CASES if case.name in cases]
    assert [x.status for x in found] == ["passed"] * 3, [x.says for x in found]


def test_arguments_without_a_default_are_given():
    def attention(q, k, v, causal, sm_scale):  # as in the tutorials of Triton
        x = q.float() @ k.float().mT * sm_scale
        if causal:
            later = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
            x = x.masked_fill(later, -torch.inf)
        return (x.softmax(-1) @ v.float()).to(q.dtype)

    report = regard.check(attention)
    assert report.ok, str(report)
    status = {x.name: x.status for x in report.verdicts}
    assert {status[x] for x in ("scale_is_used", "future_never_leaks")} == {"passed"}

    def needs_more(q, k, v, block):
        return q

    (failed,) = regard.check(needs_more, level="basic").failed
    assert (
        failed.mend == "Give it a default value, or Convention(fixed={'name': value})."
    )


def test_a_kernel_without_a_backward_pass_is_not_asked_for_gradients():
    def forward_only(q, k, v):
        with torch.no_grad():
            return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v

    words = Convention(library="torch", precisions=("float64",))
    report = check(forward_only, words)
    assert report.ok, str(report)
    why = {x.name: x.says for x in report.verdicts if x.status == "not asked"}
    assert why["gradient_of_q"] == "out does not require a gradient"
    failed = check(forward_only, replace(words, gradients=True)).failed
    assert [x.name for x in failed] == [f"gradient_of_{x}" for x in "qkv"]
