"""Decoders: padding, caches, several generations, assisted decoding, beams."""

import copy

import numpy as np
import torch
from oracle import (
    compare, final_text, main, report, situation, spread, watched,
)
from transformers import (
    DynamicCache, Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig,
    LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, StaticCache,
)

V = 60
SIZES = dict(
    vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)


def llama(seed=0, **more):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES | more)).eval()


def mistral(**more):
    torch.manual_seed(1)
    return MistralForCausalLM(
        MistralConfig(**SIZES | {"sliding_window": 6} | more)
    ).eval()


def gemma2(**more):
    torch.manual_seed(2)
    return Gemma2ForCausalLM(Gemma2Config(
        **SIZES | {"head_dim": 8, "sliding_window": 5,
                   "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 4} | more
    )).eval()


def gemma3(**more):
    torch.manual_seed(3)
    return Gemma3ForCausalLM(Gemma3TextConfig(
        **SIZES | {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 1,
                   "layer_types": ["sliding_attention", "full_attention"]} | more
    )).eval()


def text(n, seed=0):
    return torch.randint(2, V, (n,), generator=torch.Generator().manual_seed(seed))


def batch(lengths, side="left", seed=0):
    n = max(lengths)
    ids, mask = torch.zeros(len(lengths), n).long(), torch.zeros(len(lengths), n).long()
    for b, m in enumerate(lengths):
        s = slice(n - m, n) if side == "left" else slice(0, m)
        ids[b, s], mask[b, s] = text(m, seed + b), 1
    return ids, mask


def gen(model, ids, mask=None, n=6, **more):
    more = dict(do_sample=False, max_new_tokens=n, pad_token_id=0,
                suppress_tokens=[0]) | more
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, **more)


def finals(model, out, mask=None, rows=None):
    """Return the expected attention of the sequences of a generation's result."""
    res = []
    for b, row in enumerate(out):
        skip = 0 if mask is None else int((mask[b] == 0).sum())
        res.append(final_text(model, row[skip:]))
    return res


@situation
def left_padded_generate():
    model = llama()
    ids, mask = batch([9, 4, 1])
    seen, out, bad = watched(model, lambda m: gen(m, ids, mask))
    report(seen)
    return bad + compare(seen, finals(model, out, mask))


@situation
def right_padded_forward():
    model = llama()
    ids, mask = batch([9, 4, 1], "right")
    seen, _, bad = watched(model, lambda m: m(ids, attention_mask=mask).logits)
    report(seen)
    want = [final_text(model, ids[b][: int(mask[b].sum())]) for b in range(3)]
    return bad + compare(seen, want, rows=[9, 4, 1])


@situation
def right_padded_generate():
    """The padding is inside of the text: transformers warns, users do it."""
    model = llama()
    ids, mask = batch([7, 4], "right")
    seen, out, bad = watched(model, lambda m: gen(m, ids, mask))
    report(seen)
    want = []
    for b in range(2):
        real = int(mask[b].sum())
        row = torch.cat([out[b][:real], out[b][7:]])
        after = real if real == 7 else 1  # transformers continues from padding's 0
        pos = torch.cat([torch.arange(real), torch.arange(after, after + 6)])
        want.append(final_text(model, row, position_ids=pos[None]))
    return bad + compare(seen, want)


@situation
def two_generates_one_watch():
    model = llama()
    a, b = text(5, 1)[None], text(8, 2)[None]
    seen, (x, y), bad = watched(model, lambda m: (gen(m, a), gen(m, b, n=3)))
    report(seen)
    return bad + compare(seen, finals(model, x) + finals(model, y))


@situation
def same_prompt_twice_one_watch():
    model = llama()
    a = text(5, 1)[None]
    seen, (x, y), bad = watched(model, lambda m: (gen(m, a), gen(m, a, n=3)))
    report(seen)
    return bad + compare(seen, finals(model, x) + finals(model, y))


