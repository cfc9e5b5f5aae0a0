import numpy as np


def short_window(q, k, documents, left, first):
    """The window is one token short"""
    seen = (q - k < left) & (documents[q] == documents[k])
    return (q >= k) & (seen | (k < first)) & (documents[k] >= 0)


def sinks_in_the_future(q, k, documents, left, first):
    """A query sees keys after it"""
    near = np.logical_and(q >= k, q <= k + left)
    own = np.logical_and(near, documents[q] == documents[k])
    return np.logical_and(np.logical_or(own, k < first), documents[k] != -1)


def forgets_the_past(q, k, documents, left, first):
    """The rule k <= q is missing"""
    own = (k >= q - left) & (documents[k] == documents[q])
    return (own | (k < first)) & (documents[k] != -1)


def true_means_hidden(q, k, documents, left, first):
    """The table is inverted"""
    own = (q - k <= left) & (documents[q] == documents[k])
    return (k > q) | ~(own | (k < first)) | (documents[k] == -1)


def leaks_documents(q, k, documents, left, first):
    """Adjacent documents are mixed"""
    near, own = q - k <= left, documents[q] == documents[k]
    return (k <= q) & (near | own | (k < first)) & (documents[k] > -1)


def padding_forgotten(q, k, documents, left, first):
    """Padding is visible"""
    own = (q - k <= left) & (documents[q] == documents[k])
    return (k <= q) & (own | (k < first))


def always_from_zero(q, k, documents, left, first):
    """The rows are counted from 0"""
    table = np.zeros((q.shape[0], k.shape[1]), bool)
    for i in range(q.shape[0]):
        for j in range(k.shape[1]):
            own = i - j <= left and documents[i] == documents[j]
            table[i, j] = j <= i and (own or j < first) and documents[j] >= 0
    return table


def python_and(q, k, documents, left, first):
    """`and`, `or` and `not` take one truth value, and these are tables"""
    return k <= q and q - k <= left and documents[q] == documents[k]


def no_sinks(q, k, documents, left, first):
    """The first keys are not visible to all"""
    own = (q - k <= left) & (documents[q] == documents[k])
    return (k <= q) & own & (documents[k] >= 0)
