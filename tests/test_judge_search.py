"""The search finds, shrinks and repeats wrong calls; what cannot be asked is said first."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from broken.registry import right
from click.testing import CliRunner

import regard
from regard.__main__ import main
from regard.errors import OptionError
from regard.judge import AttentionCall, Convention, repeat_call
from regard.judge.calls import draw_asked, fit_call
from regard.judge.case import Examiner
from regard.judge.run_check import CASES, check, judge
from regard.judge.search import Search, read_like, read_seconds, write_repeated
from regard.judge.subject import Subject

MASKED = Convention(mask="mask", shared_heads=True, precisions=("float64",))


def drops_the_mask(q, k, v, mask=None):
    """Wrong for one query, grouped heads and more than 20 keys together."""
    if mask is not None and mask.ndim < 4:
        raise ValueError("mask: expected (B, H, Nq, Nk)")
    if q.shape[1] > k.shape[1] and q.shape[2] == 1 and k.shape[2] > 20:
        mask = None
    return right(q, k, v, mask)


def examine(fn, words=MASKED):
    return Examiner(Subject(fn, words), np.random.default_rng(0))


def test_the_smallest_wrong_call_is_found_and_repeated_by_its_code():
    e = examine(drops_the_mask)
    searched = Search(seconds=60)
    found = searched.ask(e)
    call = found.call
    assert (call.batch, call.heads, call.shared) == (1, 2, 1)
    assert (call.n_q, call.n_k, call.width, call.columns) == (1, 21, 1, 1)
    assert call.options() == {"shared": 1, "mask": call.mask}
    assert str(searched).endswith(f"continue with --start {searched.asked}")
    code = write_repeated(e.subject, call)
    names = {}
    exec(code.replace(f"from {__name__} import drops_the_mask", ""), globals(), names)
    assert names["found"].says == found.says
    assert names["found"].arguments.q.shape == (1, 2, 1, 1)
    assert repeat_call(right, MASKED, call) is None


def test_a_search_depends_on_its_seed_and_can_be_continued():
    seen = []

    def record(q, k, v, mask=None):
        seen.append((q.shape, k.shape))
        return right(q, k, v, None if mask is None else mask)

    def run(start, many, seed=0):
        seen.clear()
        searched = Search(seed=seed, start=start)
        searched.asked = 250 - many  # of a level
        searched.start -= searched.asked
        assert searched.ask(examine(record)) is None
        return list(seen)

    whole = run(0, 12)
    assert run(0, 6) + run(6, 6) == whole
    assert run(0, 12, seed=1) != whole


def test_calls_of_given_sizes_are_preferred():
    like = read_like("q=2x12x256x64,kv=4")
    assert (like.heads, like.shared, like.n_k, like.columns) == (12, 4, 256, 64)
    assert [read_seconds(x) for x in ("5m", "90s", "1h", 7)] == [300, 90, 3600, 7]
    for wrong in ("q=8x32", "q=2x12x256x64,kv=5", "8x32x1024x128"):
        with pytest.raises(OptionError, match="Write like="):
            read_like(wrong)
    with pytest.raises(OptionError, match='Write search="5m"'):
        read_seconds("soon")


def test_a_call_has_the_same_inputs_each_time_and_fits_the_convention():
    e = examine(right, Convention())
    call = AttentionCall(mask="rows", causal=True, softcap=1.0, bias=True, shared=1)
    plain = fit_call(e, call)
    assert plain.options() == {}
    first, second = (draw_asked(e, plain) for _ in range(2))
    np.testing.assert_array_equal(first.q, second.q)


def test_strides_are_those_that_are_named():
    seen = {}

    def look(q, k, v):
        seen.update(q=q.stride(), k=k.stride(), v=(v.stride(), v.storage_offset()))
        return torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)

    words = Convention(library="torch")
    strides = (("q", "swapped"), ("k", "expanded"), ("v", "part"))
    call = AttentionCall(n_q=4, n_k=4, heads=3, strides=strides)
    e = examine(look, words)
    e.ask(draw_asked(e, call))
    assert seen["q"] == (96, 8, 24, 1)  # stored as (B, N, H, D)
    assert seen["k"][0] == 0
    assert seen["v"] == ((288, 32, 8, 1), 96)


def test_a_signature_that_cannot_be_read_is_said_first():
    sdpa = "torch.nn.functional:scaled_dot_product_attention"
    done = CliRunner().invoke(main, ["check", sdpa, "--level", "basic"])
    assert done.exit_code == 3
    first = " ".join(done.output.split())[:200]
    assert "its signature cannot be read, so mask, causal, bias, scale" in first
    assert done.output.count("not asked:") == 1

    def any_options(q, k, v, **options):
        return right(q, k, v)

    assert check(any_options, level="basic").unread
    assert not check(right, level="basic").unread
    declared = Convention(library="torch", mask="attn_mask", float_mask=True)
    report = check(torch.nn.functional.scaled_dot_product_attention, declared)
    assert not report.unread


def test_a_missing_device_is_a_sentence():
    command = [sys.executable, "-m", "regard", "check", "torch:softmax"]
    done = subprocess.run(
        [*command, "--library", "torch", "--device", "xpu:7"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert 'device="xpu:7" cannot be used here' in done.stderr
    assert "Traceback" not in done.stderr


def tiles_heads(q, k, v):
    k, v = (np.tile(x, (1, q.shape[1] // x.shape[1], 1, 1)) for x in (k, v))
    return right(q, k, v)


def test_gradients_of_softcap_are_those_of_torch():
    softcapped = Convention(library="torch", softcap="softcap", precisions=("float64",))

    def capped(q, k, v, softcap=None):
        return regard.attention(q, k, v, softcap=softcap).out

    call = AttentionCall(softcap=1.5, backward="", n_q=5, n_k=6)
    assert repeat_call(capped, softcapped, call) is None


def test_many_cases_wait_for_one_structural_mistake():
    def averages_over_queries(q, k, v, mask=None):
        x = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
        x = x if mask is None else np.where(mask, x, -np.inf)
        parts = np.exp(x - x.max(-2, keepdims=True))
        return parts / parts.sum(-2, keepdims=True) @ v

    def always_windowed(q, k, v, mask=None):
        rows, keys = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])
        band = (abs(rows - keys) <= 1)[None, None]
        return right(q, k, v, band if mask is None else mask & band)

    words = replace(MASKED, shared_heads=None)
    for fn, name in (
        (averages_over_queries, "softmax_over_keys"),
        (always_windowed, "equal_scores_equal_weights"),
    ):
        assert [x.name for x in check(fn, words).failed] == [name]
    (failed,) = check(tiles_heads, Convention(precisions=("float64",))).failed
    assert failed.name == "gqa_group_is_contiguous"


def test_the_level_ends_with_random_calls():
    assert CASES[-1].name == "random_calls"
    verdict = judge(Subject(drops_the_mask, MASKED), CASES[-1])
    assert verdict.status == "failed"
