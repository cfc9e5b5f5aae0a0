"""Interventions in calls whose axes, keys or masks are not the usual ones."""

import pytest
import torch
from layers_by_hand import WIDTH, Written
from torch import nn
from torch.nn import functional as F  # noqa: N812

from regard.ablate import attribute_weights, knock_out, patch_heads, trace_heads
from regard.ablate.value_weights import weigh_values
from regard.errors import OptionError
from regard.seen import watch


class HeadsFirst(nn.Module):
    """Attention whose call has its axes in another order than (B, H, N, D)."""

    def __init__(self, order):
        super().__init__()
        self.order = order
        self.project, self.mix = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.project(x).view(b, n, 3, 3, 4).permute(2, 3, 0, 1, 4)
        if self.order == "hbnd":
            z = F.scaled_dot_product_attention(q, k, v)
        elif self.order == "folded":  # into axes that look like sequences
            q, k, v = (x.reshape(3 * b, 1, n, 4) for x in (q, k, v))
            z = F.scaled_dot_product_attention(q, k, v).view(3, b, n, 4)
        elif self.order == "softmax":
            z = (q @ k.mT / 2).softmax(-1) @ v
        else:
            weights = torch.einsum("hbqd,hbkd->qbhk", q, k).softmax(-1)
            z = torch.einsum("qbhk,hbkd->hbqd", weights, v)
        return self.mix(z.permute(1, 2, 0, 3).flatten(2))


EDITS = {
    "heads": lambda m: knock_out(m, [(0, 0)]),
    "keys": lambda m: knock_out(m, [(0, 0)], keys=[2]),
    "patch": lambda m: patch_heads(m, lambda z: z * 0, [(0, 0)]),
    "trace": trace_heads,
}


@pytest.mark.parametrize("order", ["hbnd", "folded", "softmax", "qbhk"])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("batch", [1, 3])
def test_axes_in_another_order_are_refused(order, edit, batch):
    """Head 0 of (H, B, N, D) is sequence 0 of (B, H, N, D)."""
    model = HeadsFirst(order)
    with pytest.raises(OptionError), EDITS[edit](model):
        model(torch.randn(batch, 5, 12))


def test_heads_folded_into_the_batch_of_a_kernel_are_not_traced():
    class Folded(HeadsFirst):
        def forward(self, x):
            b, n, _ = x.shape
            q, k, v = self.project(x).view(b, n, 3, 3, 4).permute(2, 0, 3, 1, 4)
            q, k, v = (x.reshape(b * 3, n, 4) for x in (q, k, v))
            z = F.scaled_dot_product_attention(q, k, v).view(b, 3, n, 4)
            return self.mix(z.transpose(1, 2).flatten(2))

    model = Folded("")
    with pytest.raises(OptionError, match="folds its heads"), trace_heads(model):
        model(torch.randn(2, 5, 12))


@pytest.mark.parametrize("how", ["filled", "added", "kernel"])
@pytest.mark.parametrize("low", [-torch.inf, -3.4e38, -1e9, -1e4])
def test_a_row_left_with_hidden_keys_outputs_0_whatever_hides_them(how, low):
    class Causal(HeadsFirst):
        def forward(self, x):
            q, k, v = self.project(x).view(1, 5, 3, 3, 4).permute(2, 0, 3, 1, 4)
            later = torch.ones(5, 5).triu(1).bool()
            mask = torch.zeros(5, 5).masked_fill(later, low)
            if how == "kernel":
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            scores = q @ k.mT / 2
            filled = scores.masked_fill(later, low)
            return (filled if how == "filled" else scores + mask).softmax(-1) @ v

    model, x = Causal(""), torch.randn(1, 5, 12)
    with torch.no_grad(), knock_out(model, keys=[0]):
        z = model(x)
    assert float(z[:, :, 0].abs().max()) == 0
    with torch.no_grad(), knock_out(model, keys=[0, 2]):
        rest = model(x)
    assert float(rest[:, :, 1].abs().max()) > 1e-3
    assert torch.equal(rest[:, :, 1], z[:, :, 1])


