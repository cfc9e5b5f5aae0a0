"""Masks as formulas

A mask need not be a stored table. It is a predicate: whether the query at position `q`
may see the key at position `k`. Predicates combine with and, or, not: `&`, `|`, `~`.
True means: may see.

Here is the mask of a model that reads several documents packed into one sequence. A
query may see a key if

- the key is not in the future: `k <= q`, always;
- and it is near and in the same document: at most `left` positions before the query,
  and with the same number in `documents`;
- or, instead of that, it is one of the first `first` positions, which every query may
  see;
- and it is not padding, which has the document number -1.

With `left = 2`, the keys near the query at position 5 are 3, 4 and 5: `left` does not
count the query itself. In a sequence without padding, `first = 1` lets every query see
position 0, whatever its document.

Positions are absolute: `q` may be the rows 5, 6, 7 of a longer text.

Write `may_see(q, k, documents, left, first)`. `q` is `(N, 1)`, `k` is `(1, M)`, both
integers; `documents[p]` is the document of position `p`. Return the boolean table
`(N, M)`.

Next: copy_task.py
"""

import numpy as np

NAME = "may_see"
MINUTES = 15
NEEDS = ("causal_mask",)
EXTRA = ""
STUB = '''import numpy as np


def may_see(q, k, documents, left, first):
    """Return whether q (N, 1) may see k (1, M), as booleans (N, M)."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Write each rule on a separate line; q - k broadcasts to the shape (N, M).",
    "near = q - k <= left; same = documents[q] == documents[k]; padding = "
    "documents[k] == -1.",
    "(k <= q) & ((near & same) | (k < first)) & ~padding; note the parentheses.",
)


def spec(q, k, documents, left, first):
    table = np.zeros((q.shape[0], k.shape[1]), dtype=bool)
    for row, i in enumerate(q[:, 0]):
        for column, j in enumerate(k[0]):
            past = j <= i
            near = i - j <= left
            same = documents[i] == documents[j]
            padding = documents[j] == -1
            seen = past and ((near and same) or j < first) and not padding
            table[row, column] = seen
    return table


def reference(q, k, documents, left, first):
    past, near = k <= q, q - k <= left
    same = documents[q] == documents[k]
    padding = documents[k] == -1
    return past & ((near & same) | (k < first)) & ~padding


def draw(rng):
    def places(n, start=0):
        return np.arange(start, n)[:, None], np.arange(n)[None]

    yield *places(3), np.zeros(3, int), 1, 0
    yield *places(4), np.array([0, 0, 1, 1]), 3, 0
    yield *places(5), np.array([0, 0, 0, 1, 1]), 1, 1
    yield *places(6, start=3), np.array([0, 0, 1, 1, 1, 1]), 2, 1
    yield *places(7), np.array([-1, -1, 0, 0, 1, 1, 1]), 2, 3
    yield *places(12, start=5), np.sort(rng.integers(0, 4, size=12)), 3, 2
    yield *places(9, start=8), np.arange(9) // 3, 4, 2
    for left, first in ((0, 0), (4, 18), (4, 18), (18, 1)):
        yield *places(24), rng.integers(-1, 6, size=24), left, first


def mistake_window_counts_itself(q, k, documents, left, first):
    """The window is one token short: left counts the tokens before the query and not
    the query itself, so it is q - k <= left."""
    return reference(q, k, documents, left - 1, first)


def mistake_future(q, k, documents, left, first):
    """A query sees keys after it: k <= q must hold in every case, so put it outside the
    parentheses."""
    past, near, same = k <= q, q - k <= left, documents[q] == documents[k]
    return ((past & near & same) | (k < first)) & (documents[k] != -1)


def mistake_not_causal(q, k, documents, left, first):
    """The rule k <= q is missing: q - k is negative for keys in the future, so it is at
    most left."""
    near, same = q - k <= left, documents[q] == documents[k]
    return ((near & same) | (k < first)) & (documents[k] != -1)


def mistake_inverted(q, k, documents, left, first):
    """The table is inverted: True means that the query may see the key."""
    return ~reference(q, k, documents, left, first)


def mistake_documents_mix(q, k, documents, left, first):
    """Adjacent documents are mixed: a key must be near and in the same document, with &
    and not with |."""
    near, same = q - k <= left, documents[q] == documents[k]
    return (k <= q) & (near | same | (k < first)) & (documents[k] != -1)


def mistake_padding_seen(q, k, documents, left, first):
    """Padding is visible: no query may see a key of document -1, not even among the
    first."""
    near, same = q - k <= left, documents[q] == documents[k]
    return (k <= q) & ((near & same) | (k < first))


def mistake_rows_counted(q, k, documents, left, first):
    """The rows are counted from 0: use the positions in q, which may start later."""
    return reference(np.arange(len(q))[:, None], k, documents, left, first)


def mistake_no_sinks(q, k, documents, left, first):
    """The first keys are not visible to all: k < first is allowed, too, with |."""
    return reference(q, k, documents, left, 0)


def mistake_python_and(q, k, documents, left, first):
    """`and`, `or` and `not` take one truth value, and these are tables: write &, | and
    ~, with parentheses."""
    return k <= q and q - k <= left and documents[q] == documents[k]


def mistake_no_window(q, k, documents, left, first):
    """The window is missing: a key must also satisfy q - k <= left."""
    return reference(q, k, documents, q.max() + 1, first)


def mistake_not_itself(q, k, documents, left, first):
    """A query does not see its own position: it is k <= q, not k < q."""
    return reference(q, k, documents, left, first) & (k < q)


def mistake_sinks_of_document(q, k, documents, left, first):
    """The first keys are visible only within their document: k < first needs no same
    document."""
    near, same = q - k <= left, documents[q] == documents[k]
    return (k <= q) & same & (near | (k < first)) & (documents[k] != -1)
