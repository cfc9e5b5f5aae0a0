"""Check every statistic of the registry on a device against float64 on the CPU.

    record    q and k on the device, lse of the kernel that ran there
    right     the same q and k in float64 on the CPU, lse of the definition

The model is one of ours, so that this check needs only torch. Its length is not a
multiple of a tile.

Next: memory_and_time.py
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from regard.arrays import to_numpy
from regard.definition.attention import attention
from regard.doctor.examined import Trial, judge_error
from regard.masks.patterns import causal
from regard.nn.decoder import CausalTransformer
from regard.plain.config import Config
from regard.recording.record import Record
from regard.seen import Seen, watch
from regard.stats.columns import received

STATISTICS = "statistics agree with the definition"
N_TOKENS = 300
STATISTIC_ERROR = 1e-5  # of the largest value of a statistic, if it is above 1
RECORDED = Config(
    vocabulary=64,
    context=512,
    width=64,
    layers=2,
    heads=4,
    kv_heads=2,
    position="rotary",
)


def record_model(device: torch.device) -> Seen:
    """Record a small random model on a device."""
    torch.manual_seed(0)
    model = CausalTransformer(RECORDED).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape), alpha=0.1)
    tokens = torch.randint(0, RECORDED.vocabulary, (1, N_TOKENS))
    model, tokens = model.to(device), tokens.to(device)
    with watch(model) as seen, torch.no_grad():
        model(tokens)
    return seen


def define_record(record: Record) -> Record:
    """Return a causal record in float64 on the CPU, with the lse of the definition."""
    q, k, q_at, k_at = (
        torch.from_numpy(to_numpy(x))
        for x in (record.q, record.k, record.q_positions, record.k_positions)
    )
    q, k, scale = q.double(), k.double(), record.scale
    lse = attention(q, k, k, causal(), scale=scale, q_start=0).lse
    return replace(
        record, q=q, k=k, lse=lse, q_positions=q_at, k_positions=k_at, mask=causal()
    )


def check_recorded_statistics(device: torch.device) -> Iterator[Trial]:
    """Compare the table of a recording, and the mass that each key receives."""
    recording = record_model(device).recording
    records = tuple(map(define_record, recording.records))
    right = Seen(replace(recording, records=records))
    errors: dict[str, float] = {}
    with warnings.catch_warnings():  # the verdict says it
        warnings.filterwarnings("ignore", message=".*do not sum to 1")
        table, expected = Seen(recording).table(), right.table()
        for name in table.statistics:
            note_error(errors, name, table[name], expected[name])
        for record, other in zip(recording.records, records, strict=True):
            mass, whole = (to_numpy(received(x).values) for x in (record, other))
            note_error(errors, "received", mass, whole)
    for name, error in errors.items():
        yield judge_error(Trial(STATISTICS, name, str(device)), error, STATISTIC_ERROR)


def note_error(errors: dict[str, float], name: str, found: Any, right: Any) -> None:
    """Keep the largest error of a statistic, relative to its largest value.

    A head without a value is right if it has none in float64 either.
    """
    x, y = (torch.tensor(part.copy(), dtype=torch.float64) for part in (found, right))
    size = max(1.0, float(y.abs().nan_to_num().max()))
    apart = torch.where(x.isnan() & y.isnan(), 0.0, (x - y).abs() / size)
    error = float(apart.nan_to_num(torch.inf).max())
    errors[name] = max(errors.get(name, 0.0), error)
