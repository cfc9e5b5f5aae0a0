"""Direct logit attribution: parts add up, and are what the frozen norm sees of a write."""

import pytest
import torch
from intervened_models import stir
from test_circuits import SIZES

import regard
from regard.direct_logits import attribute_logits
from regard.errors import OptionError
from regard.nn.decoder import CausalTransformer
from regard.plain.config import Config

ROTARY = {"norm": "rms", "position": "rotary", "kv_heads": 2}
KINDS = {
    "gpt2": Config(**SIZES),
    "llama": Config(**SIZES, **ROTARY, bias=False, tied=False),
    "wide": Config(**SIZES, **ROTARY, head_width=10, bias=True),
}
TEXT = torch.tensor([[3, 14, 15, 9, 2, 6]])


def read_writes(model, text):
    """Return what each head adds to the residual stream, by hand: L of (H, N, width)."""
    caught = []
    hooks = [
        block.attention.out.register_forward_pre_hook(lambda _, x: caught.append(x[0]))
        for block in model.blocks
    ]
    with torch.no_grad():
        model(text)
    for hook in hooks:
        hook.remove()
    d = model.config.head
    return [
        torch.stack(
            [
                z[0, :, h : h + d] @ block.attention.out.weight[:, h : h + d].T
                for h in range(0, z.shape[-1], d)
            ]
        )
        for z, block in zip(caught, model.blocks, strict=True)
    ]


@pytest.mark.parametrize("versus", [None, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_adds_what_the_frozen_norm_sees_of_its_write(kind, versus):
    torch.manual_seed(0)
    model = stir(CausalTransformer(KINDS[kind]), 0.3).double()
    found = attribute_logits(model, TEXT, 7, versus=versus, at=4)
    with torch.no_grad():
        logits = model(TEXT)[0, 4]
        stream = []
        hook = model.norm.register_forward_pre_hook(lambda _, x: stream.append(x[0]))
        model(TEXT)
        hook.remove()
    expected = float(logits[7] - (0 if versus is None else logits[versus]))
    assert abs(found.logit - expected) < 1e-12
    assert abs(float(found.heads.sum()) + found.rest - expected) < 1e-10

    x = stream[0][0, 4]
    size = x.pow(2).mean() if model.config.norm == "rms" else x.var(correction=0)
    size = (size + model.config.eps).sqrt()
    for layer, writes in enumerate(read_writes(model, TEXT)):
        for head, write in enumerate(writes[:, 4]):
            if model.config.norm == "layer":
                write = write - write.mean()  # noqa: PLW2901
            seen = model.predict(write / size * model.norm.weight).detach()
            seen = seen[7] - (0 if versus is None else seen[versus])
            assert abs(float(found.heads[layer, head]) - float(seen)) < 1e-10
            assert abs(float(seen)) > 1e-4


def test_it_is_printed_and_refuses_what_it_cannot_do():
    torch.manual_seed(0)
    model = stir(CausalTransformer(KINDS["gpt2"]))
    text = str(attribute_logits(model, TEXT, 7, versus=8))
    assert text.splitlines()[1] == "layer  head      adds"
    assert len(text.splitlines()) == 2 + 8
    with pytest.raises(OptionError, match=r"expected one sequence: \(1, N\)"):
        attribute_logits(model, TEXT[0], 7)
    after = CausalTransformer(Config(**SIZES, norm_first=False))
    with pytest.raises(OptionError, match="a norm after each layer"):
        attribute_logits(after, TEXT, 7)
    with pytest.raises(OptionError, match="does not tell where the weights"):
        attribute_logits(torch.nn.Linear(2, 2), TEXT, 7)
    assert regard.direct_logits.attribute_logits is attribute_logits
