import numpy as np


def norm(x):
    return np.array([(row - row.mean()) / np.sqrt(row.var() + 1e-5) for row in x])


def layer_of(x, layer, ahead=False):
    q, k, v, out = np.split(layer, 4)
    y = norm(x)
    scores = (y @ q.T) @ (y @ k.T).T / np.sqrt(y.shape[1])
    if not ahead:
        scores = np.where(np.tri(len(x)) > 0, scores, -np.inf)
    e = np.exp(scores - scores.max(1, keepdims=True))
    return x + e / e.sum(1, keepdims=True) @ (y @ v.T) @ out.T


def sees_everything(tokens, embed, positions, layers):
    """A token sees the tokens after it, and so the answer"""
    x = embed[tokens] + positions[: tokens.size]
    for layer in layers:
        x = layer_of(x, layer, ahead=True)
    return norm(x) @ embed.T


def a_bag_of_tokens(tokens, embed, positions, layers):
    """The positions are missing"""
    x = np.array([embed[token] for token in tokens])
    for layer in layers:
        x = layer_of(x, layer)
    return norm(x) @ embed.T


def both_looked_up(tokens, embed, positions, layers):
    """The positions are looked up by token"""
    x = np.array([embed[token] + positions[token] for token in tokens])
    for layer in layers:
        x = layer_of(x, layer)
    return norm(x) @ embed.T


def unnormed(tokens, embed, positions, layers):
    """The norm before the logits is missing"""
    x = embed[tokens] + positions[: tokens.size]
    for layer in layers:
        x = layer_of(x, layer)
    return np.dot(x, embed.T)


def forgets_the_loop(tokens, embed, positions, layers):
    """Only one layer is run"""
    x = layer_of(embed[tokens] + positions[: tokens.size], layers[0])
    return norm(x) @ embed.T


def stops_before_the_vocabulary(tokens, embed, positions, layers):
    """These are the vectors of the tokens"""
    x = embed[tokens] + positions[: tokens.size]
    for layer in layers:
        x = layer_of(x, layer)
    return norm(x)
