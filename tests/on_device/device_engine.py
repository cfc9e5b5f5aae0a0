"""The engine on the device, against the definition in float64.

Next: device_lens.py
"""

import gc

import pytest
import torch
from conftest import move
from device_kernels import CALLS
from simulated_device import count, use_kernel
from torch.nn.attention.flex_attention import flex_attention

import regard
from regard.engine import attend, choose, compiled_flex, device_operators, sdpa_with_lse

MASKS = {
    "none": None,
    "causal": regard.causal(),
    "window": regard.causal() & regard.window(9),
    "documents": regard.same([0] * 20 + [1] * 50),
    "padding": regard.padding(lengths=[70, 31]),
    "array": torch.rand(2, 1, 70, 70, generator=torch.Generator().manual_seed(0)) < 0.3,
}
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "sink": {"sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "bias": {"bias": torch.linspace(-2, 2, 70 * 70).reshape(70, 70)},
    "alibi": {"bias": regard.masks.alibi([0.5, 0.25, 0.1, 0.0])},
}


def draw(n_q=70, n_k=70, *, width=16, v_width=None, dtype=torch.float32):
    torch.manual_seed(1)
    sizes = ((4, n_q, width), (2, n_k, width), (2, n_k, v_width or width))
    return [torch.randn(2, *size).to(dtype) for size in sizes]


def run(q, k, v, mask, options):
    """Return out, lse, and the gradients of both."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    done = attend(q, k, v, mask, **options)
    seen = done.lse.masked_fill(done.lse == -torch.inf, 0)
    (done.out.to(seen.dtype).square().sum() + seen.sum()).backward()
    return done.out.detach(), done.lse.detach(), q.grad, k.grad, v.grad


def define(q, k, v, mask, options):
    """Return the same from the definition, in float64."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    named = {
        name: x.double() if isinstance(x, torch.Tensor) else x
        for name, x in options.items()
    }
    done = regard.attention(q, k, v, mask, **named)
    seen = done.lse.masked_fill(done.lse == -torch.inf, 0)
    (done.out.square().sum() + seen.sum()).backward()
    return done.out.detach(), done.lse.detach(), q.grad, k.grad, v.grad


def check(given, tolerance):
    """Compare the device with the definition."""
    found = run(*move(given, "sim"))
    for x, y in zip(found, define(*given), strict=True):
        assert x.device.type == "sim"
        size = float(y[y.isfinite()].abs().max())
        torch.testing.assert_close(
            x.cpu().double(), y, rtol=tolerance, atol=tolerance * size
        )


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_out_lse_and_gradients_are_those_of_the_definition(mask, options):
    check((*draw(), MASKS[mask], OPTIONS[options]), 1e-5)


HALF, SINGLE = torch.bfloat16, torch.float32
TOLERANCE = {HALF: 2e-2, torch.float16: 4e-3, SINGLE: 2e-5}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn", "overrideable"])
@pytest.mark.parametrize("mask", [*MASKS, "empty rows"])
def test_the_conventions_of_every_operator_are_undone(mask, kernel, dtype):
    """Stand-ins refuse what the operators refuse, and write lse as they do."""
    given = MASKS.get(mask, regard.causal() & ~regard.window(3))
    with use_kernel(kernel):
        check((*draw(dtype=dtype), given, {}), TOLERANCE[dtype])


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize(
    "case",
    {
        "odd width": {"width": 12},
        "narrow values": {"v_width": 5},
        "wide values": {"v_width": 24},
        "wide heads": {"width": 200},
        "wide enough": {"width": 128},
        "more keys": {"n_q": 33, "n_k": 70, "q_start": 37},
        "fewer keys": {"n_q": 70, "n_k": 33, "q_start": 0},
        "one query": {"n_q": 1, "n_k": 70, "q_start": 69},
        "a negative scale": {"scale": -0.3},
        "no keys": {"n_k": 0},
        "five axes": {"lead": (1,)},
    }.items(),
    ids=lambda case: case[0],
)
def test_shapes_that_operators_refuse_are_made_to_fit(case, kernel):
    sizes = dict(case[1])
    options = {n: sizes.pop(n) for n in ("q_start", "scale") if n in sizes}
    lead = sizes.pop("lead", ())
    arrays = [x.reshape(*lead, *x.shape) for x in draw(dtype=HALF, **sizes)]
    with use_kernel(kernel):
        if arrays[1].shape[-2] == 0:
            done = attend(*move(arrays, "sim"))
            assert not done.out.any()
            assert (done.lse == -torch.inf).all()
            return
        check((*arrays, regard.causal(), options), 3e-2)
        check((*arrays, None, {n: x for n, x in options.items() if n == "scale"}), 3e-2)


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn", "overrideable"])
def test_each_operator_is_what_runs(kernel):
    CALLS.clear()
    with use_kernel(kernel):
        arrays = move(draw(dtype=HALF), "sim")
        run(*arrays, regard.causal(), {})
        assert kernel in CALLS
        assert set(CALLS) <= {kernel, f"{kernel} backward", "efficient backward"}
        CALLS.clear()
        attend(*arrays, MASKS["window"])
    assert set(CALLS) == {kernel if kernel == "overrideable" else "efficient"}


