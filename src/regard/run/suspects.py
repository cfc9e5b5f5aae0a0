"""Which modules look like attention: by their class, their projections or parameters.

A module that runs without a softmax, and looks like attention, attends in another way
(linear, by a sigmoid, over the edges of a graph), and the coverage says so.

    class         an "attention" in its name, but not its output layer
    projections   one of q, k and v together, or one of q and one of k
    parameters    "att", "att_src", … as in layers of graphs

Next: ../lens/watch.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor, nn

from regard.run.parts import find_module

CLASS = re.compile(r"attention(?!\w*output)", re.IGNORECASE)
BEFORE, AFTER = r"(to_|lin_|w_?|in_proj_|proj_)?", r"(_?proj|_?linear|_lin|z)?"
ALL = re.compile(f"{BEFORE}qkv{AFTER}")
QUERY = re.compile(f"{BEFORE}(q|query|queries){AFTER}")
KEY = re.compile(f"{BEFORE}(k|kv|key|keys){AFTER}")
EDGES = re.compile(r"att(_(src|dst|edge|l|r|q|k))?")


def looks_like_attention(module: nn.Module) -> bool:
    """Return whether a module looks like attention."""
    if CLASS.search(type(module).__name__):
        return True
    parts = {name.lower() for name, _ in module.named_children()}
    if any(ALL.fullmatch(x) for x in parts):
        return True
    if all(any(kind.fullmatch(x) for x in parts) for kind in (QUERY, KEY)):
        return True
    own = (name for name, _ in module.named_parameters(recurse=False))
    return any(EDGES.fullmatch(name) for name in own)


def list_silent(model: nn.Module, ran: set[str], heard: set[str]) -> Iterator[str]:
    """Yield the modules that ran, look like attention, and in which nothing was heard.

    Of modules inside of each other, only the outermost.
    """
    last = None
    for name, module in model.named_modules():
        if last is not None and (not last or name.startswith(f"{last}.")):
            continue
        if name not in ran or not looks_like_attention(module):
            continue
        if not any(
            other == name or is_in(other, name) or (other and is_in(name, other))
            for other in heard
        ):
            last = name
            yield name


def find_folded(model: nn.Module, name: str, q: Tensor, tokens: int) -> int | None:
    """Return how many heads seem to be rows of one head in q (…, H, Nq, D), or None.

    The projections of a module imply its heads: H · D is the width of what one of them
    takes. If only r · H · D is, and there are r rows for each token, then r heads were
    folded into rows, and neither heads nor queries are what they seem.
    """
    heads, rows, width = q.shape[-3:]
    if rows <= tokens or rows % tokens:
        return None
    parts = find_module(model, name).modules()
    widths = {getattr(part, "in_features", 0) for part in parts}
    folded = rows // tokens * heads * width in widths and heads * width not in widths
    return rows // tokens if folded else None


def is_in(name: str, other: str) -> bool:
    """Return whether a module is a part of another one."""
    return not other or name.startswith(f"{other}.")
