"""One training step of our transformer, of transformers' GPT-2 and of torch's encoder.

    python benchmarks/training.py         writes training.json and docs/models.md

All have 6 layers, width 384, 6 heads, learned positions, layer norm first, no dropout,
a tied head of 65 characters, and the same AdamW; a step is 12 sequences of 256 tokens,
forward, backward and update. GPT-2 has GELU by tanh, torch's encoder the exact one, so
ours is built both ways. All run in turn in one process, 2 threads; a ratio is the
median of the rounds. Below 1 ours is faster. CPU only.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from marks import fill
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import GPT2Config, GPT2LMHeadModel

from regard.nn.decoder import CausalTransformer
from regard.plain.config import Activation, Config

HERE = Path(__file__).parent
MARK = "<!-- benchmark:training -->"
LAYERS, WIDTH, HEADS, BATCH, BLOCK, VOCABULARY = 6, 384, 6, 12, 256, 65
ROUNDS = 25


def make_ours(activation: Activation) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Return our model and its logits."""
    model = CausalTransformer(
        Config(
            vocabulary=VOCABULARY,
            context=BLOCK,
            width=WIDTH,
            layers=LAYERS,
            heads=HEADS,
            activation=activation,
        )
    )
    return model, model


def make_gpt2() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Return transformers' GPT-2 on its fast kernel, and its logits."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=BLOCK,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    assert model.config._attn_implementation == "sdpa"  # noqa: SLF001
    return model, lambda tokens: model(tokens).logits


class Encoder(nn.Module):  # type: ignore[misc]
    """torch's own layers as a causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(BLOCK, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH,
            HEADS,
            4 * WIDTH,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        norm = nn.LayerNorm(WIDTH)
        self.encoder = nn.TransformerEncoder(
            layer, LAYERS, norm=norm, enable_nested_tensor=False
        )
        self.mask = nn.Transformer.generate_square_subsequent_mask(BLOCK)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.embed(tokens) + self.positions.weight
        x = self.encoder(x, mask=self.mask, is_causal=True)
        return F.linear(x, self.embed.weight)


def make_encoder() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Return torch's encoder and its logits."""
    model = Encoder()
    return model, model


MODELS = {
    "regard, gelu_tanh": lambda: make_ours("gelu_tanh"),
    "transformers GPT-2": make_gpt2,
    "regard, gelu": lambda: make_ours("gelu"),
    "torch nn.TransformerEncoder": make_encoder,
}
PAIRS = {
    "transformers GPT-2": "regard, gelu_tanh",
    "torch nn.TransformerEncoder": "regard, gelu",
}


def make_step(
    model: nn.Module, predict: Callable[[Tensor], Tensor]
) -> Callable[[], Any]:
    """Return one step: forward, backward, update."""
    tokens = torch.randint(0, VOCABULARY, (BATCH, BLOCK + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        logits = predict(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def render(result: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    lines = [
        "| one training step of | theirs, ms | regard, ms | ratio |",
        "|---|---|---|---|",
    ]
    for name, line in result["time"].items():
        ratio, ours, theirs = line["ratio"], line["ours_ms"], line["theirs_ms"]
        lines.append(f"| {name} | {theirs:.0f} | {ours:.0f} | {ratio:.3f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and write the results."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    steps = {name: make_step(*make()) for name, make in MODELS.items()}
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in track(range(ROUNDS + 2), "measuring"):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= 2:
                rounds[name].append(time.perf_counter() - start)
    times = {
        name: {
            "theirs_ms": round(1000 * min(rounds[name]), 1),
            "ours_ms": round(1000 * min(rounds[ours]), 1),
            "ratio": round(
                statistics.median(
                    a / b for a, b in zip(rounds[ours], rounds[name], strict=True)
                ),
                3,
            ),
        }
        for name, ours in PAIRS.items()
    }
    names = ("regard", "torch", "transformers")
    about: dict[str, Any] = {name: version(name) for name in names}
    about |= {"python": platform.python_version(), "threads": 2, "rounds": ROUNDS}
    result = {"about": about, "time": times}
    (HERE / "training.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    fill("docs/models.md", MARK, render(result))


if __name__ == "__main__":
    main()
