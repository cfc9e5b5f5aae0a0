"""Check the arithmetic of a device: float32 must have the precision of float32.

    error = max |device(f(x)) - float64(f(x))| / max |float64(f(x))|

Every other promise rests on this one. Some devices round the inputs of a float32 matrix
product to 10 bits (TF32) or 7 bits (bfloat16) unless they are told not to.

Next: engine_results.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from regard.doctor.examined import Trial, judge_error
from regard.judge.inputs import BITS, round_bits

ARITHMETIC = "the device computes in the precision of its dtypes"
ArrayFunction = Callable[[Tensor], Tensor]
OPERATIONS: dict[str, ArrayFunction] = {
    "matrix product": lambda x: x @ x.mT,
    "softmax": lambda x: torch.softmax(x, -1),
    "exponential": torch.exp,
    "sum": lambda x: x.sum(-1),
}
SIZE, FLOAT32_ERROR = 256, 1e-5
COARSER = ("tf32", "bfloat16")  # what devices round float32 to


def check_arithmetic(device: torch.device) -> Iterator[Trial]:
    """Compare four operations in float32 with float64 on the CPU."""
    x = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    for name, operation in OPERATIONS.items():
        right = operation(x.double())
        found = operation(x.to(device)).cpu()
        error = measure_relative_error(found, right)
        says = "" if error <= FLOAT32_ERROR else name_rounding(operation, x, found)
        trial = Trial(ARITHMETIC, f"{name}, float32", str(device))
        yield judge_error(trial, error, FLOAT32_ERROR, says)


def measure_relative_error(found: Tensor, right: Tensor) -> float:
    """Return the largest difference, relative to the largest value; inf for NaN."""
    error = (found.double() - right).abs().max() / right.abs().max()
    return float(error.nan_to_num(torch.inf))


def name_rounding(operation: ArrayFunction, x: Tensor, found: Tensor) -> str:
    """Return which rounding of the input gives the same result, if one does."""
    for precision in COARSER:
        if (
            measure_relative_error(found, operation(round_tensor(x, precision)))
            <= FLOAT32_ERROR
        ):
            return (
                f"The device rounds: its inputs are rounded to {precision}. "
                'Try torch.set_float32_matmul_precision("highest").'
            )
    return "No rounding of the inputs to TF32 or bfloat16 explains the error."


def round_tensor(x: Tensor, precision: str) -> Tensor:
    """Return a tensor rounded to the bits of a precision, in float64."""
    return torch.from_numpy(round_bits(x.double().numpy(), BITS[precision]))
