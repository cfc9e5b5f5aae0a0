"""A small decoder for searches over pairs, which fails on what a prompt says."""

import os
import signal
import time

import torch

from regard.atlas.model import Model, Words
from regard.nn.decoder import CausalTransformer
from regard.plain.config import Config


def fail(network, args, named):
    tokens = args[0] if args else named["tokens"]
    text = bytes(tokens[0].tolist())
    if b"KILLER" in text:
        os.kill(os.getpid(), signal.SIGKILL)
    if b"CRASH" in text:
        raise RuntimeError("a prompt that breaks the model")
    time.sleep(float(os.environ.get("SEARCH_SLOW", "0")))


def spoil(embed, inputs, outputs):
    return outputs.masked_fill((inputs[0] == 1)[..., None], torch.nan)


def make():
    torch.manual_seed(int(os.environ.get("SEARCH_SEED", "0")))
    config = Config(vocabulary=256, context=24, width=16, layers=2, heads=4, kv_heads=2)
    network = CausalTransformer(config)
    with torch.no_grad():
        for weight in network.blocks.parameters():  # so that a patch changes much
            weight.mul_(8 if weight.ndim == 2 else 1)
    network.embed.register_forward_hook(spoil)
    network.register_forward_pre_hook(fail, with_kwargs=True)
    words = Words(
        lambda text: list(text.encode()),
        lambda ids: bytes(ids).decode("utf-8", "replace"),
        24,
    )
    return Model(network, network, words)