@situation
def chat_turns_dynamic_cache():
    model = llama()

    def run(m):
        cache = DynamicCache()
        ids = text(5, 1)[None]
        for turn in range(3):
            ids = gen(m, ids, n=4, past_key_values=cache)
            ids = torch.cat([ids, text(3, 10 + turn)[None]], 1)
        return ids[:, :-3]

    seen, out, bad = watched(model, run)
    report(seen)
    return bad + compare(seen, finals(model, out))


@situation
def two_chats_interleaved():
    model = llama()

    def run(m):
        caches, ids = [DynamicCache(), DynamicCache()], [text(5, 1)[None],
                                                        text(5, 2)[None]]
        for turn in range(3):
            for i in (0, 1):
                ids[i] = torch.cat([ids[i], text(2, 10 + 2 * turn + i)[None]], 1)
                ids[i] = gen(m, ids[i], n=3, past_key_values=caches[i])
        return ids

    seen, (x, y), bad = watched(model, run)
    report(seen)
    return bad + compare(seen, finals(model, x) + finals(model, y))


@situation
def two_chats_same_prefix_forked_by_deepcopy():
    model = llama()

    def run(m):
        cache = DynamicCache()
        p = text(6, 1)[None]
        m(p, past_key_values=cache)
        outs = []
        for i in range(3):
            ids = torch.cat([p, text(2 + i, 20 + i)[None]], 1)
            outs.append(gen(m, ids, n=3, past_key_values=copy.deepcopy(cache)))
        return outs

    with torch.no_grad():
        seen, outs, bad = watched(model, run)
    report(seen)
    # what is shown must be right; which sequence is which: print
    return bad + fork_check(seen, model, outs, 6)


def fork_check(seen, model, outs, prefix):
    """Each text of outs must be in the records: its rows from prefix on."""
    bad, n = [], len(seen.records) // 2
    wants = [final_text(model, o[0]) for o in outs]
    from oracle import dense_record
    hits = set()
    for s in range(n):
        r = [seen.layer(i, sequence=s) for i in (0, 1)]
        found = None
        for j, w in enumerate(wants):
            try:
                g = [dense_record(x, *w[0].shape[1:]) for x in r]
            except Exception:
                continue
            have = ~np.isnan(g[0][0, :, 0])
            if all(
                np.nanmax(np.abs(a[:, have] - b[:, have])) < 1e-3 for a, b in zip(g, w)
            ):
                found = j
                need = np.arange(len(have))[prefix:-1]
                if have[need].all():
                    hits.add(j)
                    break
        if found is None:
            bad.append(f"WRONG sequence {s}: is no text that ran; {r[0].shape}")
    lost = set(range(len(outs))) - hits
    return bad + ([f"rows of texts {lost} are lost"] if lost else [])


@situation
def cropped_cache_by_hand_and_other_continuation():
    model = llama()

    def run(m):
        cache = DynamicCache()
        p = text(6, 1)[None]
        a = gen(m, p, n=5, past_key_values=cache)
        cache.crop(4 - cache.get_seq_length())
        ids = torch.cat([p[:, :4], text(4, 33)[None]], 1)
        return a, gen(m, ids, n=4, past_key_values=cache)

    seen, (a, b), bad = watched(model, run)
    report(seen)
    return bad + compare(seen, finals(model, b))


@situation
def cropped_to_zero():
    model = llama()

    def run(m):
        cache = DynamicCache()
        a = gen(m, text(6, 1)[None], n=5, past_key_values=cache)
        cache.crop(-cache.get_seq_length())
        return a, gen(m, text(6, 5)[None], n=4, past_key_values=cache)

    seen, (a, b), bad = watched(model, run)
    report(seen)
    try:
        return bad + fork_check(seen, model, [a, b], 0)
    except Exception as e:
        return bad + [repr(e)]


@situation
def cropped_negative():
    model = llama()

    def run(m):
        cache = DynamicCache()
        p = text(6, 1)[None]
        m(p, past_key_values=cache)
        cache.crop(-2)
        m(text(3, 44)[None], past_key_values=cache)
        return m(text(1, 45)[None], past_key_values=cache).logits

    with torch.no_grad():
        seen, _, bad = watched(model, run)
    report(seen)
    row = torch.cat([text(6, 1)[:4], text(3, 44), text(1, 45)])
    return bad + compare(seen, [final_text(model, row)], rows=8)


