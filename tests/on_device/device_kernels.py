"""The attention operators of the simulated device, which is what SDPA calls there.

    overrideable     what torch calls on a device that it does not know: the CPU's
                     kernel, so the bits are those of the CPU

Next: conftest.py
"""

import torch

ATEN = torch.library.Library("aten", "IMPL")
on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
on_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def put_beside(out, lse, q, k):
    """Return a result of nine parts, of which only the first two mean anything."""
    none = torch.empty(0, dtype=torch.long, device=q.device)
    return out, lse, none, none, q.shape[2], k.shape[2], none, none, none


def attend_overrideable(
    q, k, v, bias=None, dropout=0.0, causal=False, debug=False, *, scale=None
):
    out, lse = on_cpu(q, k, v, dropout, causal, attn_mask=bias, scale=scale)
    return put_beside(out, lse, q, k)


def differentiate_overrideable(grad, q, k, v, bias, asked, out, lse, *rest, scale=None):
    _, _, _, _, dropout, causal, _, _ = rest
    known = (grad, q, k, v, out, lse, dropout, causal)
    found = on_cpu_backward(*known, attn_mask=bias, scale=scale)
    return *found, torch.zeros_like(q[..., 0])


def count_values(x, bins=100, min=0, max=0):  # noqa: A002
    """Count values; GPUs do this for integers, too, the CPU does not."""
    out = torch.empty(0, device=x.device)
    return torch.ops.aten.histc.out(x.float(), bins, min, max, out=out)


def register_kernels():
    """Make the operators known to torch."""
    ATEN.impl("histc", count_values, "PrivateUse1")
    name = "_scaled_dot_product_fused_attention_overrideable"
    ATEN.impl(name, attend_overrideable, "PrivateUse1")
    ATEN.impl(f"{name}_backward", differentiate_overrideable, "PrivateUse1")
