"""What is refused, word for word: given, expected, what to write instead."""

import jax
import numpy as np
import pytest
import torch

import regard
from regard import causal, masks
from regard.errors import ArrayError, MaskError, OptionError, PositionError, ShapeError

Q = np.zeros((2, 4, 3, 8))
K = np.zeros((2, 4, 5, 8))


def refuse(error, words, *arrays, **options):
    with pytest.raises(error) as caught:
        regard.attention(*arrays, **options)
    assert str(caught.value) == words


def test_an_int_mask_is_refused():
    refuse(
        MaskError,
        "mask has dtype int64, expected bool: True = may attend. Write mask != 0 for a "
        "mask of zeros and ones, bias=mask to add it to the scores.",
        *(Q, K, K, np.ones((3, 5), dtype=np.int64)),
    )


def test_a_float_mask_of_zeros_and_ones_is_refused():
    refuse(
        MaskError,
        "mask has dtype float64, expected bool: True = may attend. Write mask > 0 for a "
        "mask of zeros and ones, bias=mask to add it to the scores.",
        *(Q, K, K, np.ones((3, 5))),
    )


def test_a_mask_of_batch_and_keys_is_refused():
    refuse(
        MaskError,
        "mask has shape (2, 5), expected one that fits (B, H, Nq, Nk) = (2, 4, 3, 5). "
        "Write padding(mask) if it has a row of keys for each batch.",
        *(Q, K, K, np.ones((2, 5), dtype=bool)),
    )


def test_a_mask_of_batch_and_keys_is_refused_even_if_it_fits_by_chance():
    q = np.zeros((3, 4, 3, 8))
    k = np.zeros((3, 4, 5, 8))
    refuse(
        MaskError,
        "mask has shape (3, 5), expected one that fits (B, H, Nq, Nk) = (3, 4, 3, 5). "
        "Write padding(mask) if it has a row of keys for each batch, mask[None] if its "
        "first axis is Nq.",
        *(q, k, k, np.ones((3, 5), dtype=bool)),
    )
    regard.attention(q, k, k, np.ones((3, 5), dtype=bool)[None])
    regard.attention(q, k, k, regard.padding(np.ones((3, 5), dtype=bool)))


def test_a_mask_for_each_batch_is_refused_without_a_head_axis():
    refuse(
        MaskError,
        "mask has shape (2, 3, 5), expected one that fits (B, H, Nq, Nk) = "
        "(2, 4, 3, 5). Write mask[:, None] if its first axis is the batch.",
        *(Q, K, K, np.ones((2, 3, 5), dtype=bool)),
    )


def test_any_other_shape_is_refused():
    refuse(
        MaskError,
        "mask has shape (3, 6), expected one that fits (B, H, Nq, Nk) = (2, 4, 3, 5); "
        "axes of size 1 broadcast.",
        *(Q, K, K, np.ones((3, 6), dtype=bool)),
    )
    refuse(
        MaskError,
        "bias has shape (2, 5), expected one that fits (B, H, Nq, Nk) = (2, 4, 3, 5). "
        "Write bias[:, None, None, :] if it has a row of keys for each batch.",
        *(Q, K, K),
        bias=np.ones((2, 5)),
    )


def test_positions_without_a_start_are_refused():
    refuse(
        PositionError,
        "causal() compares positions, but with 3 queries and 5 keys the position of the "
        "first query is ambiguous. Write q_start=2 if the queries are the last positions "
        "(a KV cache), or q_start=0 if queries and keys start together.",
        *(Q, K, K, causal() & masks.keys(0, 3)),
    )
    with pytest.raises(PositionError, match=r"alibi.* compares positions, but with"):
        regard.attention(Q, K, K, bias=masks.alibi(np.ones(4)))


def test_positions_that_are_no_whole_numbers_are_refused():
    for start in (1.5, [0.0, 2.0]):
        refuse(
            PositionError,
            f"q_start={start}, expected an integer position, or one per batch. "
            "Write q_start=0 if queries and keys start together.",
            *(Q, K, K, causal()),
            q_start=start,
        )


def test_no_heads_and_no_width_are_refused():
    for q, k, shapes in (
        (Q[:, :0], K[:, :0], "q (2, 0, 3, 8), k (2, 0, 5, 8), v (2, 0, 5, 8)"),
        (Q, K[:, :0], "q (2, 4, 3, 8), k (2, 0, 5, 8), v (2, 0, 5, 8)"),
        (Q[..., :0], K[..., :0], "q (2, 4, 3, 0), k (2, 4, 5, 0), v (2, 4, 5, 0)"),
    ):
        refuse(
            ShapeError,
            f"{shapes}: no heads, or heads of width 0, expected at least 1 of each. "
            "Skip the call if there are none.",
            *(q, k, k),
        )


