"""Hunt: folders as transformers writes them, all their files in one text of bytes.

    === config.json
    {"model_type": "llama", …}
    === model.safetensors
    …

    files ─▶ load ─▶ model(two tokens), tokenizer there and back, chat

Next: template.py
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from damage import damage_bytes, damage_text, damage_tree, read_tree
from gguf_model import use
from hunt import Target, main
from safetensors.torch import load_file
from template import WORDS

from regard.errors import RegardError
from regard.nn import families
from regard.nn.weights import load

NAMES: tuple[str, ...] = ()
NAMES += ("config.json", "generation_config.json", "tokenizer.json")
NAMES += ("pytorch_model.bin",)
NAMES += ("tokenizer_config.json", "chat_template.jinja", "model.safetensors")
NAMES += ("model.safetensors.index.json", "a.safetensors", "b.safetensors")
HEAD = re.compile(rb"(?:^|\n)=== ([\w.]+)\n")
KNOWN: tuple[Any, ...] = (*families.FAMILIES, *families.LLAMA_SETTINGS, *families.ONLY)
KNOWN += (*families.GPT2_SETTINGS, "rope_theta", "F32", "F64", "BF16", "I8", "F8_E4M3")
KNOWN += ("BPE", "WordPiece", "WordLevel", "Unigram", "ByteLevel", "Split", "Sequence")
KNOWN += ("Metaspace", "Digits", "NFC", "Precompiled", "Replace", "Strip", "Fuse")
KNOWN += ("TemplateProcessing", "RobertaProcessing", "ByteFallback", "CTC", "Lowercase")
KNOWN += ("Isolated", "Removed", "MergedWithPrevious", "sliding_attention", "a|b", "(")


def check(data: bytes) -> None:
    """Write the files into a folder and load it; if it loads, it works."""
    with tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        for name, part in split(data):
            if name in NAMES:
                (Path(folder) / name).write_bytes(part)
        model, tokenizer = load(folder)
        try:
            use(model, tokenizer)
        except RegardError as error:
            raise AssertionError("a model that loads is refused later") from error
        compare(Path(folder), model)


def compare(folder: Path, model: Any) -> None:
    """Hold the embedding against what the package of the format reads."""
    if (folder / "model.safetensors").exists():
        state = load_file(folder / "model.safetensors")
        named = [x for name, x in state.items() if re.search("wte|embed_tok", name)]
        found = model.state_dict()["embed.weight"]
        assert any(
            torch.equal(found.nan_to_num(), x.float().nan_to_num()) for x in named
        )


def split(data: bytes) -> list[tuple[str, bytes]]:
    """Return the files in a text of bytes."""
    _, *parts = HEAD.split(data)
    return [
        (name.decode(), part)
        for name, part in zip(parts[::2], parts[1::2], strict=True)
    ]


def join(files: list[tuple[str, bytes]]) -> bytes:
    """Return a text of bytes that has these files."""
    return b"".join(b"\n=== " + name.encode() + b"\n" + part for name, part in files)


def damage(rng: random.Random, data: bytes) -> bytes:
    """Change one of the files as what it is: JSON, a template, an array file."""
    files = split(data)
    if not files or rng.random() < 0.1:
        return damage_bytes(rng, data)
    at = rng.randrange(len(files))
    name, part = files[at]
    if rng.random() < 0.05:
        files[at] = (rng.choice(NAMES), part)
    elif name.endswith(".json"):
        tree = damage_tree(rng, read_tree(part), KNOWN)
        files[at] = (name, json.dumps(tree).encode())
    elif name.endswith(".jinja"):
        text = damage_text(rng, part.decode("utf-8", "replace"), WORDS)
        files[at] = (name, text.encode("utf-8", "replace"))
    else:
        n = int.from_bytes(part[:8], "little")
        tree = damage_tree(rng, read_tree(part[8 : 8 + n]), KNOWN)
        raw = json.dumps(tree).encode()
        head = len(raw).to_bytes(8, "little") + raw
        files[at] = (name, head + part[8 + n :])
    return join(files)


TARGET = Target("folder", check, damage, longest=2**14)
if __name__ == "__main__":
    main(TARGET)
