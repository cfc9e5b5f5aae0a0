import numpy as np


def multiplies_bare(q, k):
    """That multiplies by the columns of k, but the keys are its rows"""
    return np.matmul(q, k)


def einsum_the_wrong_way(q, k):
    """row i must belong to query i"""
    return np.einsum("nd,md->mn", q, k)


def one_loop(q, k):
    """compare every query with every key"""
    return np.array([q[i] @ k[i] for i in range(len(q))])


def self_scores(q, k):
    """the keys are in k"""
    x = q
    return x @ x.T


def scores_with_bugs_in_the_loop(q, k):
    """Every query is compared with the first key only"""
    table = np.zeros((len(q), len(k)))
    for i in range(len(q)):
        for j in range(len(k)):
            table[i, j] = q[i] @ k[0]
    return table


def table_of_one_shape(q, k):
    """The table has one column for each query"""
    table = np.zeros((len(q), len(q)))
    for i in range(len(q)):
        for j in range(min(len(q), len(k))):
            table[i, j] = q[i] @ k[j]
    return table


def integers(q, k):
    """The scores are rounded to integers"""
    return (q @ k.T).astype(int)
