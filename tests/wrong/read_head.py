import numpy as np
import torch

import regard


def look(model, tokens):
    with torch.inference_mode(), regard.watch(model) as seen:
        model(torch.tensor(tokens)[None])
    return seen.weights().numpy()


def largest(scores):
    layer, head = divmod(int(np.argmax(scores)), scores.shape[1])
    return layer, head, scores[layer, head]


def attends_to_itself(model, tokens):
    """This is the weight of each token on itself"""
    return largest(np.einsum("lhii->lh", look(model, tokens)) / len(tokens))


def counts_the_first(model, tokens):
    """The first query is counted"""
    weights, n = look(model, tokens), len(tokens)
    rows = np.arange(1, n)
    return largest(weights[:, :, rows, rows - 1].sum(-1) / n)


def head_first(model, tokens):
    """Layer and head are swapped"""
    rows = np.arange(1, len(tokens))
    layer, head, score = largest(look(model, tokens)[:, :, rows, rows - 1].mean(-1))
    return head, layer, score


def one_large_weight(model, tokens):
    """take the mean over its queries"""
    rows = np.arange(1, len(tokens))
    return largest(look(model, tokens)[:, :, rows, rows - 1].max(-1))


def the_next_token(model, tokens):
    """Rows and columns are swapped"""
    rows = np.arange(1, len(tokens))
    return largest(look(model, tokens)[:, :, rows - 1, rows].mean(-1))


def inside_of_the_with(model, tokens):
    """find_head raised OptionError in line"""
    with torch.inference_mode(), regard.watch(model) as seen:
        model(torch.tensor(tokens)[None])
        weights = seen.weights()
    return largest(weights.numpy()[:, :, 1:, 0].mean(-1))


def no_score(model, tokens):
    """it returned 2 values, expected 3"""
    rows = np.arange(1, len(tokens))
    return largest(look(model, tokens)[:, :, rows, rows - 1].mean(-1))[:2]


def always_the_first_column(model, tokens):
    """This is the weight on the first token of the text"""
    return largest(look(model, tokens)[:, :, 1:, 0].mean(-1))
