"""The precision that a kernel computes in: detected, stated, and no excuse for errors."""

import functools
import json
import math
import re
from dataclasses import replace

import broken.tutorials  # noqa: F401 (fills BROKEN)
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from broken.registry import BROKEN
from hypothesis import example, given
from hypothesis import strategies as st

from regard.judge.convention import Convention, read_convention
from regard.judge.difference import compare_arrays, write_apart
from regard.judge.inputs import BITS, round_bits, round_to
from regard.judge.precision import settle_precision
from regard.judge.run_check import CASES, check, judge_all, order_cases
from regard.judge.subject import Subject

LEVEL = {case.name: case.level for case in CASES}


def normalise(scores):
    parts = (scores - scores.amax(-1, keepdim=True)).exp()
    return parts / parts.sum(-1, keepdim=True)


def scale(q):
    return q.shape[-1] ** -0.5


def attend_in(q, k, v, *, round_inputs, round_weights=lambda x: x):
    a, b, c = map(round_inputs, (q, k, v))
    return (round_weights(normalise(a @ b.mT * scale(q))) @ c).to(q.dtype)


def to_tf32(x):
    bits = x.float().contiguous().view(torch.int32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def widen(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def in_double(q, k, v):
    return attend_in(q, k, v, round_inputs=widen)


def in_single(q, k, v):
    return attend_in(q, k, v, round_inputs=torch.Tensor.float)


def scaled_before_rounding(q, k, v):
    a, b, c = (x.float() for x in (q * scale(q), k, v))
    return (normalise(a @ b.mT) @ c).to(q.dtype)


def single_softmax(q, k, v):
    weights = normalise((widen(q) @ widen(k).mT * scale(q)).float())
    return (weights.to(widen(v).dtype) @ widen(v)).to(q.dtype)


def single_exponentials(q, k, v):
    scores = (widen(q) @ widen(k).mT * scale(q)).float()
    parts = (scores - scores.amax(-1, keepdim=True)).exp().to(widen(v).dtype)
    return (parts @ widen(v) / parts.sum(-1, keepdim=True)).to(q.dtype)


def nine_digits_of_log2_e(q, k, v):
    scores = widen(q) @ widen(k).mT * (scale(q) * 1.44269504)
    parts = torch.exp2(scores - scores.amax(-1, keepdim=True))
    return (parts @ widen(v) / parts.sum(-1, keepdim=True)).to(q.dtype)


def online(q, k, v, wide=torch.Tensor.float):
    top = torch.full((*q.shape[:-1], 1), -torch.inf)
    total, out = (
        wide(torch.zeros_like(top)),
        wide(torch.zeros(*q.shape[:-1], v.shape[-1])),
    )
    for i in range(0, k.shape[-2], 2):
        scores = (wide(q) * scale(q) @ wide(k[..., i : i + 2, :]).mT).float()
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        parts, old = (wide((x - new).exp()) for x in (scores, top))
        out = out * old + parts @ wide(v[..., i : i + 2, :])
        total, top = total * old + parts.sum(-1, keepdim=True), new
    return (out / total).to(q.dtype)


def online_in_double(q, k, v):  # float32 exponentials, float64 sums
    return online(q, k, v, wide=lambda x: x.to(widen(q).dtype))


def bfloat16_inputs(q, k, v):
    return attend_in(q, k, v, round_inputs=lambda x: x.bfloat16().float())


def bfloat16_throughout(q, k, v):
    return attend_in(q, k, v, round_inputs=torch.Tensor.bfloat16)


def bfloat16_weights(q, k, v):
    return attend_in(
        q,
        k,
        v,
        round_inputs=torch.Tensor.float,
        round_weights=lambda x: x.bfloat16().float(),
    )


def float16_inputs(q, k, v):
    return attend_in(q, k, v, round_inputs=lambda x: x.half().float())


def tf32_products(q, k, v):
    return attend_in(q, k, v, round_inputs=to_tf32, round_weights=to_tf32)


def tf32_after_scaling(q, k, v):
    weights = normalise(to_tf32(q * scale(q)) @ to_tf32(k).mT)
    return (to_tf32(weights) @ to_tf32(v)).to(q.dtype)


def numpy_in_single(q, k, v):
    a, b, c = (x.astype(np.float32) for x in (q, k, v))
    scores = a @ b.swapaxes(-1, -2) * np.float32(scale(q))
    parts = np.exp(scores - scores.max(-1, keepdims=True))
    return (parts / parts.sum(-1, keepdims=True) @ c).astype(q.dtype)


def jax_in_bfloat16(q, k, v):
    a, b, c = (x.astype(jnp.bfloat16).astype(jnp.float32) for x in (q, k, v))
    weights = jax.nn.softmax(a @ b.swapaxes(-1, -2) * scale(q))
    return (weights @ c).astype(q.dtype)


STYLES = {
    in_double: "",
    in_single: "float32",
    scaled_before_rounding: "float32",
    single_softmax: "float32",
    single_exponentials: "float32",
    nine_digits_of_log2_e: "float32",
    online: "float32",
    online_in_double: "float32",
    numpy_in_single: "float32",
    bfloat16_inputs: "bfloat16",
    bfloat16_throughout: "bfloat16",
    bfloat16_weights: "bfloat16",
    float16_inputs: "float16",
    tf32_products: "tf32",
    tf32_after_scaling: "tf32",
}


@pytest.mark.parametrize("fn", STYLES, ids=lambda x: x.__name__)
def test_the_precision_of_every_style_is_found_and_stated(fn):
    report = check(fn, level="basic", limit=120)
    assert report.ok, str(report)
    computed = STYLES[fn]
    assert bool(report.note) == bool(computed)
    if computed:
        assert f"it computes in {computed};" in report.note
    assert report.precision in str(report)
    assert json.loads(report.to_json())["precision"] == report.precision


def test_the_precision_of_jax_is_found():
    subject = Subject(jax_in_bfloat16, read_convention(jax_in_bfloat16), limit=120)
    note = settle_precision(subject)
    assert note.endswith("it computes in bfloat16; it is judged in bfloat16.")
    assert set(subject.computes.values()) == {"bfloat16"}


def test_kernels_of_few_bits_pass_where_only_their_inputs_are_rounded():
    for fn in (bfloat16_inputs, tf32_after_scaling):
        report = check(fn, level="complete")
        assert report.ok, str(report)
    words = Convention(library="torch", precisions=("float32",))
    claimed = check(bfloat16_inputs, words, level="basic")
    assert not claimed.ok  # what is declared is judged
    assert (
        claimed.note
        == "given float32, it computes in bfloat16; it is judged as declared."
    )


def test_zeros_and_ones_are_of_no_precision():
    for fn in (lambda q, k, v: 0 * v, lambda q, k, v: 0 * v + 1):
        assert check(fn, Convention(), level="basic").note == ""


def test_a_report_states_the_tolerances():
    assert check(in_double, level="basic").precision == (
        "judged in float64 (tolerance 1e-9), float32 (tolerance 1e-4), "
        "float16 (tolerance 1e-2), bfloat16 (tolerance 5e-2)."
    )
    assert (
        "float32 with the tolerance of tf32, "
        in check(tf32_products, level="basic").note
    )


def test_a_kernel_for_16_bits_alone_is_judged_in_them():
    def only_half(q, k, v):
        if q.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("only fp16 and bf16 are supported")
        return in_single(q, k, v)

    report = check(only_half, level="basic")
    assert report.ok, str(report)
    assert report.note == (
        "given float64 or float32, it raised RuntimeError: only fp16 and bf16 are "
        "supported; it is judged in float16, bfloat16."
    )


def lower(fn, precision):
    """Return a function that computes with numbers of a precision."""

    @functools.wraps(fn)
    def run(q, k, v, **options):
        kept = (round_to(np.asarray(x, np.float64), precision) for x in (q, k, v))
        found = fn(*kept, **options)
        out, *others = found if isinstance(found, tuple) else (found,)
        out = round_to(np.asarray(out, np.float64), precision).astype(q.dtype)
        return (out, *others) if others else out

    return run


REPAIRED = {  # `lower` copies the inputs and returns an array
    "returns_a_list",
    "scales_q_in_place",
}
BELOW_ROUNDING = {  # errors of 1e-10, and of 1e-4 in a score
    "float32": {"adds_an_epsilon"},
    "tf32": {"adds_an_epsilon", "prefers_later_keys"},
    "bfloat16": {"adds_an_epsilon", "prefers_later_keys"},
}


@pytest.mark.parametrize("precision", BELOW_ROUNDING)
def test_a_low_precision_excuses_no_mistake(precision):
    passed, asked = set(), 0
    for each in BROKEN:
        words = each.convention
        if words.library != "numpy" or words.projections or words.storage:
            continue
        if LEVEL[each.case] != "basic":
            continue
        asked += 1
        subject = Subject(lower(each.fn, precision), replace(words, precisions=None))
        settle_precision(subject)
        verdicts = judge_all(subject, order_cases("basic"))
        failed = [x.name for x in verdicts if x.status == "failed"]
        if not failed:
            passed.add(each.name)
        assert not failed or each.case in failed, each.name
    assert asked >= 25
    assert passed == REPAIRED | BELOW_ROUNDING[precision]


def test_an_epsilon_in_single_precision_is_found():
    def adds_an_epsilon(q, k, v):
        a, b, c = (x.float() for x in (q, k, v))
        scores = a @ b.mT * scale(q)
        parts = (scores - scores.amax(-1, keepdim=True)).exp()
        return (parts / (parts.sum(-1, keepdim=True) + 1e-5) @ c).to(q.dtype)

    (failed,) = check(adds_an_epsilon, level="basic").failed
    assert failed.name == "rows_sum_to_one"
    assert "values of 1 average to 1 - 3.3e-06;" in failed.says
    assert "allowed 1.9e-06" in failed.says


def test_rounding_to_bits_is_rounding_to_the_dtype(rng):
    x = np.concatenate([rng.normal(size=500), [0, 1, -2.5]])
    for dtype in ("float32", "float16"):
        rounded = round_bits(x, BITS[dtype])
        normal = np.abs(x) > np.finfo(dtype).tiny
        np.testing.assert_array_equal(rounded[normal], round_to(x, dtype)[normal])
    np.testing.assert_array_equal(
        round_to(x, "tf32"), to_tf32(torch.tensor(x, dtype=torch.float32)).double()
    )


# What a message says of two numbers

ANY = st.floats(allow_nan=True, allow_infinity=True, allow_subnormal=True)


@given(ANY, ANY)
@example(1.0, math.nextafter(1.0, 2))
@example(5e-324, 0.0)
@example(math.inf, -math.inf)
@example(math.nan, 1.0)
@example(1.2518059, 1.2518061)
@example(0.0, -0.0)
def test_a_message_never_shows_the_same_number_twice(x, y):
    found = compare_arrays([x], [y], atol=0)
    if x == y or (math.isnan(x) and math.isnan(y)):
        assert found is None
        return
    said = re.fullmatch(
        r"out\[0\] is (\S+), expected (\S+?)(, off by .*)?\.", found.says
    )
    assert said[1] != said[2]
    assert write_apart(x, y) == (said[1], said[2])


@given(
    st.integers(0, 2**52),
    st.integers(1, 1000),
    st.sampled_from([1e-3, 1.0, 1e6, -40.0]),
)
def test_neighbouring_numbers_are_told_apart(bits, steps, size):
    x = size * (1 + bits * 2.0**-52)
    y = x
    for _ in range(steps % 7 + 1):
        y = math.nextafter(y, math.inf)
    mine, right = write_apart(x, y)
    assert mine != right
    assert float(mine) != float(right)


def test_a_small_difference_is_given_with_what_is_allowed():
    said = compare_arrays([1.0 + 2e-7], [1.0], atol=1e-9).says
    assert said == "out[0] is 1.0000002, expected 1, off by 2.0e-07, allowed 1.0e-09."
    assert compare_arrays([0.5], [0.25]).says == "out[0] is 0.5, expected 0.25."


def test_maps_that_look_the_same_are_not_drawn():
    def ramp(q, k, v):
        scores = q @ k.swapaxes(-1, -2) * scale(q) + 1e-7 * np.arange(k.shape[-2])
        parts = np.exp(scores - scores.max(-1, keepdims=True))
        return parts / parts.sum(-1, keepdims=True) @ v

    (failed,) = check(ramp, level="basic").failed
    lines = failed.explain().splitlines()
    assert failed.name == "order_of_keys_does_not_matter"
    assert failed.says.startswith("reordered out[0, 0, ")
    assert not any(line.split() == ["yours", "expected"] for line in lines)
    assert any(line.split() == ["yours", "-", "expected"] for line in lines)
