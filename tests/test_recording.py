"""Recordings: records that fit together, saved and opened, and files of strangers."""

import base64
import json
import math
import os
import struct
import time
import tracemalloc
from dataclasses import fields, replace
from functools import reduce
from operator import getitem, or_

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from formulas import formulas
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import regard
from regard import masks
from regard.errors import (
    ArrayError,
    FileError,
    MaskError,
    OptionError,
    ShapeError,
)
from regard.masks.algebra import Mask
from regard.masks.primitives import Same
from regard.recording import array_file
from regard.recording import file as recording
from regard.recording.array_file import ArrayEntry, checksum_header
from regard.recording.evidence import Covered, LseOrigin
from regard.recording.file import open_recording, save_recording
from regard.recording.record import Record, Recording
from regard.stats.rows import masked_mass

ARRAYS = ("q", "k", "lse", "q_positions", "k_positions", "v", "sink", "mask", "bias")
FLOATS = {
    "float64": (np.float64, torch.float64),
    "float32": (np.float32, torch.float32),
    "float16": (np.float16, torch.float16),
    "bfloat16": (None, torch.bfloat16),
}


def make_record(rng, convert=np.asarray, *, rows=5, keys=7, heads=4, **options):
    """A record of a call of the definition: (4, 5, 3) queries, (2, 7, 3) keys."""
    q, k, v = (
        rng.normal(size=s) for s in ((heads, rows, 3), (2, keys, 3), (2, keys, 6))
    )
    at = {"q_positions": np.arange(keys - rows, keys), "k_positions": np.arange(keys)}
    shown = {n: options.get(n) for n in ("mask", "bias", "softcap", "sink")}
    done = regard.attention(q, k, v, **shown, scale=0.7, q_start=keys - rows)
    arrays = {"q": q, "k": k, "lse": done.lse, **at, **options}
    return Record(
        **{"name": "layers.0", "scale": 0.7}
        | {n: convert(x) if isinstance(x, np.ndarray) else x for n, x in arrays.items()}
    )


def make_recording(*records, **options):
    numbers = tuple(range(len(records)))
    return Recording(
        **{"model": "Tiny", "records": records, "sequences": numbers} | options
    )


def full_record(rng, convert=np.asarray):
    return make_record(
        rng,
        convert,
        v=rng.normal(size=(2, 7, 6)),
        sink=rng.normal(size=4),
        softcap=30.0,
        bias=rng.normal(size=(4, 5, 7)),
        mask=rng.normal(size=(1, 5, 7)) > -1,
    )


def save_and_open(tmp_path, *records, **options):
    path = tmp_path / "a.regard"
    save_recording(path, make_recording(*records, **options))
    return open_recording(path)


def bits(x):
    """The bytes of an array, whatever its dtype."""
    if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16:
        x = x.contiguous().view(torch.int16)
    return np.asarray(x).tobytes()


def assert_same(x, y):
    assert str(x.dtype).removeprefix("torch.") == str(y.dtype).removeprefix("torch.")
    assert tuple(x.shape) == tuple(y.shape)
    assert bits(x) == bits(y)


# What is saved is what is opened


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_array_comes_back_bit_by_bit(tmp_path, rng, library, dtype):
    kind = FLOATS[dtype][library == "torch"]
    if kind is None:
        pytest.skip("NumPy has no bfloat16")

    def convert(x):
        if library == "torch":
            x = torch.from_numpy(x)
            return x.to(kind) if x.dtype == torch.float64 else x
        return x.astype(kind) if x.dtype == np.float64 else x

    before = full_record(rng, convert)
    before.q[0, 0, 0], before.q[0, 0, 1] = math.nan, -math.inf
    (after,) = save_and_open(tmp_path, before).records
    for name in ARRAYS:
        assert_same(getattr(after, name), getattr(before, name))
        in_torch = isinstance(getattr(after, name), torch.Tensor)
        assert in_torch == (dtype == "bfloat16")
    assert (after.name, after.scale, after.softcap) == ("layers.0", 0.7, 30.0)


def test_what_was_not_kept_is_not_there(tmp_path, rng):
    (after,) = save_and_open(tmp_path, make_record(rng)).records
    left = [after.v, after.softcap, after.sink, after.mask, after.bias]
    assert left == [None] * 5


def test_all_that_is_no_array_comes_back(tmp_path, rng):
    about = {
        "tokens": ((5, -1, 2**40), ()),
        "texts": (("naïve", "\ud800", "\x00🙂"), ()),
        "coverage": (
            Covered(name="a", via="sdpa", calls=3, kept=2, error=1e-7, note="dropout"),
            Covered(name="b", via="", error=math.inf, reason='not "seen"\n'),
            Covered(name="gate", via="softmax", calls=4, attention=False),
            Covered(name="a#2", via="flex", calls=1, kept=1, note="axes; logits " * 99),
        ),
        "notes": {"when": [1, 2.5, None, True], "who": {"ä": "ö"}},
    }
    record = make_record(rng, scale=1 / 3, softcap=0.1)
    after = save_and_open(tmp_path, record, replace(record, name="ö"), **about)
    for name, value in about.items():
        assert getattr(after, name) == value
    assert after.model == "Tiny"
    assert after.sequences == (0, 1)
    assert [x.name for x in after.records] == ["layers.0", "ö"]
    assert (after.records[0].scale, after.records[0].softcap) == (1 / 3, 0.1)
    cover = (Covered(name="c", via="x", error=math.nan),)
    assert math.isnan(save_and_open(tmp_path, coverage=cover).coverage[0].error)


def test_an_error_in_anyones_words_can_be_saved_as_a_reason(tmp_path):
    cover = Covered(name="a", via="", reason="\x1b[31mno\x00\tyes\n" + "x" * 9999)
    (found,) = save_and_open(tmp_path, coverage=(cover,)).coverage
    assert found.reason == "?[31mno?\tyes\n" + "x" * (4000 - 13)


def test_arrays_of_any_layout_are_saved_by_value(tmp_path, rng):
    q = rng.normal(size=(5, 4, 3)).astype(">f4").transpose(1, 0, 2)[:, ::-1]
    k = torch.from_numpy(rng.normal(size=(7, 2, 3))).transpose(0, 1)
    k.requires_grad_(True)
    at = np.arange(7, dtype=np.int32)
    record = make_record(rng, q=q, k=k.to(torch.bfloat16), k_positions=at)
    (after,) = save_and_open(tmp_path, record).records
    assert after.q.dtype == torch.float32  # beside bfloat16, all are torch
    assert after.q.tolist() == q.tolist()
    assert after.k.tolist() == k.to(torch.bfloat16).tolist()
    assert after.k_positions.dtype == torch.int32


