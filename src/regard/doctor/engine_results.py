"""Check the engine on a device against the definition, in float64 on the CPU.

    attend(q, k, v, mask) on the device  ==  attention(q, k, v, mask) in float64

The inputs are rounded to the dtype first, so both get the same numbers. A wrong result
is given the name of a known fault if that fault computes the same numbers.

Next: name_fault.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from regard.definition.attention import Attended, attention
from regard.doctor.engine_calls import (
    Arrays,
    EngineCall,
    choose_calls,
    measure_difference,
)
from regard.doctor.examined import Trial, judge_error, write_error
from regard.doctor.name_fault import name_fault
from regard.engine.choose import attend

ENGINE = "the engine agrees with the definition"
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
GRADIENT_TOLERANCE = 5e-5  # a gradient of k is a sum over all queries


def check_engine(device: torch.device) -> Iterator[Trial]:
    """Run every call in every dtype; in float32 also the gradients."""
    for call in choose_calls():
        for dtype in TOLERANCES:
            name = str(dtype).removeprefix("torch.")
            trial = Trial(ENGINE, f"{call.name}, {name}", str(device))
            try:
                yield check_call(trial, call, dtype)
            except Exception as error:  # noqa: BLE001 (an unknown device)
                yield trial.end("broken", says=write_error(error))
        trial = Trial(ENGINE, f"{call.name}, gradients", str(device))
        try:
            yield check_gradients(trial, call)
        except Exception as error:  # noqa: BLE001
            yield trial.end("broken", says=write_error(error))


def check_call(trial: Trial, call: EngineCall, dtype: torch.dtype) -> Trial:
    """Compare out and lse of one call."""
    arrays = call.draw_arrays(dtype)
    wide, there = to_double(arrays), move(arrays, trial.device)
    right = call.run(attention, wide)
    with torch.no_grad():
        done = call.run(attend, there)
    found = Attended(done.out.cpu().double(), done.lse.cpu().double())
    error = max(
        measure_difference(found.out, right.out),
        measure_difference(found.lse, right.lse),
    )
    allowed = TOLERANCES[dtype]
    fault = "" if error <= allowed else name_fault(call, wide, found, allowed)
    return judge_error(trial, error, allowed, says=fault)


def check_gradients(trial: Trial, call: EngineCall) -> Trial:
    """Compare the gradients of q, k and v in float32."""
    arrays = call.draw_arrays(torch.float32)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(arrays[0].shape, generator=generator)  # (1, H, Nq, D)
    expected = compute_gradients(call, attention, to_double(arrays), weight.double())
    there = move(arrays, trial.device)
    found = compute_gradients(call, attend, there, weight.to(trial.device))
    pairs = zip(found, expected, strict=True)
    error = max(measure_difference(x.cpu().double(), y) for x, y in pairs)
    return judge_error(trial, error, GRADIENT_TOLERANCE)


def compute_gradients(
    call: EngineCall, function: Callable[..., Attended], arrays: Arrays, weight: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of Σ out · weight by q, k and v."""
    for x in arrays:
        x.requires_grad_()
    found: tuple[Tensor, ...] = torch.autograd.grad(
        call.run(function, arrays).out, arrays, weight
    )
    return found


def to_double(arrays: Arrays) -> Arrays:
    """Return the arrays in float64."""
    q, k, v = arrays
    return q.double(), k.double(), v.double()


def move(arrays: Arrays, device: str) -> Arrays:
    """Return copies of the arrays on a device."""
    q, k, v = (x.to(device, copy=True) for x in arrays)
    return q, k, v
