"""The lens: the same bits, nothing missed, nothing left behind."""

import copy
import gc
import sys
import threading
import weakref
from collections import Counter, OrderedDict
from contextlib import nullcontext
from fnmatch import fnmatchcase

import numpy as np
import pytest
import torch
import transformers
from families import FAMILIES, quiet
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import _get_current_function_mode_stack as list_modes
from torch.utils.checkpoint import checkpoint
from transformers.models.llama import modeling_llama

from regard.errors import OptionError
from regard.lens.check_rebuild import find_largest_difference
from regard.lens.mask_store import MaskStore
from regard.nn.decoder import CausalTransformer
from regard.nn.generation import generate
from regard.plain.config import Config
from regard.run.given import read_valid
from regard.seen import open_seen, watch

BLIND = {"reformer", "written-hidden"}  # no softmax, no kernel: named, not seen
LISTS = (list, tuple, type({}.values()), type(OrderedDict().values()))
REPORTED = {"longformer"}  # its softmax runs over a band, not over all keys
MANY = {"bigbird"}  # five softmaxes over blocks for one attention; the middle is named
LINEAR = {"qwen3-next"}  # some layers attend without a softmax: these are named
BY_HAND = "its weights are computed by exp, not by a softmax"
SILENT = "it ran, but no softmax was heard in it"
ROUTER = "no matrix product takes its result"


def flatten(x):
    """Return every tensor of an output."""
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, dict):
        x = x.values()
    return [y for part in x for y in flatten(part)] if isinstance(x, LISTS) else []


def run(model, inputs, seed=1):
    torch.manual_seed(seed)
    with torch.no_grad():
        return flatten(model(**inputs))


@pytest.mark.parametrize("name", FAMILIES)
def test_looking_changes_no_bit_and_misses_no_call(name):
    family = FAMILIES[name]
    model, inputs = family.build()
    before = run(model, inputs)
    with watch(model) as seen:
        after = run(model, inputs)
    assert len(before) == len(after)
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x.nan_to_num(), y.nan_to_num())
    found = [x for x in seen.coverage() if x.attention]
    others = [x for x in seen.coverage() if not x.attention]
    assert {x.reason for x in others} <= {ROUTER}
    assert all(x.calls and not x.kept and x.name not in seen.layers for x in others)
    if name in BLIND:
        assert {x.reason for x in found} == {BY_HAND}
        return
    if name in LINEAR:
        silent = [x for x in found if x.reason == SILENT]
        assert silent
        assert all(x.name.endswith("linear_attn") for x in silent)
        found = [x for x in found if x not in silent]
    if name in REPORTED | MANY:
        assert all(x.calls == 1 and x.kept == (not x.reason) for x in found)
        assert {x.name.partition("#")[0] for x in found} == set(family.layers)
        assert set(seen.layers) == {x.name for x in found if x.kept}
        assert len(found) == len(family.layers) * (5 if name in MANY else 1)
        return
    assert [x.reason for x in found if x.reason] == []
    assert [(x.calls, x.kept) for x in found] == [(1, 1)] * len(family.layers)
    assert [x.name for x in found] == number_layers(family.layers)


def number_layers(layers):
    """Return the layers of calls: a module that attends again is name#2, name#3, …"""
    counts, names = Counter(), []
    for name in layers:
        counts[name] += 1
        names.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return names


SAME = [n for n, f in FAMILIES.items() if f.eager and n not in BLIND | REPORTED | MANY]


@pytest.mark.parametrize("name", SAME)
def test_the_weights_are_those_of_the_models_own_eager_attention(name):
    family = FAMILIES[name]
    model, inputs = family.build()
    expected = family.eager(model, inputs)
    with watch(model) as seen:
        run(model, inputs)
    errors, layers = {}, number_layers(family.layers)
    assert set(seen.layers) == set(layers)
    for theirs, layer in zip(expected, layers, strict=True):
        own = [r for r in seen.recording.records if r.name == layer]
        for b, (record, row) in enumerate(zip(own, theirs, strict=True)):
            errors[layer, b] = compare(record.weights(), row, record)
    assert {at: error for at, error in errors.items() if not error < 1e-5} == {}


def compare(mine, theirs, record):
    """Return the largest difference where the record has rows and keys."""
    n_q, n_k = theirs.shape[-2:]
    q, k = record.q_positions, record.k_positions
    for rows, keys in ((q, k), (q + n_q - len(q), k + n_k - len(k))):
        if int(rows.max()) < n_q and int(keys.max()) < n_k:
            other = theirs[:, rows][..., keys]
            error = float((mine - other).abs().max())
            if error < 1e-5:
                return error
    return error


