"""From tokens to logits

With a block, a language model is short. Look up a vector for each token, add the vector
of its position, run the blocks, normalize, and compare the result with every vector of
the vocabulary:

    x      = embed[tokens] + positions[0 … N-1]      (N, D)
    x      = block(x) for each block, causal
    logits = norm(x) embedᵀ                          (N, V)

The last line uses the same table as the first: the embeddings are tied. Row `n` of the
logits scores every token of the vocabulary as the one that follows token `n`. So token
`n` must not see the tokens after it, or it would read the answer: the causal mask
prevents that. With a vocabulary of 49,152 a row has 49,152 logits.

Write `decoder_logits(tokens, embed, positions, layers)`. `tokens` are integers `(N,)`,
`embed` is `(V, D)`, `positions` is `(P, D)` with `P` at least `N`, `layers` is `(L,
4*D, D)`. The stub has `norm`, and `block(x, layer, mask)` for one layer; `mask` is a
table `(N, N)`, True where a token may attend.

Next: sampling.py
"""

from inspect import getsource

import numpy as np


def norm(x):
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def block(x, layer, mask):
    y, (wq, wk, wv, wo) = norm(x), np.split(layer, 4)
    scores = (y @ wq.T) @ (y @ wk.T).T / np.sqrt(x.shape[1])
    scores = np.where(mask, scores, -np.inf)
    parts = np.exp(scores - scores.max(axis=1, keepdims=True))
    return x + parts / parts.sum(axis=1, keepdims=True) @ (y @ wv.T) @ wo.T


NAME = "decoder_logits"
MINUTES = 15
NEEDS = ("block",)
EXTRA = ""
GIVEN = "\n\n".join(getsource(x) for x in (norm, block))  # in the stub too
STUB = f'''import numpy as np


{GIVEN}

def decoder_logits(tokens, embed, positions, layers):
    """Return the logits (N, V) of the token after each of tokens (N,)."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Five steps: look up, add positions, loop over layers, normalize, multiply.",
    "embed[tokens] looks up all rows at once; positions[: len(tokens)] are the first "
    "N.",
    "mask = np.tri(len(tokens)) > 0; for layer in layers: x = block(x, layer, mask); "
    "then norm(x) @ embed.T.",
)


def spec(tokens, embed, positions, layers):
    logits = np.zeros((len(tokens), len(embed)))
    for n in range(len(tokens)):  # each token from the tokens up to it only
        x = np.zeros((n + 1, embed.shape[1]))
        for m in range(n + 1):
            x[m] = embed[tokens[m]] + positions[m]
        for layer in layers:
            x = block(x, layer, np.tri(n + 1) > 0)
        for token in range(len(embed)):
            logits[n, token] = norm(x[n]) @ embed[token]
    return logits


def reference(tokens, embed, positions, layers):
    x = embed[tokens] + positions[: len(tokens)]
    for layer in layers:
        x = block(x, layer, np.tri(len(tokens)) > 0)
    return norm(x) @ embed.T


def draw(rng):
    sizes = ((1, 3, 4, 1), (2, 3, 4, 1), (3, 5, 4, 2), (5, 4, 6, 2))
    long = ((18, 3, 2, 1), (2, 18, 2, 1), (2, 3, 18, 1), (2, 3, 2, 18))
    for N, V, D, L in (*sizes, *long):
        tokens = rng.permutation(max(N, V))[:N] % V
        weights = ((V, D), (max(N, V) + 3, D), (L, 4 * D, D))
        yield tokens, *(rng.normal(size=shape) for shape in weights)
    for tokens, n in (([1], 1), ([23, 20, 17], 3), ([23, 20, 17], 3)):
        embed, positions = 20 * rng.normal(size=(24, 3)), rng.normal(size=(n, 3)) / 100
        yield np.array(tokens), embed, positions, rng.normal(size=(1, 12, 3))
    tokens = np.array([2, 2, 2])  # differ only in position
    yield tokens, *(rng.normal(size=s) for s in ((4, 4), (6, 4), (1, 16, 4)))


def mistake_no_mask(tokens, embed, positions, layers):
    """A token sees the tokens after it, and so the answer: pass block the causal mask,
    np.tri(N) > 0."""
    x = embed[tokens] + positions[: len(tokens)]
    for layer in layers:
        x = block(x, layer, np.ones((len(x), len(x)), bool))
    return norm(x) @ embed.T


def mistake_no_positions(tokens, embed, positions, layers):
    """The positions are missing: add row n of positions to token n."""
    return reference(tokens, embed, np.zeros_like(positions), layers)


def mistake_positions_of_tokens(tokens, embed, positions, layers):
    """The positions are looked up by token: use positions 0, 1, 2, …, the first N
    rows."""
    return reference(tokens, embed, positions[tokens], layers)


def mistake_no_last_norm(tokens, embed, positions, layers):
    """The norm before the logits is missing: multiply norm(x) by embed.T."""
    x = embed[tokens] + positions[: len(tokens)]
    for layer in layers:
        x = block(x, layer, np.tri(len(x)) > 0)
    return x @ embed.T


def mistake_first_layer_only(tokens, embed, positions, layers):
    """Only one layer is run: each layer processes the output of the previous one."""
    return reference(tokens, embed, positions, layers[:1])


def mistake_no_logits(tokens, embed, positions, layers):
    """These are the vectors of the tokens: multiply them by embed.T, which gives one
    logit for each token of the vocabulary."""
    return predict(tokens, embed, positions, layers)


def predict(tokens, embed, positions, layers):  # the last vectors, for the mistakes
    return norm(run_layers(embed[tokens] + positions[: len(tokens)], layers, SEEN))


SEEN = np.tri(100, dtype=bool)


def run_layers(x, layers, seen):
    for layer in layers:
        x = block(x, layer, seen[: len(x), : len(x)])
    return x


def mistake_probabilities(tokens, embed, positions, layers):
    """These are probabilities: return the logits, before the softmax."""
    parts = np.exp(predict(tokens, embed, positions, layers) @ embed.T)
    return parts / parts.sum(axis=-1, keepdims=True)


def mistake_last_token_only(tokens, embed, positions, layers):
    """Only the logits of the last token are returned: return a row for every token."""
    return predict(tokens, embed, positions, layers)[-1] @ embed.T


def mistake_mask_inverted(tokens, embed, positions, layers):
    """The mask is inverted, and hides the past: True means may attend, as in
    np.tri(N) > 0."""
    x = run_layers(embed[tokens] + positions[: len(tokens)], layers, SEEN.T)
    return norm(x) @ embed.T
