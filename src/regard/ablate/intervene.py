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
from regard.ablate.edited_calls import EditedCalls
from regard.ablate.intercept import Mode, open_modules
from regard.ablate.locate import AblationLocator
from regard.ablate.running_modules import AblationHooks, RunningModules
from regard.ablate.verify import Verdicts, Verifier
from regard.lens.attention_interface import follow_interface
from regard.lens.patches import run_uncompiled
from regard.lens.trace import find_storages


@contextmanager
def intervene(
    model: nn.Module, ablation: Ablation, known: Verdicts | None = None
) -> Iterator[Verdicts]:
    """Edit the calls of a model while the `with` lasts, then check what was edited.

    known: which softmaxes are attention, from a verified run of the same inputs
    """
    here = RunningModules()
    verifier = Verifier(find_storages(model), here, removes=ablation.removes)
    verifier.trust(known)
    locator = AblationLocator(model, ablation, here, verifier)
    calls = EditedCalls(here, verifier)
    mode = Mode(calls, verifier)
    hooks = AblationHooks(model, mode, here, locator.visit)
    with ExitStack() as stack:
        stack.enter_context(run_uncompiled())
        stack.enter_context(follow_interface())
        stack.enter_context(calls.patch(model))
        stack.enter_context(open_modules(model, mode, here, locator.visit))
        stack.callback(hooks.detach)
        hooks.attach()
        stack.callback(ACTIVE.remove, locator)
        ACTIVE.append(locator)
        yield verifier.verdicts
    calls.check()
    mode.products.check()
    locator.check()
