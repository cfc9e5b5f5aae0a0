"""What the compilers make of the two kernels, for five GPUs, on a machine without any.

    .venv.triton/bin/python benchmarks/compile_kernels.py          all; writes results
    .venv.triton/bin/python benchmarks/compile_kernels.py TARGET…  prints a part

The kernels are launched as for a user, with a driver that names a target and has no
device: Triton specializes and compiles them, and nothing runs. Registers, spills and
shared memory are read from the program for the GPU, matrix instructions from its
assembly. It needs `.ci/environment.py --triton`, and TRITON_INTERPRET must not be set.
Writes compile_kernels.json, and its table on docs/accelerators.md.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from marks import fill

from regard import causal

HERE = Path(__file__).parent
RESULT = HERE / "compile_kernels.json"
MARK = "<!-- benchmark:compile_kernels -->"
TARGETS = {  # backend, architecture, threads of a warp
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx90a": ("hip", "gfx90a", 64),
    "gfx942": ("hip", "gfx942", 64),
}
CARDS = {"sm_80": "A100", "sm_90": "H100", "sm_100": "B200"}
CARDS |= {"gfx90a": "MI250", "gfx942": "MI300X"}
WIDTHS = (64, 128, 256)
KERNELS = {
    "rows: those of a table": {"features": 2, "targets": 3},
    "rows: 8 features": {"features": 8},
    "rows: top 8": {"top": 8},
    "rows: softcap and bias": {"softcap": 30.0, "bias": True},
    "columns": {},
    "columns: 8 features": {"features": 8},
}
DTYPES = ("bfloat16", "float16", "float32")
IN_ALL = ("rows: those of a table", "columns")  # the others in bfloat16 only
N = 256
INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma", "v_mfma")


class NoDevice:
    """A driver of Triton for a target of which there is no device here."""

    def __init__(self, name: str) -> None:
        from triton.backends.compiler import GPUTarget  # noqa: PLC0415

        self.target, self.number = GPUTarget(*TARGETS[name]), list(TARGETS).index(name)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        """Return a number of its own: Triton keeps programs by device."""
        return self.number

    def get_current_stream(self, _: int) -> int:
        return 0


class Compiled:
    """A kernel that is compiled where it would be launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.program = kernel, None

    def __getitem__(self, grid: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> None:
            self.program = self.kernel.warmup(*arguments, grid=grid, **options)

        return run


def compile_kernel(kernel: str, dtype: str, D: int, target: str) -> dict[str, Any]:
    """Return what a kernel takes on a target."""
    from triton.runtime import driver  # noqa: PLC0415

    from regard.kernels import run_kernels  # noqa: PLC0415 (it needs Triton)

    driver.set_active(NoDevice(target))
    options = dict(KERNELS[kernel])
    q, k = (torch.zeros(h, N, D, dtype=getattr(torch, dtype)) for h in (2, 1))
    call = run_kernels.KernelInput(
        q=q,
        k=k,
        lse=torch.zeros(2, N),
        scale=0.1,
        mask=causal(),
        softcap=options.get("softcap"),
        bias=torch.zeros(1, N, N, dtype=q.dtype) if "bias" in options else None,
    )
    n_features = options.get("features", 0)
    features = torch.zeros(1, N, n_features) if n_features else None
    side = "queries" if kernel.startswith("rows") else "keys"
    made = Compiled(getattr(run_kernels, f"summarize_{side}"))
    amd = TARGETS[target][0] == "hip"
    with (
        patch.object(run_kernels, f"summarize_{side}", made),
        patch.object(torch.version, "hip", "any" if amd else None),
    ):
        if side == "queries":
            n_targets, top = options.get("targets", 0), options.get("top", 0)
            run_kernels.run_rows(call, features, torch.zeros(N, n_targets), top)
        else:
            run_kernels.run_columns(call, features)
    found = read_amd(made.program) if amd else read_nvidia(made.program)
    place = {"kernel": kernel, "dtype": dtype, "D": D, "target": target}
    return place | found | {"shared_bytes": made.program.metadata.shared}


def read_nvidia(program: Any) -> dict[str, Any]:
    """Return registers and stack, in which spilled registers are, of a cubin."""
    from triton import knobs  # noqa: PLC0415

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", done.stdout)
    assert found is not None, done.stdout
    registers, stack, local = map(int, found.groups())
    text = program.asm["ptx"]
    return {"registers": registers, "spilled_bytes": stack + local} | count(text)


def read_amd(program: Any) -> dict[str, Any]:
    """Return vector registers and scratch memory, as the assembly declares them."""
    text = program.asm["amdgcn"]

    def read(name: str) -> int:
        found = re.search(rf"\.{name}: +(\d+)", text)
        assert found is not None, name
        return int(found[1])

    spilled = read("private_segment_fixed_size")
    return {"registers": read("vgpr_count"), "spilled_bytes": spilled} | count(text)


def count(text: str) -> dict[str, Any]:
    """Return the matrix instruction of an assembly, and how often it is there."""
    found = {name: text.count(f"{name}") for name in INSTRUCTIONS}
    name = max(found, key=lambda name: found[name])
    return {"instruction": name, "instructions": found[name]}


def list_programs(targets: list[str]) -> Iterator[tuple[str, str, int, str]]:
    """Yield every kernel, dtype, width and target."""
    for target in targets:
        for kernel in KERNELS:
            for dtype in DTYPES if kernel in IN_ALL else DTYPES[:1]:
                for D in WIDTHS if dtype != "float16" else WIDTHS[1:2]:
                    yield kernel, dtype, D, target


def render(result: dict[str, Any]) -> str:
    """Return the result as a table: a row for each kernel, a column for each GPU."""
    rows: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
    for x in result["programs"]:
        rows.setdefault((x["kernel"], x["dtype"], x["D"]), {})[x["target"]] = x
    names = " | ".join(f"{x} ({CARDS[x]})" for x in TARGETS)
    lines = [
        f"| kernel | dtype | D | {names} |",
        "|---|---|--:|" + "---|" * len(TARGETS),
    ]
    for (kernel, dtype, D), by_target in rows.items():
        cells = [write_cell(by_target[x]) for x in TARGETS]
        lines.append(f"| {kernel} | {dtype} | {D} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_cell(x: dict[str, Any]) -> str:
    """Return registers, spills, shared memory and instructions in a few words."""
    spills = f", **{x['spilled_bytes']} B spilled**" if x["spilled_bytes"] else ""
    size = f"{x['shared_bytes'] / 1024:.0f} kB"
    return f"{x['registers']}{spills}, {size}, {x['instructions']} {x['instruction']}"


def main(targets: list[str]) -> None:
    """Compile, and write the result if it is complete."""
    warnings.filterwarnings("ignore", "TRITON_DEFAULT_FP_FUSION")
    if targets:  # a part, in bfloat16 with D = 128: for the test
        made = [x for x in list_programs(targets) if x[1:3] == ("bfloat16", 128)]
        print(json.dumps([compile_kernel(*x) for x in made if x[0] in IN_ALL]))
        return
    import triton  # noqa: PLC0415

    found = []
    for program in list_programs(list(TARGETS)):
        found.append(compile_kernel(*program))
        print(found[-1], flush=True)
    result = {"triton": triton.__version__, "programs": found}
    lines = ",\n".join(f"  {json.dumps(x)}" for x in found)
    RESULT.write_text(
        f'{{"triton": "{result["triton"]}", "programs": [\n{lines}\n]}}\n', "utf-8"
    )
    fill("docs/accelerators.md", MARK, render(result))


if __name__ == "__main__":
    main(sys.argv[1:])
