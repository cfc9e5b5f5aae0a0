"""A thousand random models: the lens is correct, or says what it could not see.

random_models.py draws and judges them; attention_writings.py has the ways to write
attention. Here are also the tests of the judge: it accepts a recording that is written
from the truth, and complains about every change of it that can be told.
"""

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from attention_writings import LAYOUTS, WRITINGS, Plan
from random_models import (
    Draw,
    Model,
    draw_model,
    draw_plans,
    judge,
    judge_draw,
    watch_draw,
)
from torch.utils._python_dispatch import TorchDispatchMode

from regard.recording.record import Record, Recording

DRAWS, STEP = 500, 50
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

# a planted fault is a record whose rows contradict each other
pytestmark = pytest.mark.filterwarnings("ignore:.*do not sum to 1 under their lse")


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(n, marks=pytest.mark.slow if n >= 2 * STEP else ())
        for n in range(0, DRAWS, STEP)
    ],
)
def test_draws_are_recorded_or_reported(first):
    complaints = [c for seed in range(first, first + STEP) for c in judge_draw(seed)]
    assert not complaints, f"{len(complaints)} complaints:\n" + "\n".join(
        complaints[:9]
    )


USUAL = {
    **{x: {"layout": x} for x in ("matmul", "torch.matmul, einsum", "einsum bhqk")},
    "cast": {"softmax": "in float32"},
    "method": {"softmax": "method"},
    "module": {"softmax": "nn.Softmax"},
    "gated": {"gate": "softmax of four axes"},
    "dropout, not in training": {"after": "nn.Dropout"},
    "cross": {"keys": "cross"},
    **{x: {"writing": x} for x in ("sdpa", "sdpa, is_causal", "sdpa, enable_gqa")},
    **{x: {"writing": f"nn.{x}"} for x in ("MultiheadAttention",)},
}


def make_usual(what, mask):
    """Return a draw of two equal blocks."""
    torch.manual_seed(0)
    plan = Plan(heads=3, kv_heads=3, width=4, mask=mask, **USUAL[what])
    inputs = {"x": torch.randn(2, 5, 12), "memory": torch.randn(2, 7, 12)}
    if mask == "padding":
        inputs["attention_mask"] = torch.tensor([[1, 1, 1, 0, 0], [1] * 5])
    return Draw(0, Model([plan, plan], "none").eval(), inputs)


@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
@pytest.mark.parametrize("what", USUAL)
def test_usual_attention_needs_no_excuse(what, mask):
    """A note on everything would pass every draw: what is usual must be without."""
    draw = make_usual(what, mask)
    verdicts = judge(draw)
    assert [c for v in verdicts for c in v.complaints] == []
    assert [v.outcome for v in verdicts] == ["correct"] * 3


def test_every_way_is_drawn():
    drawn = Counter(
        name
        for seed in range(DRAWS)
        for plan in draw_plans(random.Random(seed))[0]
        for name in plan.names
    )
    ways = [x for x in drawn if x.startswith(("writing:", "layout:"))]
    assert len(ways) == len(WRITINGS) - 1 + len(LAYOUTS) >= 30
    assert min(drawn.values()) >= 4, drawn.most_common()[-3:]


# --- the truth of the draws -----------------------------------------------------------

SOFTMAX = {"_softmax", "_log_softmax", "_safe_softmax"}
WHOLE = {  # in inference_mode, modes hear these instead of their parts
    "softmax",
    "log_softmax",
    "special_softmax",
    "scaled_dot_product_attention",
}
FUSED = {
    "_scaled_dot_product_flash_attention_for_cpu",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
}


