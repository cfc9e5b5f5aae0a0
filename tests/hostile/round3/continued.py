"""Situations (b) and (c): continuations that are none, and passes that change."""

import copy
import sys

import torch
from half import Alibi, Cap, Fp32, KeyTemperature, OneKey, Sdpa, Sink, Temperature
from oracle import COUNT, STATE, Core, Net, situation, tokens

BF = torch.bfloat16


def ids(*x):
    STATE["ids"] = list(x)


def pick(cache, index):
    return {n: (k[index], v[index]) for n, (k, v) in cache.items()}


def cut(cache, n):
    return {x: (k[:, :, :n], v[:, :, :n]) for x, (k, v) in cache.items()}


def same_twice(net, t):
    return [net(t), net(t)]


def truncated(net, t):
    c = {}
    out = [net(t[:, :8], c)]
    out.append(net(t[:, 8:9], c))
    c = cut(c, 5)
    out.append(net(t[:, 10:12], c))
    out.append(net(t[:, 12:13], c))
    return out


def branches(net, t):
    c = {}
    ids(0, 1)
    out = [net(t[:, :6], c)]
    a, b = copy.deepcopy(c), copy.deepcopy(c)
    for i in range(3):
        ids("a0", "a1")
        out.append(net(t[:, 6 + i : 7 + i], a))
        ids("b0", "b1")
        out.append(net(t[:, 9 + i : 10 + i], b))
    return out


def branches_shared(net, t):
    c = {}
    out = [net(t[:, :6], c)]
    a, b = dict(c), dict(c)
    for i in range(3):
        out.append(net(t[:, 6 + i : 7 + i], a))
        out.append(net(t[:, 9 + i : 10 + i], b))
    return out


def swapped_layers(net, t):
    c = {}
    out = [net(t[:, :6], c)]
    c = {"attn.0": c["attn.1"], "attn.1": c["attn.0"]}
    out.append(net(t[:, 6:8], c))
    out.append(net(t[:, 8:9], c))
    return out


def edited_keys(net, t):
    c = {}
    out = [net(t[:, :6], c)]
    for k, _ in c.values():
        k[:, :, 2] *= 1.5
    out.append(net(t[:, 6:8], c))
    return out


def edited_data(net, t):
    c = {}
    out = [net(t[:, :6], c)]
    for k, _ in c.values():
        k.data[:, :, 2].mul_(1.5)
    out.append(net(t[:, 6:8], c))
    return out


def edited_tiny(net, t):
    c = {}
    out = [net(t[:, :6], c)]
    for k, _ in c.values():
        k[:, :, 2] += 0.02
    out.append(net(t[:, 6:8], c))
    return out


def edited_last_key(net, t):
    c = {}
    out = [net(t[:, :6], c)]
    for k, _ in c.values():
        k[:, :, 5] += 1.0
    out.append(net(t[:, 6:7], c))
    out.append(net(t[:, 7:8], c))
    return out


def edited_numpy(net, t):
    c = {}
    out = [net(t[:, :6], c)]
    if t.dtype is torch.long and net.out.weight.dtype is not BF:
        for k, _ in c.values():
            k.numpy()[:, :, 3] *= 1.5
    out.append(net(t[:, 6:8], c))
    return out


def lora_cached(net, t):
    c = {}
    out = [net(t[:, :6], c)]
    net.attn[0].k.weight.mul_(1.3)
    net.attn[0].q.weight.add_(0.1)
    out.append(net(t[:, 6:8], c))
    return out


def lora_again(net, t):
    out = [net(t)]
    net.attn[0].q.weight.add_(0.3)
    out.append(net(t))
    return out


def lora_grow(net, t):
    out = [net(t[:, :6])]
    net.attn[0].q.weight.add_(0.3)
    out.append(net(t[:, :8]))
    out.append(net(t[:, :9]))
    return out


def lora_late(net, t):
    out = [net(t[:, :n]) for n in (5, 6, 7)]
    net.attn[0].q.weight.mul_(0.5)
    net.attn[1].q.weight.mul_(0.5)
    return out + [net(t[:, :n]) for n in (8, 9, 10)]


def prefix(net, t):
    c = {}
    ids("p")
    out = [net(t[:1, :6], c)]
    c = pick(c, [0, 0, 0])
    u = tokens(3, 6, seed=7)
    for i in range(4):
        ids("x", "y", "z")
        out.append(net(u[:, i : i + 1], c))
    return out


