"""Checkpoints of a training run: one safetensors file, replaced atomically.

    losses                of every step so far
    weights               under the names of regard.plain.config
    first, second         AdamW's running means of the gradient and of its square
    about                 the Config, the Plan and the task, as JSON in the header

No pickle is involved, so a checkpoint cannot contain code. The new file is written next
to the old one, flushed to disk and renamed over it, so a crash at any time leaves one
complete file. A checksum detects later corruption.

Next: show/loss_curve.py
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from regard.atomic_file import sync_to_disk
from regard.errors import FileError, OptionError
from regard.nn.decoder import CausalTransformer
from regard.plain.config import Config

NAME = "checkpoint.safetensors"
PARTS = ("weights", "first", "second")


@dataclass(frozen=True)
class Checkpoint:
    """The complete state of a run: resuming gives the same bits as not stopping."""

    losses: list[float]  # of every step so far
    weights: dict[str, Tensor]
    first: dict[str, Tensor]  # empty before the first step
    second: dict[str, Tensor]
    about: dict[str, Any]  # config, plan, task


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, replacing the previous one atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"losses": torch.tensor(checkpoint.losses, dtype=torch.float64)}
    for part in PARTS:
        for name, x in getattr(checkpoint, part).items():
            tensors[f"{part}.{name}"] = x.detach().contiguous().cpu()
    about = json.dumps(checkpoint.about)
    header = {"regard": about, "checksum": checksum_tensors(tensors, about)}
    new = folder / f"{NAME}.new"  # overwrites one left by a crash
    save_file(tensors, new, header)
    sync_to_disk(new)
    new.replace(folder / NAME)
    sync_to_disk(folder)  # makes the rename durable


def checksum_tensors(tensors: dict[str, Tensor], about: str) -> str:
    """Return a checksum of all tensors and the header of a checkpoint."""
    total = zlib.crc32(about.encode())
    for name in sorted(tensors):
        total = zlib.crc32(name.encode(), total)
        total = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy(), total)
    return f"{total:08x}"


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the checkpoint in a folder, or None if there is none."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise FileError(
            f"{path} is damaged or not a safetensors file ({error}). "
            "Delete it to train from the start."
        ) from error
    about = header.get("regard", "")
    if "losses" not in tensors or not about:
        raise FileError(
            f"{path} is not a checkpoint of a training run. Move it elsewhere."
        )
    if header.get("checksum") != checksum_tensors(tensors, about):
        raise FileError(
            f"{path} is damaged: its numbers do not match its checksum. "
            "Delete it to train from the start."
        )
    losses = tensors.pop("losses").tolist()
    found: dict[str, dict[str, Tensor]] = {part: {} for part in PARTS}
    for name, x in tensors.items():
        part, _, rest = name.partition(".")
        found.setdefault(part, {})[rest] = x
    weights, first, second = (found[part] for part in PARTS)
    return Checkpoint(losses, weights, first, second, json.loads(about))


def read_saved_config(saved: Checkpoint, folder: Path) -> Config:
    """Return the config of a checkpoint; raise if its weights have other shapes."""
    try:
        config = Config(**saved.about["config"])
    except (KeyError, TypeError, OptionError) as error:
        raise FileError(
            f"{folder / NAME} has a config unknown to this version ({error}). "
            "Read it with the version that wrote it."
        ) from error
    weights, first, second = (
        {name: tuple(x.shape) for name, x in part.items()}
        for part in (saved.weights, saved.first, saved.second)
    )
    expected = dict(config.shapes())
    if weights != expected or first != second or not first.items() <= weights.items():
        raise FileError(
            f"{folder / NAME} does not hold the weights that its config describes. "
            "Delete it to train from the start."
        )
    return config


def save_run(
    folder: Path,
    model: CausalTransformer,
    optimizer: torch.optim.AdamW,
    losses: list[float],
    about: dict[str, Any],
) -> None:
    """Save the current state of a run."""
    weights = dict(model.named_parameters())
    state = {name: optimizer.state[x] for name, x in weights.items()}
    taught = {name: x for name, x in state.items() if x}  # frozen weights have none
    first = {name: x["exp_avg"] for name, x in taught.items()}
    second = {name: x["exp_avg_sq"] for name, x in taught.items()}
    write_checkpoint(folder, Checkpoint(losses, weights, first, second, about))


def resume_run(
    folder: Path,
    model: CausalTransformer,
    optimizer: torch.optim.AdamW,
    about: dict[str, Any],
) -> list[float]:
    """Restore a saved run and return its losses; [] if nothing is saved yet."""
    saved = read_checkpoint(folder)
    if saved is None:
        return []
    read_saved_config(saved, folder)
    check_same(saved.about, about, folder)
    weights = dict(model.named_parameters())
    model.load_state_dict(saved.weights)
    for name, first in saved.first.items():
        weight = weights[name]
        optimizer.state[weight] = {
            "step": torch.tensor(float(len(saved.losses)), device=weight.device),
            "exp_avg": first.to(weight.device),
            "exp_avg_sq": saved.second[name].to(weight.device),
        }
    return saved.losses


def check_same(saved: dict[str, Any], ours: dict[str, Any], folder: Path) -> None:
    """Raise if the saved run has another config, plan or task than this one."""
    for part, now in json.loads(json.dumps(ours)).items():
        before = saved.get(part, {})
        for name in before | now:
            if before.get(name) != now.get(name):
                raise OptionError(
                    f"{folder} holds another run: its {part} had "
                    f"{name}={before.get(name)!r}, this one has {now.get(name)!r}. "
                    "Give the same, or another folder."
                )


def load_model(folder: str | Path) -> CausalTransformer:
    """Return the model of a run as last saved."""
    checkpoint = read_checkpoint(Path(folder))
    if checkpoint is None:
        raise FileError(f"no {NAME} in {folder}. Train one: train(…, folder=…).")
    model = CausalTransformer(read_saved_config(checkpoint, Path(folder)))
    model.to(next(iter(checkpoint.weights.values())).dtype)
    model.load_state_dict(checkpoint.weights)
    return model
