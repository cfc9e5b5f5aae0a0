"""A small model for atlases that dies of what a document says, as real ones may."""

import os
import signal
import time
from pathlib import Path

import torch

from regard.atlas.model import Model, Words
from regard.nn.decoder import CausalTransformer
from regard.plain.config import Config

FOLDER = os.environ.get("ATLAS_DEATHS", ".")  # of one who is unlucky twice


def encode(text):
    if "UNREADABLE" in text:
        raise ValueError("a text that no tokenizer takes")
    return list(text.encode())


def make():
    torch.manual_seed(0)
    config = Config(vocabulary=256, context=64, width=16, layers=2, heads=4, kv_heads=2)
    network = CausalTransformer(config)

    def run(tokens):
        text = "\n".join(
            bytes(row).decode("utf-8", "replace") for row in tokens.tolist()
        )
        if "KILLER" in text:
            os.kill(os.getpid(), signal.SIGKILL)
        if "UNLUCKY" in text and len(deaths := list(Path(FOLDER).glob("*.death"))) < 2:
            Path(FOLDER, f"{len(deaths)}.death").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if "CRASH" in text:
            raise RuntimeError("a document that breaks the model")
        time.sleep(float(os.environ.get("ATLAS_SLOW", "0")))
        return network.read(tokens)

    words = Words(encode, lambda ids: bytes(ids).decode("utf-8", "replace"), 64)
    return Model(network, run, words)


def never():
    """A model that ends its process while it is loaded."""
    print("no memory for this model", file=__import__("sys").stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
