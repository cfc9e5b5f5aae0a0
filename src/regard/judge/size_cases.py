"""Cases about sizes: many heads, batches, tokens and columns, alone and together.

A kernel that is right for three tokens may be wrong for head 8, row 1,024, a width of
64 or a single query. Every size below is used at least once along every axis, with the
remaining axes small, so that calls are cheap:

    B = 1, H = 130, Nq = 3, Nk = 2        B = 2, H = 1, Nq = 4200, Nk = 3        …

Next: value_cases.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TypeVar

import numpy as np

from regard.judge.case import Case, Examiner
from regard.judge.difference import Difference
from regard.judge.inputs import CallFailedError, Inputs, NotAskedError
from regard.judge.mask_cases import CAUSAL, HIDES, RIGHT

TOKENS = (
    *range(1, 18), 24, 31, 32, 33, 40, 48, 63, 64, 65, 96, 100, 127, 128, 129, 192,
    200, 255, 256, 257, 300, 384, 500, 511, 512, 513, 1000, 1024, 1025, 2048,
    4096, 4200,
)  # fmt: skip
WIDTHS = (
    *range(1, 10), 12, 16, 20, 24, 32, 40, 48, 56, 64, 65, 72, 80, 96, 100, 112, 128,
    160, 192, 200, 256, 257, 320, 384, 512, 520, 576,
)  # fmt: skip
MANY = (*range(1, 18), 20, 24, 25, 32, 33, 40, 48, 56, 64, 67, 80, 96, 100, 128, 130)
FEW = (1, 2, 3, 5, 4, 7, 8, 6, 9)
ROWS = 12  # from this many rows on, some are set to 0 or made equal
FEW_SHAPES = 3  # for a library that compiles every shape
Item = TypeVar("Item")
CELLS = 12_000  # maximum number of scores per call, if Nq must equal Nk
SHARED = ((2, 1), (4, 2), (6, 3), (8, 2), (12, 4), (16, 2), (32, 8), (40, 8), (65, 5))
SIZED = (
    *RIGHT,
    "softmax_is_stable",
    "one_token",
    "lengths_may_differ",
    "large_scores_differ",
    "values_of_any_size",
    "causal_alignment",
    "chunked_prefill_equals_full",
)
SHOWN = (  # cases of the other parts that are compared
    "weights_are_shown_as_defined",
    "lse_is_natural_log",
    "merge_of_parts_is_whole",
)
APART = ("heads_do_not_mix", "batches_do_not_mix", "axes_are_not_confused")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of the axes of one call."""

    batch: int = 2
    heads: int = 2
    shared: int = 0  # heads of k and v; 0: as many as of q
    n_q: int = 3
    n_k: int = 3
    width: int = 8
    columns: int = 8

    def __str__(self) -> str:
        names = ("B", "H", "Nq", "Nk", "D", "Dv")
        values = (self.batch, self.heads, self.n_q, self.n_k, self.width, self.columns)
        text = ", ".join(f"{n} = {x}" for n, x in zip(names, values, strict=True))
        return text + (f", Hk = {self.shared}" if self.shared else "")


LONGEST = (
    Sizes(heads=130, batch=1, n_k=5),
    Sizes(batch=130, heads=1, n_k=5),
    Sizes(n_q=4200, n_k=3, batch=1, width=2, columns=2),
    Sizes(n_q=3, n_k=4200, heads=1, width=2, columns=2),
    Sizes(n_q=2, width=576, columns=576),
)
SHOWN_PARTS = ("out", "weights", "lse")


