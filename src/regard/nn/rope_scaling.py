"""Rotary positions stretched to a longer context, as settings of files describe it.

    angle[p, i] = p / (base^(2i/d) stretch[i])          cos and sin are times gain

    linear    stretch = factor
    llama3    1 for short waves, factor for long ones, between them a smooth step
    yarn      the same with a ramp over i, and gain = 0.1 log(factor) + 1
    dynamic   1 up to the context length, which is all that a Config allows

L is the context length before the stretching. A wave of i is 2π base^(2i/d) long.

Next: gguf_file.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.errors import FileError
from regard.plain.config import Config

Numbers = NDArray[np.float64]
LENGTH = "original_max_position_embeddings"
NEEDED = {  # numbers that a kind of scaling needs
    "default": (),
    "dynamic": ("factor",),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", LENGTH),
    "yarn": ("factor", LENGTH),
}
ALLOWED = {  # and those that it may have
    "dynamic": (LENGTH,),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
}
WIDEST = 2**16  # of a head
ALWAYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "truncate")


def stretch_rotary(config: Config, rope: Mapping[str, Any]) -> Config:
    """Return a config with the rotary scaling of rope_parameters or rope_scaling."""
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    numbers = read_scaling_numbers(kind, {LENGTH: config.context, **rope})
    if kind in ("default", "dynamic"):
        return config
    if config.head > WIDEST or config.base <= 1:
        raise FileError(
            f"rope_type={kind!r} with heads of width {config.head} and a base of "
            f"{config.base:g}, expected at most {WIDEST}, and more than 1."
        )
    factor, old = numbers["factor"], numbers.get(LENGTH, 1.0)
    waves = config.base ** (np.arange(0, config.head, 2) / config.head)
    if kind == "linear":
        return replace(config, stretch=(factor,) * len(waves))
    if kind == "llama3":
        low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
        short = step_by_wavelength(2 * math.pi * waves, old, low, high)
    else:
        fast, slow = numbers.get("beta_fast", 32.0), numbers.get("beta_slow", 1.0)
        whole = rope.get("truncate", True) is not False
        short = ramp_by_index(config, old, fast, slow, whole=whole)
    stretch = 1 / (short + (1 - short) / factor)
    gain = find_gain(factor, numbers) if kind == "yarn" else 1.0
    return replace(config, stretch=tuple(map(float, stretch)), gain=gain)


def read_scaling_numbers(kind: str, rope: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a scaling; raise if it is unknown, or one is missing."""
    if kind not in NEEDED:
        known = ", ".join(map(repr, NEEDED))
        raise FileError(f"rope_type={kind!r:.80}, expected one of {known}.")
    needed, allowed = NEEDED[kind], ALLOWED.get(kind, ())
    strange = [x for x in rope if x not in (*needed, *allowed, *ALWAYS, LENGTH)]
    if strange:
        raise FileError(
            f"rope_type={kind!r} with {strange[0]}={rope[strange[0]]!r:.80}, which is "
            "not supported."
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise FileError(
            f"partial_rotary_factor={rope['partial_rotary_factor']!r:.80}, but only "
            "1.0 is supported."
        )
    given = {x: rope.get(x) for x in needed}
    given |= {x: rope[x] for x in allowed if rope.get(x) is not None}
    for name, x in given.items():
        if not isinstance(x, int | float) or not 0 < x < math.inf:
            raise FileError(
                f"rope_type={kind!r} with {name}={x!r:.80}, expected a positive number."
            )
    return {name: float(x) for name, x in given.items() if x is not None}


def step_by_wavelength(waves: Numbers, old: float, low: float, high: float) -> Numbers:
    """Return 1 for waves shorter than L/high, 0 for those longer than L/low."""
    if high <= low:
        raise FileError(
            f"low_freq_factor={low:g} and high_freq_factor={high:g}, expected the "
            "second to be larger."
        )
    found: Numbers = np.clip((old / waves - low) / (high - low), 0, 1)
    return found


def ramp_by_index(
    config: Config, old: float, fast: float, slow: float, *, whole: bool
) -> Numbers:
    """Return 1 for waves that turn `fast` times or more in L, 0 for `slow` or less."""
    d, log = config.head, math.log(config.base)
    low, high = (
        d * math.log(old / (turns * 2 * math.pi)) / (2 * log) for turns in (fast, slow)
    )
    if whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    high += 0.001 * (low == high)
    found: Numbers = 1 - np.clip((np.arange(d // 2) - low) / (high - low), 0, 1)
    return found


def find_gain(factor: float, numbers: Mapping[str, float]) -> float:
    """Return what yarn multiplies cosines and sines with."""

    def grow(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    scales = [numbers.get(x) for x in ("mscale", "mscale_all_dim")]
    if "attention_factor" in numbers:
        return numbers["attention_factor"]
    if scales[0] and scales[1]:
        return grow(scales[0]) / grow(scales[1])
    return grow(1.0)
