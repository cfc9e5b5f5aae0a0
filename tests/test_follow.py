"""Generations, followed from the prompt to the last token, for every way to capture.

The truth is one pass over the final sequence, without a cache, its softmaxes caught one
by one (dense_truth.py). A record must have every row of it, for each sequence of the
batch; where sequences change places or are guessed ahead, it does so too, or the layer
says why it was not followed.
"""

import pytest
import torch
import transformers
from dense_truth import (
    build,
    draw,
    explain,
    find_error,
    group_by_module,
    group_coverage,
    list_softmaxes,
    pad,
    run_plain,
    watch_run,
)
from families import quiet
from torch import nn

import regard
from regard.lens.coverage_notes import PLACE
from regard.lens.passes import Passes

SPECIAL = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
TEXT = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    **SPECIAL,
}
GROUPED = {**TEXT, "num_key_value_heads": 2}
OPENAI = {
    "vocab_size": 100,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    **SPECIAL,
}
WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
EAGER = {"attn_implementation": "eager"}
PAIR = {
    "vocab_size": 100,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    **SPECIAL,
}
MODELS = {
    "llama": ("LlamaForCausalLM", GROUPED),
    "llama-eager": ("LlamaForCausalLM", GROUPED | EAGER),
    "gpt2": ("GPT2LMHeadModel", OPENAI),
    "opt": ("OPTForCausalLM", {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "falcon": ("FalconForCausalLM", {**TEXT, "multi_query": True}),
    "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 5}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**GROUPED, **WINDOW, "head_dim": 8, "attn_logit_softcapping": 2.0},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        {
            **GROUPED,
            **WINDOW,
            "head_dim": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "bloom": (
        "BloomForCausalLM",
        {"vocab_size": 100, "hidden_size": 32, "n_layer": 2, "n_head": 4, **SPECIAL},
    ),
    "gptj": ("GPTJForCausalLM", {**OPENAI, "rotary_dim": 4}),
    "gpt-neo": (
        "GPTNeoForCausalLM",
        {
            "vocab_size": 100,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "window_size": 5,
            "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 1]],
            **SPECIAL,
        },
    ),
    "codegen": ("CodeGenForCausalLM", {**OPENAI, "n_ctx": 64, "rotary_dim": 4}),
    "mpt": (
        "MptForCausalLM",
        {
            "vocab_size": 100,
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            **SPECIAL,
        },
    ),
    "xglm": (
        "XGLMForCausalLM",
        {
            "vocab_size": 100,
            "d_model": 32,
            "ffn_dim": 48,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": 64,
            **SPECIAL,
        },
    ),
}
PAIRS = {
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": 100,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            **SPECIAL,
            "decoder_start_token_id": 0,
        },
    ),
    "bart": ("BartForConditionalGeneration", PAIR),
}
DOUBLE = {"llama", "gpt2", "opt", "falcon", "mistral"}  # these compute in float64
LONG, NEW = 7, 6
GREEDY = {"do_sample": False, "max_new_tokens": NEW}
SAMPLED = {"do_sample": True, "top_k": 0, "temperature": 5.0, "max_new_tokens": NEW}


def make(name, **more):
    """Return one of the models, in float64 where its code allows it."""
    kind, options = (MODELS | PAIRS)[name]
    text = {"input_ids": draw(2, LONG)}
    if name in PAIRS:
        text["decoder_input_ids"] = draw(2, 3)
    return build(kind, text, double=name in DOUBLE, **{**options, **more})


def limit_of(name):
    """Return how far a weight may be off."""
    return 1e-9 if name in DOUBLE else 1e-4


def generate(model, text, valid=None, **options):
    """Generate from a seed; return the sequences."""
    torch.manual_seed(0)
    valid = torch.ones_like(text) if valid is None else valid
    return model.generate(text, attention_mask=valid, **options)


def watch_generation(model, *args, **options):
    """Return what is seen, and the sequences: the same as without a watch."""
    with quiet():
        plain = generate(model, *args, **options)
    seen, done = watch_run(model, lambda m: generate(m, *args, **options))
    assert torch.equal(plain, done)
    return seen, done


