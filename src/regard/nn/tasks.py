"""Training tasks that a small model learns in minutes: copy, reverse, sort, add, text.

    3 1 4 1 5 = 5 1 4 1 3          question, separator, answer

A batch is a pure function of (size, seed, step), so a resumed run needs no state of the
data. The loss covers the answer only. The answer starts after the whole question, so
"copy" is not trivial: a causal model has to attend to each token of the question.

One question in ten is held out. A hash of the question decides, so a held-out question
is never trained on, whatever the seed and the length of the run.

Next: train.py
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.errors import FileError, OptionError
from regard.nn.decoder import CausalTransformer
from regard.nn.generation import generate

Ints = NDArray[np.int64]

SIGNS = "0123456789abcdefghijklmnopqrstuvwxyz"
SHARE = 10  # one question, or token of a text, in ten is held out
TRIES = 100  # attempts before a task is rejected for having too few questions


class Task(Protocol):
    """A source of token sequences, and of which tokens are to be predicted."""

    @property
    def vocabulary(self) -> int:
        """Number of different tokens."""

    @property
    def length(self) -> int:
        """Number of tokens of a sequence, the minimum context of a model."""

    def batch(
        self, size: int, seed: int, step: int, *, held_out: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return tokens (size, length), and which of them (bool) are the answer."""

    def show(self, tokens: Sequence[int] | Tensor) -> str:
        """Return a sequence as text."""

    def describe(self) -> dict[str, Any]:
        """Return what identifies this task, as JSON values."""


