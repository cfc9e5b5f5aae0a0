"""Load pretrained weights from a GGUF file or a folder of safetensors.

    file ─▶ settings ─▶ Config
         ─▶ tensors ─▶ our names, rows of q, k, v in one matrix ─▶ CausalTransformer
         ─▶ vocabulary ─▶ Tokenizer

The mapping of names and settings is in families.py. Tensors are read and converted one
at a time, so peak memory is little more than the model. A truncated, damaged or unknown
file raises a FileError.

Next: families.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.arguments import suggest
from regard.errors import FileError, OptionError
from regard.nn.chat_template import describe_error
from regard.nn.decoder import CausalTransformer
from regard.nn.families import (
    IGNORED,
    NAMES,
    TRANSPOSED,
    read_config,
    read_gguf_config,
)
from regard.nn.gguf_file import LONGEST, GgufFile, open_gguf
from regard.nn.tokens import (
    Tokenizer,
    build_gguf_tokenizer,
    read_folder_tokenizer,
    read_json,
)
from regard.plain.config import Config

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
FACTORS = "rope_freqs.weight"
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
PREFIX = re.compile(r"^(model|transformer)\.")  # in transformers, except on lm_head
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # layer number


@suggest
def load(
    path: str | Path, *, dtype: torch.dtype = torch.float32
) -> tuple[CausalTransformer, Tokenizer]:
    """Return the model and the tokenizer of a GGUF file or a safetensors folder.

    >>> model, tokenizer = load("SmolLM2-135M-Instruct.Q4_1.gguf")  # doctest: +SKIP
    """
    if not isinstance(path, str | Path):
        raise OptionError(
            f"load() got a {type(path).__name__}, expected the path of a GGUF file or "
            "of a folder. A model in memory can be watched: regard.watch(model)."
        )
    if dtype not in FLOATS:
        raise OptionError(f"dtype={dtype!r}, expected {', '.join(map(str, FLOATS))}.")
    source = open_source(Path(path))
    tokenizer = source.make_tokenizer()
    weights = convert_state(source.state, source.config, dtype=dtype)
    with torch.device("meta"), SkipInit():  # no memory, no random numbers
        model = CausalTransformer(source.config)
    model.load_state_dict(weights, assign=True)
    return model.eval(), tokenizer


def read_weights(path: str | Path) -> tuple[Config, dict[str, NDArray[np.float32]]]:
    """Return the config and the weights as NumPy arrays for regard.plain.Decoder."""
    source = open_source(Path(path))
    weights = convert_state(source.state, source.config)
    return source.config, {name: x.numpy() for name, x in weights.items()}


class SkipInit(TorchFunctionMode):  # type: ignore[misc]
    """Skip random initialization: on "meta" it would import the compiler (1.5 s)."""

    def __torch_function__(
        self, func: Any, _types: Any, args: Any = (), named: Any = None
    ) -> Any:
        named = named or {}
        if func is nn.init.normal_:
            return args[0] if args else named["tensor"]
        return func(*args, **named)


# --- conversion ----------------------------------------------------------------------


def convert_state(
    state: Mapping[str, Tensor], config: Config, *, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Convert a state dict of transformers or of a file to our names and layout.

    >>> theirs = transformers.AutoModelForCausalLM.from_pretrained(…)  # doctest: +SKIP
    >>> config = read_config(theirs.config.to_dict())  # doctest: +SKIP
    >>> weights = convert_state(theirs.state_dict(), config)  # doctest: +SKIP
    """
    sources = match_names(state, config)
    weights = {}
    for ours, shape in config.shapes():
        parts = [read_source_tensor(state, name) for name in sources[ours]]
        given = [tuple(x.shape) for x in parts]
        rows = sum(x[0] for x in given if x)
        if rows != shape[0] or any(x[1:] != shape[1:] or not x for x in given):
            raise FileError(
                f"{ours} should be {shape}, but {' + '.join(sources[ours])} "
                f"{'is' if len(given) == 1 else 'are'} {', '.join(map(str, given))}."
            )
        weights[ours] = torch.cat([x.to(dtype) for x in parts])  # always copies
    if config.tied and "head.weight" in sources:
        (embed,), (head,) = sources["embed.weight"], sources["head.weight"]
        if not torch.equal(state[embed], state[head]):
            raise FileError(
                f"{head} differs from {embed}, but the settings tie them. Set "
                "tie_word_embeddings=false there if they are not tied."
            )
    return weights


