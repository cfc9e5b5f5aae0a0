"""The figures of the source documents: those that hold, and those that do not.

The documents are named S0 to S4, as in docs/errata.md.
"""

import numpy as np
import pytest
import torch
from spec import attend_by_loops

import regard
from regard import causal
from regard.definition.heads import split_heads


def draw_s3():
    """S3: "Life is short, eat dessert first", seed 123, d_q = d_k = 2, d_v = 4."""
    words = ["Life", "is", "short", "eat", "dessert", "first"]
    ids = torch.tensor([sorted(words).index(word) for word in words])
    torch.manual_seed(123)
    x = torch.nn.Embedding(50_000, 3)(ids).detach()
    torch.manual_seed(123)
    return x, *(x @ torch.rand(3, width) for width in (2, 2, 4))


def test_s3_embedding_and_context_vector_hold():
    x, q, k, v = draw_s3()
    assert x[0].tolist() == pytest.approx([0.3374, -0.1778, -0.3035], abs=5e-5)
    seen = regard.attention(q, k, v, see=("weights",))
    context = [0.5313, 1.3607, 0.7891, 1.3110]
    weights = [0.0386, 0.6870, 0.0204, 0.0840, 0.1470, 0.0229]
    assert seen.out[1].tolist() == pytest.approx(context, abs=5e-5)
    assert seen.weights[1].tolist() == pytest.approx(weights, abs=5e-5)


def test_s3_causal_weights_hold():
    _, q, k, v = draw_s3()
    seen = regard.attention(q, k, v, causal(), see=("weights",))
    second = [0.0532, 0.9468, 0, 0, 0, 0]
    last = [0.1973, 0.0247, 0.3102, 0.1132, 0.0751, 0.2794]
    assert seen.weights[1].tolist() == pytest.approx(second, abs=5e-5)
    assert seen.weights[-1].tolist() == pytest.approx(last, abs=5e-5)


def test_s3_masking_after_the_softmax_and_renormalising_gives_the_same():
    _, q, k, v = draw_s3()
    after = (
        regard.attention(q, k, v, see=("weights",)).weights * torch.ones(6, 6).tril()
    )
    before = regard.attention(q, k, v, causal(), see=("weights",)).weights
    torch.testing.assert_close(after / after.sum(-1, keepdim=True), before)
    unnormalised = after.sum(-1)  # the common mistake: rows no longer sum to 1
    assert (unnormalised[:-1] < 0.99).all()


def draw_s1():
    """S1: seed 42, four tokens of width 6, d_k = 4."""
    state = np.random.RandomState(42)
    x = state.randn(4, 6)
    return [x @ (state.randn(6, 4) * 0.5) for _ in range(3)]


def test_s1_printed_weights_are_not_those_of_its_code():
    seen = regard.attention(*draw_s1(), see=("weights",))
    computed = [
        [0.234, 0.239, 0.465, 0.063],
        [0.334, 0.146, 0.169, 0.350],
        [0.190, 0.131, 0.132, 0.547],
        [0.055, 0.223, 0.683, 0.039],
    ]
    np.testing.assert_allclose(seen.weights, computed, atol=5.1e-4)
    printed = [0.187, 0.124, 0.399, 0.315]
    assert sum(printed) == pytest.approx(1.025)
    np.testing.assert_allclose(seen.weights.sum(-1), 1, atol=1e-15)


def test_s1_scaling_table_saturates_but_with_other_numbers():
    state = np.random.RandomState(42)
    table = {
        4: (0.6650, 0.9048),
        16: (0.4708, 0.8828),
        64: (0.4617, 0.9888),
        256: (0.7101, 1.0000),
        512: (0.7490, 1.0000),
    }
    for width, expected in table.items():
        q, k = state.randn(4, width), state.randn(4, width)
        largest = [
            regard.attention(q, k, k, scale=scale, see=("weights",)).weights.max()
            for scale in (None, 1.0)
        ]
        assert largest == pytest.approx(expected, abs=5e-5)


