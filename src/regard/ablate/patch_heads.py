"""Replace the output of heads in a running model: activation patching, mean ablation.

    with regard.watch(model, keep="qkv") as clean:
        model(a)
    with patch_heads(model, clean, [(3, 5)]):                  as head 5 was with a
        model(b)
    with patch_heads(model, clean, [(3, 5)], parts="pattern"):   only where it looked
        model(b)
    with patch_heads(model, average_outputs(clean), [(3, 5)]):              its mean
        model(b)
    with patch_heads(model, lambda z: z / 2, [(3, 5)]):              half of its own
        model(b)

What a head outputs is z = weights v, before the output projection. The model keeps its
kernels: they run as before, then the outputs of the chosen heads are replaced. Those of
other heads and queries of the layer are the same to the bit. For q, k and v the call
is run a second time, with these arrays of the source and the same dropout. A watch
records the calls as they ran. A replacement that cannot be made exactly raises
OptionError.

Next: skip_prefix.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from regard.ablate.ablation import Positions, read_ablation
from regard.ablate.intervene import intervene
from regard.ablate.replacement import read_replacement
from regard.arguments import expect_with, suggest
from regard.errors import OptionError
from regard.run.chosen_layers import Layer


@expect_with
@suggest
def patch_heads(
    model: nn.Module,
    source: Any,
    heads: Sequence[tuple[Layer, int]] | None = None,
    *,
    layers: Sequence[Layer] | None = None,
    parts: str = "z",
    queries: Positions | None = None,
    keys: Positions | None = None,
) -> Iterator[None]:
    """Replace the output of heads by that of another run, while the `with` lasts.

    source: what regard.watch(model, keep="qkv") recorded, with one sequence for the
        whole batch or one for each of its sequences; or average_outputs(recordings);
        or a function of the outputs (B, H, Nq, Dv) of a layer
    heads: (layer, head) pairs; all heads unless given
    layers: replace all heads of these layers
    parts: "z": the outputs. Some of "qkv": only these arrays are those of the source,
        and the rest is the head's own. "pattern": "qk", so that the weights are those
        of the source, under the mask of this run
    queries: tokens at which outputs are replaced; all unless given
    keys: tokens whose k and v are replaced; all unless given

    Layers and tokens are named as in knock_out. Token i gets the output of token i of
    the source, so that the two texts have to be aligned.
    """
    found = read_replacement(source, parts)
    if keys is not None and not set(parts) & set("kv"):
        raise OptionError(
            f"keys= with parts={parts!r}: which keys are meant? Write parts='v', 'k' "
            "or 'kv', or leave keys= out."
        )
    ablation = read_ablation(model, heads, layers, (keys, queries), found)
    with intervene(model, ablation):
        yield