def match_names(names: Iterable[str], config: Config) -> dict[str, list[str]]:
    """Map each of our weights to its source tensors; raise if any miss or remain."""
    names = [name for name in names if not name.endswith(IGNORED)]
    if config.layers > len(names):
        raise FileError(f"{config.layers} layers, but only {len(names)} tensors.")
    found: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        place, ours = translate_name(name)
        parts = found.setdefault(ours, [])
        if place in dict(parts):
            raise FileError(f"{name} and {dict(parts)[place]} map to the same weight.")
        parts.append((place, name))
    wanted = dict(config.shapes())
    if missing := [name for name in wanted if name not in found]:
        raise FileError(
            f"{len(missing)} of {len(wanted)} weights are missing, the first is "
            f"{missing[0]} (expected {' or '.join(translate_name_back(missing[0]))})."
        )
    if config.tied:
        wanted["head.weight"] = ()  # optional; compared with the embedding
    if extra := [x for ours in found.keys() - wanted.keys() for x in found[ours]]:
        raise FileError(
            f"{len(extra)} tensors do not belong to this model, such as {extra[0][1]}."
        )
    return {ours: [name for _, name in sorted(x)] for ours, x in found.items()}


def translate_name(name: str) -> tuple[int, str]:
    """Return the position of a source tensor within our weight, and our name."""
    short = PREFIX.sub("", name)
    layer = NUMBER.search(short)
    stem, _, kind = NUMBER.sub("#", short, count=1).rpartition(".")
    if stem not in NAMES:
        return 0, name
    ours = NAMES[stem].replace("#", layer[0] if layer else "#")
    return list(NAMES).index(stem), f"{ours}.{kind}"


def translate_name_back(name: str) -> list[str]:
    """Return the names of the source tensors of one of our weights."""
    layer = NUMBER.search(name)
    stem, _, kind = NUMBER.sub("#", name, count=1).rpartition(".")
    theirs = [x for x, ours in NAMES.items() if ours == stem]
    return [f"{x}.{kind}".replace("#", layer[0] if layer else "#") for x in theirs]