def test_s1_exercise_1_has_another_answer():
    x = np.asarray([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    weights = regard.attention(x, x, x, see=("weights",)).weights
    third = [1 / 3] * 3
    expected = [[0.456, 0.225, 0.320], [0.225, 0.456, 0.320], third]
    np.testing.assert_allclose(weights, expected, atol=5e-4)


def test_s1_exercise_2_has_another_answer():
    state = np.random.RandomState(0)
    q, k = state.randn(3, 2), state.randn(3, 2)
    weights = regard.attention(q, k, k, causal(), see=("weights",)).weights
    expected = [[1, 0, 0], [0.460, 0.540, 0], [0.780, 0.132, 0.089]]
    np.testing.assert_allclose(weights, expected, atol=5.1e-4)


def test_s2_zero_times_minus_infinity_is_not_a_mask(rng):
    x = rng.normal(size=(3, 2))
    future = np.triu(np.ones((3, 3)), k=1)
    with np.errstate(invalid="ignore"):
        theirs = x @ x.T + future * -np.inf  # 0 * -inf is NaN in every allowed cell
    assert np.isnan(theirs[future == 0]).all()
    ours = regard.attention(x, x, x, causal(), see=("logits",)).logits
    assert np.isfinite(ours[future == 0]).all()
    assert np.isneginf(ours[future == 1]).all()


def test_s2_rows_sum_to_one_without_a_small_number_in_the_denominator(rng):
    x = rng.normal(size=(5, 4)) - 40
    q, k = x, rng.normal(size=(5, 4))
    weights = regard.attention(q, k, k, see=("weights",)).weights
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=0, atol=4e-16)


def test_s2_plus_infinity_is_not_masked():
    q, k = np.ones((1, 1)), np.asarray([[1.0], [np.inf]])
    with np.errstate(invalid="ignore"):
        seen = regard.attention(q, k, np.ones((2, 1)))
    assert np.isnan(seen.out).all()  # undefined is said, not hidden


def test_s2_fused_and_output_matrices_have_their_own_glorot_scale():
    width, heads, head = 512, 8, 64
    shared = np.sqrt(6 / (width + head))  # what S2 draws both from
    fused = np.sqrt(6 / (width + 3 * heads * head))
    output = np.sqrt(6 / (heads * head + width))
    assert (round(shared, 4), round(fused, 4), round(output, 4)) == (
        0.1021,
        0.0541,
        0.0765,
    )


def test_s4_heads_of_gpt3_are_128_wide():
    assert split_heads(np.zeros((2, 12_288)), 96).shape == (96, 2, 128)


def test_s4_copying_the_current_token_needs_no_other_token(rng):
    """A task whose target is the current token is solved by looking at oneself."""
    x = rng.normal(size=(6, 4))
    alone = regard.attention(x, x, x, regard.window(0)).out
    np.testing.assert_allclose(alone, x, atol=1e-15)
    delayed = regard.attention(  # a real copy looks back: here by two places
        x, x, x, regard.where(lambda b, h, q, k: q - k == 2)
    ).out
    np.testing.assert_allclose(delayed[2:], x[:-2], atol=1e-15)
    assert not delayed[:2].any()


def test_s0_swapping_the_weights_of_q_and_k_changes_values_not_shapes(rng):
    """A companion of S0 swaps them in cross-attention and tests the shape only."""
    x, y = rng.normal(size=(5, 4)), rng.normal(size=(7, 4))
    w_q, w_k, w_v = rng.normal(size=(3, 4, 4))
    right = regard.attention(x @ w_q, y @ w_k, y @ w_v).out
    wrong = regard.attention(x @ w_k, y @ w_q, y @ w_v).out
    expected, _, _ = attend_by_loops((x @ w_q)[None], (y @ w_k)[None], (y @ w_v)[None])
    assert right.shape == wrong.shape
    np.testing.assert_allclose(right, expected[0], atol=1e-13)
    assert np.abs(wrong - right).max() > 0.1
