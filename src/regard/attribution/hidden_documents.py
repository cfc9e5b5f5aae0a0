"""The log-probability of an answer, with all documents, and with each of them hidden.

    log p(answer | prompt) = Σ_t log p(token_t | prompt, tokens before t)

No token can attend to a hidden document in any layer (knock_out), so nothing of it is
left in the model. Each row of a batch hides another document. All rows have the same
tokens, and begin with the same cache:

    |- template -|- document 0 -|- document 1 -| … |- question -|- answer -|
     read once, and copied       read once for each hidden document

The cache may hold document 0: where it is hidden, nobody attends to it, and what comes
before a document does not depend on it. Without a cache, whole sequences are read.

Next: sources.py
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.ablate.knock_out import knock_out
from regard.nn.cache import Cache
from regard.nn.decoder import CausalTransformer
from regard.recording.spans import Span
from regard.seen import Seen, watch

MOST = 1 << 15  # tokens of a batch


@dataclass(frozen=True)
class Measured:
    """What was measured of an answer of n tokens, for D documents."""

    seen: Seen  # the pass with all documents
    logs: Tensor  # (1 + D, n): of each token, with all documents, and without each
    passes: int  # sequences that were read


def measure_answer(
    network: nn.Module,
    prompt: Sequence[int],
    answer: Sequence[int],
    documents: Sequence[Span],
) -> Measured:
    """Return the log-probabilities of an answer, and the attention that gave it."""
    reader = AnswerReader(network, prompt, answer)
    cut = min(*(x.stop for x in documents), len(prompt) - 1)
    with run_evaluated(network), torch.no_grad():
        with watch(network) as seen:
            cache = reader.read_start(cut)
            kept = copy.deepcopy(cache)
            if cache is not None:
                logs = [reader.read_rest(cache, cut, 1)]
        if cache is None:  # the start is read again: a recording of its own
            with watch(network) as seen:
                logs = [reader.read_rest(None, cut, 1)]
        rows = max(1, MOST // (len(prompt) + len(answer)))
        for i in range(0, len(documents), rows):
            some = list(documents[i : i + rows])
            several = reader.repeat_cache(kept, cut, len(some))
            with knock_out(network, keys=some):
                logs.append(reader.read_rest(several, cut, len(some)))
    return Measured(seen, torch.cat(logs), reader.passes)


class AnswerReader:
    """Reads a prompt and its answer with a network, from any token on."""

    def __init__(
        self, network: nn.Module, prompt: Sequence[int], answer: Sequence[int]
    ) -> None:
        device = next(network.parameters()).device
        self.network, self.n = network, len(answer)
        self.target = torch.tensor(answer, device=device)
        # the last token of the answer is predicted, but predicts nothing
        self.tokens = torch.tensor([*prompt, *answer[:-1]], device=device)[None]
        self.is_ours = isinstance(network, CausalTransformer)
        called = inspect.signature(network.forward).parameters
        self.brief = {"logits_to_keep": 1} if "logits_to_keep" in called else {}
        self.has_cache = "past_key_values" in called
        self.passes = 0  # sequences that were read

    def read_start(self, cut: int) -> Any:
        """Read the first tokens; return a cache of them, None if there is none."""
        tokens = self.tokens[:, :cut]
        if not cut:
            return None
        if self.is_ours:
            cache = self.make_cache(1)
            self.network(tokens, cache=cache, **self.brief)
            return cache
        if not self.has_cache:
            return None
        found = self.network(input_ids=tokens, use_cache=True, **self.brief)
        cache = found.past_key_values
        if callable(getattr(cache, "batch_repeat_interleave", None)):
            return cache
        self.passes += 1  # in vain: it cannot be copied
        return None

    def make_cache(self, n: int) -> Cache:
        """Return an empty cache of ours for n sequences."""
        like = self.network.embed.weight
        size = self.tokens.shape[1]
        config = self.network.config
        return Cache(config, n, size, dtype=like.dtype, device=like.device)

    def repeat_cache(self, cache: Any, cut: int, n: int) -> Any:
        """Return a copy of a cache of the first tokens, for n sequences."""
        if cache is None:
            return None
        if not self.is_ours:
            cache = copy.deepcopy(cache)
            cache.batch_repeat_interleave(n)
            return cache
        several = self.make_cache(n)
        several.k[..., :cut, :] = cache.k[..., :cut, :]
        several.v[..., :cut, :] = cache.v[..., :cut, :]
        several.lengths = cut
        return several

    def read_rest(self, cache: Any, cut: int, n: int) -> Tensor:
        """Read the other tokens in n sequences; return log p of the answer, (n, N)."""
        self.passes += n
        tokens = self.tokens.expand(n, -1)
        begin = tokens.shape[1] - self.n  # the query of the answer's first token
        if cache is None:
            logits = self.read(tokens)[:, begin:]
        else:
            if cut < begin:
                self.read(tokens[:, cut:begin], cache=cache, is_brief=True)
            logits = self.read(tokens[:, begin:], cache=cache)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logs = torch.log_softmax(logits, -1)
        return logs.gather(-1, self.target.expand(n, -1)[..., None])[..., 0]

    def read(
        self, tokens: Tensor, *, cache: Any = None, is_brief: bool = False
    ) -> Tensor:
        """Return the logits of tokens (B, N); is_brief: perhaps only of the last."""
        brief = self.brief if is_brief else {}
        if self.is_ours:
            return self.network(tokens, cache=cache, **brief)
        if cache is not None:
            done = self.network(
                input_ids=tokens, past_key_values=cache, use_cache=True, **brief
            )
        else:
            done = self.network(tokens)
        return done if isinstance(done, Tensor) else done.logits


@contextmanager
def run_evaluated(network: nn.Module) -> Iterator[None]:
    """Run a network without dropout while the `with` lasts."""
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)