def compute_truth(model, tokens):
    """Return {layer: weights (H, N, N)} of one pass over a sequence."""
    text = torch.tensor([list(tokens)])
    found = list_softmaxes(model, lambda m: run_plain(m, text, use_cache=False))
    named = {name: x[0] for name, x in group_by_module(found).items() if name}
    return {name: (x[0] if x.ndim == 4 else x) for name, x in named.items()}


def find_layers(seen, number):
    """Return {layer: record} of one sequence; a layer has one record."""
    pairs = zip(seen.records, seen.recording.sequences, strict=True)
    own = [record for record, i in pairs if i == number]
    named = {record.name: record for record in own}
    assert len(named) == len(own)
    return named


def check_sequence(seen, number, model, tokens, *, limit):
    """Assert that a sequence has these tokens, and every weight of their pass."""
    assert seen.recording.tokens[number] == tuple(tokens)
    records, truth = find_layers(seen, number), compute_truth(model, tokens)
    attend = {name: x for name, x in truth.items() if is_square(x)}
    assert records.keys() == attend.keys()
    errors = {}
    for name, dense in attend.items():
        if records[name].sink is not None:  # their softmax has a column for it
            dense = dense[..., : len(tokens)]  # noqa: PLW2901
        errors[name] = find_error(records[name], dense)
    assert {n: x for n, x in errors.items() if not x < limit} == {}


def is_square(weights):
    """Return whether a softmax has as many rows as keys, or one more key: a sink."""
    return weights.ndim == 3 and weights.shape[2] - weights.shape[1] in (0, 1)


def check_batch(seen, done, model, valid, *, limit):
    """Assert that every sequence of a batch was followed to its last token but one."""
    assert set(seen.recording.sequences) == set(range(len(done)))
    for b, row in enumerate(done):
        start = int((valid[b % len(valid)] == 0).sum())
        check_sequence(seen, b, model, row[start:-1].tolist(), limit=limit)


# --- greedy, sampling, several at once ------------------------------------------------


@pytest.mark.parametrize("padded", [False, True], ids=["full", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy(name, padded):
    model, valid = make(name), pad(LONG, LONG, 4 if padded else LONG, side="left")
    seen, done = watch_generation(model, draw(2, LONG), valid, **GREEDY)
    check_batch(seen, done, model, valid, limit=limit_of(name))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "bloom", "xglm"])
def test_sampling(name):
    model, valid = make(name), pad(LONG, LONG, 4, side="left")
    seen, done = watch_generation(model, draw(2, LONG), valid, **SAMPLED)
    check_batch(seen, done, model, valid, limit=limit_of(name))


@pytest.mark.parametrize("name", ["llama", "bloom", "gptj"])
def test_several_continuations_of_each_prompt(name):
    model, valid = make(name), pad(LONG, LONG, 4, side="left")
    options = {**SAMPLED, "num_return_sequences": 3}
    seen, done = watch_generation(model, draw(2, LONG), valid, **options)
    assert len({tuple(x.tolist()) for x in done}) == 6
    wide = valid.repeat_interleave(3, 0)
    check_batch(seen, done, model, wide, limit=limit_of(name))


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_without_a_cache_the_last_pass_has_everything(name):
    model = make(name)
    seen, done = watch_generation(model, draw(2, LONG), use_cache=False, **GREEDY)
    last = {tokens: number for number, tokens in enumerate(seen.recording.tokens)}
    for row in done[:, :-1].tolist():
        number = last[tuple(row)]
        check_sequence(seen, number, model, row, limit=limit_of(name))


