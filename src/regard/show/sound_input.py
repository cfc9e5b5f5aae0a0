"""The sound that a model heard: its spectrogram, its time axis, and the words about it.

    seen.sound(features[0], 30, until=4.5, words=words)       Whisper
    seen.sound(samples, 4.5)                                  wav2vec 2.0, from samples

    key j of the encoder    the time from j · seconds / keys to (j + 1) · seconds / keys

The page shows moments of an encoder on the time axis, tinted by attention, and the
cross-attention of words over the seconds, with the path that aligns them
(sound_path.py).

Next: sound_request.py
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.arrays import is_array, to_numpy
from regard.errors import OptionError, ShapeError
from regard.recording.record import Recording
from regard.show.palette import Numbers

COLUMNS, ROWS = 600, 80  # most pixels of a spectrogram
WINDOW = 0.025  # seconds of a frame of a spectrogram
FLOOR = 1e-4  # of the largest amplitude, -80 dB


def add_sound(
    recording: Recording,
    sound: Any,
    seconds: float,
    *,
    until: float | None,
    words: Sequence[str],
    sequence: int,
) -> Recording:
    """Return a recording with the sound of a sequence, whose keys are moments."""
    keys = int(recording.layer(0, sequence=sequence).k.shape[1])
    note = note_sound(sound, seconds, keys=keys, until=until, words=words)
    sounds = recording.notes.get("sounds", {}) | {str(sequence): note}
    texts = [*recording.texts, *[()] * (sequence + 1 - len(recording.texts))]
    texts[sequence] = name_moments(seconds, keys)
    notes = recording.notes | {"sounds": sounds}
    return replace(recording, notes=notes, texts=tuple(texts))


def note_sound(
    sound: Any,
    seconds: float,
    *,
    keys: int,
    until: float | None = None,
    words: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a sound, ready for JSON.

    sound: (features, frames), a spectrogram, or (samples,) of all `seconds`
    keys: of the encoder, which cover them
    """
    until = seconds if until is None else until
    if not 0 < until <= seconds < math.inf:
        raise OptionError(
            f"seconds={seconds} and until={until}, expected 0 < until <= seconds."
        )
    x = to_numpy(sound) if is_array(sound) else np.asarray(sound)
    if x.ndim not in (1, 2) or not x.size or not np.isfinite(x).all():
        raise ShapeError(
            f"a sound of shape {x.shape}, expected finite numbers of shape (features, "
            "frames) or (samples,): write features[0] for the first of a batch."
        )
    frames = min(keys, math.ceil(until * keys / seconds - 1e-9))
    end = frames * seconds / keys
    x = x.astype(np.float64)
    x = draw_spectrum(x, seconds) if x.ndim == 1 else x
    x = shrink_spectrum(x[:, : max(1, round(end / seconds * x.shape[1]))])
    grey = np.rint(255 * (x - x.min()) / (np.ptp(x) or 1)).astype(np.uint8)
    return {
        "seconds": float(seconds),
        "frames": frames,  # keys that are drawn
        "words": list(map(str, words)),
        "rows": grey.shape[0],
        "columns": grey.shape[1],
        "grey": base64.b64encode(grey.tobytes()).decode(),
    }


def draw_spectrum(samples: Numbers, seconds: float) -> Numbers:
    """Return the log amplitudes of a sound, (frequencies, frames), the lowest first."""
    size = max(2, round(len(samples) * WINDOW / seconds))
    starts = np.linspace(0, max(0, len(samples) - size), COLUMNS).astype(int)
    frames = samples[starts[:, None] + np.minimum(np.arange(size), len(samples) - 1)]
    found = np.abs(np.fft.rfft(frames * np.hanning(size), axis=1)).T
    return np.asarray(np.log10(np.maximum(found, FLOOR * (found.max() or 1.0))))


def shrink_spectrum(x: Numbers) -> Numbers:
    """Return the means of neighbours, at most ROWS × COLUMNS."""
    for axis, most in ((0, ROWS), (1, COLUMNS)):
        n = x.shape[axis]
        edges = np.unique(np.linspace(0, n, min(n, most) + 1).astype(int))[:-1]
        counts = np.diff([*edges, n]).reshape((-1, 1) if axis == 0 else (1, -1))
        x = np.add.reduceat(x, edges, axis=axis) / counts
    return x


def name_moments(seconds: float, keys: int) -> tuple[str, ...]:
    """Return the time at which each key begins."""
    digits = max(0, math.ceil(-math.log10(max(seconds, 1e-9) / keys)))
    return tuple(f"{seconds * j / keys:.{digits}f} s" for j in range(keys))


def find_sounds(recording: Recording) -> dict[str, dict[str, Any]]:
    """Return the sounds that fit their sequences; a file is untrusted."""
    given = recording.notes.get("sounds")
    found = {}
    for sequence, note in given.items() if isinstance(given, dict) else ():
        i = int(sequence) if str(sequence).isdigit() else len(recording.texts)
        keys = len(recording.texts[i]) if i < len(recording.texts) else 0
        match note:
            case {
                "seconds": float(seconds),
                "frames": int(frames),
                "words": list(words),
                "rows": int(rows),
                "columns": int(columns),
                "grey": str(grey),
            } if min(rows, columns, seconds) > 0 and 0 < frames <= keys:
                whole = len(grey) == 4 * -(-rows * columns // 3)
                if whole and all(isinstance(x, str) for x in words):
                    found[str(sequence)] = note
    return found