def make_llama(kind="Llama", **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **options,
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def draw_tokens(*shape):
    return torch.randint(5, 90, shape, generator=torch.Generator().manual_seed(0))


NO_BACKWARD = {"flex", "flex-capped"}  # torch has none on a CPU
UNEQUAL = {"reformer"}  # seeds itself anew in training: no two runs are the same


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - NO_BACKWARD - UNEQUAL))
def test_a_training_step_has_the_same_gradients(name):
    grads = []
    for look in (False, True):
        model, inputs = FAMILIES[name].build()
        model.train()
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002 (some models draw from it)
        with quiet(), watch(model) if look else nullcontext():
            found = flatten(model(**inputs))
            sum(x.float().sum() for x in found if x.requires_grad).backward()
        parameters = model.named_parameters()
        grads.append(
            {n: x.grad.nan_to_num() for n, x in parameters if x.grad is not None}
        )
    assert len(grads[0]) > 1
    assert grads[0].keys() == grads[1].keys()
    assert [n for n, x in grads[0].items() if not torch.equal(x, grads[1][n])] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_is_called_ill_and_all_say_the_same_when_watched(name):
    model, inputs = FAMILIES[name].build()
    with quiet(), watch(model) as seen:
        run(model, inputs)
    errors = [x for x in seen.audit() if x.level == "error"] if seen.records else []
    assert errors == []
    if not getattr(model, "can_generate", lambda: False)():
        return
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    with quiet():
        before = model.generate(**inputs, **options, pad_token_id=0)
        with watch(model):
            after = model.generate(**inputs, **options, pad_token_id=0)
    before, after = (getattr(x, "sequences", x) for x in (before, after))
    assert torch.equal(before, after)


def has_fused_groups():
    """Return whether SDPA has a fused kernel for heads that share keys: not torch 2.6."""
    q, k = torch.ones(1, 4, 2, 8), torch.ones(1, 2, 2, 8)
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_generation_is_one_record_of_the_final_sequence(padded, cache, kernel):
    if kernel == SDPBackend.FLASH_ATTENTION and not has_fused_groups():
        pytest.skip("torch 2.6 has no fused kernel for grouped heads")
    with sdpa_kernel(kernel):
        check_generation(padded, cache)


def check_generation(padded, cache):
    model, tokens = make_llama(), draw_tokens(2, 12)
    valid = torch.ones_like(tokens)
    if padded:
        valid[1, :4] = 0
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    options |= {"attention_mask": valid, "pad_token_id": 0}
    options |= {"cache_implementation": cache}
    plain = model.generate(tokens, **options)
    with watch(model) as seen:
        watched = model.generate(tokens, **options)
    assert torch.equal(plain, watched)
    for b in range(2):
        text = plain[b][4:] if padded and b == 1 else plain[b]
        text = text[:-1]  # the last token was never read
        assert seen.recording.tokens[b] == tuple(text.tolist())
        with watch(model) as whole, torch.no_grad():
            model(text[None])
        for layer in range(2):
            mine, once = seen.layer(layer, sequence=b), whole.layer(layer)
            assert str(mine.mask) == "causal()"
            assert mine.q_positions.tolist() == list(range(len(text)))
            torch.testing.assert_close(mine.q, once.q, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(mine.k, once.k, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(mine.lse, once.lse, atol=1e-5, rtol=1e-5)


def test_a_generation_of_our_own_model_knows_its_tokens():
    torch.manual_seed(0)
    sizes = {"vocabulary": 32, "context": 32, "width": 16, "layers": 2, "heads": 4}
    model = CausalTransformer(Config(**sizes)).eval()
    with watch(model) as seen:
        new = generate(model, [[1, 2, 3], [4, 5, 6]], 4)
    expected = [
        [1, 2, 3, *new[0][:-1]],
        [4, 5, 6, *new[1][:-1]],
    ]  # the last is not read
    assert [list(row) for row in seen.recording.tokens] == expected
    assert np.isfinite(seen.table().rows["previous"]).all()


WINDOWS = {
    "mistral": ("Mistral", {"sliding_window": 5}),
    "gemma2": ("Gemma2", {"sliding_window": 5, "head_dim": 8}),
    "gpt-oss": (
        "GptOss",
        {
            "sliding_window": 5,
            "head_dim": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [0, 2, 6])
@pytest.mark.parametrize("length", [3, 5, 12])
@pytest.mark.parametrize("name", WINDOWS)
def test_a_cache_that_forgets_is_one_record_too(name, length, padded, cache):
    kind, more = WINDOWS[name]
    model, tokens = make_llama(kind, **more), draw_tokens(2, length)
    padded = min(padded, length - 1)
    valid = torch.ones_like(tokens)
    valid[1, :padded] = 0
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    options |= {"attention_mask": valid, "pad_token_id": 0}
    options |= {"cache_implementation": cache}
    plain = model.generate(tokens, **options)
    with watch(model, keep="qkv") as seen:
        watched = model.generate(tokens, **options)
    assert torch.equal(plain, watched)
    assert len(seen.recording.records) == 4
    for b in range(2):
        text = plain[b][padded * b : -1]
        assert seen.recording.tokens[b] == tuple(text.tolist())
        with watch(model, keep="qkv") as whole, torch.no_grad():
            model(text[None])
        for layer in range(2):
            mine, once = seen.layer(layer, sequence=b), whole.layer(layer)
            assert str(mine.mask) == str(once.mask)
            assert torch.equal(mine.q_positions, once.q_positions)
            assert torch.equal(mine.k_positions, once.k_positions)
            for field in ("q", "k", "v", "lse"):
                one, other = getattr(mine, field), getattr(once, field)
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_model_in_float64_is_seen_in_float64():
    model, tokens = make_llama().double(), draw_tokens(2, 12)
    with torch.no_grad():
        plain = model(tokens).logits
        with watch(model) as seen:
            watched = model(tokens).logits
    assert torch.equal(plain, watched)
    assert all(x.via and x.error < 1e-12 for x in seen.coverage())
    record = seen.layer(1)
    total = record.weights().sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total), atol=1e-12, rtol=0)


class Bare(nn.Module):
    """Attention and nothing else."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v, mask=None):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)


def test_rows_that_see_nothing_have_an_lse_of_minus_infinity():
    q, k, v = torch.randn(3, 1, 2, 6, 8, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(6, 6, dtype=torch.bool).tril(-1)
    model = Bare()
    with watch(model) as seen:
        model(q, k, v, mask)
    record = seen.layer(0)
    assert bool((record.lse[:, 0] == -torch.inf).all())
    assert bool(record.lse[:, 1:].isfinite().all())
    assert record.q_positions.tolist() == record.k_positions.tolist() == list(range(6))
    assert not bool(record.weights()[:, 0].any())


def watch_blind_rows(lowest):
    """Watch a kernel whose mask hides all keys of two rows with a number."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 5, 8) for h in (4, 2, 2))
    mask = torch.zeros(2, 1, 5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), lowest)
    mask[1, :, :2] = lowest  # rows of padding, whose keys nobody sees
    mask[1, :, :, :2] = lowest
    model = Bare(enable_gqa=True)
    with watch(model) as seen:
        model(q, k, v, mask)
    logits = q @ k.repeat_interleave(2, 1).mT * 8**-0.5 + mask
    return seen, torch.softmax(logits.double(), -1)


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -1e30])
def test_rows_that_hide_all_keys_with_a_number_average_in_a_kernel(lowest):
    seen, truth = watch_blind_rows(lowest)
    (entry,) = seen.recording.coverage
    assert (entry.kept, entry.reason) == (1, "")
    assert "average" in entry.note
    for record, weights in zip(seen.recording.records, truth, strict=True):
        assert (record.weights() - weights).abs().max() < 1e-5


