"""Generate text with a model of any kind, and pass it on in pieces.

    ours      nn/generation.py
    theirs    generate() of transformers; Sampling chooses each token, as for ours

So temperature, top-p and a seed mean the same for every model.

Next: read.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from regard.arrays import to_numpy
from regard.errors import OptionError
from regard.models.inputs import find_tokenizer, has_decoder, measure_context
from regard.nn.chat_template import HALF
from regard.nn.decoder import CausalTransformer
from regard.nn.generation import stream
from regard.plain.sample import GREEDY, Sampling, make_generators

Say = Callable[[str], object]


def generate_text(
    network: Any,
    words: Any,
    named: Mapping[str, Any],
    n_new: int,
    *,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    say: Say,
) -> int:
    """Call `say` with each piece of new text; return the number of new tokens.

    named: the inputs of the network, from make_inputs
    """
    if isinstance(network, CausalTransformer):
        count = 0

        def listen() -> Iterator[int]:
            nonlocal count
            tokens, stop = named["input_ids"].tolist(), words.stop
            steps = stream(
                network, tokens, n_new, sampling=sampling, seed=seed, stop=stop
            )
            for (token,) in steps:
                count += 1
                if token is not None:
                    yield token

        for piece in words.stream(listen()):
            say(piece)
        return count
    check_generates(network)
    check_room(network, words, named, n_new)
    told = Pieces(find_tokenizer(words), say)
    network.generate(
        **named,
        generation_config=plan_generation(network, n_new),
        logits_processor=[SampledToken(sampling, seed)],
        streamer=told,
    )
    return len(told.tokens)


def check_generates(network: Any) -> None:
    """Raise if a network does not write text."""
    can = getattr(network, "can_generate", None)
    if not isinstance(network, CausalTransformer) and (can is None or not can()):
        raise OptionError(
            f"a {type(network).__name__} does not generate text. To see its attention: "
            "regard show"
        )


def check_room(network: Any, words: Any, named: Mapping[str, Any], n_new: int) -> None:
    """Raise if there is no room for new tokens behind those of the prompt."""
    tokens = named.get("input_ids")
    if tokens is None or has_decoder(network):
        return  # the new tokens have a place of their own
    limit, read = measure_context(network, words), tokens.shape[1]
    if read + n_new > limit:
        raise OptionError(
            f"a prompt of {read} tokens and {n_new} new ones, but this model reads "
            f"{limit} at most. Ask for {max(0, limit - read)}."
        )


def plan_generation(network: Any, n_new: int) -> Any:
    """Return the generation settings of a model, without its own way of sampling."""
    plan = copy.deepcopy(network.generation_config)
    plan.update(
        do_sample=False,
        num_beams=1,
        temperature=None,
        top_k=None,
        top_p=None,
        min_p=None,
        repetition_penalty=None,
        max_new_tokens=n_new,
        max_length=None,
    )
    return plan


class SampledToken:
    """A logits processor that leaves one token: the one that Sampling picks."""

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self.sampling, self.seed = sampling, seed
        self.random: Any = None

    def __call__(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        text = tokens[0].tolist()
        if self.random is None:
            (self.random,) = make_generators(self.seed, [text])
        token = self.sampling.pick(to_numpy(scores[0].float()), text, self.random)
        only = torch.full_like(scores, -torch.inf)
        only[0, token] = 0
        return only


class Pieces:
    """A streamer that passes on new text as soon as its characters are complete."""

    def __init__(self, tokenizer: Any, say: Say) -> None:
        self.tokenizer, self.say = tokenizer, say
        self.tokens: list[int] = []
        self.said = ""
        self.is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self.is_prompt:  # the first call repeats what was read
            self.is_prompt = False
            return
        self.tokens += [int(i) for i in value.reshape(-1)]
        text = str(self.tokenizer.decode(self.tokens, skip_special_tokens=True))
        if not text.endswith(HALF):
            self.pass_on(text)

    def end(self) -> None:
        self.pass_on(str(self.tokenizer.decode(self.tokens, skip_special_tokens=True)))

    def pass_on(self, text: str) -> None:
        """Say what was not said before."""
        if len(text) > len(self.said):
            self.say(text[len(self.said) :])
            self.said = text
