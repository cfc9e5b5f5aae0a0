"""Run the calls of adapters as the active ablations want them.

    the adapter says what is known of the call     PendingCall
    the ablations say what is removed from it      CallEdit
    the adapter runs it without these parts

If the adapter fails, the model goes on with what its function returns without an edit,
and the ablation raises OptionError at its end.

Next: intercept.py
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from regard.ablate.active import edited
from regard.ablate.replacement import FunctionError
from regard.ablate.verify import Verifier
from regard.errors import OptionError
from regard.lens import Adapter, describe_failure, patch_places, run_muted
from regard.run.call_edit import CallEdit


class RandomStates:
    """The states of the random generators, so that dropout can be repeated."""

    def __init__(self, device: torch.device) -> None:
        self.modules: list[tuple[Any, tuple[torch.device, ...]]] = [(torch, ())]
        if device.type != "cpu":
            at = () if device.type == "mps" else (device,)  # there is one mps
            self.modules.append((torch.get_device_module(device), at))
        self.states = self.read()

    def read(self) -> list[Tensor]:
        """Return the states of now."""
        return [module.get_rng_state(*at) for module, at in self.modules]

    def write(self, states: list[Tensor]) -> None:
        """Go on with these states."""
        for (module, at), state in zip(self.modules, states, strict=True):
            module.set_rng_state(state, *at)

    @contextmanager
    def repeat(self) -> Iterator[None]:
        """Draw the same numbers again in the `with`, then go on as before it."""
        now = self.read()
        self.write(self.states)
        try:
            yield
        finally:
            self.write(now)


class EditedCalls:
    """Runs the calls of one ablated model."""

    def __init__(self, verifier: Verifier) -> None:
        self.here, self.verifier = verifier.here, verifier
        self.failures: dict[str, str] = {}  # by module

    def patch(self, model: nn.Module) -> AbstractContextManager[None]:
        """Patch what the adapters find in a model, while the `with` lasts."""
        return patch_places(model, self.edit_calls, self.fail, is_outermost=True)

    def fail(self, error: Exception) -> None:
        """Keep an error that belongs to no call, for the end."""
        self.failures[""] = f"{type(error).__name__}: {error}"

    def edit_calls(
        self, adapter: Adapter, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a function that edits its calls."""

        @wraps(original)
        def stand_in(*args: Any, **named: Any) -> Any:
            # another model's, or inside of one that is edited
            if not self.here.names or self.verifier.local.held:
                return original(*args, **named)
            return self.run(adapter, original, args, named)

        return stand_in

    def run(
        self,
        adapter: Adapter,
        original: Callable[..., Any],
        args: Sequence[Any],
        named: Mapping[str, Any],
    ) -> Any:
        """Run a call under the edit of all ablations."""
        try:
            call = adapter.expect_call(args, named)
        except Exception as error:  # noqa: BLE001 (nothing of ours reaches the model)
            self.fail_call(adapter, error)
            return original(*args, **named)
        observer = self.verifier.take_whole() if adapter.can_watch else None
        with edited(call) as edit, self.verifier.hold():
            if edit.is_empty:
                return run_muted(observer, original, args, named)
            given = (adapter, original, edit, args, named)
            return run_muted(observer, self.run_edited, given, {})

    def run_edited(
        self,
        adapter: Adapter,
        original: Callable[..., Any],
        edit: CallEdit,
        args: Sequence[Any],
        named: Mapping[str, Any],
    ) -> Any:
        """Run a call under an edit, or without it if the adapter fails."""
        done: list[Any] = []  # what the function returned, or raised
        again = [x.here.device for x in edit.replaced if x.inputs]
        random = RandomStates(again[0]) if again else None

        def keep(*args: Any, **named: Any) -> Any:
            if done:  # the call is run again, with other inputs: no watch hears it
                same = nullcontext() if random is None else random.repeat()
                with _disable_current_modes(), same:
                    return inspect.unwrap(original)(*args, **named)
            try:
                done.append(original(*args, **named))
            except BaseException as error:
                done.append(error)
                raise
            return done[-1]

        try:
            return (adapter.run or refuse)(keep, edit, *args, **named)
        except FunctionError:
            raise
        except Exception as error:
            if done and error is done[-1]:  # the model's own
                raise
            self.fail_call(adapter, error)
        return done[-1] if done else original(*args, **named)

    def fail_call(self, adapter: Adapter, error: Exception) -> None:
        """Keep an error of an adapter for the end."""
        self.failures[self.here.name] = describe_failure(adapter, error)

    def check(self) -> None:
        """Raise OptionError if a call could not be edited."""
        for name, failure in self.failures.items():
            raise OptionError(f"nothing was cut from {name or 'the model'}: {failure}.")


def refuse(*_args: Any, **_named: Any) -> Any:
    """Refuse to edit a call."""
    raise NotImplementedError("its calls cannot be edited")
