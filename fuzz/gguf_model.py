"""Hunt: GGUF files, loaded into a model that then reads two tokens.

    bytes ─▶ load ─▶ model(two tokens), tokenizer there and back
                  ─▶ every tensor as the package `gguf` reads it

Next: folder.py
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from damage import damage_bytes
from gguf import GGUFReader
from gguf.quants import dequantize
from hunt import Target, main

from regard.errors import RegardError
from regard.nn.gguf_file import open_gguf
from regard.nn.tokens import Tokenizer
from regard.nn.weights import load

KEYS: tuple[bytes, ...] = ()
KEYS += (b"general.architecture", b"general.alignment", b"general.type")
KEYS += (b"split.count",)
KEYS += (b"llama.context_length", b"llama.rope.freq_base", b"llama.vocab_size")
KEYS += (b"tokenizer.ggml.tokens", b"tokenizer.ggml.merges", b"tokenizer.ggml.pre")
KEYS += (b"tokenizer.ggml.token_type", b"tokenizer.chat_template", b"llama-bpe")
KEYS += (b"token_embd.weight", b"blk.0.attn_q.weight", b"output.weight", b"smollm")
TALK = ({"role": "user", "content": "Hi 12\n"}, {"role": "assistant", "content": "é"})


def check(data: bytes) -> None:
    """Load a file; if it loads, it works and is what it says."""
    with tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        path = Path(folder) / "model.gguf"
        path.write_bytes(data)
        model, tokenizer = load(path)
        try:
            use(model, tokenizer)
        except RegardError as error:
            raise AssertionError("a model that loads is refused later") from error
        compare(path)


@torch.no_grad()  # type: ignore[untyped-decorator]
def use(model: Any, tokenizer: Tokenizer) -> None:
    """Read two tokens; write a text as tokens and back; a chat may be refused."""
    n = model.config.vocabulary
    logits = model(torch.tensor([[0, n - 1]])[:, : model.config.context])
    assert logits.shape[-1] == n
    talk(tokenizer)


def talk(tokenizer: Tokenizer) -> None:
    """Encode, decode, and write a conversation."""
    for act in (write, lambda x: x.chat(TALK)):
        try:
            act(tokenizer)
        except RegardError as error:  # not every vocabulary has every word
            assert str(error).isprintable(), error  # noqa: PT017


def write(tokenizer: Tokenizer) -> None:
    """Write a text as tokens, and tokens as text."""
    "".join(tokenizer.stream([0, 1, 2]))
    ids = tokenizer.encode("Hello 12 é\n\n<|end|>")
    assert isinstance(tokenizer.decode(ids), str)
    assert len(tokenizer.offsets("Hello")) == len(tokenizer.encode("Hello"))


def compare(path: Path) -> None:
    """Hold every tensor against what the package of the format reads."""
    ours = open_gguf(path)
    try:
        theirs = {x.name: x for x in GGUFReader(path).tensors}
    except Exception:  # noqa: BLE001 (it is stricter here and there)
        return
    for name in ours.entries:
        expected = dequantize(theirs[name].data, theirs[name].tensor_type)
        found = ours.read(name)
        assert np.array_equal(found.ravel(), expected.ravel(), equal_nan=True), name


def damage(rng: random.Random, data: bytes) -> bytes:
    """Change bytes, most often of the head; or put a known key over another text."""
    if rng.random() < 0.3:
        key, at = rng.choice(KEYS), rng.randint(0, len(data))
        found = data.find(rng.choice(KEYS), at)
        at = found if found >= 0 else at
        return data[:at] + key + data[at + len(key) :]
    head = rng.choice((64, len(data) // 4, len(data)))
    return damage_bytes(rng, data[:head]) + data[head:]


TARGET = Target("gguf_model", check, damage, longest=2**13)
if __name__ == "__main__":
    main(TARGET)