def prefix_expand(net, t):
    c = {}
    out = [net(t[:1, :6], c)]
    c = {n: (k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1))
         for n, (k, v) in c.items()}  # fmt: skip
    u = tokens(3, 6, seed=7)
    return out + [net(u[:, :2], c), net(u[:, 2:3], c)]


def permuted_cache(net, t):
    t, c = tokens(3, 14), {}
    ids(0, 1, 2)
    out = [net(t[:, :6], c)]
    for i, p in enumerate(([2, 0, 1], [1, 1, 0], [0, 2], [1])):
        c = pick(c, p)
        ids(*[f"{i}{x}" for x in range(len(p))])
        out.append(net(t[: len(p), 6 + i : 7 + i], c))
    return out


def permuted_grow(net, t):
    """Beams without a cache: the texts change places and grow."""
    t = tokens(3, 5)
    out = []
    for i, p in enumerate(([0, 1, 2], [2, 0, 1], [1, 1, 0], [0, 2, 2], [2, 1, 0])):
        t = torch.cat([t[p], tokens(3, 1, seed=20 + i)], 1)
        ids(*[f"{i}{x}" for x in range(3)])
        out.append(net(t))
    return out


def swapped_rows(net, t):
    ids(0, 1)
    out = [net(t)]
    ids(1, 0)
    return out + [net(t.flip(0))]


def wrong_cache_rows(net, t):
    """The cache is flipped, the new tokens are not."""
    c = {}
    ids(0, 1)
    out = [net(t[:, :6], c)]
    c = pick(c, [1, 0])
    ids(1, 0)
    return out + [net(t[:, 6:8], c), net(t[:, 8:9], c)]


def grow(net, t):
    return [net(t[:, :n]) for n in range(4, 10)]


def grow_bidirectional(net, t):
    net.causal = False
    return [net(t[:, :n]) for n in range(4, 10)]


def grow_ending(net, t):
    """Each pass has an end mark, which the next one replaces."""
    end = torch.full((2, 1), 49)
    return [net(torch.cat([t[:, :n], end], 1)) for n in range(4, 9)]


def shrink(net, t):
    return [net(t[:, :n]) for n in (9, 7, 5)]


def slide(net, t):
    return [net(t[:, n : n + 6]) for n in range(4)]


def shared_start(net, t):
    u = t.clone()
    u[:, 5:] = tokens(2, 14, seed=9)[:, 5:]
    return [net(t[:, :9]), net(u[:, :9]), net(t[:, :10])]


def same_rows(net, t):
    t = t[:1].expand(3, -1)
    c = {}
    return [net(t[:, :6], c), net(t[:, 6:7], c), net(t[:, 7:9], c)]


def same_start_batch(net, t):
    t, c = t[:1].repeat(3, 1), {}
    out = [net(t[:, :6], c)]
    u = tokens(3, 6, seed=7)
    return out + [net(u[:, :1], c), net(u[:, 1:2], c)]


def cache_again(net, t):
    out = []
    for last in (6, 8):
        c = {}
        out += [net(t[:, :5], c), net(t[:, last : last + 1], c)]
        out += [net(t[:, last + 1 : last + 2], c)]
    return out


def interleaved(net, t):
    a, b = {}, {}
    ids("a0", "a1")
    out = [net(t[:, :5], a)]
    ids("b0", "b1")
    out += [net(t[:, 5:10], b)]
    for i in range(3):
        ids("a0", "a1")
        out += [net(t[:, 10 + i : 11 + i], a)]
        ids("b0", "b1")
        out += [net(t[:, 10 + i : 11 + i], b)]
    return out


def same_text_two_caches(net, t):
    a, b = {}, {}
    out = [net(t[:, :5], a), net(t[:, :5], b)]
    for i in range(3):
        out += [net(t[:, 5 + i : 6 + i], a), net(t[:, 9 + i : 10 + i], b)]
    return out


def context_other_texts(net, t):
    x = torch.randn(2, 7, 32, generator=torch.manual_seed(5)).to(net.out.weight.dtype)
    return [net(t[:, 2 * i : 2 * i + 4], context=x) for i in range(4)]


def context_square(net, t):
    x = torch.randn(2, 6, 32, generator=torch.manual_seed(5)).to(net.out.weight.dtype)
    return [net(t[:, 2 * i : 2 * i + 6], context=x) for i in range(3)]


def context_grow(net, t):
    x = torch.randn(2, 6, 32, generator=torch.manual_seed(5)).to(net.out.weight.dtype)
    return [net(t[:, :n], context=x) for n in range(3, 9)]


