"""What must hold for every call: fast paths compared with the definition.

    values       attend               = the definition in NumPy, float64
    blocks       attention(block=)    = the same
    gradients    of attend            = of the definition, float64
    curvature    second derivatives   = of the definition, float64
    in_place     a tensor changes before backward(): an error, or the right gradient
    autocast     the same numbers inside of torch.autocast
    compiled     the same numbers under torch.compile
    traced       jax.jit              = the definition in NumPy
    mapped       torch.vmap           = a loop
    statistics   of a record          = sums over its dense weights

A question returns False if it does not apply to a call, raises WrongNumberError if the
answer is wrong. Tolerances follow from the dtype and the size of the scores.

Next: __main__.py
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from draw import HostileCall, Rng
from record_statistics import list_statistics, make_record

from regard import attention
from regard.arrays import is_array
from regard.definition.attention import Attended
from regard.engine import attend
from regard.errors import GradientError
from regard.masks.algebra import Mask

Question = Callable[[HostileCall, Rng], bool]


class WrongNumberError(AssertionError):
    """A fast path disagrees with the definition."""


@functools.lru_cache(maxsize=4)
def define(call: HostileCall) -> Attended:
    """Return the definition in NumPy and float64."""
    with np.errstate(all="ignore"):
        return attention(*call.arrays, **call.options, see=("logits",))


def bound_error(call: HostileCall) -> float | None:
    """Return the relative error that rounding may cause; None where it says nothing."""
    parts = [np.nan_to_num(np.abs(x), posinf=0).max(initial=0) for x in call.arrays]
    scale = call.options.get("scale", 1 / np.sqrt(call.q.shape[-1]))
    score = parts[0] * parts[1] * call.q.shape[-1] * abs(float(scale))
    logits = define(call).logits
    score += np.abs(logits[np.isfinite(logits)]).max(initial=0)
    eps = 2.3e-16 if call.dtype == "float64" else 1.2e-7
    error = 40 * eps * (1 + score)
    return error if error < 0.01 else None


def compare(name: str, found: Any, expected: Any, error: float | None) -> None:
    """Raise if two arrays differ in shape, in where they are NaN, or by too much."""
    a, b = (np.asarray(as_double(x)) for x in (found, expected))
    if a.shape != b.shape:
        raise WrongNumberError(f"{name} has shape {a.shape}, expected {b.shape}")
    if (np.isnan(a) != np.isnan(b)).any():
        counts = int(np.isnan(a).sum()), int(np.isnan(b).sum())
        raise WrongNumberError(f"{name}: {counts[0]} NaN, expected {counts[1]}")
    if error is None:
        return
    with np.errstate(all="ignore"):
        size = np.abs(b[np.isfinite(b)]).max(initial=0)
        wrong = ~((a == b) | np.isnan(b) | (np.abs(a - b) <= error * (1 + size)))
    if wrong.any():
        i = tuple(int(x) for x in np.argwhere(wrong)[0])
        raise WrongNumberError(
            f"{name}{list(i)} is {a[i]!r}, expected {b[i]!r}, within {error:.1e}; "
            f"{int(wrong.sum())} of {wrong.size} differ"
        )


def as_double(x: Any) -> Any:
    """Return numbers as NumPy float64."""
    if isinstance(x, torch.Tensor):
        return x.detach().double().numpy()
    return np.asarray(x, dtype="float64")


def bound_output(call: HostileCall) -> float | None:
    """Return the relative error of out, which is rounded to the dtype of the call."""
    error = bound_error(call)
    coarse = {"float16": 2e-3, "bfloat16": 2e-2}.get(call.dtype, 0.0)
    return None if error is None else error + coarse


def bound_lse(call: HostileCall) -> float | None:
    """Return the relative error of lse; the kernel rounds weights of half precision."""
    error = bound_error(call)
    coarse = 1e-3 if call.dtype in ("float16", "bfloat16") else 0.0
    return None if error is None else error + coarse


def compare_results(call: HostileCall, found: Attended, expected: Attended) -> None:
    """Compare out and lse, which is at least float32."""
    if str(found.lse.dtype).removeprefix("torch.") not in ("float32", "float64"):
        raise WrongNumberError(f"lse is of {found.lse.dtype}, expected float32")
    compare("lse", found.lse, expected.lse, bound_lse(call))
    hidden = np.isnan(as_double(expected.out)) & has_bad_values(call)
    out = np.where(hidden, np.nan, as_double(found.out))  # a NaN value may spread
    compare("out", out, expected.out, bound_output(call))


def has_bad_values(call: HostileCall) -> bool:
    """Tell whether v holds NaN or infinity: 0 times it is NaN, in some tiles or all."""
    return not np.isfinite(call.v).all()


def overflows(call: HostileCall) -> bool:
    """Tell whether numbers leave the range of float32, in which the kernel computes."""
    if call.dtype == "float64":
        return False
    size = [np.nan_to_num(np.abs(x)).max(initial=0) for x in call.arrays]
    scale = call.options.get("scale", 1 / np.sqrt(call.q.shape[-1]))
    size[0] *= max(1, abs(float(scale)))
    score = max(size[0] * size[1] * call.q.shape[-1], *size)
    return bool(score > 3e38 or (call.dtype == "float16" and max(size) > 6e4))


def is_huge(call: HostileCall) -> bool:
    """Tell whether products of numbers may leave the range of float32."""
    return any(np.abs(x).max(initial=0) > 1e9 for x in call.arrays) or overflows(call)


# --- the questions -------------------------------------------------------------------


def ask_values(call: HostileCall, rng: Rng) -> bool:
    """Compare attend, without gradients, with the definition."""
    if overflows(call):
        return False
    arrays, options = call.to_torch()
    more = {"see": ("weights",)} if rng.random() < 0.2 else {}
    mode = [torch.no_grad, torch.enable_grad, torch.inference_mode][rng.integers(3)]
    with mode():
        found = attend(*arrays, **options, **more)
    if str(found.lse.dtype) not in ("torch.float32", "torch.float64"):
        raise WrongNumberError(
            f"lse is of {found.lse.dtype}, expected at least float32"
        )
    compare_results(call, found, define(call))
    return True


def ask_blocks(call: HostileCall, rng: Rng) -> bool:
    """Compare the definition in tiles with the definition."""
    block = tuple(int(x) for x in rng.integers(1, 30, size=2))
    if max(call.shape[-2:]) > 100 or has_bad_values(call):
        return False
    with np.errstate(all="ignore"):
        found = attention(*call.arrays, **call.options, block=block)
    compare("lse", found.lse, define(call).lse, 1e-9 if bound_error(call) else None)
    compare("out", found.out, define(call).out, 1e-9 if bound_error(call) else None)
    return True


def differentiate(run: Any, arrays: list[Any], options: Any, weights: Any) -> list[Any]:
    """Return the gradients of q, k and v of a random sum of out and lse."""
    done = run(*arrays, **options)
    lse = torch.where(torch.isfinite(done.lse), done.lse, 0)
    loss = (done.out * weights[0]).sum() + (lse * weights[1]).sum()
    return list(torch.autograd.grad(loss, arrays, allow_unused=True))


def draw_weights(call: HostileCall, rng: Rng) -> list[torch.Tensor]:
    """Return what out and lse are multiplied with."""
    out = define(call)
    sizes = np.shape(out.out), np.shape(out.lse)
    dtype = getattr(torch, call.dtype)
    return [torch.from_numpy(rng.normal(size=size)).to(dtype) for size in sizes]


def ask_gradients(call: HostileCall, rng: Rng) -> bool:
    """Compare the gradients of attend with those of the definition in float64."""
    half = call.dtype in ("float16", "bfloat16")
    if not call.is_finite or half or is_huge(call) or max(call.shape[-2:]) > 320:
        return False
    weights = draw_weights(call, rng)
    arrays, options = call.to_torch(grad=True)
    found = differentiate(attend, arrays, options, weights)
    wide = [x.detach().double().requires_grad_() for x in arrays]
    exact = [x.double() for x in weights]
    expected = differentiate(attention, wide, options, exact)
    error = bound_error(call)
    for name, a, b in zip("qkv", found, expected, strict=True):
        zero = torch.zeros(())
        pair = [zero.expand(call.q.shape) if x is None else x for x in (a, b)]
        compare(f"d{name}", *pair, None if error is None else 100 * error)
    return True


def ask_curvature(call: HostileCall, rng: Rng) -> bool:
    """Compare products of the Hessian with a vector."""
    if not call.is_finite or call.dtype != "float64" or max(call.shape[-2:]) > 30:
        return False
    if is_huge(call) or call.q.size == 0 or call.k.size == 0:
        return False
    weights, seed = draw_weights(call, rng), int(rng.integers(2**31))

    def curve(run: Any) -> list[Any]:
        torch.manual_seed(seed)
        arrays, options = call.to_torch(grad=True)
        done = run(*arrays, **options)
        lse = torch.where(torch.isfinite(done.lse), done.lse, 0)
        parts = (done.out.square() * weights[0]).sum(), (lse.sin() * weights[1]).sum()
        loss = (parts[0], parts[1], sum(parts))[seed % 3]
        options = {"create_graph": True, "materialize_grads": True}
        first = torch.autograd.grad(loss, arrays, **options)
        total = sum((g * torch.randn(g.shape).to(g)).sum() for g in first)
        found = torch.autograd.grad(total, arrays, allow_unused=True)
        pairs = zip(found, arrays, strict=True)
        return [torch.zeros_like(x) if g is None else g for g, x in pairs]

    error = bound_error(call)
    for name, a, b in zip("qkv", curve(attend), curve(attention), strict=True):
        compare(f"d²{name}", a, b, None if error is None else 1e4 * error)
    return True


def ask_in_place(call: HostileCall, rng: Rng) -> bool:
    """Change a tensor between forward and backward: an error, or no difference."""
    if not call.is_finite or call.dtype != "float64" or max(call.shape[-2:]) > 100:
        return False
    weights = draw_weights(call, rng)
    arrays, options = call.to_torch(grad=True)
    right = differentiate(attend, arrays, options, weights)
    arrays, options = call.to_torch(grad=True)
    copies = [x * 1 for x in arrays]  # a leaf cannot be changed in place
    done = attend(*copies, **options)
    lse = torch.where(torch.isfinite(done.lse), done.lse, 0)
    loss = (done.out * weights[0]).sum() + (lse * weights[1]).sum()
    data = [x for x in list_data(options) if x.numel()]
    candidates = [x for x in (*copies, *data) if x.numel()]
    if not candidates:
        return False
    chosen = candidates[rng.integers(len(candidates))]
    with torch.no_grad():
        if chosen.dtype == torch.bool:
            chosen.logical_not_()
        elif chosen.is_floating_point():
            chosen.mul_(3).add_(1)
        else:
            chosen.zero_()
    try:
        found = torch.autograd.grad(loss, arrays, allow_unused=True)
    except (GradientError, RuntimeError) as error:
        if "place" in str(error):
            return True
        raise
    for name, a, b in zip("qkv", found, right, strict=True):
        pair = [torch.zeros(()) if x is None else x for x in (a, b)]
        compare(f"d{name} after a change in place", *pair, 1e-9)
    return True


def list_data(options: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of the options, those in formulas too."""
    nodes = [node for x in options.values() if isinstance(x, Mask) for node in x.walk()]
    inside = [x for node in nodes for x in vars(node).values()]
    return [x for x in (*options.values(), *inside) if isinstance(x, torch.Tensor)]