@pytest.mark.parametrize("name", ["llama", "mistral", "bloom"])
def test_two_generations_in_one_watch(name):
    model = make(name)
    texts = draw(1, 5), draw(1, LONG, seed=3)
    seen, done = watch_run(model, lambda m: [generate(m, x, **GREEDY) for x in texts])
    assert set(seen.recording.sequences) == {0, 1}
    for number, row in enumerate(done):
        tokens = row[0, :-1].tolist()
        check_sequence(seen, number, model, tokens, limit=limit_of(name))


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_a_conversation_that_goes_on_with_its_cache(name):
    model = make(name)

    def talk(model):
        first = generate(model, draw(1, 5), return_dict_in_generate=True, **GREEDY)
        text = torch.cat([first.sequences, draw(1, 4, seed=5)], 1)
        return generate(model, text, past_key_values=first.past_key_values, **GREEDY)

    with quiet():
        plain = talk(model)
    seen, done = watch_run(model, talk)
    assert torch.equal(plain, done)
    assert set(seen.recording.sequences) == {0}
    check_sequence(seen, 0, model, done[0, :-1].tolist(), limit=limit_of(name))


# --- caches ---------------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, 12])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma2", "gpt-oss"])
def test_static_caches(name, length):
    model = make(name)
    valid = pad(length, length, 2, side="left")
    options = {**GREEDY, "cache_implementation": "static"}
    seen, done = watch_generation(model, draw(2, length), valid, **options)
    check_batch(seen, done, model, valid, limit=limit_of(name))


@pytest.mark.parametrize("length", [3, 5, 12])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt-oss", "gpt-neo"])
def test_caches_that_forget(name, length):
    model = make(name)
    valid = pad(length, length, 2, side="left")
    options = {"do_sample": False, "max_new_tokens": 9}
    seen, done = watch_generation(model, draw(2, length), valid, **options)
    check_batch(seen, done, model, valid, limit=limit_of(name))


def test_a_new_cache_begins_a_sequence_of_its_own():
    """Its text begins as the one before it: that is no generation without a cache."""
    model, text = make("llama"), draw(1, 6)
    caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]

    def read(model):
        for cache, n in zip(caches, (5, 6), strict=True):
            run_plain(model, text[:, :n], past_key_values=cache)

    seen, _ = watch_run(model, read)
    assert set(seen.recording.sequences) == {0, 1}
    for number, n in enumerate((5, 6)):
        tokens = text[0, :n].tolist()
        check_sequence(seen, number, model, tokens, limit=limit_of("llama"))


def test_two_answers_to_one_text_are_two_sequences():
    model, text, answers = make("bart"), draw(1, 6), draw(2, 3, seed=5)

    def read(model):
        for answer in answers:
            run_plain(model, text, decoder_input_ids=answer[None])

    seen, _ = watch_run(model, read)
    rows = [x.q.shape[1] for x in seen.records if "encoder_attn" in x.name]
    assert rows == [3] * 4  # two layers, twice


def test_a_prompt_in_pieces_is_one_sequence():
    model, text = make("llama"), draw(2, 9)
    cache = transformers.DynamicCache(config=model.config)

    def read(model):
        for part in text.split((4, 3, 1, 1), 1):
            run_plain(model, part, past_key_values=cache)

    seen, _ = watch_run(model, read)
    assert set(seen.recording.sequences) == {0, 1}
    for b, row in enumerate(text.tolist()):
        check_sequence(seen, b, model, row, limit=limit_of("llama"))


# --- guesses that may be rejected -----------------------------------------------------


def make_guesser(name, model, *, alpha):
    """Return a model that guesses well, but not always."""
    other = make(name)
    rng = torch.Generator().manual_seed(4)
    with torch.no_grad():
        head = other.get_output_embeddings().weight
        other.set_output_embeddings(nn.Linear(*head.shape[::-1], bias=False))
        noise = torch.randn(head.shape, generator=rng).to(head.dtype)
        other.get_output_embeddings().weight.data = head + alpha * noise
    return other


