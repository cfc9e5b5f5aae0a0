"""Under torch.inference_mode(), a watch and an ablation run the kernels of the model.

Operators arrive whole there and are taken apart. Every case runs in a process of its
own group, because torch kills the process if it is asked for a kernel it does not have.
"""

import pytest

RUN = """
import copy, json, sys, warnings
import torch
import regard
from contextlib import nullcontext
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

warnings.simplefilter("ignore")


class Function(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, *x):
        return self.run(*x)


class Block(nn.Module):
    def __init__(self, part):
        super().__init__()
        torch.manual_seed(1)
        self.attention, self.part = nn.MultiheadAttention(8, 2, batch_first=True), part

    def forward(self, tokens, *x):
        out, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return out, self.part(*x)


def stats(n):
    return torch.linspace(-1, 1, n), torch.linspace(0.5, 2, n)


def norm(training, x, *given):
    return F.batch_norm(x, *given, training=training)


def quantized(x):
    q = torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)
    weight, (mean, var) = torch.ones(3), stats(3)
    out = torch.ops.quantized.batch_norm2d(q, weight, mean, mean, var, 1e-5, 0.1, 0)
    return out.dequantize()


line, sheet, cube = (torch.randn(2, 3, *[6] * n) for n in (1, 2, 3))
words, rows = torch.randint(0, 5, (2, 6)), torch.randn(2, 6, 8)
long = torch.randn(2, 4, 8, 8, 2).to(memory_format=torch.contiguous_format)
CASES = {
    "norms": [
        (nn.BatchNorm1d(3), line), (nn.BatchNorm1d(8), rows[0]),
        (nn.BatchNorm2d(3), sheet), (nn.BatchNorm3d(3), cube),
        (nn.BatchNorm2d(3, affine=False), sheet),
        (nn.BatchNorm2d(3, track_running_stats=False), sheet),
        (nn.BatchNorm2d(3, momentum=None), sheet),
        (nn.BatchNorm2d(3).to(torch.bfloat16), sheet.bfloat16()),
        (nn.BatchNorm2d(3), sheet.to(memory_format=torch.channels_last)),
        (nn.SyncBatchNorm(3).eval(), sheet),
        (nn.InstanceNorm1d(3), line), (nn.InstanceNorm2d(3, affine=True), sheet),
        (nn.InstanceNorm3d(3, affine=True, track_running_stats=True), cube),
        (nn.GroupNorm(3, 3), sheet), (nn.LayerNorm(8), rows), (nn.RMSNorm(8), rows),
        (nn.LocalResponseNorm(2), sheet),
    ],
    "functions": [
        (lambda *x: norm(True, *x), sheet, *stats(3)),
        (lambda *x: norm(False, *x), sheet, *stats(3)),
        (lambda x: norm(True, x, None, None), sheet),
        (lambda *x: F.instance_norm(*x), sheet, *stats(3)),
        (lambda *x: torch.native_batch_norm(x[0], None, None, *x[1:], True, 0.1, 1e-5),
         sheet, *stats(3)),
        (lambda *x: torch.ops.aten._native_batch_norm_legit(
            x[0], None, None, *x[1:], True, 0.1, 1e-5), sheet, *stats(3)),
        (lambda *x: torch.ops.aten._batch_norm_with_update(
            x[0], None, None, *x[1:], 0.1, 1e-5), sheet, *stats(3)),
        (quantized, sheet),
        *((lambda x, mode=mode: F.interpolate(x, scale_factor=1.5, mode=mode), x)
          for mode in ("nearest", "nearest-exact") for x in (line, sheet, cube)),
        (lambda x: F.interpolate(x, 4, mode="bicubic", antialias=True), sheet),
        (lambda x: F.rrelu(x, training=True, inplace=True), line),
        (lambda x: F.dropout(x, 0.5, True, True), line),
        (lambda x: F.feature_alpha_dropout(x, 0.5, True), sheet),
        (lambda x: F.celu_(F.hardtanh_(F.silu(x, inplace=True))), line),
        (lambda x, y: x.addmm_(y, y.mT), torch.ones(6, 6), rows[0].clone()),
        (lambda x: F.embedding(x, torch.ones(5, 4), max_norm=0.5), words),
        (lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255), line),
        (lambda x: torch.softmax(x, -1, out=torch.empty_like(x)), line),
        (lambda x: F.gumbel_softmax(x, hard=True), line),
    ],
    "modules": [
        (nn.RReLU(inplace=True), line), (nn.Dropout(0.5, inplace=True), line),
        (nn.AlphaDropout(), line), (nn.Dropout2d(), sheet),
        *((kind(8, 4, 2, bidirectional=True, batch_first=True, dropout=0.1), rows)
          for kind in (nn.RNN, nn.LSTM, nn.GRU)),
        (nn.LSTMCell(8, 4), rows[0]), (nn.GRUCell(8, 4), rows[0]),
        (nn.RNNCell(8, 4), rows[0]),
        *((nn.EmbeddingBag(5, 4, mode=mode, max_norm=1.0), words)
          for mode in ("sum", "mean", "max")),
        (nn.Embedding(5, 4, max_norm=0.1), words), (nn.Conv2d(3, 4, 3), sheet),
        (nn.ConvTranspose2d(3, 4, 3), sheet), (nn.Bilinear(8, 8, 3), rows, rows),
        (nn.MaxPool2d(2, return_indices=True), sheet), (nn.FractionalMaxPool2d(2, 3), sheet),
        (nn.AdaptiveAvgPool2d(2), sheet), (nn.PixelShuffle(2), long[..., 0]),
        (nn.ChannelShuffle(2), long[..., 0]), (nn.PReLU(), line),
        (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), rows),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), rows),
    ],
}


def run(part, x, mode):
    part, x = copy.deepcopy(part), [y.clone() for y in x]
    model = Block(part)
    around = {
        "plain": nullcontext,
        "watch": lambda: regard.watch(model),
        "knock_out": lambda: regard.knock_out(model, [("attention", 0)]),
    }
    torch.manual_seed(0)
    with torch.inference_mode(), around[mode]():
        attended, out = model(tokens, *x)
    parts = [out, x, dict(part.state_dict()), torch.get_rng_state()]
    return [write(y) for y in tree_leaves(parts)], write(attended)


def write(x):
    if not isinstance(x, torch.Tensor):
        return repr(x)
    bits = x.detach().contiguous().flatten().view(torch.uint8).tolist()
    return [str(x.dtype), list(x.shape), list(x.stride()), bits]


torch.manual_seed(0)
tokens, wrong, cases = torch.randn(1, 4, 8), [], CASES[sys.argv[1]]
for number, (part, *x) in enumerate(cases):
    part = part if isinstance(part, nn.Module) else Function(part)
    for training in {False, part.training}:  # SyncBatchNorm trains in a process group
        part.train(training)
        plain, attended = run(part, x, "plain")
        for mode in ("watch",) if training else ("watch", "knock_out"):
            print(number, training, mode, file=sys.stderr, flush=True)
            found, other = run(part, x, mode)
            if plain != found or (mode == "watch") != (attended == other):
                wrong.append([number, training, mode])
print(json.dumps({"wrong": wrong, "cases": len(cases)}))
"""


@pytest.mark.parametrize("group", ["norms", "functions", "modules"])
def test_outputs_and_running_statistics_are_the_same_bits(group, run_apart):
    result = run_apart(RUN, group)
    assert result["wrong"] == []
    assert result["cases"] >= 17
