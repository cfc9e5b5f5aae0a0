"""What each exercise allows as arguments: random calls, larger and wilder than its own.

    for call in draw_calls("softmax", rng, 60): ...

A fault counts if it changes the answer on one of these calls. Sizes go up to 24, beyond
the edges of behaviour.py; values go over several orders of magnitude, as far as the text
of an exercise allows.

Next: trial.py
"""

import math
from functools import cache
from itertools import pairwise

import numpy as np

from regard.learn import practice_models
from regard.learn.exercises import read_head as reading


def draw_calls(name, rng, n):
    """Yield n calls that the text of an exercise allows."""
    for _ in range(n):
        yield CONTRACTS[name](rng)


def size(rng):
    """Draw a size: often small, sometimes beyond 16."""
    return int(rng.choice([1, 1, 2, 2, 3, 4, 5, 7, 9, 12, 17, 20, 24]))


def normal(rng, *shape, spread=(0.05, 1, 1, 2, 5)):
    return rng.normal(size=shape) * rng.choice(spread)


def scale(rng):
    return 10.0 ** rng.integers(-2, 4)


def one_score(rng):
    d = size(rng)
    return normal(rng, d) * scale(rng), normal(rng, d) * scale(rng)


def scores(rng):
    n, m, d = (size(rng) for _ in range(3))
    return normal(rng, n, d) * scale(rng), normal(rng, m, d) * scale(rng)


def softmax(rng):
    n, m = size(rng), size(rng)
    shift = rng.choice([0, 0, 1000, -1000]) + rng.choice([0, 500]) * rng.normal(
        size=(n, 1)
    )
    return (normal(rng, n, m) * rng.choice([1, 1, 300]) + shift,)


def attend(rng):
    n, m, d, e = (size(rng) for _ in range(4))
    q, k = normal(rng, n, d), normal(rng, m, d)
    if rng.random() < 0.3:
        q, k = q + 100 * rng.choice([-1, 1]), k + 100
    return q, k, normal(rng, m, e) * scale(rng)


def causal_mask(rng):
    n = size(rng)
    shift = rng.choice([0, 0, 0, 1000, -1000, -4e9])  # scores of a row differ by < 700
    return (normal(rng, n, n) * rng.choice([1, 20]) + shift,)


def masks(rng):
    (x,) = causal_mask(rng)
    x = x[:, : size(rng)]
    return x, rng.random(x.shape) < rng.choice([0, 0.1, 0.5, 0.9, 1])


def batches(rng):
    lead = tuple(size(rng) for _ in range(rng.integers(0, 3)))
    if lead and math.prod(lead) > 60:
        lead = lead[:1]
    n, m, d, e = (size(rng) for _ in range(4))
    q, k = normal(rng, *lead, n, d), normal(rng, *lead, m, d)
    if rng.random() < 0.3:
        q, k = q + 100 * rng.choice([-1, 1]), k + 100
    return q, k, normal(rng, *lead, m, e) * scale(rng)


def heads_split(rng):
    n, heads, d = (size(rng) for _ in range(3))
    return normal(rng, n, heads * d) * scale(rng), heads


def multi_head(rng):
    n, width, heads, d = size(rng), size(rng), size(rng), int(rng.integers(1, 6))
    x, (wq, wk, wv) = normal(rng, n, width), normal(rng, 3, heads * d, width)
    return x, wq, wk, wv, normal(rng, width, heads * d), heads


def fused_qkv(rng):
    n, width, heads, d = size(rng), size(rng), size(rng), size(rng)
    return normal(rng, n, width) * scale(rng), normal(rng, 3 * heads * d, width), heads


def cross_attention(rng):
    n, m, width, d, dv = (size(rng) for _ in range(5))
    x, context = normal(rng, n, width), normal(rng, m, width)
    wq, wk = normal(rng, 2, d, width)
    return x, context, wq, wk, normal(rng, dv, width)


def sinusoidal(rng):
    return int(rng.integers(1, 60)), 2 * size(rng)


