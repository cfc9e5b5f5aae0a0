"""Chat templates: Jinja programs of strangers, run in a sandbox with a time limit.

    messages ─▶ template of the model ─▶ text, ready for an answer

The sandbox has the filters and functions that transformers offers. A template cannot
change its inputs, reach private attributes, build huge values or run forever.

Next: tasks.py
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from regard.errors import OptionError

HALF = "\ufffd"  # replacement character: invalid or incomplete UTF-8
PATIENCE = 2.0  # seconds that a chat template may take
LARGEST = 10**6  # largest size of a product in it, in bits or items


def render_chat(
    template: str, names: Mapping[str, str], messages: Sequence[Mapping[str, Any]]
) -> str:
    """Return a conversation formatted by a template."""
    UNTIL.set(time.monotonic() + PATIENCE)
    try:
        return JINJA.from_string(add_time_checks(JINJA.parse(template))).render(
            **names,
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=True,
        )
    except Exception as error:  # noqa: BLE001 (a template may raise anything)
        raise OptionError(
            f"the model's chat template fails: {describe_error(error)}. "
            'Messages look like [{"role": "user", "content": "Hi"}]; some models '
            "require user and assistant to alternate."
        ) from None


def describe_error(error: BaseException) -> str:
    """Return the message of an error, shortened, without control characters."""
    said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return "".join(c if c.isprintable() else HALF for c in said[:200])


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with products limited to LARGEST bits or items."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        size = 0
        match operator, left, right:
            case "**", int(), int():
                size = left.bit_length() * right
            case "*", int(), int():
                size = left.bit_length() + right.bit_length()
            case ("*", int(n), Sequence() as x) | ("*", Sequence() as x, int(n)):
                size = n * len(x)
        if size > LARGEST:
            raise TemplateError(f"a product of {size} bits or items is too large")
        return super().call_binop(context, operator, left, right)


def add_time_checks(template: nodes.Template) -> nodes.Template:
    """Insert a time check into every loop body and macro of a template."""
    for node in template.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        call = nodes.Call(
            nodes.ImportedName(f"{__name__}.{check_time.__name__}"), [], [], None, None
        )
        node.body.insert(0, nodes.ExprStmt(call))  # type: ignore[attr-defined]
    return template


def check_time() -> None:
    """Raise if the template has used up its time."""
    if time.monotonic() > UNTIL.get():
        raise TemplateError(f"it takes more than {PATIENCE:g} seconds")


class SafeNamespace(Namespace):
    """Jinja's namespace without access to private and dunder attributes."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") and name not in ("_Namespace__attrs", "__class__"):
            raise AttributeError(name)
        return super().__getattribute__(name)


def refuse_messages(reason: str) -> NoReturn:
    """Raise an error from a template (its raise_exception)."""
    raise TemplateError(reason)


def write_json(x: Any, *, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """Return x as JSON; unlike Jinja's filter, without HTML escapes."""
    return json.dumps(x, indent=indent, ensure_ascii=ensure_ascii)


def format_time(layout: str) -> str:
    """Return the current time in a strftime format."""
    return datetime.now().astimezone().strftime(layout)


def make_jinja() -> Sandbox:
    """Return the environment for untrusted templates, set up as in transformers."""
    jinja = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    jinja.filters["tojson"] = write_json
    jinja.globals["namespace"] = SafeNamespace
    jinja.globals["raise_exception"] = refuse_messages
    jinja.globals["strftime_now"] = format_time
    return jinja


JINJA = make_jinja()
UNTIL: ContextVar[float] = ContextVar("UNTIL")  # deadline of the current template
