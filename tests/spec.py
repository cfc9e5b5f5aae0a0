"""Attention as plain loops over numbers: slow, independent, obviously right.

Nothing here is shared with the library. Heads are (H, N, D), one batch at a time.
"""

import math

import numpy as np


def attend_by_loops(
    q, k, v, allowed=None, bias=None, scale=None, softcap=None, sink=None
):
    """Return out (H, Nq, Dv), lse (H, Nq) and weights (H, Nq, Nk)."""
    n_heads, n_q, width = q.shape
    n_shared, n_k, _ = k.shape
    scale = 1 / math.sqrt(width) if scale is None else scale
    out = np.zeros((n_heads, n_q, v.shape[-1]))
    lse = np.full((n_heads, n_q), -math.inf)
    weights = np.zeros((n_heads, n_q, n_k))
    for h in range(n_heads):
        shared = h // (n_heads // n_shared)
        for i in range(n_q):
            seen = [j for j in range(n_k) if allowed is None or allowed[h, i, j]]
            logits = {}
            for j in seen:
                score = scale * math.fsum(
                    float(q[h, i, d]) * float(k[shared, j, d]) for d in range(width)
                )
                if softcap is not None:
                    score = softcap * math.tanh(score / softcap)
                logits[j] = score + (0.0 if bias is None else float(bias[h, i, j]))
            extra = [] if sink is None else [float(sink[h])]
            if not logits and not extra:
                continue
            top = max([*logits.values(), *extra])
            total = math.fsum(math.exp(x - top) for x in [*logits.values(), *extra])
            lse[h, i] = top + math.log(total)
            for j in seen:
                weights[h, i, j] = math.exp(logits[j] - top) / total
                out[h, i] += weights[h, i, j] * v[shared, j]
    return out, lse, weights
