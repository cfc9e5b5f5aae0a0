"""Models of the field: one tenth of them, another one for every commit (tests/wild)."""

import datetime as dt
import re
import subprocess
import sys
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import FAMILIES
from wild import run as wild_run
from wild import table
from wild.judge_model import Verdict, find_unsaid, is_same, weigh
from wild.must_tell import CHANGED, NO_SOFTMAX
from wild.oracle import list_heard, list_softmaxes

import regard
from regard.recording.evidence import Covered

ROOT = Path(__file__).parent.parent

# a planted fault is a record whose rows contradict each other
pytestmark = pytest.mark.filterwarnings("ignore:.*do not sum to 1 under their lse")


def run_quietly(*command):
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )


def choose_tenth():
    """Return a number from 0 to 9: of this commit, or of the day."""
    done = run_quietly("git", "rev-parse", "HEAD")
    day = dt.datetime.now(dt.UTC).date().isoformat()
    return zlib.crc32((done.stdout.strip() or day).encode()) % 10


@pytest.mark.slow
def test_the_lens_is_right_about_a_tenth_of_the_field(tmp_path):
    tenth = choose_tenth()
    results = tmp_path / "wild.jsonl"
    command = [sys.executable, "-W", "ignore", wild_run.__file__, "--tenth", str(tenth)]
    done = run_quietly(*command, "--results", str(results), "--jobs", "2")
    found = wild_run.read_results(results)
    assert len(found) > 30, done.stderr
    assert [x for x in found if x.verdict in ("wrong", "broke")] == []
    good = sum(x.verdict in ("correct", "reported") for x in found)
    assert good > len(found) // 2, f"tenth {tenth}: {done.stdout}"


# --- the table of the documentation ---------------------------------------------------


needs_results = pytest.mark.skipif(
    not table.RESULTS.exists(),
    reason="all models have not been run yet: tests/wild/run.py, then --table",
)


@needs_results
def test_the_page_shows_the_results():
    results, page = table.load_results(), table.PAGE.read_text("utf-8")
    for mark, part in (
        ("table", table.show_table(results)),
        ("lists", table.show_lists(results)),
    ):
        _, found, _ = page.split(table.MARKS[mark])
        assert found == f"\n{part}\n"


@needs_results
def test_the_results_are_those_of_all_cases():
    results = table.load_results()
    found = {
        (library, name)
        for library, models in results.items()
        for some in models.values()
        for name in some
    }
    assert found == {(x.library, x.name) for x in wild_run.list_cases()}


@needs_results
def test_nothing_is_silently_wrong_and_99_percent_are_correct_or_reported():
    counts = sum(map(table.count, table.load_results().values()), Counter())
    ran = counts.total() - counts["not built"]
    assert counts["wrong"] == counts["broke"] == 0
    assert counts["correct"] + counts["reported"] >= 0.99 * ran
    assert ran > 400 + 40 + 60


def test_a_table_counts_what_it_is_given(tmp_path):
    found = [
        Verdict("bert", "transformers", "correct"),
        Verdict("led", "transformers", "reported", "a | b"),
        Verdict("bert:generate", "transformers", "wrong", "weights"),
        Verdict("x", "other", "not built", "c" * 500),
    ]
    results = table.save_results(found, tmp_path / "results.json")
    assert table.load_results(tmp_path / "results.json") == results
    lines = table.show_table(results).splitlines()
    assert lines[2:6] == [
        "| transformers, forward | 2 | 1 | 1 | 0 | 0 | 0 |",
        "| transformers, generate | 1 | 0 | 0 | 1 | 0 | 0 |",
        "| other | 1 | 0 | 0 | 0 | 0 | 1 |",
        "| **all** | 4 | 1 | 1 | 1 | 0 | 1 |",
    ]
    assert lines[-1].startswith(
        "Of 3 cases that ran, 2 (66.7%) are correct or reported"
    )
    lists = table.show_lists(results)
    assert "| transformers/led | a \\| b |" in lists
    assert "c" * 161 not in lists


# --- the judge can fail ---------------------------------------------------------------


def look(name):
    """Return the truth, what was heard, and the recording of a family."""
    model, inputs = FAMILIES[name].build()
    model.eval()

    def run(model):
        return model(**inputs)

    with torch.no_grad(), regard.watch(model) as seen:
        run(model)
    heard, _ = list_heard(model, run)
    return list_softmaxes(model, run), heard, seen.recording


