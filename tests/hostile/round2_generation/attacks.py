"""Situations that mislead: prefixes, short encoders, inner passes, edits."""

import copy

import numpy as np
import regard
import torch
from caches import SIZES, V, batch, finals, gemma3, gen, llama, mistral, text
from families import DECODERS, SMALL, build, compare_steps, logged_forward
from hidden import ENC, bart, seq_steps, t5, whisper
from oracle import (
    Log, compare, dense_record, final_text, main, report, situation, watched,
)
from transformers import (
    BertConfig, BertModel, DynamicCache, LlamaForCausalLM, LogitsProcessor,
    LogitsProcessorList, StaticCache,
)


def by_log(seen, log, names=None):
    """Each logged call, by order, must be one sequence's record: encoders.

    The passes of a layer are the sequences of its records, in order.
    """
    bad = []
    for name in dict.fromkeys(n for n, _ in log.calls):
        if name not in seen.layers:
            bad.append(f"{name} is not recorded")
            continue
        want = [w[b].numpy() for w in log.of(name) for b in range(len(w))]
        for s, x in enumerate(want):
            try:
                got = np.asarray(seen.layer(name, sequence=s).weights())
            except Exception as e:
                bad.append(f"{name}/{s}: lost ({type(e).__name__})")
                continue
            if got.shape != x.shape:
                bad.append(f"{name}/{s}: shape {got.shape} for {x.shape}")
            elif np.abs(got - x).max() > 1e-3:
                bad.append(f"WRONG {name}/{s} by {np.abs(got - x).max():.3g}")
    return bad


def growing(name, make, step=1, **more):
    """The same text, one token longer each time: no cache, both directions."""
    def f():
        model, ids = make(), text(10, 3)[None]

        def run(m):
            with torch.no_grad():
                return [m(ids[:, :n], **more)[0] for n in range(4, 4 + 3 * step, step)]
        with Log(model) as log:
            run(model)
        seen, _, bad = watched(model, run)
        report(seen)
        return bad + by_log(seen, log)
    f.__name__ = name
    situation(f)


def bert():
    return build("BertModel", "BertConfig", **ENC)


growing("bert_on_growing_prefixes", bert)
growing("bert_on_prefixes_that_grow_by_two", bert, 2)
growing("deberta_on_growing_prefixes", lambda: build(
    "DebertaV2Model", "DebertaV2Config", **ENC, relative_attention=True,
    pos_att_type=["c2p", "p2c"], position_buckets=4))


@situation
def bert_same_text_other_padding():
    """The same ids with another attention_mask: keys of the first layer are equal."""
    model, ids = bert(), text(8, 3)[None]
    masks = [torch.ones(1, 8).long() for _ in range(3)]
    masks[1][0, 6:] = 0
    masks[2][0, :2] = 0

    def run(m):
        with torch.no_grad():
            return [m(ids, attention_mask=x)[0] for x in masks]
    with Log(model) as log:
        run(model)
    seen, _, bad = watched(model, run)
    report(seen)
    for i in range(2):
        name = f"encoder.layer.{i}.attention.self"
        for s, w in enumerate(log.of(name)):
            real = masks[s][0].numpy() > 0
            r = seen.layer(name, sequence=s)
            got, want = np.asarray(r.weights()), w[0].numpy()[:, real][:, :, real]
            if got.shape != want.shape or np.abs(got - want).max() > 1e-3:
                bad.append(f"WRONG {name}/{s} {got.shape}")
    return bad


@situation
def bloom_text_prefixes_without_positions():
    """ALiBi: keys of layer 0 do not depend on positions. Texts that share a start."""
    model = DECODERS["bloom_alibi"]()
    a, b = text(9, 1), text(9, 2)
    b[:5] = a[:5]
    texts = [a[:5], b[:7], a[:8], a[:6]]

    def run(m):
        return [m(x[None], use_cache=False).logits for x in texts]
    with torch.no_grad(), Log(model) as log:
        run(model)
    with torch.no_grad():
        seen, _, bad = watched(model, run)
    report(seen)
    return bad + by_log(seen, log)


