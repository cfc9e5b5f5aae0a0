"""The engine against the definition: values and gradients, in every combination."""

import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
from regard.definition.attention import STEPS
from regard.engine import attend, choose
from regard.engine.choose import CAN_TRACE
from regard.engine.flash import attend_part
from regard.engine.sdpa import sdpa_arguments
from regard.engine.tiles import KeyBlock, plan
from regard.errors import OptionError
from regard.masks import (
    added,
    alibi,
    array,
    causal,
    everything,
    keys,
    padding,
    per_head,
    same,
    table,
    where,
    window,
)

SDPA = torch.nn.functional.scaled_dot_product_attention

# Errors are measured against the definition in float64, in units of the dtype's rounding
# and of the largest number involved.
ULPS = {torch.float64: 64, torch.float32: 64, torch.bfloat16: 8}

MASKS = {
    "none": None,
    "causal": causal(),
    "window": window(9),
    "documents": causal() & same(np.arange(300) // 23),
    "sink tokens": window(30) | keys(0, 2),  # two runs of keys
    "empty rows": causal() & ~window(31),
    "a batch of padding": causal() & padding(lengths=[0, 70]),
    "by head": per_head([causal(), window(5, 5), everything(), keys(3, 40)]),
    "function": where(lambda b, h, q, k: (q + k) % 3 == 0),
    "array": np.random.default_rng(1).random((2, 1, 40, 90)) < 0.3,
}
OPTIONS = ("none", "bias", "formula bias", "softcap", "sink")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
HEADS = (1, 2, 4)  # of k: MQA, GQA, MHA
WIDTHS = (8, 5, 11)  # of v: as k, smaller, larger


def draw(*shape, seed):
    """Return numbers that every dtype holds exactly, so that one truth serves all."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng).bfloat16().double()


def make_option(name):
    return {
        "none": {},
        "bias": {"bias": draw(40, 90, seed=1)},
        "formula bias": {"bias": alibi(torch.tensor([0.1, 0.2, 0.3, 0.4]))},
        "softcap": {"softcap": 2.0},
        "sink": {"sink": draw(4, seed=1)},
    }[name]


def run(function, arrays, mask, option):
    """Return out, lse and the gradients under fixed random weights of both."""
    arrays = [x.clone().requires_grad_() for x in arrays]
    seen = function(*arrays, mask, q_start=37, **option)
    lse = torch.where(torch.isneginf(seen.lse), 0, seen.lse)
    out_weight, lse_weight = draw(*seen.out.shape, seed=2), draw(*lse.shape, seed=3)
    ((seen.out * out_weight).sum() + (lse * lse_weight).sum()).backward()
    return seen.out.detach(), seen.lse.detach(), *(x.grad for x in arrays)


def find_error(fast, true, dtype):
    """Return what differs by more than the rounding of the dtype, or nothing."""
    for what, a, b in zip(("out", "lse", "dq", "dk", "dv"), fast, true, strict=True):
        finite = ~torch.isneginf(b)
        if not torch.equal(torch.isneginf(a), ~finite):
            return f"{what} has other infinities"
        largest = float(b[finite].abs().max()) if finite.any() else 0.0
        bound = ULPS[dtype] * torch.finfo(dtype).eps * (1 + largest)
        if what == "lse" and dtype == torch.bfloat16:
            bound = 2e-4 * (1 + largest)  # exponentials are rounded, then summed
        error = float((a.double() - b)[finite].abs().max()) if finite.any() else 0.0
        if not error <= bound:
            return f"{what}: {error:.1e} > {bound:.1e}"
    return ""


@pytest.mark.parametrize("name", MASKS)
def test_engine_equals_the_definition_in_values_and_gradients(name):
    mask = MASKS[name]
    mask = torch.from_numpy(mask) if isinstance(mask, np.ndarray) else mask
    assert len(MASKS) * len(DTYPES) * len(HEADS) * len(WIDTHS) * len(OPTIONS) >= 1_000
    for shared, width, option in itertools.product(HEADS, WIDTHS, OPTIONS):
        shapes = ((2, 4, 40, 8), (2, shared, 90, 8), (2, shared, 90, width))
        arrays = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
        given = make_option(option)
        true = run(regard.attention, arrays, mask, given)
        for dtype in DTYPES:
            few = {
                n: x.to(dtype) if torch.is_tensor(x) else x for n, x in given.items()
            }
            fast = run(attend, [x.to(dtype) for x in arrays], mask, few)
            assert fast[0].dtype == dtype
            assert not find_error(fast, true, dtype), (shared, width, option, dtype)


@pytest.mark.parametrize(
    "shape", [(40, 8), (4, 40, 8), (2, 4, 40, 8), (3, 2, 4, 40, 8)]
)
def test_any_number_of_leading_axes(shape, rng):
    q, k, v = (torch.tensor(rng.normal(size=shape)) for _ in range(3))
    for mask in (None, causal(), causal() & window(7)):
        fast, slow = attend(q, k, v, mask), regard.attention(q, k, v, mask)
        torch.testing.assert_close(fast.out, slow.out, atol=1e-12, rtol=0)
        torch.testing.assert_close(fast.lse, slow.lse, atol=1e-12, rtol=0)
    shared = attend(q, k[..., :1, :, :], v[..., :1, :, :]) if len(shape) > 2 else None
    if shared:
        expected = regard.attention(q, k[..., :1, :, :], v[..., :1, :, :])
        torch.testing.assert_close(shared.out, expected.out, atol=1e-12, rtol=0)


def test_queries_can_start_anywhere(rng):
    q = torch.tensor(rng.normal(size=(3, 4, 5, 8)))
    k, v = (torch.tensor(rng.normal(size=(3, 4, 20, 8))) for _ in range(2))
    for start in (0, 3, 15, 19, 40, -2, torch.tensor([0, 7, 15])):
        for mask in (causal(), causal() & window(6)):
            fast = attend(q, k, v, mask, q_start=start)
            slow = regard.attention(q, k, v, mask, q_start=start)
            torch.testing.assert_close(fast.out, slow.out, atol=1e-12, rtol=0)
            torch.testing.assert_close(fast.lse, slow.lse, atol=1e-12, rtol=0)


def test_learned_biases_and_sinks_get_their_gradients(rng):
    q, k, v = (torch.tensor(rng.normal(size=(4, 6, 8))) for _ in range(3))

    def both(function):
        given = [
            torch.tensor(rng2.normal(size=s)) for s in ((4,), (4, 5), (6, 6), (4,))
        ]
        slopes, values, dense, sink = (x.requires_grad_() for x in given)
        bias = alibi(slopes) + table(values) + added(dense)
        out = function(q, k, v, causal(), bias=bias, sink=sink).out
        return torch.autograd.grad(out.square().sum(), (slopes, values, dense, sink))

    rng2 = np.random.default_rng(5)
    fast = both(attend)
    rng2 = np.random.default_rng(5)
    for a, b in zip(fast, both(regard.attention), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_one_sink_for_all_heads(rng):
    q, k, v = (torch.tensor(rng.normal(size=(4, 6, 8))) for _ in range(3))
    for sink in (0.5, torch.tensor(0.5), [0.5] * 4):
        fast = attend(q, k, v, causal(), sink=sink)
        slow = regard.attention(q, k, v, causal(), sink=sink)
        torch.testing.assert_close(fast.out, slow.out, atol=1e-12, rtol=0)
        torch.testing.assert_close(fast.lse, slow.lse, atol=1e-12, rtol=0)


@pytest.mark.parametrize("sinks", [[-np.inf] * 2, [-np.inf, 0.5], [-1.0, 800.0]])
def test_sinks_may_be_minus_infinity_even_where_nothing_is_seen(rng, sinks):
    arrays = [torch.tensor(rng.normal(size=(1, 2, 4, 3))) for _ in "qkv"]
    seen = torch.ones(4, 4, dtype=torch.bool)
    seen[1] = False  # a row that sees nothing
    for mask, cap in ((seen, None), (keys(0, 0), None), (causal(), None), (seen, 5.0)):
        found = []
        for run in (attend, regard.attention):
            given = [*arrays, torch.tensor(sinks, dtype=torch.float64)]
            q, k, v, sink = (x.clone().requires_grad_() for x in given)
            done = run(q, k, v, mask, sink=sink, softcap=cap)
            lse = torch.where(torch.isneginf(done.lse), 0, done.lse)
            loss = (done.out * arrays[0]).sum() + (lse * arrays[1][..., 0]).sum()
            grads = torch.autograd.grad(loss, (q, k, v, sink))
            found.append([done.out, done.lse, *grads])
        for fast, slow in zip(*found, strict=True):
            assert not fast.isnan().any()
            torch.testing.assert_close(fast, slow, atol=1e-12, rtol=0)


def test_gradients_pass_gradcheck(rng):
    arrays = [
        torch.tensor(rng.normal(size=(1, 2, 6, 3)), requires_grad=True) for _ in "qkv"
    ]
    for mask in (None, causal(), window(2), causal() & ~window(1)):

        def out_and_lse(q, k, v, mask=mask):
            seen = attend(q, k, v, mask)
            return seen.out, torch.where(torch.isneginf(seen.lse), 0, seen.lse)

        assert torch.autograd.gradcheck(out_and_lse, arrays)


def test_asking_to_see_gives_the_same_bits(rng):
    q, k, v = (
        torch.tensor(rng.normal(size=(2, 4, 40, 8)), dtype=torch.float32) for _ in "qkv"
    )
    for mask in (None, causal(), causal() & window(5)):
        plain, seen = attend(q, k, v, mask), attend(q, k, v, mask, see=STEPS)
        assert torch.equal(plain.out, seen.out)
        assert torch.equal(plain.lse, seen.lse)
        torch.testing.assert_close(seen.weights @ v, seen.out)


def test_edit_and_block_ask_for_the_definition(rng):
    q, k, v = (torch.tensor(rng.normal(size=(2, 4, 40, 8))) for _ in "qkv")
    for options in ({"edit": {"weights": lambda w: 0.5 * w}}, {"block": 7}):
        fast = attend(q, k, v, causal(), **options)
        slow = regard.attention(q, k, v, causal(), **options)
        assert torch.equal(fast.out, slow.out)


def test_a_scale_may_be_an_array(rng):
    q, k, v = (torch.tensor(rng.normal(size=(1, 2, 4, 3))) for _ in "qkv")
    for scale in (torch.tensor([0.5, 2.0])[:, None, None], np.array([0.5])):
        with torch.no_grad():
            fast = attend(q, k, v, scale=scale)
        slow = regard.attention(q, k, v, scale=scale)
        torch.testing.assert_close(fast.out, slow.out, atol=1e-12, rtol=0)


def test_a_number_of_numpy_is_a_number(rng):
    q, k, v = (torch.tensor(rng.normal(size=(1, 2, 4, 3))) for _ in "qkv")
    given = {"scale": 1 / np.sqrt(3), "q_start": np.int64(0)}
    assert choose(q, k, v, causal(), **given).kernel == "flash"
    fast, slow = attend(q, k, v, causal(), **given), attend(q, k, v, causal())
    assert torch.equal(fast.out, slow.out)


def test_see_takes_no_keys_and_block_takes_no_zero(rng):
    q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 0, 4)
    assert tuple(attend(q, k, k, see=("weights",)).weights.shape) == (1, 2, 3, 0)
    with pytest.raises(
        OptionError, match="block=0, expected rows and keys of at least"
    ):
        attend(q, q, q, block=0)


# The traps of the kernel.


def test_trap_a_row_that_sees_nothing_has_lse_minus_inf(rng):
    q, k, v = (torch.tensor(rng.normal(size=(1, 2, 3, 4))) for _ in "qkv")
    bias = torch.zeros(1, 1, 3, 3, dtype=torch.float64)
    bias[..., 1, :] = -torch.inf
    _, raw = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=bias
    )
    assert (raw[..., 1] == 0).all()  # the trap
    out, lse = attend_part(q, k, v, bias, scale=0.5)
    assert torch.isneginf(lse[..., 1]).all()
    assert not out[..., 1, :].any()


def test_trap_a_bias_of_another_dtype_is_converted(rng):
    q, k, v = (torch.tensor(rng.normal(size=(1, 2, 40, 4))) for _ in "qkv")
    bias = torch.tensor(rng.normal(size=(40, 40)), dtype=torch.float32)
    slow = regard.attention(q, k, v, bias=bias).out
    assert (SDPA(q, k, v, attn_mask=bias) - slow).abs().max() > 0.1  # the trap
    torch.testing.assert_close(attend(q, k, v, bias=bias).out, slow, atol=1e-12, rtol=0)


def test_trap_no_keys_do_not_kill_the_process(rng):
    q = torch.tensor(rng.normal(size=(1, 2, 3, 4)), requires_grad=True)
    k, v = (
        torch.zeros((1, 2, 0, 4), dtype=torch.float64, requires_grad=True) for _ in "kv"
    )
    for mask in (None, causal(), everything()):
        seen = attend(q, k, v, mask, q_start=0)
        assert not seen.out.any()
        assert torch.isneginf(seen.lse).all()
        seen.out.sum().backward()
    assert tuple(attend(q[:, :, :0], q, q).out.shape) == (1, 2, 0, 4)


def test_trap_garbage_behind_the_mask_does_not_leak(rng):
    clean = [torch.tensor(rng.normal(size=(2, 2, 40, 4))) for _ in "qkv"]
    valid = torch.arange(40)[None] < torch.tensor([[40], [29]])
    for mask in (padding(valid), causal() & padding(valid), valid[:, None, None, :]):
        expected = regard.attention(*clean, mask)
        q, k, v = (x.clone() for x in clean)
        k[1, :, 29:], v[1, :, 29:] = torch.nan, torch.inf
        for x in (q, k, v):
            x.requires_grad_()
        seen = attend(q, k, v, mask)
        torch.testing.assert_close(seen.out, expected.out, atol=1e-12, rtol=0)
        grads = torch.autograd.grad(seen.out[1].sum(), (q, k, v))
        assert all(torch.isfinite(grad).all() for grad in grads)


def test_trap_garbage_that_sees_nothing_does_not_leak(rng):
    q, k, v = (torch.tensor(rng.normal(size=(1, 2, 4, 3))) for _ in "qkv")
    seen = torch.ones(4, 4, dtype=torch.bool)
    seen[1] = False
    expected = regard.attention(q, k, v, seen)
    q[:, :, 1] = torch.nan
    for x in (q, k, v):
        x.requires_grad_()
    for mask in (seen, array(seen)):
        done = attend(q, k, v, mask)
        torch.testing.assert_close(done.out, expected.out, atol=1e-12, rtol=0)
        torch.testing.assert_close(done.lse, expected.lse, atol=1e-12, rtol=0)
        grads = torch.autograd.grad(done.out.sum(), (q, k, v))
        assert all(torch.isfinite(grad).all() for grad in grads)


LAYOUTS = {
    "turned": lambda x: x.mT.contiguous().mT,
    "with gaps": lambda x: torch.stack([x, x + 1], -1)[..., 0],
    "every other row": lambda x: torch.cat([x, x + 1], -1).unflatten(-1, (2, -1))[
        ..., 0, :
    ],
    "heads inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "one for all": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", range(4))  # q, k, v or the gradient
@pytest.mark.parametrize("wide", [4, 6])  # of v
def test_trap_a_layout_in_memory_changes_nothing(rng, layout, which, wide):
    widths = (4, 4, wide, wide)
    arrays = [torch.tensor(rng.normal(size=(2, 3, 20, n))) for n in widths]
    arrays[which] = LAYOUTS[layout](arrays[which])
    for mask in (None, causal(), window(3)):
        found = []
        for run in (attend, regard.attention):
            inputs = [x.detach().requires_grad_() for x in arrays[:3]]
            seen = run(*inputs, mask)
            grads = torch.autograd.grad(seen.out, inputs, arrays[3])
            found.append([seen.out, seen.lse, *grads])
        for fast, slow in zip(*found, strict=True):
            torch.testing.assert_close(fast, slow, atol=1e-12, rtol=0)


def test_wide_values_and_grouped_heads_stay_on_the_fused_kernel(rng):
    """MLA shapes: q and k of 24, v of 16."""
    q, k, v = (
        torch.tensor(rng.normal(size=(1, h, 40, d)))
        for h, d in ((4, 24), (2, 24), (2, 16))
    )
    for option in ({}, {"sink": torch.zeros(4)}):
        assert choose(q, k, v, causal(), **option).kernel == "flash"
        fast, slow = (
            f(q, k, v, causal(), **option) for f in (attend, regard.attention)
        )
        torch.testing.assert_close(fast.out, slow.out, atol=1e-12, rtol=0)


def test_choices_say_why():
    q, k, v = torch.zeros(3, 1, 4, 300, 8)
    learned = torch.zeros(300, 300, requires_grad=True)
    said = {
        str(choose(q, k, v)): "flash: nothing is masked",
        str(choose(q, k, v, window(300, 300))): "flash: nothing is masked",
        str(
            choose(q, k, v, causal())
        ): "flash: causal: the keys before all queries, and the diagonal",
        str(
            choose(q, k, v, window(3))
        ): "tiles: a formula: empty tiles are skipped, full ones need no mask",
        str(
            choose(q, k, v, bias=learned.detach())
        ): "tiles: an array, or only a bias: a strip of it at a time",
        str(choose(q, k, v, softcap=3.0)): "definition: no fused kernel caps scores",
        str(
            choose(q, k, v, bias=learned)
        ): "definition: a trainable bias or scale needs its own gradient",
        str(choose(q[None], k, v)): "definition: more axes than (B, H, N, D)",
        str(choose(q, k.double(), v)): "definition: q, k and v differ in dtype",
        str(
            choose(*torch.zeros(3, 1, 4, 3, 8, device="meta"))
        ): "definition: no fused kernel of this device takes this dtype",
    }
    assert all(given == expected for given, expected in said.items())


def test_strips_visit_only_what_they_must():
    call = regard.definition.contract.read_call(
        tuple(torch.zeros(3, 1, 1, 2048, 8)),
        window(255) | keys(0, 128),
        bias=None,
        scale=None,
        softcap=None,
        sink=None,
        q_start=None,
    )
    strips = plan(call)
    assert len(strips) == 8
    cells = sum(
        (s.rows.stop - s.rows.start)
        * (p.keys.stop - p.keys.start if isinstance(p.keys, slice) else len(p.keys))
        for s in strips
        for p in s.parts
    )
    assert cells < 0.35 * 2048**2
    assert not [p for s in strips for p in s.parts if p == KeyBlock(slice(0, 0))]


def test_sdpa_arguments_mean_the_same(rng):
    q, k, v = (torch.tensor(rng.normal(size=(2, 4, 9, 8))) for _ in "qkv")
    for mask, kind in (
        (None, "nothing"),
        (everything(), "nothing"),
        (window(9, 9), "nothing"),
        (causal(), "causal"),
        (causal() & window(2), "array"),
        (padding(lengths=[9, 4]), "array"),
    ):
        arguments = sdpa_arguments(mask, (2, 4, 9, 9))
        array = arguments["attn_mask"] is not None
        assert kind == (
            "array" if array else "causal" if arguments["is_causal"] else "nothing"
        )
        torch.testing.assert_close(
            SDPA(q, k, v, **arguments), regard.attention(q, k, v, mask).out
        )


def test_sdpa_arguments_of_no_cells_are_nothing():
    for shape in ((0, 5), (5, 0), (2, 4, 0, 0)):
        arguments = sdpa_arguments(causal() & window(2), shape, q_start=0)
        assert arguments == {"attn_mask": None, "is_causal": False}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("whole", [True, False])
def test_compiles_without_graph_breaks(rng, whole):
    if whole and not CAN_TRACE:
        pytest.skip("Dynamo of torch 2.6 cannot trace a plan")
    q, k, v = (
        torch.tensor(rng.normal(size=(1, 2, 64, 16)), dtype=torch.float32)
        for _ in "qkv"
    )
    for mask in (None, causal()):
        compiled = torch.compile(
            lambda q, k, v, mask=mask: attend(q, k, v, mask).out * 2,
            fullgraph=whole,
            backend="aot_eager",
        )
        with torch.no_grad():
            torch.testing.assert_close(compiled(q, k, v), 2 * attend(q, k, v, mask).out)
        arrays = [x.clone().requires_grad_() for x in (q, k, v)]
        again = [x.clone().requires_grad_() for x in (q, k, v)]
        compiled(*arrays).sum().backward()
        (2 * attend(*again, mask).out).sum().backward()
        for a, b in zip(arrays, again, strict=True):
            torch.testing.assert_close(a.grad, b.grad)


LONG = """
import json
import torch
from memory import read_peak, reset_peak
from regard import causal, same, window
from regard.engine import attend

torch.set_num_threads(1)
n = 65_536
q, k, v = torch.randn(3, 1, 1, n, 64)
mask = causal() & window(1023) & same(torch.arange(n) // 5_000)
attend(q[:, :, :600], k[:, :, :600], v[:, :, :600], causal() & window(10))
before = reset_peak()
out = attend(q, k, v, mask).out
print(json.dumps({"MB": read_peak() - before, "finite": bool(out.isfinite().all())}))
"""


def test_memory_is_linear_at_65536_tokens(run_apart):
    result = run_apart(LONG)
    assert result["finite"]
    assert result["MB"] < 500


def test_the_page_of_devices_is_that_of_the_rules():
    place = Path(__file__).parent.parent / ".ci/device_page.py"
    spec = importlib.util.spec_from_file_location("device_page", place)
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    assert page.PAGE.read_text("utf-8") == page.render(), (
        "run python .ci/device_page.py"
    )
