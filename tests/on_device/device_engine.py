"""The engine on the device, against the definition in float64.

Next: device_lens.py
"""

import pytest
import torch
from simulated_device import count

import regard
from regard.engine import attend

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


def draw(n_q=70, n_k=70, dtype=torch.float32):
    torch.manual_seed(1)
    q = torch.randn(2, 4, n_q, 16, dtype=dtype)
    k, v = torch.randn(2, 2, 2, n_k, 16, dtype=dtype)
    return q, k, v


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_out_lse_and_gradients_are_those_of_the_definition(mask, options, run_on_both):
    def run(q, k, v, mask, options):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        done = attend(q, k, v, mask, **options)
        grown = done.lse.masked_fill(done.lse == -torch.inf, 0)
        (done.out.square().sum() + grown.sum()).backward()
        return done.out, done.lse, q.grad, k.grad, v.grad

    given = *draw(), MASKS[mask], OPTIONS[options]
    _, there = run_on_both(run, *given)
    q, k, v = (x.double().requires_grad_() for x in draw())
    named = {
        n: x.double() if isinstance(x, torch.Tensor) else x for n, x in given[4].items()
    }
    exact = regard.attention(q, k, v, given[3], **named)
    grown = exact.lse.masked_fill(exact.lse == -torch.inf, 0)
    (exact.out.square().sum() + grown.sum()).backward()
    for x, y in zip(there, (exact.out, exact.lse, q.grad, k.grad, v.grad), strict=True):
        assert x.device.type == "sim"
        torch.testing.assert_close(x.cpu().double(), y, rtol=1e-4, atol=1e-4)


def test_the_engine_reads_nothing_back_to_the_host():
    q, k, v = (x.to("sim") for x in draw())
    for name in ("none", "causal", "window"):
        with torch.no_grad(), count() as counts:
            attend(q, k, v, MASKS[name])
        assert counts.to_host == 0, name
