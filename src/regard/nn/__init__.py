"""Transformer models as torch modules: training, loading weights, generation.

Next: attention.py
"""

from regard.nn.attention import MultiHeadAttention
from regard.nn.block import TransformerBlock
from regard.nn.decoder import CausalTransformer
from regard.nn.generation import generate
from regard.plain.config import Config

__all__ = [
    "CausalTransformer",
    "Config",
    "MultiHeadAttention",
    "TransformerBlock",
    "generate",
]
