"""Contexts of the user around the watch and around the reading of its records."""

import contextlib
import math
import sys
import warnings

import numpy as np
import regard
import regard.stats
import torch
import torch.nn.functional as F
from oracle import dense, state_of
from torch import nn

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
B, H, N, D = 2, 3, 9, 16
E = H * D


class Net(nn.Module):
    def __init__(self, fused, custom=None):
        super().__init__()
        self.qkv, self.o = nn.Linear(E, 3 * E), nn.Linear(E, E)
        nn.init.normal_(self.qkv.weight, std=2 / math.sqrt(E))
        self.fused, self.custom = fused, custom

    def split(self, x):
        return self.qkv(x).view(*x.shape[:2], 3, H, D).permute(2, 0, 3, 1, 4)

    def forward(self, x):
        q, k, v = self.split(x)
        if self.custom:
            out = self.custom(q, k, v)
        elif self.fused:
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            out = (q @ k.mT * D**-0.5).softmax(-1) @ v
        return self.o(out.transpose(1, 2).reshape(*x.shape[:2], E))


def truth(net, x):
    q, k, _ = net.split(x)
    return dense(q, k)


def judge(seen, want, tol=1e-4, reading=contextlib.nullcontext):
    bad = []
    if len(seen.records) != len(want):
        cover = [(c.name, c.reason, c.note) for c in seen.coverage()]
        return f"{len(seen.records)} records, {cover}"
    for r, w in zip(seen.records, want):
        with reading():
            got = torch.as_tensor(r.weights())
        if got.is_meta:
            bad.append("the weights are on the meta device")
            break
        err = (got.double() - w).abs().max()
        if not err <= tol:
            bad.append(f"off by {err:.3g} ({got.dtype})")
            break
    said = str(seen)
    if "certified" not in said or " 0 failed" not in said:
        bad.append(said.splitlines()[-1].strip())
    return "; ".join(bad)


def situation(name, outside=None, reading=None, fused=False, inside=None, double=False):
    if len(sys.argv) > 1 and not any(a in name for a in sys.argv[1:]):
        return
    name = f"{name}, {'sdpa' if fused else 'eager'}"
    null = contextlib.nullcontext
    try:
        torch.manual_seed(0)
        net, x = Net(fused), torch.randn(B, N, E)
        if double:
            net, x = net.double(), x.double()
        before = state_of(net)
        with torch.no_grad():
            with (outside or null)():
                with regard.watch(net) as seen:
                    with (inside or null)():
                        net(x)
            bad = judge(seen, truth(net, x), reading=reading or null)
            with (reading or null)():
                table = str(seen.table())
                entropy = regard.stats.entropy(seen.records[0])
            del table
            want = torch.special.entr(truth(net, x)[0]).sum(-1)
            got = torch.as_tensor(np.asarray(entropy))
            if got.is_meta or (got.double() - want).abs().max() > 1e-3:
                bad = (bad or "") + "; the entropy is off"
        left = [k for k, v in state_of(net).items() if before.get(k) != v]
        if left:
            bad = f"{bad}; left behind {left}"
    except Exception as error:  # noqa: BLE001
        bad = f"CRASH {type(error).__name__}: {str(error)[:200]}"
    print(f"{name} | " + (f"DEFECT: {bad}" if bad else "ok"), flush=True)


@contextlib.contextmanager
def default_dtype(dtype=torch.float64):
    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(old)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def low_precision():
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


class Halving(torch.overrides.TorchFunctionMode):
    """A mode that computes each matrix product in bfloat16."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


CONTEXTS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "default dtype float64": default_dtype,
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default dtype float16": lambda: default_dtype(torch.float16),
    "device meta": lambda: torch.device("meta"),
    "deterministic algorithms": deterministic,
    "matmul precision medium": low_precision,
    "a function mode": Halving,
    "gradients on": torch.enable_grad,
    "anomaly detection": torch.autograd.detect_anomaly,
    "no torch function": torch._C.DisableTorchFunctionSubclass,
}
if __name__ == "__main__":
    for fused in (False, True):
        for name, context in CONTEXTS.items():
            situation(
                f"watch left inside of {name}",
                outside=context,
                fused=fused,
                inside=(lambda: torch.autocast("cpu", enabled=False))
                if name == "autocast"
                else None,
            ) if name != "device meta" else None
            situation(f"records read inside of {name}", reading=context, fused=fused)


class Flash(torch.autograd.Function):
    """Attention with a backward pass of its own, that computes the weights again."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return (q @ k.mT * D**-0.5).softmax(-1) @ v

    @staticmethod
    def backward(ctx, g):
        q, k, v = ctx.saved_tensors
        p = (q @ k.mT * D**-0.5).softmax(-1)
        dv = p.mT @ g
        dp = g @ v.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * D**-0.5
        return ds @ k, ds.mT @ q, dv


