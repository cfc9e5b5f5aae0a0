"""The file or folder that the name of a model stands for.

    model.gguf, folder     a path
    owner/name             a model in the local Hugging Face cache
    owner/name@revision    another branch, tag or commit than main
    owner/name/x.gguf      one GGUF file of a repository that holds several

The cache is a folder for each repository, written by huggingface_hub:

    models--owner--name/refs/main            the commit that main is
                        snapshots/COMMIT/    the files of a commit, links to blobs/

Nothing is requested from the network unless download=True, and then only if the cache
does not hold the model. Only weights, settings and vocabularies are downloaded: never
pickles, and never code.

Next: nn/weights.py
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from regard.errors import FileError

HUB = "https://huggingface.co"
PART = r"[A-Za-z0-9_][\w.-]*"
NAME = re.compile(
    rf"(?P<repo>{PART}(?:/{PART})?)(?:/(?:blob|resolve|tree)/(?P<branch>[^/@]+))?"
    r"(?:/(?P<file>[^@]+\.gguf))?(?:@(?P<revision>[^@]+))?"
)
PATHS = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".json", ".onnx")
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
SETTINGS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
ADD = "add --download (in Python: download=True)"
SHOWN = 8  # file names in a message


@dataclass(frozen=True)
class HubName:
    """A repository of the Hugging Face hub, a revision, and perhaps one file."""

    repo: str
    revision: str = "main"
    file: str | None = None


def find_model(name: str | Path, *, download: bool = False) -> Path:
    """Return the GGUF file or the folder of a model.

    download: ask the Hugging Face hub for a model that is not in the cache
    """
    path = Path(os.path.expanduser(name))  # noqa: PTH111 (Path raises on ~nobody)
    if os.path.lexists(path):
        return enter_folder(path)
    hub = read_hub_name(str(name))
    if hub is None:
        raise FileError(f"there is no file or folder {name}.")
    reason = find_cached(hub)
    if isinstance(reason, Path):
        return reason
    if not download:
        raise FileError(
            f"there is no file or folder {name}, and {reason}{suggest_cached(hub)} "
            f"To download {hub.repo} from {HUB}: {ADD}."
        )
    return download_model(hub)


def read_hub_name(name: str) -> HubName | None:
    """Return the repository that a name or an address stands for; None for a path."""
    found = NAME.fullmatch(name.removeprefix(f"{HUB}/").rstrip("/"))
    if found is None or found["repo"].lower().endswith(PATHS):
        return None
    revision = found["revision"] or found["branch"] or "main"
    return HubName(found["repo"], revision, found["file"])


def enter_folder(path: Path) -> Path:
    """Return a path, or what is meant by it: the model in a folder of the cache."""
    if path.is_dir() and path.name.startswith("models--"):  # of the cache
        hub = HubName("/".join(path.name.split("--")[1:]))
        reason = find_snapshot(path, hub)
        if isinstance(reason, Path):
            return reason
        raise FileError(f"{path}: {reason} To download it: {ADD} and {hub.repo}.")
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(x for x in path.glob("*.gguf") if x.is_file())
        if len(files) == 1:
            return files[0]
        if files:
            raise FileError(
                f"{path} holds {len(files)} GGUF files. Give one of them: "
                f"{list_names(x.name for x in files)}."
            )
    return path


# --- the cache -----------------------------------------------------------------------


def find_cache() -> Path:
    """Return the folder of the Hugging Face cache, as HF_HOME and others set it."""
    try:
        from huggingface_hub import constants  # noqa: PLC0415 (optional)
    except ImportError:
        raise FileError(
            "names of the Hugging Face hub need huggingface_hub: "
            'pip install "regard[hf]"'
        ) from None
    return Path(constants.HF_HUB_CACHE)


def find_cached(hub: HubName) -> Path | str:
    """Return the file or folder of a model in the cache, or why there is none."""
    cache = find_cache()
    folder = cache / f"models--{hub.repo.replace('/', '--')}"
    if not folder.is_dir():
        return f"no model {hub.repo} in the Hugging Face cache, {cache}."
    return find_snapshot(folder, hub)


def find_snapshot(folder: Path, hub: HubName) -> Path | str:
    """Return the model in a folder of the cache at a revision, or why there is none."""
    snapshots, commit = folder / "snapshots", hub.revision
    if (ref := folder / "refs" / hub.revision).is_file():
        commit = ref.read_text(encoding="utf-8").strip()
    if not commit or not (snapshots / commit).is_dir():
        known = sorted(x.name for x in (folder / "refs").glob("*") if x.is_file())
        known += sorted(x.name for x in snapshots.glob("*"))
        return (
            f"the cache has no revision {hub.revision} of {hub.repo}, only "
            f"{list_names(known)}. To use one of these: {hub.repo}@REVISION."
        )
    there = {
        x.relative_to(snapshots / commit).as_posix()
        for x in (snapshots / commit).rglob("*")
        if x.is_file()  # False for a link to a blob that is gone
    }
    return choose_cached(snapshots / commit, there, hub)


def choose_cached(snapshot: Path, there: set[str], hub: HubName) -> Path | str:
    """Return the model among the files of a snapshot, or why there is none."""
    if hub.file is not None or "config.json" not in there:
        ggufs = sorted(x for x in there if x.endswith(".gguf"))
        wanted = [hub.file] if hub.file else ggufs
        if len(wanted) == 1 and wanted[0] in there:
            return snapshot / wanted[0]
        if hub.file is None and ggufs:
            raise FileError(
                f"{hub.repo} holds {len(ggufs)} GGUF files. Give one of them: "
                f"{list_names(f'{hub.repo}/{x}' for x in ggufs)}."
            )
        lost: str | None = hub.file or "config.json"
    else:
        lost = find_missing_weights(snapshot, there)
    if lost is None:
        return snapshot
    return (
        f"the cache holds {hub.repo} without {lost}, only {list_names(sorted(there))}."
    )


def find_missing_weights(snapshot: Path, there: set[str]) -> str | None:
    """Return the first file of weights that a snapshot lacks, None if it has all."""
    one, index = "model.safetensors", "model.safetensors.index.json"
    if one in there:
        return None
    if index not in there:
        # Other weights, such as pickles, are there: the loader says what is wrong.
        others = any(x.endswith((*PICKLES, ".safetensors")) for x in there)
        return None if others else one
    try:
        shards = json.loads((snapshot / index).read_text("utf-8"))["weight_map"]
        lost = sorted({str(x) for x in shards.values()} - there)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # damaged: the loader says so
    return lost[0] if lost else None


def suggest_cached(hub: HubName) -> str:
    """Return a sentence with cached models of a similar name, or an empty string."""
    cached = {
        "/".join(x.name.split("--")[1:]) for x in find_cache().glob("models--*")
    } - {hub.repo}
    short = hub.repo.rpartition("/")[2].lower()
    near = [x for x in sorted(cached) if x.rpartition("/")[2].lower() == short]
    near = near or get_close_matches(hub.repo, sorted(cached), n=3)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def list_names(names: Iterable[str]) -> str:
    """Return names with commas, a few of them if they are many."""
    names = [x if x.isprintable() else ascii(x) for x in names]  # of strangers
    more = len(names) - SHOWN
    rest = f" and {more} more" if more > 0 else ""
    return ", ".join(names[:SHOWN]) + rest if names else "nothing"


# --- the hub -------------------------------------------------------------------------


def download_model(hub: HubName) -> Path:
    """Download a model into the cache, and return its file or folder there."""
    from huggingface_hub import HfApi, constants, snapshot_download  # noqa: PLC0415

    if constants.HF_HUB_OFFLINE:
        raise FileError(
            f"{hub.repo} is not in the cache, and HF_HUB_OFFLINE=1 forbids downloads. "
            "Unset HF_HUB_OFFLINE, or give the path of a model."
        )
    try:
        told = HfApi().model_info(hub.repo, revision=hub.revision)
        files = choose_files([x.rfilename for x in told.siblings or []], hub)
        snapshot_download(hub.repo, revision=hub.revision, allow_patterns=files)
    except FileError:
        raise
    except Exception as error:  # a server and a network may fail in any way
        raise FileError(explain_failure(error, hub)) from error
    found = find_cached(hub)
    if isinstance(found, str):
        raise FileError(f"the download of {hub.repo} is incomplete: {found}")
    return found


def choose_files(files: list[str], hub: HubName) -> list[str]:
    """Return the files of a repository to download; raise if there is no model."""
    top = [x for x in files if "/" not in x]
    weights = [x for x in top if WEIGHTS.fullmatch(x)]
    ggufs = [x for x in files if x.endswith(".gguf")]
    if hub.file is not None:
        if hub.file in files:
            return [hub.file]
        has = f"It has {list_names(ggufs)}."
        raise FileError(f"{hub.repo} has no file {hub.file}. {has}")
    if weights and "config.json" in top:
        others = [x for x in top if x.endswith(SETTINGS) and x not in weights]
        return weights + others
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise FileError(
            f"{hub.repo} holds {len(ggufs)} GGUF files. Give one of them: "
            f"{list_names(f'{hub.repo}/{x}' for x in ggufs)}."
        )
    if "adapter_config.json" in top:
        raise FileError(
            f"{hub.repo} is an adapter of another model. Merge it into that model with "
            "peft, save it, and give the folder."
        )
    why = "only pickles" if any(x.endswith(PICKLES) for x in top) else "no weights"
    raise FileError(
        f"{hub.repo} holds {why}, expected config.json with model.safetensors, or a "
        f"GGUF file. It has {list_names(top)}."
    )


def explain_failure(error: Exception, hub: HubName) -> str:
    """Return a sentence on why a model could not be downloaded."""
    from huggingface_hub import constants, errors  # noqa: PLC0415

    page = f"{constants.ENDPOINT}/{hub.repo}"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{hub.repo} asks you to accept its terms. Accept them at {page}, then log "
            "in: hf auth login"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{hub.repo} has no revision {hub.revision}. See {page}."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no model {hub.repo} at {constants.ENDPOINT}, or it is private. "
            "Check the name; for a private model, log in: hf auth login"
        )
    said = "".join(c for c in " ".join(str(error).split())[:200] if c.isprintable())
    return (
        f"{hub.repo} could not be downloaded from {constants.ENDPOINT}: "
        f"{type(error).__name__}: {said}"
    )