def read_source_tensor(state: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a source tensor as (out, in)."""
    x = state[name]
    if x.dtype not in FLOATS:
        raise FileError(f"{name} is {x.dtype}, expected {', '.join(map(str, FLOATS))}.")
    return x.T if name.endswith(TRANSPOSED) and x.ndim == 2 else x


# --- files ---------------------------------------------------------------------------


class LazyTensors(Mapping[str, Tensor]):
    """Mapping of tensors that are read on access."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Tensor]) -> None:
        self.names, self.read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk: config, tensors under their original names, tokenizer."""

    config: Config
    state: Mapping[str, Tensor]
    make_tokenizer: Callable[[], Tokenizer]


def open_source(path: Path) -> ModelFiles:
    """Open a GGUF file or a folder of safetensors; raise for anything else."""
    if path.is_dir():
        return open_folder(path)
    if path.suffix in PICKLES:
        refuse_pickle(path)
    if not path.is_file():
        raise FileError(
            f"there is no file or folder {path}. load() reads a GGUF file or a folder "
            "of safetensors, and downloads nothing. A model that transformers loads "
            "can be watched: regard.watch(model)."
        )
    if path.suffix == ".safetensors":
        raise FileError(
            f"{path.name} does not describe its model. Give the folder that contains "
            "it, with config.json and tokenizer.json."
        )
    file = open_gguf(path)
    shapes = {name: entry.shape for name, entry in file.entries.items()}
    config = read_gguf_config(file.settings, shapes)
    if FACTORS in shapes:
        config = stretch_by_tensor(config, file.read(FACTORS))
        del shapes[FACTORS]

    def read(name: str) -> Tensor:
        return read_gguf_tensor(file, config, name)

    return ModelFiles(
        config, LazyTensors(shapes, read), lambda: build_gguf_tokenizer(file.settings)
    )


def stretch_by_tensor(config: Config, factors: NDArray[Any]) -> Config:
    """Return a config with the rotary scaling that a tensor holds, as of Llama 3."""
    found = tuple(map(float, factors.reshape(-1)))
    if config.stretch or any(not 0 < x < math.inf for x in found):
        raise FileError(
            f"{FACTORS} holds {found!r:.80}, expected positive numbers, and no "
            "rope.scaling.type beside it."
        )
    try:
        return replace(config, stretch=found)
    except OptionError as error:
        raise FileError(f"{FACTORS} does not fit: {error}") from None


def read_gguf_tensor(file: GgufFile, config: Config, name: str) -> Tensor:
    """Return a tensor of a GGUF file in the layout of transformers."""
    x = torch.from_numpy(file.read(name))
    heads = {"attn_q": config.heads, "attn_k": config.shared}.get(name.split(".")[-2])
    if file.settings["general.architecture"] != "llama" or heads is None:
        return x
    if x.shape[0] != heads * config.head:
        return x  # convert_state raises
    # llama.cpp rotates adjacent pairs, so its files store the two halves interleaved.
    pairs = x.unflatten(0, (heads, config.head // 2, 2))
    return pairs.transpose(1, 2).reshape(x.shape)


def open_folder(folder: Path) -> ModelFiles:
    """Open a folder written by transformers."""
    files = find_files(folder)
    config = read_config(read_json(folder / "config.json"))
    homes: dict[str, Any] = {}
    for file in files:
        try:
            opened: Any = safe_open(file, "pt")
            names = opened.keys()
        except (SafetensorError, OSError) as error:
            raise FileError(
                f"{file.name} is damaged: {describe_error(error)}."
            ) from None
        for name in names:
            if len(name) > LONGEST or not name.isprintable():
                raise FileError(
                    f"{file.name} has a tensor named {name!r:.80}, expected at most "
                    f"{LONGEST} printable characters."
                )
            if name in homes:
                raise FileError(f"{name} is in two files, one of them {file.name}.")
            homes[name] = opened

    def read(name: str) -> Tensor:
        try:
            return homes[name].get_tensor(name)
        except SafetensorError as error:
            raise FileError(
                f"{name} cannot be read: {describe_error(error)}."
            ) from None

    return ModelFiles(
        config, LazyTensors(homes, read), lambda: read_folder_tokenizer(folder)
    )


def find_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder."""
    if (folder / ONE).is_file():
        return [folder / ONE]
    if (folder / INDEX).is_file():
        shards = read_json(folder / INDEX).get("weight_map")
        names = set(map(str, shards.values())) if isinstance(shards, dict) else set()
        there = {path.name for path in folder.iterdir() if path.is_file()}
        if lost := sorted(names - there):  # also rejects paths out of the folder
            raise FileError(f"{INDEX} names {lost[0]!r:.80}, which is not there.")
        if names:
            return [folder / name for name in sorted(names)]
        raise FileError(f"{INDEX} has no weight_map, expected file names.")
    for path in sorted(folder.iterdir()):
        if path.suffix in PICKLES:
            refuse_pickle(path)
    raise FileError(
        f"{folder.name} holds no {ONE} and no {INDEX}. If it holds a GGUF file, give "
        "the path of that file."
    )


def refuse_pickle(path: Path) -> NoReturn:
    """Raise a FileError that explains how to convert the file."""
    raise FileError(
        f"{path.name} is a pickle, which can run arbitrary code when it is opened, so "
        "it is never loaded. If you trust it, convert it with "
        "safetensors.torch.save_file, or use the model's safetensors files."
    )
