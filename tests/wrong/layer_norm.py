import numpy as np


def columns(x, weight, bias, eps):
    """taken over the tokens"""
    centred = x - np.mean(x, 0)
    return weight * centred / np.sqrt(np.mean(centred**2, 0) + eps) + bias


def sample_variance(x, weight, bias, eps):
    """divided by D - 1"""
    centred = x - x.mean(1)[:, None]
    var = (centred**2).sum(1)[:, None] / (x.shape[1] - 1)
    return weight * centred / (var + eps) ** 0.5 + bias


def std_and_eps(x, weight, bias, eps):
    """eps is added to the standard deviation"""
    rows = [(row - row.mean()) / (row.std() + eps) for row in x]
    return np.array(rows) * weight + bias


def by_the_variance(x, weight, bias, eps):
    """divide by its square root"""
    rows = [(row - row.mean()) / (row.var() + eps) for row in x]
    return np.array(rows) * weight + bias


def bias_inside(x, weight, bias, eps):
    """The bias is added before multiplying by the weight"""
    rows = [(row - row.mean()) / np.sqrt(row.var() + eps) for row in x]
    return weight * (np.array(rows) + bias)


def ignores_eps(x, weight, bias, eps):
    """eps is not used"""
    with np.errstate(all="ignore"):
        rows = [(row - row.mean()) / row.std() for row in x]
    return np.array(rows) * weight + bias


def ignores_weight_and_bias(x, weight, bias, eps):
    """Weight and bias are not used"""
    return (x - x.mean(1)[:, None]) / np.sqrt(x.var(1)[:, None] + eps)


def in_place(x, weight, bias, eps):
    """layer_norm changes its argument x"""
    x -= x.mean(1)[:, None]
    return x / np.sqrt(x.var(1)[:, None] + eps) * weight + bias
