"""A made-up attention library: its kernel is NumPy, into which no observer of torch sees.

Its conventions are its own: keys and values come first, tokens before heads, heads of
queries share those of keys, the scale is called temperature, the causal flag is aligned
at the end, and what hides a cell is a number that is added.
"""

import numpy as np
import torch
from torch import nn


def run_kernel(keys, values, queries, *, causal, temperature, added=None):
    """Return attention over arrays (B, N, H, D), computed by NumPy."""
    k, v, q = (x.detach().numpy() for x in (keys, values, queries))
    share = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, share, axis=2) for x in (k, v))
    scores = np.einsum("bihd,bjhd->bhij", q, k) / temperature
    if added is not None:
        scores = scores + added.numpy()
    if causal:
        late = np.triu(np.ones(scores.shape[2:], bool), 1 + k.shape[1] - q.shape[1])
        scores = np.where(late, -np.inf, scores)
    top = np.maximum(scores.max(-1, keepdims=True), -1e300)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    return torch.from_numpy(np.einsum("bhij,bjhd->bihd", weights, v))


class Layer(nn.Module):
    """Grouped attention with a cache of keys and values."""

    def __init__(self, width, heads, kv_heads, *, causal):
        super().__init__()
        self.sizes, self.causal = (heads, kv_heads, width // heads), causal
        self.project = nn.Linear(width, (heads + 2 * kv_heads) * (width // heads))
        self.join = nn.Linear(width, width)

    def forward(self, x, cache=None):
        heads, kv_heads, d = self.sizes
        parts = self.project(x).split([heads * d, kv_heads * d, kv_heads * d], -1)
        q, k, v = (x.unflatten(-1, (-1, d)) for x in parts)
        if cache is not None:
            k, v = (torch.cat(pair, 1) for pair in zip(cache, (k, v), strict=True))
        out = run_kernel(k, v, q, causal=self.causal, temperature=d**0.5)
        return self.join(out.flatten(2)), (k, v)


class Decoder(nn.Module):
    """A small decoder with `generate`."""

    def __init__(self, *, layers=2, heads=4, kv_heads=2, width=32, causal=True):
        super().__init__()
        self.embed, self.place = nn.Embedding(40, width), nn.Embedding(64, width)
        self.layers = nn.ModuleList(
            Layer(width, heads, kv_heads, causal=causal) for _ in range(layers)
        )
        self.gate = nn.Linear(width, 2)  # a softmax that is no attention
        self.read = nn.Linear(width, 40)

    def forward(self, tokens, caches=None):
        start = 0 if caches is None else caches[0][0].shape[1]
        x = self.embed(tokens)
        x = x + self.place(torch.arange(start, start + tokens.shape[1]))
        new = []
        for i, layer in enumerate(self.layers):
            out, cache = layer(x, None if caches is None else caches[i])
            x = x + out * self.gate(x).softmax(-1)[..., :1]
            new.append(cache)
        return self.read(x), new

    def generate(self, tokens, n):
        """Return the tokens and n more, the likeliest ones."""
        given, caches = tokens, None
        for _ in range(n):
            logits, caches = self(given, caches)
            given = logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, given], 1)
        return tokens
