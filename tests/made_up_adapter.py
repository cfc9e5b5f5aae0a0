"""The adapter of the made-up library, as its users would write it."""

import math

import made_up_library
import torch

from regard.lens.adapters import Adapter
from regard.lens.captured_call import CapturedCall


def describe(result, keys, values, queries, *, causal, temperature, added=None):
    """Return a call as the lens records it: (B, H, N, D), causal from the first key."""
    q, k, v = (x.transpose(1, 2) for x in (queries, keys, values))
    n_q, n_k = q.shape[2], k.shape[2]
    mask = added
    if causal and n_q != n_k:
        late = torch.ones(n_q, n_k, dtype=torch.bool).triu(1 + n_k - n_q)
        mask = (0 if mask is None else mask) + torch.where(late, -math.inf, 0.0)
        mask = mask.expand(1, 1, n_q, n_k) if mask.ndim < 4 else mask
    return CapturedCall(
        q=q,
        k=k,
        v=v,
        out=None if result is None else result.transpose(1, 2),
        scale=1 / temperature,
        mask=mask,
        causal=causal and n_q == n_k,
    )


def run(original, edit, keys, values, queries, *, added=None, **options):
    """Run a call without some cells and heads."""
    if edit.cells is not None:
        hidden = torch.where(edit.cells, -math.inf, 0.0)
        added = hidden if added is None else added + hidden
    out = original(keys, values, queries, added=added, **options)
    return edit.clear(out.transpose(1, 2)).transpose(1, 2)


MADE_UP = Adapter(
    name="made_up",
    find=lambda _model: [(made_up_library, "run_kernel")],
    describe=describe,
    run=run,
    v=True,
    out=True,
)