def change(recording, number, **parts):
    """Return a recording with another record at one place."""
    records = list(recording.records)
    records[number] = replace(records[number], **parts)
    return replace(recording, records=tuple(records))


def perturb_lse(recording):
    return change(recording, 1, lse=recording.records[1].lse + 1e-3)


def perturb_key(recording):
    k = recording.records[0].k.clone()
    k[0, 2] += 0.01
    return change(recording, 0, k=k)


def swap_heads(recording):
    record = recording.records[0]
    q, lse = record.q.flip(0), record.lse.flip(0)
    return change(recording, 0, q=q, k=record.k.flip(0), lse=lse)


def swap_sequences(recording):
    first, *rest = recording.records
    other = next(i for i, x in enumerate(rest) if x.name == first.name)
    rest[other], first = first, rest[other]
    return replace(recording, records=(first, *rest))


def drop_record(recording):
    records, sequences = recording.records[1:], recording.sequences[1:]
    return replace(recording, records=records, sequences=sequences)


def drop_rows(recording):
    record = recording.records[0]
    q, lse, at = record.q[:, 1:], record.lse[:, 1:], record.q_positions[1:]
    return change(recording, 0, q=q, lse=lse, q_positions=at)


def drop_keys(recording):
    record = recording.records[0]
    return change(recording, 0, k=record.k[:, 1:], k_positions=record.k_positions[1:])


def swap_layers(recording):
    names = [x.name for x in recording.records]
    other = {names[0]: names[1], names[1]: names[0]}
    records = (replace(x, name=other.get(x.name, x.name)) for x in recording.records)
    return replace(recording, records=tuple(records))


def forget_coverage(recording):
    return replace(recording, coverage=recording.coverage[1:])


def miscount(recording):
    first, *rest = recording.coverage
    return replace(recording, coverage=(replace(first, calls=first.calls + 1), *rest))


FAULTS = {
    perturb_lse: "weights: .* off by",
    perturb_key: "weights: .* off by",
    swap_heads: "weights: ",
    swap_sequences: "out of order",
    drop_record: "missing: 1 of 1 softmaxes",
    drop_rows: "weights: .* not found",
    drop_keys: "weights: .* not found",
    swap_layers: "weights: .* off by",
    forget_coverage: "missing: .* ran 1, 0 counted",
    miscount: "missing: .* ran 1, 2 counted",
}


@pytest.fixture(scope="module")
def bert():
    return look("bert")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_judge_finds_a_fault(bert, fault):
    truth, heard, recording = bert
    assert weigh(truth, heard, recording)[:2] == ("correct", "")
    verdict, text, _ = weigh(truth, heard, fault(recording))
    assert verdict == "wrong"
    assert re.search(FAULTS[fault], text), text


def test_a_reason_is_a_report(bert):
    truth, heard, recording = bert
    name = recording.records[0].name
    kept = [i for i, x in enumerate(recording.records) if x.name != name]
    records = tuple(recording.records[i] for i in kept)
    sequences = tuple(recording.sequences[i] for i in kept)
    coverage = tuple(
        replace(x, reason="not asked for", kept=0) if x.name == name else x
        for x in recording.coverage
    )
    told = replace(recording, records=records, sequences=sequences, coverage=coverage)
    verdict, text, _ = weigh(truth, heard, told)
    assert (verdict, text) == ("reported", f"{name}: not asked for")


@pytest.mark.parametrize(
    "name", ["llama-left", "bart", "torch-encoder-padding", "swin", "written-bmm"]
)
def test_padding_folded_heads_and_windows_are_matched(name):
    truth, heard, recording = look(name)
    assert weigh(truth, heard, recording)[0] == "correct"
    verdict, *_ = weigh(truth, heard, perturb_lse(recording))
    assert verdict == "wrong"


def test_a_generation_is_matched():
    model, _ = FAMILIES["llama"].build()
    ids = torch.arange(5, 11)[None]

    def run(model):
        return model.generate(
            ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0
        )

    with torch.no_grad(), regard.watch(model) as seen:
        run(model)
    heard, _ = list_heard(model, run)
    truth = list_softmaxes(model, run)
    assert len(seen.records) == 2
    assert weigh(truth, heard, seen.recording)[:2] == ("correct", "")
    assert weigh(truth, heard, perturb_lse(seen.recording))[0] == "wrong"
    assert weigh(truth, heard, drop_rows(seen.recording))[0] == "wrong"


