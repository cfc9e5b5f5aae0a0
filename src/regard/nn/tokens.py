"""The tokenizer of a model, read from its files.

    text ─▶ split into words ─▶ merge each word into tokens of the vocabulary ─▶ ids
    ids ─▶ the bytes of their tokens ─▶ text

The work is done by the `tokenizers` package. A folder contains the tokenizer as
tokenizer.json. A GGUF file contains only the vocabulary, the merges and the name of the
pre-tokenizer (WAYS), or the scores of a SentencePiece vocabulary; the tokenizer is
rebuilt from these.

Next: sentencepiece.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex
from tokenizers import Tokenizer as Core
from tokenizers.decoders import ByteLevel as Bytes
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as Steps
from tokenizers.processors import TemplateProcessing

from regard.errors import FileError, OptionError, RegardError
from regard.nn.chat_template import HALF, describe_error, render_chat
from regard.nn.sentencepiece import build_sentencepiece

CONTROL, USER = 3, 4  # GGUF token types that are never split
SPECIAL = {  # name of a token in templates -> name in GGUF
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a model, with its chat template.

    >>> from regard.nn.weights import load  # doctest: +SKIP
    >>> model, tokenizer = load("SmolLM2-135M-Instruct.Q4_1.gguf")  # doctest: +SKIP
    >>> tokenizer.decode(tokenizer.encode("Hello"))  # doctest: +SKIP
    'Hello'
    """

    core: Core
    template: str | None = None  # of a chat, in Jinja
    stop: frozenset[int] = frozenset()  # tokens that end an answer
    names: Mapping[str, str] = field(default_factory=dict)  # texts of special tokens

    def encode(self, text: str, *, whole: bool = True) -> list[int]:
        """Return the tokens of a text.

        whole: add the model's begin and end tokens, if any; use False for the text of a
            chat, which already contains them
        """
        return list(self.read(text, whole=whole).ids)

    def offsets(self, text: str, *, whole: bool = True) -> list[tuple[int, int]]:
        """Return the character range (start, stop) of each token of a text."""
        return list(self.read(text, whole=whole).offsets)

    def read(self, text: str, *, whole: bool) -> Any:
        """Return the encoding of a text, as an object of the tokenizers package."""
        wanted = "encode takes a str of whole characters that the vocabulary has, given"
        with wrap_tokenizer_errors(OptionError, f"{wanted} {text!r:.60}"):
            return self.core.encode(text, add_special_tokens=whole)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of some tokens, including control tokens."""
        ids = [int(i) for i in ids]
        if any(not 0 <= i < 2**32 for i in ids):
            raise OptionError(f"tokens are 0 or more, given {min(ids)} … {max(ids)}.")
        with wrap_tokenizer_errors(
            OptionError, f"the tokenizer cannot decode {ids!r:.60}"
        ):
            return str(self.core.decode(ids, skip_special_tokens=False))

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield the text of a stream of tokens, in pieces of complete characters."""
        before: list[int] = []  # last tokens yielded: some decoders trim at the start
        held: list[int] = []
        for i in ids:
            held.append(i)
            text = self.decode(before + held)
            piece = text[len(self.decode(before)) :]
            if piece and not text.endswith(HALF):
                yield piece
                before, held = held, []
        if rest := self.decode(before + held)[len(self.decode(before)) :]:
            yield rest

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return a conversation formatted by the chat template, ready for an answer.

        >>> tokenizer.chat([{"role": "user", "content": "Hi"}])  # doctest: +SKIP
        """
        if self.template is None:
            raise OptionError(
                "this model has no chat template: it continues texts and was not "
                "trained on chats. Use encode(text) instead."
            )
        return render_chat(self.template, self.names, messages)


# --- from a folder -------------------------------------------------------------------


@contextmanager
def wrap_tokenizer_errors(kind: type[RegardError], words: str) -> Iterator[None]:
    """Convert errors and Rust panics of the tokenizers package into a RegardError."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise kind(f"{words}: {describe_error(error)}.") from None
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(
            f"{path.name} cannot be read: {describe_error(error)}."
        ) from None
    if not isinstance(found, dict):
        raise FileError(f"{path.name} holds {found!r:.40}, expected an object {{…}}.")
    return found


def read_folder_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer in a model's folder."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise FileError(
            f"{folder.name} has no tokenizer.json. To load the weights alone: "
            "read_weights(path)."
        )
    with wrap_tokenizer_errors(FileError, f"{path.name} is damaged"):
        core = Core.from_file(str(path))
    core.no_truncation()  # leftovers of its training
    core.no_padding()
    files = ("config.json", "generation_config.json", "tokenizer_config.json")
    model, generation, own = (
        read_json(folder / name) if (folder / name).exists() else {} for name in files
    )
    names = {name: text for name in SPECIAL if (text := find_text(own.get(name)))}
    with wrap_tokenizer_errors(
        FileError, f"{files[-1]} is damaged"
    ):  # by a lone surrogate
        ends = [core.token_to_id(names.get("eos_token", ""))]
    for settings in (model, generation):
        given = settings.get("eos_token_id")
        ends += given if isinstance(given, list) else [given]
    stop = frozenset(i for i in ends if isinstance(i, int))
    return Tokenizer(core, find_template(folder, own), stop, names)


def find_text(token: Any) -> str | None:
    """Return the text of a token, given as a string or an object with content."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def find_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """Return the chat template, the default one if there are several."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = [x for x in found if isinstance(x, dict) and x.get("name") == "default"]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) else None