@situation
def batch_reordered_by_hand_reorder_cache():
    model = llama()
    order = torch.tensor([2, 0, 0])

    def run(m):
        cache = DynamicCache()
        p = torch.stack([text(6, i) for i in range(3)])
        m(p, past_key_values=cache)
        cache.reorder_cache(order)
        return m(text(3, 70)[:, None], past_key_values=cache).logits

    with torch.no_grad():
        seen, _, bad = watched(model, run)
    report(seen)
    want = [
        final_text(model, torch.cat([text(6, int(o)), text(3, 70)[i : i + 1]]))
        for i, o in enumerate(order)
    ]
    return bad + compare(seen, want, rows=7)


@situation
def batch_select_indices_ended_dropped():
    model = llama()

    def run(m):
        cache = DynamicCache()
        p = torch.stack([text(6, i) for i in range(3)])
        m(p, past_key_values=cache)
        m(text(3, 70)[:, None], past_key_values=cache)
        cache.batch_select_indices(torch.tensor([2, 1]))
        return m(text(2, 71)[:, None], past_key_values=cache).logits

    with torch.no_grad():
        seen, _, bad = watched(model, run)
    report(seen)
    rows = [torch.cat([text(6, i), text(3, 70)[i : i + 1], text(2, 71)[j : j + 1]])
            for j, i in enumerate((2, 1))]
    return bad + compare(seen, [final_text(model, r) for r in rows], rows=8)


@situation
def batch_reordered_by_hand_on_layers():
    """Keys and values are indexed by hand, no method of the cache is called."""
    model = llama()
    order = torch.tensor([1, 0])

    def run(m):
        cache = DynamicCache()
        p = torch.stack([text(6, i) for i in range(2)])
        m(p, past_key_values=cache)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[order], layer.values[order]
        return m(text(2, 70)[:, None], past_key_values=cache).logits

    with torch.no_grad():
        seen, _, bad = watched(model, run)
    report(seen)
    want = [
        final_text(model, torch.cat([text(6, int(o)), text(2, 70)[i : i + 1]]))
        for i, o in enumerate(order)
    ]
    return bad + compare(seen, want, rows=7)


def one_cache(name, make, model, n=10, prompt=9, **more):
    def f():
        ids, mask = batch([prompt, prompt - 3])

        def run(m):
            return gen(m, ids, mask, n=n, **make(m))

        seen, out, bad = watched(model(), run)
        report(seen)
        return bad + compare(seen, finals(model(), out, mask), **more)

    f.__name__ = name
    situation(f)


for _name, _model in dict(llama=llama, mistral=mistral, gemma2=gemma2,
                          gemma3=gemma3).items():
    one_cache(f"static_cache_{_name}",
              lambda m: {"cache_implementation": "static"}, _model)
    one_cache(f"dynamic_cache_{_name}", lambda m: {}, _model)
    one_cache(f"no_cache_{_name}", lambda m: {"use_cache": False}, _model)
one_cache("chunked_prefill_llama", lambda m: {"prefill_chunk_size": 4}, llama)
one_cache("chunked_prefill_gemma3", lambda m: {"prefill_chunk_size": 4}, gemma3)
one_cache("chunked_prefill_mistral", lambda m: {"prefill_chunk_size": 3}, mistral)


@situation
def static_cache_reused_after_reset():
    model = llama()

    def run(m):
        cache = StaticCache(config=m.config, max_cache_len=32)
        a = gen(m, text(6, 1)[None], n=4, past_key_values=cache)
        cache.reset()
        b = gen(m, text(7, 2)[None], n=4, past_key_values=cache)
        return a, b

    seen, (a, b), bad = watched(model, run)
    report(seen)
    return bad + compare(seen, finals(model, a) + finals(model, b))


