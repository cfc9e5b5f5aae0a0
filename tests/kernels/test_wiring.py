"""Statistics and tables take the kernels where these can run, and their numbers are the same."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attention_cases import draw_case

import regard
from regard import masks, stats
from regard.arrays import to_numpy
from regard.kernels import available, run_kernels
from regard.recording.record import Record, Recording
from regard.stats.cells import induction, offset
from regard.stats.columns import mean_received, received
from regard.stats.plan import make_plan
from regard.stats.rows import ask_entropy, ask_mass, ask_span_mass
from regard.stats.table import make_table

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
TOKENS = tuple(i % 7 for i in range(700))
SPANS = [(i, i + 5) for i in range(0, 55, 5)]  # more than fit in one pass

STATISTICS = {
    "mass": lambda x: stats.mass(x, np.arange(x.k.shape[1])[:, None] % 3 == 0),
    "span_mass": lambda x: stats.span_mass(x, SPANS),
    "entropy": stats.entropy,
    "mean_distance": stats.mean_distance,
    "masked_mass": lambda x: stats.masked_mass(x, masks.window(20)),
    "offset": lambda x: offset(x, 1),
    "induction": lambda x: induction(x, TOKENS),
    "received": received,
    "received from some": lambda x: received(x, rows=slice(-9, None)),
    "features received": lambda x: received(
        x, np.arange(2.0 * x.q.shape[1]).reshape(-1, 2)
    ),
    "mean_received": mean_received,
}


@pytest.fixture
def count_passes(monkeypatch):
    """Return the list of the kernels that ran."""
    ran, launch = [], run_kernels.launch

    def note(kernel, *rest):
        ran.append(kernel.__name__)
        launch(kernel, *rest)

    monkeypatch.setattr(run_kernels, "launch", note)
    return ran


def compute_both(monkeypatch, compute, record):
    """Return a statistic by the kernels, and by the engine."""
    found = compute(record)
    with monkeypatch.context() as other:
        other.setattr(available, "DEVICES", ("cuda",))
        return found, compute(record)


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize(
    ("mask", "dtype"),
    [
        ("causal", torch.bfloat16),
        ("documents", torch.float32),
        ("array per head", torch.float16),
        ("per head", torch.float32),
    ],
    ids=str,
)
def test_every_statistic_is_that_of_the_engine(
    name, mask, dtype, count_passes, monkeypatch
):
    record = draw_case(3, mask, dtype).record
    found, expected = compute_both(monkeypatch, STATISTICS[name], record)
    assert count_passes
    assert found.axes == expected.axes
    np.testing.assert_allclose(
        to_numpy(found.values), to_numpy(expected.values), rtol=1e-4, atol=1e-4
    )


def test_rows_without_weights_are_nan_as_with_the_engine(monkeypatch):
    (record,) = make_recording(90).records
    q, k, lse = record.q.clone(), record.k.clone(), record.lse.clone()
    q[0, 0, 0], k[1, 80, 3], lse[1, 70] = math.inf, math.nan, math.nan
    record = replace(record, q=q, k=k, lse=lse)
    for name, compute in STATISTICS.items():
        found, expected = compute_both(monkeypatch, compute, record)
        lost = [np.isnan(to_numpy(x.values)) for x in (found, expected)]
        np.testing.assert_array_equal(*lost, err_msg=name)


def make_recording(n=150):
    make = torch.Generator().manual_seed(0)
    q, k = (torch.randn(h, n, 32, generator=make) for h in (4, 2))
    done = regard.attention(q, k, k, masks.causal(), scale=0.3)
    at = torch.arange(n)
    places = {"q_positions": at, "k_positions": at, "mask": masks.causal()}
    record = Record(name="layer", q=q, k=k, lse=done.lse, scale=0.3, **places)
    return Recording(
        model="Tiny", records=(record,), sequences=(0,), tokens=(TOKENS[:n],)
    )


def test_a_full_table_takes_two_passes_and_is_that_of_the_engine(
    count_passes, monkeypatch
):
    recording = make_recording()
    found, expected = compute_both(monkeypatch, make_table, recording)
    assert (
        count_passes == ["summarize_queries"] * 2
    )  # all cells; those of the last 64 tokens
    for name in found.statistics:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-4)


def test_a_watched_model_gets_its_table_from_the_kernels(count_passes):
    torch.manual_seed(0)
    model, x = (
        torch.nn.MultiheadAttention(32, 2, batch_first=True),
        torch.randn(1, 9, 32),
    )
    with torch.no_grad(), regard.watch(model) as seen:
        model(x, x, x)
    assert len(seen.table()) == 2
    assert count_passes


def test_features_fill_as_few_passes_as_they_can(count_passes):
    (record,) = make_recording().records
    make = torch.Generator().manual_seed(0)
    own, shared = (torch.rand(h, 150, 1, generator=make) for h in (4, 2))
    plan = make_plan(
        {
            "entropy": ask_entropy(record),
            "spans": ask_span_mass(record, SPANS),
            "own": ask_mass(record, own),
            "shared": ask_mass(record, shared),
        }
    )
    found = plan.run()
    assert len(count_passes) == 2  # 14 columns, 8 in a pass
    weights = record.weights()
    expected = {
        "own": weights @ own,
        "shared": weights @ shared.repeat_interleave(2, 0),
        "spans": torch.stack([weights[..., i:j].sum(-1) for i, j in SPANS], -1),
    }
    for name, values in expected.items():
        np.testing.assert_allclose(found[name].values, values, atol=1e-5)


@pytest.mark.parametrize(
    ("capability", "runs"), [((7, 5), False), ((8, 0), True), ((10, 0), True)]
)
def test_older_gpus_keep_the_engine(capability, runs, monkeypatch):
    """A stand-in for a tensor: there is no GPU here."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    q = SimpleNamespace(device=torch.device("cuda", 0))
    assert available.is_supported(q) is runs
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert available.is_supported(q)


def test_the_rule_that_decides_where_the_kernels_run(monkeypatch):
    q = torch.zeros(2, 3, 16)
    assert available.can_run(q, q)
    assert not available.can_run(q.numpy(), q.numpy())
    assert not available.can_run(q.double(), q.double())
    assert not available.can_run(q.half(), q)
    assert not available.can_run(torch.zeros(2, 3, 257), torch.zeros(2, 3, 257))
    assert not available.can_run(q.clone().requires_grad_(), q)
    monkeypatch.setattr(available, "find_spec", lambda name: None)
    assert not available.can_run(q, q)
    monkeypatch.undo()
    assert not available.can_run(q, q)  # on the CPU, outside of these tests