def test_arrays_of_jax_are_saved_too(tmp_path, rng):
    half = make_record(rng, jnp.asarray)
    half = replace(half, q=half.q.astype(jnp.bfloat16))
    (after,) = save_and_open(tmp_path, half).records
    assert after.q.tolist() == half.q.tolist()
    assert after.q.dtype == torch.bfloat16
    assert after.lse.tolist() == half.lse.tolist()


def test_the_package_of_the_format_reads_the_same(tmp_path, rng):
    record = full_record(rng)
    save_recording(tmp_path / "a", make_recording(record, notes={"a": 1}))
    with safe_open(tmp_path / "a", "np") as file:
        assert json.loads(file.metadata()["regard"])["notes"] == {"a": 1}
        assert set(file.keys()) == {f"0.{name}" for name in ARRAYS}
        for name in ARRAYS:
            assert_same(file.get_tensor(f"0.{name}"), getattr(record, name))


def test_an_empty_recording_and_a_record_without_tokens_come_back(tmp_path, rng):
    assert save_and_open(tmp_path) == Recording(model="Tiny")
    none = make_record(rng)
    none = replace(
        none, q=none.q[:, :0], lse=none.lse[:, :0], q_positions=none.q_positions[:0]
    )
    (after,) = save_and_open(tmp_path, none).records
    assert after.q.shape == (4, 0, 3)
    assert after.weights().shape == (4, 0, 7)


# Masks

IDS = np.asarray([0, 0, 1, 1, 1, 2, 2])
LEAVES = {
    "everything": masks.everything(),
    "causal": masks.causal(),
    "window": masks.window(2, 1),
    "far": masks.window(2**62),
    "last": masks.last(3),
    "keys": masks.keys(1, 4),
    "prefix": masks.prefix(np.asarray([3])),
    "lengths": masks.padding(lengths=np.asarray([5])),
    "valid": masks.padding(np.asarray([[True, False, True, True, False, True, True]])),
    "same": masks.same(IDS),
    "same twice": masks.same(IDS, IDS[::-1].copy()),
    "array": masks.array(np.arange(35).reshape(5, 7) % 3 > 0, q_start=2),
    "per head": masks.per_head([masks.causal(), masks.last(1)] * 2),
}


def as_tensors(mask):
    return mask.place(torch.empty(0))


@pytest.mark.parametrize("move", [lambda m: m, as_tensors], ids=["numpy", "torch"])
@pytest.mark.parametrize("name", LEAVES)
def test_every_known_formula_stays_a_formula(tmp_path, rng, name, move):
    for mask in (LEAVES[name], ~LEAVES[name], LEAVES[name] & masks.causal()):
        before = replace(make_record(rng), mask=move(mask))
        (after,) = save_and_open(tmp_path, before).records
        assert isinstance(after.mask, Mask)
        assert repr(after.mask) == repr(mask)
        expected = np.broadcast_to(before.allowed(), (4, 5, 7))
        assert (np.broadcast_to(after.allowed(), (4, 5, 7)) == expected).all()
        # and the same as a formula of a whole call, where that may be asked
        if "batch" not in name:
            dense = mask.dense((4, 5, 7), q_start=2)
            assert (dense == expected).all()


@given(formulas(5, 7, 2, heads=4))
@settings(max_examples=150)
def test_any_combination_allows_the_same_cells(tmp_path_factory, mask):
    folder = tmp_path_factory.getbasetemp()
    before = make_record(np.random.default_rng(0))
    (after,) = save_and_open(folder, replace(before, mask=mask)).records
    dense = mask.dense((1, 4, 5, 7), q_start=2)[0]
    assert (np.broadcast_to(after.allowed(), (4, 5, 7)) == dense).all()
    assert isinstance(after.mask, Mask) == ("where" not in repr(mask))


