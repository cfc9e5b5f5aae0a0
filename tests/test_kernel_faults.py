"""Random single faults are noticed; correct kernels, however unusual, are not blamed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from numpy import exp
from torch import nn

from regard.judge.convention import Convention, read_convention
from regard.judge.difference import compare_arrays
from regard.judge.run_check import CASES, check, judge
from regard.judge.size_cases import MANY, TOKENS, WIDTHS, cover_sizes
from regard.judge.subject import Subject

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def load(name):
    place = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(place)
    sys.modules[name] = module
    sys.path.insert(0, str(BENCHMARKS))
    try:
        place.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


FAULTS = load("faults")
FAULTY = sys.modules["faulty_kernels"]


@pytest.mark.slow
def test_random_faults_are_noticed():
    faults, _ = FAULTS.draw_faults(5, len(FAULTY.KINDS))
    assert {x.kind for x in faults} == set(FAULTY.KINDS)
    passed = [str(x) for x in faults if check(*x.kernel(), level="kernel").ok]
    assert len(passed) <= 1, passed


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("signature", FAULTY.SIGNATURES)
def test_without_a_fault_the_kernel_is_right(library, signature):
    fn, words = FAULTY.make_kernel(library, signature, lambda _, x, __: x)
    report = check(fn, words, level="kernel")
    assert report.ok, str(report)
    assert report.note == ""


def test_the_table_of_faults_is_that_of_the_cases():
    found = json.loads((BENCHMARKS / "faults.json").read_text("utf-8"))
    assert (found["seed"], found["faults"]) == (FAULTS.SEED, FAULTS.MANY)
    # measured with the cases of its date: later ones can only find more
    assert found["cases"] <= sum(not x.storage for x in CASES)
    assert found["pass"] == len(found["survivors"]) <= 0.02 * found["faults"]
    page = (BENCHMARKS.parent / "docs" / "check.md").read_text("utf-8")
    assert FAULTS.render(found) in page


def test_every_size_is_asked_along_every_axis():
    many = [*cover_sizes()]
    for axis, sizes in {
        "n_q": TOKENS, "n_k": TOKENS, "batch": MANY, "heads": MANY,
        "width": WIDTHS, "columns": WIDTHS,
    }.items():  # fmt: skip
        assert set(sizes) <= {getattr(x, axis) for x in many}, axis


def widen(*arrays):
    """Return 16 bits as float32, and all else as it is."""
    return [x.astype(np.promote_types(x.dtype, np.float32)) for x in arrays]


def softmax(x):
    parts = np.exp(x - x.max(-1, keepdims=True))
    return parts / parts.sum(-1, keepdims=True)


def scores(q, k):
    return q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5


def in_single(q, k, v):
    a, b, c = (x.astype(np.float32) for x in (q, k, v))
    return (softmax(scores(a, b)) @ c).astype(q.dtype)


def single_softmax(q, k, v):
    a, b, c = widen(q, k, v)
    weights = softmax(scores(a, b).astype(np.float32)).astype(a.dtype)
    return (weights @ c).astype(q.dtype)


def single_out(q, k, v):
    a, b, c = widen(q, k, v)
    out = np.zeros((*q.shape[:-1], v.shape[-1]), np.float32)
    out += softmax(scores(a, b)) @ c
    return out.astype(q.dtype)


def single_sums(q, k, v):
    a, b, c = widen(q, k, v)
    x = scores(a, b)
    parts = np.exp(x - x.max(-1, keepdims=True))
    total = parts.sum(-1, keepdims=True).astype(np.float32)
    return (parts @ c / total).astype(q.dtype)


def single_root(q, k, v):
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    a, b, c = (x.to(wide) for x in (q, k, v))
    x = a @ b.transpose(-2, -1) / torch.sqrt(torch.tensor(q.shape[-1]))
    return (torch.softmax(x, -1) @ c).to(q.dtype)


def only_single(q, k, v):
    if q.dtype == np.float64:
        raise TypeError("float64 is not supported")
    return in_single(q, k, v)


def online(q, k, v):
    a, b, c = widen(q, k, v)
    top = np.full((*q.shape[:-1], 1), -np.inf, a.dtype)
    total, out = np.zeros_like(top), np.zeros((*q.shape[:-1], v.shape[-1]), a.dtype)
    for at in range(0, k.shape[-2], 64):
        x = scores(a, b[..., at : at + 64, :])
        new = np.maximum(top, x.max(-1, keepdims=True))
        parts, kept = np.exp(x - new), np.exp(top - new)
        total = total * kept + parts.sum(-1, keepdims=True)
        out, top = out * kept + parts @ c[..., at : at + 64, :], new
    return (out / np.where(total > 0, total, 1)).astype(q.dtype)  # Nk may be 0


def base_two(q, k, v):
    a, b, c = widen(q, k, v)
    x = scores(a, b) * np.log2(np.e).astype(a.dtype)
    lse = np.log2(np.exp2(x - x.max(-1, keepdims=True)).sum(-1)) + x.max(-1)
    out = np.exp2(x - lse[..., None]) @ c
    return out.astype(q.dtype), lse * np.log(2)


def summed(q, k, v):
    a, b, c = widen(q, k, v)
    x = np.einsum("bhid,bhjd->bhij", a, b, optimize=True) / np.sqrt(q.shape[-1])
    out = np.einsum("bhij,bhje->bhie", softmax(x), c, optimize=True)
    return out.astype(q.dtype)


def in_chunks(q, k, v):
    a, b, c = widen(q, k, v)
    rows = range(0, q.shape[-2], 50)
    parts = [softmax(scores(a[..., i : i + 50, :], b)) @ c for i in rows]
    return np.concatenate(parts, -2).astype(q.dtype)


def head_by_head(q, k, v):
    out = np.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    for at in np.ndindex(q.shape[:2]):
        a, b, c = widen(q[at], k[at], v[at])
        out[at] = softmax(scores(a, b)) @ c
    return out


def in_place_on_copies(q, k, v):
    a, b, c = widen(q, k, v)
    x = (a.copy() * q.shape[-1] ** -0.5) @ b.swapaxes(-1, -2)
    x -= x.max(-1, keepdims=True)
    np.exp(x, out=x)
    x /= x.sum(-1, keepdims=True)
    return (x @ c).astype(q.dtype)


def methods_only(q, k, v):  # this file imports torch, and it is still NumPy
    if q.dtype.itemsize < 4:
        return methods_only(*(x.astype("float32") for x in (q, k, v))).astype(q.dtype)
    x = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    parts = 2.718281828459045 ** (x - x.max(-1, keepdims=True))
    return ((parts / parts.sum(-1, keepdims=True)) @ v).astype(q.dtype)


def mapped(q, k, v):
    wide = q.dtype if q.dtype == torch.float64 else torch.float32

    def one(q, k, v):
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v

    return torch.vmap(torch.vmap(one))(*(x.to(wide) for x in (q, k, v))).to(q.dtype)


def weigh(x):
    return torch.softmax(x, -1)


@jax.jit
def traced(q, k, v):
    a, b, c = (x.astype(jax.numpy.float32) for x in (q, k, v))
    x = a @ b.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    return (jax.nn.softmax(x) @ c).astype(q.dtype)


sdpa = nn.functional.scaled_dot_product_attention
SINGLE = [in_single, single_softmax, single_out, single_sums, single_root, only_single]
RIGHT = [online, base_two, summed, in_chunks, head_by_head, in_place_on_copies]


@pytest.mark.parametrize(
    "fn", [*SINGLE, *RIGHT, methods_only], ids=lambda x: x.__name__
)
def test_unusual_kernels_are_not_blamed(fn):
    report = check(fn, level="kernel")
    assert report.ok, str(report)
    assert ("float32" in report.note) == (fn in SINGLE)
    assert report.counts["passed"] >= 35


@pytest.mark.slow
def test_libraries_own_kernels_are_not_blamed():
    words = Convention(library="torch")
    assert check(mapped, level="kernel").ok
    found = [x.name for x in check(sdpa, words, level="kernel").failed]
    assert set(found) <= {"nan_is_not_hidden"}  # of torch's kernel on the CPU
    report = check(traced, level="basic", limit=120)
    assert report.ok, str(report)
    assert "library='jax'" in report.convention
    words = Convention(library="jax", precisions=("float32",))
    subject = Subject(traced, words, limit=120)
    sized = [x for x in CASES if x.name in ("many_heads", "sizes_together")]
    assert [judge(subject, x).status for x in sized] == ["passed"] * 2


def test_an_epsilon_is_not_taken_for_single_precision():
    def adds_an_epsilon(q, k, v):
        a, b, c = widen(q, k, v)
        x = scores(a, b)
        parts = np.exp(x - x.max(-1, keepdims=True))
        return (parts @ c / (parts.sum(-1, keepdims=True) + 1e-7)).astype(q.dtype)

    report = check(adds_an_epsilon, level="kernel")
    assert [x.name for x in report.failed] == ["rows_sum_to_one"]
    assert report.note == ""


def test_the_precision_is_said_in_every_form_of_the_report():
    report = check(in_single, level="basic")
    words = "given float64, it computes in float32; it is judged in float32, float16."
    assert report.note == words
    assert words in str(report)
    assert words in report.to_markdown()
    assert json.loads(report.to_json())["precision"] == words
    refused = check(only_single, level="basic").note
    assert refused.startswith("given float64, it raised TypeError: float64 is not")
    declared = Convention(precisions=("float64", "float32"))
    assert not check(in_single, declared).ok  # what is declared is judged


def test_numbers_that_differ_are_written_differently():
    rng = np.random.default_rng(0)
    for apart in 10.0 ** -np.arange(1, 16):
        for x in (1.0, *rng.normal(size=5), 1e6, 1e-3):
            said = compare_arrays([x * (1 + apart)], [x], atol=0).says
            mine, right = (
                said.removeprefix("out[0] is ").rstrip(".").split(", expected ")
            )
            assert mine != right, said
    assert compare_arrays([0.5], [0.25]).says == "out[0] is 0.5, expected 0.25."


def test_the_library_is_read_from_what_a_function_uses():
    def calls_a_helper(q, k, v):
        return softmax(scores(q, k)) @ v

    def calls_torch(q, k, v):
        return weigh(q @ k.swapaxes(-1, -2)) @ v

    def imports_inside(q, k, v):
        import numpy as inside  # noqa: ICN001, PLC0415

        return inside.exp(q)

    def imported_by_name(q, k, v):
        return exp(q)

    def annotated(q: torch.Tensor, k, v):
        return np.exp(q)

    def torch_methods(q, k, v):
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    class Callable:
        def __call__(self, q, k, v):
            return softmax(q)

    class Module(nn.Module):
        def forward(self, q, k, v):
            return q * np.sqrt(2)

    numpy = (calls_a_helper, imports_inside, imported_by_name, methods_only, Callable())
    assert {read_convention(x).library for x in numpy} == {"numpy"}
    compiled = torch.compile(torch_methods, backend="eager")
    tensors = (annotated, torch_methods, calls_torch, Module(), sdpa, compiled)
    assert {read_convention(x).library for x in tensors} == {"torch"}
    assert read_convention(jax.jit(calls_a_helper)).library == "jax"


NOISY = """
import ctypes, os, sys
import numpy as np
print("while loading")
def f(q, k, v):
    print("by print")
    ctypes.CDLL(None).printf(b"by C\\n")
    os.system("echo by a child")
    x = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    w = np.exp(x - x.max(-1, keepdims=True))
    return w / w.sum(-1, keepdims=True) @ v
"""


@pytest.mark.parametrize("form", ["--json", "--markdown", "--junit"])
def test_what_a_function_prints_is_kept_out_of_the_report(tmp_path, form):
    (tmp_path / "noisy.py").write_text(NOISY)
    command = [sys.executable, "-m", "regard", "check", "noisy:f", "--level", "basic"]
    buffered = {x: y for x, y in os.environ.items() if x != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [*command, form, "-"],
        cwd=tmp_path,
        env=buffered,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {"--json": "{", "--markdown": "## f", "--junit": "<?xml"}[form] == (
        done.stdout[: {"--json": 1, "--markdown": 4, "--junit": 5}[form]]
    )
    for words in ("while loading", "by print", "by C", "by a child"):
        assert words in done.stderr
        assert words not in done.stdout
    if form == "--json":
        assert json.loads(done.stdout)["ok"]
