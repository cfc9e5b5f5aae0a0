"""Costs: every formula against what torch builds, multiplies and keeps."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from regard.definition.attention import Attended
from regard.engine import tiles
from regard.errors import OptionError
from regard.masks.formula import evaluate
from regard.nn import attention
from regard.nn.cache import Cache
from regard.nn.decoder import CausalTransformer
from regard.plain import cost
from regard.plain.config import Config
from regard.plain.cost import (
    activation_bytes,
    cache_bytes,
    forward_flops,
    parameters,
    training_flops,
)

GPT2 = Config(vocabulary=50_257, context=1_024, width=768, layers=12, heads=12)
SMOLLM2 = Config(
    vocabulary=49_152,
    context=8_192,
    width=576,
    layers=30,
    heads=9,
    kv_heads=3,
    hidden=1_536,
    activation="swiglu",
    norm="rms",
    position="rotary",
    base=100_000.0,
    bias=False,
)
TINY = Config(vocabulary=101, context=640, width=48, layers=2, heads=4)


def draw_config(seed):
    """Draw any configuration at all, but a small one."""
    rng = np.random.default_rng(seed)

    def pick(*options):
        return options[rng.integers(len(options))]

    heads = pick(1, 2, 4, 6)
    return Config(
        vocabulary=int(rng.integers(5, 200)),
        context=int(rng.integers(32, 100)),
        width=heads * 2 * int(rng.integers(2, 9)),
        layers=int(rng.integers(1, 4)),
        heads=heads,
        kv_heads=pick(*(k for k in range(heads + 1) if not k or heads % k == 0)),
        head_width=pick(0, 0, 2, 10),
        hidden=pick(0, 7, 50),
        activation=pick("relu", "gelu", "gelu_tanh", "swiglu"),
        norm=pick("layer", "rms"),
        norm_first=pick(True, False),
        position=pick("learned", "sinusoidal", "rotary", "none"),
        bias=pick(True, False),
        qkv_bias=pick(None, True, False),
        qk_norm=pick(True, False),
        tied=pick(True, False),
    )


def part_of(name):
    """Return the part of a cost that a weight belongs to."""
    if "norm" in name:
        return "norms"
    first = name.removeprefix("blocks.").lstrip("0123456789.").split(".")[0]
    parts = {"attention": "projections", "feed": "feed-forward", "head": "head"}
    return parts.get(first, "embedding")


@pytest.mark.parametrize("config", [*map(draw_config, range(40)), SMOLLM2, GPT2])
def test_parameters_are_those_of_the_config_and_of_the_module(config):
    found = parameters(config)
    sums = dict.fromkeys(cost.PARTS, 0)
    for name, shape in config.shapes():
        sums[part_of(name)] += np.prod(shape)
    assert {part: found[part] for part in cost.PARTS} == sums
    with torch.device("meta"):
        model = CausalTransformer(config)
    assert found.total == sum(weight.numel() for weight in model.parameters())


def test_parameters_of_known_models_are_the_published_ones():
    assert parameters(SMOLLM2).total == 134_515_008
    assert parameters(GPT2).total == 124_439_808


# FlopCounterMode does not know the fused kernel for CPUs and would count it as nothing.
# It gets torch's own textbook formulas, those of the fused kernels for GPUs.
KERNEL = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda q, k, v, *rest, **options: sdpa_flop_count(q, k, v)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *rest, **options: sdpa_backward_flop_count(grad, q, k, v)
    ),
}


def count_flops(config, n, batch):
    """Return the FLOPs that torch counts, forward and in all, on arrays without data."""
    with FakeTensorMode():
        model = CausalTransformer(config)
        with FlopCounterMode(display=False, custom_mapping=KERNEL) as counter:
            logits = model(torch.zeros(batch, n, dtype=torch.int64))
            forward = counter.get_total_flops()
            logits.sum().backward()
        return forward, counter.get_total_flops()


def attend_by_the_book(q, k, v, mask, *, q_start=None, edit=None):
    """Compute causal attention by two products and a softmax."""
    (b, h, n, d), shared = q.shape, k.shape[1]
    grouped = q.reshape(b, shared, -1, d)  # the queries of a group, one after another
    bias = torch.full((n, n), -torch.inf).triu(1).repeat(h // shared, 1)
    weights = F.softmax(grouped @ k.mT * d**-0.5 + bias, -1)
    return Attended((weights @ v).reshape(b, h, n, d), None)


@pytest.fixture
def by_the_book(monkeypatch):
    monkeypatch.setattr(attention, "attend", attend_by_the_book)


@pytest.mark.parametrize("seed", range(12))
def test_flops_are_those_torch_counts(seed):
    config = draw_config(seed)
    forward, both = count_flops(config, 20, batch=3)
    assert forward_flops(config, 20, batch=3).total == pytest.approx(forward, rel=1e-3)
    assert training_flops(config, 20, batch=3).total == pytest.approx(both, rel=1e-3)


def test_flops_of_smollm2_are_those_torch_counts():
    forward, both = count_flops(SMOLLM2, 512, batch=2)
    assert forward_flops(SMOLLM2, 512, batch=2).total == forward == 311_653_564_416
    assert training_flops(SMOLLM2, 512, batch=2).total == both


@pytest.mark.parametrize("seed", range(12))
def test_flops_of_explicit_products_are_counted_without_help(seed, by_the_book):
    config = draw_config(seed)
    forward, both = count_flops(config, 20, batch=3)
    assert forward_flops(config, 20, batch=3).total == pytest.approx(forward, rel=1e-3)
    found = training_flops(config, 20, batch=3, attention="textbook")
    assert found.total == pytest.approx(both, rel=1e-3)


def test_attention_by_the_book_is_the_attention_of_the_model(monkeypatch):
    model = CausalTransformer(replace(TINY, kv_heads=2, position="rotary"))
    tokens = torch.arange(24).reshape(2, 12)
    logits = model(tokens)
    monkeypatch.setattr(attention, "attend", attend_by_the_book)
    torch.testing.assert_close(model(tokens), logits)


@pytest.mark.parametrize("window", [None, 1, 7, 20, 99])
def test_causal_flops_count_the_pairs_under_the_mask(window):
    config = replace(TINY, window=window)
    mask = CausalTransformer(config).masks[0]
    pairs = int(evaluate(mask, (20, 20), q_start=0, like=np.zeros(0)).sum())
    per_pair = 2 * 2 * config.layers * config.heads * config.head
    found = forward_flops(config, 20, batch=3, causal=True)
    assert found["attention"] == 3 * per_pair * pairs
    square = forward_flops(config, 20, batch=3)
    assert square["attention"] == 3 * per_pair * 20 * 20
    assert found.total - found["attention"] == square.total - square["attention"]
    steps = training_flops(config, 20, batch=3, causal=True)
    assert steps["attention"] == 3 * per_pair * pairs * 7 // 2


def test_the_tiles_of_a_window_cost_between_its_pairs_and_the_square():
    config = replace(TINY, window=100)
    forward, _ = count_flops(config, 600, batch=1)
    least, most = (forward_flops(config, 600, causal=c).total for c in (True, False))
    assert least < forward < most


def measure_kept(config, n, *, batch=2, dtype=torch.float32, loss=False):
    """Return the bytes of all arrays that autograd keeps, weights and tables aside."""
    model = CausalTransformer(config).to(dtype)
    own = [x.untyped_storage() for x in (*model.parameters(), *model.buffers())]
    known = {storage.data_ptr() for storage in own}
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    tokens = torch.randint(config.vocabulary, (batch, n))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        logits = model(tokens)
        if loss:
            F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    return sum(kept[at].nbytes() for at in kept.keys() - known)


KINDS = {
    "layer norm, gelu": TINY,
    "rms norm": replace(TINY, norm="rms"),
    "relu": replace(TINY, activation="relu"),
    "swiglu": replace(TINY, activation="swiglu", bias=False),
    "rotary": replace(TINY, position="rotary"),
    "rotary, shared keys": replace(TINY, position="rotary", kv_heads=2),
    "norms of q and k": replace(TINY, qk_norm=True, kv_heads=1),
    "llama": replace(SMOLLM2, vocabulary=64, width=72, hidden=192, layers=3),
    "2017": replace(TINY, norm_first=False, position="sinusoidal", activation="relu"),
    "one head": replace(TINY, heads=1, position="rotary"),
    "window": replace(TINY, window=9),
}


@pytest.mark.parametrize("config", [*KINDS.values(), *map(draw_config, range(20))])
def test_activations_are_what_autograd_keeps(config):
    found = activation_bytes(config, 30, batch=2).total
    assert found == pytest.approx(measure_kept(config, 30), rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_activations_in_half_precision_are_what_autograd_keeps(kind):
    kept = measure_kept(KINDS[kind], 30, dtype=torch.bfloat16)
    found = activation_bytes(KINDS[kind], 30, batch=2, bytes_per_number=2)
    assert found.total == pytest.approx(kept, rel=0.01)


def test_activations_under_a_window_know_the_strips_of_the_engine():
    assert cost.STRIP == tiles.ROWS
    config = replace(TINY, window=100)
    for n in (256, 257):
        found = activation_bytes(config, n, batch=2).total
        assert found == pytest.approx(measure_kept(config, n), rel=0.01)


def test_the_loss_keeps_the_log_probabilities():
    alone, kept = (activation_bytes(TINY, 30, batch=2, loss=x) for x in (False, True))
    assert kept["loss"] == 4 * 2 * 30 * 101 == kept.total - alone.total
    measured = measure_kept(TINY, 30, loss=True)
    assert kept.total == pytest.approx(measured, rel=0.001)


@pytest.mark.parametrize("kind", ["layer norm, gelu", "rotary, shared keys", "llama"])
def test_textbook_attention_keeps_the_square(kind, by_the_book):
    config, n = KINDS[kind], 200
    found = activation_bytes(config, n, batch=1, attention="textbook")
    assert found.total == pytest.approx(measure_kept(config, n, batch=1), rel=0.01)
    square = 4 * config.layers * config.heads * n * n
    assert square < found["attention"] < found.total < 2.5 * square


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("config", [*map(draw_config, range(5)), KINDS["llama"]])
def test_the_cache_takes_the_bytes_of_its_arrays(config, dtype):
    cache = Cache(config, 3, 17, dtype=dtype)
    size = dtype.itemsize
    found = cache_bytes(config, 17, batch=3, bytes_per_number=size)
    assert found.total == cache.k.nbytes + cache.v.nbytes


def list_costs(config):
    """Return every kind of cost, with the numbers of its letters."""
    options = {"n": 30, "batch": 2}
    return [
        parameters(config),
        forward_flops(config, **options),
        forward_flops(config, **options, causal=True),
        training_flops(config, **options),
        training_flops(config, **options, causal=True, attention="textbook"),
        cache_bytes(config, **options, bytes_per_number=4),
        activation_bytes(config, **options, loss=True),
        activation_bytes(config, **options, attention="textbook"),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_printed_formulas_give_the_printed_numbers(seed):
    config = replace(draw_config(seed), window=[None, 8][seed % 2])
    letters = {
        "V": config.vocabulary,
        "C": config.context,
        "D": config.width,
        "L": config.layers,
        "H": config.heads,
        "Hk": config.kv_heads or config.heads,
        "d": config.head_width or config.width // config.heads,
        "F": config.hidden or 4 * config.width,
        "N": 30,
        "B": 2,
        "W": config.window or 30,
        "s": 4,
        "w": 4,
    }
    for found in list_costs(config):
        _, head, *lines = str(found).splitlines()
        start, end = head.index("formula"), head.index("value") + len("value")
        values = []
        for line in lines[: len(found.rows)]:
            formula, value = line[start:end].rsplit(maxsplit=1)
            factors = re.sub(r"([\w)]) (?=[\w(])", r"\1*", formula.strip())
            values.append(int(value.replace(",", "")))
            assert values[-1] == eval(factors, letters.copy()), line
        total, number = lines[len(found.rows)].split()
        assert (total, number) == ("total", f"{sum(values):,}")
        assert sum(values) == found.total


def test_a_legend_names_every_letter_and_no_other():
    text = str(cache_bytes(SMOLLM2, 100))
    assert text.endswith(
        "L=30 layers, Hk=3 heads of keys, d=64 width of a head, N=100 tokens, B=1\n"
        "batch, s=2 bytes of a number"
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: forward_flops(TINY, 0), "n=0, expected an integer of at least 1"),
        (lambda: cache_bytes(TINY, 5, batch=-1), "batch=-1, expected an integer"),
        (lambda: cache_bytes(TINY, 2.5), "n=2.5, expected an integer"),
        (
            lambda: training_flops(TINY, 5, attention="flash"),
            "attention='flash', expected 'fused' or 'textbook'",
        ),
        (
            lambda: activation_bytes(replace(TINY, dropout=0.1), 5),
            "dropout=0.1: memory used by dropout is not counted. Write activation_bytes",
        ),
        (lambda: parameters(TINY)["feed"], "no part 'feed', expected one of embedding"),
    ],
)
def test_what_cannot_be_counted_is_refused_in_words(call, words):
    with pytest.raises(OptionError, match=re.escape(words)):
        call()