def test_a_function_is_written_out_over_the_positions(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(recording, "STRIP", 60)  # two rows at once
    odd = masks.where(lambda b, h, q, k: (q + k) % 2 == 1)
    heads = masks.where(lambda b, h, q, k: (q + k + h) % 3 == 1)
    for convert in (np.asarray, torch.from_numpy):
        at = convert(np.asarray([3, 10, 11, 12, 40]))
        before = replace(make_record(rng, convert), q_positions=at)
        one = replace(before, mask=masks.causal() & odd)
        four = replace(before, mask=heads)
        after_one, after_four = save_and_open(tmp_path, one, four).records
        q, k = np.asarray(at)[:, None], np.arange(7)
        assert after_one.mask.tolist() == ((k <= q) & ((q + k) % 2 == 1))[None].tolist()
        h = np.arange(4)[:, None, None]
        assert after_four.mask.tolist() == ((q + k + h) % 3 == 1).tolist()


def test_a_function_over_too_many_cells_is_refused(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(recording, "CELLS", 34)
    record = replace(make_record(rng), mask=masks.where(lambda b, h, q, k: k <= q))
    with pytest.raises(MaskError, match=r"its 35 cells exceed the limit of 34 for"):
        save_and_open(tmp_path, record)
    save_and_open(tmp_path, replace(record, mask=masks.causal()))


def test_a_formula_that_is_too_deep_is_written_out(tmp_path, rng):
    deep = masks.causal()
    for _ in range(40):  # a chain of one operator would be flat
        deep = (deep | masks.last(1)) & masks.causal()
    shallow = reduce(or_, [masks.last(1)] * 60)
    first = replace(make_record(rng), mask=deep)
    second = replace(first, mask=shallow)
    after = save_and_open(tmp_path, first, second).records
    assert after[0].mask.tolist() == np.tri(5, 7, 2, dtype=bool)[None].tolist()
    assert repr(after[1].mask) == repr(shallow)


def test_a_formula_of_someone_else_is_written_out(tmp_path, rng):
    class Mine(masks.primitives.Band):
        def __call__(self, b, h, q, k):
            return k > q

    (after,) = save_and_open(
        tmp_path, replace(make_record(rng), mask=Mine(0, None))
    ).records
    assert after.mask.tolist() == (~np.tri(5, 7, 2, dtype=bool))[None].tolist()


# Once


def test_what_records_share_is_stored_once(tmp_path, rng):
    mask = rng.normal(size=(1, 400, 400)) > 0
    ids = np.arange(400) % 3
    base = make_record(rng, rows=400, keys=400)
    records = [
        replace(base, q=base.q.copy(), mask=mask),
        replace(base, q=base.q.copy(), mask=mask.copy()),  # equal is enough
        replace(base, q=base.q.copy(), mask=masks.same(ids)),
        replace(base, q=base.q.copy(), mask=masks.causal() & masks.same(ids)),
    ]
    after = save_and_open(tmp_path, *records).records
    once = mask.nbytes + ids.nbytes + base.k.nbytes + base.lse.nbytes
    expected = 4 * base.q.nbytes + once + base.k_positions.nbytes
    size = (tmp_path / "a.regard").stat().st_size
    assert expected < size < expected + 5_000
    assert after[0].mask is after[1].mask
    assert after[0].k_positions is after[3].q_positions
    assert after[0].q is not after[1].q
    # opened and saved again, it is the same file
    save_recording(tmp_path / "b", make_recording(*after))
    assert (tmp_path / "a.regard").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_function_is_written_out_once_for_all_layers(tmp_path, rng):
    odd = masks.where(lambda b, h, q, k: (q + k) % 2 == 1)
    record = make_record(rng, rows=300, keys=300, mask=odd)
    layers = [replace(record, name=str(i)) for i in range(10)]
    after = save_and_open(tmp_path, *layers).records
    assert after[0].mask is after[9].mask
    assert (tmp_path / "a.regard").stat().st_size < 200_000


# Opened without being read

OPEN_LARGE = """
import json, resource, sys, time
from regard.recording.file import open_recording
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
open_recording(sys.argv[2])
before, times = peak(), []
for _ in range(5):
    start = time.perf_counter()
    found = open_recording(sys.argv[1])
    times.append(time.perf_counter() - start)
opened = peak()
one = found.records[5].weights(slice(3, 4), slice(0, 1))
print(json.dumps([min(times), opened - before, float(one.sum()), "torch" in sys.modules]))
"""


def make_large(megabytes):
    """A recording of records of 16 MB."""
    base = make_record(np.random.default_rng(0), rows=8, keys=8)
    zeros = np.zeros((8, 8192, 64), np.float32)
    at = np.arange(8192)
    large = replace(
        base,
        q=zeros,
        k=zeros[:1].copy(),
        lse=np.full((8, 8192), np.log(8192), np.float32),
        q_positions=at,
        k_positions=at,
        mask=masks.same(at // 4096) | ~masks.same(at // 4096),
    )
    layers = [replace(large, q=zeros.copy()) for _ in range(megabytes // 16)]
    return make_recording(*layers)


def test_a_large_recording_opens_at_once_and_in_little_memory(tmp_path, run_apart, rng):
    paths = tmp_path / "large", tmp_path / "small"
    save_recording(paths[0], make_large(256))
    save_recording(paths[1], make_recording(make_record(rng)))
    seconds, megabytes, total, torch_too = run_apart(OPEN_LARGE, *map(str, paths))
    assert seconds < 0.05
    assert megabytes < 10
    assert total == pytest.approx(1, abs=1e-4)
    assert not torch_too
    tracemalloc.start()
    found = open_recording(paths[0])
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()
    assert isinstance(found.records[0].q, np.ndarray)
    with pytest.raises(ValueError, match="read-only"):
        found.records[0].q[0, 0, 0] = 1


def test_a_flipped_bit_of_a_large_file_is_found_on_demand(tmp_path, monkeypatch, rng):
    path = tmp_path / "a.regard"
    save_recording(path, make_recording(full_record(rng)))
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(raw)
    with pytest.raises(
        FileError, match=r"a\.regard cannot be opened: it is damaged: the d"
    ):
        open_recording(path)
    monkeypatch.setattr(recording, "SMALL", len(raw) - 1)
    assert open_recording(path).records[0].heads == 4
    with pytest.raises(FileError, match="the data of 0"):
        open_recording(path, verify=True)


# The file is whole, or as it was


@pytest.mark.parametrize("step", ["fsync", "write"])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    tmp_path, rng, monkeypatch, step
):
    path = tmp_path / "a.regard"
    save_recording(path, make_recording(make_record(rng)))
    before = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if step == "fsync":
            patch.setattr(os, "fsync", fail)
        else:
            patch.setattr(array_file, "to_bytes", fail)
        with pytest.raises(FileError, match=r"was not written: .*No space left"):
            save_recording(path, make_recording(full_record(rng)))
    assert [x.name for x in tmp_path.iterdir()] == ["a.regard"]
    assert path.read_bytes() == before


def test_what_could_not_be_opened_is_not_written(tmp_path, rng):
    with pytest.raises(
        FileError, match=r"was not written: .* model is int, expected str"
    ):
        save_and_open(tmp_path, make_record(rng), model=3)
    for notes in ({"a": math.nan}, {"a": np.float32(1)}, {"a": {1, 2}}):
        with pytest.raises(OptionError, match="notes cannot be saved as JSON"):
            save_and_open(tmp_path, notes=notes)
    with pytest.raises(FileError, match="was not written"):
        save_recording(tmp_path / "no" / "folder", make_recording())
    with pytest.raises(FileError, match="was not written"):
        save_recording(tmp_path, make_recording())
    odd = replace(make_record(rng), q=torch.zeros(4, 5, 3).to(torch.float8_e4m3fn))
    with pytest.raises(
        ArrayError, match=r"float8_e4m3fn cannot be saved\. Convert it to fl"
    ):
        save_and_open(tmp_path, odd)
    assert not list(tmp_path.iterdir())


def test_a_header_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(array_file, "HEADER", 2_000)
    with pytest.raises(OptionError, match=r"expected at most 2,000\. Save fewer seq"):
        save_and_open(tmp_path, tokens=(tuple(range(1000)),))


def test_an_open_recording_survives_being_replaced(tmp_path, rng):
    first = make_record(rng)
    after = save_and_open(tmp_path, first)
    save_recording(tmp_path / "a.regard", make_recording(full_record(rng)))
    assert after.records[0].q.tolist() == first.q.tolist()


def test_tensors_in_a_file_can_be_written_to_without_changing_it(tmp_path, rng):
    half = make_record(rng, torch.from_numpy)
    half = replace(half, q=half.q.bfloat16())
    after, beside = save_and_open(tmp_path, half, make_record(rng)).records
    after.q.zero_()
    after.lse.zero_()
    assert not beside.q.flags.writeable
    again, _ = open_recording(tmp_path / "a.regard", verify=True).records
    assert_same(again.q, half.q)


WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None
from regard.recording.file import open_recording
found = open_recording(sys.argv[1]).records[0].q.tolist()
try:
    open_recording(sys.argv[2])
except ImportError as error:
    print(json.dumps([found, type(error).__name__, str(error)]))
"""


def test_only_bfloat16_needs_torch(tmp_path, rng, run_apart):
    record = make_record(rng, torch.from_numpy)
    half = replace(record, q=record.q.bfloat16())
    paths = tmp_path / "single", tmp_path / "half"
    for path, x in zip(paths, (record, half), strict=True):
        save_recording(path, make_recording(x))
    found, kind, words = run_apart(WITHOUT_TORCH, *map(str, paths))
    assert found == record.q.tolist()
    assert kind == "ImportError"
    assert words == 'bfloat16 arrays need torch: pip install "regard[torch]"'


# Records

WRONG = {
    "q": (np.zeros((4, 5)), ShapeError, r"q has shape \(4, 5\), expected 3 axes"),
    "k": (np.zeros((3, 7, 3)), ShapeError, "with H a multiple of Hk"),
    "lse": (np.zeros((5, 4)), ShapeError, r"\(5, 4\), expected \(4, 5\)"),
    "scale": (math.nan, OptionError, "scale=nan, expected a finite number"),
    "softcap": (0.0, OptionError, "softcap=0.0, expected more than 0"),
    "q_positions": (np.zeros(5), ArrayError, "float64, expected integral numbers"),
    "k_positions": ([0] * 7, ArrayError, "is list, expected integral"),
    "v": (np.zeros((2, 6, 3)), ShapeError, r"expected \(2, 7, 3\)"),
    "sink": (np.zeros(2), ShapeError, r"expected \(4,\)"),
    "mask": (np.zeros((4, 5, 7)), ArrayError, "float64, expected bool"),
    "bias": (np.zeros((2, 5, 7)), ShapeError, r"\(1, 5, 7\) or \(4, 5, 7\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_record_refuses_what_does_not_fit(rng, name):
    value, kind, words = WRONG[name]
    with pytest.raises(kind, match=f"layers.0: .*{words}"):
        replace(make_record(rng), **{name: value})


@pytest.mark.parametrize("shape", [(4, 7, 0), (0, 7, 3), (2, 7, 4)])
def test_a_record_refuses_keys_that_do_not_meet_the_queries(rng, shape):
    q = np.zeros((4, 5, 0)) if shape[-1] == 0 else np.zeros((4, 5, 3))
    with pytest.raises(ShapeError, match=r"expected \(H, Nq, D\) and \(Hk, Nk, D\)"):
        replace(make_record(rng), q=q, k=np.zeros(shape))


def test_positions_of_few_bits_meet_a_wide_window(rng):
    at = np.arange(7, dtype=np.int8)
    record = make_record(
        rng, mask=masks.window(300), q_positions=at[2:], k_positions=at
    )
    assert record.allowed().tolist() == np.tri(5, 7, 2, dtype=bool)[None].tolist()


def test_a_record_refuses_a_formula_that_does_not_reach(rng):
    short = masks.same(IDS[:6]), masks.padding(np.ones((1, 6), bool))
    heads = (masks.per_head([masks.causal()] * 3),)
    late = masks.array(np.ones((9, 7), bool), q_start=3)  # rows from 2 are asked
    nobody = masks.padding(np.ones((0, 7), bool))
    for mask in (*short, *heads, masks.array(np.ones((6, 7), bool)), late, nobody):
        with pytest.raises(MaskError, match="does not cover all heads and positions"):
            replace(make_record(rng), mask=mask)
    words = r"does not cover all heads .* or is not for one sequence\."
    for several in (
        masks.same(np.stack([IDS, IDS[::-1]])),
        masks.causal() & masks.padding(lengths=[7, 7]),
        masks.where(lambda b, h, q, k: (b == 0) | (k <= q)),
    ):
        with pytest.raises(MaskError, match=words):
            replace(make_record(rng), mask=several)
        with pytest.raises(MaskError, match=words):
            masked_mass(make_record(rng), several)
    with pytest.raises(OptionError, match="0 sequences for 1 records"):
        make_recording(make_record(rng), sequences=())


def test_weights_are_those_of_the_definition(rng):
    options = {
        "mask": masks.causal() & masks.last(4) & ~masks.keys(2, 4),
        "bias": rng.normal(size=(4, 5, 7)),
        "sink": rng.normal(size=4),
        "softcap": 2.0,
    }
    record = make_record(rng, **options)
    expected = regard.attention(
        record.q, record.k, record.k, **options, scale=0.7, q_start=2, see=("weights",)
    ).weights
    np.testing.assert_allclose(record.weights(), expected, atol=1e-15)
    some = record.weights(slice(1, 4), slice(3, 1, -1))
    np.testing.assert_allclose(some, expected[3:1:-1, 1:4], atol=1e-15)
    one = replace(record, bias=options["bias"][:1], softcap=None)
    sums = np.logaddexp.reduce(one.logits(), axis=-1)
    one = replace(one, lse=np.logaddexp(sums, one.sink[:, None]))
    alone = one.weights(heads=slice(2, 3))
    np.testing.assert_allclose(alone, one.weights()[2:3], atol=1e-15)
    blind = make_record(rng, mask=np.zeros((4, 5, 7), bool))
    assert (blind.weights() == 0).all()
    half = make_record(rng, torch.from_numpy)
    half = replace(half, q=half.q.bfloat16(), k=half.k.bfloat16(), lse=half.lse.float())
    assert half.weights().dtype == torch.float32
    assert half.weights().sum(-1).sub(1).abs().max() < 0.05


# Files of strangers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("strangers")


@pytest.fixture(scope="module")
def small(folder):
    """The bytes of a small recording with everything in it."""
    rng = np.random.default_rng(0)
    mask = masks.causal() & masks.same(IDS) | ~masks.padding(lengths=np.asarray([4]))
    first = replace(full_record(rng), mask=mask & masks.per_head([masks.last(3)] * 4))
    given = masks.array(np.ones((7, 7), bool)) | masks.padding(np.ones((1, 7), bool))
    records = (first, full_record(rng), replace(first, mask=given))
    cover = (Covered(name="a", via="sdpa", calls=1, kept=1, error=1e-9, note="b"),)
    about = {"tokens": ((1, 2),), "texts": (("a", "b"),), "notes": {"a": [1]}}
    made = make_recording(*records, coverage=cover, **about)
    save_recording(folder / "small", made)
    return (folder / "small").read_bytes()


def unpack(raw):
    """The table of arrays, the JSON and the numbers of a file."""
    n = int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8 : 8 + n])
    about = json.loads(table.pop("__metadata__")["regard"])
    return table, about, raw[8 + n :]


def pack(table, about, data, spaces=0):
    """A file whose checksum is right, whatever is in it."""
    text = json.dumps(about)
    try:
        rows = ((n, [*x.values()]) for n, x in table.items())
        entries = {name: ArrayEntry(x[0], x[1], *x[2]) for name, x in rows}
        checksum = checksum_header(text, entries)
    except (TypeError, AttributeError, IndexError):
        checksum = "none"  # it will not come to that
    metadata = {"regard": text, "checksum": checksum}
    raw = json.dumps({"__metadata__": metadata, **table}).encode()
    raw += b" " * (-len(raw) % 64 + 56 + spaces)
    return struct.pack("<Q", len(raw)) + raw + data


def try_to_open(path, raw):
    """Open bytes; return None if refused, else a recording that holds together."""
    path.write_bytes(raw)
    try:
        found = open_recording(path)
    except FileError:
        return None
    numbers = (np.ndarray, torch.Tensor)
    assert isinstance(found.model, str)
    for record, sequence in zip(found.records, found.sequences, strict=True):
        assert type(sequence) is int
        assert type(record.name) is str
        (H, Nq, D), (Hk, Nk, _) = record.q.shape, record.k.shape
        assert H % Hk == 0
        assert record.k.shape == (Hk, Nk, D)
        assert record.lse.shape == (H, Nq)
        for name in ARRAYS:
            x = getattr(record, name)
            if isinstance(x, numbers):
                kind = {"q_positions": "int", "k_positions": "int", "mask": "bool"}
                assert kind.get(name, "float") in str(x.dtype)
                bits(x)
        allowed = record.allowed()
        assert allowed is None or allowed.shape in ((1, Nq, Nk), (H, Nq, Nk))
    return found


def test_the_tools_of_these_tests_leave_a_good_file_good(folder, small):
    assert try_to_open(folder / "x", small).model == "Tiny"
    found = try_to_open(folder / "x", pack(*unpack(small)))
    assert len(found.records) == 3
    assert "padding(lengths=[4])" in repr(found.records[0].mask)


def test_every_truncation_is_refused(folder, small):
    path = folder / "cut"
    path.write_bytes(small)
    for n in range(len(small) - 1, -1, -7):
        os.truncate(path, n)
        with pytest.raises(FileError, match="cut cannot be opened: it"):
            open_recording(path)
    with pytest.raises(FileError, match="its arrays end at"):
        path.write_bytes(small + b" ")
        open_recording(path)


def test_every_flipped_bit_is_noticed(folder, small):
    path = folder / "flipped"
    path.write_bytes(small)
    rng = np.random.default_rng(0)
    with path.open("r+b", buffering=0) as file:
        for at in range(0, len(small), 3):
            file.seek(at)
            file.write(bytes([small[at] ^ 1 << rng.integers(8)]))
            with pytest.raises(FileError):
                open_recording(path)
            file.seek(at)
            file.write(small[at : at + 1])
    assert open_recording(path).model == "Tiny"


def test_random_bytes_are_refused(folder, small):
    rng = np.random.default_rng(0)
    for _ in range(300):
        raw = bytearray(small)
        for _ in range(rng.integers(1, 5)):
            at, n = rng.integers(len(raw)), rng.integers(1, 40)
            raw[at : at + n] = rng.bytes(rng.integers(0, 40))
        assert try_to_open(folder / "random", bytes(raw)) is None or raw == small
        assert try_to_open(folder / "random", rng.bytes(rng.integers(200))) is None


JUNK = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 10),
        st.sampled_from([2**31, 2**62, 2**63, 10**30, -(2**63)]),
        st.floats(),
        st.sampled_from([*recording.NODES, *array_file.BYTES, *ARRAYS, "", "nan"]),
        st.sampled_from(
            ["0.q", "0.mask", "1.mask", "2.mask", "0.k_positions", "0.lse"]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from([*ARRAYS, "dtype", "shape"]), inner, max_size=3
        ),
    ),
    max_leaves=8,
)


def places(tree, path=()):
    """Every place in a tree of JSON."""
    yield path
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, inner in list(items):
            yield from places(inner, (*path, key))


def change(tree, path, new):
    """Put something in a place, or nothing if it is ... ."""
    tree = reduce(getitem, path[:-1], tree)
    if new is ...:
        del tree[path[-1]]
    else:
        tree[path[-1]] = new


@given(st.data())
@settings(max_examples=800)
def test_a_header_made_by_hand_is_refused_or_holds_together(folder, small, data):
    table, about, numbers = unpack(small)
    for _ in range(data.draw(st.integers(1, 2))):
        tree = data.draw(st.sampled_from([about, about, about, table]))
        deep = data.draw(st.integers(1, 3))  # few places are near the root
        where = [path for path in places(tree) if len(path) >= deep]
        path, other = (data.draw(st.sampled_from(where)) for _ in range(2))
        copy = reduce(getitem, other, tree)
        new = data.draw(st.one_of(JUNK, st.sampled_from([..., copy])))
        change(tree, path, json.loads(json.dumps(new)) if new is copy else new)
    try_to_open(folder / "made", pack(table, about, numbers))


ALIKE = [("F64", "I64"), ("F32", "I32"), ("F16", "BF16", "I16"), ("I8", "U8", "BOOL")]


@given(st.data())
@settings(max_examples=500)
def test_arrays_that_change_places_are_refused_or_hold_together(folder, small, data):
    table, about, numbers = unpack(small)
    for _ in range(data.draw(st.integers(1, 2))):
        names = about["records"][data.draw(st.integers(0, 2))]["arrays"]
        field = data.draw(st.sampled_from(ARRAYS))
        act = data.draw(st.sampled_from(["another", "axes", "dtype", "gone"]))
        entry = table[names.get(field, "0.q")]
        if act == "another":
            names[field] = data.draw(st.sampled_from(sorted(table)))
        elif act == "axes":
            entry["shape"] = data.draw(st.permutations([*entry["shape"], 1]))
            entry["shape"] = entry["shape"][data.draw(st.booleans()) :]
        elif act == "dtype":
            (group,) = [g for g in ALIKE if entry["dtype"] in g]
            entry["dtype"] = data.draw(st.sampled_from(group))
        else:
            names.pop(field, None)
    try_to_open(folder / "moved", pack(table, about, numbers))


# the arrays of the small file that a mask may be made of, and one that it may not
DATA = st.sampled_from(
    ["0.mask", "0.mask.9", "2.mask", "2.mask.18", "0.q_positions", "0.q"]
)
NUMBER = st.one_of(st.integers(-9, 9), st.sampled_from([2**62, -(2**62), 2**62 + 1]))
TREE = st.recursive(
    st.one_of(
        st.tuples(st.just("band"), NUMBER, st.one_of(st.none(), NUMBER)),
        st.tuples(st.just("keys"), NUMBER, st.one_of(DATA, NUMBER)),
        st.tuples(st.just("same"), DATA, st.one_of(st.none(), DATA)),
        st.tuples(st.just("valid"), DATA),
        st.tuples(st.just("given"), DATA, st.sampled_from([0, 2, 3, -1])),
    ),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["and", "or"]), inner, inner),
        st.tuples(st.just("not"), inner),
        st.tuples(st.just("per_head"), st.lists(inner, min_size=4, max_size=4)),
    ),
    max_leaves=4,
)


@given(TREE)
@settings(max_examples=600)
def test_a_mask_made_by_hand_is_refused_or_works(folder, small, tree):
    table, about, numbers = unpack(small)
    assert {"0.mask", "0.mask.9", "2.mask", "2.mask.18"} <= table.keys()
    about["records"][0]["formula"] = tree
    try_to_open(folder / "mask", pack(table, about, numbers))


def nest(n, tree):
    for _ in range(n):
        tree = ["not", tree]
    return tree


def test_no_file_makes_us_reserve_memory(folder, small):
    def bomb(act):
        table, about, numbers = unpack(small)
        act(table, about)
        return pack(table, about, numbers)

    n = int.from_bytes(small[:8], "little")
    empty = {"dtype": "F64", "shape": [2**30, 0, 3], "data_offsets": [0, 0]}
    files = {
        "header": struct.pack("<Q", 2**63) + small[8:],
        "most": struct.pack("<Q", array_file.HEADER) + small[8:],
        "nested": struct.pack("<Q", n) + b"[" * n + small[8 + n :],
        "shape": bomb(lambda t, _: t["0.q"].update(shape=[2**40, 2**40, 2**40])),
        "axes": bomb(lambda t, _: t["0.q"].update(shape=[1] * 65 + [60])),
        "offsets": bomb(lambda t, _: t["0.q"].update(data_offsets=[0, 2**60])),
        "empty": bomb(lambda t, _: t.update({"0.q": empty})),
        "digits": bomb(lambda t, _: t["0.q"].update(shape=[10**4000, 1, 1])),
        "deep": bomb(
            lambda _, a: a["records"][0].update(formula=nest(200, ["band", 0, 0]))
        ),
        "far": bomb(
            lambda _, a: a["records"][0].update(formula=["band", 10**400, None])
        ),
        "version": bomb(lambda _, a: a.update(version=[[[]]])),
        "scale": bomb(lambda _, a: a["records"][0].update(scale=10**400)),
        "twice": bomb(lambda t, _: t.update(again=t["0.q"])),
    }
    for name, raw in files.items():
        tracemalloc.start()
        started = time.perf_counter()
        assert try_to_open(folder / name, raw) is None, name
        assert time.perf_counter() - started < 1, name
        assert tracemalloc.get_traced_memory()[1] < 40 * len(raw), name
        tracemalloc.stop()


def set_formula(*tree):
    return lambda _, about: about["records"][0].update(formula=list(tree))


UNFIT = {
    "ids that are no whole numbers": set_formula("keys", 0, "0.sink"),
    "keys that are no truth values": set_formula("valid", "0.lse"),
    "one part too many": set_formula("band", 0, 0, 0),
    "no heads": set_formula("per_head", []),
    "two masks": lambda _, a: a["records"][1].update(formula=["band", 0, None]),
    "a sequence below 0": lambda _, a: a["records"][0].update(sequence=-1),
    "calls below 0": lambda _, a: a["coverage"][0].update(calls=-1),
    "more kept than called": lambda _, a: a["coverage"][0].update(kept=2),
    "attention that is no truth value": (
        lambda _, a: a["coverage"][0].update(attention=1)
    ),
    "a note that is no text": lambda _, a: a["coverage"][0].update(note=None),
    "an error that is no number": lambda _, a: a["coverage"][0].update(error="much"),
    "a scale that is whole": lambda _, a: a["records"][0].update(scale=1),
    "tokens that are no numbers": lambda _, a: a.update(tokens=[["a"]]),
    "an array of another name": lambda _, a: a["records"][0]["arrays"].update(w="0.q"),
    "more in the table": lambda t, _: t["0.q"].update(more=1),
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_a_recording_never_holds_is_refused(folder, small, what):
    table, about, numbers = unpack(small)
    UNFIT[what](table, about)
    assert try_to_open(folder / "unfit", pack(table, about, numbers)) is None


def test_numbers_out_of_step_are_refused(folder, small):
    parts = unpack(small)
    assert try_to_open(folder / "step", pack(*parts)) is not None
    assert try_to_open(folder / "step", pack(*parts, spaces=3)) is None


def test_a_long_header_is_not_read(folder, small, monkeypatch):
    monkeypatch.setattr(array_file, "HEADER", 1_000)
    assert try_to_open(folder / "long", small) is None


def test_arrays_without_numbers_are_small_too(tmp_path, rng):
    none = make_record(rng)
    none = replace(
        none, q=none.q[:, :0], lse=none.lse[:, :0], q_positions=none.q_positions[:0]
    )
    save_and_open(tmp_path, none)
    table, about, numbers = unpack((tmp_path / "a.regard").read_bytes())
    for heads, fits in ((2**16, True), (2**20, False)):
        table["0.q"]["shape"], table["0.lse"]["shape"] = [heads, 0, 3], [heads, 0]
        found = try_to_open(tmp_path / "b", pack(table, about, numbers))
        assert (found is not None) == fits
    nobody = Same(np.zeros((0, 7), int), np.zeros((1, 7), int))
    with pytest.raises(
        FileError, match="a field of a mask has the wrong type or shape"
    ):
        save_and_open(tmp_path, replace(none, mask=nobody))


def test_truth_values_are_true_or_false(folder, small):
    table, about, numbers = unpack(small)
    name = about["records"][1]["arrays"]["mask"]
    start, stop = table[name]["data_offsets"]
    raw = bytearray(numbers)
    raw[start] = 2
    about["crc"][name] = f"{array_file.zlib.crc32(raw[start:stop]):08x}"
    assert try_to_open(folder / "two", pack(table, about, bytes(raw))) is None
    raw[start] = 1
    about["crc"][name] = f"{array_file.zlib.crc32(raw[start:stop]):08x}"
    assert try_to_open(folder / "one", pack(table, about, bytes(raw))) is not None


def test_a_file_of_version_1_opens_and_has_no_certificate(folder, small):
    table, about, numbers = unpack(small)
    about["version"] = 1
    for name, entry in table.items():
        start, stop = entry["data_offsets"]
        about["crc"][name] = f"{array_file.zlib.crc32(numbers[start:stop]):08x}"
    for record in about["records"]:
        del record["origin"], record["certificate"]
    for row in about["coverage"]:
        del row["rows"], row["in_records"], row["left_out"]
    path = folder / "version 1"
    path.write_bytes(pack(table, about, numbers))
    found = open_recording(path, verify=True)
    assert {x.certificate for x in found.records} == {None}
    assert {x.origin for x in found.records} == {LseOrigin.RECORD}
    about["crc"]["0.q"] = "0" * 8
    path.write_bytes(pack(table, about, numbers))
    with pytest.raises(FileError, match=r"the data of 0\.q is invalid"):
        open_recording(path)


def test_one_head_of_a_large_array_is_verified_alone(folder, monkeypatch):
    monkeypatch.setattr(array_file, "CHUNK", 2**4)
    path, record = folder / "large", full_record(np.random.default_rng(0))
    save_recording(path, make_recording(record))
    table, _, _ = unpack(raw := path.read_bytes())
    start, stop = table["0.q"]["data_offsets"]
    begin = len(raw) - max(x["data_offsets"][1] for x in table.values())
    half = begin + start + (stop - start) // 2
    path.write_bytes(raw[:half] + bytes([raw[half] ^ 1]) + raw[half + 1 :])
    file = array_file.ArrayFile(path)
    for head in (0, 1, 3):
        file.verify("0.q", head=head)
    file.verify("0.k")
    with pytest.raises(FileError, match=r"0\.q is invalid"):
        file.verify("0.q", head=2)  # of four: its first byte is the changed one


def test_a_file_of_another_time_or_kind_says_so(folder, small):
    path = folder / "other"

    def refused(act):
        table, about, numbers = unpack(small)
        act(about)
        path.write_bytes(pack(table, about, numbers))
        with pytest.raises(FileError) as error:
            open_recording(path)
        return str(error.value)

    assert refused(lambda a: a.update(version=3)) == (
        "other cannot be opened: it has format version 3, expected version 2. "
        "Install a newer release: pip install -U regard."
    )
    assert refused(lambda a: a["records"][0].update(formula=["spiral", 3])) == (
        "other cannot be opened: it has a mask of unknown type 'spiral'. The file may "
        "have been written by a newer version: pip install -U regard."
    )
    assert refused(lambda a: a.pop("version")) == (
        "other cannot be opened: it is not a file of regard, expected a saved recording."
    )
    torch.save({}, path)
    with pytest.raises(FileError, match="it is truncated, or not a safetensors file"):
        open_recording(path)
    for wrong in (folder / "missing", folder):
        with pytest.raises(FileError, match="cannot be opened"):
            open_recording(wrong)


def test_every_field_of_a_record_is_saved():
    assert {x.name for x in fields(Record)} == {
        *ARRAYS,
        *("name", "scale", "softcap", "origin", "certificate"),
    }
    saved = {"model", "records", "sequences", "tokens", "texts", "coverage", "notes"}
    assert {x.name for x in fields(Recording)} == saved
    kinds = {x.name for x in fields(Covered)}
    told = {"name", "via", "calls", "kept", "error", "reason", "attention", "note"}
    told |= {"rows", "in_records", "left_out"}
    assert kinds == told


GOLDEN = """
+AYAAAAAAAB7Il9fbWV0YWRhdGFfXyI6IHsicmVnYXJkIjogIntcInZlcnNpb25cIjogMSwgXCJt
b2RlbFwiOiBcIkdvbGRlblwiLCBcInJlY29yZHNcIjogW3tcIm5hbWVcIjogXCJsYXllcnMuMFwi
LCBcInNlcXVlbmNlXCI6IDAsIFwic2NhbGVcIjogMC41LCBcInNvZnRjYXBcIjogMjAuMCwgXCJh
cnJheXNcIjoge1wia1wiOiBcIjAua1wiLCBcImtfcG9zaXRpb25zXCI6IFwiMC5rX3Bvc2l0aW9u
c1wiLCBcImxzZVwiOiBcIjAubHNlXCIsIFwicVwiOiBcIjAucVwiLCBcInFfcG9zaXRpb25zXCI6
IFwiMC5rX3Bvc2l0aW9uc1wiLCBcInNpbmtcIjogXCIwLnNpbmtcIn0sIFwiZm9ybXVsYVwiOiBb
XCJvclwiLCBbXCJvclwiLCBbXCJhbmRcIiwgW1wiYmFuZFwiLCAwLCBudWxsXSwgW1wibm90XCIs
IFtcInNhbWVcIiwgXCIwLm1hc2tcIiwgbnVsbF1dXSwgW1wiYmFuZFwiLCAwLCAwXV0sIFtcImtl
eXNcIiwgMSwgMl1dfSwge1wibmFtZVwiOiBcImxheWVycy4xXCIsIFwic2VxdWVuY2VcIjogMCwg
XCJzY2FsZVwiOiAwLjUsIFwic29mdGNhcFwiOiBudWxsLCBcImFycmF5c1wiOiB7XCJiaWFzXCI6
IFwiMS5iaWFzXCIsIFwia1wiOiBcIjAua1wiLCBcImtfcG9zaXRpb25zXCI6IFwiMC5rX3Bvc2l0
aW9uc1wiLCBcImxzZVwiOiBcIjAubHNlXCIsIFwibWFza1wiOiBcIjEubWFza1wiLCBcInFcIjog
XCIwLnFcIiwgXCJxX3Bvc2l0aW9uc1wiOiBcIjAua19wb3NpdGlvbnNcIiwgXCJ2XCI6IFwiMC5r
XCJ9LCBcImZvcm11bGFcIjogbnVsbH1dLCBcInRva2Vuc1wiOiBbWzcsIDhdXSwgXCJ0ZXh0c1wi
OiBbW1wiYVwiLCBcIlxcdTAwZGZcIl1dLCBcImNvdmVyYWdlXCI6IFt7XCJuYW1lXCI6IFwibGF5
ZXJzLjBcIiwgXCJkb29yXCI6IFwic2RwYVwiLCBcImNhbGxzXCI6IDEsIFwiZXJyb3JcIjogXCIx
ZS0wNlwiLCBcInJlYXNvblwiOiBcIlwifV0sIFwibm90ZXNcIjoge1wic2VlZFwiOiAzfSwgXCJj
cmNcIjoge1wiMS5iaWFzXCI6IFwiZTFlZTc3YTlcIiwgXCIwLmtfcG9zaXRpb25zXCI6IFwiZGQ5
ZWI4MGNcIiwgXCIwLmxzZVwiOiBcIjhiYTcxNDU0XCIsIFwiMC5zaW5rXCI6IFwiZDNlNWUwNmJc
IiwgXCIwLmtcIjogXCIxODYzMmQ3MVwiLCBcIjAucVwiOiBcImFjMmM3YTRmXCIsIFwiMC5tYXNr
XCI6IFwiMzZkZTIyNjlcIiwgXCIxLm1hc2tcIjogXCJmN2U0YjlhZVwifX0iLCAiY2hlY2tzdW0i
OiAiMWVmZDE2M2IifSwgIjEuYmlhcyI6IHsiZHR5cGUiOiAiRjY0IiwgInNoYXBlIjogWzEsIDIs
IDJdLCAiZGF0YV9vZmZzZXRzIjogWzAsIDMyXX0sICIwLmtfcG9zaXRpb25zIjogeyJkdHlwZSI6
ICJJMzIiLCAic2hhcGUiOiBbMl0sICJkYXRhX29mZnNldHMiOiBbMzIsIDQwXX0sICIwLmxzZSI6
IHsiZHR5cGUiOiAiRjMyIiwgInNoYXBlIjogWzIsIDJdLCAiZGF0YV9vZmZzZXRzIjogWzQwLCA1
Nl19LCAiMC5zaW5rIjogeyJkdHlwZSI6ICJGMzIiLCAic2hhcGUiOiBbMl0sICJkYXRhX29mZnNl
dHMiOiBbNTYsIDY0XX0sICIwLmsiOiB7ImR0eXBlIjogIkYxNiIsICJzaGFwZSI6IFsxLCAyLCAy
XSwgImRhdGFfb2Zmc2V0cyI6IFs2NCwgNzJdfSwgIjAucSI6IHsiZHR5cGUiOiAiRjE2IiwgInNo
YXBlIjogWzIsIDIsIDJdLCAiZGF0YV9vZmZzZXRzIjogWzcyLCA4OF19LCAiMC5tYXNrIjogeyJk
dHlwZSI6ICJJOCIsICJzaGFwZSI6IFsyXSwgImRhdGFfb2Zmc2V0cyI6IFs4OCwgOTBdfSwgIjEu
bWFzayI6IHsiZHR5cGUiOiAiQk9PTCIsICJzaGFwZSI6IFsxLCAyLCAyXSwgImRhdGFfb2Zmc2V0
cyI6IFs5MCwgOTRdfX0gICAgICAgICAgIAAAAAAAAAAAAAAAAAAA8D8AAAAAAAAAQAAAAAAAAAhA
AAAAAAEAAAAAAIA/AAAAQAAAQEAAAIBAAACAPgAAAD8AAAA4ADwAPgAAADQAOAA6ADwAPQA+AD8A
AQEAAQE=
"""  # written by the first version, on 2026-11-15


def test_a_file_of_the_first_version_still_opens(folder):
    path = folder / "golden"
    path.write_bytes(base64.b64decode(GOLDEN))
    found = open_recording(path)
    assert (found.model, found.sequences) == ("Golden", (0, 0))
    assert (found.tokens, found.texts) == (((7, 8),), (("a", "ß"),))
    cover = Covered(name="layers.0", via="sdpa", calls=1, kept=1, error=1e-6)
    assert (found.coverage, found.notes) == ((cover,), {"seed": 3})
    first, second = found.records
    for record in found.records:
        assert_same(record.q, np.arange(8, dtype=np.float16).reshape(2, 2, 2) / 4)
        assert_same(record.k, np.arange(4, dtype=np.float16).reshape(1, 2, 2) / 2)
        assert_same(record.lse, np.asarray([[1, 2], [3, 4]], np.float32))
        assert_same(record.q_positions, np.arange(2, dtype=np.int32))
        assert_same(record.k_positions, np.arange(2, dtype=np.int32))
    assert (first.name, first.scale, first.softcap) == ("layers.0", 0.5, 20.0)
    assert (second.name, second.scale, second.softcap) == ("layers.1", 0.5, None)
    assert_same(first.sink, np.asarray([0.25, 0.5], np.float32))
    formula = "causal() & ~same([0, 1]) | window(0) | keys(1, 2)"
    assert repr(first.mask) == formula
    assert first.allowed().tolist() == [[[True, True], [True, True]]]
    assert_same(second.mask, np.asarray([[[True, False], [True, True]]]))
    assert_same(second.bias, np.asarray([[[0.0, 1], [2, 3]]]))
    assert_same(second.v, second.k)
    assert (first.v, first.bias, second.sink) == (None, None, None)


def test_any_tile_of_logits_is_that_of_the_definition(rng):
    q, k = rng.normal(size=(4, 6, 8)), rng.normal(size=(2, 7, 8))
    bias, at = rng.normal(size=(4, 6, 7)), np.arange(7)
    options = {"bias": bias, "scale": 0.4, "softcap": 3.0}
    done = regard.attention(
        q, k, k, regard.causal(), q_start=1, see=("logits",), **options
    )
    record = Record(
        name="a", q=q, k=k, lse=done.lse, mask=regard.causal(), **options,
        q_positions=at[1:], k_positions=at,
    )  # fmt: skip
    few = np.array([5, 0, 2])
    for rows, keys, heads in (
        (slice(None), slice(None), slice(None)),
        (slice(2, 5), slice(1, 4), 3),
        (few, slice(1, 4), slice(3, 0, -2)),
        (slice(2, 5), few, 1),
    ):
        expected = done.logits[heads][..., rows, :][..., keys]
        np.testing.assert_allclose(record.logits(rows, keys, heads=heads), expected)
        allowed = record.allowed(rows, keys, heads=heads)
        assert (allowed == (expected > -np.inf)).all()