def ask_autocast(call: HostileCall, rng: Rng) -> bool:
    """Compare attend and attention inside of autocast with the definition."""
    if overflows(call):
        return False
    arrays, options = call.to_torch()
    run = [attend, attention][rng.integers(2)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(*arrays, **options)
    if str(found.lse.dtype) not in ("torch.float32", "torch.float64"):
        raise WrongNumberError(
            f"lse is of {found.lse.dtype}, expected at least float32"
        )
    compare_results(call, found, define(call))
    return True


def ask_compiled(call: HostileCall, rng: Rng) -> bool:
    """Compare attend under torch.compile with attend."""
    if rng.random() > 0.02 or is_huge(call) or not call.is_finite:  # it is slow
        return False
    torch.compiler.reset()
    arrays, options = call.to_torch()
    run = torch.compile(lambda q, k, v: attend(q, k, v, **options), backend="aot_eager")
    with torch.no_grad():
        compare_results(call, run(*arrays), define(call))
    return True


def ask_traced(call: HostileCall, rng: Rng) -> bool:
    """Compare jax.jit with the definition."""
    if rng.random() > 0.06 or is_huge(call) or call.dtype != "float32":  # it is slow
        return False
    if not np.isfinite(call.options.get("sink", 0)).all():
        return False  # jaxlib 0.10.2: exp of a NaN that is a constant is no NaN
    arrays = [jnp.asarray(x, dtype="float32") for x in call.arrays]
    numbers = {n: x for n, x in call.options.items() if n in ("scale", "softcap")}
    others = {n: x for n, x in call.options.items() if n not in numbers}
    others = {n: jnp.asarray(x) if is_array(x) else x for n, x in others.items()}
    run = jax.jit(lambda arrays, numbers: pair(attention(*arrays, **others, **numbers)))
    found = run(arrays, {n: jnp.asarray(x) for n, x in numbers.items()})
    compare_results(call, Attended(*found), define(call))
    return True


def pair(done: Attended) -> tuple[Any, Any]:
    """Return out and lse alone."""
    return done.out, done.lse


def ask_mapped(call: HostileCall, rng: Rng) -> bool:
    """Compare torch.vmap over attend with a loop."""
    if rng.random() > 0.2 or is_huge(call) or not call.is_finite:
        return False
    if call.strides or ("mask" in call.options and is_array(call.options["mask"])):
        return False
    arrays, options = call.to_torch()
    twice = [torch.stack([x, x.flip(-1)]) for x in arrays]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outs, lses = torch.vmap(lambda q, k, v: pair(attend(q, k, v, **options)))(
            *twice
        )
    for i in range(2):
        out, lse = pair(attend(*(x[i] for x in twice), **options))
        compare("mapped lse", lses[i], lse, 1e-5)
        compare("mapped out", outs[i], out, 1e-2)
    return True


def ask_statistics(call: HostileCall, rng: Rng) -> bool:
    """Compare statistics of a record with its dense weights."""
    error = bound_error(call)  # None: lse is rounded to more than 1
    record = None if error is None or is_huge(call) else make_record(call, rng)
    if record is None:
        return False
    with np.errstate(all="ignore"):
        found = list_statistics(record, rng)
    for name, (a, b) in found.items():
        compare(name, a.values, b, 30 * error)
    return True


QUESTIONS: tuple[Question, ...] = (
    ask_values,
    ask_blocks,
    ask_gradients,
    ask_curvature,
    ask_in_place,
    ask_autocast,
    ask_compiled,
    ask_traced,
    ask_mapped,
    ask_statistics,
)