# --- from a GGUF file ----------------------------------------------------------------


@dataclass(frozen=True)
class PreTokenizerRule:
    """A pre-tokenizer: how text is split into words before the merges."""

    steps: tuple[PreTokenizer, ...]
    nfc: bool = False  # apply Unicode normalization NFC first
    entire: bool = False  # a word that is in the vocabulary skips the merges
    bos: bool = False  # texts start with bos, unless the file says otherwise


def split_by_patterns(*patterns: str) -> tuple[PreTokenizer, ...]:
    """Return steps that split by each pattern in turn, then convert to bytes."""
    splits = (Split(Regex(pattern), "isolated") for pattern in patterns)
    return (*splits, ByteLevel(add_prefix_space=False, use_regex=False))


def match_words(digits: str) -> str:
    """Return the pattern of Llama 3 with the given pattern of digits."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + "|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WAYS = {  # by tokenizer.ggml.pre
    "gpt-2": PreTokenizerRule((ByteLevel(add_prefix_space=False),)),
    # Digits are split first, as in the model's training. transformers 5.22 does not
    # know "smollm" and omits this: its "\n\n1" is \n, \n, 1, not \n\n, 1.
    "smollm": PreTokenizerRule(
        (Digits(individual_digits=True), ByteLevel(add_prefix_space=False))
    ),
    "llama-bpe": PreTokenizerRule(
        split_by_patterns(match_words(r"\p{N}{1,3}")), entire=True, bos=True
    ),
    "qwen2": PreTokenizerRule(split_by_patterns(match_words(r"\p{N}")), nfc=True),
    "default": PreTokenizerRule(
        split_by_patterns(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
    ),
}


def build_gguf_tokenizer(settings: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer described by the settings of a GGUF file."""
    start = "tokenizer.ggml."
    own = {k.removeprefix(start): x for k, x in settings.items() if k.startswith(start)}
    pieces = str(own.get("model")) == "llama"  # SentencePiece
    way = None if pieces else choose_pretokenizer(own)
    tokens = read_vocabulary(own)
    ids = find_ids(own, len(tokens))
    usual = way is None or way.bos
    begin = ["bos_token_id"] if own.get("add_bos_token", usual) is True else []
    end = ["eos_token_id"] if own.get("add_eos_token", False) is True else []
    words = "the tokenizer of the file cannot be built (read_weights(path) loads the"
    with wrap_tokenizer_errors(FileError, f"{words} weights alone)"):
        core = build_core(own, tokens, way) if way else build_sentencepiece(own, tokens)
        core.post_processor = TemplateProcessing(
            single=[tokens[ids[x]] for x in begin]
            + ["$A"]
            + [tokens[ids[x]] for x in end],
            special_tokens=[(tokens[ids[x]], ids[x]) for x in begin + end],
        )
    template = settings.get("tokenizer.chat_template")
    return Tokenizer(
        core,
        template if isinstance(template, str) else None,
        frozenset(ids[x] for x in ENDS if x in ids),
        {name: tokens[ids[x]] for name, x in SPECIAL.items() if x in ids},
    )


def build_core(
    own: Mapping[str, Any], tokens: list[str], way: PreTokenizerRule
) -> Core:
    """Build the tokenizers object from the vocabulary, merges and pre-tokenizer."""
    merges = [tuple(merge.split(" ")) for merge in own["merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    core = Core(BPE(vocabulary, merges, ignore_merges=way.entire))
    if way.nfc:
        core.normalizer = NFC()
    core.pre_tokenizer = Steps(list(way.steps))
    core.decoder = Bytes()
    never_cut = [
        AddedToken(token, special=bool(kind == CONTROL), normalized=False)
        for token, kind in zip(tokens, own["token_type"], strict=True)
        if kind in (CONTROL, USER)
    ]
    core.add_tokens(never_cut)
    return core


def choose_pretokenizer(own: Mapping[str, Any]) -> PreTokenizerRule:
    """Return the pre-tokenizer of the file; raise if it is unknown."""
    model, pre = str(own.get("model")), str(own.get("pre"))
    spaced = own.get("add_space_prefix", False) is not False
    if model != "gpt2" or pre not in WAYS or spaced:
        raise FileError(
            f"tokenizer.ggml.model={model!r:.40} with pre={pre!r:.40}: expected "
            "'llama' (SentencePiece), or 'gpt2' (byte-level) with one of "
            f"{', '.join(map(repr, WAYS))}, no space prefix. "
            "To load the weights alone: read_weights(path)."
        )
    return WAYS[pre]


def read_vocabulary(own: Mapping[str, Any]) -> list[str]:
    """Return the vocabulary; raise if it is missing or has duplicates."""
    tokens = own.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise FileError("tokenizer.ggml.tokens is missing, expected a list of strings.")
    if len(set(tokens)) != len(tokens):
        raise FileError(
            f"tokenizer.ggml.tokens has {len(tokens)} tokens, but only "
            f"{len(set(tokens))} different ones."
        )
    return tokens


def find_ids(own: Mapping[str, Any], n: int) -> dict[str, int]:
    """Return the ids of the special tokens that a file defines."""
    ids = {x: own[x] for x in (*SPECIAL.values(), *ENDS) if x in own}
    for x, i in ids.items():
        if not isinstance(i, int) or not 0 <= i < n:
            raise FileError(f"tokenizer.ggml.{x} is {i!r:.40}, expected 0 … {n - 1}.")
    return ids
