"""Load the simulated device, `torch.device("sim")`, and count what crosses its border.

    with count() as counts:
        model(tokens)
    counts.to_host, counts.bytes_to_host, counts.to_device, counts.reads

    with use_kernel("efficient"):    SDPA takes this operator on the device
        model(tokens)

The device is written in C++ (simulated_device.cpp) and compiled once: the library is
kept in the user's cache under a name that tells its source, its torch and its compiler.
A process that has loaded it has an accelerator, which changes defaults of torch and of
transformers, so the tests of this folder have a process of their own.

Next: device_kernels.py
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
from torch.utils.cpp_extension import include_paths, library_paths

SOURCE = Path(__file__).with_suffix(".cpp")
COUNTERS = ("to_host", "bytes_to_host", "to_device", "reads", "in_use", "peak")
KERNELS = {"math": 0, "flash": 1, "efficient": 2, "cudnn": 3, "overrideable": 4}
NAME = "sim"


def find_compiler():
    """Return the C++ compiler of this machine, None if there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build_library():
    """Return the compiled device, compiling it if the cache does not have it."""
    compiler = find_compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True)
    torch_is = f"{torch.__version__} {torch.__file__}".encode()
    key = hashlib.sha256(b"\0".join((SOURCE.read_bytes(), version.stdout, torch_is)))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    library = cache / "regard" / f"device-{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [compiler, "-std=c++20", "-shared", "-fPIC", "-w"]
        command += [f"-I{path}" for path in include_paths()]
        command += [str(SOURCE), "-o", str(made)]
        command += [f"-L{path}" for path in library_paths()]
        command += ["-lc10", "-ltorch_cpu", "-ltorch"]
        subprocess.run(command, check=True)
        made.rename(library)  # in one step: another process may compile it, too
    return library


def load_device():
    """Make the device known to torch."""
    torch.ops.load_library(build_library())
    torch.utils.rename_privateuse1_backend(NAME)
    module = ModuleType(NAME)
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=0: torch.get_rng_state()
    module.set_rng_state = lambda state, device=0: torch.set_rng_state(state)
    module.synchronize = lambda device=0: None
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()


def read_counters():
    """Return the values of all counters."""
    return tuple(map(torch.ops.simulated.read_counter, range(len(COUNTERS))))


@dataclass
class Counts:
    """What happened since it was made; memory in bytes."""

    start: tuple[int, ...] = field(default_factory=read_counters)
    end: tuple[int, ...] | None = None

    def __getattr__(self, name):
        place = COUNTERS.index(name)
        now = self.end or read_counters()
        return now[place] - self.start[4 if name == "peak" else place]

    def __str__(self):
        return ", ".join(f"{name} {getattr(self, name)}" for name in COUNTERS)


@contextmanager
def count():
    """Count copies, reads and memory while the `with` lasts."""
    torch.ops.simulated.write_counter(5, torch.ops.simulated.read_counter(4))
    counts = Counts()
    try:
        yield counts
    finally:
        counts.end = read_counters()


@contextmanager
def use_kernel(name):
    """Let SDPA choose a kernel on the device."""
    torch.ops.simulated.choose_kernel(KERNELS[name])
    try:
        yield
    finally:
        torch.ops.simulated.choose_kernel(KERNELS["overrideable"])
