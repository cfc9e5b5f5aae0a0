"""Scores of papers by name, each under its published definition.

    head_scores.py     what kind of head it is: a sink, induction, previous token
    text_scores.py     how it uses the parts of a text: a needle, documents, words
    cache_scores.py    which keys a cache should keep

They differ in what seems a detail: a mean or a sum, over which rows, before or after
the heads of a group are put together. Each says it, and is tested against its formula
written out on the whole matrix. A name of a paper is exactly that paper's score; what
others made of it has a name of its own. A row whose weights are NaN makes every score
NaN that counts it. A score is a mass, not what caused an answer: knock the head out
(lens/intervene.py) before saying so.

Next: registry.py
"""

from regard.stats.cache_scores import *  # noqa: F403
from regard.stats.cache_scores import __all__ as cache_scores
from regard.stats.head_scores import *  # noqa: F403
from regard.stats.head_scores import __all__ as head_scores
from regard.stats.text_scores import *  # noqa: F403
from regard.stats.text_scores import __all__ as text_scores

__all__ = sorted([*cache_scores, *head_scores, *text_scores])  # noqa: PLE0605