@situation
def options_scored_on_one_cache():
    """Multiple choice: each option continues one cache, which is cropped after it."""
    model = llama()

    def run(m):
        cache, outs = DynamicCache(), []
        m(text(6, 1)[None], past_key_values=cache)
        for i in range(3):
            outs.append(m(text(3, 30 + i)[None], past_key_values=cache).logits)
            cache.crop(-3)
        return outs
    with torch.no_grad():
        seen, _, bad = watched(model, run)
    report(seen)
    texts = [torch.cat([text(6, 1), text(3, 30 + i)]) for i in range(3)]
    wants = [final_text(model, x) for x in texts]
    n = 0
    for r in seen.records:
        i = 0 if "layers.0" in r.name else 1
        got = dense_record(r, 9, 9)
        have = ~np.isnan(got[0, :, 0])
        n += have.sum()
        if not any(np.abs(got[:, have] - w[i][:, have]).max() < 1e-3 for w in wants):
            bad.append(f"WRONG {r.name} {r.shape}: none of the texts")
    return bad


def short_encoder(name, make, n, prefix):
    def f():
        model = make()
        ids, mask = text(2, 0)[:0], None
        ids = torch.stack([text(n, 1), text(n, 2)])
        mask = torch.ones_like(ids)
        dec = torch.stack([text(prefix, 5), text(prefix, 6)])

        def run(m):
            return m.generate(ids, attention_mask=mask, decoder_input_ids=dec,
                              max_new_tokens=5, min_new_tokens=5, do_sample=False)
        with Log(model) as log:
            run(model)
        seen, _, bad = watched(model, run)
        report(seen)
        return bad + seq_steps(seen, log, None)
    f.__name__ = name
    situation(f)


short_encoder("encoder_of_one_token_t5", t5, 1, 1)
short_encoder("encoder_of_one_token_bart", bart, 1, 1)
short_encoder("encoder_of_two_tokens_bart", bart, 2, 2)
short_encoder("decoder_prefix_as_long_as_encoder_t5", t5, 4, 4)
short_encoder("decoder_prefix_as_long_as_encoder_bart", bart, 4, 4)
short_encoder("decoder_prefix_one_shorter_bart", bart, 5, 4)
short_encoder("decoder_prefix_longer_than_encoder_bart", bart, 3, 6)
short_encoder("decoder_prefix_longer_than_encoder_t5", t5, 3, 6)


def seq_to_seq_case(name, make, **more):
    def f():
        model = make()
        ids = text(7, 1)[None]

        def run(m):
            return m.generate(ids, attention_mask=torch.ones_like(ids),
                              max_new_tokens=9, min_new_tokens=9, do_sample=False,
                              **{k: v(m) if callable(v) else v
                                 for k, v in more.items()})
        seen, out, bad = watched(model, run)
        report(seen)
        # oracle: one teacher-forced pass over the result
        with torch.no_grad(), Log(model) as log:
            model(input_ids=ids, decoder_input_ids=out[:, :-1], use_cache=False)
        return bad + seq_steps(seen, log, None)
    f.__name__ = name
    situation(f)


seq_to_seq_case("prompt_lookup_bart", bart, prompt_lookup_num_tokens=3)
seq_to_seq_case("prompt_lookup_t5", t5, prompt_lookup_num_tokens=2)


def helper(model):
    other = copy.deepcopy(model)
    g = torch.Generator().manual_seed(3)
    for p in other.parameters():
        p.data += 0.02 * torch.randn(p.shape, generator=g)
    return other


seq_to_seq_case("assisted_bart", bart, assistant_model=helper)
seq_to_seq_case("no_cache_bart", bart, use_cache=False)
seq_to_seq_case("no_cache_t5", t5, use_cache=False)
seq_to_seq_case("static_cache_bart", bart, cache_implementation="static")
seq_to_seq_case("one_sequence_beams_bart", bart, num_beams=1)


@situation
def classifier_free_guidance():
    """The same model runs a second text, with a cache of its own, at every step."""
    model = llama()
    p, neg = text(6, 1)[None], text(4, 2)[None]
    seen, out, bad = watched(model, lambda m: gen(
        m, p, n=6, guidance_scale=1.7, negative_prompt_ids=neg,
        negative_prompt_attention_mask=torch.ones_like(neg)))
    report(seen)
    new = out[:, 6:]
    want = finals(model, out) + finals(model, torch.cat([neg, new], 1))
    return bad + compare(seen, want)


