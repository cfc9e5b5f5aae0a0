"""Scores from papers, each with its published definition.

    head_scores.py     the kind of a head: sink, induction, previous token
    text_scores.py     how a head uses parts of a text: a needle, documents, words
    cache_scores.py    which keys a KV cache should keep

Definitions differ in details: a mean or a sum, over which rows, before or after the
heads of a group are combined. Each docstring states them, and each score is tested
against its formula on the full matrix. A paper's name is used only for its exact score;
variants by others have different names. A score is NaN if it includes a row whose
weights are NaN. A score is a mass, not a cause: ablate the head (ablate/knock_out.py)
before drawing causal conclusions.

Next: registry.py
"""

from regard.stats.cache_scores import *  # noqa: F403
from regard.stats.cache_scores import __all__ as cache_scores
from regard.stats.head_scores import *  # noqa: F403
from regard.stats.head_scores import __all__ as head_scores
from regard.stats.text_scores import *  # noqa: F403
from regard.stats.text_scores import __all__ as text_scores

__all__ = sorted([*cache_scores, *head_scores, *text_scores])  # noqa: PLE0605