class Puzzle(ABC):
    """A task whose sequences are a question, a separator and the unique answer."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def length(self) -> int:
        """Number of tokens of the question, the separator and the answer."""

    @property
    @abstractmethod
    def prompt(self) -> int:
        """Number of tokens before the answer: the question and the separator."""

    @abstractmethod
    def ask(self, size: int, rng: np.random.Generator) -> Ints:
        """Draw random questions (size, prompt - 1)."""

    @abstractmethod
    def answer(self, questions: Ints) -> Ints:
        """Return the answers (size, length - prompt)."""

    @property
    @abstractmethod
    def signs(self) -> str:
        """The character of each token; the separator is '='."""

    @property
    def vocabulary(self) -> int:
        return len(self.signs)

    def identify(self, questions: Ints) -> Ints:
        """Return the keys (size, n) that are hashed to decide what is held out."""
        return questions

    def batch(
        self, size: int, seed: int, step: int, *, held_out: bool = False
    ) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng([seed, step, held_out])
        questions = self.draw_questions(size, rng, held_out=held_out)
        middle = np.full((size, 1), self.signs.index("="))
        tokens = np.concatenate([questions, middle, self.answer(questions)], 1)
        answers = np.zeros(tokens.shape, dtype=bool)
        answers[:, self.prompt :] = True
        return torch.from_numpy(tokens), torch.from_numpy(answers)

    def draw_questions(
        self, size: int, rng: np.random.Generator, *, held_out: bool
    ) -> Ints:
        """Draw questions until enough are on the requested side of the split."""
        found: list[Ints] = []
        for _ in range(TRIES):
            asked = self.ask(2 * size + SHARE, rng)
            found.append(asked[is_held_out(self.identify(asked)) == held_out])
            if sum(map(len, found)) >= size:
                return np.concatenate(found)[:size]
        raise OptionError(
            f"{self} has too few different questions to hold some out. Make it larger."
        )

    def show(self, tokens: Sequence[int] | Tensor) -> str:
        return "".join(self.signs[int(token)] for token in tokens)

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}  # type: ignore[call-overload]


def is_held_out(keys: Ints) -> NDArray[np.bool_]:
    """Return, for each row of keys, whether its question is held out (one in ten)."""
    h = np.zeros(len(keys), np.uint64)
    for column in keys.T:  # splitmix64, applied column by column
        h = h + column.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        h = h ^ (h >> np.uint64(31))
    return np.asarray(h % np.uint64(SHARE) == 0)


@dataclass(frozen=True)
class Rearrangement(Puzzle):
    """Write a row of items in another order; each item is one of some symbols."""

    items: int = 10
    symbols: int = 10

    def __post_init__(self) -> None:
        if self.items < 1:
            raise OptionError(f"items={self.items}, expected at least 1.")
        if not 2 <= self.symbols <= len(SIGNS):
            raise OptionError(
                f"symbols={self.symbols}, expected 2 to {len(SIGNS)}: 0-9 and a-z."
            )

    @property
    def signs(self) -> str:
        return SIGNS[: self.symbols] + "="

    @property
    def prompt(self) -> int:
        return self.items + 1

    @property
    def length(self) -> int:
        return 2 * self.items + 1

    def ask(self, size: int, rng: np.random.Generator) -> Ints:
        return rng.integers(self.symbols, size=(size, self.items))


@dataclass(frozen=True)
class Copy(Rearrangement):
    """Repeat the question.

    >>> task = Copy(5)
    >>> tokens, answers = task.batch(2, seed=0, step=0)
    >>> [task.show(row) for row in tokens]
    ['86523=86523', '00018=00018']
    """

    name: ClassVar[str] = "copy"

    def answer(self, questions: Ints) -> Ints:
        return questions


@dataclass(frozen=True)
class Reverse(Rearrangement):
    """Write the question backwards."""

    name: ClassVar[str] = "reverse"

    def answer(self, questions: Ints) -> Ints:
        return questions[:, ::-1]


@dataclass(frozen=True)
class Sort(Rearrangement):
    """Write the items of the question in ascending order.

    The split ignores the order, so no held-out answer occurs in training.
    """

    name: ClassVar[str] = "sort"

    def answer(self, questions: Ints) -> Ints:
        return np.sort(questions, 1)

    def identify(self, questions: Ints) -> Ints:
        return np.sort(questions, 1)


@dataclass(frozen=True)
class Addition(Puzzle):
    """Add two numbers: 123+989=2111 means that the sum is 1112.

    The sum is written LAST DIGIT FIRST, so each digit depends only on digits before it
    and the carry. Written first digit first, the first digit would depend on all
    carries. Numbers keep their leading zeros. The split ignores the order of the two
    numbers: a + b is held out if b + a is.
    """

    digits: int = 3

    name: ClassVar[str] = "addition"

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= 17:
            raise OptionError(f"digits={self.digits}, expected 1 to 17.")

    @property
    def signs(self) -> str:
        return "0123456789=+"

    @property
    def prompt(self) -> int:
        return 2 * self.digits + 2

    @property
    def length(self) -> int:
        return 3 * self.digits + 3

    def ask(self, size: int, rng: np.random.Generator) -> Ints:
        questions = rng.integers(10, size=(size, 2 * self.digits + 1))
        questions[:, self.digits] = self.signs.index("+")
        return questions

    def read(self, questions: Ints) -> Ints:
        """Return the two numbers of each question, (size, 2)."""
        tens = 10 ** np.arange(self.digits)[::-1]
        first, second = questions[:, : self.digits], questions[:, self.digits + 1 :]
        return np.stack([first @ tens, second @ tens], 1)

    def answer(self, questions: Ints) -> Ints:
        sums = self.read(questions).sum(1)
        return np.asarray(sums[:, None] // 10 ** np.arange(self.digits + 1) % 10)

    def identify(self, questions: Ints) -> Ints:
        return np.sort(self.read(questions), 1)


PUZZLES: dict[str, type[Puzzle]] = {
    task.name: task for task in (Copy, Reverse, Sort, Addition)
}


class Codec(Protocol):
    """The part of a tokenizer that a text task uses."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""