@situation
def guidance_batch_left_padded():
    model = llama()
    ids, mask = batch([6, 4])
    neg, nmask = batch([3, 5], seed=40)
    seen, out, bad = watched(model, lambda m: gen(
        m, ids, mask, n=6, guidance_scale=1.7, negative_prompt_ids=neg,
        negative_prompt_attention_mask=nmask))
    report(seen)
    want = finals(model, out, mask)
    return bad + compare(seen, want)


class Inner(LogitsProcessor):
    """Runs the same model on the text so far, as a reward or a check."""

    def __init__(self, model):
        self.model = model

    def __call__(self, input_ids, scores):
        extra = self.model(input_ids.flip(1), use_cache=False).logits[:, -1]
        return scores + 0.1 * extra


@situation
def logits_processor_runs_the_model():
    model = llama()
    p = text(6, 1)[None]
    seen, out, bad = watched(model, lambda m: gen(
        m, p, n=4, logits_processor=LogitsProcessorList([Inner(m)])))
    report(seen)
    wants = finals(model, out) + [
        final_text(model, out[0, :n].flip(0)) for n in range(6, 10)]
    full = [False] * len(wants)
    for s in range(20):
        try:
            r = seen.layer(1, sequence=s)
        except Exception:
            break
        ok = False
        for j, w in enumerate(wants):
            n = w[1].shape[1]
            try:
                got = dense_record(r, n, n)
            except Exception:
                continue
            have = ~np.isnan(got[0, :, 0])
            if np.abs(got[:, have] - w[1][:, have]).max() < 1e-3:
                ok = True
                full[j] = full[j] or have[: n - (j == 0)].all()
        if not ok:
            bad.append(f"WRONG sequence {s}")
    if not all(full):
        bad.append(f"not whole: {full}")
    return bad


@situation
def assistant_early_exit():
    """Self-speculative decoding: the first layers of the model are the assistant."""
    model = llama()
    p = text(6, 1)[None]
    seen, out, bad = watched(model, lambda m: gen(m, p, n=8, assistant_early_exit=1))
    report(seen)
    want = finals(model, out)  # the assistant, which runs first, has one layer only
    bad += compare(seen, [[], want[0]])
    short = seen.layer(0, sequence=0)
    got = np.asarray(short.weights())
    n = got.shape[1]
    if n < 10 or np.abs(got - want[0][0][:, :n, :n]).max() > 1e-3:
        bad.append(f"WRONG assistant {got.shape}")
    return bad


@situation
def dola_or_stop():
    model = llama()
    p = text(6, 1)[None]
    seen, out, bad = watched(model, lambda m: gen(
        m, p, n=6, output_hidden_states=True, return_dict_in_generate=True,
        output_scores=True).sequences)
    return bad + compare(seen, finals(model, out))


@situation
def batched_chat_with_holes():
    """Turn 2 of a batched chat: padding between the turns, one cache."""
    model = llama()
    ids, mask = batch([6, 3])

    def run(m):
        cache = DynamicCache()
        first = gen(m, ids, mask, n=3, past_key_values=cache)
        two, more = batch([4, 2], seed=60)
        whole = torch.cat([first, two], 1)
        some = torch.cat([mask, torch.ones(2, 3).long(), more], 1)
        return gen(m, whole, some, n=4, past_key_values=cache), some
    with Log(model) as log:
        run(model)
    seen, (out, some), bad = watched(model, run)
    report(seen)
    for b in range(2):
        for i in range(2):
            ws = log.of(f"model.layers.{i}.self_attn")
            r = seen.layer(i, sequence=b)
            got, qp, kp = (np.asarray(x) for x in (
                r.weights(), r.q_positions, r.k_positions))
            real = np.concatenate([some[b].numpy(), np.ones(9, int)]) > 0
            place = np.flatnonzero(real)  # of a token, its slot
            n = out.shape[1]
            if len(kp) == n - 1:
                place = np.arange(n)
            end = 0
            for w in ws:
                first, end = end, w.shape[-1]
                first = end - w.shape[2]
                for j, slot in enumerate(range(first, end)):
                    where = np.flatnonzero(place[qp] == slot)
                    if not len(where):
                        if real[slot]:
                            bad.append(f"row {slot} of {i}/{b} is lost")
                        continue
                    row = np.zeros((4, n + 9))
                    row[:, place[kp]] = got[:, where[0]]
                    off = np.abs(row[:, :end] - w[b, :, j].numpy()).max()
                    if off > 1e-3:
                        bad.append(f"WRONG row {slot} of {i}/{b} by {off:.2f}")
            if len(kp) == n - 1 and b:
                bad.append(f"padding is kept in {i}/{b}: positions are not tokens")
    return bad


