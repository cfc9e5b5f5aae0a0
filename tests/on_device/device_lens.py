"""The lens on models of the device: the same records as on the CPU, bit for bit.

Next: device_tools.py
"""

import gc
import warnings
from dataclasses import replace

import pytest
import torch
import transformers
from conftest import move
from device_kernels import CALLS
from families import FAMILIES, quiet
from intervened_models import GROUPED, stir
from random_models import draw_model, judge, watch_draw
from simulated_device import count, use_kernel

import regard
from regard.nn.decoder import CausalTransformer
from regard.nn.generation import generate
from regard.plain.config import Config

SEEN = (
    "llama",
    "gpt2",
    "gemma2",
    "mixtral",
    "bert",
    "t5",
    "whisper",
    "vit",
    "swin",
    "llava",
    "deepseek-v3",
    "written",
    "written-einsum",
    "sdpa-float-mask",
    "gpt-oss",
    "bloom",
)
DRAWS = 60
NESTED = {
    "sdpa, jagged",
    "nn.TransformerEncoderLayer",
}  # the device has no nested tensors
PROMPT = torch.arange(14).reshape(2, 7) % 9 + 3
VALID = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
GENERATIONS = {
    "greedy": {},
    "padded": {"attention_mask": VALID},
    "beams": {"num_beams": 3},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "no cache": {"use_cache": False},
    "sampled twice": {"do_sample": True, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
}


def bring_home(recording):
    """Return a recording with its arrays on the host; raise unless all were away."""
    records = []
    for record in recording.records:
        arrays = {n: x for n, x in vars(record).items() if isinstance(x, torch.Tensor)}
        assert {x.device.type for x in arrays.values()} == {"sim"}, record.name
        records.append(replace(record, **move(arrays, "cpu")))
    return replace(recording, records=tuple(records))


def check_same(there, here):
    """Compare two recordings, array by array."""
    there = bring_home(there.recording)
    here = here.recording
    assert there.tokens == here.tokens
    assert [x.reason for x in there.coverage] == [x.reason for x in here.coverage]
    assert len(there.records) == len(here.records) > 0
    for mine, other in zip(there.records, here.records, strict=True):
        assert mine.name == other.name
        for name, x in vars(other).items():
            y = getattr(mine, name)
            if isinstance(x, torch.Tensor):
                torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-5, equal_nan=True)
            else:
                assert str(y) == str(x)


@pytest.mark.parametrize("name", SEEN)
def test_a_watched_model_has_the_same_bits_and_the_records_of_the_cpu(
    name, run_on_both
):
    with quiet():
        model, inputs = FAMILIES[name].build()

    def see(model, inputs):
        with quiet(), torch.no_grad():
            plain = model(**inputs)
            with regard.watch(model, keep="qkv") as seen:
                watched = model(**inputs)
        for x, y in zip(read_tensors(plain), read_tensors(watched), strict=True):
            assert torch.equal(x.nan_to_num(), y.nan_to_num())
        return seen

    here, there = run_on_both(see, model, inputs)
    check_same(there, here)


def read_tensors(out):
    """Return the tensors of an output."""
    out = out.values() if isinstance(out, dict) else out
    return (
        [out]
        if isinstance(out, torch.Tensor)
        else [x for x in out if isinstance(x, torch.Tensor)]
    )


@pytest.mark.parametrize("name", GENERATIONS)
def test_a_generation_is_recorded_as_on_the_cpu(name, run_on_both):
    with quiet():
        config = transformers.LlamaConfig(**GROUPED, sliding_window=None)
        model = stir(transformers.LlamaForCausalLM(config))

    def run(model, prompt, options):
        done = {"do_sample": False} | options
        if done.get("prompt_lookup_num_tokens"):
            prompt = prompt[:1]
        torch.manual_seed(0)
        with quiet(), regard.watch(model) as seen:
            new = model.generate(prompt, max_new_tokens=5, pad_token_id=0, **done)
        return new, seen

    (here, a), (there, b) = run_on_both(run, model, PROMPT, GENERATIONS[name])
    assert torch.equal(there.cpu(), here)
    check_same(b, a)


def test_a_model_of_ours_generates_and_is_recorded(run_on_both):
    torch.manual_seed(0)
    config = Config(vocabulary=40, context=32, width=32, layers=2, heads=4, kv_heads=2)

    def run(model):
        with regard.watch(model) as seen:
            new = generate(model, [[1, 2, 3], [4, 5, 6, 7, 8]], 6)
        return new, seen

    (new, here), (same, there) = run_on_both(run, CausalTransformer(config).eval())
    assert same == new
    check_same(there, here)


def test_many_ways_to_write_attention_are_judged_on_the_device():
    """Each draw against weights in float64, which random_models.py computes."""

    def watch(draw):
        model = move(draw.model, "sim")
        there = replace(draw, model=model, inputs=move(draw.inputs, "sim"))
        run = model.forward

        def forward(*args, **named):
            with torch.device("sim"):  # for the masks that the drawn models make
                return run(*args, **named)

        model.forward = forward
        plain = there.run()
        results, recording = watch_draw(there)
        same = zip(plain, results, strict=True)
        assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in same)
        return here, bring_home(recording)

    wrong = []
    for seed in range(DRAWS):
        draw = draw_model(seed)
        if NESTED & {block.plan.writing for block in draw.model.blocks}:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            here = draw.run()  # `watch` compares the bits on the device instead
            wrong += [x for v in judge(draw, watch=watch) for x in v.complaints]
    assert wrong == []