class CountRejected:
    """Counts guesses, and how many of them the model took."""

    def __init__(self):
        self.rounds, self.rejected = 0, 0

    def attach(self, monkeypatch):
        """Listen where transformers tells its guesser how many matched."""
        base = transformers.generation.candidate_generator.CandidateGenerator
        kinds = [base, *base.__subclasses__()]
        for kind in kinds:
            if "update_candidate_strategy" in vars(kind):
                own = vars(kind)["update_candidate_strategy"]

                def update(other, ids, scores, matches, own=own):
                    self.rounds += 1
                    self.rejected += scores.shape[1] - 1 - int(matches)
                    return own(other, ids, scores, matches)

                monkeypatch.setattr(kind, "update_candidate_strategy", update)


def check_guessed(seen, done, model, *, limit):
    """Assert one sequence: what was accepted, and nothing that was rejected."""
    assert set(seen.recording.sequences) == {0}
    (tokens,) = seen.recording.tokens
    final = done[0].tolist()
    assert len(final) - 1 <= len(tokens) <= len(final)  # the last need not be read
    assert list(tokens) == final[: len(tokens)]
    check_sequence(seen, 0, model, tokens, limit=limit)


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "name", ["llama", "llama-eager", "gpt2", "mistral", "gptj", "codegen"]
)
def test_assisted_decoding(name, sample, monkeypatch):
    model = make(name)
    other, count = make_guesser(name, model, alpha=0.3), CountRejected()
    count.attach(monkeypatch)
    options = {"do_sample": sample, "max_new_tokens": 24, "assistant_model": other}
    if sample:
        options |= {"temperature": 0.7, "top_k": 0}
    seen, done = watch_generation(model, draw(1, LONG), **options)
    assert count.rounds > 1
    assert count.rejected > 0  # else nothing is tested
    check_guessed(seen, done, model, limit=limit_of(name))


@pytest.mark.parametrize("name", ["llama", "llama-eager", "gpt2", "bloom", "mistral"])
def test_prompt_lookup(name, monkeypatch):
    model, count = make(name), CountRejected()
    count.attach(monkeypatch)
    text = draw(1, 4).repeat(1, 3)
    options = {"do_sample": False, "max_new_tokens": 20, "prompt_lookup_num_tokens": 5}
    seen, done = watch_generation(model, text, **options)
    assert count.rejected > 0
    check_guessed(seen, done, model, limit=limit_of(name))


@pytest.mark.parametrize("rejected", [1, 3])
def test_guesses_that_are_rejected_in_the_last_round(rejected):
    model, text = make("llama"), draw(1, 9)

    def read(model):
        cache = transformers.DynamicCache(config=model.config)
        run_plain(model, text[:, :5], past_key_values=cache)
        run_plain(model, text[:, 5:], past_key_values=cache)
        cache.crop(-rejected)

    seen, _ = watch_run(model, read)
    assert set(seen.recording.sequences) == {0}
    tokens = text[0, : 9 - rejected].tolist()
    check_sequence(seen, 0, model, tokens, limit=limit_of("llama"))


def test_guesses_that_are_cut_off_by_hand():
    model, text = make("llama"), draw(1, 12)

    def read(model):
        cache = transformers.DynamicCache(config=model.config)
        run_plain(model, text[:, :5], past_key_values=cache)
        run_plain(model, text[:, 5:9].flip(1), past_key_values=cache)
        cache.crop(-3)  # one of four is taken
        run_plain(model, text[:, 9:], past_key_values=cache)

    seen, _ = watch_run(model, read)
    assert set(seen.recording.sequences) == {0}
    tokens = [*text[0, :5].tolist(), int(text[0, 8]), *text[0, 9:].tolist()]
    check_sequence(seen, 0, model, tokens, limit=limit_of("llama"))


@pytest.mark.parametrize("name", ["llama", "llama-eager"])
def test_a_model_that_guesses_with_its_own_first_layers(name):
    model = make(name)
    options = {"do_sample": False, "max_new_tokens": 12, "assistant_early_exit": 1}
    seen, done = watch_generation(model, draw(1, LONG), **options)
    check_or_report(seen, model, [done[0, :-1].tolist()], limit=limit_of(name))


# --- sequences that change places -----------------------------------------------------