def test_rows_that_hide_all_keys_average_after_their_maximum_is_subtracted():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 8) for _ in range(3))
    mask = torch.zeros(2, 1, 5, 5)
    mask[1, :, :2] = torch.finfo(mask.dtype).min

    class Subtracts(nn.Module):
        def forward(self, q):
            scores = q @ k.mT * 8**-0.5 + mask
            scores = scores - scores.max(-1, keepdim=True).values
            self.weights = scores.softmax(-1)
            return self.weights @ v

    model = Subtracts()
    with watch(model) as seen:
        model(q)
    assert "stored as logits" not in seen.recording.coverage[0].note
    for record, weights in zip(seen.recording.records, model.weights, strict=True):
        assert (record.weights() - weights).abs().max() < 1e-5


def test_rows_whose_scores_lose_some_bits_are_reported():
    seen, truth = watch_blind_rows(-1e4)  # scores beside it are rounded to 1e-3
    if not has_fused_groups():  # a softmax ran, and its scores were taken
        for record, weights in zip(seen.recording.records, truth, strict=True):
            assert (record.weights() - weights).abs().max() < 1e-3
        return
    assert [x.kept for x in seen.recording.coverage] == [0]
    assert seen.recording.coverage[0].reason == "its output could not be rebuilt"


def test_what_is_kept_is_not_a_view_of_something_large():
    large = torch.randn(3, 1, 2, 4000, 8, generator=torch.Generator().manual_seed(1))
    q, k, v = large[..., :4, :]
    model = Bare()
    with watch(model) as seen:
        model(q, k, v)
    (record,) = seen.records
    assert torch.equal(record.q, q[0])
    for x in (record.q, record.k, record.lse):
        assert x.untyped_storage().nbytes() <= 1.25 * x.numel() * x.element_size()


def watch_errors(monkeypatch, *errors):
    """Return what is seen of a layer whose calls are rebuilt with these errors."""
    told, module = iter(errors), sys.modules["regard.lens.watch"]
    monkeypatch.setattr(module, "check_rebuild", lambda call: (call, next(told)))
    model, q = Bare(), torch.ones(1, 2, 4, 8)
    with watch(model) as seen:
        for _ in errors:
            model(q, q, q)
    return seen


def test_the_worst_error_of_a_layer_is_told(monkeypatch):
    seen = watch_errors(monkeypatch, 3e-5, 1e-7)
    assert [x.error for x in seen.coverage()] == [3e-5]


def test_nan_is_worse_than_any_error(monkeypatch):
    seen = watch_errors(monkeypatch, torch.nan, 0.5)
    (found,) = seen.coverage()
    assert np.isnan(found.error)
    assert found.reason == "its output could not be rebuilt"
    assert found.kept == 0
    assert [x.what for x in seen.audit()] == ["not finite"]
    assert str(seen).splitlines() == [
        "Bare: 0 of 1 attention layers seen, 0 sequences",
        "  the model itself: sdpa, 2 calls, error nan its output could not be rebuilt",
    ]


def test_nan_in_one_of_two_outputs_is_a_difference():
    one, nan = torch.ones(3), torch.tensor([1.0, torch.nan, 1.0])
    assert np.isnan(find_largest_difference(one, nan))
    assert np.isnan(find_largest_difference(nan, one))
    assert find_largest_difference(nan, nan) == 0


