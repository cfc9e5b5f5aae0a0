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

Next: table.py
"""

from regard.stats.cache_scores import (
    h2o,
    kvzip,
    observed_attention,
    snapkv,
    snapkv_grouped,
    tova,
)
from regard.stats.head_scores import (
    duplicate_token,
    induction_score,
    laplacian_diagonal,
    largest_logit,
    largest_softmax_logit,
    prefix_matching,
    previous_token,
    previous_token_share,
    sink_rate,
    visible_laplacian_diagonal,
    visible_sink_rate,
)
from regard.stats.text_scores import (
    alignment,
    alignment_rows,
    attention_tracker,
    calibrated_rerank_score,
    instruction_attention,
    lookback_ratio,
    rerank_score,
    retrieval_rate,
    retrieval_score,
)

__all__ = [
    "alignment",
    "alignment_rows",
    "attention_tracker",
    "calibrated_rerank_score",
    "duplicate_token",
    "h2o",
    "induction_score",
    "instruction_attention",
    "kvzip",
    "laplacian_diagonal",
    "largest_logit",
    "largest_softmax_logit",
    "lookback_ratio",
    "observed_attention",
    "prefix_matching",
    "previous_token",
    "previous_token_share",
    "rerank_score",
    "retrieval_rate",
    "retrieval_score",
    "sink_rate",
    "snapkv",
    "snapkv_grouped",
    "tova",
    "visible_laplacian_diagonal",
    "visible_sink_rate",
]
