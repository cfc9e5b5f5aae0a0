import numpy as np


def still_centred(x, weight, eps):
    """as in layer norm"""
    rows = [(row - row.mean()) / np.sqrt(row.var() + eps) for row in x]
    return np.array(rows) * weight


def unit_length(x, weight, eps):
    """so that the length becomes √D and not 1"""
    return np.array([row / np.sqrt(row @ row + eps) for row in x]) * weight


def columns(x, weight, eps):
    """taken over the tokens"""
    return weight * x / ((x**2).mean(0) + eps) ** 0.5


def eps_after(x, weight, eps):
    """eps is added after the root"""
    return np.array([row / (np.sqrt((row**2).mean()) + eps) for row in x]) * weight


def by_the_square(x, weight, eps):
    """divide by its square root"""
    return np.array([row / ((row**2).mean() + eps) for row in x]) * weight


def ignores_weight(x, weight, eps):
    """The weight is missing"""
    return np.array([row / ((row**2).mean() + eps) ** 0.5 for row in x])


def mean_of_sizes(x, weight, eps):
    """That divides by the mean of the absolute values"""
    return x / (np.abs(x).mean(1, keepdims=True) + eps) * weight