@pytest.mark.parametrize("axes", [3, 4])
def test_a_kernel_counts_from_the_first_key_whatever_its_axes(axes):
    q, k = (torch.randn(2, n, 8, generator=torch.manual_seed(n)) for n in (2, 4))
    causal = torch.ones(2, 4, dtype=torch.bool).tril()
    expected = (q @ k.mT / 8**0.5).masked_fill(~causal, -torch.inf).softmax(-1)
    model = Bare(is_causal=True)
    with watch(model) as seen:
        model(*((x[None] if axes == 4 else x) for x in (q, k, k)))
    # torch 2.13 decomposes what has three axes
    ways = ("sdpa",) if axes == 4 else ("sdpa", "softmax")
    line = str(seen).splitlines()[1]
    assert line.startswith(tuple(f"  the model itself: {x}, 1 call, e" for x in ways))
    found = torch.cat([x.weights() for x in seen.records])  # three: heads or a batch
    n_k = found.shape[-1]  # keys that no row reaches need not be kept
    assert n_k >= 2
    assert not bool(expected[..., n_k:].any())
    assert float((found - expected[..., :n_k]).abs().max()) < 1e-6


class Masked(nn.Module):
    """Two layers, the mask of each made by a function when it is needed."""

    def __init__(self, *makers):
        super().__init__()
        self.layers, self.makers = nn.ModuleList([Bare(), Bare()]), makers

    def forward(self, q):
        for layer, make in zip(self.layers, self.makers, strict=True):
            q = layer(q, q, q, make())
        return q


def check_masks(model, q, masks):
    """Watch a model; assert that the layers have these masks (2, H or 1, Nq, Nk)."""
    with watch(model) as seen:
        model(q)
    for record, mask in zip(seen.records, masks, strict=True):
        assert torch.equal(record.weights() > 0, mask.expand(q.shape[1], -1, -1))


def test_a_mask_that_is_written_over_between_two_layers_is_another():
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    early, late = (
        torch.zeros(5, 5).masked_fill(~x, -torch.inf) for x in (causal, causal.mT)
    )
    mask, q = early.clone(), torch.randn(1, 2, 5, 8, generator=torch.manual_seed(0))
    model = Masked(lambda: mask, lambda: mask.copy_(late))
    check_masks(model, q, [causal, causal.mT])


def test_the_address_of_a_mask_does_not_tell_which_one_it_is():
    """A mask that was freed often leaves its address to the next one."""
    causal = np.tril(np.ones((5, 5), bool))
    memory, store = causal.copy(), MaskStore()
    store.keep(torch.from_numpy(memory))
    memory[:] = causal.T
    assert store.keep(torch.from_numpy(memory)).tolist() == causal.T.tolist()


def test_each_head_has_its_own_mask():
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    masks = torch.stack([causal, causal.mT])
    q = torch.randn(1, 2, 5, 8, generator=torch.manual_seed(0))
    check_masks(Masked(lambda: masks[None], lambda: masks[None]), q, [masks, masks])


class Where(nn.Module):
    """Attention whose mask is written with torch.where, on either side."""

    def __init__(self, *, visible):
        super().__init__()
        self.visible = visible

    def forward(self, q, mask):
        scores, low = q @ q.mT, torch.tensor(-torch.inf)
        given = (mask, scores, low) if self.visible else (~mask, low, scores)
        return torch.where(*given).softmax(-1) @ q


@pytest.mark.parametrize("visible", [True, False])
def test_a_mask_by_where_is_read_as_a_mask(visible):
    model, mask = Where(visible=visible), torch.ones(5, 5, dtype=torch.bool).tril()
    with watch(model) as seen:
        model(torch.randn(1, 2, 5, 8, generator=torch.manual_seed(0)), mask)
    (entry,), (record, *_) = seen.coverage(), seen.records
    assert "logits" not in entry.note
    assert str(record.mask) == "causal()"


class Unheard(nn.Module):
    """Attention whose scores are changed by NumPy, which no observer hears."""

    def forward(self, q):
        scores = q @ q.mT
        scores.numpy()[..., 0] += 3
        self.weights = scores.softmax(-1)
        return self.weights @ q


def test_a_formula_that_does_not_give_the_logits_is_not_used():
    model = Unheard()
    with watch(model) as seen, torch.no_grad():
        model(torch.randn(1, 2, 5, 8, generator=torch.manual_seed(0)))
    found = torch.cat([torch.as_tensor(x.weights()) for x in seen.records])
    assert float((found.reshape(2, 5, 5) - model.weights[0]).abs().max()) < 1e-5


