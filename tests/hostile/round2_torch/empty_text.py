"""A sequence of a batch without any token: its record cannot be read."""

import regard
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def forward(self, x, attention_mask):
        y = x[:, None]
        ok = (attention_mask != 0)[:, None, None]
        return F.scaled_dot_product_attention(y, y, y, attn_mask=ok)


model, x = Net(), torch.randn(2, 4, 8)
mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
with torch.no_grad(), regard.watch(model) as seen:
    model(x, attention_mask=mask)
print(seen)
for r in seen.records:
    print(r.shape)
for name, read in (
    ("weights", lambda: seen.layer(0, sequence=1).weights()),
    ("logits", lambda: seen.layer(0, sequence=1).logits()),
    ("attentions", lambda: seen.attentions),
    ("table", lambda: seen.table()),
    ("audit", lambda: seen.audit()),
    ("numpy", lambda: seen.to("numpy").layer(0, sequence=1).weights()),
):
    try:
        read()
        print(f"{name} | ok")
    except Exception as error:  # noqa: BLE001
        print(f"{name} | DEFECT: CRASH {type(error).__name__}: {error}")