def list_reported(seen):
    """Return the modules that attended and are not recorded, with a reason."""
    return {
        name
        for name, entries in group_coverage(seen).items()
        if any(x.reason and x.calls for x in entries)
    }


def check_or_report(seen, model, finals, *, limit):
    """Assert that these sequences were followed, or their layers say why not.

    Whatever is recorded is right for the tokens that are given with it.
    """
    heard = {
        name for name, xs in group_coverage(seen).items() if any(x.calls for x in xs)
    }
    kept = {record.name.split("#")[0] for record in seen.records}
    missing = heard - kept - list_reported(seen)
    gates = {
        x.name.split("#")[0] for x in seen.coverage() if not getattr(x, "attention", 1)
    }
    assert missing - gates == set()
    for number in sorted(set(seen.recording.sequences)):
        tokens, records = seen.recording.tokens[number], find_layers(seen, number)
        told = all(explain(seen, name.split("#")[0]) for name in records)
        assert tokens or told
        if told:
            continue
        truth = compute_truth(model, tokens)
        errors = {n: find_error(r, truth[n]) for n, r in records.items()}
        assert {n: x for n, x in errors.items() if not x < limit} == {}
    if not list_reported(seen):
        assert {tuple(x) for x in finals} <= set(seen.recording.tokens)


@pytest.mark.parametrize("beams", [2, 4])
@pytest.mark.parametrize(
    "name", ["llama", "llama-eager", "gpt2", "mistral", "bloom", "gptj", "xglm"]
)
def test_beam_search(name, beams):
    model, valid = make(name), pad(LONG, LONG, 4, side="left")
    options = {**GREEDY, "num_beams": beams, "length_penalty": 0.0}
    seen, done = watch_generation(model, draw(2, LONG), valid, **options)
    finals = [
        row[int((real == 0).sum()) : -1].tolist()
        for row, real in zip(done, valid, strict=True)
    ]
    check_or_report(seen, model, finals, limit=limit_of(name))


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_a_cache_that_is_reordered_by_hand(name):
    model, text = make(name), draw(3, 6)
    order = torch.tensor([2, 0, 0])
    more = draw(3, 3, seed=8)

    def read(model):
        cache = run_plain(model, text, use_cache=True).past_key_values
        run_plain(model, more[:, :1], past_key_values=cache)
        cache.reorder_cache(order)
        run_plain(model, more[:, 1:], past_key_values=cache)

    seen, _ = watch_run(model, read)
    whole = torch.cat([text, more[:, :1]], 1)[order]
    finals = torch.cat([whole, more[:, 1:]], 1).tolist()
    check_or_report(seen, model, finals, limit=limit_of(name))


@pytest.mark.parametrize("times", [1, 2])
def test_sequences_with_the_same_keys_follow_what_the_cache_was_told(times):
    """Without positions, and but for their padding, the first layer has the same keys."""
    model, text, more = make("bloom"), draw(1, 6).repeat(2, 1), draw(2, 2, seed=8)
    valid = pad(6, 6, 4, side="left")
    after = valid.flip(0) if times == 1 else valid

    def read(model):
        done = run_plain(model, text, attention_mask=valid, use_cache=True)
        for _ in range(times):
            done.past_key_values.reorder_cache(torch.tensor([1, 0]))
        mask = torch.cat([after, torch.ones_like(more)], 1)
        run_plain(
            model, more, attention_mask=mask, past_key_values=done.past_key_values
        )

    seen, _ = watch_run(model, read)
    for b in (0, 1):
        tokens = torch.cat([text[b][after[b].bool()], more[b]]).tolist()
        check_sequence(seen, b, model, tokens, limit=limit_of("bloom"))


@pytest.mark.parametrize("name", ["crop", "reorder"])
def test_an_error_about_a_cache_is_reported_and_not_raised(name, monkeypatch):
    model, text = make("llama"), draw(2, 6)

    def fail(*args, **named):
        raise RuntimeError("one of ours")

    def read(model):
        cache = run_plain(model, text, use_cache=True).past_key_values
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.crop(-2)

    monkeypatch.setattr(Passes, name, fail)
    seen, _ = watch_run(model, read)
    assert any("one of ours" in x.reason for x in seen.coverage())


