"""The `with` of an intervention: its hooks and patches, and the checks at its end.

    with intervene(model, ablation) as verdicts:
        model(...)
    with intervene(model, other, verdicts):     the same inputs: not verified again
        model(...)

Next: knock_out.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from regard.ablate.ablation import Ablation
from regard.ablate.active import ACTIVE
from regard.ablate.intercept import Mode
from regard.ablate.locate import AblationLocator
from regard.ablate.verify import Verdicts
from regard.run.modules import follow


@contextmanager
def intervene(
    model: nn.Module, ablation: Ablation, known: Verdicts | None = None
) -> Iterator[Verdicts]:
    """Edit the calls of a model inside the block, then check what was edited.

    known: which softmaxes are attention, from a verified run of the same inputs
    """
    locator = AblationLocator(model, ablation, known)
    locator.mode = mode = Mode(locator.calls)
    with ExitStack() as stack:
        stack.enter_context(follow(locator.run))
        stack.enter_context(locator.calls.patch(model))
        stack.callback(ACTIVE.remove, locator)
        ACTIVE.append(locator)
        yield locator.verifier.verdicts
    locator.calls.check()
    mode.products.check()
    locator.check()
