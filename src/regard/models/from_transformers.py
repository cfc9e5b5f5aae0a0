"""Load a folder with transformers: its own class, tokenizer and processor.

    config.json: architectures = ["ViTModel"] ─▶ transformers.ViTModel
                 none, or unknown             ─▶ transformers.AutoModel

Three things are never done: code of a repository is not run, pickles are not read, and
nothing is downloaded. Weights that are missing from the files would be random numbers,
so they raise an error.

Next: inputs.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from regard.errors import FileError

OPTIONS: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
FAILURES = (OSError, ValueError, KeyError, ImportError, RuntimeError, AttributeError)
PROCESSORS = (  # the first that is complete; a whole processor may lack its tokenizer
    "AutoProcessor",
    "AutoTokenizer",
    "AutoFeatureExtractor",
    "AutoImageProcessor",
)
HARMLESS = "pooler"  # a layer after all attention, which some files omit


def load_their_network(
    path: Path,
    reason: FileError,
    *,
    dtype: torch.dtype = torch.float32,
    bare: bool = False,
) -> Any:
    """Return the network of a folder, in eval mode.

    reason: why regard.nn does not load it, for the message if transformers does not
    bare: without its head, which is enough to see attention
    """
    with_transformers = import_transformers(reason)
    config = load_their_config(path, reason)
    try:
        kind = choose_class(with_transformers, config, bare=bare)
        more = {"dtype": dtype, "use_safetensors": True, "output_loading_info": True}
        with hide_progress(with_transformers):
            network, told = kind.from_pretrained(path, **more, **OPTIONS)
    except FAILURES as error:
        raise explain_failed(path, reason, error) from error
    missing = [x for x in sorted(told["missing_keys"]) if HARMLESS not in x]
    missing += [str(x) for x in told.get("mismatched_keys", ())]
    if missing:
        raise FileError(
            f"{path} lacks {len(missing)} weights of {type(network).__name__}, such as "
            f"{missing[0]}: they would be random numbers. Give the whole model."
        )
    return network.eval()


def load_their_config(path: Path, reason: FileError) -> Any:
    """Return the settings of a folder."""
    with_transformers = import_transformers(reason)
    try:
        return with_transformers.AutoConfig.from_pretrained(path, **OPTIONS)
    except FAILURES as error:
        raise explain_failed(path, reason, error) from error


@contextmanager
def hide_progress(with_transformers: Any) -> Iterator[None]:
    """Hide the progress bar of loading, which is long only if downloading is."""
    logging = with_transformers.utils.logging
    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()


def choose_class(with_transformers: Any, config: Any, *, bare: bool) -> Any:
    """Return the class that a model was saved from, or AutoModel."""
    if bare:
        return with_transformers.AutoModel
    for name in getattr(config, "architectures", None) or ():
        kind = getattr(with_transformers, str(name), None)
        base = with_transformers.PreTrainedModel
        if isinstance(kind, type) and issubclass(kind, base):
            return kind
    return with_transformers.AutoModel


def load_processor(path: Path, reason: FileError) -> Any:
    """Return the processor or tokenizer of a folder, None if it holds none."""
    with_transformers = import_transformers(reason)
    first: Exception | None = None
    for kind in PROCESSORS:
        try:
            found = getattr(with_transformers, kind).from_pretrained(path, **OPTIONS)
        except (*FAILURES, TypeError) as error:
            first = first or error
        else:
            return found
    names = {x.name for x in path.iterdir()}
    if names & {"tokenizer.json", "preprocessor_config.json", "processor_config.json"}:
        raise FileError(
            f"the tokenizer or processor of {path} cannot be loaded: "
            f"{shorten_error(first)}"
        ) from first
    return None


def import_transformers(reason: FileError) -> Any:
    """Return the transformers package; if it is missing, say what to install."""
    try:
        import transformers  # noqa: PLC0415 (optional)
    except ImportError:
        raise FileError(f'{reason} For others: pip install "regard[hf]"') from reason
    return transformers


def explain_failed(path: Path, reason: FileError, error: Exception) -> FileError:
    """Return an error that says why neither regard nor transformers loads a folder."""
    return FileError(f"{path} cannot be loaded: {reason} {shorten_error(error)}")


def shorten_error(error: BaseException | None) -> str:
    """Return the start of an error message, on one line, of printable characters."""
    return "".join(c for c in " ".join(str(error).split())[:300] if c.isprintable())