def test_head_counts_that_do_not_divide_are_refused():
    refuse(
        ShapeError,
        "q (2, 4, 3, 8), k (2, 3, 5, 8), v (2, 3, 5, 8): 4 heads of q, 3 of k and 3 of "
        "v, expected the same number for k and v, and a multiple of it for q. Axes are "
        "(..., H, N, D): write q.swapaxes(-3, -2) if yours are (..., N, H, D).",
        *(Q, K[:, :3], K[:, :3]),
    )


def test_widths_and_lengths_that_do_not_fit_are_refused():
    refuse(
        ShapeError,
        "q (2, 4, 3, 8), k (2, 4, 5, 7), v (2, 4, 5, 8): q has width 8 and k has width "
        "7, expected the same: a score is the dot product of the two.",
        *(Q, K[..., :7], K),
    )
    refuse(
        ShapeError,
        "q (2, 4, 3, 8), k (2, 4, 5, 8), v (2, 4, 4, 8): there are 5 keys and 4 values, "
        "expected one value for each key.",
        *(Q, K, K[:, :, :4]),
    )
    refuse(
        ShapeError,
        "q (2, 4, 3, 8), k (3, 4, 5, 8), v (2, 4, 5, 8): the axes before the heads do "
        "not broadcast, expected equal sizes or 1.",
        *(Q, np.zeros((3, 4, 5, 8)), K),
    )
    refuse(
        ShapeError,
        "q (8,), k (5, 8), v (5, 8): expected at least (N, D) each. Write q[None, :] for "
        "one query vector.",
        *(Q[0, 0, 0], K[0, 0], K[0, 0]),
    )


def test_things_that_are_no_arrays_are_refused():
    refuse(
        ArrayError,
        "q is a list, expected an array. Write numpy.asarray(q), or the equivalent of "
        "your library.",
        *([[1.0]], K, K),
    )
    refuse(
        ArrayError,
        "q has dtype int64, expected floating point. Convert it, as in q.astype(float).",
        *(Q.astype(np.int64), K, K),
    )
    refuse(
        ArrayError,
        "arrays from several libraries (q: torch, k: numpy, v: numpy), expected one. "
        "Convert them to the library of q.",
        *(torch.zeros(2, 4, 3, 8), K, K),
    )


def test_masks_in_the_place_of_biases_are_refused_and_the_reverse():
    refuse(
        MaskError,
        "bias=causal() is a mask. Write mask=… instead.",
        *(Q, K, K),
        bias=causal(),
    )
    refuse(
        MaskError,
        "mask=alibi([1.0, 1.0]) is a bias. Write bias=… instead.",
        *(Q, K, K, masks.alibi(np.ones(2))),
    )
    refuse(
        MaskError,
        "mask is a function, expected a bool array or a mask such as regard.causal(). "
        "Write regard.where(fn) for a function.",
        *(Q, K, K, lambda b, h, q, k: q >= k),
    )
    refuse(
        MaskError,
        "bias is of type bool, expected a floating point array, or a bias such as "
        "regard.masks.alibi(slopes). Write mask=… for a bool array.",
        *(Q, K, K),
        bias=np.ones((3, 5), dtype=bool),
    )


def test_options_that_mean_nothing_are_refused():
    refuse(
        OptionError,
        "see='weights', expected a tuple. Write see=(\"weights\",).",
        *(Q, K, K),
        see="weights",
    )
    refuse(
        OptionError,
        'there is no step "probs"; there are scores, capped, logits, weights.',
        *(Q, K, K),
        see=("probs",),
    )
    refuse(
        OptionError,
        "block= never holds a whole step, so it cannot be combined with see= or edit=. "
        "Omit block= to see or edit a step.",
        *(Q, K, K),
        see=("weights",),
        block=2,
    )
    refuse(
        OptionError,
        "block=0, expected rows and keys of at least 1. Write block=512.",
        *(Q, K, K),
        block=0,
    )
    refuse(
        OptionError,
        "softcap=0, expected a number above 0, or None.",
        *(Q, K, K),
        softcap=0,
    )
    refuse(
        OptionError,
        "softcap=inf, expected a number above 0, or None.",
        *(Q, K, K),
        softcap=np.inf,
    )
    refuse(
        OptionError,
        "block=(2,), expected rows and keys of at least 1. Write block=512.",
        *(Q, K, K),
        block=(2,),
    )
    refuse(
        ShapeError,
        "sink has shape (3,), expected a number, or one per head: (4,).",
        *(Q, K, K),
        sink=np.zeros(3),
    )
    refuse(
        ShapeError,
        "q_start has shape (3,), expected one integer, or one per batch: (2,).",
        *(Q, K, K, causal()),
        q_start=np.zeros(3, dtype=int),
    )