class Counted(TorchDispatchMode):
    """Count the operators that are a softmax or attention."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("first", range(0, 100, STEP))
def test_the_books_hold_every_call(first):
    for seed in range(first, first + STEP):
        draw = draw_model(seed)
        told = [c for calls in draw.write_book().values() for c in calls]
        with Counted() as mode:
            draw.run()
        heard = sum(mode.calls[name] for name in SOFTMAX | WHOLE | FUSED)
        least, most = (sum(f(c.heard) for c in told) for f in (min, max))
        assert least <= heard <= most, (seed, draw.name(), mode.calls)


# --- the judge ------------------------------------------------------------------------


def write_layer(name, call):
    """Return the record of every sequence of a call; q holds the logits."""
    n_k = call.weights.shape[-1]
    for number, weights in enumerate(call.weights):
        yield (
            number,
            Record(
                name=name,
                q=weights.clamp(min=1e-30).log(),
                k=torch.eye(n_k, dtype=torch.float64)[None],
                lse=torch.zeros(weights.shape[:2], dtype=torch.float64),
                scale=1.0,
                q_positions=torch.arange(weights.shape[1]),
                k_positions=torch.arange(n_k),
            ),
        )


def write_recording(draw):
    """Return the recording that a perfect lens would make."""
    records, sequences, coverage = [], [], []
    for module, calls in draw.write_book().items():
        places = Counter()
        for call in calls:
            base = ".".join(x for x in (module, call.where[0]) if x)
            attends = call.weights is not None
            places[base] += attends
            number = f"#{places[base]}" if attends and places[base] > 1 else ""
            entry = SimpleNamespace(
                name=base + number,
                calls=call.heard[0],
                reason="",
                note="changed after the softmax" if call.changed else "",
                attention=attends,
            )
            coverage.append(entry)
            for sequence, record in write_layer(entry.name, call) if attends else ():
                records.append(record)
                sequences.append(sequence)
    return Recording(
        model="Model",
        records=tuple(records),
        sequences=tuple(sequences),
        coverage=tuple(coverage),
    )


def judge_spoiled(seed, spoil):
    """Return the complaints about a perfect recording that was spoiled."""

    def watch(draw):
        return draw.run(), spoil(write_recording(draw))

    return [
        c
        for verdict in judge(draw_model(seed), watch=watch)
        for c in verdict.complaints
    ]


def test_the_judge_accepts_the_truth():
    for seed in range(100):
        assert judge_spoiled(seed, lambda recording: recording) == [], seed


def report_everything(recording):
    """Return a recording without records, and with a reason for each."""
    for entry in recording.coverage:
        entry.reason = "not recorded" if entry.attention else ""
    return replace(recording, records=(), sequences=())


def test_the_judge_accepts_reasons():
    for seed in range(50):
        assert judge_spoiled(seed, report_everything) == [], seed


def fold_sequences(recording, note):
    """Return a recording in which the heads of all sequences are those of one."""
    layers = {}
    for record in recording.records:
        layers.setdefault(record.name, []).append(record)
    folded = [
        replace(
            records[0],
            q=torch.cat([x.q for x in records]),
            lse=torch.cat([x.lse for x in records]),
        )
        for records in layers.values()
    ]
    for entry in recording.coverage:
        entry.note += note
    sequences = (0,) * len(folded)
    return replace(recording, records=tuple(folded), sequences=sequences)


def test_the_judge_accepts_other_axes_with_a_note_only():
    tried = 0
    for seed in filter(is_attention, range(50)):
        noted = judge_spoiled(seed, lambda r: fold_sequences(r, "axes by convention"))
        assert noted == [], seed
        if draw_model(seed).inputs["x"].shape[0] > 1:
            tried += 1
            assert judge_spoiled(seed, lambda r: fold_sequences(r, "")), seed
    assert tried > 8


def change_record(recording, change, which=0):
    """Return a recording with one of its records changed."""
    records = list(recording.records)
    if records:
        records[which] = change(records[which])
    return replace(recording, records=tuple(records))


def drop_record(recording):
    return replace(
        recording, records=recording.records[1:], sequences=recording.sequences[1:]
    )


def drop_layer(recording):
    kept = [
        (r, s)
        for r, s in zip(recording.records, recording.sequences, strict=True)
        if r.name != recording.records[0].name
    ]
    return replace(
        recording,
        records=tuple(r for r, _ in kept),
        sequences=tuple(s for _, s in kept),
    )


def forget_notes(recording):
    for entry in recording.coverage:
        entry.note = ""
    return recording


def forget_call(recording):
    return replace(recording, coverage=recording.coverage[1:])


def record_gate(recording):
    first = recording.records[0]
    name = next((x.name for x in recording.coverage if not x.attention), "gate")
    others = {r.name for r in recording.records}
    name = name if name not in others else f"{name}.gate"
    return replace(
        recording,
        records=(*recording.records, replace(first, name=name)),
        sequences=(*recording.sequences, 0),
    )


def rename_record(recording):
    return change_record(recording, lambda r: replace(r, name=r.name + ".x"))


SPOILERS = {
    "lse": lambda r: change_record(r, lambda x: replace(x, lse=x.lse + 1e-3)),
    "q": lambda r: change_record(r, lambda x: replace(x, q=x.q * 1.001 + 1e-4)),
    "a record": drop_record,
    "a layer": drop_layer,
    "a name": rename_record,
    "a call": forget_call,
    "a gate": record_gate,
}


def is_attention(seed):
    """Return whether a draw has an attention that must be recorded, and is exact."""
    draw = draw_model(seed)
    calls = [c for calls in draw.write_book().values() for c in calls]
    first = next((c for c in calls if c.weights is not None), None)
    exact = draw.inputs["x"].dtype != torch.bfloat16
    return exact and first is not None and not first.optional and not first.changed


@pytest.mark.parametrize("what", SPOILERS)
def test_the_judge_finds(what):
    tried = 0
    for seed in filter(is_attention, range(30)):
        tried += 1
        assert judge_spoiled(seed, SPOILERS[what]), (seed, what)
    assert tried > 12


@pytest.mark.parametrize("what", ["lse", "q", "a record", "a layer", "a name"])
def test_the_judge_finds_it_in_what_the_lens_recorded(what):
    draw = make_usual("matmul", "causal")

    def watch(draw):
        results, recording = watch_draw(draw)
        return results, SPOILERS[what](recording)

    found = [v.complaints for v in judge(draw, watch=watch, count=False)]
    assert [bool(x) for x in found] == [False, True, False]


def swap_heads(record):
    return replace(record, q=record.q.flip(0))


def flip_keys(record):
    return replace(record, q=record.q.flip(-1))


def turn_matrix(record):
    n_q, n_k = record.q.shape[1:]
    return replace(record, q=record.q.mT) if n_q == n_k else record


@pytest.mark.parametrize("change", [swap_heads, flip_keys, turn_matrix])
def test_the_judge_finds_what_is_in_another_place(change):
    """Where the change changes the numbers; without a note, for with one it may be."""
    tried = 0
    for seed in filter(is_attention, range(60)):
        record = write_recording(draw_model(seed)).records[0]
        before, after = record.weights(), change(record).weights()
        if float((before - after).abs().max()) > 1e-4:
            tried += 1
            assert judge_spoiled(seed, lambda r: change_record(r, change)), seed
    assert tried > 8


def swap_sequences(recording):
    """Give the first two records of a layer the number of the other."""
    numbers = list(recording.sequences)
    numbers[:2] = reversed(numbers[:2])
    return replace(recording, sequences=tuple(numbers))


def test_the_judge_finds_sequences_that_are_swapped():
    tried = 0
    for seed in filter(is_attention, range(60)):
        one, *rest = write_recording(draw_model(seed)).records
        if rest and rest[0].name == one.name and not torch.equal(one.q, rest[0].q):
            tried += 1
            assert judge_spoiled(seed, swap_sequences), seed
    assert tried > 12


def test_the_judge_asks_for_notes():
    tried = 0
    for seed in range(60):
        books = draw_model(seed).write_book().values()
        changed = any(c.changed for calls in books for c in calls)
        tried += changed
        assert bool(judge_spoiled(seed, forget_notes)) == changed, seed
    assert tried > 8


def test_the_judge_finds_changed_bits():
    def watch(draw):
        out, *rest = draw.run()
        return [out + 0.1, *rest], write_recording(draw)

    for seed in range(10):
        verdicts = judge(draw_model(seed), watch=watch)
        assert all("bits" in str(v.complaints) for v in verdicts)


def test_the_judge_names_an_error():
    def watch(draw):
        raise RuntimeError("the lens broke")

    for verdict in judge(draw_model(0), watch=watch):
        assert verdict.complaints == ["broke: RuntimeError: the lens broke"]
        assert verdict.outcome == "broke"
