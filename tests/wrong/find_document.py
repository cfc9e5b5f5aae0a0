import numpy as np
import torch

import regard


def log_p(model, tokens, n_answer, shift=1):
    at = np.arange(len(tokens) - n_answer, len(tokens))
    with torch.inference_mode():
        said = model(torch.tensor(tokens)[None])[0].log_softmax(-1)
    return float(said[at - shift, tokens[at]].sum())


def hide(model, tokens, spans, n_answer, **options):
    found = []
    for start, stop in spans:
        with regard.knock_out(model, keys=range(start, stop)):
            found.append(log_p(model, tokens, n_answer, **options))
    return np.array(found)


def a_fall_is_negative(model, tokens, spans, n_answer):
    """a document that helps has a positive effect"""
    whole = log_p(model, tokens, n_answer)
    return hide(model, tokens, spans, n_answer) - whole


def own_rows(model, tokens, spans, n_answer):
    """The rows are one too late"""
    whole = log_p(model, tokens, n_answer, shift=0)
    return whole - hide(model, tokens, spans, n_answer, shift=0)


def one_token(model, tokens, spans, n_answer):
    """Only the last token of the answer is counted"""
    return log_p(model, tokens, 1) - hide(model, tokens, spans, 1)


def per_token(model, tokens, spans, n_answer):
    """This is the mean over the tokens of the answer"""
    whole = log_p(model, tokens, n_answer)
    return (whole - hide(model, tokens, spans, n_answer)) / n_answer


def probabilities(model, tokens, spans, n_answer):
    """This is a difference of probabilities"""
    whole = np.exp(log_p(model, tokens, n_answer))
    return whole - np.exp(hide(model, tokens, spans, n_answer))


def cut_out(model, tokens, spans, n_answer):
    """The document is deleted"""
    whole, found = log_p(model, tokens, n_answer), []
    for start, stop in spans:
        rest = np.concatenate([tokens[:start], tokens[stop:]])
        found.append(whole - log_p(model, rest, n_answer))
    return np.array(found)


def not_compared(model, tokens, spans, n_answer):
    """subtract it from log p with all of them"""
    return hide(model, tokens, spans, n_answer)


def attention_instead(model, tokens, spans, n_answer):
    """This is the attention on each document"""
    with torch.inference_mode(), regard.watch(model) as seen:
        model(torch.tensor(tokens)[None])
    rows = seen.weights().numpy().mean((0, 1))[-n_answer - 1 : -1]
    return np.array([rows[:, a:b].sum(-1).mean() for a, b in spans])


def only_the_best(model, tokens, spans, n_answer):
    """has shape"""
    whole = log_p(model, tokens, n_answer)
    return (whole - hide(model, tokens, spans, n_answer)).argmax()
