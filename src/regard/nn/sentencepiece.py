"""SentencePiece vocabularies of GGUF files, as Llama 2, Mistral and Gemma have them.

    "a cat" ─▶ "▁a▁cat" ─▶ characters ─▶ merged, the pair with the highest score first
    a character that the vocabulary lacks ─▶ its bytes, as <0xE2> <0x82> <0xAC>

A file holds a score for every token, but no merges. Two neighbours are merged if their
text is a token, so a token of n characters is n - 1 possible merges, with its score.

Next: chat_template.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Core
from tokenizers.decoders import ByteFallback, Fuse, Replace, Strip
from tokenizers.decoders import Sequence as Decoders
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend
from tokenizers.normalizers import Replace as Substitute
from tokenizers.normalizers import Sequence as Normalizers

from regard.errors import FileError

UNKNOWN, CONTROL, USER, BYTE = 2, 3, 4, 6  # GGUF token types
SPACE = "▁"
ONLY = {  # the only supported values of these settings
    "remove_extra_whitespaces": False,
    "precompiled_charsmap": None,
}


def build_sentencepiece(own: Mapping[str, Any], tokens: Sequence[str]) -> Core:
    """Build the tokenizers object from a vocabulary and its scores.

    own: the settings of the file that start with tokenizer.ggml
    """
    for key, only in ONLY.items():
        if own.get(key, only) is not only:
            raise FileError(
                f"tokenizer.ggml.{key}={own[key]!r:.40}, but only {only} is supported."
            )
    scores, kinds = (
        read_vocabulary_list(own, x, len(tokens)) for x in ("scores", "token_type")
    )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = [
        token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN
    ]
    if not unknown and sum(kind == BYTE for kind in kinds) < 256:
        raise FileError(
            "the vocabulary has neither 256 byte tokens nor an unknown token: "
            "characters that it lacks would be dropped."
        )
    normal = {
        token: score
        for token, score, kind in zip(tokens, scores, kinds, strict=True)
        if kind not in (UNKNOWN, CONTROL, USER, BYTE)
    }
    core = Core(
        BPE(
            vocabulary,
            list(list_merges(normal)),
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaced = own.get("add_space_prefix", True) is not False
    prefix = [Prepend(SPACE)] if spaced else []  # before each text between two specials
    core.normalizer = Normalizers([*prefix, Substitute(" ", SPACE)])
    trimmed = [Strip(" ", 1, 0)] if spaced else []
    steps = [Replace(SPACE, " "), ByteFallback(), Fuse(), *trimmed]
    core.decoder = Decoders(steps)
    core.add_tokens(
        [
            AddedToken(token, special=bool(kind == CONTROL), normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (CONTROL, USER)
        ]
    )
    return core


def read_vocabulary_list(own: Mapping[str, Any], name: str, n: int) -> list[float]:
    """Return a number for every token; raise if there are more, fewer or none."""
    found = own.get(name)
    numbers = [] if found is None or isinstance(found, str) else list(found)
    if len(numbers) != n or not all(math.isfinite(float(x)) for x in numbers):
        raise FileError(
            f"tokenizer.ggml.{name} has {len(numbers)} numbers, expected a finite one "
            f"for each of the {n} tokens."
        )
    return [float(x) for x in numbers]


def list_merges(normal: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of tokens whose text is a token, the highest score first."""
    pairs = [
        (score, token[:cut], token[cut:])
        for token, score in normal.items()
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    pairs.sort(key=lambda x: -x[0])
    for _, left, right in pairs:
        yield left, right