# --- the operators of accelerators ------------------------------------------------------


@pytest.mark.parametrize("kernel", ["efficient", "cudnn", "overrideable"])
@pytest.mark.parametrize("family", ["gpt2", "mistral"])  # causal; a window, as a mask
@pytest.mark.parametrize("grad", [False, True])
def test_the_lens_hears_the_operator_that_sdpa_takes(kernel, family, grad):
    """Its bits stay the same, and lse is its own, in the conventions of the record."""
    with quiet():
        model, inputs = FAMILIES[family].build()
    model, inputs = move(model.bfloat16(), "sim"), move(inputs, "sim")
    with use_kernel(kernel), torch.set_grad_enabled(grad):
        CALLS.clear()
        plain = model(**inputs).logits
        before = dict(CALLS)
        CALLS.clear()
        with regard.watch(model, keep="qkv") as seen:
            watched = model(**inputs).logits
    assert torch.equal(plain, watched)
    assert before == {kernel: len(seen.layers)}
    free = grad or kernel != "cudnn"  # without gradients cuDNN gives none
    assert free == (dict(CALLS) == before)
    assert {x.via for x in seen.coverage()} == {"sdpa"}
    for record in bring_home(seen.recording).records:
        wide = [x.double() for x in (record.q, record.k, record.v)]
        exact = regard.attention(*wide, record.mask, scale=record.scale)
        off = 1e-3 if kernel == "overrideable" else 1e-5  # the CPU's, in bfloat16
        torch.testing.assert_close(record.lse.double(), exact.lse, rtol=off, atol=off)


def test_flash_attention_is_heard_and_its_lse_taken():
    """SDPA calls its operator on CUDA only: a model that calls it itself."""

    class Flash(torch.nn.Module):
        def forward(self, x):
            q = x.unflatten(-1, (2, 8)).transpose(1, 2)
            op = torch.ops.aten._scaled_dot_product_flash_attention
            return op(q, q, q, 0.0, True)[0]

    model, x = Flash(), torch.randn(2, 9, 16).bfloat16().to("sim")
    with regard.watch(model, keep="qkv") as seen:
        model(x)
    assert len(seen.records) == 2
    for record in bring_home(seen.recording).records:
        wide = [y.double() for y in (record.q, record.k, record.v)]
        exact = regard.attention(*wide, regard.causal(), scale=record.scale)
        torch.testing.assert_close(record.lse.double(), exact.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", ["efficient", "cudnn", "overrideable"])
def test_rows_of_padding_that_see_nothing_are_recorded_as_such(kernel):
    class Padded(torch.nn.Module):
        def forward(self, x, allowed):
            q = x.unflatten(-1, (2, 8)).transpose(1, 2)
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, allowed)

    allowed = torch.ones(9, 9, dtype=torch.bool, device="sim").tril()
    allowed[3] = False
    x = torch.randn(2, 9, 16, dtype=torch.bfloat16, device="sim")
    model = Padded()
    with use_kernel(kernel), torch.no_grad(), regard.watch(model) as seen:
        model(x, allowed)
    (empty,) = {
        tuple((r.lse == -torch.inf)[0].nonzero()[:, 0].tolist()) for r in seen.records
    }
    assert empty == (3,)


# --- memory -----------------------------------------------------------------------------


def measure_watch(**options):
    """Return bytes of a watched pass beyond those of a bare one, and its records."""
    config = Config(vocabulary=40, context=256, width=64, layers=8, heads=4)
    model = CausalTransformer(config).eval().to("sim")
    tokens = torch.arange(200, device="sim")[None] % 40
    with torch.no_grad():
        model(tokens)
        gc.collect()
        with count() as bare:
            model(tokens)
        with count() as counts, regard.watch(model, **options) as seen:
            model(tokens)
    return counts.peak - bare.peak, counts.in_use, counts, seen


def test_what_is_recorded_leaves_the_device_as_it_arrives():
    more, held, counts, seen = measure_watch(store="host")
    first = seen.layer(0)
    one_layer = sum(x.nbytes for x in (first.q, first.k, first.lse))
    assert {x.device.type for r in seen.records for x in (r.q, r.k, r.lse)} == {"cpu"}
    assert held == 0
    assert more <= one_layer
    assert counts.to_host <= 3 * len(seen.records) + 2
    _, held, _, other = measure_watch()
    assert held >= len(other.records) * one_layer


@pytest.mark.parametrize("name", GENERATIONS)
def test_a_generation_that_is_kept_on_the_host_is_the_same(name):
    with quiet():
        config = transformers.LlamaConfig(**GROUPED, sliding_window=None)
        model = stir(transformers.LlamaForCausalLM(config)).to("sim")
    options = {"do_sample": False} | move(GENERATIONS[name], "sim")
    prompt = PROMPT.to("sim")[: 1 if "prompt_lookup_num_tokens" in options else 2]
    found = []
    for store in ("device", "host"):
        torch.manual_seed(0)
        with quiet(), regard.watch(model, store=store) as seen:
            model.generate(prompt, max_new_tokens=5, pad_token_id=0, **options)
        found.append(seen)
    there, here = found
    check_same(there, here)