def test_a_cache_from_before_the_watch_has_no_tokens():
    model, text = make("llama"), draw(1, 9)
    with quiet():
        cache = run_plain(model, text[:, :6], use_cache=True).past_key_values
    seen, _ = watch_run(
        model, lambda m: run_plain(m, text[:, 6:], past_key_values=cache)
    )
    assert seen.recording.tokens == ((),)
    for entry in seen.coverage():
        assert "cached before the watch" in entry.note
    truth = compute_truth(model, text[0].tolist())
    for record in seen.records:
        assert record.q_positions.tolist() == [6, 7, 8]
        own = torch.as_tensor(record.weights())
        assert float((own - truth[record.name][:, 6:]).abs().max()) < limit_of("llama")


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_a_contrastive_search_by_hand(name):
    """Each step tries three tokens, and goes on with the cache of one of them."""
    model, text = make(name), draw(2, 6)

    def search(model):
        done = run_plain(model, text, use_cache=True)
        cache, logits, out = done.past_key_values, done.logits[:, -1], text
        for step in range(4):
            tried = logits.topk(3).indices.reshape(-1, 1)
            cache.batch_repeat_interleave(3)
            done = run_plain(model, tried, past_key_values=cache)
            best = torch.arange(2) * 3 + (step + 1) % 3
            cache.batch_select_indices(best)
            logits = done.logits[best, -1]
            out = torch.cat([out, tried[best]], 1)
        return out

    with quiet():
        plain = search(model)
    seen, done = watch_run(model, search)
    assert torch.equal(plain, done)
    check_or_report(seen, model, done.tolist(), limit=limit_of(name))


# --- encoders and decoders ------------------------------------------------------------


def compute_pair_truth(model, text, valid, answer):
    """Return {layer: weights (B, H, Nq, Nk)} of one pass over text and answer."""
    found = list_softmaxes(
        model,
        lambda m: run_plain(
            m, text, attention_mask=valid, decoder_input_ids=answer, use_cache=False
        ),
    )
    return {name: x[0] for name, x in group_by_module(found).items()}


def measure_pair(record, dense, valid):
    """Return the error of a record of an encoder or a decoder, padding aside."""
    n_q, n_k = dense.shape[-2:]
    real = {
        side: valid for side, n in (("real_q", n_q), ("real_k", n_k)) if n == len(valid)
    }
    return find_error(record, dense, **real)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", PAIRS)
def test_greedy_of_a_pair(name, side):
    model, text, valid = make(name), draw(2, 9), pad(9, 9, 5, side=side)
    seen, done = watch_generation(model, text, valid, **GREEDY)
    truth = compute_pair_truth(model, text, valid, done[:, :-1])
    assert len(truth) == 6
    wrong = {}
    for b in range(2):
        records = find_layers(seen, b)
        assert records.keys() == truth.keys()
        for layer, dense in truth.items():
            error = measure_pair(records[layer], dense[b], valid[b])
            if not error < 1e-4:
                wrong[b, layer] = error
    assert wrong == {}


