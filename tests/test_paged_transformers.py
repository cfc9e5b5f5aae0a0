"""generate_batch of transformers: one exact record per layer and request."""

import dataclasses
import gc
import logging
import threading
import weakref

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.generation.configuration_utils import (
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
)
from transformers.generation.continuous_batching import (
    cache,
    input_outputs,
    model_runner,
    offloading_manager,
    requests,
)
from transformers.modeling_utils import AttentionInterface

import regard
from regard.ablate import knock_out
from regard.errors import OptionError
from regard.lens.coverage_notes import PAGED
from regard.run.monkeypatch import PATCHED
from regard.serving import paged_batch, paged_recorder
from regard.serving.paged_recorder import PARTIAL, REBUILT, PagedRecorder

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # heads that look somewhere, not everywhere alike
}
KINDS = ["sliding_attention", "full_attention"]
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 6}),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {"sliding_window": 6, "layer_types": KINDS, "attn_logit_softcapping": None},
    ),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {"sliding_window": 6, "layer_types": KINDS, **EXPERTS},
    ),
}
PROMPTS = [[1, 5, 9, 3, 7], [2, 4, 6], [8, 8, 1, 2, 3, 4, 5, 6, 7, 9, 11, 12, 13]]
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1}
PLACES = [
    (input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors"),
    (AttentionInterface, "get_interface"),
    (cache.PagedAttentionCache, "update"),
    (requests.RequestState, "fork"),
    (model_runner.ModelRunner, "warmup"),
    (model_runner.ModelRunner, "_get_forward_fn"),
]


@pytest.fixture(autouse=True, scope="module")
def collect_little():
    """Leave what is loaded out of the two collections of each generate_batch."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def undone():
    """Let no test leave a patch behind."""
    before = [vars(owner)[name] for owner, name in PLACES]
    yield
    assert all(
        vars(owner)[name] is x for (owner, name), x in zip(PLACES, before, strict=True)
    )
    assert not PATCHED


def make(name="llama", implementation="sdpa", **options):
    kind, config, own = MODELS[name]
    torch.manual_seed(0)
    options = {"attn_implementation": implementation, **SIZES, **own, **options}
    model = kind(config(**options)).eval()
    model.generation_config.pad_token_id = 0
    for x in model.modules():
        if hasattr(x, "sinks"):
            torch.nn.init.normal_(x.sinks)
    return model


def run(model, prompts=PROMPTS, *, generation=GREEDY, **batching):
    options = {"num_blocks": 64, "max_batch_tokens": 64, "page_size": 4, **batching}
    return model.generate_batch(
        prompts,
        generation_config=GenerationConfig(pad_token_id=0, **generation),
        continuous_batching_config=ContinuousBatchingConfig(**options),
    )


def watch(model, prompts=PROMPTS, **options):
    """Return what was seen and generated, which is what is generated without it."""
    bare = run(model, prompts, **options)
    with regard.watch(model) as seen:
        results = run(model, prompts, **options)
    assert [x.generated_tokens for x in results.values()] == [
        x.generated_tokens for x in bare.values()
    ]
    assert not any(x.error for x in results.values())
    return seen, results


def compare(model, seen, results, *, first=0, layers=None):
    """Compare records with the eager attention of one pass over all tokens."""
    implementation, worst = model.config._attn_implementation, 0.0
    model.set_attn_implementation("eager")
    for number, result in enumerate(results.values(), first):
        assert seen.recording.notes["requests"][number] == result.request_id
        tokens = [*result.prompt_ids, *result.generated_tokens][:-1]
        assert list(seen.recording.tokens[number]) == tokens
        with torch.no_grad():
            out = model(torch.tensor([tokens]), output_attentions=True)
        found = seen.recording.layer(slice(None), sequence=number)
        chosen = range(len(out.attentions)) if layers is None else layers
        assert len(found) == len(chosen)
        for record, i in zip(found, chosen, strict=True):
            assert record.k.shape[0] == 2  # grouped heads stay grouped
            at, keys = record.q_positions, record.k_positions
            assert at[-1] == keys[-1] == len(tokens) - 1
            mine, theirs = record.weights(), out.attentions[i][0]
            worst = max(worst, float((mine - theirs[:, at][..., keys]).abs().max()))
            rest = torch.ones(len(tokens), dtype=torch.bool)
            rest[keys] = False
            assert not theirs[:, at][..., rest].any()
    model.set_attn_implementation(implementation)
    assert worst < 1e-5, worst
    return worst


def run_whole(seen):
    """Assert that every query of every sequence was run."""
    for record in seen.records:
        assert record.q_positions[0] == 0
    layers = [x for x in seen.coverage() if x.attention]
    assert all(x.error < 1e-5 and not x.reason for x in layers)
    assert {x.via for x in layers} == {"generate_batch"}


# -- models -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("llama", "sdpa"),
        ("llama", "eager"),
        ("qwen3", "sdpa"),
        ("mistral", "sdpa"),
        ("mistral", "eager"),
        ("gemma2", "eager"),
        ("gpt_oss", "eager"),
    ],
)
@pytest.mark.parametrize("tokens", [64, 8], ids=["whole", "chunks"])
def test_every_request_is_recorded_as_if_it_ran_alone(name, implementation, tokens):
    model = make(name, implementation)
    seen, results = watch(model, max_batch_tokens=tokens)
    compare(model, seen, results)
    run_whole(seen)
    assert len(seen.records) == 2 * len(PROMPTS)
    assert model.config._attn_implementation == implementation


def test_a_softcap_that_transformers_ignores_is_not_in_the_record():
    model = make("gemma2", "eager", attn_logit_softcapping=2.0)
    seen, results = watch(model)
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    compare(model, seen, results)
    assert all("softcap of 2 is not applied" in x.note for x in seen.coverage())
    assert {record.softcap for record in seen.records} == {None}


def test_a_longer_run_in_half_precision():
    model = make().to(torch.bfloat16)
    seen, results = watch(model, generation={**GREEDY, "max_new_tokens": 70})
    assert [x.calls for x in seen.coverage()] == [70, 70]  # the 64th is checked
    assert max(x.error for x in seen.coverage()) < 1e-2
    for number, result in enumerate(results.values()):
        record = seen.layer(1, sequence=number)
        assert record.q.dtype == torch.bfloat16
        assert record.shape[1:] == (len(result.prompt_ids) + 69,) * 2


def test_values_are_kept_when_asked_for():
    model = make()
    with regard.watch(model, keep="qkv", layers=[1]) as seen:
        results = run(model)
    compare(model, seen, results, layers=[1])
    assert [x.reason for x in seen.coverage()] == ["not asked for", ""]
    for record in seen.records:
        assert record.v.shape == record.k.shape


# -- what the scheduler does ------------------------------------------------------------


def test_a_prefix_in_the_cache_has_keys_and_no_queries():
    model = make()
    common = list(range(1, 13))
    prompts = [[*common, 20], [*common, 30, 31], [*common, 40]]
    seen, results = watch(model, prompts, max_batch_tokens=16)
    compare(model, seen, results)
    first = [int(seen.layer(0, sequence=i).q_positions[0]) for i in range(3)]
    assert min(first) == 0
    assert max(first) == 12
    assert all(record.k_positions[0] == 0 for record in seen.records)
    assert [x.note for x in seen.coverage()] == [PARTIAL] * 2


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_samples_of_a_prompt_are_sequences(name):
    model = make(name)
    sampled = {**GREEDY, "do_sample": True, "num_return_sequences": 3}
    with regard.watch(model) as seen:
        results = run(model, PROMPTS[1:], generation=sampled)
    assert len(results) == 6
    compare(model, seen, results)
    run_whole(seen)  # the prompt was run once, for all samples of it


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_rows_that_run_again_after_preemption_replace_the_first(name, monkeypatch):
    model, again = make(name), []
    original = requests.RequestState.create_equivalent_initial_request

    def note(state):
        again.append(state.request_id)
        return original(state)

    monkeypatch.setattr(
        requests.RequestState, "create_equivalent_initial_request", note
    )
    seen, results = watch(
        model,
        [[1, 2, 3], [9, 8], [3, 1]],
        num_blocks=4,
        generation={**GREEDY, "max_new_tokens": 12},
        max_batch_tokens=32,
    )
    assert again
    compare(model, seen, results)
    run_whole(seen)


def test_many_requests_in_a_small_cache(monkeypatch):
    model, again, rng = make(), [], np.random.default_rng(0)
    original = requests.RequestState.create_equivalent_initial_request

    def note(state):
        again.append(state.request_id)
        return original(state)

    monkeypatch.setattr(
        requests.RequestState, "create_equivalent_initial_request", note
    )
    prompts = [rng.integers(1, 64, n).tolist() for n in (3, 17, 40, 90) * 6]
    prompts[::3] = [[*prompts[3][:16], *prompt] for prompt in prompts[::3]]
    with regard.watch(model) as seen:
        results = run(
            model,
            prompts,
            num_blocks=24,
            page_size=8,
            max_batch_tokens=96,
            generation={**GREEDY, "max_new_tokens": 12},
        )
    assert len(results) == 24
    assert len(again) > 3
    compare(model, seen, results)
    assert [x.note for x in seen.coverage()] == [PARTIAL] * 2


def test_a_model_that_was_watched_is_freed():
    model = make()
    with regard.watch(model) as seen:
        run(model)
    known, before = weakref.ref(model), gc.isenabled()
    gc.disable()  # it must not take a search for cycles
    del model
    if before:
        gc.enable()
    assert known() is None
    assert len(seen.records) == 6


def test_what_is_moved_to_the_host_and_back_goes_on(monkeypatch):
    model, moved, empty = make(), [], torch.empty
    original = offloading_manager.OffloadingManager._offload_to_cpu

    def note(self, *args):
        moved.extend(found := original(self, *args))
        return found

    def allocate(*size, pin_memory=False, **options):  # that needs a GPU
        return empty(*size, **options)

    monkeypatch.setattr(offloading_manager.OffloadingManager, "_offload_to_cpu", note)
    monkeypatch.setattr(torch, "empty", allocate)
    with regard.watch(model) as seen:
        results = run(
            model,
            [[1, 2, 3], [9, 8], [3, 1]],
            num_blocks=4,
            cpu_offload_space=0.01,
            generation={**GREEDY, "max_new_tokens": 12},
        )
    assert moved
    compare(model, seen, results)
    run_whole(seen)


def test_made_up_batches_and_padding_are_not_recorded(monkeypatch):
    model, made_up, sizes = make(), [], []
    original = model_runner.ModelRunner.run_one_warmup

    def note(self, *args, **named):
        made_up.append(named)
        return original(self, *args, **named)

    monkeypatch.setattr(model_runner.ModelRunner, "run_one_warmup", note)
    model.model.embed_tokens.register_forward_hook(
        lambda *given: sizes.append(given[1][0].shape[1])
    )
    with regard.watch(model) as seen:
        results = run(
            model,
            varlen_compile_config=CompileConfig(backend="eager"),
            q_padding_interval_size=16,
            kv_padding_interval_size=16,
        )
    assert made_up
    assert set(sizes) == {64, 32, 16}  # of the warmup, the prompts, and the rest
    compare(model, seen, results)
    run_whole(seen)
    assert len(seen.recording.tokens) == len(PROMPTS)


def test_requests_that_are_added_one_by_one():
    model = make()
    config = GenerationConfig(pad_token_id=0, **GREEDY)
    batching = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64, page_size=4)
    results = {}
    with model.continuous_batching_context_manager(
        config, continuous_batching_config=batching
    ) as manager:

        def ask(prompt, name):
            manager.add_request(prompt, request_id=name)
            result = None
            while result is None:
                result = manager.get_result(timeout=5)
            return result

        ask(PROMPTS[0], "before")  # the thread runs before it is watched, and after
        with regard.watch(model) as seen:
            results[0] = ask(PROMPTS[0], "mine")
            results[1] = ask(PROMPTS[1], "mine")  # a finished name is used again
        ask(PROMPTS[2], "after")
    compare(model, seen, results)
    assert len(seen.recording.tokens) == 2


# -- with other passes ------------------------------------------------------------------


def test_other_passes_are_recorded_as_ever():
    model, tokens = make(), torch.tensor([[3, 1, 4, 1, 5]])
    with regard.watch(model) as alone:
        model(tokens)
        model.generate(tokens, max_new_tokens=4, do_sample=False)
    with regard.watch(model) as seen:
        model(tokens)
        one = run(model)
        model.generate(tokens, max_new_tokens=4, do_sample=False)
        two = run(model, PROMPTS[:2])
    n = len(alone.recording.tokens)
    assert seen.recording.tokens[:n] == alone.recording.tokens
    for mine, theirs in zip(seen.records, alone.records, strict=False):
        assert mine.name == theirs.name
        assert torch.equal(mine.weights(), theirs.weights())
    compare(model, seen, one, first=n)
    compare(model, seen, two, first=n + 3)
    assert {x.via for x in seen.coverage()} == {"sdpa, generate_batch"}
    assert all(x.calls == x.kept and not x.note for x in seen.coverage())
    assert len(seen.coverage()) == 2


def test_a_recording_of_batches_can_be_used_like_any_other(tmp_path):
    model = make()
    seen, results = watch(model)
    seen.save(tmp_path / "batch.regard")
    back = regard.open(tmp_path / "batch.regard")
    assert back.recording.notes["requests"] == list(results)
    assert back.recording.tokens == seen.recording.tokens
    for mine, theirs in zip(back.records, seen.records, strict=True):
        np.testing.assert_array_equal(mine.lse, theirs.lse)
    assert len(seen.audit()) == 0
    assert "3 sequences" in str(seen)
    assert len(seen.attentions) == 2
    assert seen.attentions[0].shape[0] == 3
    assert seen.table() is not None


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_one_watch_after_another_and_one_in_another(name):
    model = make(name, "eager")
    seen, _ = watch(model)
    with regard.watch(model) as outer, regard.watch(model) as inner:
        again = run(model)
    for each in (outer, inner):
        compare(model, each, again)
        for mine, theirs in zip(each.records, seen.records, strict=True):
            # batches of other sizes round in another way: a busy machine makes them
            torch.testing.assert_close(mine.q, theirs.q)
            torch.testing.assert_close(mine.lse, theirs.lse)


def test_a_wrapped_model_and_a_part_of_it():
    model = make()
    outside = torch.nn.ModuleDict({"inner": model})
    with regard.watch(outside) as whole, regard.watch(model.model) as part:
        results = run(model)
    compare(model, whole, results)
    compare(model, part, results)
    assert whole.layers[0] == "inner.model.layers.0.self_attn"


def test_two_models_in_two_threads():
    models = [make(), make("qwen3")]
    found = {}

    def work(number):
        found[number] = run(models[number])

    with regard.watch(models[0]) as one, regard.watch(models[1]) as two:
        threads = [threading.Thread(target=work, args=[i]) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    compare(models[0], one, found[0])
    compare(models[1], two, found[1])


# -- what goes wrong --------------------------------------------------------------------


def test_an_exception_in_the_block_leaves_what_was_recorded():
    model = make()
    with pytest.raises(RuntimeError, match="mine"), regard.watch(model) as seen:
        results = run(model)
        raise RuntimeError("mine")
    compare(model, seen, results)


def test_an_error_in_the_model_is_transformers_own(caplog):
    model = make()

    def fail(*_given):
        raise RuntimeError("a broken layer")

    handle = model.model.layers[1].mlp.register_forward_hook(fail)
    with caplog.at_level(logging.CRITICAL), regard.watch(model) as seen:
        results = run(model)
    handle.remove()
    assert all("a broken layer" in x.error for x in results.values())
    assert [len(x) for x in seen.recording.tokens] == [5, 3, 13]
    again, results = watch(model)
    compare(model, again, results)


@pytest.mark.parametrize(
    "method", ["prepare", "hear", "find_cuts", "find_request", "add", "check"]
)
def test_an_error_of_ours_does_not_reach_the_model(method, monkeypatch):
    model = make()
    bare = run(model)

    def fail(*_given, **_named):
        raise RuntimeError("an error of ours")

    monkeypatch.setattr(PagedRecorder, method, fail)
    with regard.watch(model) as seen:
        results = run(model)
    for name, result in results.items():
        assert result.generated_tokens == bare[name].generated_tokens
    assert not seen.records
    assert "an error of ours" in str(seen)
    assert all(x.reason for x in seen.coverage() if x.attention)


@pytest.mark.parametrize("name", ["finish", "make_record", "list_tokens"])
def test_an_error_at_the_end_becomes_a_reason(name, monkeypatch):
    owners = {
        "finish": PagedRecorder,
        "make_record": paged_recorder,
        "list_tokens": paged_batch.PagedRequest,
    }

    def fail(*_given, **_named):
        raise RuntimeError("an error of ours")

    monkeypatch.setattr(owners[name], name, fail)
    model = make()
    with regard.watch(model) as seen:
        run(model)
    assert not seen.records
    assert "an error of ours" in str(seen)


def test_a_split_that_is_wrong_is_refused(monkeypatch):
    original = paged_batch.read_ends

    def shift(cumulative, n):
        found = original(cumulative, n)
        return [found[0], *(x + 1 for x in found[1:-1]), found[-1]]

    monkeypatch.setattr(paged_batch, "read_ends", shift)
    model = make()
    with regard.watch(model) as seen:
        run(model)
    assert not seen.records
    assert {x.reason for x in seen.coverage()} == {paged_batch.MISFIT}


def test_a_mask_that_is_another_is_refused(monkeypatch):
    original = input_outputs.build_attention_mask

    def see_the_future(attention_mask, *args, **named):
        original(attention_mask, *args, **named)
        attention_mask[..., 0, 1] = 0

    monkeypatch.setattr(input_outputs, "build_attention_mask", see_the_future)
    model = make()
    with regard.watch(model) as seen:
        run(model)
    assert not seen.records
    assert {x.reason for x in seen.coverage()} == {paged_batch.MASKED}


def test_an_output_that_cannot_be_rebuilt_is_refused(monkeypatch):
    original = paged_recorder.read_call_facts

    def read(name, call):
        facts, note = original(name, call)
        return dataclasses.replace(facts, scale=facts.scale * 1.1), note

    monkeypatch.setattr(paged_recorder, "read_call_facts", read)
    model = make()
    with regard.watch(model) as seen:
        run(model)
    assert not seen.records
    assert {x.reason for x in seen.coverage()} == {REBUILT}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_an_ablation_is_not_recorded_as_if_there_was_none(implementation):
    model = make(implementation=implementation)
    hidden = {"keys": [0], "queries": [3]}  # a row that would not be checked
    with (
        regard.watch(model) as seen,
        pytest.raises(OptionError, match="generate_batch runs several requests in one"),
        knock_out(model, layers=[0], **hidden),
    ):
        run(model)
    assert {x.name for x in seen.records} == {"model.layers.1.self_attn"}
    assert [x.reason for x in seen.coverage()] == [REBUILT, ""]


def test_whole_heads_are_ablated_in_every_request():
    """A head has no positions, so the batch makes no difference."""
    model = make()
    bare = [x.generated_tokens for x in run(model).values()]
    with knock_out(model, heads=[(0, 1), (1, 2)]):
        batch = [x.generated_tokens for x in run(model).values()]
        alone = [
            model.generate(torch.tensor([x]), pad_token_id=0, **GREEDY)[0, len(x) :]
            for x in PROMPTS
        ]
    assert batch == [x.tolist() for x in alone]
    assert batch != bare


def test_a_cache_that_changes_its_keys_is_refused(monkeypatch):
    original = cache.PagedAttentionCache.update

    def round_keys(self, key_states, value_states, layer_idx, kwargs):
        k, v = original(
            self,
            key_states=key_states,
            value_states=value_states,
            layer_idx=layer_idx,
            kwargs=kwargs,
        )
        past = kwargs["read_index"][0].numel() > 0
        return k * 1.1 if past else k, v

    monkeypatch.setattr(cache.PagedAttentionCache, "update", round_keys)
    model = make()
    with regard.watch(model) as seen:
        run(model)
    assert not seen.records
    assert {x.reason for x in seen.coverage()} == {REBUILT}


def test_a_function_that_is_not_looked_up_is_reported(monkeypatch):
    model, known = make(), AttentionInterface()["sdpa"]
    layer = model.model.layers[1].self_attn
    attend = type(layer).forward

    def forward(self, *args, **named):
        if self is not layer:
            return attend(self, *args, **named)
        with monkeypatch.context() as patch:
            patch.setattr(AttentionInterface, "get_interface", lambda *_: known)
            return attend(self, *args, **named)

    monkeypatch.setattr(type(layer), "forward", forward)
    with regard.watch(model) as seen:
        run(model)
    assert [x.name for x in seen.records] == ["model.layers.0.self_attn"] * 3
    (missing,) = (x for x in seen.coverage() if x.name == "model.layers.1.self_attn")
    assert missing.reason == f"{PAGED}; {paged_recorder.UNHEARD}"


def test_another_version_of_transformers_is_reported(monkeypatch):
    model = make()
    bare = run(model)
    monkeypatch.delattr(requests.RequestState, "fork")
    with regard.watch(model) as seen:
        results = run(model)
    assert results["req_0"].generated_tokens == bare["req_0"].generated_tokens
    assert not seen.records
    assert {x.reason for x in seen.coverage()} == {PAGED}