@situation
def beams_static_cache():
    return beams_of(llama(), cache_implementation="static")


@situation
def beams_sliding_gemma3():
    return beams_of(gemma3(), n=12)


@situation
def beams_without_cache():
    return beams_of(llama(), use_cache=False)


@situation
def beams_sampled_returned_all():
    return beams_of(mistral(), n=10, do_sample=True, num_return_sequences=3)


def beams_of(model, n=7, **more):
    ids, mask = batch([6, 4])
    seen, out, bad = watched(
        model, lambda m: gen(m, ids, mask, num_beams=3, n=n, **more))
    report(seen)
    each = len(out) // 2
    for b in range(len(out)):
        row = out[b][int((mask[b // each] == 0).sum()):]
        want, hit = final_text(model, row), False
        for s in range(len(seen.records) // 2):
            ok = True
            for i in (0, 1):
                try:
                    got = dense_record(seen.layer(i, sequence=s), *want[i].shape[1:])
                except Exception:
                    ok = False
                    break
                have = ~np.isnan(got[0, :, 0])
                off = np.abs(got[:, have] - want[i][:, have]).max()
                ok &= bool(have[:-1].all() and off < 1e-3)
            hit |= ok
        if not hit and each == 1:
            bad.append(f"no record equals result {b}")
    # every record must be a text: tokens are known
    for s, tokens in enumerate(seen.recording.tokens):
        if not tokens:
            continue
        want = final_text(model, torch.tensor(tokens))
        for i in (0, 1):
            got = dense_record(seen.layer(i, sequence=s), *want[i].shape[1:])
            have = ~np.isnan(got[0, :, 0])
            off = np.abs(got[:, have] - want[i][:, have]).max()
            if off > 1e-3:
                bad.append(f"WRONG {i}/{s} for its tokens by {off:.2f}")
    return bad


def tokens_are_right(name, run, model=llama):
    """The tokens of each sequence must be those of its weights."""
    def f():
        m = model()
        seen, _, bad = watched(m, run)
        report(seen)
        for s, tokens in enumerate(seen.recording.tokens):
            want = final_text(m, torch.tensor(tokens))
            for i in (0, 1):
                got = dense_record(seen.layer(i, sequence=s), *want[i].shape[1:])
                have = ~np.isnan(got[0, :, 0])
                off = np.abs(got[:, have] - want[i][:, have]).max()
                if off > 1e-3:
                    bad.append(f"WRONG {i}/{s} for its tokens by {off:.2f}")
        return bad
    f.__name__ = name
    situation(f)


def left(lengths, **more):
    ids, mask = batch(lengths)
    return lambda m: gen(m, ids, mask, **more)


tokens_are_right("tokens_sampled_three_each",
                 left([6, 3], do_sample=True, num_return_sequences=3, n=8))
tokens_are_right("tokens_beams_two_returned",
                 left([6, 3], num_beams=4, num_return_sequences=2, n=8))
tokens_are_right("tokens_prompt_lookup", lambda m: gen(
    m, text(4, 1).repeat(4)[None], n=9, prompt_lookup_num_tokens=3))


@situation
def early_stop_beams_with_eos():
    model = llama()
    ids, mask = batch([6, 4])
    eos = int(gen(model, ids, mask, n=4)[0, 8])
    return beams_of(model, n=9, eos_token_id=eos, early_stopping=True)


@situation
def fully_padded_sequence_in_a_batch():
    model = llama()
    ids, mask = batch([6, 4])
    mask[1] = 0
    return logged_forward(model, lambda m: m(ids, attention_mask=mask).logits)


@situation
def mask_is_bool_or_float():
    bad = []
    for dtype in (torch.bool, torch.float32, torch.int32):
        model = llama()
        ids, mask = batch([9, 5])
        bad += [f"{dtype}: {x}" for x in logged_forward(
            model, lambda m: m(ids, attention_mask=mask.to(dtype)).logits, {9: mask})]
    return bad


@situation
def static_mask_longer_than_the_text():
    """attention_mask of the whole static cache, as compiled loops pass it."""
    model = llama()
    ids, mask = batch([6, 4])

    def run(m):
        cache = StaticCache(config=m.config, max_cache_len=16)
        whole = torch.zeros(2, 16).long()
        whole[:, :6] = mask
        pos = (mask.cumsum(1) - 1).clamp(0)
        out = []
        with torch.no_grad():
            logits = m(ids, attention_mask=whole, past_key_values=cache,
                       position_ids=pos).logits
            for t in range(6, 10):
                new = logits[:, -1].argmax(-1)[:, None]
                out.append(new)
                whole[:, t] = 1
                logits = m(new, attention_mask=whole.clone(), past_key_values=cache,
                           position_ids=pos[:, -1:] + t - 5).logits
        return torch.cat([ids, *out], 1)
    seen, out, bad = watched(model, run)
    report(seen)
    return bad + compare(seen, finals(model, out, mask), rows=[10, 8])


@situation
def prefix_tuning_learnt_keys():
    model = llama()
    g = torch.Generator().manual_seed(1)
    kv = [torch.randn(2, 2, 3, 8, generator=g) for _ in range(4)]
    ids, mask = batch([6, 6])

    def run(m):
        cache = DynamicCache()
        for i in range(2):
            cache.update(kv[2 * i], kv[2 * i + 1], i)
        whole = torch.cat([torch.ones(2, 3).long(), mask], 1)
        with torch.no_grad():
            return m(ids, attention_mask=whole, past_key_values=cache).logits
    with Log(model) as log:
        run(model)
    seen, _, bad = watched(model, run)
    report(seen)
    for i in range(2):
        (w,) = log.of(f"model.layers.{i}.self_attn")
        for b in range(2):
            r = seen.layer(i, sequence=b)
            if r.q_positions.tolist() != list(range(3, 9)):
                bad.append(f"positions {r.q_positions.tolist()}")
            if np.abs(np.asarray(r.weights()) - w[b].numpy()).max() > 1e-3:
                bad.append(f"WRONG {i}/{b}")
    return bad


def sublayer(name, pick):
    def f():
        model = llama()
        ids, mask = batch([9, 5])
        part = pick(model)
        seen, out, bad = watched(part, lambda _: gen(model, ids, mask))
        report(seen)
        # the part is given no attention_mask of tokens: places are those of the batch
        for b, x in enumerate(finals(model, out, mask)):
            r, pad = seen.layer(0, sequence=b), int((mask[b] == 0).sum())
            got, n = np.asarray(r.weights()), x[1].shape[1] - 1
            qp = np.asarray(r.q_positions)
            rows = qp >= pad
            mine = got[:, rows][..., pad:]
            if mine.shape[1] != n or np.abs(mine - x[1][:, :n, :n]).max() > 1e-3:
                bad.append(f"WRONG {b} {got.shape}")
        return bad
    f.__name__ = name
    situation(f)


sublayer("watch_one_layer_only", lambda m: m.model.layers[1])
sublayer("watch_one_attention_only", lambda m: m.model.layers[1].self_attn)


@situation
def accelerate_cpu_offload():
    from accelerate import cpu_offload
    model = llama()
    want_model = llama()
    cpu_offload(model, execution_device=torch.device("cpu"))
    ids = text(8, 1)[None]
    with torch.no_grad():
        seen, _, bad = watched(model, lambda m: m(ids).logits)
    report(seen)
    return bad + compare(seen, [final_text(want_model, ids[0])], rows=8)


@situation
def looped_model_shares_a_layer():
    """Two layers are the same module, with one cache entry each by hand."""
    model = llama()
    model.model.layers[1] = model.model.layers[0]
    ids = text(8, 1)[None]
    return logged_forward(model, lambda m: m(ids, use_cache=False).logits)


def crop_last(name, make, warm, given):
    """A cache is cropped at the end: the rows of rejected guesses must go."""
    def f():
        model = llama()
        cache = DynamicCache()
        if warm:
            with torch.no_grad():
                model(text(6, 1)[None], past_key_values=cache)
        with regard.watch(model) as seen, torch.no_grad():
            ids = text(5, 2)[None]
            more = {"inputs_embeds": model.get_input_embeddings()(ids)} if given \
                else {"input_ids": ids}
            model(**more, past_key_values=cache)
            cache.crop(-2)
        report(seen)
        n = seen.layer(0).shape[1]
        told = [dict(x.left_out) for x in seen.coverage()]
        return [] if n == 3 else [
            f"{n} rows instead of 3: guesses that were rejected are shown ({told[0]})"]
    f.__name__ = name
    situation(f)


crop_last("cropped_at_the_end", None, False, False)
crop_last("cropped_at_the_end_embeds", None, False, True)
crop_last("cropped_at_the_end_cache_of_before", None, True, False)


@situation
def cross_attention_chunk_as_long_as_the_encoder():
    """A decoder continues its cache with as many tokens as the encoder has."""
    from transformers import EncoderDecoderCache
    model, ids, dec = bart(), text(3, 1)[None], text(6, 9)[None]
    with regard.watch(model) as seen, torch.no_grad():
        enc = model.get_encoder()(ids)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        for i in (0, 3):
            model(encoder_outputs=enc, decoder_input_ids=dec[:, i : i + 3],
                  past_key_values=cache)
    report(seen)
    r = seen.layer("model.decoder.layers.0.encoder_attn")
    told = [x.note for x in seen.coverage() if x.note]
    return [] if r.shape[1] == 6 else [
        f"cross-attention has {r.shape[1]} rows of 6, sequences "
        f"{seen.recording.sequences}, notes {told}"]


@situation
def as_many_texts_as_tokens_with_lengths_that_rise():
    """attention_mask is a triangle by chance."""
    model = llama()
    ids, mask = batch([1, 2, 3, 4], "right")
    return logged_forward(model, lambda m: m(ids, attention_mask=mask).logits,
                          {4: mask})


@situation
def two_texts_of_one_and_two_tokens():
    model = llama()
    ids, mask = batch([1, 2], "right")
    return logged_forward(model, lambda m: m(ids, attention_mask=mask).logits,
                          {2: mask}) + rows_of_padding(model, ids, mask, False)


@situation
def triangle_of_lengths_with_embeds():
    model = llama()
    ids, mask = batch([1, 2, 3, 4], "right")
    return rows_of_padding(model, ids, mask, True)


def rows_of_padding(model, ids, mask, embeds):
    with regard.watch(model) as seen, torch.no_grad():
        if embeds:
            model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask)
        else:
            model(ids, attention_mask=mask)
    report(seen)
    return [f"sequence {b}: {seen.layer(0, sequence=b).shape[1]} rows of {int(n)}, "
            "padding is kept" for b, n in enumerate(mask.sum(1))
            if seen.layer(0, sequence=b).shape[1] != n]


@situation
def text_statistics_with_rising_lengths():
    """A BERT batch of rising lengths, as sorted batches are."""
    model = bert()
    ids, mask = batch([2, 3, 4, 5, 5], "right")
    return logged_forward(model, lambda m: m(ids, attention_mask=mask)[0], {5: mask})


@situation
def audit_without_false_alarms():
    bad = []
    for name in ("gpt2", "bloom_alibi", "gpt_oss_sinks", "falcon_alibi", "deepseek_v3",
                 "llama4_chunked", "gemma3n", "cohere2", "opt"):
        model = DECODERS[name]()
        ids, mask = batch([9, 5])
        with regard.watch(model) as seen:
            gen(model, ids, mask, n=5)
        for f in seen.audit(pad=0):
            if str(f).lower().startswith(("error", "warning")):
                bad.append(f"{name}: {f}"[:150])
    return bad


if __name__ == "__main__":
    main()
