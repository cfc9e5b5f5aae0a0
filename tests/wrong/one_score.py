import numpy as np


def gives_all_products(q, k):
    """a score is one number, their sum"""
    return [a * b for a, b in zip(q, k, strict=True)]


def normalises_first(q, k):
    """That is the cosine"""
    q = q / np.sqrt((q**2).sum())
    k = k / np.sqrt((k**2).sum())
    return np.dot(q, k)


def averages(q, k):
    """do not divide by d"""
    total = 0
    for i in range(len(q)):
        total += q[i] * k[i]
    return total / len(q)


def multiplies_as_columns(q, k):
    """That multiplies every number of q by every number of k, which gives a table"""
    return q[:, None] * k[None, :]


def forgets_to_return(q, k):
    """one_score returned None: is there a return statement?"""
    sum(q * k)


def adds_instead(q, k):
    """That adds q and k"""
    return (q + k).sum()


def forgets_the_last_number(q, k):
    """The last pair of numbers is left out"""
    return sum(q[i] * k[i] for i in range(len(q) - 1))


def returns_words(q, k):
    """answer is a str, expected numbers."""
    return f"score {q @ k}"
