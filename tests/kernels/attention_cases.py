"""Random attention of every kind the kernels know, and its statistics by the definition."""

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import regard
from regard import masks
from regard.recording.record import Record

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEADS = ((1, 1), (1, 1), (2, 1), (2, 2), (4, 2))
WIDTHS = (16, 24, 32, 64, 80, 128, 200, 256)
# tiles are 128 x 64, 128 x 32 or 64 x 32
LENGTHS = (
    (1, 1),
    (1, 150),
    (7, 7),
    (128, 64),
    (64, 128),
    (129, 65),
    (40, 90),
    (90, 40),
)
OPTIONS = ("plain", "plain", "softcap", "sink", "bias", "hiding bias", "everything")
PLACES = ("from zero", "last rows", "shifted", "gaps")
FAR = 700  # above every position


def name_masks(heads):
    """Return every kind of mask, by name."""
    rng = np.random.default_rng(1)
    documents = np.sort(rng.integers(0, 9, FAR))
    steps = [masks.window(4 + 9 * h, h) for h in range(heads)]
    return {
        "none": None,
        "everything": masks.everything(),
        "causal": masks.causal(),
        "not causal": ~masks.causal(),
        "window": masks.window(5),
        "two-sided window": masks.window(70, 3),
        "keys": masks.keys(3, 40),
        "prefix": masks.prefix(30),
        "documents": masks.causal() & masks.same(documents),
        "scattered ids": masks.same(rng.integers(0, 3, FAR)),
        "or": masks.window(3) | masks.keys(0, 4),
        "every third": masks.where(lambda b, h, q, k: (q + 2 * k) % 3 == 0),
        "nothing": masks.keys(0, 0),
        "per head": masks.per_head(steps),
        "array": "shared",
        "array per head": "own",
    }


@dataclass(frozen=True)
class Truth:
    """The weights and logits of the definition in float64, (H, Nq, Nk)."""

    weights: Any
    logits: Any

    @property
    def entropy(self):
        return -torch.xlogy(self.weights, self.weights).sum(-1)


@dataclass(frozen=True)
class Case:
    """One record, what is asked of it, and the truth."""

    record: Record
    truth: Truth
    key_features: torch.Tensor
    query_features: torch.Tensor
    targets: torch.Tensor
    top: int


def draw_positions(place, n_q, n_k, rng):
    """Return the positions of queries and keys."""
    q, k = torch.arange(n_q), torch.arange(n_k)
    if place == "last rows":
        return q + max(0, n_k - n_q), k
    if place == "shifted":
        return q + 9, k + 7
    if place == "gaps":
        return 2 * q + 1, torch.tensor(sorted(rng.sample(range(2 * n_k + 2), n_k)))
    return q, k


def draw_case(seed, mask_name, dtype):
    """Return a case; the seed decides heads, widths, lengths, positions and options."""
    rng = random.Random(f"{seed} {mask_name} {dtype}")
    make = torch.Generator().manual_seed(rng.randrange(2**31))
    (heads, shared), width = rng.choice(HEADS), rng.choice(WIDTHS)
    if dtype == torch.float32 and rng.random() < 0.8:  # many small products: slow
        width = min(width, 32)
    (n_q, n_k), option = rng.choice(LENGTHS), rng.choice(OPTIONS)
    q_at, k_at = draw_positions(rng.choice(PLACES), n_q, n_k, rng)

    def normal(*shape):
        return torch.randn(shape, generator=make, dtype=torch.float64)

    q, k = normal(heads, n_q, width).to(dtype), normal(shared, n_k, width).to(dtype)
    if rng.random() < 0.5:  # as a model has them: heads are not the first axis
        q = q.transpose(0, 1).contiguous().transpose(0, 1)
    mask = name_masks(heads)[mask_name]
    if isinstance(mask, str):
        lead = 1 if mask == "shared" else heads
        mask = allowed = torch.rand(lead, n_q, n_k, generator=make) < 0.4
    elif mask is not None:
        at = torch.arange(heads)[:, None, None]
        allowed = mask.place(q)(0 * at, at, q_at[:, None], k_at)
        allowed = torch.broadcast_to(allowed, (heads, n_q, n_k))
    else:
        allowed = None
    options = {"scale": width**-0.5 * rng.choice((1.0, 2.0))}
    if option in ("softcap", "everything"):
        options["softcap"] = rng.choice((1.5, 30.0))
    if option in ("sink", "everything"):
        options["sink"] = normal(heads)
    if "bias" in option or option == "everything":
        bias = normal(rng.choice((1, heads)), n_q, n_k).to(dtype)
        if option == "hiding bias":
            bias[..., ::3] = -math.inf
        options["bias"] = bias
    truth, lse = compute_truth(q, k, allowed, options)
    record = Record(
        name="layer",
        q=q,
        k=k,
        lse=lse.float(),
        q_positions=q_at,
        k_positions=k_at,
        mask=mask,
        **options,
    )
    targets = torch.randint(-1, n_k, (n_q, rng.choice((1, 2, 3))), generator=make)
    n_features = rng.choice((1, 2, 3, 8))
    return Case(
        record=record,
        truth=truth,
        key_features=normal(rng.choice((1, shared, heads)), n_k, n_features),
        query_features=normal(rng.choice((1, heads)), n_q, n_features),
        targets=targets,
        top=rng.choice((0, 0, 0, 0, 3)),
    )


def compute_truth(q, k, allowed, options):
    """Return the weights and the lse of the definition."""
    wide = {
        name: x.double() if isinstance(x, torch.Tensor) else x
        for name, x in options.items()
    }
    if allowed is not None:
        wide["mask"] = allowed
    done = regard.attention(
        q.double(), k.double(), k.double(), **wide, see=("weights", "logits")
    )
    return Truth(done.weights, done.logits), done.lse
