import numpy as np


def weigh(x):
    e = np.exp(x - np.max(x, axis=1, keepdims=True))
    return e / np.sum(e, axis=1, keepdims=True)


def strict(scores):
    """Token i does not see itself"""
    n = len(scores)
    i, j = np.arange(n)[:, None], np.arange(n)
    return weigh(np.where(j < i, scores, -np.inf))


def sees_the_next(scores):
    """sees the token after it"""
    masked = scores.copy()
    masked[np.triu_indices(len(scores), k=2)] = -np.inf
    return weigh(masked)


def upside_down(scores):
    """The past is hidden and the future is visible"""
    masked = scores.copy()
    masked[np.tril_indices(len(scores), k=-1)] = -np.inf
    return weigh(masked)


def multiplies_before(scores):
    """exp(0) = 1 is a weight like any other"""
    return weigh(scores * np.tri(len(scores)))


def multiplies_after(scores):
    """the rows no longer sum to 1"""
    return weigh(scores) * np.tri(len(scores))


def not_a_number(scores):
    """0 · ∞ is NaN"""
    with np.errstate(invalid="ignore"):
        mask = -np.inf * (1 - np.tri(len(scores)))
    return weigh(scores + mask)


def forgets_it(scores):
    """Every token sees the future"""
    return weigh(scores)


def plus_infinity(scores):
    """Hidden scores are +inf, which gives NaN"""
    masked = scores.copy()
    masked[np.triu_indices(len(scores), k=1)] = np.inf
    return weigh(masked)


def overflows(scores):
    """exp of a large score is infinite, or all of a row are 0, and the"""
    e = np.exp(np.where(np.tri(len(scores)) > 0, scores, -np.inf))
    return e / e.sum(1, keepdims=True)


def looks_back_one_only(scores):
    """A token sees only itself and the one before it"""
    n = len(scores)
    i, j = np.arange(n)[:, None], np.arange(n)
    return weigh(np.where((j <= i) & (j >= i - 1), scores, -np.inf))


def masks_in_place(scores):
    """causal_weights changes its argument scores"""
    scores[np.triu_indices(len(scores), k=1)] = -np.inf
    return weigh(scores)


def minus_a_hundred(scores):
    """Hidden scores are set to a finite negative number"""
    return weigh(np.where(np.tri(len(scores)) > 0, scores, -100.0))


def minus_a_billion(scores):
    """Hidden scores are set to a finite negative number"""
    masked = scores.copy()
    masked[np.triu_indices(len(scores), k=1)] = -1e9
    return weigh(masked)


def ten_thousand_less(scores):
    """A finite number is subtracted from the hidden scores"""
    return weigh(scores - 1e4 * (1 - np.tri(len(scores))))


def a_billion_less(scores):
    """it gets the weight. Set these scores to -np.inf"""
    return weigh(scores + np.triu(np.full(scores.shape, -1e9), k=1))


def plus_a_billion(scores):
    """Hidden scores are a large positive number"""
    masked = scores.copy()
    masked[np.triu_indices(len(scores), k=1)] = 1e8
    return weigh(masked)


def adds_a_billion(scores):
    """A large number is added above the diagonal"""
    return weigh(scores + 1e8 * (1 - np.tri(len(scores))))


def punishes_the_past(scores):
    """or subtracted elsewhere, so the future"""
    return weigh(scores - 1e8 * np.tri(len(scores)))


def strict_with_a_billion(scores):
    """its whole row is one finite number"""
    n = len(scores)
    i, j = np.arange(n)[:, None], np.arange(n)
    return weigh(np.where(j < i, scores, -1e10))


def subtracts_on_the_diagonal(scores):
    """subtracted on the diagonal too"""
    return weigh(scores - 1e8 * np.triu(np.ones(scores.shape)))
