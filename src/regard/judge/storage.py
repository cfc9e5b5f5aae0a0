"""How a kernel stores the tokens of a batch: packed, in pages, or in a cache.

    varlen    q, k, v (total, H, D)              sequence b: tokens cu[b] to cu[b + 1]
    paged     k, v (pages, page size, H, D)      page table[b, j // size], slot j % size
    cache     k, v (B, capacity, H, D)           new keys are written at lengths[b]

The names of the arguments are read from the signature, for example those of
flash_attn_varlen_func, flash_attn_with_kvcache, or of an adapter for another kernel.

Next: stored_call.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from regard.errors import OptionError

Kind = Literal["varlen", "paged", "cache"]

ROLES = {  # common names of these arguments
    "cu_q": ("cu_seqlens_q", "cu_q", "cu_seqlens"),
    "cu_k": ("cu_seqlens_k", "cu_seqlens_kv", "cu_k"),
    "max_q": ("max_seqlen_q", "max_q", "max_seqlen"),
    "max_k": ("max_seqlen_k", "max_seqlen_kv", "max_k"),
    "table": ("block_table", "block_tables", "page_table", "table"),
    "lengths": ("cache_seqlens", "seq_lens", "context_lens", "lengths"),
    "k": ("k", "k_new", "key", "new_k"),
    "v": ("v", "v_new", "value", "new_v"),
}
NEEDS: dict[str, tuple[str, ...]] = {
    "varlen": ("cu_q",),
    "paged": ("table", "lengths"),
    "cache": ("lengths", "k", "v"),
}
USES = {"varlen": ("cu_q", "cu_k", "max_q", "max_k")}


@dataclass(frozen=True, kw_only=True, repr=False)
class Storage:
    """The kind of storage, and the names of the arguments that describe it.

    cu_q, cu_k: first token of each sequence, (B + 1,); cu_k None: cu_q for both
    max_q, max_k: length of the longest sequence, if the function takes it
    table: page of each block of keys, (B, pages of the longest sequence)
    lengths: number of stored keys, (B,); of a cache, without the new ones
    k, v: new keys and values, which the function writes into the cache
    """

    kind: Kind
    cu_q: str | None = None
    cu_k: str | None = None
    max_q: str | None = None
    max_k: str | None = None
    table: str | None = None
    lengths: str | None = None
    k: str | None = None
    v: str | None = None
    page: int = 4  # number of keys in a page

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise OptionError(
                f'storage "{self.kind}", expected one of {", ".join(get_args(Kind))}.'
            )
        missing = [x for x in NEEDS[self.kind] if getattr(self, x) is None]
        if missing:
            known = ", ".join(ROLES[missing[0]])
            raise OptionError(
                f'storage "{self.kind}" needs the argument {missing[0]}, none of '
                f"{known} is in the signature. Write Storage(kind="
                f'"{self.kind}", {missing[0]}="…").'
            )

    def __repr__(self) -> str:
        given = {x.name: getattr(self, x.name) for x in fields(self)}
        if self.kind != "paged":
            del given["page"]
        return f"Storage({', '.join(f'{n}={x!r}' for n, x in given.items() if x)})"

    def arguments(self) -> list[str]:
        """Return the names of the arguments."""
        names = (getattr(self, role) for role in ROLES)
        return [name for name in names if name is not None]


def read_storage(
    names: Sequence[str], kind: str | None = None, *, page: int = 4
) -> Storage | None:
    """Read the storage from the argument names of a function; None if there is none."""
    found: dict[str, Any] = {
        role: next((name for name in known if name in names[3:]), None)
        for role, known in ROLES.items()
    }
    kind = kind or guess_kind(found, names)
    if kind is None:
        return None
    used = USES.get(kind, NEEDS.get(kind, ()))
    given = {role: found[role] for role in used}
    return Storage(kind=kind, page=page, **given)  # type: ignore[arg-type]


def guess_kind(found: dict[str, Any], names: Sequence[str]) -> str | None:
    """Return the kind of storage that some arguments belong to, or None."""
    cached = any("cache" in name for name in names[1:3])
    if not cached and found["cu_q"]:
        return "varlen"
    if cached and all(found[role] for role in NEEDS["cache"]):
        return "cache"
    if all(found[role] for role in NEEDS["paged"]):
        return "paged"
    return None
