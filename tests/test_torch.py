"""Parity with PyTorch: SDPA, CausalBias, FlexAttention, MultiheadAttention, OpInfo.

Where PyTorch has a convention of its own (causal from the top left, a float mask that
is added, True = ignore in MultiheadAttention), the test says what to write for us.
"""

import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import and_masks, create_mask, or_masks
from torch.nn.functional import linear, scaled_dot_product_attention

import regard
from regard.definition.heads import join_heads, split_heads
from regard.masks import array, everything, last, per_head, prefix

TORCH = torch.empty(0)
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def draw(*shapes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)
        for s in shapes
    ]


def assert_close(ours, theirs, dtype, *, units=16):
    """Compare within some units in the last place of numbers around 1."""
    assert ours.shape == theirs.shape
    eps = torch.finfo(dtype).eps
    bound = units * eps if eps < 1e-6 else units / 4 * eps  # halves add up in float32
    torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


# --- scaled_dot_product_attention ----------------------------------------------------


class Case(NamedTuple):
    """Options of SDPA, and the same for us."""

    theirs: dict
    ours: dict
    q: tuple[int, ...] = (2, 4, 5, 8)
    k: tuple[int, ...] = (2, 4, 7, 8)
    d_v: int = 8


def random_mask(*shape):
    """Return a bool mask in which every row has a key."""
    (scores,) = draw(shape, seed=7)
    return (scores > 0.3) | (scores == scores.amax(-1, keepdim=True))


def random_bias(*shape, forbid=False):
    (bias,) = draw(shape, seed=8)
    return torch.where(random_mask(*shape), bias, -torch.inf) if forbid else bias


def empty_row():
    mask = random_mask(1, 1, 5, 7)
    mask[..., 2, :] = False
    return mask


SQUARE, GROUPED = (2, 4, 6, 8), (2, 6, 5, 8)
TOP_LEFT = {"mask": regard.causal(), "q_start": 0}
CASES = {
    "nothing": Case({}, {}),
    "three axes": Case({}, {}, (4, 5, 8), (4, 7, 8)),
    "five axes": Case({}, {}, (3, 2, 4, 5, 8), (3, 2, 4, 7, 8)),
    "one query": Case({}, {}, (2, 4, 1, 8)),
    "causal": Case({"is_causal": True}, {"mask": regard.causal()}, SQUARE, SQUARE),
    "causal, more keys": Case({"is_causal": True}, TOP_LEFT),
    "causal, more queries": Case({"is_causal": True}, TOP_LEFT, (2, 4, 9, 8)),
    "causal, one query": Case({"is_causal": True}, TOP_LEFT, (2, 4, 1, 8)),
    "bool mask": Case(
        {"attn_mask": random_mask(2, 4, 5, 7)}, {"mask": random_mask(2, 4, 5, 7)}
    ),
    "bool mask for all": Case(
        {"attn_mask": random_mask(5, 7)}, {"mask": random_mask(5, 7)}
    ),
    "bool mask of keys": Case(
        {"attn_mask": random_mask(2, 1, 1, 7)},
        {"mask": regard.padding(random_mask(2, 1, 1, 7)[:, 0, 0])},
    ),
    "bool mask with an empty row": Case(
        {"attn_mask": empty_row()}, {"mask": empty_row()}
    ),
    "float mask": Case(
        {"attn_mask": random_bias(2, 4, 5, 7)}, {"bias": random_bias(2, 4, 5, 7)}
    ),
    "float mask for all": Case(
        {"attn_mask": random_bias(5, 7)}, {"bias": random_bias(5, 7)}
    ),
    "float mask with -inf": Case(
        {"attn_mask": random_bias(1, 4, 5, 7, forbid=True)},
        {"bias": random_bias(1, 4, 5, 7, forbid=True)},
    ),
    "scale": Case({"scale": 0.7}, {"scale": 0.7}),
    "negative scale": Case({"scale": -0.5}, {"scale": -0.5}),
    "narrow values": Case({}, {}, d_v=3),
    "wide values, causal": Case({"is_causal": True}, TOP_LEFT, d_v=12),
    "grouped heads": Case({"enable_gqa": True}, {}, GROUPED, (2, 2, 7, 8)),
    "one head of keys": Case({"enable_gqa": True}, {}, GROUPED, (2, 1, 7, 8)),
    "grouped heads, causal": Case(
        {"enable_gqa": True, "is_causal": True}, TOP_LEFT, GROUPED, (2, 3, 7, 8)
    ),
    "grouped heads, bool mask, narrow values": Case(
        {"enable_gqa": True, "attn_mask": random_mask(2, 6, 5, 7)},
        {"mask": random_mask(2, 6, 5, 7)},
        GROUPED,
        (2, 3, 7, 8),
        d_v=5,
    ),
    "grouped heads, float mask, scale": Case(
        {"enable_gqa": True, "attn_mask": random_bias(1, 6, 5, 7), "scale": 0.4},
        {"bias": random_bias(1, 6, 5, 7), "scale": 0.4},
        GROUPED,
        (2, 3, 7, 8),
    ),
}


