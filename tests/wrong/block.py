import numpy as np


def norm(x):
    rows = [(row - row.mean()) / np.sqrt(row.var() + 1e-5) for row in x]
    return np.array(rows)


def attend(x, qkv, out):
    d = len(out)
    q, k, v = x @ qkv[:d].T, x @ qkv[d : 2 * d].T, x @ qkv[2 * d :].T
    e = np.tril(np.exp(q @ k.T / d**0.5))
    return np.diag(1 / e.sum(1)) @ e @ v @ out.T


def feed(x, up, down):
    return np.maximum(x @ up.T, 0) @ down.T


def as_in_2017(x, qkv, out, up, down):
    """the post-norm order"""
    y = norm(x + attend(x, qkv, out))
    z = y + feed(y, up, down)
    return norm(z)


def raw(x, qkv, out, up, down):
    """There is no norm"""
    y = x + attend(x, qkv, out)
    return y + feed(y, up, down)


def a_chain(x, qkv, out, up, down):
    """The output of a part replaces x"""
    for part in (lambda y: attend(y, qkv, out), lambda y: feed(y, up, down)):
        x = part(norm(x))
    return x


def overwrites_x(x, qkv, out, up, down):
    """keep x for the sum"""
    x = norm(x)
    x = x + attend(x, qkv, out)
    x = norm(x)
    return x + feed(x, up, down)


def parallel(x, qkv, out, up, down):
    """both read the old x"""
    y = norm(x)
    return x + (feed(y, up, down) + attend(y, qkv, out))


def second_norm_forgotten(x, qkv, out, up, down):
    """Only the input of attention is normalized"""
    y = x + attend(norm(x), qkv, out)
    return y + feed(y, up, down)


def adds_the_input_twice(x, qkv, out, up, down):
    """The input is added twice"""
    y = x + attend(norm(x), qkv, out)
    return x + y + feed(norm(y), up, down)
