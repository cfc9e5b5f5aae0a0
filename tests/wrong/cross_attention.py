import numpy as np


def look(q, k, v):
    scores = q @ k.T / q.shape[1] ** 0.5
    e = np.exp(scores - scores.max(1, keepdims=True))
    return (e / e.sum(1, keepdims=True)) @ v


def swapped_weights(x, context, wq, wk, wv):
    """wq belongs to x, wk to context"""
    queries, keys = np.dot(x, wk.T), np.dot(context, wq.T)
    return look(queries, keys, context @ wv.T)


def wrong_way_round(x, context, wq, wk, wv):
    """Here the context attends to x"""
    x, context = context, x
    return look(x @ wq.T, context @ wk.T, context @ wv.T)


def self_attention(x, context, wq, wk, wv):
    """This attends to x and not to the context"""
    return look(x @ wq.T, x @ wk.T, x @ wv.T)


def keys_of_x(x, context, wq, wk, wv):
    """but the keys from x"""
    return look(x @ wq.T, x @ wk.T, context @ wv.T)


def values_of_x(x, context, wq, wk, wv):
    """The values come from x"""
    return look(x @ wq.T, context @ wk.T, x @ wv.T)


def no_softmax(x, context, wq, wk, wv):
    """The scores are used as weights"""
    return x @ wq.T @ (context @ wk.T).T / wq.shape[0] ** 0.5 @ (context @ wv.T)