def cast(options, dtype):
    """Return the options with floats in this dtype; bool masks stay."""
    return {
        name: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x
        for name, x in options.items()
    }


def draw_inputs(case, dtype):
    *lead, n_k, _ = case.k
    q, k, v, grad = draw(
        case.q, case.k, (*lead, n_k, case.d_v), (*case.q[:-1], case.d_v), dtype=dtype
    )
    return [x.requires_grad_() for x in (q, k, v)], grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("backends", [None, SDPBackend.MATH], ids=["default", "math"])
def test_values_and_gradients_equal_those_of_sdpa(case, dtype, backends):
    inputs, grad = draw_inputs(case, dtype)
    with sdpa_kernel(backends or [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        theirs = scaled_dot_product_attention(*inputs, **cast(case.theirs, dtype))
        expected = torch.autograd.grad(theirs, inputs, grad)
    ours = regard.attention(*inputs, **cast(case.ours, dtype)).out
    assert ours.dtype == theirs.dtype == dtype
    assert_close(ours, theirs, dtype)
    got = torch.autograd.grad(ours, inputs, grad)
    for mine, other in zip(got, expected, strict=True):
        assert_close(mine, other, dtype, units=32)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (1, 4, 5, 7), (2, 1, 1, 7), (5, 7)])
def test_the_gradient_of_a_bias_equals_that_of_a_float_mask(shape, dtype):
    q, k, v, bias, grad = draw(
        (2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), shape, (2, 4, 5, 8), dtype=dtype
    )
    bias.requires_grad_()
    theirs = scaled_dot_product_attention(q, k, v, attn_mask=bias)
    ours = regard.attention(q, k, v, bias=bias).out
    assert_close(ours, theirs, dtype)
    (expected,) = torch.autograd.grad(theirs, bias, grad)
    (got,) = torch.autograd.grad(ours, bias, grad)
    assert expected.abs().max() > 0.1
    assert_close(got, expected, dtype, units=32)