def test_a_call_without_queries_is_no_layer():
    class Empty(HeadsFirst):
        def forward(self, x):
            q, k, v = self.project(x).view(2, 5, 3, 3, 4).permute(2, 0, 3, 1, 4)
            F.scaled_dot_product_attention(q[:, :, :0], k, v)
            F.scaled_dot_product_attention(q, k[:, :, :0], v[:, :, :0])
            return x

    model = nn.Sequential(Empty(""), Written(), Written()).eval()
    x = torch.randn(2, 5, WIDTH)
    model[0].project = nn.Linear(WIDTH, 36)
    with torch.no_grad(), watch(model) as seen:
        model(x)
    for number, name in enumerate(seen.layers):
        with torch.no_grad(), knock_out(model, [(number, 1)]):
            found = model(x)
        with torch.no_grad(), knock_out(model, [(name, 1)]):
            assert torch.equal(model(x), found)
        assert not torch.equal(model(x), found)


@pytest.mark.parametrize("learnt", ["add_bias_kv", "add_zero_attn", "sink"])
def test_the_last_key_is_that_of_the_last_token(learnt):
    class Sink(HeadsFirst):
        def forward(self, x):
            q, k, v = self.project(x).view(1, 5, 3, 3, 4).permute(2, 0, 3, 1, 4)
            scores = torch.cat([q @ k.mT / 2, torch.ones(1, 3, 5, 1)], -1)
            weights = scores.softmax(-1)[..., :-1]
            return weights @ v, weights

    x = torch.randn(1, 5, 12)
    if learnt == "sink":
        model, given = Sink(""), (x,)
    else:
        model, given = (
            nn.MultiheadAttention(12, 3, batch_first=True, **{learnt: True}),
            (x,) * 3,
        )
    with torch.no_grad(), knock_out(model.eval(), keys=[-1]):
        _, weights = model(*given)
    weights = weights.reshape(-1, 5, weights.shape[-1])
    assert [j for j in range(weights.shape[-1]) if not weights[..., j].any()] == [4]


@pytest.mark.parametrize("layer", [0, ""])
def test_the_difference_of_two_softmaxes_is_no_head_that_can_be_removed(layer):
    class Difference(HeadsFirst):
        def forward(self, x):
            q, k, v = self.project(x).view(1, 5, 3, 3, 4).permute(2, 0, 3, 1, 4)
            one, two = (
                (q[..., s] @ k[..., s].mT).softmax(-1) for s in (slice(2), slice(2, 4))
            )
            return (one - 0.4 * two) @ v

    model = Difference("")
    with (
        pytest.raises(OptionError, match="changed after"),
        knock_out(model, [(layer, 1)]),
    ):
        model(torch.randn(1, 5, 12))


class WithAnother(nn.Module):
    """Attention by a kernel, and another softmax in the same module."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.project = kind, nn.Linear(12, 36)

    def forward(self, x):
        if self.kind == "attends":  # by distance: q and k are not multiplied
            x = x + (-torch.cdist(x, x)).softmax(-1) @ x
        q, k, v = self.project(x).view(1, 5, 3, 3, 4).permute(2, 0, 3, 1, 4)
        if self.kind == "kept":  # for a plot
            self.map = (q @ k.mT / 2).softmax(-1)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("chosen", [[0], [1], ["1"]])
@pytest.mark.parametrize(
    ("kind", "why"), [("kept", "does not attend, but was"), ("attends", "but was not")]
)
def test_a_softmax_that_a_watch_counts_in_another_way_is_refused(kind, why, chosen):
    model = nn.Sequential(WithAnother(kind), WithAnother(kind))
    with pytest.raises(OptionError, match=why), knock_out(model, layers=chosen):
        model(torch.randn(1, 5, 12))


@pytest.mark.parametrize("measure", ["attribute", "weigh"])
def test_windows_of_one_sequence_are_not_summed_as_one(measure):
    class Windows(HeadsFirst):
        def forward(self, x):
            q, k, v = self.project(x).view(3, 3, 3, 3, 4).permute(2, 0, 3, 1, 4)
            z = F.scaled_dot_product_attention(q, k, v)
            return self.mix(z.transpose(1, 2).reshape(1, 9, 12))

    model, x = Windows("").eval(), torch.randn(1, 9, 12)
    with pytest.raises(OptionError, match="3 parts"):
        if measure == "weigh":
            weigh_values(model, x)
        else:
            attribute_weights(model, x, lambda y: y.sum((1, 2)))
