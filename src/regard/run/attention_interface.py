"""The query that a layer of transformers gives to its attention function.

    attention_interface(module, query, key, value, mask, …)      query: (B, H, Nq, D)

The function may reshape the query before it calls a kernel. transformers 5.23 turns
heads that share keys into rows when it decodes one token under a mask:

    (B, H, 1, D)  ->  (B, Hk, H / Hk, D)

The query is kept while the function runs. If the q of a kernel call has the same
numbers in other axes, the call is described with the axes of the query, so that a head
is never taken for a token.

Next: call_edit.py
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from regard.run.cells import make_four
from regard.run.monkeypatch import put

LIBRARY = "transformers.modeling_utils"  # loaded by every model that needs it


class LayerQuery(threading.local):
    """The query of the attention function that runs in this thread."""

    query: Tensor | None = None


RUNNING = LayerQuery()


@contextmanager
def keep_queries() -> Iterator[None]:
    """Keep the query of each call of an attention function inside the block."""
    kind = getattr(sys.modules.get(LIBRARY), "AttentionInterface", None)
    for name in ("get_interface", "__getitem__"):  # 5.0 has the latter only
        for owner in getattr(kind, "__mro__", ()):
            if name in vars(owner):
                with put(owner, name, wrap_getter):
                    yield
                return
    yield


def wrap_getter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `get_interface` for functions whose query is kept while they run."""

    @wraps(original)
    def get_interface(*args: Any, **named: Any) -> Any:
        function = original(*args, **named)
        return function if torch.compiler.is_compiling() else keep_query(function)

    return get_interface


def keep_query(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention function whose query is kept while it runs."""

    @wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        before = RUNNING.query
        RUNNING.query = named.get("query", args[1] if len(args) > 1 else None)
        try:
            return function(*args, **named)
        finally:
            RUNNING.query = before

    return run


def has_heads_as_rows(q: Tensor) -> bool:
    """Return whether a kernel's q is the query of the layer, with heads as rows."""
    query = RUNNING.query
    if query is None or query.shape == q.shape or not query.ndim == q.ndim == 4:
        return False
    (b, heads, n, d), (own_b, own, rows, own_d) = query.shape, q.shape
    fits = (b, heads * n, d) == (own_b, own * rows, own_d)
    if not fits or own >= heads or heads % own:
        return False
    if q.is_meta:
        return True
    near = max(torch.finfo(x.dtype).eps for x in (q, query)) ** 0.5
    q = q.reshape(query.shape).to(query.dtype)
    if torch.allclose(q, query, rtol=0, atol=0, equal_nan=True):
        return True
    times = q.norm() / query.norm()  # autocast rounds q, and torch's softmax scales it
    tiny = near * float(query.abs().max())
    return bool(torch.allclose(q, query * times, rtol=near, atol=tiny))


def unpack_heads(q: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return a kernel's q and mask with the axes of the query, if q is packed."""
    query = RUNNING.query
    if query is None or not has_heads_as_rows(q):
        return q, mask
    if mask is not None:
        mask = make_four(mask)
        if mask.shape[1:3] != (1, 1):  # else all heads and rows share it
            mask = mask.expand(-1, *q.shape[1:3], -1)
            mask = mask.reshape(len(mask), *query.shape[1:3], mask.shape[3])
    return q.reshape(query.shape), mask
