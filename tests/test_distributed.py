"""Models shared between two ranks, in real processes, against the model on its own.

Also gather_heads (recording/gather.py), which joins the heads of tensor-parallel ranks.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from distributed_worker import (
    GREEDY,
    LAYERS,
    WAYS,
    Stack,
    draw_batch,
    draw_states,
    make_llama,
    run_pass,
    take_part,
)

import regard
from regard import causal, masks, same, window
from regard.errors import OptionError, ShapeError
from regard.recording.evidence import Covered
from regard.recording.gather import gather_heads
from regard.recording.record import Record, Recording
from regard.seen import Seen

HERE, WORLD = Path(__file__).parent, 2
EXACT = 1e-12


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Run everything on two ranks; return what a rank wrote of a way."""
    folder = tmp_path_factory.mktemp("ranks")
    worker = [sys.executable, "-W", "ignore", str(HERE / "distributed_worker.py")]
    started = [
        subprocess.Popen([*worker, str(rank), str(WORLD), str(folder)])
        for rank in range(WORLD)
    ]
    try:
        codes = [rank.wait(timeout=120) for rank in started]
    finally:
        for rank in started:
            rank.kill()
            rank.wait()

    def read(name):
        errors = [path.read_text() for path in sorted(folder.glob(f"{name}?.error"))]
        assert errors == []
        assert codes == [0] * WORLD
        done = [torch.load(folder / f"{name}{rank}.pt") for rank in range(WORLD)]
        seen = [regard.open(folder / f"{name}{rank}.regard") for rank in range(WORLD)]
        return done, seen

    return read


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_a_watched_rank_computes_the_same_bits(ranks, name):
    done, _ = ranks(name)
    for rank, outcome in enumerate(done):
        assert outcome["plain"] or (name, rank) == ("pipeline", 0)
        for key in ("watched", "after"):
            pairs = zip(outcome["plain"], outcome[key], strict=True)
            assert all(torch.equal(one, two) for one, two in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_every_recording_is_labelled_with_its_rank(ranks, name):
    _, seen = ranks(name)
    noted = [x.recording.notes["rank"] for x in seen]
    assert noted == [[rank, WORLD] for rank in range(WORLD)]


def test_a_model_without_ranks_is_not_labelled():
    model = make_llama()
    with regard.watch(model) as seen:
        run_pass(model, *take_part(0))
    assert "rank" not in seen.recording.notes


def watch_alone(run):
    """Return what is seen of a model in one process, and what it computed."""
    model = make_llama()
    with regard.watch(model) as seen:
        done = run(model)
    return seen.recording, done


def measure_records(mine, expected):
    """Return the largest difference of the weights of two recordings."""
    assert mine.sequences == expected.sequences
    assert mine.tokens == expected.tokens
    errors = []
    for one, two in zip(mine.records, expected.records, strict=True):
        assert one.name.removeprefix("module.") == two.name
        assert one.heads == two.heads
        for field in ("q_positions", "k_positions"):
            at, other = (np.asarray(getattr(x, field)) for x in (one, two))
            assert at.tolist() == other.tolist()
        gap = np.abs(np.asarray(one.weights()) - np.asarray(two.weights()))
        errors.append(float(gap.max()))
    return max(errors)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_rank_of_data_records_what_one_process_does(ranks, name):
    done, seen = ranks(name)
    for rank in range(WORLD):
        expected, logits = watch_alone(lambda m, r=rank: run_pass(m, *take_part(r)))
        assert len(expected.records) == 4
        torch.testing.assert_close(done[rank]["plain"][0], logits)
        assert measure_records(seen[rank].recording, expected) < EXACT


@pytest.mark.slow
def test_heads_of_two_ranks_are_gathered_in_order(ranks):
    done, seen = ranks("tensor")
    expected, logits = watch_alone(lambda m: run_pass(m, *draw_batch()))
    for outcome in done:
        torch.testing.assert_close(outcome["plain"][0], logits)
    assert {r.heads for x in seen for r in x.records} == {4}
    whole = gather_heads([x.recording for x in seen])
    assert {r.heads for r in whole.records} == {8}
    assert {r.k.shape[0] for r in whole.records} == {4}
    assert measure_records(whole, expected) < EXACT
    assert "rank" not in whole.notes
    assert len(Seen(whole).table().rows["head"]) == 4 * 2 * 8


@pytest.mark.slow
def test_a_generation_of_two_ranks_is_gathered(ranks):
    done, seen = ranks("generation")
    tokens, valid = draw_batch()
    expected, final = watch_alone(
        lambda m: m.generate(tokens, attention_mask=valid, **GREEDY)
    )
    assert all(torch.equal(outcome["plain"][0], final) for outcome in done)
    whole = gather_heads([x.recording for x in seen])
    assert [len(x) for x in whole.tokens] == [13, 10, 8, 13]
    assert measure_records(whole, expected) < 1e-10


@pytest.mark.slow
def test_ranks_of_a_pipeline_have_different_layers(ranks):
    done, seen = ranks("pipeline")
    model, x = Stack(), draw_states()
    with regard.watch(model) as alone, torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(done[1]["plain"][0], expected)
    names = [f"layers.{i}.attend" for i in range(LAYERS)]
    assert list(alone.layers) == names
    assert [list(part.layers) for part in seen] == [names[:2], names[2:]]
    for part in seen:
        for record, number in zip(part.records, part.recording.sequences, strict=True):
            theirs = alone.layer(record.name, sequence=number).weights()
            gap = np.abs(np.asarray(record.weights()) - theirs.numpy())
            assert float(gap.max()) < EXACT
        assert sorted(part.recording.sequences) == [0, 0, 1, 1, 2, 2, 3, 3]


# --- gather_heads on its own ----------------------------------------------------------


def make_whole(convert=np.asarray, **options):
    """Return a record of the definition: 4 heads of queries, 2 of keys."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=s) for s in ((4, 5, 3), (2, 7, 3), (2, 7, 6)))
    shown = {n: options.get(n) for n in ("mask", "bias", "sink")}
    done = regard.attention(q, k, v, **shown, scale=0.7, q_start=2)
    at = {"q_positions": np.arange(2, 7), "k_positions": np.arange(7)}
    arrays = {"q": q, "k": k, "lse": done.lse, "v": v, **at, **options}
    return Record(
        name="layers.0",
        scale=0.7,
        **{
            n: convert(x) if isinstance(x, np.ndarray) else x for n, x in arrays.items()
        },
    )


def cut_heads(record, rank):
    """Return the part of a record that one of two ranks has."""
    two, one = slice(2 * rank, 2 * rank + 2), slice(rank, rank + 1)
    parts = {n: getattr(record, n)[two] for n in ("q", "lse")}
    parts |= {n: getattr(record, n)[one] for n in ("k", "v")}
    for name in ("sink", "mask", "bias"):
        value = getattr(record, name)
        if isinstance(value, np.ndarray | torch.Tensor) and len(value) > 1:
            parts[name] = value[two]
    if isinstance(record.mask, masks.algebra.PerHead):
        parts["mask"] = masks.per_head(record.mask.masks[two])
    return replace(record, **parts)


def record_rank(record, rank=None, **options):
    """Return the recording of one rank."""
    notes = {"decoders": []} | ({} if rank is None else {"rank": [rank, 2]})
    told = {"tokens": ((1, 2, 3, 4, 5, 6, 7),), "notes": notes} | options
    seen = Covered(name=record.name, via="sdpa", calls=1, error=1e-7 * (rank or 0))
    return Recording(
        model="M", records=(record,), sequences=(0,), coverage=(seen,), **told
    )


SQUARE = np.random.default_rng(1).random((4, 5, 7)) > 0.3
SQUARE[..., 0] = True
OPTIONS = {
    "plain": {},
    "causal": {"mask": causal()},
    "documents": {"mask": causal() & same(np.array([0, 0, 1, 1, 1, 2, 2]))},
    "per head": {"mask": masks.per_head([causal(), window(2), causal(), window(3)])},
    "cells": {"mask": SQUARE},
    "cells of all heads": {"mask": SQUARE[:1]},
    "bias": {"bias": np.random.default_rng(2).normal(size=(4, 5, 7))},
    "bias of all heads": {"bias": np.random.default_rng(2).normal(size=(1, 5, 7))},
    "sink": {"sink": np.array([0.3, -1.0, 2.0, 0.0]), "mask": causal()},
}


@pytest.mark.parametrize("library", [np.asarray, torch.asarray])
@pytest.mark.parametrize("name", OPTIONS)
def test_gathered_heads_are_those_of_the_whole_record(name, library):
    whole = make_whole(library, **OPTIONS[name])
    parts = [record_rank(cut_heads(whole, rank), rank) for rank in range(2)]
    found = gather_heads(parts)
    (record,) = found.records
    for field in ("q", "k", "v", "lse"):
        one, two = (np.asarray(getattr(x, field)) for x in (record, whole))
        assert (one == two).all()
    one, two = (np.asarray(x.weights()) for x in (record, whole))
    assert np.abs(one - two).max() < 1e-12
    assert (type(record.mask) is type(whole.mask)) or name == "per head"
    assert found.notes == {"decoders": [], "gathered": 2}
    assert found.tokens == parts[0].tokens
    assert [x.error for x in found.coverage] == [1e-7]


def test_a_function_counts_the_heads_of_its_rank():
    """The same function is another mask on another rank: its head 0 is head 2."""
    whole = make_whole(mask=masks.per_head([masks.everything(), causal()] * 2))
    first = masks.where(lambda b, h, q, k: (h == 0) | (k <= q))
    parts = [
        record_rank(replace(cut_heads(whole, rank), mask=first), rank)
        for rank in range(2)
    ]
    (record,) = gather_heads(parts).records
    assert (record.allowed() == whole.allowed()).all()
    assert np.abs(record.weights() - whole.weights()).max() < 1e-12


def test_a_layer_that_is_not_split_is_kept_once():
    whole = make_whole(mask=causal())
    found = gather_heads([record_rank(whole, rank) for rank in range(2)])
    assert found.records == (whole,)


def test_one_rank_alone_is_the_whole():
    whole = record_rank(make_whole())
    assert gather_heads([whole]).records == whole.records


def gather_changed(rank=1, whole=None, **options):
    """Gather two ranks, one of which has a changed record."""
    whole = whole or make_whole(mask=causal())
    parts = [cut_heads(whole, i) for i in range(2)]
    parts[rank] = replace(parts[rank], **options)
    return gather_heads([record_rank(x) for x in parts])


WRONG = {
    "scale": (
        {"scale": 0.5},
        r"'layers.0', sequence 0: scale is 0.7 on rank 0 and 0.5 on rank 1, expected "
        "the same on all ranks.",
    ),
    "softcap": (
        {"softcap": 5.0},
        r"'layers.0', sequence 0: softcap is None on rank 0 and 5.0 on rank 1, "
        "expected the same on all ranks.",
    ),
    "positions": (
        {"q_positions": np.arange(5)},
        r"'layers.0', sequence 0: q_positions is (5,) from 2 to 6 on rank 0 and (5,) "
        "from 0 to 4 on rank 1, expected the same on all ranks.",
    ),
    "mask": (
        {"mask": causal() & window(3)},
        r"'layers.0', sequence 0: the mask of rank 1, causal() & window(3), is not "
        "that of rank 0, causal(); expected the same on all ranks.",
    ),
    "no mask": (
        {"mask": None},
        r"'layers.0', sequence 0: the mask of rank 1, None, is not that of rank 0, "
        "causal(); expected the same on all ranks.",
    ),
    "values": (
        {"v": None},
        r"'layers.0', sequence 0: rank 0 has v and rank 1 has not, expected the same "
        "of all ranks.",
    ),
    "bias": (
        {"bias": np.zeros((2, 5, 7))},
        r"'layers.0', sequence 0: some ranks have a bias for each head and some have "
        "none, expected the same of all ranks.",
    ),
    "groups": (
        {"k": np.ones((2, 7, 3)), "v": None},
        r"'layers.0', sequence 0: q is (2, 5, 3) and k (1, 7, 3) on rank 0, q is "
        "(2, 5, 3) and k (2, 7, 3) on rank 1; expected heads of one width, and as many "
        "query heads for each key head.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_ranks_that_do_not_fit_are_refused(name):
    options, message = WRONG[name]
    with pytest.raises((OptionError, ShapeError)) as caught:
        gather_changed(**options)
    assert str(caught.value) == message


def test_recordings_that_do_not_fit_are_refused():
    parts = [cut_heads(make_whole(), rank) for rank in range(2)]
    told = [record_rank(x, rank) for rank, x in enumerate(parts)]
    other = replace(parts[1], name="layers.1")
    reason = Covered(name="layers.0", via="sdpa", reason="its output is 2 off")
    lost = replace(record_rank(other, 1), coverage=(reason,))
    cases = {
        "there are no recordings to join, expected one of each rank.": [],
        "the recordings are of ranks 1 of 2, 0 of 2; expected all 2 ranks in order, 0 "
        "to 1.": told[::-1],
        "the recordings are of ranks 0 of 2; expected all 1 ranks in order, 0 to 0.": [
            told[0]
        ],
        "the recordings are of ranks 0 of 2, unknown; expected all 2 ranks in order, 0 "
        "to 1.": [told[0], record_rank(parts[1])],
        "rank 1 read other tokens than rank 0. The ranks of a tensor-parallel model "
        "read the same; recordings of data-parallel ranks are separate runs, and are "
        "not joined.": [told[0], replace(told[1], tokens=((9,) * 7,))],
        "rank 1 has no record of 'layers.0', sequence 0, which another rank has (its "
        "output is 2 off). The ranks of a pipeline have different layers, and are not "
        "joined.": [told[0], lost],
    }
    for message, recordings in cases.items():
        with pytest.raises(OptionError) as caught:
            gather_heads(recordings)
        assert str(caught.value) == message


def test_a_gathered_recording_is_saved_and_opened(tmp_path):
    whole = make_whole(mask=causal())
    parts = [record_rank(cut_heads(whole, rank), rank) for rank in range(2)]
    for rank, part in enumerate(parts):
        Seen(part).save(tmp_path / f"{rank}.regard")
    opened = [regard.open(tmp_path / f"{i}.regard").recording for i in range(2)]
    found = Seen(gather_heads(opened))
    gap = np.abs(np.asarray(found.layer(0).weights()) - whole.weights())
    assert gap.max() < 1e-12