def context_grow_other(net, t):
    """The texts share their length and context, the last one is another text."""
    x = torch.randn(2, 6, 32, generator=torch.manual_seed(5)).to(net.out.weight.dtype)
    u = tokens(2, 14, seed=9)
    return [net(a[:, :n], context=x) for a in (t, u) for n in (3, 4, 5)]


def context_flipped(net, t):
    x = torch.randn(2, 6, 32, generator=torch.manual_seed(5)).to(net.out.weight.dtype)
    out = []
    for i in range(3):
        ids(*((0, 1) if i % 2 == 0 else (1, 0)))
        out.append(net(t[:, 3 * i : 3 * i + 3], context=x.flip(0) if i % 2 else x))
    return out


def context_one_by_one(net, t):
    x = torch.randn(2, 6, 32, generator=torch.manual_seed(5)).to(net.out.weight.dtype)
    return [net(t[:, n : n + 1], context=x) for n in range(6)]


def context_expanded(net, t):
    x = torch.randn(1, 6, 32, generator=torch.manual_seed(5)).to(net.out.weight.dtype)
    x = x.expand(2, -1, -1)
    return [net(t[:, n : n + 3], context=x) for n in (0, 3, 6)]


def context_grows(net, t):
    """The context grows, as in streaming; the texts are others."""
    x = torch.randn(2, 9, 32, generator=torch.manual_seed(5)).to(net.out.weight.dtype)
    return [net(t[:, i : i + 4], context=x[:, : 5 + i]) for i in range(4)]


def context_equal_last(net, t):
    """As many queries as keys; then one more of each."""
    x = torch.randn(2, 9, 32, generator=torch.manual_seed(5)).to(net.out.weight.dtype)
    return [net(t[:, :n], context=x[:, :n]) for n in (5, 6, 7, 8)]


def same_queries_other_keys(net, t):
    c = {}
    out = [net(t[:, :6], c)]
    d = {n: (k + 0.5, v) for n, (k, v) in c.items()}
    return out + [net(t[:, 6:7], c), net(t[:, 6:7], d), net(t[:, 7:8], d)]


def constant_cache(net, t):
    """A cache that is not extended: each new token sees the prompt and itself."""
    c = {}
    out = [net(t[:, :6], c)]
    for i in range(4):
        out.append(net(t[:, 6 + i : 7 + i], dict(c)))
    return out


def extended_prompt(net, t):
    """Chunks of the prompt, then the first chunk again, longer."""
    c, d = {}, {}
    out = [net(t[:, :4], c), net(t[:, 4:8], c)]
    return out + [net(t[:, :6], d), net(t[:, 6:8], d), net(t[:, 8:9], c)]


def rolled_cache(net, t):
    """A window that rolls: the first key leaves at each step."""
    c = {}
    out = [net(t[:, :6], c)]
    for i in range(3):
        c = {n: (k[:, :, 1:], v[:, :, 1:]) for n, (k, v) in c.items()}
        out.append(net(t[:, 6 + i : 7 + i], c))
    return out


def doubled_cache(net, t):
    """A cache that holds the prompt twice."""
    c = {}
    out = [net(t[:, :4], c)]
    c = {n: (torch.cat([k, k], 2), torch.cat([v, v], 2)) for n, (k, v) in c.items()}
    return out + [net(t[:, 8:9], c), net(t[:, 9:10], c)]


def repeated_token(net, t):
    """One token again and again, with positions that do not matter."""
    net.pos.weight.zero_()
    t = torch.full_like(t, 7)
    c = {}
    return [net(t[:, :4], c)] + [net(t[:, :1], c) for _ in range(4)]


def repeated_no_cache(net, t):
    net.pos.weight.zero_()
    t = torch.full_like(t, 7)
    return [net(t[:, :n]) for n in (4, 5, 6, 7)]


def constant_keys(net, t):
    """k does not depend on the tokens, so every text looks like every other."""
    net.attn[0].k.weight.zero_()
    net.attn[1].k.weight.zero_()
    u = tokens(2, 14, seed=9)
    return [net(t[:, :5]), net(u[:, :7]), net(t[:, 3:9])]


def becomes(kind, at=3, cache=True):
    """The attention becomes another one in pass `at`."""

    def run(net, t):
        c, out = {} if cache else None, []
        for i in range(7):
            if i == at:
                for a in net.attn:
                    a.core = kind() if isinstance(kind, type) else kind
            if cache:
                x = t[:, :5] if i == 0 else t[:, 4 + i : 5 + i]
                out.append(net(x, c))
            else:
                u = tokens(2, 6, seed=i)
                out.append(net(u))
        return out

    return run


