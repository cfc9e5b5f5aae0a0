"""Path patching: what some heads change in the q, k and v of later heads.

    path = record_path(model, tokens, source, [(3, 0)])
    with patch_heads(model, path, [(5, 2)], parts="q"):    the path from 3.0 to q of 5.2
        model(tokens)

    1  run the model, and keep the output of every head
    2  run it again: senders output what they did in `source`, all other heads what they
       did in 1; record q, k and v of every head

In the second run, nothing reaches a head from the senders but through the residual
stream and the layers between that do not attend (MLPs and norms are computed as usual).
So path.q differs from the run itself by the direct effect only (Wang et al. 2022).

Next: search_heads.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.ablate.ablation import check_model
from regard.ablate.effect import check_evaluating
from regard.ablate.patch_heads import patch_heads
from regard.ablate.search_heads import refuse_cache
from regard.arguments import suggest
from regard.lens import capture
from regard.recording.record import Recording
from regard.run.chosen_layers import Layer


@suggest
def record_path(
    model: nn.Module,
    inputs: Mapping[str, Any] | Tensor,
    source: Any,
    senders: Sequence[tuple[Layer, int]],
) -> Recording:
    """Record a run in which only some heads output what they did in another run.

    inputs: tokens (B, N), or the keyword arguments of the model
    source: a recording with values, average_outputs(recordings), or a function, as in
        patch_heads
    senders: (layer, head) pairs

    Every other head is frozen: it outputs what it does without a patch.
    """
    check_model(model)
    check_evaluating(model)
    refuse_cache(inputs)

    def run() -> None:
        model(**inputs) if isinstance(inputs, Mapping) else model(inputs)

    with torch.no_grad():
        with capture(model, keep="qkv") as own:
            run()
        with (
            patch_heads(model, own.recording),
            patch_heads(model, source, senders),  # the inner patch wins
            capture(model, keep="qkv") as path,
        ):
            run()
    return path.recording
