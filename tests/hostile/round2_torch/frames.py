"""Attention under other machinery of torch: transforms, compilers, modes, threads."""

import contextlib
import copy
import io
import math
import pickle
import threading
import warnings

import oracle
import regard
import torch
import torch.nn.functional as F
from oracle import check, dense, same_bits, tap
from parts import KEYS, D, E, Fused, H, N, mha_truth
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

warnings.filterwarnings("ignore")
B = 2
S = D**-0.5


def eager(q, k, v, m):
    w = (q @ k.mT * S).softmax(-1)
    tap(m.name, w)
    return w @ v


def causal(q, k, v, m):
    n = q.shape[-2]
    hide = torch.ones(n, n, dtype=torch.bool).triu(1)
    w = (q @ k.mT * S).masked_fill(hide, -math.inf).softmax(-1)
    tap(m.name, w)
    return w @ v


def kernel(q, k, v, m):
    tap(m.name, lambda: dense(q, k))
    return F.scaled_dot_product_attention(q, k, v)


class Layers(nn.Module):
    def __init__(self, f, n=2, run=None):
        super().__init__()
        self.layers = nn.ModuleList(Fused(f) for _ in range(n))
        for i, m in enumerate(self.layers):
            m.name = f"layers.{i}"
        self.run = run or (lambda m, x: m(x))

    def forward(self, x):
        for m in self.layers:
            x = F.layer_norm(x + self.run(m, x), x.shape[-1:])
        return x


def situation(name, f, how=None, grads=False, run=None, edit=None, n=2, **kw):
    """how(net, x) runs the net."""

    def make():
        net = Layers(f, run=run, n=n)
        if edit:
            net = edit(net) or net
        x = torch.randn(B, N, E)

        def call():
            with torch.set_grad_enabled(grads):
                out = (how or (lambda net, x: net(x)))(net, x)
                if grads:
                    out.float().square().mean().backward()
                return out

        return net, call

    check(name, make, grads=grads, **kw)


