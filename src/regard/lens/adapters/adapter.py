"""The adapter protocol: attention that ATen operators do not tell.

A library may run attention in a kernel of its own, into which the observer cannot see.
An adapter describes the calls of one such function, in one file and one object:

    name                 how the coverage names it, `via`
    find                 what is patched: (owner, attribute) pairs that a model uses
    torch_functions      functions of torch, intercepted for every caller instead
    describe             result and arguments of a call  ->  CapturedCall, or a reason
    expect               arguments of a call  ->  PendingCall, before it runs
    run                  run a call under a CallEdit
    lse, v, out          what `describe` gives

The functions take the arguments of a call as the library takes them, so their own
signatures read them: describe(result, /, q, k, v, causal=False). The patches are put
when the `with` of a watch or an ablation is entered, and undone when it is left, by
`put` (monkeypatch.py). While a call runs, the operators inside of it are not recorded.
An error of an adapter never reaches the model: it becomes a reason in the coverage.

Next: registry.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from regard.lens.captured_call import CapturedCall
from regard.run.call_edit import PendingCall

Place = tuple[Any, str]  # a module or a class, and the name of a function in it


def find_nothing(_model: nn.Module) -> Iterable[Place]:
    """Return no places."""
    return ()


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """How one attention function is watched and edited."""

    name: str
    find: Callable[[nn.Module], Iterable[Place]] = find_nothing
    torch_functions: tuple[Any, ...] = ()

    # describe(result, /, *args, **named); a text says why a call cannot be recorded.
    # None: the operators inside tell everything, and the adapter is only for editing.
    describe: Callable[..., CapturedCall | str] | None = None

    # expect(*args, **named); None: it follows from `describe` with None as result
    expect: Callable[..., PendingCall] | None = None

    # run(original, edit, /, *args, **named) returns what the function returns, without
    # the cells and heads of the edit. None: the function cannot be edited.
    run: Callable[..., Any] | None = None

    lse: bool = False  # log-sum-exp of each row; else the definition computes it
    v: bool = False  # the values, for keep="qkv"
    out: bool = False  # the output; else a record cannot be compared with it

    @property
    def can_watch(self) -> bool:
        """Whether its calls are recorded as a whole."""
        return self.describe is not None

    @property
    def can_edit(self) -> bool:
        """Whether its calls can be ablated."""
        return self.run is not None

    def expect_call(self, args: Sequence[Any], named: Mapping[str, Any]) -> PendingCall:
        """Return what is known of a call before it runs."""
        if self.expect is not None:
            return self.expect(*args, **named)
        assert self.describe is not None
        call = self.describe(None, *args, **named)
        if isinstance(call, str):
            raise NotImplementedError(call)
        return PendingCall.of(call)
