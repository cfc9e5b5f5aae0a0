import numpy as np


def cells(q_first, q_last, k_first, k_last, size, back):
    """use the corners, and evaluate no cells"""
    empty, full = np.zeros((2, len(q_first), k_first.shape[1]), bool)
    for i in range(len(q_first)):
        for j in range(k_first.shape[1]):
            q = np.arange(q_first[i, 0], q_last[i, 0] + 1)[:, None]
            k = np.arange(k_first[0, j], k_last[0, j] + 1)
            table = (k <= q) & (q // size - k // size <= back)
            empty[i, j], full[i, j] = not table.any(), table.all()
    return empty, full


def or_for_and(q_first, q_last, k_first, k_last, size, back):
    """for a & b, both must be"""
    empty = (q_last < k_first) | (q_first // size > k_last // size + back)
    past = q_first >= k_last
    near = q_last // size <= k_first // size + back
    return empty, past | near


def only_the_chunks(q_first, q_last, k_first, k_last, size, back):
    """The rule k <= q is missing"""
    most = q_last // size - k_first // size
    least = q_first // size - k_last // size
    return least > back, most <= back


def only_one_corner(q_first, q_last, k_first, k_last, size, back):
    """This decides a tile by one of its cells"""
    seen = (q_first >= k_first) & (q_first // size - k_first // size <= back)
    return np.logical_not(seen), seen


def window_of_tokens(q_first, q_last, k_first, k_last, size, back):
    """Chunks have fixed borders"""
    left = back * size
    full = (q_first >= k_last) & (q_last - k_first <= left)
    return (q_last < k_first) | (q_first - k_last > left), full


def the_rest_is_full(q_first, q_last, k_first, k_last, size, back):
    """it may be mixed"""
    none = (k_first > q_last) | (q_first // size - k_last // size > back)
    return none, np.logical_not(none)


def full_only(q_first, q_last, k_first, k_last, size, back):
    """it returned 1 values, expected 2"""
    return (k_last <= q_first) & (q_last // size - k_first // size <= back)


def unknown(q_first, q_last, k_first, k_last, size, back):
    """No tile is proved empty or full"""
    nothing = np.zeros((len(q_first), k_first.shape[1]), bool)
    return nothing, nothing.copy()
