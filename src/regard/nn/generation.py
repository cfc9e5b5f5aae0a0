"""Batched generation: prefill all prompts, then decode one token per step.

    logits = prefill(prompts);   repeat: sample a token from logits, logits = decode(it)

Prompts may have different lengths. Each sequence has its own position in the cache and
its own random generator, seeded by the seed, the prompt and the number of equal prompts
before it. So a sequence gets the same tokens alone or in any batch, and the n-th copy
of a prompt gets the n-th sample. The random numbers are identical to the bit; the
logits of a padded batch are equal up to rounding. So a token differs only if two
logits, or a random number and the boundary between two tokens, are that close.

Next: weights.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from regard.arrays import is_array, to_numpy
from regard.errors import OptionError, ShapeError
from regard.nn.cache import Cache
from regard.nn.decoder import CausalTransformer
from regard.plain.sample import GREEDY, Sampling, make_generators


def generate(
    model: CausalTransformer,
    prompts: Sequence[Sequence[int]],
    n_new: int,
    *,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    stop: Collection[int] = (),
) -> list[list[int]]:
    """Return the new tokens of every prompt, without the stop token.

    With a temperature, n copies of a prompt get n independent samples.

    >>> from regard.plain.config import Config
    >>> config = Config(vocabulary=100, context=64, width=32, layers=2, heads=4)
    >>> [len(new) for new in generate(CausalTransformer(config), [[1, 2], [3]], 5)]
    [5, 5]
    """
    new: list[list[int]] = [[] for _ in prompts]
    steps = stream(model, prompts, n_new, sampling=sampling, seed=seed, stop=stop)
    for step in steps:
        for tokens, token in zip(new, step, strict=True):
            if token is not None:
                tokens.append(token)
    return new


def stream(
    model: CausalTransformer,
    prompts: Sequence[Sequence[int]],
    n_new: int,
    *,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    stop: Collection[int] = (),
) -> Iterator[list[int | None]]:
    """Yield the next token of every prompt at each step, None once it has stopped."""
    check_prompts(model, prompts, n_new)
    if not isinstance(stop, Collection):
        raise OptionError(f"stop={stop}, expected a list. Write stop=[{stop}].")
    was_training = model.training
    model.eval()  # no dropout
    texts = [list(prompt) for prompt in prompts]
    streams = make_generators(seed, texts)
    running = [True] * len(texts)
    try:
        logits, cache = read_prompts(model, texts, n_new)
        for left in reversed(range(n_new)):
            tokens = [0] * len(texts)  # stopped sequences are fed 0
            for i, (row, text) in enumerate(zip(logits, texts, strict=True)):
                if running[i]:
                    name = f"the logits of prompt {i}"
                    tokens[i] = sampling.pick(row, text, streams[i], name=name)
                    running[i] = tokens[i] not in stop
                    text.append(tokens[i])
            if not any(running):
                return
            yield [t if on else None for t, on in zip(tokens, running, strict=True)]
            if left:
                logits = read_next(model, tokens, cache)
    finally:
        model.train(was_training)


@torch.inference_mode()  # type: ignore[untyped-decorator]
def read_prompts(
    model: CausalTransformer, prompts: list[list[int]], n_new: int
) -> tuple[np.ndarray, Cache]:
    """Prefill all prompts at once; return the logits after each, and the cache."""
    lengths = [len(prompt) for prompt in prompts]
    longest, like = max(lengths), model.embed.weight
    cache = Cache(
        model.config,
        len(prompts),
        longest + n_new,
        dtype=like.dtype,
        device=like.device,
    )
    filled = [prompt + [0] * (longest - len(prompt)) for prompt in prompts]
    tokens = torch.tensor(filled, device=like.device)
    if min(lengths) == longest:  # calls the model itself, so a lens gets the tokens
        return to_numpy(model(tokens, cache=cache, logits_to_keep=1)[:, 0]), cache
    states, ends = model.read(tokens, cache=cache), torch.tensor(lengths)
    ends = cache.lengths = ends.to(like.device)  # new tokens overwrite the padding
    last = states[torch.arange(len(prompts), device=like.device), ends - 1]
    return to_numpy(model.predict(last)), cache


@torch.inference_mode()  # type: ignore[untyped-decorator]
def read_next(model: CausalTransformer, tokens: list[int], cache: Cache) -> np.ndarray:
    """Decode one more token of every sequence; return the logits (B, V) after it."""
    device = model.embed.weight.device
    logits: Tensor = model(torch.tensor(tokens, device=device)[:, None], cache=cache)
    return to_numpy(logits[:, 0])


def check_prompts(
    model: CausalTransformer, prompts: Sequence[Sequence[int]], n_new: int
) -> None:
    """Raise if the prompts are not lists of known tokens or do not fit the context."""
    one = is_array(prompts)
    if one or any(map(is_array, prompts)):
        write = "prompts.tolist()" if one else "[x.tolist() for x in prompts]"
        raise OptionError(
            "prompts are arrays, expected lists of token numbers, one list per "
            f"sequence. Write {write}."
        )
    if isinstance(prompts, str) or any(isinstance(p, (int, str)) for p in prompts):
        raise OptionError(
            "prompts must be lists of token numbers, one list per sequence. "
            "Write [tokenizer.encode(text)]."
        )
    if not prompts or not all(prompts):
        raise ShapeError("a prompt is empty, expected at least one token in each.")
    if n_new < 0:
        raise OptionError(f"n_new={n_new}, expected at least 0.")
    config, longest = model.config, max(map(len, prompts))
    if longest + n_new > config.context and config.position != "none":
        raise ShapeError(
            f"a prompt of {longest} tokens and {n_new} new ones, but this model reads "
            f"{config.context} at most. Ask for {max(0, config.context - longest)}."
        )
    n, tokens = config.vocabulary, [x for prompt in prompts for x in prompt]
    strange = [x for x in tokens if not isinstance(x, Integral)]
    if strange:
        raise OptionError(f"token {strange[0]!r:.40}, expected integers.")
    unknown = [x for x in tokens if not 0 <= x < n]
    if unknown:
        raise ShapeError(f"token {unknown[0]}, but the vocabulary has 0 to {n - 1}.")