def test_patterns_say_how_they_are_called():
    for make, words in (
        (
            lambda: masks.window(-1),
            "window(-1, 0): both count other tokens, expected at least 0. Write "
            "window(0) for the token itself only, None for no limit.",
        ),
        (
            lambda: masks.window(2.5),
            "window(2.5, 0): both count other tokens, expected integers or None. "
            "Write window(2) for the two tokens before it.",
        ),
        (
            lambda: masks.keys([0, 1], [1, 2, 3]),
            "keys() got 2 values for lo and 3 for hi, expected one of each per batch. "
            "Write an integer for a bound that all batches share.",
        ),
        (
            lambda: masks.prefix(0.5),
            "hi has shape () and dtype float64, expected () or (B,) of integers.",
        ),
        (
            lambda: masks.same(np.zeros((2, 4), int), np.zeros((3, 4), int)),
            "same() got ids for 2 batches of queries and 3 of keys, expected equal batch "
            "sizes. Write ids (N,) if all batches share them.",
        ),
        (
            lambda: masks.padding(lengths=5),
            "lengths has shape () and dtype int64, expected (B,) of integers.",
        ),
        (
            lambda: masks.added(np.ones((3, 3), dtype=bool)),
            "values has shape (3, 3) and dtype bool, expected (B, H, Nq, Nk) or "
            "(H, Nq, Nk) or (Nq, Nk) of numbers.",
        ),
        (
            lambda: masks.added(np.ones((1, 1, 1, 3, 3))),
            "values has shape (1, 1, 1, 3, 3) and dtype float64, expected "
            "(B, H, Nq, Nk) or (H, Nq, Nk) or (Nq, Nk) of numbers.",
        ),
        (
            lambda: masks.added(np.ones((3, 3)), q_start=[0, 1]),
            "added(q_start=[0, 1]), expected a single position. To use row i for query i "
            "in every batch, pass the array itself: bias=x.",
        ),
        (
            lambda: masks.alibi(1),
            "alibi(1), expected a slope for each head. Write "
            "alibi(regard.definition.position.alibi_slopes(1)).",
        ),
        (
            lambda: masks.table(np.zeros((1, 4))),
            "4 buckets, expected an odd number: -R … 0 … R. Pass values of shape (H, 5), "
            "or a function of the offset: table(values, bucket).",
        ),
        (
            lambda: masks.per_head(causal()),
            "per_head() takes a list of masks, one for each head.",
        ),
        (
            lambda: masks.last(0),
            "last(0), expected an integer of at least 1: the count includes the query. "
            "Write last(1) for the token itself only.",
        ),
        (
            lambda: masks.last("a"),
            "last(a), expected an integer of at least 1: the count includes the query. "
            "Write last(1) for the token itself only.",
        ),
        (
            masks.padding,
            "padding() takes either valid (B, Nk) or lengths=(B,).",
        ),
        (
            lambda: masks.padding(np.full((2, 5), 2)),
            "valid has shape (2, 5) and dtype int64, expected (B, Nk) of True and False. "
            "Write valid != 0 if it is of zeros and ones.",
        ),
        (
            lambda: masks.padding(lengths=[0.5]),
            "lengths has shape (1,) and dtype float64, expected (B,) of integers.",
        ),
        (
            lambda: masks.same(np.zeros((1, 2, 3))),
            "ids has shape (1, 2, 3) and dtype float64, expected (N,) or (B, N) of "
            "integers.",
        ),
        (
            lambda: masks.where(np.ones(3)),
            "where() takes a function fn(b, h, q, k), not ndarray. Write "
            "regard.masks.array(x) for an array.",
        ),
        (
            lambda: masks.array(np.ones(3, dtype=bool)),
            "array has shape (3,) and dtype bool, expected (B, H, Nq, Nk) or "
            "(H, Nq, Nk) or (Nq, Nk) of True and False.",
        ),
        (
            lambda: masks.array([[1.0]]),
            "array has shape (1, 1) and dtype float64, expected (B, H, Nq, Nk) or "
            "(H, Nq, Nk) or (Nq, Nk) of True and False. Write array != 0 if it is of "
            "zeros and ones.",
        ),
        (
            lambda: masks.per_head([]),
            "per_head() takes a list of masks, one for each head.",
        ),
    ):
        with pytest.raises(MaskError) as caught:
            make()
        assert str(caught.value) == words


def test_a_function_that_returns_no_truth_is_refused():
    def score(b, h, q, k):
        return q - k

    with pytest.raises(MaskError) as caught:
        regard.attention(Q, Q, Q, regard.where(score))
    assert str(caught.value).endswith(
        "score) returned int64, expected a bool array: True = may attend. Write a "
        "comparison, as in where(lambda b, h, q, k: k <= q)."
    )


def test_traced_data_in_a_blocked_call_is_refused():
    def run(lengths):
        return regard.attention(Q, Q, Q, masks.padding(lengths=lengths), block=2).out

    with pytest.raises(ArrayError, match=r"not known while a function is traced. Omit"):
        jax.jit(run)(jax.numpy.asarray([2, 3]))


def test_one_except_catches_all():
    with pytest.raises(regard.errors.RegardError):
        regard.attention(Q, K, K, causal())