@torch.library.custom_op("hostile::attend", mutates_args=())
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT * D**-0.5).softmax(-1) @ v


def run(name, f):
    if len(sys.argv) > 1 and not any(a in name for a in sys.argv[1:]):
        return
    try:
        torch.manual_seed(0)
        bad = f()
    except Exception as error:  # noqa: BLE001
        bad = f"CRASH {type(error).__name__}: {str(error)[:200]}"
    print(f"{name} | " + (f"DEFECT: {bad}" if bad else "ok"), flush=True)


def flash():
    net, x = Net(False, Flash.apply), torch.randn(B, N, E)
    net(x).square().mean().backward()
    grad = net.qkv.weight.grad.clone()
    net.zero_grad()
    with regard.watch(net) as seen:
        net(x).square().mean().backward()
    if not torch.equal(grad, net.qkv.weight.grad):
        return "gradients differ"
    return judge(seen, truth(net, x))


def flash_outside():
    """The backward pass runs after the watch."""
    net, x = Net(False, Flash.apply), torch.randn(B, N, E)
    with regard.watch(net) as seen:
        y = net(x)
    y.square().mean().backward()
    return judge(seen, truth(net, x))


def custom_op():
    net, x = Net(False, attend), torch.randn(B, N, E)
    with regard.watch(net) as seen, torch.no_grad():
        net(x)
    if seen.records:
        return judge(seen, truth(net, x))
    if not any(c.reason for c in seen.coverage()):
        return f"attention in a custom operator, and nothing is said: {seen}"


class Mixer(nn.Module):
    """The same, but nothing is named after attention."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(E, E) for _ in range(3))

    def forward(self, x):
        q, k, v = (
            m(x).view(B, N, H, D).transpose(1, 2) for m in (self.a, self.b, self.c)
        )
        return attend(q, k, v)


def custom_unnamed():
    net, x = Mixer(), torch.randn(B, N, E)
    with regard.watch(net) as seen, torch.no_grad():
        net(x)
    if not seen.coverage():
        return f"attention in a custom operator, and nothing is said: {seen}"


def double_backward():
    net, x = Net(False), torch.randn(B, N, E, requires_grad=True)
    with regard.watch(net) as seen:
        (g,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        g.square().sum().backward()
    return judge(seen, truth(net, x))


def loss_inside():
    """A loss outside of the model, with a softmax of its own (contrastive)."""
    net, x = Net(False), torch.randn(B, N, E)
    with regard.watch(net) as seen:
        y = net(x).mean(1)
        w = (y @ y.T).softmax(-1)
        (w @ y).sum().backward()
    return judge(seen, truth(net, x))


def hook_attention():
    """A hook of the user attends, in the middle of the model."""
    net, x = Net(False), torch.randn(B, N, E)
    net.o.register_forward_pre_hook(lambda m, a: ((a[0] @ a[0].mT).softmax(-1) @ a[0],))
    with regard.watch(net) as seen, torch.no_grad():
        net(x)
    names = [r.name for r in seen.records]
    if names != ["", "#2"] * B and names != ["", "o"] * B:
        return f"{names} {seen}"


if __name__ == "__main__":
    run("autograd.Function with its own backward", flash)
    run("autograd.Function, backward after the watch", flash_outside)
    run("custom operator in a class with qkv", custom_op)
    run("custom operator in a class without a hint", custom_unnamed)
    run("gradient of a gradient", double_backward)
    run("a loss with a softmax of its own", loss_inside)
    run("a hook of the user that attends", hook_attention)
