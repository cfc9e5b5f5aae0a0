"""Prototype: a new mask, checked against loops and the definition, then timed.

    python examples/variant.py          needs: pip install "regard[torch]"

The idea: attend to the first token and the last 512, and skip those in between (Xiao et
al. 2023, "attention sinks"). Look at the mask first, then at the errors, which should
be rounding, then at the times: with the length, full causal attention grows
quadratically, and this mask does not. Write your own idea into `make_mask`.
"""

import time

import numpy as np
import torch

import regard
from regard.engine import attend, choose
from regard.masks import keys
from regard.masks.algebra import Mask
from regard.show.terminal_map import draw_mask


def make_mask(near: int) -> Mask:
    """Return a mask that allows the first key and the last `near` ones."""
    return regard.causal() & (regard.window(near - 1) | keys(0, 1))


def by_hand(q: np.ndarray, k: np.ndarray, v: np.ndarray, near: int) -> np.ndarray:
    """Compute the idea with loops over queries, as an independent check."""
    out = np.zeros_like(v)
    for i in range(len(q)):
        may = [j for j in range(i + 1) if j == 0 or j > i - near]
        weights = np.exp(k[may] @ q[i] / q.shape[1] ** 0.5)
        out[i] = weights @ v[may] / weights.sum()
    return out


def main() -> None:
    """Compare three implementations, and time the last one."""
    print(draw_mask(make_mask(4), 10))
    q, k, v = np.random.default_rng(0).normal(size=(3, 100, 16))
    slow = regard.attention(q, k, v, make_mask(4))
    error = np.abs(slow.out - by_hand(q, k, v, 4)).max()
    print(f"definition against the loops: {error:.0e}")
    arrays = torch.tensor(np.stack([q, k, v]))[:, None, None]  # (3, B, H, N, D)
    error = np.abs(attend(*arrays, make_mask(4)).out[0, 0].numpy() - slow.out).max()
    print(f"kernel against the definition: {error:.0e}")
    for n in (4096, 8192, 16_384):
        arrays, took = torch.randn(3, 1, 2, n, 64), []
        for mask in (regard.causal(), make_mask(512)):
            start = time.perf_counter()
            attend(*arrays, mask)
            took.append(1e3 * (time.perf_counter() - start))
        print(f"{n:6} tokens: causal {took[0]:6.0f} ms, the idea {took[1]:6.0f} ms")
    print(choose(*arrays, make_mask(512)))


if __name__ == "__main__":
    main()
