"""Search the heads for one shard of pairs and return the result; used by all runners.

    clean run, recorded ─▶ search_heads       every head of the corrupted run patched
                        ─▶ attribute_heads    the same, estimated by one backward pass

A pair that fails for any reason is set aside with that reason. NaN is such a reason.

Next: search_results.py
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from regard.ablate.attribute_heads import attribute_heads
from regard.ablate.effect import read_logits
from regard.ablate.search_heads import search_heads
from regard.atlas.chunks import KILLER, explain_error
from regard.atlas.model import is_function, open_model_with_logits
from regard.atlas.pairs import Pair, PairShard, encode_pair
from regard.atlas.search_results import PairChanges, ShardResult, pack_shard
from regard.atlas.search_settings import SearchSettings
from regard.errors import OptionError
from regard.seen import watch


def prepare_inputs(network: nn.Module, tokens: Tensor) -> dict[str, Any] | Tensor:
    """Return the inputs of a run, with the last logits only, if it can be told to."""
    names, kept = list(inspect.signature(network.forward).parameters), "logits_to_keep"
    return {names[0]: tokens, kept: 1} if kept in names else tokens


def check_causal(network: nn.Module, tokens: Tensor, logits: Tensor) -> None:
    """Raise OptionError if logits (1, N, V) depend on later tokens."""
    n = max(1, tokens.shape[1] - 1)
    with torch.no_grad():
        earlier, _ = read_logits(network(tokens[:, :n]))
    apart = (earlier[:, -1] - logits[:, n - 1]).abs().max()
    eps = torch.finfo(next(network.parameters()).dtype).eps
    if bool(apart > eps**0.5 * logits.abs().max()):
        raise OptionError("the model reads ahead, expected a causal language model")


def digest_weights(network: nn.Module) -> str:
    """Return a digest of every parameter and buffer of a network."""
    digest = blake2b(digest_size=16)
    for name, x in network.state_dict().items():
        if isinstance(x, Tensor):
            digest.update(f"{name}\0{x.dtype}\0{tuple(x.shape)}\0".encode())
            flat = x.detach().cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


class SearchWorker:
    """A plan and its loaded model, which runs any shard of pairs."""

    def __init__(self, plan: SearchSettings, *, threads: int | None = 1) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.plan = plan
        self.model = open_model_with_logits(
            plan.model, precision=plan.precision, device=plan.device
        )
        named = is_function(plan.model)  # begin_search reads the files of the others
        self.weights = digest_weights(self.model.network) if named else ""

    def __call__(self, shard: PairShard, *, skip: Collection[str] = ()) -> bytes:
        """Return the result of a shard, packed as a file.

        skip: digests of pairs to set aside
        """
        found: list[PairChanges] = []
        aside: list[tuple[int, str]] = []
        layers: dict[str, int] = {}
        for pair in shard.places:
            if pair.digest in skip:
                aside.append((pair.line, KILLER))
                continue
            try:
                layers, changes = self.search(pair)
                found.append(changes)
            except OptionError as error:  # its message is the reason
                aside.append((pair.line, str(error).rstrip(".")))
            except Exception as error:  # noqa: BLE001 (any error becomes the reason)
                aside.append((pair.line, explain_error(error)))
        return pack_shard(
            ShardResult(
                number=shard.number,
                layers=tuple(layers),
                heads=tuple(layers.values()),
                pairs=tuple(found),
                aside=tuple(aside),
                weights=self.weights,
            )
        )

    def search(self, pair: Pair) -> tuple[dict[str, int], PairChanges]:
        """Return the heads of each layer, and what each of them changes."""
        tokens = encode_pair(pair, self.model.words)

        def measure(logits: Tensor) -> Tensor:
            return logits[:, -1, tokens.answer] - logits[:, -1, tokens.wrong]

        network, device = self.model.network, self.plan.device
        clean, corrupted = (
            torch.tensor([x], device=device) for x in (tokens.clean, tokens.corrupted)
        )
        inputs = prepare_inputs(network, corrupted)
        with watch(network, keep="qkv") as source, torch.no_grad():
            logits, _ = read_logits(network(clean))
        check_causal(network, clean, logits)
        search = search_heads(network, inputs, source, measure, batch=self.plan.batch)
        estimate = attribute_heads(network, inputs, source, measure)
        if search.layers != estimate.layers:
            raise LookupError("the search and the estimate have other layers")
        layers = dict(zip(estimate.layers, map(len, estimate.tokens), strict=True))
        rows = [(i, h) for i, n in enumerate(layers.values()) for h in range(n)]
        changes, estimates = (
            torch.stack([x[at] for at in rows])
            for x in (search.changes, estimate.changes)
        )
        best = measure(logits).double().cpu()
        found = {"clean run": best, "patched runs": changes, "gradients": estimates}
        for name, x in found.items():
            if not bool(x.isfinite().all()):
                raise ArithmeticError(f"NaN or infinity in the {name}")
        return layers, PairChanges(
            line=pair.line,
            clean=float(best[0]),
            corrupted=search.before,
            changes=tuple(changes.tolist()),
            estimates=tuple(estimates.tolist()),
        )