class Features(nn.Module):
    """Linear attention: softmaxes over the features of q, and over the tokens of k."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).movedim(-3, 0).transpose(2, 3)
        return q.softmax(-1) @ (k.softmax(-2).mT @ v)


def test_a_softmax_over_features_is_no_attention():
    x = torch.randn(2, 5, 16, generator=torch.manual_seed(0))
    model = Features()
    with watch(model) as seen:
        model(x)
    assert all(x.shape[-1] != 8 for x in (r.weights() for r in seen.records))


@pytest.mark.parametrize("first", [False, True])
def test_the_fast_path_of_an_encoder_is_the_definition(first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=first)
    layer.norm1.weight.data.mul_(3)
    x, padding = torch.randn(2, 6, 16), torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    layer.eval()
    with watch(layer) as seen, torch.no_grad():
        layer(x, src_key_padding_mask=padding)
    with torch.no_grad():
        given = layer.norm1(x) if first else x
        _, dense = layer.self_attn(
            given, given, given, key_padding_mask=padding, average_attn_weights=False
        )
    assert [x.via for x in seen.coverage()] == ["nn.MultiheadAttention"]
    for record, weights in zip(seen.records, dense, strict=True):
        n_q, n_k = record.weights().shape[-2:]
        assert not bool(weights[..., n_k:].any())
        assert float((record.weights() - weights[:, :n_q, :n_k]).abs().max()) < 1e-5


def test_another_text_with_one_more_token_is_a_sequence_of_its_own():
    model = Bare(is_causal=True)
    with watch(model) as seen:
        for n in (5, 6):
            model(*torch.randn(3, 1, 2, n, 8, generator=torch.manual_seed(n)))
    assert [x.q.shape[1] for x in seen.records] == [5, 6]


def test_rows_that_saw_what_is_computed_again_are_not_joined_with_it():
    first, second = (
        torch.randn(1, 2, n, 8, generator=torch.manual_seed(n)) for n in (6, 2)
    )
    keys = torch.cat([first[:, :, :4], second], 2)
    model = Bare()
    with watch(model) as seen:
        model(first, first, first)
        model(second, keys, keys)
    rows = sum(x.q.shape[1] for x in seen.records)
    assert rows == 8
    for record in seen.records:
        total = torch.as_tensor(record.weights()).sum(-1)
        torch.testing.assert_close(total, torch.ones_like(total))


class Across(nn.Module):
    """Two sequences, each with its padding on the left; the mask counts slots."""

    def __init__(self):
        super().__init__()
        self.cross = Bare()

    def forward(self, input_ids, attention_mask, q, k, mask):
        return self.cross(q, k, k, mask & attention_mask[:, None, None].bool())


def test_a_mask_across_sequences_is_read_at_the_positions_of_the_record():
    q, k = torch.randn(2, 1, 2, 6, 8, generator=torch.manual_seed(0))
    valid = torch.tensor([[0, 0, 1, 1, 1, 1]])
    mask = torch.ones(6, 6, dtype=torch.bool).tril()  # row i sees the slots 0 … i
    model = Across()
    with watch(model) as seen:
        model(torch.ones(1, 6).long(), attention_mask=valid, q=q, k=k, mask=mask)
    record = seen.layer(0)
    assert record.q_positions.tolist() == list(range(6))
    assert record.k_positions.tolist() == list(range(4))
    scores = (q[0] @ k[0].mT / 8**0.5).masked_fill(~mask, -torch.inf)[..., 2:]
    expected = scores.softmax(-1).nan_to_num(0)  # two rows see nothing
    assert float((record.weights() - expected).abs().max()) < 1e-6


@pytest.mark.parametrize("keep", ["qk", "qkv"])
def test_a_sequence_of_nothing_but_padding_is_an_empty_record(keep):
    model, tokens = make_llama(), draw_tokens(2, 5)
    valid = torch.tensor([[1] * 5, [0] * 5])
    with watch(model, keep=keep) as seen, torch.no_grad():
        model(tokens, attention_mask=valid)
    assert seen.layer(0, sequence=1).q.shape[1] == 0
    rows = seen.table().rows
    assert np.isfinite(rows["logit"][rows["sequence"] == 0]).all()
    assert np.isnan(rows["logit"][rows["sequence"] == 1]).all()
    whole = {tuple(x.worst) for x in seen.audit(valid=valid.bool())}
    assert whole == {tuple(x.worst) for x in seen.audit()}


def test_a_layer_with_nan_is_kept_as_it_is():
    q, k, v = torch.randn(3, 1, 2, 6, 8, generator=torch.Generator().manual_seed(1))
    q[0, 1, 3] = torch.nan
    model = Bare()
    with watch(model) as seen:
        model(q, k, v)
    (record,) = seen.recording.records
    assert record.lse[1, 3].isnan()
    assert bool(record.lse[0].isfinite().all())


FRONT = {  # shapes in front of q, of k and v, of the mask
    "five axes": ((2, 3, 4), (2, 3, 4), (2, 1, 1)),
    "five axes, a mask of four": ((2, 3, 4), (2, 3, 4), (3, 1)),
    "one query for all": ((1, 4), (2, 4), ()),
    "one text for all": ((2, 4), (1, 4), (1, 1)),
    "one head of queries": ((2, 1), (2, 4), ()),
}


@pytest.mark.parametrize("which", FRONT)
def test_what_torch_widens_is_seen_as_wide(which):
    rng = torch.Generator().manual_seed(0)
    q, k, cells = (
        torch.randn(*lead, 5, n, generator=rng)
        for lead, n in zip(FRONT[which], (8, 8, 5), strict=True)
    )
    mask, model = (cells > -0.5) | torch.eye(5, dtype=torch.bool), Bare()
    with watch(model) as seen:
        out = model(q, k, k, mask)
    expected = (q @ k.mT / 8**0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    expected = expected.reshape(-1, *expected.shape[-3:])
    assert torch.equal(out, model(q, k, k, mask))
    assert len(seen.records) == len(expected)
    for record, theirs in zip(seen.records, expected, strict=True):
        assert float((record.weights() - theirs).abs().max()) < 1e-6


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 2, 0, 8)], ids=str)
def test_a_call_in_which_nobody_looks_is_left_alone(shape):
    model, q = Bare(), torch.zeros(shape)
    k = torch.ones(shape[0], 2, 3, 8)
    with watch(model) as seen:
        assert torch.equal(model(q, k, k), q)
        model(k, k, k)
    assert len(seen.records) == shape[0]
    first, *others = ((x.calls, x.reason) for x in seen.coverage())
    # torch 2.6 runs a softmax for a call without cells
    assert not others or not has_fused_groups()
    assert first == (2, "")


# --- which calls are one sequence -----------------------------------------------------


def read_eager(model, tokens, **inputs):
    """Return what the model itself calls its attentions, from its eager code."""
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        return plain(tokens, **inputs, output_attentions=True, use_cache=False)


def measure_rows(records, attentions, sequence=0):
    """Return how far the weights of some layers are from the model's own."""
    errors = []
    for record, theirs in zip(records, attentions, strict=True):
        q, k = record.q_positions, record.k_positions
        errors.append(record.weights() - theirs[sequence][:, q][..., k])
    return max(float(x.abs().max()) for x in errors)


