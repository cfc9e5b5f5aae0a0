"""These tests run in Triton's interpreter, in the environment of `.ci/environment.py --triton`:

    TRITON_INTERPRET=1 .venv.triton/bin/python -m pytest --confcutdir=tests/kernels tests/kernels

The variable must be set before Triton is imported, so other runs of pytest leave them out.
Two things of the interpreter of Triton 3.9 are corrected here: it multiplies bfloat16 as the
integers that hold the bits, and it patches its language again for every function call.
"""

import os

import numpy as np
import pytest

collect_ignore_glob = []
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Let the kernels run on the CPU."""
    import triton.language as tl  # noqa: PLC0415 (it may not be installed)
    from triton.runtime import interpreter as runs  # noqa: PLC0415

    from regard.kernels import available  # noqa: PLC0415

    monkeypatch.setattr(available, "DEVICES", ("cpu",))
    multiply, patch, load = (
        runs.InterpreterBuilder.create_dot,
        runs._patch_lang,
        tl.load,
    )

    def widen(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        wide = (x.data.astype(np.uint32) << 16).view(np.float32)
        return runs.TensorHandle(wide, tl.float32)

    def multiply_wide(self, a, b, *rest):
        return multiply(self, widen(a), widen(b), *rest)

    def patch_once(fn):
        used = [x for x in fn.__globals__.values() if x is tl or x is tl.core]
        done = all(x.load is not load for x in used)
        return runs._LangPatchScope() if done else patch(fn)

    monkeypatch.setattr(runs.InterpreterBuilder, "create_dot", multiply_wide)
    monkeypatch.setattr(runs, "_patch_lang", patch_once)
