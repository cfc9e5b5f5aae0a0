import numpy as np


def find(tokens):
    pairs, last = [], {}
    for i, token in enumerate(tokens.tolist()):
        if token in last:
            pairs.append((i, last[token] + 1))
        last[token] = i
    return pairs


def unscaled(q, k, lse, tokens):
    """The scale is missing"""
    return np.mean([np.exp(q[i] @ k[j] - lse[i]) for i, j in find(tokens)])


def exponentials(q, k, lse, tokens):
    """These are exponentials of scores, not weights"""
    scale = q.shape[1] ** -0.5
    return np.mean([np.exp(q[i] @ k[j] * scale) for i, j in find(tokens)])


def over_lse(q, k, lse, tokens):
    """lse is the logarithm of the sum"""
    scale = q.shape[1] ** -0.5
    return np.mean([np.exp(q[i] @ k[j] * scale) / abs(lse[i]) for i, j in find(tokens)])


def on_the_token(q, k, lse, tokens):
    """read the key after it"""
    scale = q.shape[1] ** -0.5
    return np.mean([np.exp(q[i] @ k[j - 1] * scale - lse[i]) for i, j in find(tokens)])


def over_all(q, k, lse, tokens):
    """The sum is divided by the number of all queries"""
    scale = q.shape[1] ** -0.5
    found = [np.exp(q[i] @ k[j] * scale - lse[i]) for i, j in find(tokens)]
    return sum(found) / len(tokens)


def the_whole_square(q, k, lse, tokens):
    """enough for a table of N × N"""
    weights = np.exp(q @ k.T / q.shape[1] ** 0.5 - lse[:, None])
    return np.mean([weights[i, j] for i, j in find(tokens)])


def lse_of_the_key(q, k, lse, tokens):
    """The lse of the key is subtracted"""
    scale = q.shape[1] ** -0.5
    return np.mean([np.exp(q[i] @ k[j] * scale - lse[j]) for i, j in find(tokens)])


def one_table(q, k, lse, tokens):
    """enough for a table of N × N"""
    same, found = tokens[:, None] == tokens, []
    for i in range(len(tokens)):
        earlier = np.flatnonzero(same[i, :i])
        if len(earlier):
            score = q[i] @ k[earlier[-1] + 1] / q.shape[1] ** 0.5
            found.append(np.exp(score - lse[i]))
    return np.mean(found)