@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
def test_two_conversations_in_one_watch_are_kept_apart(kind):
    model = make_llama(kind, **({"sliding_window": 4} if kind == "Mistral" else {}))
    texts = [draw_tokens(1, 9), draw_tokens(1, 9).flip(1)]
    caches = [None, None]
    with watch(model) as seen, torch.no_grad():
        for part in (slice(0, 6), *(slice(i, i + 1) for i in (6, 7, 8))):
            for i, text in enumerate(texts):
                done = model(text[:, part], past_key_values=caches[i], use_cache=True)
                caches[i] = done.past_key_values
    assert len(seen.records) == 2 * 2
    for number, text in enumerate(texts):
        own = [seen.layer(i, sequence=number) for i in (0, 1)]
        assert measure_rows(own, read_eager(model, text).attentions) < 1e-6
        assert seen.recording.tokens[number] == tuple(text[0].tolist())


@pytest.mark.parametrize("kind", ["Llama", "Mistral"])  # T5: see test_follow.py
def test_a_beam_search_is_followed_and_never_mixed(kind):
    # Llama has no window, but transformers would give it a cache that has one
    more = {"sliding_window": 4} if kind == "Mistral" else {}
    model, tokens = make_llama(kind, **more), draw_tokens(2, 6)
    options = {"do_sample": False, "max_new_tokens": 8, "num_beams": 3}
    options["attention_mask"] = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    with watch(model) as seen:
        model.generate(tokens, **options)
    assert [x.reason for x in seen.coverage() if x.reason] == []
    assert len(seen.recording.tokens) == 6
    for number, known in enumerate(seen.recording.tokens):
        theirs = read_eager(model, torch.tensor([known])).attentions
        records = [seen.layer(x, sequence=number) for x in seen.layers]
        assert measure_rows(records, theirs) < 1e-5
    with watch(model) as seen:  # all beams are one: nothing changes places
        model.generate(tokens, **options | {"num_beams": 1})
    assert [x.reason for x in seen.coverage() if x.reason] == []


def make_t5():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(
        vocab_size=99, decoder_start_token_id=0, eos_token_id=None, **sizes
    )
    return transformers.T5ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("again", ["pass", "generate", "no cache"])
def test_a_second_run_looks_at_keys_of_its_own(again):
    model, texts = make_t5(), draw_tokens(2, 6).split(1)
    starts = draw_tokens(2, 4).split(1)
    options = {
        "do_sample": False,
        "max_new_tokens": 4,
        "use_cache": again != "no cache",
    }
    with watch(model) as seen, torch.no_grad():
        if again == "pass":
            runs = list(zip(texts, starts, strict=True))
            for text, start in runs:
                model(text, decoder_input_ids=start)
        else:
            runs = [(x, model.generate(x, **options)[:, :-1]) for x in texts]
    for number, (text, start) in enumerate(runs):
        records = [r for r, n in pair_up(seen) if n == number]
        theirs = read_eager(model, text, decoder_input_ids=start)
        for name, attentions in (
            ("decoder.*SelfAttention", theirs.decoder_attentions),
            ("decoder.*EncDecAttention", theirs.cross_attentions),
        ):
            own = [r for r in records if fnmatchcase(r.name, name)]
            assert [r.q.shape[1] for r in own] == [start.shape[1]] * 2
            assert measure_rows(own, attentions) < 1e-6


def pair_up(seen):
    return zip(seen.records, seen.recording.sequences, strict=True)