@dataclass(frozen=True)
class Bytes:
    """Codec with one token per UTF-8 byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


@dataclass(frozen=True)
class Characters:
    """Codec with one token per character of an alphabet."""

    alphabet: str

    def encode(self, text: str) -> list[int]:
        index = {sign: i for i, sign in enumerate(self.alphabet)}
        unknown = sorted(set(text) - index.keys())
        if unknown:
            raise OptionError(
                f"the character {unknown[0]!r} is not in this alphabet of {len(index)} "
                "characters. Remove it from the text, or use Bytes()."
            )
        return [index[sign] for sign in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.alphabet[i] for i in ids)


@dataclass(frozen=True, eq=False)
class Text:
    """Random windows of a text whose last tenth is held out. Made by `read_text`."""

    tokens: NDArray[np.integer[Any]] = field(repr=False)  # of the whole text
    codec: Codec
    vocabulary: int
    length: int  # of a window

    def batch(
        self, size: int, seed: int, step: int, *, held_out: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return windows (size, length); all tokens but the first are answers."""
        rng = np.random.default_rng([seed, step, held_out])
        cut = len(self.tokens) - len(self.tokens) // SHARE
        low, high = (cut, len(self.tokens)) if held_out else (0, cut)
        starts = rng.integers(low, high - self.length + 1, size=(size, 1))
        tokens = self.tokens[starts + np.arange(self.length)].astype(np.int64)
        answers = np.ones(tokens.shape, dtype=bool)
        answers[:, 0] = False  # the first token cannot be predicted
        return torch.from_numpy(tokens), torch.from_numpy(answers)

    def show(self, tokens: Sequence[int] | Tensor) -> str:
        """Return a sequence as text."""
        return self.codec.decode([int(token) for token in tokens])

    def describe(self) -> dict[str, Any]:
        """Return the sizes, the codec, and a digest of the text."""
        about = {"name": "text", "length": self.length, "vocabulary": self.vocabulary}
        codec = {"codec": type(self.codec).__name__}
        if isinstance(self.codec, Characters):
            codec["alphabet"] = self.codec.alphabet
        digest = hashlib.sha256(self.tokens.tobytes()).hexdigest()
        return {**about, **codec, "digest": digest}


def read_text(
    path: str | Path,
    codec: Codec | Literal["bytes", "characters"] = "bytes",
    *,
    length: int = 128,
) -> Text:
    """Read a text file as a task of bytes, characters, or a tokenizer's tokens."""
    try:
        raw = Path(path).read_bytes()
        text = "" if codec == "bytes" else raw.decode()
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path} is not UTF-8 (byte {error.start}). Train on its bytes instead."
        ) from error
    tokens: NDArray[np.integer[Any]] = np.frombuffer(raw, np.uint8)
    vocabulary = 256
    if codec == "bytes":
        codec = Bytes()
    else:
        if codec == "characters":
            codec = Characters("".join(sorted(set(text))))
        tokens = np.asarray(codec.encode(text), np.int32)
        vocabulary = int(tokens.max(initial=0)) + 1  # the largest token that occurs
    if not 2 <= length <= len(tokens) // SHARE:
        raise OptionError(
            f"length={length}, but {path} has {len(tokens)} tokens, of which the last "
            f"{len(tokens) // SHARE} are held out. Expected 2 <= length <= that."
        )
    return Text(tokens, codec, vocabulary, length)


def measure_accuracy(
    model: CausalTransformer, task: Task, n: int = 1000, *, batch: int = 250
) -> float:
    """Return the fraction of n held-out answers that the model generates exactly.

    Decoding is greedy; an answer with one wrong token is wrong.
    """
    if not isinstance(task, Puzzle):
        raise OptionError(
            "a text has no right answer. Use its loss: train.evaluate(model, task)."
        )
    tokens, _ = task.batch(n, 0, 0, held_out=True)
    right = 0
    for rows in tokens.split(batch):
        prompts, answers = rows.tensor_split((task.prompt,), 1)
        written = generate(model, prompts.tolist(), answers.shape[1])
        right += sum(map(list.__eq__, written, answers.tolist()))
    return right / n
