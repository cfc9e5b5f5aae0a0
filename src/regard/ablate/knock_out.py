"""Ablate heads, or the keys they attend to, in a running model.

    with knock_out(model, heads=[(3, 5)]):                  head 5 of layer 3 outputs 0
        model(...)
    with knock_out(model, keys=range(4, 9), queries=[20]):  token 20 cannot see 4 … 8
        model.generate(...)
    with knock_out(model, [(3, 5)], mask=regard.window(8)):   head 5 sees 8 tokens back
        model(...)

The model keeps its kernels; its calls are edited before they run. A watch inside or
around records the edited calls. A removed head still attends and is still recorded:
only its output is 0. An ablation that cannot be made exactly raises OptionError.

Next: patch_heads.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from regard.ablate.ablation import Positions, read_ablation
from regard.ablate.intervene import intervene
from regard.arguments import expect_with, suggest
from regard.masks.algebra import Mask
from regard.run.chosen_layers import Layer


@expect_with
@suggest
def knock_out(
    model: nn.Module,
    heads: Sequence[tuple[Layer, int]] | None = None,
    *,
    layers: Sequence[Layer] | None = None,
    keys: Positions | None = None,
    queries: Positions | None = None,
    mask: Mask | None = None,
) -> Iterator[None]:
    """Ablate heads, or attention to some keys, while the `with` lasts.

    heads: (layer, head) pairs; all heads unless given
    layers: ablate all heads of these layers; a layer is its number, in the order in
        which layers attend, or the name of its module or of a parent module. If a
        module attends several times in a pass, each time is a layer with a number of
        its own: "name", "name#2", …; the name alone is all of them
    keys: tokens that the heads cannot attend to; if not given, their output is 0
    queries: tokens that cannot attend to the keys; all unless given
        both: a list of slices or spans is one for each sequence of the batch
    mask: a formula: the heads attend only where it and the model's own mask allow it

    Tokens are numbered from 0 in the sequence that a layer attends over: in generation,
    the prompt and all generated tokens. Padding (attention_mask=) is not counted. -1 is
    the last token so far: in generation the newest one, in every step.
    """
    spans = (keys, queries)
    with intervene(model, read_ablation(model, heads, layers, spans, mask=mask)):
        yield
