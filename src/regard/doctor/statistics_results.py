"""Check statistics of a recording against sums over the dense weights, in float64.

    weights = attention(q, k, causal())        the definition, on the CPU
    entropy = -Σ w log2 w,   distance = Σ w (i - j),   received_j = Σ_i w,   …

The model is one of ours, so that this check needs only torch. Its length is not a
multiple of a tile.

Next: memory_and_time.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.arrays import to_numpy
from regard.definition.attention import attention
from regard.doctor.examined import Trial, judge_error
from regard.masks.patterns import causal
from regard.nn.decoder import CausalTransformer
from regard.plain.config import Config
from regard.recording.record import Record
from regard.seen import Seen, watch
from regard.stats.columns import received
from regard.stats.registry import NEAR

STATISTICS = "statistics agree with the definition"
N_TOKENS = 300
STATISTIC_ERROR = 1e-5  # of the largest value that a statistic can have
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


def define_weights(record: Record) -> Tensor:
    """Return the weights (H, N, N) of a causal record, from q and k alone."""
    q, k = (torch.from_numpy(to_numpy(x)).double() for x in (record.q, record.k))
    done = attention(q, k, k, causal(), scale=record.scale, q_start=0, see=["weights"])
    return done.weights


def sum_weights(weights: Tensor) -> dict[str, tuple[Tensor, float]]:
    """Return each statistic of each head, (H,), and the largest value it can have."""
    n = weights.shape[-1]
    i, j = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    bits = -torch.xlogy(weights, weights).sum(-1) / torch.log(torch.tensor(2.0))
    back = (weights * (i - j)).sum(-1)
    near = (weights * (i - j < NEAR)).sum(-1)
    return {
        "entropy": (bits.mean(-1), torch.log2(torch.tensor(n)).item()),
        "sink": (weights[:, :, 0].mean(-1), 1),
        "previous": (weights.diagonal(-1, -2, -1).mean(-1), 1),
        "self": (weights.diagonal(0, -2, -1).mean(-1), 1),
        "local": (near.mean(-1), 1),
        "distance": (back.mean(-1), n),
    }


def check_recorded_statistics(device: torch.device) -> Iterator[Trial]:
    """Compare the table of a recording, and the mass that each key receives."""
    seen = record_model(device)
    table = seen.table()
    errors: dict[str, float] = {}
    for layer, record in enumerate(seen.recording.records):
        weights = define_weights(record)
        mine = table[[x["layer"] == layer for x in table]]
        for name, (right, largest) in sum_weights(weights).items():
            apart = torch.tensor(mine[name].copy()).double() - right
            note_error(errors, name, apart / largest)
        got = torch.from_numpy(to_numpy(received(record).values)).double()
        note_error(errors, "received", (got - weights.sum(-2)) / N_TOKENS)
    for name, error in errors.items():
        yield judge_error(Trial(STATISTICS, name, str(device)), error, STATISTIC_ERROR)


def note_error(errors: dict[str, float], name: str, apart: Tensor) -> None:
    """Keep the largest error of a statistic; NaN counts as infinite."""
    error = float(apart.abs().nan_to_num(torch.inf).max())
    errors[name] = max(errors.get(name, 0.0), error)
