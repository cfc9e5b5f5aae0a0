"""The path that aligns words with the time of a sound.

    z[i, j] = (w[i, j] - mean over words) / (standard deviation over words)
    path    = the cells from (first word, first key) to (last word, last key), each step
              to the next word, the next key or both, with the largest sum of z
              (dynamic time warping; Whisper's timestamps standardise each head
              before the mean, and use a median filter)

    find_times(weights)     of each word the first and the last key of the path

With z instead of w, whose cells are all positive, a longer path is no better.

assets/sound_path.js is the same in the page.

Next: figures/sound_map.py
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from regard.show.palette import Numbers

BOTH, WORD, KEY = 0, 1, 2  # what a step went on by


def find_times(weights: Numbers) -> NDArray[np.int64]:
    """Return the first and the last key of each word on the path, (words, 2)."""
    n, m = weights.shape
    spread = weights.std(0)
    z = (weights - weights.mean(0)) / np.where(spread > 0, spread, 1.0)
    total = np.full((n + 1, m + 1), -np.inf)
    total[0, 0] = 0.0
    steps = np.zeros((n, m), np.int8)
    for i in range(n):
        for j in range(m):
            ways = total[i, j], total[i, j + 1], total[i + 1, j]
            step = max((BOTH, WORD, KEY), key=ways.__getitem__)  # the first, if equal
            steps[i, j], total[i + 1, j + 1] = step, ways[step] + z[i, j]
    times = np.zeros((n, 2), np.int64)
    i, j = n - 1, m - 1
    times[i, 1] = j
    while True:
        times[i, 0] = j
        step = steps[i, j]
        if (i, j) == (0, 0):
            return times
        j -= step != WORD
        if step != KEY:
            i -= 1
            times[i, 1] = j