def test_padding_has_no_position_wherever_it_is():
    model, tokens = make_llama(), draw_tokens(2, 6)
    valid = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 1, 1]])
    with watch(model) as seen:
        model.generate(tokens, attention_mask=valid, do_sample=False, max_new_tokens=3)
    for record, number in pair_up(seen):
        n = len(seen.recording.tokens[number])
        assert n == int(valid[number].sum()) + 2
        assert record.q_positions.tolist() == record.k_positions.tolist()
        assert record.q_positions.tolist() == list(range(n))
        assert float((record.weights().sum(-1) - 1).abs().max()) < 1e-5


def test_a_layer_that_is_used_again_knows_the_tokens_of_its_pass():
    config = transformers.AlbertConfig(
        vocab_size=99,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
    )
    model = transformers.AlbertModel(config).eval()
    texts = draw_tokens(2, 5).split(1)
    valid = [torch.tensor([[1, 1, 1, 0, 0]]), torch.tensor([[1, 1, 1, 1, 0]])]
    with watch(model) as seen, torch.no_grad():
        for text, real in zip(texts, valid, strict=True):
            model(text, attention_mask=real)
    name = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    assert seen.layers == (name, f"{name}#2")
    assert [x.q.shape[1] for x in seen.records] == [3, 3, 4, 4]
    assert seen.recording.sequences == (0, 0, 1, 1)
    expected = [tuple(texts[i][0, : 3 + i].tolist()) for i in (0, 1)]
    assert list(seen.recording.tokens) == expected
    for number, (text, real) in enumerate(zip(texts, valid, strict=True)):
        theirs = read_eager(model, text, attention_mask=real).attentions
        own = [seen.layer(i, sequence=number) for i in (0, 1)]
        assert measure_rows(own, theirs) < 1e-6


def touch():
    """Return everything that the lens may touch."""
    functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    return [
        F.scaled_dot_product_attention,
        nn.MultiheadAttention.forward,
        nn.TransformerEncoder.forward,
        nn.TransformerEncoderLayer.forward,
        modeling_llama.eager_attention_forward,
        functions._local_mapping,
        sys.modules["regard.nn.attention"].attend,
    ]


def count_hooks(model):
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()
    )


class Stop(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, *args, **named):
        raise self.error


@pytest.mark.parametrize("error", [None, RuntimeError("x"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["attention", "with"])
def test_nothing_is_left_behind(error, where):
    model, before, modes = make_llama(), touch(), list_modes()
    own = model.model.layers[1].mlp
    if error is not None and where == "attention":
        model.model.layers[1].mlp = Stop(error)
    try:
        with watch(model):
            if where == "with" and error is not None:
                model(draw_tokens(1, 5))
                raise error
            model(draw_tokens(1, 5))
    except (RuntimeError, KeyboardInterrupt) as caught:
        assert caught is error
    assert all(a is b for a, b in zip(before, touch(), strict=True))
    assert count_hooks(model) == 0
    assert list_modes() == modes
    model.model.layers[1].mlp = own
    assert torch.compiler.is_compiling() is False


def test_two_lenses_see_the_same():
    model, tokens = make_llama(), draw_tokens(1, 8)
    with watch(model) as outer, watch(model) as inner, torch.no_grad():
        model(tokens)
    assert (
        outer.layers
        == inner.layers
        == (
            "model.layers.0.self_attn",
            "model.layers.1.self_attn",
        )
    )
    for layer in range(2):
        assert torch.equal(outer.layer(layer).lse, inner.layer(layer).lse)


def test_threads_are_kept_apart():
    models = [make_llama() for _ in range(2)]
    tokens = [draw_tokens(1, 8), draw_tokens(1, 11)]
    seen, before, turn = [None, None], touch(), threading.Barrier(2)

    def first():
        with watch(models[0]) as seen[0], torch.no_grad():
            turn.wait()  # both look; then the first one ends before the second
            for _ in range(5):
                models[0](tokens[0])
        turn.wait()

    def last():
        with watch(models[1]) as seen[1], torch.no_grad():
            turn.wait()
            turn.wait()
            for _ in range(5):
                models[1](tokens[1])

    threads = [threading.Thread(target=work) for work in (first, last)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(a is b for a, b in zip(before, touch(), strict=True))
    for i, n in enumerate((8, 11)):
        assert {x.calls for x in seen[i].coverage()} == {5}
        assert {r.q.shape[1] for r in seen[i].recording.records} == {n}


def test_one_model_in_two_threads_gives_two_sequences():
    model, turn = make_llama(), threading.Barrier(2)
    tokens = [draw_tokens(1, 8), draw_tokens(1, 11)]
    rounds = 6

    def meet(*_):
        turn.wait(60)  # both are inside of a pass

    model.model.layers[0].register_forward_pre_hook(meet)

    def work(mine):
        with torch.no_grad():
            for _ in range(rounds):
                model(mine)

    with watch(model) as seen:
        threads = [threading.Thread(target=work, args=(x,)) for x in tokens]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    model = make_llama()
    with watch(model) as once, torch.no_grad():
        for x in tokens:
            model(x)
    found = seen.recording
    assert len(found.records) == 2 * 2 * rounds
    for record, number in zip(found.records, found.sequences, strict=True):
        n = len(found.tokens[number])
        layer = int(record.name.split(".")[2])
        same = once.layer(layer, sequence=0 if n == 8 else 1)
        assert torch.equal(record.q, same.q)
        assert torch.equal(record.lse, same.lse)
        assert found.tokens[number] == tuple(tokens[n == 11][0].tolist())


def test_autocast_and_checkpointing_are_seen_once():
    model, tokens = make_llama(), draw_tokens(1, 8)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        plain = model(tokens).logits
        with watch(model) as seen:
            assert torch.equal(model(tokens).logits, plain)
    assert {x.calls for x in seen.coverage()} == {1}
    kernel_dtype = torch.bfloat16 if has_fused_groups() else torch.float32
    assert seen.layer(0).q.dtype == kernel_dtype
    model.train()
    old = model.gradient_checkpointing_enable  # deprecated in transformers 5.23
    getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})
    with watch(model) as seen:
        model(tokens, use_cache=False).logits.sum().backward()
    assert {x.calls for x in seen.coverage()} == {1}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_that_is_computed_again_is_seen_once(reentrant):
    x = torch.randn(1, 2, 5, 8, generator=torch.manual_seed(0)).requires_grad_()
    model = Bare()
    with watch(model) as seen:
        out = checkpoint(model, x, x, x, use_reentrant=reentrant)
        out.square().sum().backward()
    assert [entry.calls for entry in seen.coverage()] == [1]


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_seen():
    model, tokens = make_llama(), draw_tokens(1, 8)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(tokens, use_cache=False)
        with watch(compiled) as seen:
            compiled(tokens, use_cache=False)
    assert sum(x.calls for x in seen.coverage()) == 2


def test_our_own_model_is_watched_as_any_other():
    config = Config(
        vocabulary=50, context=64, width=32, layers=2, heads=4, kv_heads=2, window=5
    )
    model, tokens = CausalTransformer(config).eval(), torch.arange(20)[None]
    with watch(model, keep="qkv") as seen, torch.no_grad():
        model(tokens)
    record = seen.layer("blocks.1.attention")
    assert str(record.mask) == "causal() & window(4)"
    weights = record.weights()
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, 20))
    assert record.v.shape == (2, 20, 8)


