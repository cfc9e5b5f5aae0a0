"""F.scaled_dot_product_attention, for editing: its operators are observed.

Next: flex.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from regard.engine.sdpa_with_lse import repeat_heads
from regard.lens.adapters.adapter import Adapter
from regard.run.attention_interface import unpack_heads
from regard.run.call_edit import CallEdit, PendingCall, Rerun, find_hidden, hide
from regard.run.cells import drop_axes


def expect_sdpa(  # noqa: PLR0917 (the signature of the kernel)
    query: Tensor,
    key: Tensor,
    value: Tensor,  # noqa: ARG001
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False,  # noqa: FBT001, FBT002
    scale: float | None = None,
    **_options: Any,
) -> PendingCall:
    """Return what is known of a call before it runs."""
    query, attn_mask = unpack_heads(query, attn_mask)
    return PendingCall(
        like=query,
        heads=query.shape[1] if query.ndim == 4 else None,
        n_q=query.shape[-2],
        n_k=key.shape[-2],
        aligned=is_causal,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        find_hidden=partial(find_hidden, attn_mask, causal=is_causal),
    )


def run_sdpa(  # noqa: PLR0917 (the signature of the kernel)
    original: Callable[..., Tensor],
    edit: CallEdit,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    **options: Any,
) -> Tensor:
    """Run the kernel with an edited mask."""
    shape, causal = query.shape, is_causal
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    query, mask = unpack_heads(query, attn_mask)
    if is_packed := query.shape != shape:
        key, value = (repeat_heads(x, query) for x in (key, value))
    if edit.cells is not None:
        mask = drop_axes(hide(mask, edit.cells, causal=causal), query.ndim)
        causal = False

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return original(q, k, v, mask, dropout_p, causal, **options)

    arrays = (query, key, value)
    if is_packed and edit.cells is None:  # other heads keep their bits
        out = original(*given, **options).reshape(*query.shape[:-1], -1)
    else:
        out = run(*arrays)
    out = edit.clear(out, Rerun(run, arrays))
    return out.reshape(*shape[:-1], -1) if is_packed else out


SDPA = Adapter(
    name="sdpa",
    torch_functions=(F.scaled_dot_product_attention,),
    expect=expect_sdpa,
    run=run_sdpa,
)