@situation
def static_cache_chat():
    model = gemma3()

    def run(m):
        cache = StaticCache(config=m.config, max_cache_len=48)
        ids = text(5, 1)[None]
        for turn in range(3):
            ids = gen(m, ids, n=4, past_key_values=cache)
            ids = torch.cat([ids, text(3, 10 + turn)[None]], 1)
        return ids[:, :-3]

    seen, out, bad = watched(model, run)
    report(seen)
    return bad + compare(seen, finals(model, out))


@situation
def prompt_lookup():
    model = llama()
    p = text(4, 1).repeat(4)[None]
    seen, out, bad = watched(model, lambda m: gen(m, p, n=12,
                                                  prompt_lookup_num_tokens=3))
    report(seen)
    return bad + compare(seen, finals(model, out))


@situation
def prompt_lookup_sliding():
    model = mistral()
    p = text(4, 1).repeat(4)[None]
    seen, out, bad = watched(model, lambda m: gen(m, p, n=12,
                                                  prompt_lookup_num_tokens=3))
    report(seen)
    return bad + compare(seen, finals(model, out))


@situation
def assisted_by_other_model():
    model, helper = llama(), llama(seed=0)
    g = torch.Generator().manual_seed(3)
    for p in helper.parameters():
        p.data += 0.02 * torch.randn(p.shape, generator=g)
    p = text(6, 1)[None]
    seen, out, bad = watched(model, lambda m: gen(m, p, n=14, assistant_model=helper))
    report(seen)
    return bad + compare(seen, finals(model, out))


@situation
def assistant_watched_instead():
    """Both models are watched, each by a watch of its own, nested."""
    import regard

    model, helper = llama(), llama(seed=0)
    g = torch.Generator().manual_seed(3)
    for p in helper.parameters():
        p.data += 0.02 * torch.randn(p.shape, generator=g)
    p = text(6, 1)[None]
    with regard.watch(model) as one, regard.watch(helper) as two:
        out = gen(model, p, n=14, assistant_model=helper)
    report(one)
    report(two)
    bad = compare(one, finals(model, out))
    want = final_text(helper, out[0])
    r = two.layer(0)
    qp = np.asarray(r.q_positions)
    w = np.asarray(r.weights())
    if r.shape[1] < 8:
        bad.append(f"assistant has few rows {r.shape}")
    for i, q in enumerate(qp[:-6]):
        if abs(w[:, i] - want[0][:, q, : w.shape[2]]).max() > 1e-3:
            bad.append(f"assistant row {q} is wrong")
    return bad


