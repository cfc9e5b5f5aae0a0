"""A ring of two processes

A text that is too long for one machine is distributed: each process holds the queries,
keys and values of its own tokens. The keys and values travel around the ring; each
process attends to every shard that comes by, and keeps only its `out` and `lse`.

    process 0      q of 0 … 8     its own k, v     then those of process 1
    process 1      q of 9 … 14    its own k, v     then those of process 0

The result is exact, whatever the order: attention over a part of the keys is a pair
`(out, lse)`, and `regard.merge((out, lse), (more_out, more_lse))` is the pair over both
parts. At the start, `out` is 0 and `lse` is -inf: no keys yet.

The mask is causal, over positions in the whole text. The first query of a process is at
`q_start`, the first key of the visiting shard at `k_start`. A shard may be in the
future of all queries; then nothing changes. Numbers can be huge: no overflow, no NaN.

Write `ring_step(q, k, v, out, lse, q_start, k_start)`: the tuple `out, lse` after one
more shard. `q` is `(N, d)`, `k` is `(M, d)`, `v` is `(M, dv)`, `out` is `(N, dv)`,
`lse` is `(N,)`.

When it is right, two real processes run it, with a pipe between them, and must find
what one process finds.

Next: row_entropy.py
"""

import itertools
import math
import sys
import time

import numpy as np

from regard.definition.attention import attention
from regard.definition.blocked import merge
from regard.masks.patterns import causal

