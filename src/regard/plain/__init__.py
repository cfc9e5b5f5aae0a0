"""A transformer in plain NumPy, PyTorch or JAX arrays: the reference for regard.nn.

Next: config.py
"""

from regard.definition.position import rotary, sinusoidal
from regard.plain.config import Config
from regard.plain.decoder import Decoder, init_weights
from regard.plain.feedforward import feed_forward
from regard.plain.layer import block
from regard.plain.linear import Linear
from regard.plain.multihead import multi_head
from regard.plain.norm import layer_norm, rms_norm, softmax
from regard.plain.sample import Sampling

__all__ = [
    "Config",
    "Decoder",
    "Linear",
    "Sampling",
    "block",
    "feed_forward",
    "init_weights",
    "layer_norm",
    "multi_head",
    "rms_norm",
    "rotary",
    "sinusoidal",
    "softmax",
]
