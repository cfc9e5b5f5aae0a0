"""The settings of an atlas: a small TOML file, or command-line options.

    model = "SmolLM2-135M-Instruct.Q4_1.gguf"
    corpus = ["documentation", "licences.jsonl"]
    statistics = ["entropy", "sink", "previous", "induction"]
    length = 512                  longer documents are cut
    until_interval = 0.01         stop when half of every interval is this narrow

Every setting that changes a number identifies the plan: a folder holds the results of
one plan, and another one is refused. The stopping rule may change, but a folder that
was ever run with until_interval reports confidence sequences from then on.

Next: worker.py
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from dataclasses import asdict, dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

from regard.errors import FileError, OptionError
from regard.find_model import find_model
from regard.stats.registry import (
    STATISTICS,
    Statistic,
    find_statistic,
    list_added,
    list_statistics,
)

PRECISIONS = ("float32", "bfloat16", "float16", "float64")
STOPS = ("tokens", "until_interval")  # they change when a run stops, but no number
WHOLE = 1 << 28  # bytes up to which a weight file is read completely
BLOCK, BLOCKS = 1 << 16, 1024  # of a larger one: blocks at equal distances
LISTS = ("corpus", "statistics")
STUDENT, SEQUENCE = "student", "sequence"  # kinds of confidence intervals


def list_measured() -> tuple[str, ...]:
    """Return the default statistics of an atlas."""
    return tuple(x.name for x in list_statistics() if x.in_atlas)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of an atlas (its plan)."""

    worker: ClassVar[str] = "regard.atlas.worker:Worker"
    item: ClassVar[str] = "document"
    model: str  # a GGUF file, a folder, a name in the cache, or module:function
    corpus: tuple[str, ...]  # files and folders
    field: str = "text"  # of JSONL and Parquet
    statistics: tuple[str, ...] = dataclasses.field(default_factory=list_measured)
    length: int = 512  # maximum tokens per chunk
    pieces: int = 1  # maximum chunks per document
    packed: bool = False  # concatenate documents instead of running each alone
    batch: int = 1  # chunks of equal length per forward pass
    precision: str = "float32"
    device: str = "cpu"
    shard: int = 8  # documents per shard; a batch never spans shards
    examples: int = 4  # examples kept per head and statistic
    documents: int | None = None  # size of a random sample; None: all
    tokens: int | None = None  # stop after this many
    until_interval: float | None = None  # stop at this half-width

    def __post_init__(self) -> None:
        check_plan(self)

    def identify(self) -> dict[str, Any]:
        """Return the settings that results must share to be merged."""
        return {k: v for k, v in asdict(self).items() if k not in STOPS}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle registered statistics too, for the worker processes."""
        return unpack_plan, (list_added(self.statistics), asdict(self))


def unpack_plan(added: list[Statistic], options: dict[str, Any]) -> Settings:
    """Return a plan from another process, and register its statistics in this one."""
    STATISTICS.update((entry.name, entry) for entry in added)
    return Settings(**options)


def check_plan(plan: Settings) -> None:
    """Raise OptionError for settings that cannot be run."""
    for name in ("length", "pieces", "batch", "shard", "examples"):
        check_count(name, getattr(plan, name))
    for name in ("documents", "tokens"):
        if getattr(plan, name) is not None:
            check_count(name, getattr(plan, name))
    if plan.length < 2:
        raise OptionError("length=1, expected 2 or more: one token sees only itself.")
    width = plan.until_interval
    if width is not None and not (isinstance(width, float) and 0 < width < 1):
        raise OptionError(
            f"until_interval={width!r:.40}, expected between 0 and 1: 0.01."
        )
    if plan.precision not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise OptionError(f"precision={plan.precision!r:.40}, expected one of {known}.")
    check_statistics(plan.statistics, width)
    if width is not None and plan.packed:
        raise OptionError(
            f"until_interval={width!r:.40} with packed=True: packed sequences share "
            "documents, so they are not independent draws and no valid stopping rule "
            "is known. Use packed=False, or stop with tokens or documents."
        )
    if not plan.corpus or not all(isinstance(x, str) for x in plan.corpus):
        raise OptionError("a plan needs a corpus: files or folders of text.")
    if not isinstance(plan.packed, bool) or not isinstance(plan.model, str):
        raise OptionError("packed is true or false, and model the path of a model.")


def check_statistics(names: tuple[str, ...], width: float | None) -> None:
    """Raise OptionError for unknown statistics, or until_interval without a weight."""
    known = list_statistics()
    if not names or {*names} - {x.name for x in known} or len({*names}) < len(names):
        given = ", ".join(map(repr, names)) or "(none)"
        raise OptionError(
            f"statistics {given:.100}, expected each once of "
            f"{', '.join(x.name for x in known)}. If one is yours, import the module "
            "that registers it."
        )
    if width is not None and not any(find_statistic(x).is_weight for x in names):
        raise OptionError(
            f"until_interval={width!r:.40} is for mean weights, expected one of "
            f"{', '.join(x.name for x in known if x.is_weight)} among the statistics."
        )


def check_count(name: str, value: Any) -> None:
    """Raise OptionError unless value is an integer of 1 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(f"{name}={value!r:.40}, expected a whole number, 1 or more.")


