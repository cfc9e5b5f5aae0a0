import numpy as np


def plain_formula(scores):
    """exp of a large score is infinite, or all of a row are 0, and the division"""
    weights = np.empty_like(scores)
    for i, row in enumerate(scores):
        weights[i] = np.exp(row) / sum(np.exp(x) for x in row)
    return weights


def first_axis(scores):
    """That makes the columns sum to 1"""
    e = np.exp(scores - np.max(scores, axis=0))
    return e / np.sum(e, axis=0)


def whole_table(scores):
    """That makes the whole table sum to 1"""
    e = np.exp(scores - np.max(scores))
    return e / np.sum(e)


def largest_of_all(scores):
    """That subtracts the largest score of the whole table, and a row far below it"""
    e = np.exp(scores - np.amax(scores))
    return e / np.sum(e, axis=1)[:, None]


def safe_division(scores):
    """The rows sum to slightly less than 1"""
    e = np.exp(scores - scores.max(1)[:, None])
    return e / (1e-10 + e.sum(1)[:, None])


def shares(scores):
    """take exp first"""
    return scores / np.sum(scores, axis=1)[:, None]


def forgets_keepdims(scores):
    """The sums of the rows have shape (N,), which broadcasts along the columns"""
    e = np.exp(scores - scores.max(axis=1, keepdims=True))
    return e / e.sum(axis=1)


def forgets_keepdims_and_the_largest(scores):
    """The sums of the rows have shape (N,), which broadcasts along the columns"""
    return np.exp(scores) / np.sum(np.exp(scores), axis=1)


def forgets_keepdims_twice(scores):
    """write keepdims=True, in max and in sum"""
    e = np.exp(scores - np.max(scores, axis=1))
    return e / np.sum(e, axis=1)


def reads_too_far(scores):
    """softmax raised IndexError in line"""
    weights = np.zeros(scores.shape)
    for j in range(len(scores[0]) + 1):
        weights[:, j] = np.exp(scores[:, j])
    return weights


def changes_the_scores(scores):
    """softmax changes its argument scores, which the caller still needs"""
    scores -= scores.max(axis=1, keepdims=True)
    e = np.exp(scores)
    return e / e.sum(axis=1, keepdims=True)


def base_two(scores):
    """These are powers of 2"""
    e = 2.0 ** (scores - scores.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def no_division(scores):
    """The rows do not sum to 1"""
    return np.exp(scores - scores.max(axis=1, keepdims=True))


def loops_for_ever(scores):
    """It did not answer within"""
    largest = scores[0, 0]
    while True:
        largest = max(largest, scores.max())