def test_what_is_computed_again_is_matched_if_it_is_the_same():
    """Without a cache, the record is that of the last pass."""
    model, _ = FAMILIES["llama"].build()
    ids = torch.arange(5, 11)[None]

    def run(model):
        return model(ids[:, :5], use_cache=False), model(ids, use_cache=False)

    with torch.no_grad(), regard.watch(model) as seen:
        run(model)
    heard, _ = list_heard(model, run)
    truth = list_softmaxes(model, run)
    recording = seen.recording
    last = [x for x in recording.records if x.q.shape[1] == 6]
    entries = tuple(replace(x, calls=2, kept=2) for x in recording.coverage)
    whole = replace(
        recording,
        records=tuple(last),
        sequences=(0,) * len(last),
        coverage=entries,
    )
    assert weigh(truth, heard, whole)[:2] == ("correct", "")
    weights = truth[0].weights.clone()
    weights[0, 0, 3, :2] += torch.tensor([1e-3, -1e-3])
    other = [replace(truth[0], weights=weights), *truth[1:]]
    verdict, text, _ = weigh(other, heard, whole)
    assert (verdict, text[:8]) == ("wrong", "missing:")


def test_a_generation_in_pieces_is_wrong():
    model, _ = FAMILIES["llama"].build()
    ids = torch.arange(5, 11)[None]

    def step(model):
        first = model(ids, use_cache=True)
        return model(ids[:, :1], past_key_values=first.past_key_values)

    with torch.no_grad(), regard.watch(model) as seen:
        step(model)
    heard, _ = list_heard(model, step)
    truth, recording = list_softmaxes(model, step), seen.recording
    assert weigh(truth, heard, recording)[:2] == ("correct", "")
    pieces = [
        piece
        for x in recording.records
        for piece in (cut_record(x, slice(6), 6), cut_record(x, slice(6, 7), 7))
    ]
    numbers = tuple(i % 2 for i in range(len(pieces)))
    split = replace(recording, records=tuple(pieces), sequences=numbers)
    verdict, text, _ = weigh(truth, heard, split)
    assert verdict == "wrong"
    assert text.startswith("split: model.layers.0.self_attn has 2 records")


def cut_record(record, rows, keys):
    """Return some rows of a record, with its first keys."""
    return replace(
        record,
        q=record.q[:, rows],
        lse=record.lse[:, rows],
        q_positions=record.q_positions[rows],
        k=record.k[:, :keys],
        k_positions=record.k_positions[:keys],
    )


def test_bits_are_compared():
    a = {"x": torch.tensor([1.0, torch.nan]), "y": [torch.ones(2)]}
    assert is_same(a, {"x": torch.tensor([1.0, torch.nan]), "y": [torch.ones(2)]})
    assert not is_same(a, {"x": torch.tensor([1.0, 2.0]), "y": [torch.ones(2)]})
    assert not is_same(a, {"x": a["x"], "y": [torch.ones(2) + 1e-7]})
    assert not is_same(a, {"x": a["x"]})


def test_attention_without_a_softmax_must_be_told():
    nothing = Covered(name="conv", via="")
    told = replace(nothing, reason="it ran, but no softmax was heard in it")
    gate = replace(told, attention=False)
    assert find_unsaid("torch-geometric/gat", [nothing, gate]) == NO_SOFTMAX
    assert find_unsaid("torch-geometric/gat", [nothing, told]) == ""
    assert find_unsaid("transformers/bert", [nothing]) == ""


def test_weights_that_were_changed_must_be_told():
    other = Covered(name="attn", via="softmax", note="stored as logits")
    told = replace(other, note="the weights were changed after the softmax (mul)")
    assert find_unsaid("vit-pytorch/deepvit", [other]) == CHANGED
    assert find_unsaid("vit-pytorch/deepvit", [told]) == ""


def test_a_note_is_no_excuse_for_other_weights(bert):
    truth, heard, recording = bert
    coverage = tuple(
        replace(x, note="which axis is heads was decided by convention")
        for x in recording.coverage
    )
    noted = replace(recording, coverage=coverage)
    assert weigh(truth, heard, noted)[0] == "correct"
    for fault in (perturb_key, drop_record):
        assert weigh(truth, heard, fault(noted))[0] == "wrong"


def test_a_name_with_a_number_counts_for_its_module(bert):
    truth, heard, recording = bert
    first, *rest = recording.coverage
    twin = Covered(name=f"{first.name}#2", via=first.via, calls=first.calls)
    both = replace(recording, coverage=(replace(first, calls=0), twin, *rest))
    assert weigh(truth, heard, both)[0] == "correct"
