"""The lens: the same bits, nothing missed, nothing left behind."""

import copy
import sys
import threading
from collections import OrderedDict
from contextlib import nullcontext
from fnmatch import fnmatchcase

import numpy as np
import pytest
import torch
import transformers
from families import FAMILIES, quiet
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import _get_current_function_mode_stack as list_modes
from transformers.models.llama import modeling_llama

from regard.errors import OptionError
from regard.lens.watch import read_valid
from regard.nn.decoder import CausalTransformer
from regard.nn.generation import generate
from regard.plain.config import Config
from regard.seen import open_seen, watch

BLIND = {"reformer", "written-hidden"}  # no softmax, no kernel: named, not seen
LISTS = (list, tuple, type({}.values()), type(OrderedDict().values()))
FLAT = {"sdpa-flat", "written-bmm"}  # batch and heads are one axis
BANDS = {"longformer"}  # its softmax runs over a band, not over all keys
MANY = {"bigbird"}  # several softmaxes for one attention


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
    found = seen.coverage()
    if name in BLIND:
        assert {x.reason for x in found} == {"it was never heard"}
        return
    assert [x.reason for x in found if x.reason] == []
    if name not in MANY:
        assert sum(x.calls for x in found) == len(family.layers)
        heard = list(dict.fromkeys(family.layers))
        assert [x.name for x in found] == heard or name == "written-modules"


SAME = [n for n, f in FAMILIES.items() if f.eager and n not in BLIND | MANY | BANDS]


@pytest.mark.parametrize("name", SAME)
def test_the_weights_are_those_of_the_models_own_eager_attention(name):
    family = FAMILIES[name]
    model, inputs = family.build()
    expected = family.eager(model, inputs)
    with watch(model) as seen:
        run(model, inputs)
    assert len(expected) == len(family.layers)
    errors, heard = {}, dict.fromkeys(family.layers, 0)
    for call, (theirs, layer) in enumerate(zip(expected, family.layers, strict=True)):
        own = [r for r in seen.recording.records if r.name == layer]
        theirs = theirs.flatten(0, 1)[None] if name in FLAT else theirs  # noqa: PLW2901
        for b, row in enumerate(theirs):
            record = own[heard[layer] * len(theirs) + b]
            errors[call, layer, b] = compare(record.weights(), row, record)
        heard[layer] += 1
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


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_generation_is_one_record_of_the_final_sequence(padded, cache):
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
    monkeypatch.setattr(module, "settle", lambda sight: (sight, next(told)))
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
    assert found.reason == "its output could not be rebuilt: nan off"
    assert [x.what for x in seen.audit()] == ["not finite"]
    assert str(seen).splitlines() == [
        "Bare: 0 of 1 attention layers seen, 0 sequences",
        "  the model itself: sdpa, 2 calls, error nan its output could not be rebuilt: "
        "nan off",
    ]


@pytest.mark.parametrize("axes", [3, 4])
def test_a_kernel_counts_from_the_first_key_whatever_its_axes(axes):
    q, k = (torch.randn(2, n, 8, generator=torch.manual_seed(n)) for n in (2, 4))
    causal = torch.ones(2, 4, dtype=torch.bool).tril()
    expected = (q @ k.mT / 8**0.5).masked_fill(~causal, -torch.inf).softmax(-1)
    model = Bare(is_causal=True)
    with watch(model) as seen:
        model(*((x[None] if axes == 4 else x) for x in (q, k, k)))
    assert str(seen).splitlines()[1].startswith("  the model itself: sdpa, 1 call, err")
    found = seen.layer(0).weights()  # keys that no row reaches are not kept
    assert float((found - expected[..., :2]).abs().max()) < 1e-6


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
    assert [(x.calls, x.reason) for x in seen.coverage()] == [(2, "")]


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
    assert len(seen.records) == 2 * 8
    for number in range(8):
        expected = read_eager(model, texts[number % 2]).attentions
        own = [seen.layer(i, sequence=number) for i in (0, 1)]
        if kind == "Llama":  # the other cache forgets where it stands
            assert measure_rows(own, expected) < 1e-6
        known = seen.recording.tokens[number]  # what came before was another group
        assert known == (tuple(texts[number][0, :6].tolist()) if number < 2 else ())


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "T5"])
def test_a_beam_search_is_named_and_never_mixed(kind):
    options = {"do_sample": False, "max_new_tokens": 8, "num_beams": 3}
    if kind == "T5":
        model, tokens = make_t5(), draw_tokens(2, 6)
    else:
        model, tokens = make_llama(kind, sliding_window=4), draw_tokens(2, 6)
        options["attention_mask"] = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    with watch(model) as seen:
        model.generate(tokens, **options)
    named = {x.name for x in seen.coverage() if "as in a beam search" in x.reason}
    assert named == {x.name for x in seen.coverage()} - set(seen.layers)
    assert all(x.startswith("encoder.") for x in seen.layers)
    assert len(named) == (4 if kind == "T5" else 2)
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
            done = [(x, model.generate(x, **options)[:, :-1]) for x in texts]
            runs = done
            if again == "no cache":
                runs = [(x, out[:, :n]) for x, out in done for n in range(1, 5)]
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
    assert [x.q.shape[1] for x in seen.records] == [3, 3, 4, 4]
    expected = [tuple(texts[i][0, : 3 + i].tolist()) for i in (0, 0, 1, 1)]
    assert list(seen.recording.tokens) == expected


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
    assert seen.layer(0).q.dtype == torch.bfloat16
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with watch(model) as seen:
        model(tokens, use_cache=False).logits.sum().backward()
    assert {x.calls for x in seen.coverage()} == {1}


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
