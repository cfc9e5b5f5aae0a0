"""The smallest scripts of what was found; each prints what regard says."""

import math

import regard
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
N, D = 6, 12


def say(name, seen):
    print(f"\n== {name}")
    print(seen)
    for c in seen.coverage():
        print(
            f"   {c.name!r} attention={c.attention} calls={c.calls} rows={c.rows}"
            f" in_records={c.in_records} {dict(c.left_out)} {c.reason!r} {c.note!r}"
        )


class Hopfield(nn.Module):
    """Attention to a learnt memory: (N, D) by (M, D)."""

    def __init__(self, batched):
        super().__init__()
        self.memory = nn.Parameter(torch.randn(10, D))
        self.batched = batched

    def forward(self, x):
        m = self.memory[None].expand(len(x), -1, -1) if self.batched else self.memory
        return (x @ m.mT).softmax(-1) @ m


for batched in (False, True):
    model = Hopfield(batched)
    with torch.no_grad(), regard.watch(model) as seen:
        model(torch.randn(2, N, D))
    say(f"a learnt memory, expanded over the batch: {batched}", seen)


class Absorbed(nn.Module):
    """Several heads ask one array that is key and value (MLA, multi-query)."""

    def __init__(self, style):
        super().__init__()
        self.q, self.c, self.style = nn.Linear(D, 3 * D), nn.Linear(D, D), style

    def forward(self, x):
        q, c = self.q(x).unflatten(-1, (3, D)), self.c(x)
        w = torch.einsum("bnhc,bmc->bhnm", q, c).softmax(-1)
        if self.style == "nh":
            return torch.einsum("bhnm,bmc->bnhc", w, c).flatten(2)
        return torch.einsum("bhnm,bmc->bhnc", w, c).transpose(1, 2).flatten(2)


for style in ("nh", "hn"):
    model = Absorbed(style)
    with torch.no_grad(), regard.watch(model) as seen:
        model(torch.randn(2, N, D))
    say(f"keys shared by heads, output {style}", seen)


class Causal(nn.Module):
    """is_causal with fewer queries than keys: aligned at the top left."""

    def forward(self, x):
        x = x[:, None]
        return F.scaled_dot_product_attention(x[:, :, :4], x, x, is_causal=True)


model = Causal()
with torch.no_grad(), regard.watch(model) as seen:
    model(torch.randn(1, N, D))
say("is_causal, 4 queries and 6 keys", seen)
print("   shape", seen.records[0].shape, "of a call with (1, 4, 6) weights")


class Core(nn.Module):
    def forward(self, q, k, v):
        return torch.matmul(torch.softmax(torch.matmul(q, k.mT), -1), v)


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.core = torch.jit.script(Core())

    def forward(self, x):
        return self.core(x, x, x)


model = Scripted()
with torch.no_grad(), regard.watch(model) as seen:
    model(torch.randn(2, N, D))
say("a scripted module inside of a model", seen)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Linear(D, 3 * D)
        nn.init.normal_(self.p.weight, std=2 / math.sqrt(D))

    def forward(self, x):
        q, k, v = self.p(x).chunk(3, -1)
        return (q @ k.mT).softmax(-1) @ v


model, x = Plain(), torch.randn(2, N, D)
params = dict(model.named_parameters())
with regard.watch(model) as seen:
    torch.func.grad(
        lambda p: torch.func.functional_call(model, p, (x,)).square().mean()
    )(params)
say("torch.func.grad", seen)
with regard.watch(model) as seen:
    torch.func.jacrev(lambda y: model(y)[:, 0, :2])(x)
say("torch.func.jacrev", seen)


class Context(nn.Module):
    """Attention to a context of the same length, with the mask of the context."""

    def __init__(self):
        super().__init__()
        self.reader = Reader()

    def forward(self, x, context, attention_mask):
        return self.reader(x, context, attention_mask)


class Reader(nn.Module):
    def forward(self, x, context, mask):
        s = (x @ context.mT).masked_fill((mask == 0)[:, None], -math.inf)
        self.true = s.softmax(-1)
        return self.true @ context


model = Context()
mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
with torch.no_grad(), regard.watch(model) as seen:
    model(torch.randn(1, N, D), torch.randn(1, N, D), attention_mask=mask)
say("attention_mask of a context, left padding", seen)
r = seen.records[0]
print("   positions of queries", r.q_positions.tolist())
print("   row of query 0, shown:", r.weights(0, 0).numpy().round(3))
print("   row of query 0, true: ", model.reader.true[0, 0].numpy().round(3))
print("   row of query 2, true: ", model.reader.true[0, 2].numpy().round(3))


class Pool(nn.Module):
    """The question of a maximum to the elements of a set, which are keys and values."""

    def __init__(self):
        super().__init__()
        self.question = nn.Linear(D, D)

    def forward(self, x):
        w = (self.question(x.amax(1, keepdim=True)) @ x.mT).softmax(-1)
        print("   true:", w[0, 0].numpy().round(3))
        return w @ x


model = Pool()
x = torch.cat([torch.eye(8)[:1].expand(1, N, 8), torch.randn(1, N, 4)], -1)
for name, other in (
    ("the same set in another order", x.flip(1)),
    ("another set", torch.cat([x[..., :8], torch.randn(1, N, 4)], -1)),
):
    print(f"\n== two sets, pooled: {name}")
    with torch.no_grad(), regard.watch(model) as seen:
        model(x)
        model(other)
    say(name, seen)
    for r in seen.records:
        print("   shown:", r.weights().numpy().round(3).tolist())
