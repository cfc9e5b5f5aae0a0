"""Calls that do not fit: the error says what to write instead.

    @suggest                    a function: arguments that are not in its signature
    class Attended(NotAnArray)  an object that is used like an array or a tuple
    @expect_with                a context manager that is used without `with`

What other libraries call the same thing is in other_names.py.

Next: other_names.py
"""

from __future__ import annotations

import difflib
import inspect
import signal
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

from regard.errors import CallError
from regard.other_names import ARGUMENTS, ATTRIBUTES, CALLED, OBJECTS, POSITIONS

P = ParamSpec("P")
R = TypeVar("R")
Yielded = TypeVar("Yielded")
OPERATORS = ("add", "sub", "mul", "truediv", "matmul", "pow", "xor")


def suggest(fn: Callable[P, R]) -> Callable[P, R]:
    """Return fn; a call that does not match its signature says what to write.

    >>> import regard
    >>> regard.causal(8)
    Traceback (most recent call last):
    regard.errors.CallError: causal() takes no arguments, but 1 was given. A mask is a \
formula without a size. Write causal().dense(8) for an array.
    """

    @wraps(fn)
    def call(*given: P.args, **named: P.kwargs) -> R:
        try:
            return fn(*given, **named)
        except TypeError as error:
            # no frame below this one: fn did not start, so its arguments do not fit
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            raise CallError(describe_misfit(fn, given, named)) from None
        except ModuleNotFoundError as missing:
            if missing.name != "torch":
                raise
            name = CALLED.get(fn.__name__, fn.__name__)
            raise ImportError(
                f'{name}() needs torch: pip install "regard[torch]"'
            ) from missing

    return call


def describe_misfit(
    fn: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any]
) -> str:
    """Return why arguments do not match the signature of fn, and what to write."""
    parameters = dict(inspect.signature(fn).parameters)
    if "self" in parameters:
        del parameters["self"]
        given = given[1:]
    name = CALLED.get(fn.__name__, fn.__name__)
    for unknown in named:
        if unknown not in parameters:
            known = ARGUMENTS.get(name, {}).get(unknown)
            return f"{name}() has no argument {unknown}. " + (
                known or f"{find_close(unknown, parameters)}."
            )
    first = [x.name for x in parameters.values() if x.kind is not x.KEYWORD_ONLY]
    if len(given) > len(first):
        were = "1 was" if len(given) == 1 else f"{len(given)} were"
        most = f"({', '.join(first)}) by position" if first else "no arguments"
        others = [f"{x}=" for x in parameters if x not in first]
        more = f" Write the others by name: {', '.join(others)}." if others else ""
        return f"{name}() takes {most}, but {were} given.{POSITIONS.get(name, more)}"
    twice = [x for x in first[: len(given)] if x in named]
    if twice:
        return f"{name}() got {twice[0]} by position and by name. Write it once."
    needed = [x.name for x in parameters.values() if x.default is x.empty]
    lacks = [x for x in needed[len(given) :] if x not in named]
    return f"{name}() lacks {', '.join(lacks)}. Write {name}({', '.join(needed)})."


def find_close(unknown: str, known: Mapping[str, Any]) -> str:
    """Return the name that was probably meant, or all that there are."""
    close = difflib.get_close_matches(unknown, known, n=1)
    if close:
        return f"Write {close[0]}="
    return f"It has {', '.join(known)}" if known else "It takes none"


def name_missing(module: str, name: str, known: Collection[str]) -> AttributeError:
    """Return the error for an attribute that a module does not have."""
    close = difflib.get_close_matches(name, known, n=1)
    words = ATTRIBUTES.get(name) or (f"Write {module}.{close[0]}." if close else "")
    there = words or f"It has {', '.join(sorted(known))}."
    return AttributeError(f"module '{module}' has no attribute '{name}'. {there}")


def expect_function(name: str, fn: Any, *arguments: str) -> None:
    """Raise CallError unless fn can be called with this many arguments."""
    form = f"{name}({', '.join(arguments)})"
    if not callable(fn):
        raise CallError(f"{name} is a {type(fn).__name__}, expected a function {form}.")
    try:
        inspect.signature(fn).bind(*arguments)
    except TypeError:
        raise CallError(
            f"{name} takes {inspect.signature(fn)}, expected a function {form}. "
            f"Write lambda {', '.join(arguments)}: …"
        ) from None
    except ValueError:  # a function in C without a signature
        pass