def fit_sizes(e: Examiner, sizes: Sizes) -> Sizes:
    """Return the nearest sizes that the convention allows."""
    words, given = e.subject.convention, sizes
    if words.projections:
        wide = e.subject.form.sizes[0]  # type: ignore[union-attr]
        batch = min(sizes.batch, wide)
        n_q, n_k = (min(n, wide // batch) for n in (sizes.n_q, sizes.n_k))
        given = Sizes(batch=batch, heads=e.heads, n_q=n_q, n_k=n_k, width=e.width)
        given = replace(given, columns=e.width)
    elif "h" not in words.layout:
        given = replace(given, heads=1)
    if "b" not in words.layout:
        given = replace(given, batch=1)
    if not words.other_widths:
        given = replace(given, columns=given.width)
    placed = words.causal_from is not None or words.q_start is not None
    if (
        not words.other_lengths
        or words.order == "x"
        or (words.always_causal and not placed)
    ):
        n = min(max(given.n_q, given.n_k), int((CELLS // given.batch) ** 0.5))
        given = replace(given, n_q=n, n_k=n)
    elif words.always_causal and given.n_q > given.n_k:
        given = replace(given, n_q=given.n_k, n_k=given.n_q)
    return given


def draw_arrays(e: Examiner, sizes: Sizes) -> Inputs:
    """Return random inputs of some sizes; of many rows, a few are 0 or equal."""
    shared = sizes.shared or sizes.heads
    q = e.draw(sizes.n_q, batch=sizes.batch, heads=sizes.heads, width=sizes.width)
    k = e.draw(sizes.n_k, batch=sizes.batch, heads=shared, width=sizes.width)
    v = e.draw(sizes.n_k, batch=sizes.batch, heads=shared, width=sizes.columns)
    for x in (q, k, v):
        batch, heads, n, _ = x.shape
        if batch * heads * n >= ROWS:
            x[-1, -1, n // 2] = 0
            x[-1, 0, -1] = x[-1, 0, 0]
    return Inputs(q=q, k=k, v=v)


def thin(e: Examiner, many: Iterable[Item]) -> list[Item]:
    """Return a few of many sizes if the library compiles every shape, else all."""
    found = list(many)
    if not e.subject.library.compiles:
        return found
    return found[:: -(-len(found) // FEW_SHAPES)]


def cover_sizes(step: int = 1) -> Iterator[Sizes]:
    """Yield sizes in which every token count, head count and width occurs.

    Many queries are paired with few keys and vice versa; likewise batches with heads,
    and the widths of keys with those of values.
    """
    few, two = cycle(FEW), cycle(((1, 2), (2, 1), (2, 2)))
    for n_q, n_k in pair_sizes(TOKENS, step):
        (batch, heads), d = next(two), 2 + next(few) % 2
        sizes = Sizes(batch=batch, heads=heads, n_q=n_q, n_k=n_k)
        yield replace(sizes, width=d, columns=1 + d % 3)
    for batch, heads in pair_sizes(MANY, step):
        sizes = Sizes(batch=batch, heads=heads, n_q=1 + next(few) % 3, n_k=3)
        yield replace(sizes, width=2 + next(few) % 3, columns=2)
    for width, columns in pair_sizes(WIDTHS, step):
        (batch, heads), n = next(two), next(few)
        sizes = Sizes(batch=batch, heads=heads, n_q=1 + n % 4, n_k=2 + n % 3)
        yield replace(sizes, width=width, columns=columns)


def pair_sizes(sizes: Sequence[int], step: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of small and large sizes; each size occurs twice."""
    yield from list(zip(sizes, sizes[::-1], strict=True))[::step]


def make_causal(e: Examiner, inputs: Inputs) -> Inputs | None:
    """Return the inputs as causal, or None if the convention cannot express it."""
    words, (n_q, n_k) = e.subject.convention, inputs.shape[2:]
    if not e.is_causal or n_q > n_k:
        return None
    if n_q == n_k or (words.causal_from == "start" and n_q > 1):
        return replace(inputs, causal=True)
    if words.causal_from == "end" or words.q_start:
        return replace(inputs, causal=True, q_start=n_k - n_q)
    return None


def ask_each(
    e: Examiner,
    questions: Iterable[Inputs],
    *,
    parts: tuple[str, ...] = ("out", "weights", "lse"),
    precision: str | None = None,
) -> Difference | None:
    """Compare these parts of each result, if returned, up to the first difference."""
    asked, why = 0, NotAskedError("its convention excludes these sizes")
    for inputs in questions:
        try:
            found = e.compare_all(inputs, parts=parts, precision=precision)
        except NotAskedError as reason:
            why = reason
            continue
        except CallFailedError as trouble:
            if inputs.causal and (inputs.mask is not None or inputs.bias is not None):
                continue  # it may reject causal combined with a mask or bias
            found = Difference(str(trouble), arguments=inputs)
        asked += 1
        if found is not None:
            return replace(found, says=f"{describe_sizes(inputs)}: {found.says}")
    if not asked:
        raise why
    return None


def describe_sizes(inputs: Inputs) -> str:
    """Return the sizes of a call as text."""
    (batch, heads, n_q, n_k), shared = inputs.shape, inputs.k.shape[1]
    widths = {"width": inputs.q.shape[-1], "columns": inputs.v.shape[-1]}
    sizes = Sizes(batch=batch, heads=heads, n_q=n_q, n_k=n_k, **widths)
    return str(replace(sizes, shared=0 if shared == heads else shared))


def ask_sizes(
    e: Examiner, many: Iterable[Sizes], parts: tuple[str, ...] = ("out",)
) -> Difference | None:
    """Compare results for some sizes, plain and causal."""
    return ask_each(e, draw_questions(e, many), parts=parts)


def draw_questions(e: Examiner, many: Iterable[Sizes]) -> Iterator[Inputs]:
    """Yield random inputs of some sizes, plain and causal."""
    for sizes in thin(e, many):
        inputs = draw_arrays(e, fit_sizes(e, sizes))
        yield inputs
        placed = make_causal(e, inputs)
        if placed is not None:
            yield placed


def decode_unequal(e: Examiner) -> Difference | None:
    """Use one query with different keys and values."""
    return ask_sizes(e, (Sizes(n_q=1, n_k=n) for n in (2, 3, 7, 40, 130, 600)))


def take_many_heads(e: Examiner) -> Difference | None:
    """Use up to 130 heads."""
    if "h" not in e.subject.convention.layout or e.subject.convention.projections:
        raise NotAskedError("it has no axis for heads")
    return ask_sizes(e, (Sizes(heads=n, n_k=4) for n in (5, 16, 67, 130)))


def take_many_batches(e: Examiner) -> Difference | None:
    """Use up to 130 sequences."""
    if "b" not in e.subject.convention.layout:
        raise NotAskedError("it has no axis for batches")
    return ask_sizes(e, (Sizes(batch=n, n_k=4) for n in (5, 16, 67, 130)))


def take_wide_values(e: Examiner) -> Difference | None:
    """Use up to 576 columns in the values, and in all three."""
    wide = (64, 128, 256, 576)
    apart = [Sizes(columns=n, n_k=4) for n in wide]
    return ask_sizes(e, [*apart, *(Sizes(width=n, columns=n) for n in wide)])


def take_all_sizes(e: Examiner) -> Difference | None:
    """Use every size of every axis."""
    return ask_sizes(e, cover_sizes(), SHOWN_PARTS)


def take_many_tokens(e: Examiner) -> Difference | None:
    """Use several blocks of queries and keys, with and without a partial block."""
    lengths = ((64, 64), (96, 130), (128, 128), (257, 255), (256, 512), (530, 530))
    one = {"batch": 1, "heads": 1}
    return ask_sizes(e, (Sizes(n_q=n, n_k=m, **one) for n, m in lengths), SHOWN_PARTS)


def draw_random_mask(e: Examiner, inputs: Inputs) -> Inputs:
    """Return the inputs with a random mask that leaves every row at least one key."""
    axes, (n_q, n_k) = e.subject.convention.axes_of_mask, inputs.shape[2:]
    shape = [n if a in axes else 1 for a, n in zip("bhqk", inputs.shape, strict=True)]
    mask = e.rng.random(shape) < 0.6
    if shape[2] == n_q and n_q > 1:
        start = inputs.q_start if inputs.causal else 0
        rows = np.arange(n_q)
        mask[:, :, rows, np.minimum(rows + start, n_k - 1)] = True
    else:
        mask[..., 0] = True
    return replace(inputs, mask=mask)


def mask_all_sizes(e: Examiner) -> Difference | None:
    """Use random masks of all sizes, also with causal if supported."""
    if e.subject.convention.mask is None:
        raise NotAskedError("it has no mask argument")
    many = [Sizes(n_q=130, n_k=130, batch=1), *LONGEST, *cover_sizes(4)]

    def questions() -> Iterator[Inputs]:
        for sizes in thin(e, many):
            inputs = draw_arrays(e, fit_sizes(e, sizes))
            yield draw_random_mask(e, inputs)
            placed = make_causal(e, inputs)
            if placed is not None:
                yield draw_random_mask(e, placed)

    return ask_each(e, questions())


def add_options(e: Examiner, inputs: Inputs) -> Inputs:
    """Return the inputs with every option that the convention supports."""
    words, (batch, heads, n_q, n_k) = e.subject.convention, inputs.shape
    found = make_causal(e, inputs) or inputs
    takes_bias = words.bias or words.float_mask or words.true_means == "added"
    if takes_bias and (words.bias or words.mask):
        axes = words.axes_of_mask
        lead = (batch if "b" in axes else 1, heads if "h" in axes else 1)
        found = replace(found, bias=e.rng.normal(size=(*lead, n_q, n_k)))
    if words.softcap:
        found = replace(found, softcap=1.5)
    if words.sink:
        found = replace(found, sink=e.rng.normal(size=heads))
    if words.scale:
        found = replace(found, scale=0.4)
    if words.window and found.causal:
        found = replace(found, window=max(1, n_k // 3))
    return found


def take_all_options(e: Examiner) -> Difference | None:
    """Use all options at once, in all sizes."""
    words = e.subject.convention
    options = (words.bias, words.softcap, words.sink, words.scale, words.window)
    if not (any(options) or words.float_mask):
        raise NotAskedError("it has no options")
    many = thin(e, [*LONGEST, *cover_sizes(4)])
    return ask_each(
        e, (add_options(e, draw_arrays(e, fit_sizes(e, sizes))) for sizes in many)
    )


def share_many(e: Examiner) -> Difference | None:
    """Use groups of heads as in real models, with one query and with several."""

    def questions() -> Iterator[Inputs]:
        for i, (heads, shared) in enumerate(thin(e, SHARED)):
            sizes = Sizes(heads=heads, shared=shared, batch=1 + i % 3, n_q=1 + i // 2)
            inputs = draw_arrays(e, replace(sizes, n_k=4 + i % 3, width=3 + i))
            yield inputs
            yield add_options(e, inputs)
            if e.subject.convention.mask:
                yield draw_random_mask(e, inputs)

    return ask_each(e, questions())


SIZES = (
    Case("decode_weighs_keys",
         "For a single query, the values are averaged without its scores.",
         "Compute scores and softmax for one query as for many.",
         "complete", decode_unequal,
         (*SIZED, *CAUSAL, "decode_one_token_sees_all", "any_length")),
    Case("many_heads",
         "Heads beyond the first few are lost, or are copies of others.",
         "Loop, or launch blocks, over all H heads; index q, k and v by the same head.",
         "complete", take_many_heads, (*SIZED, *CAUSAL, *APART)),
    Case("many_batches",
         "Sequences beyond the first few are lost, or are copies of others.",
         "Loop, or launch blocks, over all B sequences.",
         "complete", take_many_batches, (*SIZED, *CAUSAL, *APART)),
    Case("wide_values",
         "Columns of wide values are lost.",
         "Take Dv from v.shape, and store every column; loop over tiles of columns.",
         "complete", take_wide_values,
         (*SIZED, *CAUSAL, "scale_ignores_the_values", "values_of_any_width",
          "any_width")),
    Case("many_tokens",
         "Sequences of several blocks are wrong.",
         "For every block of queries, visit every block of keys, including the last.",
         "kernel", take_many_tokens, (*SIZED, *CAUSAL, *SHOWN, "any_length")),
    Case("sizes_together",
         "Some sizes give wrong results.",
         "Look for a branch on the size that is named, or a constant in its place.",
         "kernel", take_all_sizes,
         (*SIZED, *CAUSAL, *APART, *SHOWN, "decode_weighs_keys", "many_heads",
          "many_batches", "wide_values", "any_length", "any_width",
          "largest_score_comes_last")),
    Case("masks_of_any_size",
         "For some sizes, the mask is read at the wrong index.",
         "Index the mask by batch, head, query and key, with stride 0 for size 1.",
         "kernel", mask_all_sizes,
         (*SIZED, *CAUSAL, *HIDES, *APART, "mask_per_head", "mask_per_sequence",
          "mask_and_causal_compose", "sizes_together", *SHOWN,
          "long_masked_matches")),
    Case("groups_of_any_size",
         "Heads share the wrong keys in larger groups, or for one query.",
         "Let head h use key head h // (H // Hk), with both counts from the shapes.",
         "complete", share_many,
         (*SIZED, *CAUSAL, *HIDES, *APART, *SHOWN, "gqa_group_is_contiguous",
          "gqa_one_key_head", "many_heads", "decode_weighs_keys", "mask_per_head",
          "mask_per_sequence", "mask_and_causal_compose")),
    Case("options_of_any_size",
         "Bias, softcap, sink, scale or window are wrong for some sizes.",
         "Index each option by its own axes; apply it in every branch.",
         "kernel", take_all_options,
         (*SIZED, *CAUSAL, *APART, "bias_is_not_scaled", "softcap_is_tanh",
          "softcap_before_mask", "softcap_before_bias", "scale_is_used",
          "sink_takes_weight", "window_counts", "mask_and_causal_compose",
          "sizes_together")),
)  # fmt: skip