@pytest.mark.parametrize("block", [1, 3, (2, 4)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_blocks_give_the_values_and_gradients_of_sdpa(case, block):
    inputs, grad = draw_inputs(case, torch.float64)
    theirs = scaled_dot_product_attention(*inputs, **case.theirs)
    ours = regard.attention(*inputs, **case.ours, block=block).out
    assert_close(ours, theirs, torch.float64)
    expected = torch.autograd.grad(theirs, inputs, grad)
    for mine, other in zip(
        torch.autograd.grad(ours, inputs, grad), expected, strict=True
    ):
        assert_close(mine, other, torch.float64, units=32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_rounded_once_at_the_end(dtype):
    """As if the inputs were float32, but for rounding that falls on the other side."""
    q, k, v = draw((2, 4, 32, 8), (2, 2, 48, 8), (2, 2, 48, 8), dtype=dtype)
    done = regard.attention(q, k, v)
    q, k, v = (
        q.float(),
        k.float().repeat_interleave(2, 1),
        v.float().repeat_interleave(2, 1),
    )
    theirs = scaled_dot_product_attention(q, k, v)
    assert (done.out == theirs.to(dtype)).double().mean() > 0.99
    scores = q @ k.mT / 8**0.5
    assert_close(done.lse, scores.logsumexp(-1), torch.float32)


def test_strides_do_not_matter():
    q, k, v = draw((2, 5, 4, 8), (2, 7, 4, 8), (2, 7, 4, 8))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k = k[:, :1].expand(2, 4, 7, 8)
    theirs = scaled_dot_product_attention(*(x.contiguous() for x in (q, k, v)))
    assert_close(regard.attention(q, k, v).out, theirs, torch.float64)


# --- CausalBias ----------------------------------------------------------------------

SIZES = [
    *[(n, n) for n in (1, 2, 5, 8, 16)],
    *[(1, 2), (1, 9), (2, 3), (3, 8), (4, 5), (5, 16), (7, 64), (8, 9), (31, 33)],
    *[(2, 1), (9, 1), (8, 3), (5, 4), (16, 5), (64, 7), (33, 31)],
]


def test_at_least_18_pairs_of_sizes_are_compared():
    assert len(set(SIZES)) == len(SIZES) >= 18


@pytest.mark.parametrize(("n_q", "n_k"), SIZES)
def test_causal_from_zero_is_upper_left(n_q, n_k):
    theirs = causal_upper_left(n_q, n_k)
    ours = regard.causal().dense((n_q, n_k), q_start=0, like=TORCH)
    assert torch.equal(theirs._materialize(), ours)
    q, k, v = draw((2, 3, n_q, 8), (2, 3, n_k, 8), (2, 3, n_k, 8))
    out = scaled_dot_product_attention(q, k, v, theirs)
    ours = regard.attention(q, k, v, regard.causal(), q_start=0).out
    assert_close(ours, out, torch.float64)


@pytest.mark.filterwarnings("ignore:Lower right causal bias:UserWarning")
@pytest.mark.parametrize(("n_q", "n_k"), SIZES)
def test_causal_up_to_the_end_is_lower_right(n_q, n_k):
    """With more queries than keys, the first ones stand before every key."""
    theirs = causal_lower_right(n_q, n_k)
    ours = regard.causal().dense((n_q, n_k), q_start=n_k - n_q, like=TORCH)
    assert torch.equal(theirs._materialize(), ours)
    q, k, v = draw((2, 3, n_q, 8), (2, 3, n_k, 8), (2, 3, n_k, 8))
    out = scaled_dot_product_attention(q, k, v, theirs._materialize())
    ours = regard.attention(q, k, v, regard.causal(), q_start=n_k - n_q).out
    assert_close(ours, out, torch.float64)


# --- FlexAttention -------------------------------------------------------------------

DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3])
LENGTHS = torch.tensor([10, 4, 0])


def see_past(b, h, q, k):
    return q >= k


def see_near(b, h, q, k):
    return (q - k).abs() <= 2


def see_document(b, h, q, k):
    return DOCUMENTS[q] == DOCUMENTS[k]


def see_tokens(b, h, q, k):
    return k < LENGTHS[b]


def see_by_head(b, h, q, k):
    return k % 2 == h


MODS = {
    "causal": (see_past, regard.causal()),
    "near": (see_near, regard.window(2, 2)),
    "documents": (see_document, regard.same(DOCUMENTS)),
    "tokens": (see_tokens, regard.padding(lengths=LENGTHS)),
    "by head": (
        see_by_head,
        per_head([array(torch.arange(10)[None, :] % 2 == h) for h in range(2)]),
    ),
    "and": (
        and_masks(see_past, see_near, see_document),
        last(3) & regard.same(DOCUMENTS),
    ),
    "or": (
        or_masks(see_past, lambda b, h, q, k: k < 3),
        prefix(3),
    ),
    "all of it": (
        and_masks(or_masks(see_past, see_document), see_tokens),
        (regard.causal() | regard.same(DOCUMENTS)) & regard.padding(lengths=LENGTHS),
    ),
    "nothing": (lambda b, h, q, k: q < 0, ~everything()),
}


@pytest.mark.parametrize(("mod", "formula"), MODS.values(), ids=MODS)
def test_mask_mods_of_flex_attention_plug_in_as_they_are(mod, formula):
    shape = (3, 2, 10, 10)
    theirs = create_mask(mod, *shape, device="cpu")
    assert torch.equal(theirs, regard.where(mod).dense(shape, like=TORCH))
    assert torch.equal(theirs, formula.dense(shape, like=TORCH))


@pytest.mark.parametrize("formula", [f for _, f in MODS.values()], ids=MODS)
def test_formulas_are_mask_mods_for_flex_attention(formula):
    shape = (3, 2, 10, 10)
    theirs = create_mask(formula, *shape, device="cpu")
    assert torch.equal(theirs, formula.dense(shape, like=TORCH))


# --- MultiheadAttention --------------------------------------------------------------


def make_layer(**options):
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(
        12, 3, batch_first=True, dtype=torch.float64, **options
    )
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(std=0.5)
    return layer


def attend_by_hand(layer, x, y, **options):
    """Apply the layer's projections around our attention."""
    if layer.in_proj_weight is None:
        weights = layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight
    else:
        weights = layer.in_proj_weight.chunk(3)
    biases = layer.in_proj_bias.chunk(3)
    q, k, v = (
        split_heads(linear(z, w, b), layer.num_heads)
        for z, w, b in zip((x, y, y), weights, biases, strict=True)
    )
    done = regard.attention(q, k, v, **options, see=("weights",))
    out = linear(join_heads(done.out), layer.out_proj.weight, layer.out_proj.bias)
    return out, done.weights


VALID = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
MULTIHEAD = {
    "nothing": ({}, {}),
    "padding": ({"key_padding_mask": ~VALID}, {"mask": regard.padding(VALID)}),
    "bool mask": (
        {"attn_mask": ~random_mask(5, 7)},  # their True is: ignore
        {"mask": random_mask(5, 7)},
    ),
    "bool mask by head": (
        {"attn_mask": ~random_mask(2, 3, 5, 7).reshape(6, 5, 7)},
        {"mask": random_mask(2, 3, 5, 7)},
    ),
    "causal and padding": (
        {
            "attn_mask": torch.ones(5, 7, dtype=torch.bool).triu(1),
            "key_padding_mask": ~VALID,
        },
        {"mask": regard.causal() & regard.padding(VALID), "q_start": 0},
    ),
    "float mask": ({"attn_mask": random_bias(5, 7)}, {"bias": random_bias(5, 7)}),
}


@pytest.mark.parametrize(("theirs", "ours"), MULTIHEAD.values(), ids=MULTIHEAD)
@pytest.mark.parametrize(
    "options", [{}, {"kdim": 10, "vdim": 10}], ids=["self", "cross"]
)
@pytest.mark.parametrize("looking", [True, False], ids=["looking", "not looking"])
def test_values_and_gradients_equal_those_of_multihead_attention(
    theirs, ours, options, looking
):
    layer = make_layer(**options)
    x, y, grad = draw((2, 5, 12), (2, 7, layer.kdim), (2, 5, 12))
    out, weights = layer(
        x, y, y, **theirs, need_weights=looking, average_attn_weights=False
    )
    got, seen = attend_by_hand(layer, x, y, **ours)
    assert_close(got, out, torch.float64, units=64)
    if looking:
        assert_close(seen, weights, torch.float64, units=64)
    parameters = list(layer.parameters())
    expected = torch.autograd.grad(out, parameters, grad)
    for mine, other in zip(
        torch.autograd.grad(got, parameters, grad), expected, strict=True
    ):
        assert_close(mine, other, torch.float64, units=1024)


def test_the_polarity_of_multihead_attention_is_the_inverse():
    layer = make_layer()
    x, y = draw((2, 5, 12), (2, 7, 12))
    mask = random_mask(5, 7)
    out, _ = layer(x, y, y, attn_mask=mask)  # their True is: ignore
    got, _ = attend_by_hand(layer, x, y, mask=mask)
    assert (got - out).abs().max() > 0.1


# --- torch.func ----------------------------------------------------------------------


def test_vmap_gives_the_same_as_a_batch():
    q, k, v = draw((3, 4, 5, 8), (3, 2, 7, 8), (3, 2, 7, 6))
    ids = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0] * 7, [0, 1, 2, 3, 3, 3, 3]])
    lengths = torch.tensor([[7], [5], [2]])
    allowed = random_mask(3, 1, 5, 7)

    def attend(q, k, v, allowed, ids, n):
        first = regard.attention(q, k, v, allowed)
        mask = regard.causal() & regard.same(ids) & regard.padding(lengths=n)
        second = regard.attention(q, k, v, mask, q_start=2)
        return first.out, first.lse, second.out, second.lse

    got = torch.func.vmap(attend)(q, k, v, allowed, ids, lengths)
    first = regard.attention(q, k, v, allowed)
    mask = regard.causal() & regard.same(ids) & regard.padding(lengths=lengths[:, 0])
    second = regard.attention(q, k, v, mask, q_start=2)
    expected = first.out, first.lse, second.out, second.lse
    for mine, other in zip(got, expected, strict=True):
        assert_close(mine, other, torch.float64)
    assert second.lse.isinf().any()  # rows with nothing to see, too


