"""Random configurations of a causal transformer, and weights far from their start."""

import numpy as np

from regard.plain.config import Config
from regard.plain.decoder import init_weights


def draw_config(seed):
    """Return a small config in which every option takes each of its values somewhere."""
    rng = np.random.default_rng(seed)
    heads = int(rng.integers(1, 7))
    shared = [n for n in range(1, heads + 1) if heads % n == 0]
    return Config(
        vocabulary=40,
        context=24,
        width=int(rng.choice([16, 24, 30])),
        layers=int(rng.integers(1, 4)),
        heads=heads,
        kv_heads=int(rng.choice(shared)),
        head_width=int(rng.choice([4, 6, 8])),
        hidden=int(rng.integers(8, 50)),
        activation=str(rng.choice(["relu", "gelu", "gelu_tanh", "swiglu"])),
        norm=str(rng.choice(["layer", "rms"])),
        norm_first=bool(rng.integers(2)),
        position=str(rng.choice(["learned", "sinusoidal", "rotary", "none"])),
        base=float(rng.choice([100, 10_000])),
        bias=bool(rng.integers(2)),
        qkv_bias=[None, True, False][rng.integers(3)],
        qk_norm=bool(rng.integers(2)),
        window=[None, 1, 3, 7][rng.integers(4)],
        tied=bool(rng.integers(2)),
    )


def draw_trained(config, seed):
    """Return weights in float64 that use every bias and norm, as trained ones do."""
    rng = np.random.default_rng(seed)
    weights = init_weights(config, seed)
    return {n: w + 0.2 * rng.normal(size=w.shape) for n, w in weights.items()}
