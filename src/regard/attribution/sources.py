"""Which documents an answer is based on: `regard.sources`.

    mass     weight of the answer's queries on the tokens of a document, the mean over
             layers, heads and queries
    effect   log p(answer) - log p(answer, the document hidden), in nats

Mass says where the model looked, effect what the answer depends on. A token of the
answer is predicted at the token before it: that is its query. The mass is exact,
computed from the q, k and lse of a recording; the effect is measured by ablation. Both
are given for the answer and for each of its sentences. A recording has only the mass.

Next: prompt.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from regard.arguments import suggest
from regard.arrays import to_numpy
from regard.attribution.hidden_documents import measure_answer, run_evaluated
from regard.attribution.prompt import Prompt, encode_answer, locate_prompt
from regard.attribution.result import AnswerPart, SourceDocument, Sources
from regard.attribution.sentences import decode_answer, find_sentences
from regard.errors import OptionError
from regard.models.generate_text import check_generates, check_room, plan_generation
from regard.models.inputs import find_tokenizer, has_decoder
from regard.nn.decoder import CausalTransformer
from regard.nn.generation import generate
from regard.recording.record import Recording
from regard.seen import Seen
from regard.stats.rows import span_pairs


@suggest
def sources(
    model: Any,
    tokenizer: Any,
    messages: Any,
    documents: Any,
    *,
    answer: str | None = None,
    n_new: int = 64,
) -> Sources:
    """Return what each document contributes to the answer of a model.

    >>> from regard import load  # doctest: +SKIP
    >>> model, words = load("SmolLM2-135M-Instruct.Q4_1.gguf")  # doctest: +SKIP
    >>> documents = ["The shop opens at six.", "The code is 7."]  # doctest: +SKIP
    >>> text = " ".join([*documents, "When does it open?"])  # doctest: +SKIP
    >>> messages = [{"role": "user", "content": text}]  # doctest: +SKIP
    >>> sources(model, words, messages, documents).answer.most_effect  # doctest: +SKIP
    0

    model: a decoder of regard or of transformers; or a recording of one, `seen`, for
        the mass only
    messages: the messages of a chat, or a text; the documents occur in it
    documents: a list of texts, or {name: text}
    answer: the answer to explain; by default, the model writes one, greedily
    n_new: most tokens of an answer that the model writes
    """
    prompt = locate_prompt(tokenizer, messages, documents)
    if isinstance(model, Seen | Recording):
        recording = model.recording if isinstance(model, Seen) else model
        tokens, logs, passes = find_recorded(recording, prompt, answer), None, 0
    else:
        check_decoder(model)
        tokens = (
            write_answer(model, tokenizer, prompt, n_new)
            if answer is None
            else encode_answer(tokenizer, prompt, answer)
        )
        measured = measure_answer(model, prompt.tokens, tokens, prompt.spans)
        recording, passes = measured.seen.recording, measured.passes
        logs = to_numpy(measured.logs.double())
    ranges = [(0, len(tokens)), *find_sentences(tokenizer, tokens)]
    masses = compute_masses(recording, prompt, ranges)
    whole, *parts = (
        make_part(decode_answer(tokenizer, tokens[slice(*range_)]), range_, mass, logs)
        for range_, mass in zip(ranges, masses, strict=True)
    )
    known = tuple(
        SourceDocument(
            span.name, decode_answer(tokenizer, prompt.tokens[span.slice]), span
        )
        for span in prompt.spans
    )
    return Sources(documents=known, answer=whole, sentences=tuple(parts), passes=passes)


def check_decoder(model: Any) -> None:
    """Raise OptionError unless this is a model that continues a text."""
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"sources() got a {type(model).__name__}, expected a model or a recording. "
            "Write model, tokenizer = regard.load(name), or give seen."
        )
    if has_decoder(model):
        raise OptionError(
            f"a {type(model).__name__} has an encoder, but documents can be hidden "
            "in decoders only. For the mass, use regard.watch and stats.span_mass."
        )


def write_answer(model: nn.Module, words: Any, prompt: Prompt, n_new: int) -> list[int]:
    """Return the tokens of the likeliest answer, without those that end it."""
    if n_new < 1:
        raise OptionError(f"n_new={n_new}, expected at least 1.")
    if isinstance(model, CausalTransformer):
        stop = find_tokenizer(words).stop
        (tokens,) = generate(model, [list(prompt.tokens)], n_new, stop=stop)
    else:
        check_generates(model)
        given = torch.tensor([prompt.tokens], device=next(model.parameters()).device)
        named = {"input_ids": given, "attention_mask": torch.ones_like(given)}
        check_room(model, words, named, n_new)
        plan = plan_generation(model, n_new)
        with run_evaluated(model), torch.no_grad():
            done = model.generate(**named, generation_config=plan)
        tokens = done[0, given.shape[1] :].tolist()
        ends = np.atleast_1d([] if plan.eos_token_id is None else plan.eos_token_id)
        while tokens and tokens[-1] in ends:
            tokens.pop()
    if not tokens:
        raise OptionError(
            "the model ended its answer at once. Ask something else, or give one to "
            "explain: answer=text."
        )
    return tokens


def find_recorded(
    recording: Recording, prompt: Prompt, answer: str | None
) -> list[int]:
    """Return the tokens of a recording after its prompt, or raise OptionError."""
    if answer is not None:
        raise OptionError(
            f"answer={answer!r:.40} with a recording, which has its own answer. Leave "
            "it out, or give the model instead of the recording."
        )
    n, tokens = len(prompt.tokens), recording.tokens
    if len(tokens) != 1 or max(recording.sequences, default=0):
        raise OptionError(
            f"the recording has the tokens of {len(tokens)} sequences, expected one. "
            "Record one prompt and its answer: with regard.watch(model) as seen: …"
        )
    if tuple(tokens[0][:n]) != prompt.tokens or len(tokens[0]) == n:
        raise OptionError(
            f"the recording has {len(tokens[0])} tokens, expected the {n} tokens of "
            "the prompt and those of an answer after them. Give the messages that "
            "were recorded, and record the answer with them."
        )
    return [int(i) for i in tokens[0][n:]]


def compute_masses(
    recording: Recording, prompt: Prompt, ranges: Sequence[tuple[int, int]]
) -> np.ndarray[Any, Any]:
    """Return the mass of each range of the answer's tokens on each document."""
    first = len(prompt.tokens) - 1  # the query of the answer's first token
    queries = [(first + start, first + stop) for start, stop in ranges]
    keys = [(span.start, span.stop) for span in prompt.spans]
    layers = [
        to_numpy(span_pairs(record, queries, keys, per="query").values).mean(0)
        for record in recording.records
    ]
    if not layers:
        raise OptionError(
            f"no attention of this {recording.model} was recorded, so there is no "
            "mass. print(seen.coverage()) says why."
        )
    return np.asarray(np.mean(np.asarray(layers, np.float64), axis=0))


def make_part(
    text: str,
    tokens: tuple[int, int],
    mass: np.ndarray[Any, Any],
    logs: np.ndarray[Any, Any] | None,
) -> AnswerPart:
    """Return a part of the answer, with the effects on it."""
    logprob, effect = None, None
    if logs is not None:
        sums = logs[:, slice(*tokens)].sum(1)
        logprob, effect = float(sums[0]), tuple((sums[0] - sums[1:]).tolist())
    return AnswerPart(
        text=text,
        tokens=tokens,
        mass=tuple(mass.tolist()),
        effect=effect,
        logprob=logprob,
    )
