import numpy as np


def share(z):
    e = np.exp(z - np.max(z))
    return e / e.sum()


def best(logits):
    p = np.zeros(logits.size)
    p[np.argmax(logits)] = 1
    return p


def keep(z, k):
    out = np.full(z.size, -np.inf)
    top = np.argsort(z)[::-1][:k]
    out[top] = z[top]
    return out


def times(logits, temperature, top_k):
    """The logits are multiplied by the temperature"""
    return share(keep(logits * temperature, top_k))


def after_the_softmax(logits, temperature, top_k):
    """where it cancels"""
    if temperature == 0:
        return best(logits)
    p = share(keep(logits, top_k)) / temperature
    return p / np.sum(p)


def cut_chances(logits, temperature, top_k):
    """do not sum to 1"""
    if temperature == 0:
        return best(logits)
    p = share(logits / temperature)
    p[np.argsort(-p)[top_k:]] = 0
    return p


def zeros_for_the_rest(logits, temperature, top_k):
    """set them to -inf"""
    if temperature == 0:
        return best(logits)
    z = keep(logits / temperature, top_k)
    z[np.isinf(z)] = 0
    return share(z)


def the_wrong_end(logits, temperature, top_k):
    """keep the k largest"""
    if temperature == 0:
        return best(logits)
    z = logits / temperature
    z[np.argsort(z)[top_k:]] = -np.inf
    return share(z)


def zero_is_no_temperature(logits, temperature, top_k):
    """it means greedy"""
    z = logits if temperature == 0 else logits / temperature
    return share(keep(z, top_k))


def divides_by_zero(logits, temperature, top_k):
    """Temperature 0 is divided by"""
    return share(keep(np.array([z / temperature for z in logits.tolist()]), top_k))


def ignores_top_k(logits, temperature, top_k):
    """top_k is not used"""
    return best(logits) if temperature == 0 else share(logits / temperature)


def k_too_large(logits, temperature, top_k):
    """top_k may be larger than the number of logits"""
    if temperature == 0:
        return best(logits)
    z = logits / temperature
    return share(np.where(z < np.sort(z)[::-1][top_k - 1], -np.inf, z))