for f in (eager, kernel):
    n = f.__name__
    situation(
        f"{n}: checkpoint, reentrant",
        f,
        grads=True,
        how=lambda net, x: checkpoint(
            net, x.clone().requires_grad_(), use_reentrant=True
        ),
    )
    situation(
        f"{n}: checkpoint of layers, reentrant",
        f,
        grads=True,
        run=lambda m, x: checkpoint(m, x, use_reentrant=True),
        how=lambda net, x: net(x.clone().requires_grad_()),
    )
    situation(
        f"{n}: checkpoint of layers",
        f,
        grads=True,
        run=lambda m, x: checkpoint(m, x, use_reentrant=False),
    )
    situation(
        f"{n}: inference mode", f, how=lambda net, x: torch.inference_mode()(net)(x)
    )
    situation(
        f"{n}: autocast bfloat16",
        f,
        tol=4e-2,
        how=lambda net, x: torch.autocast("cpu", torch.bfloat16)(net)(x),
    )
    situation(
        f"{n}: float16 by .half()", f, tol=2e-2, how=lambda net, x: net.half()(x.half())
    )
    situation(
        f"{n}: vmap over sequences",
        f,
        how=lambda net, x: (
            net(x)
            if oracle.TAPS is not None
            else torch.vmap(lambda y: net(y[None])[0])(x)
        ),
    )

    def functional(net, x):
        p = {k: v * 1.1 for k, v in net.named_parameters()}
        return torch.func.functional_call(net, p, (x,))

    situation(f"{n}: functional_call with other parameters", f, how=functional)

    def func_grad(net, x):
        p = dict(net.named_parameters())
        g = torch.func.grad(
            lambda p: torch.func.functional_call(net, p, (x,)).square().mean()
        )(p)
        return list(g.values())[0]

    situation(f"{n}: torch.func.grad", f, how=func_grad)
    situation(
        f"{n}: jacrev",
        f,
        n=1,
        how=lambda net, x: torch.func.jacrev(lambda y: net(y)[:, 0, :2])(x[:1, :3]),
    )

    def anomaly(net, x):
        with torch.autograd.detect_anomaly(check_nan=False):
            return net(x)

    situation(f"{n}: anomaly mode", f, how=anomaly, grads=True)

    def thread(net, x):
        out = []
        t = threading.Thread(target=lambda: out.append(torch.no_grad()(net)(x)))
        t.start()
        t.join()
        return out[0]

    situation(f"{n}: in a thread", f, how=thread)

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def under_dispatch(net, x):
        with Count():
            return net(x)

    situation(f"{n}: under a dispatch mode of another", f, how=under_dispatch)

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def under_function(net, x):
        with Functions():
            return net(x)

    situation(f"{n}: under a function mode of another", f, how=under_function)

    class Scaling(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.softmax:
                args = (args[0] * 0.5, *args[1:])
            return func(*args, **(kwargs or {}))

    def under_scaling(net, x):
        with Scaling():
            return net(x)

    situation(f"{n}: under a function mode that edits softmax", f, how=under_scaling)

    def hooked(net):
        net.layers[1].register_forward_pre_hook(lambda m, a: (a[0] * 1.5,))
        net.layers[0].register_forward_hook(lambda m, a, out: out.neg())

    situation(f"{n}: hooks of others replace inputs and outputs", f, edit=hooked)

    def compiled_layer(net):
        net.layers[0].forward = torch.compile(net.layers[0].forward, backend="eager")

    situation(
        f"{n}: forward of one layer compiled (eager backend)", f, edit=compiled_layer
    )

    def compiled_module(net):
        net.layers[0].compile(backend="eager")

    situation(f"{n}: module.compile", f, edit=compiled_module)

    def parametrized(net):
        from torch.nn.utils.parametrizations import orthogonal, weight_norm

        for m in net.layers:
            weight_norm(m.q), orthogonal(m.k)

    situation(f"{n}: parametrized projections", f, edit=parametrized)

    def shared(net):
        net.layers[1] = net.layers[0]

    def shared_truth(q, k, v, m, f=f):
        m.name = "layers.0"
        return f(q, k, v, m)

    situation(f"{n}: one module twice", shared_truth, edit=shared)

    def tied(net):
        net.layers[1].q.weight = net.layers[0].q.weight
        net.layers[1].k = net.layers[0].k

    situation(f"{n}: parameters and a projection shared", f, edit=tied)

    def deleted(net, x):
        with contextlib.suppress(ZeroDivisionError):
            handle = net.layers[1].register_forward_pre_hook(lambda m, a: 1 / 0)
            try:
                net(x)
            finally:
                handle.remove()
        return net(x + 1)

    situation(f"{n}: an exception, then a pass", f, how=deleted, joined=True)


def scripted(net):
    class Core(nn.Module):
        def forward(self, q, k, v):
            w = torch.softmax(torch.matmul(q, k.transpose(-1, -2)) * 0.5, -1)
            return torch.matmul(w, v)

    core = torch.jit.script(Core())
    for m in net.layers:
        m.core = core


def by_script(q, k, v, m):
    tap(m.name, lambda: dense(q, k, scale=0.5))
    return m.core(q, k, v)


situation("scripted core in each layer", by_script, edit=scripted)


class Whole(nn.Module):
    """Attention in the model itself, two layers by a loop."""

    def __init__(self):
        super().__init__()
        self.p = nn.ParameterList(
            nn.Parameter(torch.randn(E, 3 * E) * 2 / math.sqrt(E)) for _ in range(2)
        )
        self.times = 1

    def forward(self, x):
        for w in self.p:
            q, k, v = (x @ w).view(*x.shape[:2], 3, H, D).permute(2, 0, 3, 1, 4)
            a = (q @ k.transpose(-1, -2) * 0.35).softmax(-1)
            x = x + (a @ v).transpose(1, 2).reshape(x.shape)
            x = F.layer_norm(x, (E,))
        return x

    def truth(self, name, x):
        x = x.double()
        for w in self.p:
            w = w.detach().double()
            q, k, v = (x @ w).view(*x.shape[:2], 3, H, D).permute(2, 0, 3, 1, 4)
            a = (q @ k.transpose(-1, -2) * 0.35).softmax(-1)
            tap(name, torch.cat([a] * self.times))
            x = x + (a @ v).transpose(1, 2).reshape(x.shape)
            x = F.layer_norm(x, (E,))


def whole(name, change, layer="", run=None, **kw):
    def make():
        base = Whole()
        x = torch.randn(B, N, E)
        net = change(base, x)

        def call():
            with torch.no_grad():
                base.truth(layer, x) if oracle.TAPS is not None else None
                return run(net, x) if run else net(x)

        return net, call

    check(name, make, **kw)


def twice(m):
    m.times = 2
    return m


whole("whole model", lambda m, x: m)
whole("jit.trace", lambda m, x: torch.jit.trace(m, (x,)))
whole("torch.export", lambda m, x: torch.export.export(m, (x,)).module())
whole("make_fx", lambda m, x: torch.fx.experimental.proxy_tensor.make_fx(m)(x))
whole(
    "torch.compile, eager backend",
    lambda m, x: torch.compile(m, backend="eager"),
    layer="_orig_mod",
)
whole(
    "torch.compile, aot_eager",
    lambda m, x: torch.compile(m, backend="aot_eager"),
    layer="_orig_mod",
)
whole("pickled and loaded", lambda m, x: pickle.loads(pickle.dumps(m)))
whole("DataParallel on a CPU", lambda m, x: nn.DataParallel(m), layer="module")
whole(
    "ensemble by stack_module_state and vmap",
    lambda m, x: twice(m),
    run=lambda m, x: torch.func.vmap(
        lambda p, y: torch.func.functional_call(m, p, (y,)), (0, None)
    )({k: torch.stack([v, v]) for k, v in m.named_parameters()}, x),
)


class Recursive(nn.Module):
    """A module that calls itself on halves of its input."""

    def __init__(self):
        super().__init__()
        self.attn = Fused(eager)
        self.attn.name = "attn"

    def forward(self, x):
        if x.shape[1] > 2:
            half = x.shape[1] // 2
            x = torch.cat([self(x[:, :half]), self(x[:, half:])], 1)
        return x + self.attn(x)


def all_found():
    """Each call is a pass of its own: every matrix is shown once, in order."""
    net, x = Recursive(), torch.randn(B, 8, E)
    oracle.TAPS = {}
    torch.no_grad()(net)(x)
    taps, oracle.TAPS = oracle.TAPS["attn"], None
    with regard.watch(net) as seen, torch.no_grad():
        net(x)
    want = [t for call in taps for t in call]
    got = [r.weights() for r in seen.records]
    if [x.shape for x in want] != [x.shape for x in got]:
        return "shapes"
    if max((a - b).abs().max() for a, b in zip(want, got)) > 1e-4:
        return "off"


class Loop(nn.Module):
    """One layer, called with a state until the loop ends (a universal transformer)."""

    def __init__(self, f, keys="new"):
        super().__init__()
        self.attn, self.keys = Fused(f), keys
        self.attn.name = "attn"

    def forward(self, x):
        c = x
        for _ in range(4):
            x = F.layer_norm(x + self.attn(x, c if self.keys == "old" else x), (E,))
        return x


def loop(keys, f=eager):
    def make():
        net, x = Loop(f, keys), torch.randn(B, N, E)
        return net, lambda: torch.no_grad()(net)(x)

    check(f"loop with a state, {keys} keys, {f.__name__}", make)


loop("new"), loop("old"), loop("new", kernel), loop("old", kernel)


class Encoder(nn.Module):
    def __init__(self, nested, dropout=0.0, norm_first=False, act="relu"):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            E, H, 32, dropout, act, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        for m in self.encoder.layers:
            nn.init.normal_(m.self_attn.in_proj_weight, std=2 / math.sqrt(E))

    def forward(self, x, **kw):
        return self.encoder(x, **kw)


def encoder(
    name, train=False, grads=False, nested=False, mask=None, norm_first=False, **kw
):
    def make():
        net = Encoder(nested, 0.0, norm_first).train(train)
        x = torch.randn(B, N, E)

        def call():
            with torch.set_grad_enabled(grads):
                if oracle.TAPS is not None:
                    seen_inputs = []
                    hooks = [
                        m.self_attn.register_forward_pre_hook(
                            lambda m, a, k: seen_inputs.append((m, a[0])),
                            with_kwargs=True,
                        )
                        for m in net.encoder.layers
                    ]
                    fast = torch.backends.mha.get_fastpath_enabled()
                    torch.backends.mha.set_fastpath_enabled(False)
                    net(x, **kw)
                    torch.backends.mha.set_fastpath_enabled(fast)
                    for h in hooks:
                        h.remove()
                    for i, (m, y) in enumerate(seen_inputs):
                        t = mha_truth(
                            m, y, y, keys=kw.get("src_key_padding_mask"), hide=mask
                        )
                        tap(f"encoder.layers.{i}.self_attn", t)
                out = net(x, **kw)
                if grads:
                    out.square().mean().backward()
                return out

        return net, call

    check("TransformerEncoder " + name, make, grads=grads)


HIDE = torch.ones(N, N, dtype=torch.bool).triu(1)
encoder("eval (fast path)")
encoder("eval with gradients", grads=True)
encoder("train", train=True, grads=True)
encoder("norm first", norm_first=True)
encoder("padding", src_key_padding_mask=KEYS)
encoder("padding, nested", src_key_padding_mask=KEYS, nested=True)


def direct(name):
    """Print the result of a function that returns what is wrong."""

    def wrap(f):
        import sys

        if len(sys.argv) > 1 and not any(a in name for a in sys.argv[1:]):
            return f
        try:
            torch.manual_seed(0)
            bad = f()
        except Exception as error:  # noqa: BLE001
            bad = f"CRASH {type(error).__name__}: {str(error)[:200]}"
        print(f"{name} | " + (f"DEFECT: {bad}" if bad else "ok"), flush=True)
        return f

    return wrap


direct("recursion")(all_found)


@direct("a KeyboardInterrupt in the middle")
def _():
    net, x = Layers(eager), torch.randn(B, N, E)
    before = oracle.state_of(net)
    h = net.layers[1].o.register_forward_pre_hook(
        lambda m, a: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    try:
        with regard.watch(net) as seen:
            net(x)
    except KeyboardInterrupt:
        pass
    h.remove()
    after = oracle.state_of(net)
    left = [k for k in after if after[k] != before.get(k)]
    names = [r.name for r in seen.records]
    if left:
        return f"left behind {left}"
    if names.count("layers.0") != B or names.count("layers.1") != B:
        return f"records {names}, {seen}"


@direct("read while the watch is open")
def _():
    net, x = Layers(eager), torch.randn(B, N, E)
    with regard.watch(net) as seen:
        net(x)
        for f in (
            lambda: seen.records,
            lambda: seen.coverage(),
            lambda: str(seen),
            lambda: seen.weights(),
            lambda: seen.table(),
        ):
            try:
                f()
            except regard.errors.OptionError:
                pass
        net(x + 1)
    if len(seen.records) != 8:
        return len(seen.records)


@direct("two watches, nested, the inner of a part")
def _():
    net, x = Layers(eager), torch.randn(B, N, E)
    plain = net(x)
    with regard.watch(net) as a:
        with regard.watch(net.layers[1]) as b:
            y = net(x)
        net(x + 1)
    if not same_bits(plain, y):
        return "outputs differ"
    if len(a.records) != 8 or len(b.records) != 2:
        return f"{len(a.records)} and {len(b.records)} records"
    wa = a.layer("layers.1").weights()
    if (wa - b.records[0].weights()).abs().max() > 1e-6:
        return "weights differ"


@direct("two watches that overlap and end in the wrong order")
def _():
    net, x = Layers(kernel), torch.randn(B, N, E)
    before = oracle.state_of(net)
    one, two = regard.watch(net), regard.watch(net)
    a, b = one.__enter__(), two.__enter__()
    y = net(x)
    one.__exit__(None, None, None)
    z = net(x)
    two.__exit__(None, None, None)
    if not same_bits(y, z):
        return "outputs differ"
    if (len(a.records), len(b.records)) != (4, 8):
        return f"{len(a.records)} and {len(b.records)} records"
    after = oracle.state_of(net)
    return [k for k in after if after[k] != before.get(k)]


@direct("the model is pickled and copied inside of the watch")
def _():
    net, x = Whole(), torch.randn(B, N, E)
    plain = net(x)
    with regard.watch(net) as seen:
        file = io.BytesIO()
        torch.save(net.state_dict(), file)
        other = pickle.loads(pickle.dumps(net))
        third = copy.deepcopy(net)
        y, z = other(x), third(x)
        w = net(x)
    if not (same_bits(plain, y) and same_bits(plain, z) and same_bits(plain, w)):
        return "outputs differ"
    if len(seen.records) != 4:
        return f"{len(seen.records)} records; copies heard?"
    for m in (other, third):
        m(x)
    with regard.watch(net):
        whole = pickle.dumps(net)
    if b"regard" in whole:
        return "a model that is saved inside of the watch needs regard to be loaded"


@direct("an optimizer step between two passes")
def _():
    net, x = Layers(eager), torch.randn(B, N, E)
    opt = torch.optim.SGD(net.parameters(), 0.5)
    truths = []
    with regard.watch(net) as seen:
        for i in range(3):
            oracle.TAPS = {}
            with torch.no_grad():
                pass
            oracle.TAPS = None
            out = net(x)
            q, k = net.layers[0].q(x), net.layers[0].k(x)
            q, k = (y.view(B, N, H, D).transpose(1, 2) for y in (q, k))
            truths.append(dense(q, k))
            out.square().mean().backward()
            opt.step()
            opt.zero_grad()
    got = [r for r in seen.records if r.name == "layers.0"]
    if len(got) != 3 * B:
        return f"{len(got)} records"
    for r, t in zip(got, torch.cat(truths)):
        if (r.weights() - t).abs().max() > 1e-4:
            return f"off by {(r.weights() - t).abs().max()}"


@direct("several threads at once")
def _():
    net = Layers(eager)
    xs = [torch.randn(1, 4 + i, E) for i in range(4)]
    outs = [None] * 4

    def work(i):
        with torch.no_grad():
            for _ in range(3):
                outs[i] = net(xs[i])

    plain = [torch.no_grad()(net)(x) for x in xs]
    with regard.watch(net) as seen:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    if not same_bits(plain, outs):
        return "outputs differ"
    got = [r for r in seen.records if r.name == "layers.0"]
    if len(got) != 12:
        return f"{len(got)} records of 12; {[r.shape for r in got]} {seen}"
    for r in got:
        x = xs[r.shape[1] - 4]
        q, k = (
            p(x).view(1, -1, H, D).transpose(1, 2)
            for p in (net.layers[0].q, net.layers[0].k)
        )
        if (r.weights() - dense(q, k)[0]).abs().max() > 1e-4:
            return "off"


@direct("meta tensors")
def _():
    with torch.device("meta"):
        net, x = Layers(eager), torch.randn(B, N, E)
    with regard.watch(net) as seen:
        net(x)
    str(seen)
    if seen.records:
        return "records of meta tensors"
    if not any(c.reason for c in seen.coverage()):
        return f"nothing said: {seen}"


@direct("dynamically quantized projections")
def _():
    net, x = Layers(eager).eval(), torch.randn(B, N, E)
    net = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, torch.qint8)
    oracle.TAPS = {}
    plain = torch.no_grad()(net)(x)
    taps, oracle.TAPS = oracle.TAPS, None
    with regard.watch(net) as seen, torch.no_grad():
        y = net(x)
    bad, _ = oracle.compare(seen, taps, tol=1e-4)
    if not same_bits(plain, y):
        bad.append("outputs differ")
    return bad


@direct("fake tensors")
def _():
    from torch._subclasses import FakeTensorMode

    net, x = Layers(eager), torch.randn(B, N, E)
    with regard.watch(net) as seen:
        with FakeTensorMode(allow_non_fake_inputs=True):
            net(x)
    str(seen)
    if seen.records:
        return "records"
