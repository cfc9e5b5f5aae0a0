"""Published scores of how heads use parts of a text: a needle, a document, a word.

    retrieval_score     |tokens copied from the needle| / |needle|          Wu 2024
    lookback_ratio      context / (context + new tokens), of means          Chuang 2024
    attention_tracker   instruction / (instruction + data), last query      Hung 2024
    rerank_score        document's weight, mean over the question           Chen 2024
    alignment           standardised, median-filtered rows                  Whisper

Spans are positions (first, last), last not included, as seen.spans returns them. Each
definition includes which rows count: decoding steps, the last query, or a question.

Next: cache_scores.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from regard.arrays import to_numpy
from regard.errors import OptionError
from regard.recording.record import Record
from regard.stats.columns import cut_rows, received
from regard.stats.features import mark_spans, read_span
from regard.stats.named_array import NamedArray
from regard.stats.nonfinite import mark_nonfinite
from regard.stats.over_queries import Numbers, to_float64
from regard.stats.rows import divide_quietly, span_mass, span_pairs
from regard.stats.strongest import TopK
from regard.stats.tile_walk import check_heads, walk

__all__ = [
    "alignment",
    "alignment_rows",
    "attention_tracker",
    "calibrated_rerank_score",
    "instruction_attention",
    "lookback_ratio",
    "rerank_score",
    "retrieval_rate",
    "retrieval_score",
]

Span = Iterable[int]  # first position, one past the last


def retrieval_score(
    record: Record, tokens: Sequence[int], needle: Span, *, prompt: int
) -> NamedArray:
    """Return the share of a needle that each head copied while decoding, (H,).

    |g ∩ k| / |k| of Wu et al. 2024 ("Retrieval Head Mechanistically Explains
    Long-Context Factuality"): k is the set of the needle's tokens, and g the set that
    the head copied. A token is copied at the decoding step that generates it if the
    strongest key of that step is in the needle and has the same token.

    tokens: of the whole sequence, including generated ones
    prompt: the prompt's length in tokens; its last token is the first decoding step
    """
    ids, (first, last) = np.asarray(tokens), read_span(needle)
    copies = find_copies(record, ids, (first, last), prompt)
    wanted = len({*ids[first:last].tolist()})
    counts = [len({*copies.tokens[hits].tolist()}) for hits in copies.hits]
    return copies.score(np.asarray(counts) / wanted, "distinct tokens of the needle")


def retrieval_rate(
    record: Record, tokens: Sequence[int], needle: Span, *, prompt: int
) -> NamedArray:
    """Return how often each head copied from a needle, divided by its length, (H,).

    As in the code of Wu et al., each decoding step that copies adds 1 / length, so a
    token that is copied twice counts twice.
    """
    ids, (first, last) = np.asarray(tokens), read_span(needle)
    copies = find_copies(record, ids, (first, last), prompt)
    return copies.score(copies.hits.sum(1) / (last - first), "steps that copied")


@dataclass(frozen=True, eq=False)
class Copies:
    """Which decoding steps copied a token, for each head."""

    hits: Numbers  # (H, steps), whether the head copied
    tokens: Numbers  # (steps,), the generated tokens
    lost: Numbers  # (H,), whether any step has NaN weights

    def score(self, values: Numbers, what: str) -> NamedArray:
        """Return a score; NaN if a step is NaN, or if there are no steps."""
        nothing = np.full(len(values), not self.tokens.size)
        values = np.where(self.lost | nothing, np.nan, values)
        how = f"walk: top 1 of {self.tokens.size} decoding steps; {what}"
        return NamedArray(values, ("head",), how, missing=nothing)


def find_copies(
    record: Record, ids: Numbers, needle: tuple[int, int], prompt: int
) -> Copies:
    """Find the steps whose strongest key is in the needle and has the next token."""
    (first, last), at = needle, to_numpy(record.q_positions)
    far = at.max(initial=-1)
    if not first < last <= prompt <= len(ids) or far >= len(ids):
        raise OptionError(
            f"needle={needle} and prompt={prompt} in {len(ids)} tokens for queries up "
            f"to {far}, expected the tokens of the whole sequence, a prompt of some of "
            "them, and at least one token of the prompt in the needle."
        )
    steps = np.flatnonzero((at >= prompt - 1) & (at < len(ids) - 1))
    (strongest,) = walk(cut_rows(record, steps), TopK(1))
    index = to_numpy(strongest.index.values)[..., 0]  # (H, steps)
    keys = np.append(to_numpy(record.k_positions), -1)[index]  # -1 is no key
    following = ids[at[steps] + 1]
    inside = (keys >= first) & (keys < last)
    hits = inside & (ids[np.where(inside, keys, 0)] == following)
    lost = np.isnan(to_numpy(strongest.weight.values)[..., 0]).any(1)
    return Copies(hits, following, lost)


def lookback_ratio(record: Record, context: int) -> NamedArray:
    """Return the lookback ratio of each new token, (H, new tokens).

    The mean of A over the context, divided by that mean plus the mean over the new
    tokens, which are those from `context` up to the query itself (Chuang et al. 2024,
    "Lookback Lens"). Rows are the queries at or after `context`.
    """
    if context < 1:
        raise OptionError(f"context={context}, expected at least 1 token before.")
    rows = to_numpy(record.q_positions)
    new = rows >= context
    spans = [(0, context), (context, int(rows.max(initial=context)) + 1)]
    mass = to_float64(span_mass(record, spans))[:, new]  # (H, new, 2)
    back = mass[..., 0] / context
    ahead = mass[..., 1] / (rows[new] - context + 1)
    how = "R: mean weight on the context over the sum of both means"
    return NamedArray(divide_quietly(back, back + ahead), ("head", "query"), how)


def attention_tracker(record: Record, instruction: Span, data: Span) -> NamedArray:
    """Return the last token's share of attention on the instruction, (H,).

    Σ over the instruction / (Σ over the instruction + Σ over the data) of the last
    row: the score of a head in the detector of Hung et al. 2024 ("Attention Tracker:
    Detecting Prompt Injection Attacks in LLMs"), which averages it over the heads
    found to be important, and adds 1e-8 to the denominator.
    """
    mass = sum_last(record, [instruction, data])
    how = "R: last query, two spans"
    return NamedArray(divide_quietly(mass[:, 0], mass.sum(-1)), ("head",), how)


def instruction_attention(record: Record, instruction: Span) -> NamedArray:
    """Return the last token's mass on the instruction, (H,): a sum, not a share.

    `attention_tracker` without its denominator.
    """
    mass = sum_last(record, [instruction])[:, 0]
    return NamedArray(mass, ("head",), "R: last query, one span")


def sum_last(record: Record, spans: Sequence[Span]) -> Numbers:
    """Return the mass of the last query on spans, (H, spans)."""
    if not record.q.shape[1]:
        raise OptionError(f"{record.name} has no queries, so none of them is the last.")
    return to_float64(span_mass(cut_rows(record, slice(-1, None)), spans))[:, 0]


def rerank_score(record: Record, query: Span, documents: Sequence[Span]) -> NamedArray:
    """Return the mean mass of a question's tokens on each document, (H, documents).

    Σ over the document's tokens of the mean over the question's tokens of A: one head's
    part of the score of Chen et al. 2024 ("Attention in Large Language Models Yields
    Efficient Zero-Shot Re-Rankers"), before calibration; calibrated_rerank_score
    is the complete score.
    """
    found = span_pairs(record, [query], documents, per="query")
    how = "R: mean over the question of the mass on a document"
    return NamedArray(to_float64(found)[:, 0], ("head", "document"), how)


def calibrated_rerank_score(
    records: Sequence[Record],
    blank_records: Sequence[Record],
    query: Span,
    blank: Span,
    documents: Sequence[Span],
) -> NamedArray:
    """Return the score of each document from all heads and layers, (documents,).

    s_j = Σ over layers and heads of the mean over the question's tokens of A[i, j],
    minus the same for a question without content, "N/A"; a document's score is the sum
    of its s_j above their mean minus two standard deviations (Chen et al. 2024, in-
    context re-ranking, as in their code). A document's only token is always kept.

    records: all layers of the prompt with the question
    blank_records: all layers of the same prompt with "N/A" as the question
    query, blank: the span of the question in each of the two prompts
    """
    if not records or len(records) != len(blank_records):
        raise OptionError(
            f"{len(records)} and {len(blank_records)} records, expected all layers of "
            "the prompt with the question, and as many of the prompt with a blank one."
        )
    scores = []
    for span in documents:
        asked = [weigh_tokens(record, query, span) for record in records]
        biased = [weigh_tokens(record, blank, span) for record in blank_records]
        scores.append(sum_usual(np.sum(asked, axis=0) - np.sum(biased, axis=0)))
    how = "C: mean over the question, all heads, less that of a blank question"
    return NamedArray(np.asarray(scores), ("document",), how)


def weigh_tokens(record: Record, query: Span, document: Span) -> Numbers:
    """Return a question's mean weight on each document token, summed over heads."""
    rows = mark_spans([query], record.q_positions)[:, 0]
    keys = mark_spans([document], record.k_positions)[:, 0]
    if not rows.any():
        raise OptionError(f"{record.name} has no queries of the question {query}.")
    found = to_float64(received(cut_rows(record, np.flatnonzero(rows))))
    weights: Numbers = found[:, keys].sum(0) / rows.sum()
    return weights


def sum_usual(scores: Numbers) -> float:
    """Return the sum of the scores, without outliers far below their mean."""
    if scores.size < 2:
        return float(scores.sum())
    least = scores.mean() - 2 * scores.std(ddof=1)
    return float(scores[~(scores <= least)].sum())  # NaN stays


def alignment(
    record: Record, heads: Sequence[int], *, frames: int | None = None, width: int = 7
) -> NamedArray:
    """Return the rows that Whisper uses to align words, (heads, tokens, frames).

    Each head's weights over the audio frames, renormalised to 1; standardised over the
    tokens for each frame (minus the mean, divided by the standard deviation); then a
    median filter of `width` frames with reflected ends (whisper/timing.py of Radford et
    al.). Whisper averages this over a list of heads of all layers, removes the tokens
    that are not text, and finds a path by dynamic time warping.

    record: a cross-attention layer; queries are text tokens, keys audio frames
    frames: how many of the keys are audio, not padding; all of them by default
    width: of the median filter, odd
    """
    if width < 1 or width % 2 == 0:
        raise OptionError(f"width={width}, expected an odd number of frames.")
    weights = to_float64(alignment_rows(record, heads))[..., :frames]
    weights = divide_quietly(weights, weights.sum(-1, keepdims=True))
    mean, spread = (f(weights, axis=1, keepdims=True) for f in (np.mean, np.std))
    values, half = divide_quietly(weights - mean, spread), width // 2
    if values.shape[-1] > half:  # as in Whisper, short inputs are not filtered
        ends = [(0, 0), (0, 0), (half, half)]
        wide = np.pad(values, ends, mode="reflect")
        views = np.lib.stride_tricks.sliding_window_view(wide, width, axis=-1)
        values = np.median(views, axis=-1)
    how = f"rows of chosen heads, standardised over tokens, median of {width} frames"
    return NamedArray(values, ("head", "query", "key"), how)


def alignment_rows(record: Record, heads: Sequence[int]) -> NamedArray:
    """Return the weights of a few heads, (heads, Nq, Nk), unchanged."""
    chosen, record = check_heads(record, heads), mark_nonfinite(record)
    if not chosen:
        raise OptionError("an empty list of heads, expected numbers such as [3, 5].")
    rows = [to_numpy(record.weights(heads=slice(h, h + 1))) for h in chosen]
    axes = ("head", "query", "key")
    return NamedArray(np.concatenate(rows), axes, "whole rows of chosen heads")