@situation
def beams():
    model = llama()
    ids, mask = batch([6, 4])
    seen, out, bad = watched(
        model, lambda m: gen(m, ids, mask, num_beams=3, num_return_sequences=1, n=6))
    report(seen)
    # records follow beams: one of the records of each group must be the result
    from oracle import dense_record
    for b in range(2):
        want = final_text(model, out[b][int((mask[b] == 0).sum()):])
        hit = []
        for s in range(len(seen.records) // 2):
            try:
                g = dense_record(seen.layer(1, sequence=s), *want[1].shape[1:])
            except Exception:
                continue
            have = ~np.isnan(g[0, :, 0])
            if have[:-1].all() and np.abs(g[:, have] - want[1][:, have]).max() < 1e-3:
                hit.append(s)
        if not hit:
            bad.append(f"no record equals result {b}")
    return bad


@situation
def sampled_num_return_sequences():
    model = llama()
    ids, mask = batch([6, 4])
    seen, out, bad = watched(
        model, lambda m: gen(m, ids, mask, do_sample=True, num_return_sequences=3,
                             n=5))
    report(seen)
    big = mask.repeat_interleave(3, 0)
    return bad + compare(seen, finals(model, out, big))


@situation
def eos_ends_some_sequences():
    """Some sequences end earlier: their later tokens are padding of generate."""
    model = llama()
    ids, mask = batch([6, 4, 5])
    free = gen(model, ids, mask, n=10)
    eos = int(free[1, 6 + 2])
    seen, out, bad = watched(model, lambda m: gen(m, ids, mask, n=10, eos_token_id=eos))
    report(seen)
    want, rows = [], []
    for b in range(3):
        new = out[b, 6:].tolist()
        end = 6 + (new.index(eos) + 1 if eos in new else len(new))
        row = out[b, int((mask[b] == 0).sum()) : end]
        want.append(final_text(model, row))
        rows.append(len(row) - 1)
    bad2 = compare(seen, want, rows=rows)
    return bad + [x for x in bad2 if "more rows" not in x and "positions up" not in x]


@situation
def inputs_embeds_generate():
    model = llama()
    p = text(6, 1)[None]
    e = model.get_input_embeddings()(p).detach()
    seen, out, bad = watched(
        model, lambda m: m.generate(inputs_embeds=e, max_new_tokens=5, do_sample=False))
    report(seen)
    return bad + compare(seen, finals(model, torch.cat([p, out], 1)))


@situation
def inputs_embeds_left_padded():
    model = llama()
    ids, mask = batch([7, 3])
    e = model.get_input_embeddings()(ids).detach()
    seen, out, bad = watched(
        model, lambda m: m.generate(inputs_embeds=e, attention_mask=mask,
                                    max_new_tokens=5, do_sample=False))
    report(seen)
    return bad + compare(seen, finals(model, torch.cat([ids, out], 1), mask))


@situation
def pad_token_in_the_text_of_a_chat():
    """A token that was generated is the pad token: the next turn hides it."""
    from oracle import Log, dense_record
    model = llama()

    def run(m):
        cache = DynamicCache()
        ids = text(5, 1)[None]
        ids = gen(m, ids, n=4, past_key_values=cache, suppress_tokens=None,
                  forced_eos_token_id=None)
        ids[0, 6] = 0  # the user edits nothing in the cache but the mask is inferred
        ids = torch.cat([ids, text(3, 10)[None]], 1)
        return m.generate(ids, past_key_values=cache, do_sample=False,
                          max_new_tokens=3, pad_token_id=0, suppress_tokens=[0])

    with Log(model) as log:
        run(model)
    seen, out, bad = watched(model, run)
    report(seen)
    n = out.shape[1]
    for i in (0, 1):
        calls = log.of(f"model.layers.{i}.self_attn")
        r = seen.layer(i)
        got = dense_record(r, n, n)
        at = 0
        for w in calls:
            rows = range(w.shape[-1] - w.shape[-2], w.shape[-1])
            for j, q in enumerate(rows):
                have = ~np.isnan(got[0, q, 0])
                if not have:
                    bad.append(f"row {q} is lost")
                else:
                    off = np.abs(got[:, q, : w.shape[-1]] - w[0, :, j].numpy()).max()
                    if off > 1e-3:
                        bad.append(f"WRONG layer {i} row {q} by {off:.2f}")
    return bad


@situation
def mask_changes_within_generation_loop():
    """A loop by hand: a middle token is hidden by attention_mask after some steps."""
    from oracle import Log, dense_record
    model = llama()

    def run(m):
        cache = DynamicCache()
        with torch.no_grad():
            m(text(6, 1)[None], past_key_values=cache)
            mask = torch.ones(1, 7).long()
            m(text(1, 2)[None], attention_mask=mask, past_key_values=cache)
            mask = torch.ones(1, 8).long()
            mask[0, 2:4] = 0
            pos = torch.tensor([[7]])
            return m(text(1, 3)[None], attention_mask=mask, past_key_values=cache,
                     position_ids=pos).logits

    with Log(model) as log:
        run(model)
    seen, out, bad = watched(model, run)
    report(seen)
    for i in (0, 1):
        calls = log.of(f"model.layers.{i}.self_attn")
        got = dense_record(seen.layer(i), 8, 8)
        for w in calls:
            for j, q in enumerate(range(w.shape[-1] - w.shape[-2], w.shape[-1])):
                if np.isnan(got[0, q, 0]):
                    bad.append(f"row {q} is lost")
                else:
                    off = np.abs(got[:, q, : w.shape[-1]] - w[0, :, j].numpy()).max()
                    if off > 1e-3:
                        bad.append(f"WRONG layer {i} row {q} by {off:.2f}")
    return bad


if __name__ == "__main__":
    main()