@pytest.mark.parametrize("name", PAIRS)
def test_several_answers_of_a_pair(name):
    model, text, valid = make(name), draw(2, 9), pad(9, 9, 5, side="right")
    options = {**SAMPLED, "num_return_sequences": 2}
    seen, done = watch_generation(model, text, valid, **options)
    assert len({tuple(x.tolist()) for x in done}) == 4
    wide, real = (x.repeat_interleave(2, 0) for x in (text, valid))
    truth = compute_pair_truth(model, wide, real, done[:, :-1])
    for layer, dense in truth.items():
        inside = "encoder." in layer and "decoder." not in layer
        own = [r for r in seen.records if r.name == layer]
        for b in range(4):
            record = own[b // 2] if inside and len(own) == 2 else own[b]
            assert measure_pair(record, dense[b], real[b]) < 1e-4, (layer, b)


@pytest.mark.parametrize("name", PAIRS)
def test_beam_search_of_a_pair(name):
    model, text, valid = make(name), draw(2, 9), pad(9, 9, 5, side="right")
    options = {**GREEDY, "num_beams": 3, "num_return_sequences": 3}
    options["length_penalty"] = 0.0
    seen, done = watch_generation(model, text, valid, **options)
    wide, real = (x.repeat_interleave(3, 0) for x in (text, valid))
    truth = compute_pair_truth(model, wide, real, done[:, :-1])
    for layer, dense in truth.items():
        own = [r for r in seen.records if r.name == layer]
        if not own:
            assert layer in list_reported(seen)
            continue
        for b in range(6):  # every beam that came out was followed
            errors = [measure_pair(record, dense[b], real[b]) for record in own]
            assert min(errors) < 1e-4, (layer, b)


# --- wrappers -------------------------------------------------------------------------


class LoRALinear(nn.Module):
    """A linear layer and a product of two narrow ones, added to it."""

    def __init__(self, base, rank=2):
        super().__init__()
        rng = torch.Generator().manual_seed(6)
        wide, deep = base.in_features, base.out_features
        self.base_layer = base
        self.lora_A = nn.Linear(wide, rank, bias=False).to(base.weight)
        self.lora_B = nn.Linear(rank, deep, bias=False).to(base.weight)
        with torch.no_grad():
            for part in (self.lora_A, self.lora_B):
                drawn = torch.randn(part.weight.shape, generator=rng)
                part.weight.copy_(drawn * 0.5)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Adapted(nn.Module):
    """What PEFT makes of a model: a wrapper in a wrapper that hands everything on."""

    def __init__(self, model):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if name in {"q_proj", "v_proj", "query_key_value"}:
                    setattr(module, name, LoRALinear(child))

    def forward(self, *args, **named):
        return self.base_model.model(*args, **named)

    def generate(self, *args, **named):
        return self.base_model.model.generate(*args, **named)


def test_tokens_that_are_computed_again_are_reported():
    """XLNet computes its last tokens again in every step, with keys that are new."""
    config = transformers.XLNetConfig(
        vocab_size=200, d_model=32, n_layer=2, n_head=4, d_inner=64
    )
    model, text = transformers.XLNetLMHeadModel(config).eval(), draw(1, LONG)
    seen, _ = watch_generation(model, text, **GREEDY)
    assert {x.note for x in seen.coverage()} == {PLACE}
    with regard.watch(model) as seen:
        model(text)
    assert {x.note for x in seen.coverage()} == {""}


@pytest.mark.parametrize("name", ["llama", "mistral", "gptj", "bloom"])
def test_an_adapter_around_a_model(name):
    model = Adapted(make(name)).eval()
    valid = pad(LONG, LONG, 4, side="left")
    seen, done = watch_generation(model, draw(2, LONG), valid, **GREEDY)
    for b, row in enumerate(done):
        tokens = row[3 * b : -1].tolist()
        check_sequence(seen, b, model, tokens, limit=limit_of(name))
    assert all(layer.startswith("base_model.model.") for layer in seen.layers)


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_knocked_out_tokens_stay_out_through_a_generation(name):
    """The record of an edited generation is that of an edited pass."""
    model, text = make(name), draw(1, LONG)
    run = lambda m: generate(m, text, **GREEDY)  # noqa: E731
    with regard.ablate.knock_out(model, keys=[2], queries=range(4, LONG + NEW - 1)):
        seen, done = watch_run(model, run)
    assert seen.recording.tokens == (tuple(done[0, :-1].tolist()),)
    for record in seen.records:
        weights = record.weights()
        assert weights.shape[1:] == (LONG + NEW - 1,) * 2
        assert float(weights[:, 4:, 2].abs().max()) == 0
        total = weights.sum(-1)
        assert float((total - 1).abs().max()) < 1e-5