def read_plan(path: str | Path) -> Settings:
    """Return the plan in a TOML file; its paths may be relative to its folder."""
    path = Path(path)
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{path.name} is no plan: {str(error)!a:.200}") from error
    plan = make_settings(found)
    here = path.parent

    def place(x: str) -> str:
        try:
            return str(here / x) if (here / x).exists() else x
        except (OSError, ValueError):  # not a valid file name
            return x

    return replace(plan, model=place(plan.model), corpus=tuple(map(place, plan.corpus)))


def make_settings(found: dict[str, Any]) -> Settings:
    """Return the settings in a dict of names and values."""
    names = [x.name for x in fields(Settings)]
    if unknown := sorted(set(found) - set(names)):
        raise OptionError(f"no option {unknown[0]!r:.40}, expected {', '.join(names)}.")
    if missing := sorted({"model", "corpus"} - set(found)):
        raise OptionError(f"a plan needs {' and '.join(missing)}.")
    for name in LISTS:
        value = found.get(name, [])
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list | tuple):
            raise OptionError(f"{name}={value!r:.40}, expected a list.")
        if name in found:
            found = found | {name: tuple(value)}
    return Settings(**found)


def fingerprint(model: str) -> str:
    """Return a fingerprint of a model's weights, without reading all of a large one.

    It covers the name and size of every file; all of its bytes up to 256 MB, and
    1,024 blocks of 64 KiB of a larger one, with both ends. So a change of less than
    size / 1,024 in a row may be missed in a large file. For a function: its name.
    """
    try:
        path = find_model(model)
    except (FileError, OSError, ValueError):  # a function, or no longer there
        return model
    digest = blake2b(digest_size=16)
    files = (
        [path] if path.is_file() else sorted(x for x in path.iterdir() if x.is_file())
    )
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        count = BLOCKS if size > WHOLE else -(-size // BLOCK)
        with file.open("rb") as data:
            for i in range(count):
                if size > WHOLE:
                    data.seek((size - BLOCK) * i // (BLOCKS - 1))
                digest.update(data.read(BLOCK))
    return digest.hexdigest()


def explain_other_model(model: str, folder: Path) -> str:
    """Return what to do if a folder holds another fingerprint."""
    return (
        f"{model} is another model than {folder} began with, or an earlier version of "
        "regard began it. Give the same files, or choose another folder."
    )


def write_about(plan: Settings, corpus: str, interval: str = STUDENT) -> str:
    """Return the contents of about.json.

    interval: the kind that the folder reported before; SEQUENCE is never reverted
    """
    about = {"version": 1, "plan": asdict(plan)}
    about |= {"model": fingerprint(plan.model), "corpus": corpus}
    stops = plan.until_interval is not None
    about["interval"] = SEQUENCE if stops else interval
    return json.dumps(about, indent=1)


def read_interval(folder: Path) -> str:
    """Return the kind of interval that a folder reports, STUDENT or SEQUENCE.

    Folders of earlier versions do not store it: until_interval in their plan decides.
    """
    try:
        about = json.loads((folder / "about.json").read_text("utf-8"))
        stops = about["plan"].get("until_interval") is not None
        return SEQUENCE if stops or about.get("interval") == SEQUENCE else STUDENT
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(
            f"{folder / 'about.json'} cannot be read, so it is not known whether the "
            f"run had a stopping rule: {str(error)!a:.200}"
        ) from error


def read_about(path: Path) -> tuple[Settings, dict[str, Any]]:
    """Return the plan in an about.json, and all of its contents."""
    try:
        about = json.loads(path.read_text("utf-8"))
        return make_settings(about["plan"]), about
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = ascii(str(error))
        raise FileError(f"{path.parent} holds no atlas: {why:.200}") from error
