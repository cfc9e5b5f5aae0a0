import numpy as np


def turn(a, b, t):
    return a * np.cos(t) - b * np.sin(t), a * np.sin(t) + b * np.cos(t)


def speeds(d):
    return 10_000.0 ** (-2 * np.arange(d // 2) / d)


def even_and_odd(x, positions):
    """This pairs neighbours, 2i and 2i + 1"""
    out = np.empty_like(x)
    t = np.outer(positions, speeds(x.shape[1]))
    out[:, ::2], out[:, 1::2] = turn(x[:, ::2], x[:, 1::2], t)
    return out


def plus_and_minus(x, positions):
    """The pairs are rotated in the wrong direction"""
    half = x.shape[1] // 2
    a, b, t = x[:, :half], x[:, half:], np.outer(positions, speeds(2 * half))
    return np.hstack([a * np.cos(t) + b * np.sin(t), b * np.cos(t) - a * np.sin(t)])


def enumerates(x, positions):
    """The rows are counted from 0 and the argument positions is not used"""
    half = x.shape[1] // 2
    t = np.array([n * speeds(2 * half) for n in range(x.shape[0])])
    return np.hstack(turn(x[:, :half], x[:, half:], t))


def all_alike(x, positions):
    """All pairs are rotated by the same angle"""
    half = x.shape[1] // 2
    return np.hstack(turn(x[:, :half], x[:, half:], positions.reshape(-1, 1)))


def forgets_the_two(x, positions):
    """the exponent of pair i is 2i / D"""
    half = x.shape[1] // 2
    t = np.outer(positions, 10_000.0 ** (-np.arange(half) / (2 * half)))
    return np.hstack(turn(x[:, :half], x[:, half:], t))


def adds_the_position(x, positions):
    """Sines of the position are added to x"""
    return x + np.hstack([np.sin(np.outer(positions, speeds(x.shape[1])))] * 2)