NAME = "ring_step"
MINUTES = 20
NEEDS = ("merge_parts",)
EXTRA = ""
STUB = '''import numpy as np

from regard import attention, merge


def ring_step(q, k, v, out, lse, q_start, k_start):
    """Return out (N, dv) and lse (N,) after the visiting shard k, v."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Two lines: attention of q over the visiting shard alone, then merge.",
    "attention(q, k, v, allowed) returns .out and .lse; allowed is a boolean table "
    "(N, M), and a row without a True has out 0 and lse -inf.",
    "allowed = k_start + np.arange(len(k)) <= q_start + np.arange(len(q))[:, None]",
)
SECONDS = 5  # for both processes


def spec(q, k, v, out, lse, q_start, k_start):
    new_out, new_lse = np.array(out, float), np.array(lse, float)
    for i in range(len(q)):
        seen = [j for j in range(len(k)) if k_start + j <= q_start + i]
        scores = [float(q[i] @ k[j]) / math.sqrt(q.shape[1]) for j in seen]
        top = max([*scores, lse[i]])
        if top == -math.inf:  # no key yet
            continue
        parts = [math.exp(score - top) for score in scores]
        old = math.exp(lse[i] - top)
        total = sum(parts) + old
        new_lse[i] = top + math.log(total)
        mix = old * out[i]
        for part, j in zip(parts, seen, strict=True):
            mix = mix + part * v[j]
        new_out[i] = mix / total
    return new_out, new_lse


def reference(q, k, v, out, lse, q_start, k_start):
    rows, keys = q_start + np.arange(len(q)), k_start + np.arange(len(k))
    part = attention(q, k, v, keys <= rows[:, None])
    return merge((out, lse), (part.out, part.lse))


def draw(rng):
    for n, m, d, q_start, k_start, old in (
        (1, 1, 1, 0, 0, False),
        (2, 2, 2, 0, 0, False),
        (2, 3, 2, 3, 0, True),
        (3, 2, 2, 0, 3, True),
        (3, 2, 4, 0, 3, False),
        (4, 5, 3, 6, 5, True),
        (5, 4, 2, 5, 7, True),
        (18, 3, 2, 4, 2, True),
        (3, 18, 5, 20, 4, True),
        (2, 2, 18, 1, 0, True),
        (18, 18, 3, 100, 95, True),
    ):
        yield make_call(rng, n, m, d, q_start, k_start, old)
    for size in (30, 1e4):
        q, k, v, out, lse, *starts = make_call(rng, 4, 6, 3, 6, 3)
        yield q * size, k, v, out, lse, *starts
        yield q / size, k * size, v, out, lse, *starts
        yield q, k, v * size, out, lse, *starts
        yield q, k, v, out * size, lse, *starts
        yield q, k, v, out, lse + size, *starts
        yield q, k, v, out, lse - size, *starts
    q, k, v, out, lse, *starts = make_call(rng, 9, 5, 2, 3, 4)
    yield q, k, v, out, lse / 100, *starts
    yield q, k, v[:, :1], out[:, :1], lse, *starts


def make_call(rng, n, m, d, q_start, k_start, old=1):
    q, k = rng.normal(size=(n, d)), rng.normal(size=(m, d))
    v, out = rng.normal(size=(m, d + 1)), rng.normal(size=(n, d + 1))
    lse = rng.normal(size=n)
    if not old:
        out, lse = 0 * out, np.full(n, -np.inf)
    return q, k, v, out, lse, q_start, k_start


def run_rank(fn, mine, start, ring, home):
    """Run one process: attend to its own shard, pass it on, attend to the other."""
    q, k, v = mine
    out, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), -np.inf)
    shard = k, v, start
    for _ in range(2):
        out, lse = fn(q, *shard[:2], out, lse, start, shard[2])
        ring.send(shard)
        shard = ring.recv()
    home.send((np.asarray(out), np.asarray(lse)))


def run_ring(fn, shards, starts):
    """Return what each process finds; None for one that ended or took too long."""
    import multiprocessing  # a browser has no processes
    from multiprocessing.connection import wait

    context = multiprocessing.get_context("fork")  # fn need not be importable
    ring, homes = context.Pipe(), [context.Pipe() for _ in shards]
    ranks = [
        context.Process(target=run_rank, args=(fn, *given, home), daemon=True)
        for given, (_, home) in zip(
            zip(shards, starts, ring, strict=True), homes, strict=True
        )
    ]
    for rank in ranks:
        rank.start()
    found, until = [], time.monotonic() + SECONDS
    for rank, (home, _) in zip(ranks, homes, strict=True):
        wait([home, rank.sentinel], max(0, until - time.monotonic()))
        found.append(home.recv() if home.poll() else None)
        until = until if found[-1] else 0  # then the other waits in vain
    for rank in ranks:
        rank.kill()
        rank.join()
    for end in (*ring, *itertools.chain(*homes)):
        end.close()
    return found


def check(fn, rng):
    """Run the step in two processes, joined by a pipe, and compare with one."""
    if sys.platform in ("emscripten", "win32"):
        print("There are no forked processes here: the ring was not run.")  # noqa: T201
        return None
    (q, k), v = rng.normal(size=(2, 15, 4)), rng.normal(size=(15, 3))
    shards = [[x[at] for x in (q, k, v)] for at in (slice(9), slice(9, 15))]
    found = run_ring(fn, shards, (0, 9))
    if any(x is None for x in found):
        return f"A process of the ring stopped, or took more than {SECONDS} seconds."
    right = attention(q, k, v, causal())
    apart = max(
        np.abs(np.concatenate(parts) - x).max()
        for parts, x in zip(
            zip(*found, strict=True), (right.out, right.lse), strict=True
        )
    )
    if not apart < 1e-9:
        return f"Over two processes it differs from one by {apart:.1e}."
    print(  # noqa: T201 (shown to the learner)
        f"Two processes with 9 and 6 tokens find what one finds, up to {apart:.0e}."
    )
    return None


def mistake_forgets(q, k, v, out, lse, q_start, k_start):
    """This is attention over the visiting shard only: merge it with the out and lse of
    the shards before."""
    return reference(q, k, v, 0 * out, np.full(len(q), -np.inf), q_start, k_start)


def mistake_local_positions(q, k, v, out, lse, q_start, k_start):
    """Positions are counted within the shards: the first query is at q_start and the
    first key at k_start of the whole text."""
    return reference(q, k, v, out, lse, 0, 0)


def mistake_not_causal(q, k, v, out, lse, q_start, k_start):
    """Queries see keys in their future: allow the keys at positions up to the query's
    own, in the whole text."""
    return reference(q, k, v, out, lse, len(k) + k_start, k_start)


def mistake_mean(q, k, v, out, lse, q_start, k_start):
    """Both parts have the same weight: multiply each by exp(its lse - lse of both), or
    call merge."""
    empty = np.full(len(q), -np.inf)
    part = reference(q, k, v, 0 * out, empty, q_start, k_start)
    return (out + part[0]) / 2, np.logaddexp(lse, part[1])


def mistake_added(q, k, v, out, lse, q_start, k_start):
    """The two outs are added, but each is an average over its own keys: they need the
    factors exp(its lse - lse of both). merge does that."""
    empty = np.full(len(q), -np.inf)
    part = reference(q, k, v, 0 * out, empty, q_start, k_start)
    return out + part[0], np.logaddexp(lse, part[1])


def mistake_overflow(q, k, v, out, lse, q_start, k_start):
    """A sum of exponentials overflows, or is 0, and the division gives NaN: work with
    lse, and subtract the larger one before exp. merge does that."""
    with np.errstate(all="ignore"):
        rows, keys = q_start + np.arange(len(q)), k_start + np.arange(len(k))
        scores = q @ k.T / np.sqrt(q.shape[1])
        parts = np.where(keys <= rows[:, None], np.exp(scores), 0)
        old = np.exp(lse)[:, None]
        total = old + parts.sum(axis=1, keepdims=True)
        return (old * out + parts @ v) / total, np.log(total)[:, 0]
