# %% [markdown]
# # 14. One attention, two processes
#
# The keys of a long text may be spread over several machines. Attention over them is
# still exact, because its parts merge: attention over *some* of the keys is a pair
# (out, lse), and the pairs over disjoint keys combine to the pair over all.
#
#     lse = log(exp(lse_a) + exp(lse_b))
#     out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

# %%
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import regard

rng = np.random.default_rng(0)
q, k, v = rng.normal(size=(3, 15, 4))
whole = regard.attention(q, k, v)
early = regard.attention(q, k[:9], v[:9])
late = regard.attention(q, k[9:], v[9:])
out, lse = regard.merge((early.out, early.lse), (late.out, late.lse))
assert np.allclose(out, whole.out)
assert np.allclose(lse, whole.lse)

# %% [markdown]
# The mean of the two outputs is something else, because it forgets how much weight each
# part has. That is what lse is for:

# %%
mean = (early.out + late.out) / 2
print(f"merged: off by {np.abs(out - whole.out).max():.0e}")
print(f"mean:   off by {np.abs(mean - whole.out).max():.2f}")
assert np.abs(mean - whole.out).max() > 0.05

# %% [markdown]
# ## The ring
#
# Each process keeps its own queries. The keys and values go around, and each process
# merges what comes by:
#
#     process 0    q of 0 … 8     own k, v    then those of process 1
#     process 1    q of 9 … 14    own k, v    then those of process 0
#
# A causal mask compares positions in the *whole* text, so each shard says where it
# begins. All keys of process 1 are in the future of process 0: that part has out = 0
# and lse = -inf, and merging it changes nothing.

# %%
nothing = regard.attention(q[:9], k[9:], v[9:], np.zeros((9, 6), dtype=bool))
assert (nothing.lse == -np.inf).all()
first = regard.attention(q[:9], k[:9], v[:9], regard.causal())
same, _ = regard.merge((first.out, first.lse), (nothing.out, nothing.lse))
assert np.array_equal(same, first.out)

# %% [markdown]
# ## Two real processes
#
# The program below is one rank. It reads its shard from a file, sends its keys and
# values to the other through a pipe, and writes its rows. Two copies of it run at the
# same time.

# %%
RANK = """
import os, pickle, sys
import numpy as np, regard

rank, inbox, outbox, folder = int(sys.argv[1]), *map(int, sys.argv[2:4]), sys.argv[4]
start = (0, 9)[rank]
q, k, v = np.load(f"{folder}/{rank}.npy")
with open(outbox, "wb") as pipe:
    pickle.dump((k, v, start), pipe)
with open(inbox, "rb") as pipe:
    visitor = pickle.load(pipe)
parts = []
for keys, values, first in ((k, v, start), visitor):
    rows, columns = start + np.arange(len(q)), first + np.arange(len(keys))
    part = regard.attention(q, keys, values, columns <= rows[:, None])
    parts.append((part.out, part.lse))
np.save(f"{folder}/out{rank}.npy", regard.merge(*parts)[0])
"""

with TemporaryDirectory() as folder:
    for rank, rows in enumerate((slice(9), slice(9, 15))):
        np.save(Path(folder, f"{rank}.npy"), np.stack([q[rows], k[rows], v[rows]]))
    (to_0, from_1), (to_1, from_0) = os.pipe(), os.pipe()
    ranks = [
        subprocess.Popen(  # noqa: S603 (our own interpreter)
            [sys.executable, "-c", RANK, str(rank), *map(str, ends), folder],
            pass_fds=ends,
        )
        for rank, ends in enumerate(((to_0, from_0), (to_1, from_1)))
    ]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    rows = [np.load(Path(folder, f"out{rank}.npy")) for rank in (0, 1)]
right = regard.attention(q, k, v, regard.causal()).out
print(f"two processes: off by {np.abs(np.concatenate(rows) - right).max():.0e}")
assert np.allclose(np.concatenate(rows), right)

# %% [markdown]
# `regard.engine.ring` does this over `torch.distributed`, with gradients.
#
# Exercises (`regard learn`): `ring`.