def test_vmap_over_queries_alone_shares_the_keys():
    q, k, v = draw((3, 4, 5, 8), (4, 5, 8), (4, 5, 8))
    attend = torch.func.vmap(
        lambda q, k, v: regard.attention(q, k, v, regard.causal()).out,
        in_dims=(0, None, None),
    )
    theirs = scaled_dot_product_attention(
        q, k.expand(3, 4, 5, 8), v.expand(3, 4, 5, 8), is_causal=True
    )
    assert_close(attend(q, k, v), theirs, torch.float64)


def test_vmapped_grad_gives_the_gradient_of_each_sample():
    q, k, v = draw((3, 4, 5, 8), (3, 4, 5, 8), (3, 4, 5, 8))

    def loss(q, k, v):
        return regard.attention(q, k, v, regard.causal()).out.square().sum()

    got = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    theirs = scaled_dot_product_attention(*inputs, is_causal=True).square().sum()
    for mine, other in zip(got, torch.autograd.grad(theirs, inputs), strict=True):
        assert_close(mine, other, torch.float64, units=64)


# --- OpInfo --------------------------------------------------------------------------

# PyTorch's own samples. Importing them changes global settings of torch, so a process
# of its own does.
SAMPLES = """
import sys
import torch
from torch.testing._internal.common_methods_invocations import op_db
(op,) = [x for x in op_db if x.name == "nn.functional.scaled_dot_product_attention"]
torch.manual_seed(0)
torch.save(
    [
        ([s.input.detach(), *(x.detach() for x in s.args)], s.kwargs)
        for dtype in (torch.float32, torch.float64)
        for s in op.sample_inputs("cpu", dtype, requires_grad=False)
    ],
    sys.argv[1],
)
"""


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    path = tmp_path_factory.mktemp("opinfo") / "samples.pt"
    subprocess.run([sys.executable, "-c", SAMPLES, str(path)], check=True)
    return [s for s in torch.load(path) if not s[1].get("dropout_p")]


def test_samples_of_opinfo_give_the_same_as_sdpa(samples):
    assert len(samples) == 26
    for inputs, options in samples:
        assert set(options) <= {"attn_mask", "dropout_p", "is_causal"}
        theirs = scaled_dot_product_attention(*inputs, **options)
        ours = regard.attention(
            *inputs,
            regard.causal() if options["is_causal"] else None,
            bias=options.get("attn_mask"),
            q_start=0,
        )
        # their numbers reach 9, so do the scores' squares
        assert_close(ours.out, theirs, theirs.dtype, units=1024)
