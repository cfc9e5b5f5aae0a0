"""Two recordings compared head by head: against dense weights and plain loops."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner

import regard
from regard import causal
from regard.__main__ import main
from regard.definition.attention import attention
from regard.errors import CallError, OptionError, ShapeError
from regard.nn import CausalTransformer, Config
from regard.recording.record import Record, Recording
from regard.recording.spans import Span
from regard.stats import comparison
from regard.stats.alignment import align_tokens

SIZES = {"vocabulary": 30, "context": 16, "width": 32, "heads": 4, "kv_heads": 2}


def make_model(seed, **sizes):
    torch.manual_seed(seed)
    model = CausalTransformer(Config(**(SIZES | {"layers": 2} | sizes)))
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.3 * torch.randn_like(x))
    return model.eval()


def see(model, *prompts):
    with torch.no_grad(), regard.watch(model) as seen:
        model(torch.tensor(prompts))
    return seen


MODEL, LATER = make_model(0), make_model(1)
PROMPT, SHORTER = [7, 3, 9, 4, 1, 3, 8, 2], [7, 9, 4, 6, 3, 8]
ONE, OTHER = see(MODEL, PROMPT), see(LATER, PROMPT)
PAIRS = [(0, 0), (2, 1), (3, 2), (5, 4), (6, 5)]  # of the two prompts, by hand


def record(seed, n=11, *, dtype=torch.float64, sink=False, name="a", heads=4):
    """Return a record of random numbers, and its dense weights."""
    torch.manual_seed(seed)
    q, k = torch.randn(heads, n, 8, dtype=dtype), torch.randn(2, n, 8, dtype=dtype)
    sinks = torch.randn(heads, dtype=dtype) if sink else None
    done = attention(
        q, k, k, causal(), softcap=3.0, sink=sinks, see=("weights",), scale=0.9
    )
    at = torch.arange(n)
    made = Record(
        name=name,
        q=q,
        k=k,
        lse=done.lse,
        scale=0.9,
        softcap=3.0,
        sink=sinks,
        mask=causal(),
        q_positions=at,
        k_positions=at,
    )
    return made, done.weights.numpy()


def wrap(*records, tokens=()):
    return Recording(
        model="Made", records=records, sequences=(0,) * len(records), tokens=tokens
    )


def vary(p, q):
    """Return the total variation distance of rows, what is left as one more key."""
    p, q = (np.concatenate([x, 1 - x.sum(-1, keepdims=True)], -1) for x in (p, q))
    return np.abs(p - q).sum(-1) / 2


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("tile", [(256, 1024), (3, 4)])
def test_moved_is_the_total_variation_distance_of_dense_weights(
    monkeypatch, sink, tile
):
    monkeypatch.setattr(comparison, "TILE", tile)
    (a, dense), (b, other) = record(0, sink=sink), record(1, sink=sink)
    found = regard.compare(wrap(a), wrap(b)).rows
    moved = vary(dense, other)
    assert moved.max() > 0.3
    np.testing.assert_allclose(found["moved"], moved.mean(1), rtol=0, atol=1e-14)
    np.testing.assert_allclose(found["moved_most"], moved.max(1), rtol=0, atol=1e-14)
    assert found["moved_at"].tolist() == moved.argmax(1).tolist()
    assert found["head"].tolist() == [0, 1, 2, 3]


def test_a_row_that_sees_nothing_has_moved_completely():
    a, _ = record(0)
    blind = torch.zeros(1, 11, 11, dtype=torch.bool)
    lse = torch.full_like(a.lse, -torch.inf)
    b = Record(**{**vars(a), "mask": blind, "lse": lse})
    assert np.allclose(regard.compare(wrap(a), wrap(b)).rows["moved"], 1)


def test_no_more_than_a_tile_of_weights_is_held(monkeypatch):
    monkeypatch.setattr(comparison, "TILE", (4, 5))
    sizes, weights = [], Record.weights

    def measure(self, *rows, **options):
        found = weights(self, *rows, **options)
        sizes.append(tuple(found.shape))
        return found

    monkeypatch.setattr(Record, "weights", measure)
    a, b = record(0, n=40)[0], record(1, n=40)[0]
    at = np.arange(40)
    comparison.measure_moved(a, b, (at, at), (at, at))
    assert len(sizes) == 2 * 10 * 8
    assert max(sizes) == (4, 4, 5)


def test_two_checkpoints_on_the_same_tokens():
    found = regard.compare(ONE, OTHER)
    assert found.how == "CausalTransformer: the same 8 tokens"
    assert found.rows[["layer", "head"]].tolist() == [
        (layer, head) for layer in range(2) for head in range(4)
    ]
    for layer in range(2):
        p, q = (x.layer(layer).weights().double().numpy() for x in (ONE, OTHER))
        mine = found.rows[found.rows["layer"] == layer]
        assert np.allclose(mine["moved"], vary(p, q).mean(1), rtol=0, atol=1e-6)
    for name in ONE.table().statistics:
        before, after = ONE.table().rows[name], OTHER.table().rows[name]
        assert np.array_equal(found.rows[name], before, equal_nan=True)
        assert np.array_equal(found.rows[f"{name}_other"], after, equal_nan=True)
        change = found.rows[f"{name}_change"]
        assert np.array_equal(change, after - before, equal_nan=True)


def test_a_recording_does_not_differ_from_itself():
    found = regard.compare(ONE, ONE)
    assert not found.rows["moved"].any()
    assert not np.nan_to_num(found.rows["entropy_change"]).any()


def test_two_prompts_are_aligned_by_a_diff_of_their_tokens():
    known = align_tokens(PROMPT, SHORTER)
    assert list(zip(*(x.tolist() for x in known.pair), strict=True)) == PAIRS
    shorter = see(MODEL, SHORTER)
    found = regard.compare(ONE, shorter)
    assert found.how == "CausalTransformer: 5 tokens in common, of 8 and 6"
    for layer in range(2):
        p, q = (x.layer(layer).weights().double().numpy() for x in (ONE, shorter))
        for head in range(4):
            moved = []
            for i, j in PAIRS:
                gap = [p[head, i, a] - q[head, j, b] for a, b in PAIRS]
                moved.append((sum(map(abs, gap)) + abs(sum(gap))) / 2)
            (row,) = found.rows[
                (found.rows["layer"] == layer) & (found.rows["head"] == head)
            ]
            assert row["moved"] == pytest.approx(np.mean(moved), abs=1e-6)
            assert row["moved_most"] == pytest.approx(max(moved), abs=1e-6)
            assert row["moved_at"] == PAIRS[int(np.argmax(moved))][0]


def test_rows_that_were_not_recorded_are_left_out():
    (a, dense), (b, other) = record(0), record(1, n=6)
    part = {"q": a.q[:, 4:], "lse": a.lse[:, 4:], "q_positions": a.q_positions[4:]}
    late = Record(**{**vars(a), **part})
    tokens = (tuple(range(11)),), (tuple(range(6)),)
    found = regard.compare(wrap(late, tokens=tokens[0]), wrap(b, tokens=tokens[1]))
    moved = vary(dense[:, 4:6, :6], other[:, 4:6])
    assert np.allclose(found.rows["moved"], moved.mean(1), atol=1e-12)
    assert set(found.rows["moved_at"].tolist()) <= {4, 5}


def test_the_mass_between_spans_of_the_same_name():
    shorter = see(MODEL, SHORTER)
    mine = (Span("start", 0, 2), Span("question", 3, 6), Span("end", 6, 8))
    theirs = {"question": (2, 4), "start": (0, 1)}
    found = regard.compare(ONE, shorter, spans=(mine, theirs))
    assert found.how == "CausalTransformer: the spans start, question"
    assert len(found) == 2 * 4 * 2 * 2
    ends = {"start": ((0, 2), (0, 1)), "question": ((3, 6), (2, 4))}
    for row in found.rows:
        expected = []
        for i, seen in enumerate((ONE, shorter)):
            w = seen.layer(int(row["layer"])).weights().double().numpy()[row["head"]]
            q, k = ends[row["from_span"]][i], ends[row["to_span"]][i]
            expected.append(w[q[0] : q[1], k[0] : k[1]].sum(1).mean())
        values = [row["mass"], row["mass_other"], row["mass_change"]]
        assert values == pytest.approx([*expected, expected[1] - expected[0]], abs=1e-6)
    assert found.rows["mass_change"].any()


def test_the_table_is_printed_sorted_and_summarized():
    found = regard.compare(ONE, OTHER)
    top = found.sort("moved").head(2)
    assert top.rows["moved"].tolist() == sorted(found.rows["moved"])[::-1][:2]
    title, names, first, _ = str(top).splitlines()
    assert title == "CausalTransformer: the same 8 tokens"
    assert names.split()[:5] == ["layer", "head", "moved", "moved_most", "moved_at"]
    assert "entropy_change" in names
    row = top.rows[0]
    words = [str(row["layer"]), str(row["head"]), f"{row['moved']:.3f}"]
    assert first.split()[:3] == words
    layers = found.by_layer()
    for layer, row in enumerate(layers.rows):
        mine = found.rows[found.rows["layer"] == layer]
        assert row["moved"] == pytest.approx(mine["moved"].mean())
        assert row["moved_most"] == mine["moved_most"].max()
        assert row["moved_at"] == mine["moved_at"][mine["moved_most"].argmax()]
    assert str(layers).splitlines()[2].split()[:2] == ["0", "all"]
    spans = regard.compare(ONE, OTHER, spans=({"a": (0, 4)}, {"a": (0, 4)}))
    names, first = str(spans).splitlines()[1:3]
    assert names.split()[2:] == ["from_span", "to_span", *comparison.MASS]
    assert first.split()[2:4] == ["a", "a"]
    assert len(spans.by_layer()) == 2


def test_several_sequences_are_compared_one_by_one():
    both, again = see(MODEL, PROMPT, PROMPT[::-1]), see(LATER, PROMPT, PROMPT[::-1])
    found = regard.compare(both, again)
    first = regard.compare(ONE, OTHER).rows["moved"]
    second = regard.compare(see(MODEL, PROMPT[::-1]), see(LATER, PROMPT[::-1])).rows
    apart = np.concatenate([first, second["moved"]])
    assert found.rows["sequence"].tolist() == [0] * 8 + [1] * 8
    assert np.allclose(found.rows["moved"], apart, atol=1e-6)
    assert str(found).splitlines()[1].split()[0] == "sequence"


def test_nan_is_told():
    a, b = record(0)[0], record(1)[0]
    q = b.q.clone()
    q[2, 5] = torch.nan
    found = regard.compare(wrap(a), wrap(Record(**{**vars(b), "q": q})))
    assert np.isnan(found.rows["moved"]).tolist() == [False, False, True, False]
    assert found.rows["moved_at"][2] == 5
    assert "NaN in sequence 0, layer 0, head 2: 1 query" in str(found)


def refuse(error, words, *given, **options):
    with pytest.raises(error) as caught:
        regard.compare(*given, **options)
    assert words in str(caught.value)


def test_what_cannot_be_compared_is_said():
    deep, wide = make_model(0, layers=3), make_model(0, heads=2, kv_heads=2)
    refuse(
        OptionError,
        "one recording has 2 layers and the other 3, expected the same number",
        *(ONE, see(deep, PROMPT)),
    )
    refuse(
        ShapeError,
        "layer 0, blocks.0.attention, has 4 heads in one recording and 2 in the other",
        *(ONE, see(wide, PROMPT)),
    )
    refuse(
        OptionError,
        "one recording has 1 sequences and the other 2",
        *(ONE, see(MODEL, PROMPT, PROMPT)),
    )
    refuse(
        OptionError,
        "the two prompts have no token in common",
        *(ONE, see(MODEL, [20, 21, 22])),
    )
    refuse(
        ShapeError,
        "a has 11 queries and 11 keys in one recording, 6 and 6 in the other, at "
        "positions that do not correspond. Record the same tokens, or write spans=",
        *(wrap(record(0)[0]), wrap(record(1, n=6)[0])),
    )
    refuse(OptionError, "have no layer in common, or are empty", wrap(), wrap())
    refuse(OptionError, "compare() got a CausalTransformer", MODEL, LATER)
    refuse(CallError, "compare() lacks other. Write compare(one, other).", ONE)
    refuse(OptionError, "expected (spans of one, spans of other)", ONE, ONE, spans="a")
    refuse(
        OptionError,
        "the spans have no name in common: a in one, b in the other",
        *(ONE, OTHER),
        spans=({"a": (0, 2)}, {"b": (0, 2)}),
    )
    both = see(MODEL, PROMPT, PROMPT)
    refuse(
        OptionError,
        "spans= is for one sequence in each recording",
        *(both, both),
        spans=({"a": (0, 2)}, {"a": (0, 2)}),
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")
    for name, seen in (("one", ONE), ("other", OTHER)):
        seen.save(folder / f"{name}.regard")
    return folder / "one.regard", folder / "other.regard"


def test_the_command_prints_the_heads_that_changed_most(files, tmp_path):
    path = tmp_path / "all.parquet"
    given = ["compare", *map(str, files), "-n", "3", "--parquet", str(path)]
    done = CliRunner().invoke(main, given, catch_exceptions=False)
    found = regard.compare(*files)
    expected = str(found.sort("moved").head(3))
    assert done.output == f"{expected}\nall 8 rows are in {path}\n"
    table = pq.read_table(path)
    assert tuple(table.column_names) == found.columns
    for name in found.columns:
        column = np.asarray(table[name].to_pylist(), dtype=found.rows[name].dtype)
        kind = found.rows[name].dtype.kind
        assert np.array_equal(column, found.rows[name], equal_nan=kind == "f")


def test_the_command_prints_json_layers_and_errors(files):
    run = CliRunner().invoke
    done = run(main, ["compare", *map(str, files), "--json"], catch_exceptions=False)
    rows = json.loads(done.output)
    assert [x["moved"] for x in rows] == sorted([x["moved"] for x in rows])[::-1]
    done = run(main, ["compare", *map(str, files), "--layers"], catch_exceptions=False)
    assert done.output.splitlines()[2].split()[1] == "all"
    done = run(main, ["compare", *map(str, files), "--sort", "nothing"])
    assert "there is no column 'nothing'" in done.output
    done = run(main, ["compare", "nothing", "nothing"])
    assert "there is no recording nothing" in done.output