def rotary(rng):
    n, width = size(rng), 2 * size(rng)
    most = int(rng.choice([30, 1000, 100_001]))
    return normal(rng, n, width), rng.integers(most, size=n)


def layer_norm(rng):
    n, width = size(rng), 1 + size(rng)
    x = normal(rng, n, width) * scale(rng) + rng.choice([0, 1, 100, -100])
    weight, bias = normal(rng, 2, width)
    return x, weight, bias, float(10.0 ** rng.integers(-6, 0))


def rms_norm(rng):
    x, weight, _, eps = layer_norm(rng)
    return x, weight, eps


def feed_forward(rng):
    n, width, hidden = (size(rng) for _ in range(3))
    x, up, down = (
        normal(rng, *s) for s in ((n, width), (hidden, width), (width, hidden))
    )
    return x, up, normal(rng, hidden), down, normal(rng, width)


def block(rng):
    n, width, hidden = size(rng), 1 + size(rng), size(rng)
    shapes = ((3 * width, width), (width, width), (hidden, width), (width, hidden))
    return normal(rng, n, width), *(rng.normal(size=s) / 2 for s in shapes)


def decoder_logits(rng):
    n, words, width = size(rng), 1 + size(rng), 1 + size(rng)
    layers = int(rng.choice([1, 2, 3, 5, 18]))
    tokens = rng.integers(words, size=n)
    shapes = ((words, width), (n + int(rng.integers(4)), width))
    shapes = (*shapes, (layers, 4 * width, width))
    return tokens, *(rng.normal(size=s) / 2 for s in shapes)


def sampling(rng):
    words = 1 + size(rng)
    logits = rng.permutation(words) * rng.choice([0.1, 1, 20]) + rng.random()
    logits = logits - rng.choice([0, 0, 5, 1000]) + rng.choice([0, 0, 500])
    return logits, float(rng.choice([0, 0.1, 0.7, 1, 3])), size(rng)


def kv_cache(rng):
    tokens, d, dv = rng.choice([0, size(rng)]), size(rng), size(rng)
    q, k = normal(rng, 2, d)
    keys, values = normal(rng, tokens, d), normal(rng, tokens, dv) * scale(rng)
    return q, k, normal(rng, dv), keys, values


def online_softmax(rng):
    dv, inf = size(rng), math.inf
    top, score = normal(rng, 2) * rng.choice([1, 10, 300])
    total, mix = 1 + 5 * rng.random(), normal(rng, dv) * scale(rng)
    kind = rng.integers(6)
    if kind == 0:
        top, total, mix = -inf, 0.0, 0 * mix
    if kind in (1, 2):
        score = -inf
    if kind == 2:
        top, total, mix = -inf, 0.0, 0 * mix
    return float(top), float(total), mix, float(score), normal(rng, dv)


def merge_parts(rng):
    n, dv = size(rng), size(rng)
    outs = normal(rng, 2, n, dv) * scale(rng)
    lses = normal(rng, 2, n) * rng.choice([1, 10]) + rng.choice([0, 0, 1000, -1000])
    blind = rng.random((2, n)) < rng.choice([0, 0.3])
    outs[blind], lses[blind] = 0, -np.inf
    return outs[0], lses[0], outs[1], lses[1]


def grouped_heads(rng):
    shared, group = size(rng), int(rng.choice([1, 2, 3, 8]))
    n, m, d, dv = (size(rng) for _ in range(4))
    q, k = normal(rng, shared * group, n, d), normal(rng, shared, m, d)
    return q, k, normal(rng, shared, m, dv) * scale(rng)


def mask_algebra(rng):
    n = size(rng) + 1
    start, end = sorted(rng.choice(n + 1, size=2, replace=False))
    documents = np.sort(rng.integers(-1, 5, size=n))
    if rng.random() < 0.5:
        documents = rng.permutation(documents)
    left, first = int(rng.integers(n + 1)), int(rng.choice([0, 1, 2, 5, 20]))
    return np.arange(start, end)[:, None], np.arange(n)[None], documents, left, first