class Hot(Fp32):
    """Scores are multiplied by 1.2."""

    scale = 1.2 * 8**-0.5


class HotSdpa(Sdpa):
    scale = 1.2 * 8**-0.5


class Narrow(Core):
    """A window of 3."""

    def logits(self, m, q, k, mask):
        s = super().logits(m, q, k, mask)
        d = torch.arange(k.shape[2] - q.shape[2], k.shape[2]).unsqueeze(1)
        return s.masked_fill(torch.arange(k.shape[2]) < d - 2, float("-inf"))


class Gated(Core):
    """Weights are changed after the softmax."""

    def after(self, m, w):
        return w * torch.tensor([0.5, 1, 0, 2]).to(w.dtype)[:, None, None]


class Wider(Core):
    """The first two heads only."""

    def __call__(self, m, q, k, v, mask):
        o = super().__call__(m, q[:, :2], k[:, :2], v[:, :2], mask)
        return torch.cat([o, o], 1)


class Low(Core):
    """In bfloat16."""

    def __call__(self, m, q, k, v, mask):
        f = [x.to(BF) for x in (q, k, v)]
        return super().__call__(m, *f, mask).to(q.dtype)


class High(Core):
    def __call__(self, m, q, k, v, mask):
        f = [x.double() for x in (q, k, v)]
        return super().__call__(m, *f, mask).to(q.dtype)


class Nothing(Core):
    """No attention at all."""

    def __call__(self, m, q, k, v, mask):
        return v[:, :, -q.shape[2] :]


class Biased(Core):
    """A bias of 0.3 on the first key."""

    def logits(self, m, q, k, mask):
        b = torch.zeros(k.shape[2])
        b[0] = 0.3
        return super().logits(m, q, k, mask) + b.to(q.dtype)


class Reversed(Core):
    """Heads of the keys change places."""

    def __call__(self, m, q, k, v, mask):
        return super().__call__(m, q, k.flip(1), v.flip(1), mask)


class SharedQ(Core):
    """The queries are those of the batch's first sequence."""

    def __call__(self, m, q, k, v, mask):
        return super().__call__(m, q[:1].expand_as(q), k, v, mask)


class Numpy(Fp32):
    """Scores are edited through numpy, which torch does not see."""

    def logits(self, m, q, k, mask):
        s = super().logits(m, q, k, mask)
        if s.dtype is not BF and not s.requires_grad:
            s.numpy()[:, 1, :, 0] += 0.5
        return s


RUNS = (
    same_twice, truncated, branches, branches_shared, swapped_layers, edited_keys,
    edited_data, edited_tiny, edited_last_key, edited_numpy, lora_cached, lora_again,
    lora_grow, lora_late, prefix, prefix_expand, permuted_cache, permuted_grow,
    swapped_rows, wrong_cache_rows, grow, grow_bidirectional, grow_ending, shrink,
    slide, shared_start, same_rows, same_start_batch, cache_again, interleaved,
    same_text_two_caches, context_other_texts, context_square, context_grow,
    context_grow_other, context_flipped, context_one_by_one, context_expanded,
    context_grows, context_equal_last, same_queries_other_keys, constant_cache,
    extended_prompt, rolled_cache, doubled_cache, repeated_token, repeated_no_cache,
    constant_keys,
)  # fmt: skip
KINDS = (
    Hot, HotSdpa, Narrow, Gated, Wider, Low, High, Nothing, Biased, Reversed, SharedQ,
    Numpy, Sink, Cap, Alibi, KeyTemperature, OneKey, Temperature, Sdpa,
)  # fmt: skip


def build(run, core, dtype=torch.float32, low="min", **kw):
    def made():
        net = Net(core(), low=low, **kw).to(dtype)
        return net, lambda: run(net, tokens(2, 14))

    return made


def main():
    every = sys.argv[1:]
    for core in (Sdpa, Core):
        for run in RUNS:
            name = f"{run.__name__} {core.__name__}"
            if not every or run.__name__ in every:
                situation(name, build(run, core))
    for run in RUNS:
        if not every:
            situation(f"{run.__name__} bf16", build(run, Core, BF), half=True)
    for kind in KINDS:
        for core in (Core, Sdpa):
            for cache in (True, False):
                name = f"becomes {kind.__name__} from {core.__name__} cache={cache}"
                if not every or "becomes" in every:
                    tol = 2e-2 if kind is Low else None
                    run = becomes(kind, cache=cache)
                    situation(name, build(run, core), tol=tol)
    print(COUNT)


if __name__ == "__main__":
    main()