@pytest.mark.parametrize("kind", ["two axes", "bool", "int64", "float32", "each layer"])
def test_padding_is_read_from_masks_of_any_kind(kind):
    valid = torch.tensor([[False, False, True, True, True], [True] * 5])
    square = (valid[:, None, None] & torch.ones(5, 5, dtype=torch.bool).tril())[:, :1]
    masks = {
        "two axes": valid.long(),
        "bool": square,
        "int64": square.long(),
        "float32": torch.zeros(square.shape).masked_fill(~square, -3.4e38),
    }
    masks["each layer"] = {"sliding_attention": square, "full_attention": square}
    found = read_valid(masks[kind], torch.ones(2, 5, dtype=torch.long))
    assert torch.equal(found, valid)


def test_what_only_one_head_never_sees_is_no_padding():
    mask = torch.ones(1, 2, 5, 5, dtype=torch.bool).tril()
    mask[:, 0, :, 3:] = False
    found = read_valid(mask, torch.ones(1, 5, dtype=torch.long))
    assert found.all()
    mask[:, 1, :, 4] = False
    found = read_valid(mask, torch.ones(1, 5, dtype=torch.long))
    assert found.tolist() == [[True] * 4 + [False]]


def test_what_cannot_be_asked_is_refused():
    model = make_llama()
    refused = pytest.raises(OptionError, match='keep="all", expected "qk" or "qkv"')
    with refused, watch(model, keep="all"):
        pass
    with pytest.raises(OptionError, match="a dict cannot be watched"), watch({}):
        pass
    with watch(model) as seen:
        with pytest.raises(OptionError, match="is still being watched"):
            str(seen)
        model(draw_tokens(1, 4))
    with pytest.raises(OptionError, match="there is no layer 7 with sequence 0"):
        seen.layer(7)
    assert str(seen).splitlines()[0] == (
        "LlamaForCausalLM: 2 of 2 attention layers seen, 1 sequence"
    )


def test_only_the_layers_asked_for_are_kept():
    model = make_llama()
    with watch(model, layers=["model.layers.1.self_attn"]) as seen, torch.no_grad():
        model(draw_tokens(1, 4))
    assert seen.layers == ("model.layers.1.self_attn",)
    assert [x.reason for x in seen.coverage()] == ["not asked for", ""]


def test_a_recording_is_saved_and_opened(tmp_path):
    model = make_llama()
    with watch(model) as seen, torch.no_grad():
        model(draw_tokens(2, 6))
    seen.save(tmp_path / "run.safetensors")
    again = open_seen(tmp_path / "run.safetensors")
    assert str(again) == str(seen)
    mine, theirs = seen.layer(1, sequence=1), again.layer(1, sequence=1)
    assert (mine.lse.numpy() == theirs.lse).all()
    assert abs(mine.weights().numpy() - theirs.weights()).max() < 1e-6


def test_a_watched_model_is_freed_when_it_is_deleted():
    """Not when Python looks for cycles, which may be much later."""
    model = CausalTransformer(
        Config(vocabulary=9, context=8, width=8, layers=1, heads=2)
    )
    there = weakref.ref(model)
    gc.disable()
    try:
        with watch(model) as seen:
            model(torch.arange(5)[None])
        del model
        assert there() is None
    finally:
        gc.enable()
    assert len(seen.records) == 1