class NotAnArray:
    """A base class: use like an array or a tuple raises CallError with the way out."""

    def __getattr__(self, name: str) -> NoReturn:
        kind = type(self)
        if name.startswith("__"):  # a protocol that asks, not a user
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        raise AttributeError(f"{kind.__name__} has no .{name}. {find_words(kind)}")

    def __getitem__(self, at: Any) -> Any:
        self.refuse(at)

    def __iter__(self) -> Iterator[Any]:
        self.refuse()

    def __len__(self) -> int:  # noqa: PLE0303 (it returns nothing)
        self.refuse()

    def __bool__(self) -> bool:
        return True  # not a matter of its length

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Raise CallError; NumPy would make an array of one object."""
        self.refuse(dtype, copy)

    @classmethod
    def __torch_function__(cls, *call: Any) -> Any:
        """Raise CallError; torch calls it if it is given such an object."""
        cls.refuse(*call)

    @classmethod
    def refuse(cls, *_used_with: object) -> NoReturn:
        """Raise CallError with what to write."""
        raise CallError(find_words(cls))

    __neg__ = refuse


for _operator in (*OPERATORS, *(f"r{_operator}" for _operator in OPERATORS)):
    setattr(NotAnArray, f"__{_operator}__", vars(NotAnArray)["refuse"])


def find_words(kind: type) -> str:
    """Return what to write instead, for a class or the nearest one it derives from."""
    return next(OBJECTS[x.__name__] for x in kind.__mro__ if x.__name__ in OBJECTS)


def expect_with(
    fn: Callable[P, Iterator[Yielded]],
) -> Callable[P, Block[Yielded]]:
    """Return a context manager, as contextlib does; without a `with`, it warns."""

    @wraps(fn)
    def make(*given: P.args, **named: P.kwargs) -> Block[Yielded]:
        return Block(fn.__name__, contextmanager(fn)(*given, **named))

    return make


def run_to_end(fn: Callable[P, R], *given: P.args, **named: P.kwargs) -> R:
    """Call a function; an interrupt (Ctrl+C) is raised when it has returned.

    So what a block patches is patched and undone as a whole. A second interrupt is
    raised at once.
    """
    before, came = signal.getsignal(signal.SIGINT), []
    main = threading.current_thread() is threading.main_thread()
    if not main or not callable(before):
        return fn(*given, **named)

    def hold(*call: Any) -> None:
        came.append(call)
        if len(came) > 1:
            before(*call)

    signal.signal(signal.SIGINT, hold)
    try:
        return fn(*given, **named)
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[0])


class Block(AbstractContextManager[Yielded]):
    """What `with` is written for; anything else says so."""

    def __init__(
        self, name: str, manager: AbstractContextManager[Yielded, bool | None]
    ) -> None:
        self.name, self.manager = name, manager
        self.entered = self.is_open = False

    def __enter__(self) -> Yielded:
        if self.entered:
            raise CallError(
                f"this {self.name}(…) was entered before, and works once. Write "
                f"`with {self.name}(…):` again."
            )
        self.entered = True
        try:
            return run_to_end(self.open)
        except BaseException as error:
            if self.is_open:  # an interrupt was held back until it was open
                self.__exit__(type(error), error, error.__traceback__)
            raise

    def open(self) -> Yielded:
        """Enter the context manager."""
        given = self.manager.__enter__()
        self.is_open = True
        return given

    def __exit__(self, *error: object) -> bool | None:
        try:
            return run_to_end(self.close, *error)
        except BaseException:
            if self.is_open:  # it was interrupted before it began
                run_to_end(self.close, *error)
            raise

    def close(self, *error: Any) -> bool | None:
        """Leave the context manager."""
        self.is_open = False
        return self.manager.__exit__(*error)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") or "name" not in vars(self):
            raise AttributeError(name)
        raise AttributeError(f"{self.name}() has no .{name}. {OBJECTS[self.name]}")

    def __call__(self, *_given: object) -> NoReturn:
        """Raise CallError: it is not a function that runs the model."""
        raise CallError(f"{self.name}() is not called. {OBJECTS[self.name]}")

    def __del__(self) -> None:
        if not self.__dict__.get("entered", True):
            said = f"{self.name}() did nothing. {OBJECTS[self.name]}"
            warnings.warn(said, RuntimeWarning, stacklevel=2)
