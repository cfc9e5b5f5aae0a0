import torch, regard; from torch import nn
torch.manual_seed(0)
for opt in ({}, {"add_bias_kv": True}, {"add_zero_attn": True}):
    m = nn.MultiheadAttention(12, 3, batch_first=True, **opt).eval(); x = torch.randn(1, 5, 12)
    with torch.no_grad():
        for keys in ([-1], [4]):
            with regard.ablate.knock_out(m, keys=keys), regard.watch(m) as seen: got, w = m(x, x, x, average_attn_weights=False)
            print(opt, "keys", keys, "columns of weight 0:", [j for j in range(w.shape[-1]) if w[..., j].abs().max() == 0], "of", w.shape[-1], "| record:", [j for j in range(seen.records[0].shape[2]) if seen.records[0].weights()[..., j].abs().max() == 0])
class S(nn.Module):
    def __init__(s): super().__init__(); s.sink = nn.Parameter(torch.randn(3)); s.hid = None
    def forward(s, q, k, v):
        a = q @ k.mT / 2
        if s.hid is not None: a[..., s.hid] = -torch.inf
        return torch.cat([a, s.sink.view(1, 3, 1, 1).expand(1, 3, 5, 1)], -1).softmax(-1)[..., :-1] @ v
m = S(); q = torch.randn(3, 1, 3, 5, 4).unbind(0)
for keys in ([-1], [4]):
    m.hid = None
    try:
        with torch.no_grad(), regard.ablate.knock_out(m, keys=keys): got = m(*q)
        m.hid = 4; print("sink last", keys, "off by", float((got - m(*q)).abs().max().detach()))
    except Exception as e: print("sink", keys, str(e)[:100])
