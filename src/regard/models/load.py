"""Load a model by its name: as a decoder of regard, or else with transformers.

    name ─▶ find_model ─▶ GGUF file             regard.nn
                       ─▶ folder of safetensors  regard.nn for the families it knows,
                                                 transformers for all others

Next: from_transformers.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from regard.arguments import suggest
from regard.errors import FileError, OptionError
from regard.find_model import find_model
from regard.models.from_transformers import load_processor, load_their_network
from regard.nn.families import FAMILIES
from regard.nn.tokens import read_json
from regard.nn.weights import FLOATS, open_source
from regard.nn.weights import load as load_ours

CODE = (
    "it needs code from its repository, which regard never runs. If you trust it, load "
    "it yourself and give the pair: regard.read(…, model=(model, tokenizer))"
)


@suggest
def load(
    name: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    download: bool = False,
) -> tuple[Any, Any]:
    """Return a model and its tokenizer, or its processor if it reads more than text.

    >>> model, tokenizer = load("SmolLM2-135M-Instruct.Q4_1.gguf")  # doctest: +SKIP

    name: a GGUF file, a folder, or a name in the local Hugging Face cache
    dtype: of the weights
    download: ask the Hugging Face hub for a model that is not in the cache
    """
    if not isinstance(name, str | Path):
        raise OptionError(
            f"load() got a {type(name).__name__}, expected the name or the path of a "
            "model. A model in memory can be watched: regard.watch(model)."
        )
    if dtype not in FLOATS:
        raise OptionError(f"dtype={dtype}, expected {', '.join(map(str, FLOATS))}.")
    path = find_model(name, download=download)
    reason = explain_not_ours(path)
    if reason is None:
        network, words = load_ours(path, dtype=dtype)
    else:
        network = load_their_network(path, reason, dtype=dtype)
        words = load_processor(path, reason)
    network.name_or_path = str(name)  # the title of what is watched
    return network, words


def explain_not_ours(path: Path) -> FileError | None:
    """Return why regard.nn cannot load a model that transformers may load, or None.

    A file that is damaged or no model raises: transformers would not know better.
    """
    if not path.is_dir() or not (path / "config.json").exists():
        return None
    settings = read_json(path / "config.json")
    if settings.get("model_type") in FAMILIES:
        try:
            source = open_source(path)
            source.make_tokenizer()
            return find_other_head(settings)
        except FileError as reason:  # settings that change the result, or no tokenizer
            return reason
    if "auto_map" in settings:
        return FileError(f"model_type={settings.get('model_type')!r:.80}: {CODE}.")
    return FileError(
        f"model_type={settings.get('model_type')!r:.80} is loaded by transformers."
    )


def find_other_head(settings: dict[str, Any]) -> FileError | None:
    """Return an error if the model is not a language model, such as a classifier."""
    names = settings.get("architectures") or []
    wrong = [x for x in names if not str(x).endswith(("ForCausalLM", "LMHeadModel"))]
    return FileError(f"architectures={wrong!r:.80}.") if wrong else None
