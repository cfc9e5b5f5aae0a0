import math

import numpy as np


def normal(z):
    return np.array([[math.erfc(-t / 2**0.5) / 2 for t in row] for row in z])


def gpt2(x, up, up_bias, down, down_bias):
    """use the exact one, with erf"""
    h = up_bias + x.dot(up.T)
    inner = (2 / np.pi) ** 0.5 * (h + 0.044715 * h * h * h)
    return (0.5 * h * (1 + np.tanh(inner))).dot(down.T) + down_bias


def erf_of_z(x, up, up_bias, down, down_bias):
    """The argument of erf is z"""
    h = x @ up.T + up_bias
    return h * normal(h * 2**0.5) @ down.T + down_bias


def relu(x, up, up_bias, down, down_bias):
    """This is ReLU"""
    h = x @ up.T + up_bias
    return np.where(h > 0, h, 0) @ down.T + down_bias


def straight(x, up, up_bias, down, down_bias):
    """There is no nonlinearity between the two matrices"""
    return x @ (down @ up).T + down @ up_bias + down_bias


def forgets_z(x, up, up_bias, down, down_bias):
    """This is Φ(z), the probability alone"""
    return normal(x @ up.T + up_bias) @ down.T + down_bias


def bias_too_late(x, up, up_bias, down, down_bias):
    """up_bias is added after GELU"""
    h = x @ up.T
    return (h * normal(h) + up_bias) @ down.T + down_bias


def sigmoid_gelu(x, up, up_bias, down, down_bias):
    """This is the approximation of GELU with a sigmoid"""
    h = x @ up.T + up_bias
    return h / (1 + np.exp(-1.702 * h)) @ down.T + down_bias


def no_transpose(x, up, up_bias, down, down_bias):
    """The matrices are not transposed"""
    h = x @ up + up_bias
    return h * normal(h) @ down + down_bias