def copy_task(rng):
    words = int(rng.choice([3, 9, 100]))
    questions = rng.integers(words, size=(size(rng), size(rng)))
    return questions, words


def draw_tokens(rng):
    n = size(rng) + 2
    tokens = rng.integers(rng.choice([2, 4, 60]), size=n)
    tokens[rng.integers(1, n)] = tokens[0]  # at least one comes twice
    return tokens


def induction_head(rng):
    tokens = draw_tokens(rng)
    n = len(tokens)
    parts = np.tril(np.exp(normal(rng, n, n)))
    return parts / parts.sum(axis=1, keepdims=True), tokens


def without_the_matrix(rng):
    tokens, d = draw_tokens(rng), size(rng)
    n = len(tokens)
    q, k = normal(rng, n, d), normal(rng, n, d)
    scores = np.where(np.tri(n) > 0, q @ k.T / math.sqrt(d), -np.inf)
    return q, k, np.logaddexp.reduce(scores, axis=1), tokens


def draw_tiles(rng, n):
    firsts = rng.integers(60, size=n)
    return firsts, firsts + rng.integers(rng.choice([1, 3, 20]), size=n)


def tile_proofs(rng):
    q_first, q_last = (x[:, None] for x in draw_tiles(rng, size(rng)))
    k_first, k_last = (x[None] for x in draw_tiles(rng, size(rng)))
    chunk, back = int(rng.choice([1, 2, 3, 5, 18])), int(rng.choice([0, 0, 1, 2, 5]))
    return q_first, q_last, k_first, k_last, chunk, back


def ring(rng):
    n, m, d, dv = (size(rng) for _ in range(4))
    q, k, v = normal(rng, n, d), normal(rng, m, d), normal(rng, m, dv) * scale(rng)
    out, lse = normal(rng, n, dv), normal(rng, n) + rng.choice([0, 0, 300, -300])
    blind = rng.random(n) < rng.choice([0, 0.3, 1])
    out[blind], lse[blind] = 0, -np.inf
    q_start, k_start = (int(x) for x in rng.integers(24, size=2))
    return q, k, v, out, lse, q_start, k_start


def row_entropy(rng):
    n, d = size(rng), size(rng)
    return normal(rng, n, d), normal(rng, n, d) * rng.choice([1, 10])


@cache
def make_head_model(seed):
    layers, heads = ((1, 2), (2, 3), (3, 3), (2, 4))[seed % 4]
    place = divmod(seed % (layers * heads), heads)
    return reading.make_model(layers, heads, place, seed)


def read_head(rng):
    model = make_head_model(int(rng.integers(12)))
    return model, rng.integers(9, size=2 + size(rng))


@cache
def make_random_model(seed):
    layers, heads = ((1, 1), (2, 2), (2, 3), (3, 4))[seed % 4]
    return practice_models.make_decoder(layers, heads, seed)


def ablate_head(rng):
    model = make_random_model(int(rng.integers(12)))
    layer, head = rng.integers([model.config.layers, model.config.heads]).tolist()
    return model, rng.integers(9, size=1 + size(rng)), layer, head


def find_document(rng):
    n, n_answer = int(rng.integers(8, 24)), int(rng.integers(1, 6))
    borders = np.sort(rng.choice(n - n_answer, size=3, replace=False))
    model, spans = make_random_model(int(rng.integers(12))), [*pairwise(borders)]
    return model, rng.integers(9, size=n), np.array(spans), n_answer


CONTRACTS = {
    fn.__name__: fn
    for fn in (
        *(one_score, scores, softmax, scores, attend, causal_mask, masks, batches),
        *(heads_split, multi_head, fused_qkv, cross_attention, sinusoidal, rotary),
        *(layer_norm, rms_norm, feed_forward, block, decoder_logits, sampling),
        *(kv_cache, online_softmax, merge_parts, grouped_heads, mask_algebra),
        *(copy_task, induction_head, without_the_matrix, tile_proofs, ring),
        *(row_entropy, read_head, ablate_head, find_document),
    )
} | {"scaling": scores}
