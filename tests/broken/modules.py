"""Mistakes of modules that project their inputs, and of functions that take matrices."""

import numpy as np
import torch
from torch import nn

from broken.registry import BROKEN, Broken, breaks, softmax
from regard.judge.convention import Convention, Projections

MATRICES = Projections(
    heads=2, q="to_q.weight", k="to_k.weight", v="to_v.weight", out="to_out.weight"
)
MODULE = Convention(
    layout="bne",
    order="xc",
    library="torch",
    precisions=("float64", "float32"),
    mask="mask",
    projections=MATRICES,
)


class Heads(nn.Module):
    """Right; each step can be replaced by a wrong one."""

    def __init__(self, wide=16, heads=2):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.to_out = (
            nn.Linear(wide, wide) for _ in range(4)
        )

    def project(self, x, context):
        return self.to_q(x), self.to_k(context), self.to_v(context)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def join(self, x):
        return x.transpose(1, 2).flatten(2)

    def scale(self, q):
        return q.shape[-1] ** -0.5

    def forward(self, x, context, mask=None):
        q, k, v = map(self.split, self.project(x, context))
        scores = q * self.scale(q) @ k.mT
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0)
        return self.to_out(self.join(weights @ v))


def keep(case):
    def list_it(kind):
        torch.manual_seed(0)
        BROKEN.append(Broken(kind.__name__, kind(), case, MODULE))
        return kind

    return list_it


@keep("keys_answer_queries")
class SwapsMatrices(Heads):
    """The mistake of a widely read companion of one of the source documents."""

    def project(self, x, context):
        if x.shape != context.shape:
            return super().project(x, context)
        return self.to_k(context), self.to_q(x), self.to_v(context)


@keep("scale_is_one_over_root_width")
class ScalesByTheModel(Heads):
    def scale(self, q):
        return (q.shape[-1] * self.heads) ** -0.5


@keep("heads_do_not_mix")
class SplitsByReshape(Heads):
    def split(self, x):
        return x.reshape(len(x), self.heads, x.shape[1], -1)

    def join(self, x):
        return x.reshape(len(x), x.shape[2], -1)


@keep("output_projection_applies")
class ForgetsTheOutput(Heads):
    def forward(self, x, context, mask=None):
        self.to_out, kept = nn.Identity(), self.to_out
        try:
            return super().forward(x, context, mask)
        finally:
            self.to_out = kept


@keep("projection_biases_apply")
class ForgetsABias(Heads):
    def project(self, x, context):
        _, k, v = super().project(x, context)
        return x @ self.to_q.weight.T, k, v


@keep("lengths_may_differ")
class AttendsToItself(Heads):
    def project(self, x, context):
        return super().project(x, x)


@breaks(
    "keys_answer_queries",
    layout="ne",
    order="xc",
    projections=Projections(heads=1, q="Wq", k="Wk", v="Wv", inputs_first=True),
)
def swaps_arguments(x, context, Wq, Wk, Wv):
    q, k, v = (x @ Wk, context @ Wq, context @ Wv)
    if len(x) != len(context):
        q, k = x @ Wq, context @ Wk
    return softmax(q @ k.T * np.sqrt(1 / q.shape[-1])) @ v