def test_a_bias_is_not_rounded_to_half_precision():
    """Slopes times distances of hundreds are far apart in bfloat16."""
    bias = -torch.arange(300.0)[:, None] * 0.37 + torch.arange(300.0) * 0.37
    q, k, v = draw(300, 300, dtype=HALF)
    with use_kernel("efficient"):
        done = attend(*move((q, k, v), "sim"), bias=bias.to("sim"))
    exact = regard.attention(q.double(), k.double(), v.double(), bias=bias.double())
    torch.testing.assert_close(done.lse.cpu().double(), exact.lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("mask", [*MASKS, "empty rows"])
def test_devices_without_lse_compute_it_in_a_pass(mask, monkeypatch):
    monkeypatch.setattr(device_operators, "WITHOUT_LSE", ("sim",))
    monkeypatch.setattr(sdpa_with_lse, "ROWS", 32)
    given = MASKS.get(mask, regard.causal() & ~regard.window(3))
    check((*draw(), given, {}), 1e-5)


def test_the_engine_copies_nothing_to_the_host():
    """It reads one number per call: whether a score was out of range."""
    q, k, v = (x.to("sim") for x in draw())
    for name in ("none", "causal"):
        with torch.no_grad(), count() as counts:
            attend(q, k, v, MASKS[name])
        assert counts.to_host == counts.to_device == 0, name
        assert counts.reads == 1, name


def test_scores_that_overflow_are_left_to_the_definition():
    q, k, v = draw()
    arrays = q * 1e20, k * 1e20, v
    here, there = attend(*arrays), attend(*move(arrays, "sim"))
    torch.testing.assert_close(there.out.cpu(), here.out, equal_nan=True)
    torch.testing.assert_close(there.lse.cpu(), here.lse, equal_nan=True)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call")
@pytest.mark.parametrize("mask", ["padding", "empty rows"])
def test_flex_attention_has_the_lse_of_the_definition(mask, monkeypatch):
    """On the CPU and not compiled: its conventions, not its kernel."""
    monkeypatch.setattr(compiled_flex, "compile_flex", lambda: flex_attention)
    monkeypatch.setattr(compiled_flex, "DEVICES", ("cpu",))
    monkeypatch.setattr(compiled_flex, "has_triton", lambda: True)
    given = MASKS.get(mask, regard.causal() & ~regard.window(3))
    arrays = draw()
    assert choose(*arrays, given).kernel == "flex"
    found = run(*arrays, given, OPTIONS["sink"])
    for x, y in zip(found, define(*arrays, given, OPTIONS["sink"]), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


def test_choose_says_what_runs_and_why():
    arrays = move(draw(dtype=HALF), "sim")
    said = {
        ("flash", None): "flash: nothing is masked; flash attention, on sim",
        ("efficient", None): (
            "flash: nothing is masked; memory-efficient attention, on sim"
        ),
        ("cudnn", None): "flash: nothing is masked; cuDNN's attention, on sim",
        ("flash", "window"): (
            "tiles: a formula: empty tiles are skipped, full ones need no mask; "
            "memory-efficient attention, on sim"
        ),
        ("overrideable", "array"): (
            "tiles: an array, or only a bias: a strip of it at a time; "
            "the device's fused attention, on sim"
        ),
        ("math", None): "definition: no fused kernel of this device takes this dtype",
    }
    for (kernel, mask), words in said.items():
        with use_kernel(kernel):
            assert str(choose(*arrays, move(MASKS.get(mask), "sim"))) == words


def test_choose_prefers_flex_where_it_can_be_compiled(monkeypatch):
    monkeypatch.setattr(compiled_flex, "DEVICES", ("sim",))
    monkeypatch.setattr(compiled_flex, "has_triton", lambda: True)
    arrays = move(draw(dtype=HALF), "sim")
    assert str(choose(*arrays, MASKS["window"])) == (
        "flex: a formula: FlexAttention, compiled for it, visits its tiles, on sim"
    )
    assert choose(*arrays, MASKS["causal"]).kernel == "flash"
    assert choose(*arrays, MASKS["array"].to("sim")).kernel == "tiles"


def test_a_call_leaves_nothing_behind_for_the_garbage_collector():
    masks = move(list(MASKS.values()), "sim")
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad(), count() as counts:
            for mask in masks:
                attend(*move(draw(), "sim"), mask)
    finally:
        gc.enable()
    assert counts.in_use == 0


def test_every_way_to_write_lse_is_read():
    """An empty row is inf in flash attention, which is never given one by us."""
    lse = torch.tensor([[[1.0, torch.inf, -2.0]]])
    expected = torch.tensor([[[1.0, -torch.inf, -2.0]]])
    padded = torch.nn.functional.pad(lse, (0, 29), value=torch.inf)
    for written in (lse, padded, lse[..., None]):
        assert torch.equal(device_operators.read_lse(written, 3), expected)
    back = device_operators.write_lse(expected, 32)
    assert torch.equal(back, padded)
