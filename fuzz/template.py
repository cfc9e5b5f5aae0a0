"""Hunt: chat templates, which are programs of strangers in Jinja's sandbox.

    text ─▶ Tokenizer.chat ─▶ a text, or an OptionError; nothing else, and not for ever

Next: question.py
"""

from __future__ import annotations

import random
from unittest.mock import patch

from damage import damage_text
from hunt import Target, main
from tokenizers import Tokenizer as Core
from tokenizers.models import BPE

from regard.nn import chat_template
from regard.nn.tokens import Tokenizer

WORDS: tuple[str, ...] = ()
WORDS += ("{{ ", " }}", "{% ", " %}", "{%- ", "-%}", "{# ", " #}", "messages")
WORDS += ("message",)
WORDS += ("{% for m in messages %}", "{% endfor %}", "{% if ", "{% else %}", "[0]")
WORDS += ("{% endif %}", "{% set x = ", "{% macro f(a) %}", "{% endmacro %}", "f(f)")
WORDS += ("range(99999)", "namespace(a=1)", "loop.index", "recursive", "loop(x)", ".a")
WORDS += ("raise_exception('x')", "strftime_now('%Y')", "bos_token", "|tojson", "10**9")
WORDS += ("|join", "|list", "|length", "|replace('a', 'aaaa')", "|map('x')", "|sort")
WORDS += ("|format(1)", "|center(99999)", "'%99999d'|format(1)", "~", "*", "**", "9999")
WORDS += ("''.join", "{}", "'{0}'.format", ".__class__", "['__class__']", "|attr('a')")
WORDS += ("'a' * 99999999", "{% include 'x' %}", "{% import 'x' as y %}", "{% break %}")
WORDS += (
    "{% call f() %}",
    "{% endcall %}",
    "caller()",
    "cycler(1)",
    "joiner()",
    "dict()",
)
WORDS += ("lipsum(n=99)", "{% filter upper %}", "{% endfilter %}", "is defined", "|sum")
TALK = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "é"}) * 2
CORE = Core(BPE({"a": 0}, []))


def check(data: bytes) -> None:
    """Write a conversation by a template."""
    text = data.decode("utf-8", "replace")
    with patch.object(chat_template, "PATIENCE", 0.2):  # a hunt has less of it
        made = Tokenizer(CORE, text, names={"bos_token": "<s>"}).chat(TALK)
    assert isinstance(made, str)


def damage(rng: random.Random, data: bytes) -> bytes:
    """Put words of the language in wrong places."""
    text = damage_text(rng, data.decode("utf-8", "replace"), WORDS)
    return text.encode("utf-8", "replace")


TARGET = Target("template", check, damage, longest=2**11)
if __name__ == "__main__":
    main(TARGET)
