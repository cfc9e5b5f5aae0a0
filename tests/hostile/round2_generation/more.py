"""Threads that outlive a watch, dropout, sliding caches of before, other kernels."""

import threading

import numpy as np
import regard
import torch
import transformers as tf
from attacks import by_log
from caches import (
    SIZES, V, batch, finals, fork_check, gemma2, gemma3, gen, llama, mistral, text,
)
from families import DECODERS, SMALL, build, compare_steps, logged_forward
from hidden import ENC, VIS, bart, pixels, t5
from oracle import (
    Log, compare, dense_record, final_text, main, report, same, situation, state_of,
    watched,
)
from torch import nn
from transformers import DynamicCache, StaticCache


@situation
def backward_after_the_watch():
    model = llama().train()
    ids, mask = batch([9, 5], "right")
    grads = []
    for watching in (False, True):
        for check in (False, True):
            if check:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            model.zero_grad()
            if watching:
                with regard.watch(model) as seen:
                    loss = model(ids, attention_mask=mask, labels=ids,
                                 use_cache=False).loss
            else:
                loss = model(ids, attention_mask=mask, labels=ids,
                             use_cache=False).loss
            loss.backward()
            grads.append([p.grad.clone() for p in model.parameters()])
            model.gradient_checkpointing_disable()
    bad = [] if all(same(grads[0], g) for g in grads[1:]) else ["gradients changed"]
    want = [final_text(model, ids[b][mask[b] > 0]) for b in range(2)]
    return bad + compare(seen, want, rows=[9, 5])


@situation
def dropout_in_training_bert():
    model = build("BertModel", "BertConfig", **ENC,
                  attention_probs_dropout_prob=0.3, hidden_dropout_prob=0.0)
    model.set_attn_implementation("eager")
    ids = text(2, 9) if False else torch.stack([text(9, 1), text(9, 2)])
    model.train()

    def run(m):
        torch.manual_seed(3)
        return m(ids)[0].detach()
    with Log(model) as log:
        run(model)
    seen, _, bad = watched(model, run)
    report(seen)
    told = all("dropout" in x.note for x in seen.coverage())
    return bad + by_log(seen, log) + ([] if told else ["dropout is not told"])


@situation
def dropout_in_training_sdpa():
    model = llama(attention_dropout=0.3).train()
    ids = torch.stack([text(9, 1), text(9, 2)])

    def run(m):
        torch.manual_seed(3)
        return m(ids, use_cache=False).logits.detach()
    with Log(model) as log:
        run(model)
    seen, _, bad = watched(model, run)
    report(seen)
    told = all("dropout" in x.note for x in seen.coverage())
    log.calls = log.calls[:1]  # later layers depend on the dropout
    return bad + by_log(seen, log) + ([] if told else ["dropout is not told"])


def before(name, make, sizes, n=5):
    """A cache with a window is filled before the watch: positions of its keys."""
    def f():
        model = make()
        cache = DynamicCache(config=model.config)
        first = gen(model, text(sizes, 1)[None], n=3, past_key_values=cache)
        ids = torch.cat([first, text(2, 5)[None]], 1)
        with regard.watch(model) as seen:
            out = gen(model, ids, n=n, past_key_values=cache)
        report(seen)
        want, bad = final_text(model, out[0]), []
        start, end = first.shape[1] - 1, out.shape[1] - 1
        for i in (0, 1):
            r = seen.layer(i)
            got, qp, kp = (np.asarray(x) for x in (
                r.weights(), r.q_positions, r.k_positions))
            note = [x.note for x in seen.coverage() if x.name == r.name]
            if qp.tolist() != list(range(start, end)):
                bad.append(f"layer {i}: rows {qp[0]}-{qp[-1]} are {start}-{end - 1}, "
                           f"keys {kp[0]}-{kp[-1]}, note: {note}")
                kp, qp = kp + start - qp[0], qp + start - qp[0]
            for j, q in enumerate(qp):
                full = np.zeros(want[i][:, q].shape)
                full[:, kp] = got[:, j]
                off = np.abs(full - want[i][:, q]).max()
                if off > 1e-3:
                    bad.append(f"WRONG {i} row {q} by {off:.2f}")
        return bad
    f.__name__ = name
    situation(f)


before("gemma3_cache_of_before_longer_than_the_window", gemma3, 12)
before("mistral_cache_of_before_longer_than_the_window", mistral, 12)
before("gemma2_cache_of_before_longer_than_the_window", gemma2, 12)
before("gemma3_cache_of_before_shorter", gemma3, 2, 3)


@situation
def static_sliding_cache_of_before():
    model = gemma3()
    cache = StaticCache(config=model.config, max_cache_len=40)
    first = gen(model, text(12, 1)[None], n=3, past_key_values=cache)
    ids = torch.cat([first, text(2, 5)[None]], 1)
    with regard.watch(model) as seen:
        out = gen(model, ids, n=5, past_key_values=cache)
    report(seen)
    want, bad = final_text(model, out[0]), []
    start, end = first.shape[1] - 1, out.shape[1] - 1
    for i in (0, 1):
        try:
            r = seen.layer(i)
        except Exception as e:
            bad.append(f"layer {i}: {e}"[:100])
            continue
        got, qp, kp = (np.asarray(x) for x in (
            r.weights(), r.q_positions, r.k_positions))
        if qp.tolist() != list(range(start, end)):
            bad.append(f"layer {i}: rows {qp.tolist()} are {start}-{end - 1}, "
                       f"keys {kp[0]}-{kp[-1]}")
            continue
        for j, q in enumerate(qp):
            full = np.zeros((4, max(kp.max() + 1, want[i].shape[2])))
            full[:, kp] = got[:, j]
            full = full[:, : want[i].shape[2]]
            if np.abs(full - want[i][:, q]).max() > 1e-3:
                bad.append(f"WRONG {i} row {q}")
    return bad


class Pair(nn.Module):
    """A model and its assistant in one module."""

    def __init__(self, main, draft):
        super().__init__()
        self.main, self.draft = main, draft

    def forward(self, x):
        return self.main(x)


@situation
def assistant_in_the_same_watch():
    main_model, draft = llama(), llama()
    g = torch.Generator().manual_seed(3)
    for p in draft.parameters():
        p.data += 0.02 * torch.randn(p.shape, generator=g)
    pair, p = Pair(main_model, draft), text(6, 1)[None]
    seen, out, bad = watched(pair, lambda m: gen(
        m.main, p, n=12, assistant_model=m.draft))
    report(seen)
    want, wants = final_text(main_model, out[0]), final_text(draft, out[0])
    n = out.shape[1]
    for part, w, need in (("main", want, n - 1), ("draft", wants, n - 6)):
        for i in (0, 1):
            name = f"{part}.model.layers.{i}.self_attn"
            rows = 0
            for r in (x for x in seen.records if x.name == name):
                try:
                    got = dense_record(r, n, n)
                except Exception as e:
                    bad.append(f"{name}: {e}")
                    continue
                have = ~np.isnan(got[0, :, 0])
                rows = max(rows, have.sum())
                off = np.abs(got[:, have] - w[i][:, have]).max((0, 2))
                if part == "draft":
                    off = off[:need]  # the last guesses may have been rejected
                if off.max() > 1e-3:
                    bad.append(f"WRONG {name} rows {np.flatnonzero(off > 1e-3)}")
            if rows < need:
                bad.append(f"{name}: {rows} rows of {need}")
    return bad


@situation
def watch_ends_while_a_thread_generates():
    import time
    model = llama()
    p = text(6, 1)[None]
    plain = gen(model, p, n=60)
    clean = state_of(model)
    outs, errors = [], []

    def work():
        try:
            outs.append(gen(model, p, n=60))
        except Exception as e:
            errors.append(repr(e))
    with regard.watch(model) as seen:
        t = threading.Thread(target=work)
        t.start()
        time.sleep(0.15)
    t.join()
    report(seen)
    bad = errors + ([] if state_of(model) == clean else ["left behind"])
    if not outs or not torch.equal(outs[0], plain):
        bad.append("OUTPUT CHANGED")
    want = final_text(model, plain[0])
    for r in seen.records:
        i = 0 if "layers.0" in r.name else 1
        got = dense_record(r, *want[0].shape[1:])
        have = ~np.isnan(got[0, :, 0])
        if np.abs(got[:, have] - want[i][:, have]).max() > 1e-3:
            bad.append(f"WRONG {r.name}")
    gen(model, p)
    return bad


@situation
def watch_begins_while_a_thread_generates():
    import time
    model = llama()
    p = text(6, 1)[None]
    plain = gen(model, p, n=80)
    clean = state_of(model)
    outs, errors = [], []

    def work():
        try:
            outs.append(gen(model, p, n=80))
        except Exception as e:
            errors.append(repr(e))
    t = threading.Thread(target=work)
    t.start()
    time.sleep(0.08)
    with regard.watch(model) as seen:
        mine = gen(model, text(5, 3)[None], n=4)
        t.join()
    report(seen)
    bad = errors + ([] if state_of(model) == clean else ["left behind"])
    if not outs or not torch.equal(outs[0], plain):
        bad.append("OUTPUT CHANGED")
    a, b = final_text(model, plain[0]), final_text(model, mine[0])
    hits = 0
    for s in range(len(seen.records)):
        for i in (0, 1):
            try:
                r = seen.layer(i, sequence=s)
            except Exception:
                continue
            ok = False
            for w in (a, b):
                try:
                    got = dense_record(r, *w[0].shape[1:])
                except Exception:
                    continue
                have = ~np.isnan(got[0, :, 0])
                ok |= np.abs(got[:, have] - w[i][:, have]).max() < 1e-3
                hits += w is b and ok and have[:-1].all()
            if not ok:
                bad.append(f"WRONG {i}/{s} {r.shape} {r.q_positions[:2]}")
    return bad + ([] if hits >= 2 else ["own generation is not whole"])


@situation
def flex_attention():
    model = llama()
    model.set_attn_implementation("flex_attention")
    ids, mask = batch([9, 5])
    with torch.no_grad():
        seen, _, bad = watched(model, lambda m: m(ids, attention_mask=mask).logits)
    report(seen)
    if all("last bits may differ" in x.note for x in seen.coverage()):
        bad = [x for x in bad if x != "OUTPUT CHANGED"]  # told
    want = [final_text(model, ids[b][mask[b] > 0]) for b in range(2)]
    return bad + compare(seen, want, rows=[9, 5])


@situation
def continuous_batching():
    from transformers import ContinuousBatchingConfig, GenerationConfig
    model = llama()
    prompts = [text(6, 1).tolist(), text(9, 2).tolist(), text(3, 3).tolist()]

    def run(m):
        done = m.generate_batch(
            prompts, GenerationConfig(max_new_tokens=5, do_sample=False,
                                      eos_token_id=-1, pad_token_id=0),
            ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=8))
        return [torch.tensor(x.prompt_ids + x.generated_tokens)
                for x in done.values()]
    with regard.watch(model) as seen:
        outs = run(model)
    report(seen)
    return compare(seen, [final_text(model, x) for x in outs])


@situation
def compiled_forward_generate():
    model = llama()
    other = llama()
    other.forward = torch.compile(other.forward, backend="eager")
    ids, mask = batch([9, 5])
    seen, out, bad = watched(other, lambda m: gen(m, ids, mask))
    report(seen)
    return bad + compare(seen, finals(model, out, mask))


@situation
def paligemma_prefix_lm():
    model = build(
        "PaliGemmaForConditionalGeneration", "PaliGemmaConfig",
        text_config=tf.GemmaConfig(**SMALL, num_key_value_heads=2, head_dim=8),
        vision_config=tf.SiglipVisionConfig(**VIS, projection_dim=32),
        image_token_index=59, projection_dim=32, hidden_size=32)
    ids = torch.cat([torch.full((2, 16), 59), torch.stack([text(5, 1), text(5, 2)])], 1)
    x, mask = pixels(2, 3, 16, 16), torch.ones(2, 21).long()

    def run(m):
        return m.generate(input_ids=ids, attention_mask=mask, pixel_values=x,
                          max_new_tokens=4, do_sample=False, pad_token_id=0,
                          suppress_tokens=[0, 59])
    with Log(model) as log:
        run(model)
    seen, _, bad = watched(model, run)
    report(seen)
    log.calls = [c for c in log.calls if "language_model" in c[0]]
    return bad + compare_steps(seen, log, mask, 21)


@situation
def paligemma_training_token_types():
    model = build(
        "PaliGemmaForConditionalGeneration", "PaliGemmaConfig",
        text_config=tf.GemmaConfig(**SMALL, num_key_value_heads=2, head_dim=8),
        vision_config=tf.SiglipVisionConfig(**VIS, projection_dim=32),
        image_token_index=59, projection_dim=32, hidden_size=32).train()
    ids = torch.cat([torch.full((2, 16), 59), torch.stack([text(5, 1), text(5, 2)])], 1)
    x, mask = pixels(2, 3, 16, 16), torch.ones(2, 21).long()
    types = torch.zeros(2, 21).long()
    types[:, 19:] = 1
    return logged_forward(model, lambda m: m(
        input_ids=ids, attention_mask=mask, pixel_values=x, token_type_ids=types,
        labels=ids).logits.detach())


@situation
def qwen2_vl_vision_and_text():
    model = build(
        "Qwen2VLForConditionalGeneration", "Qwen2VLConfig",
        text_config=dict(**SMALL, num_key_value_heads=2,
                         rope_parameters={"rope_type": "default",
                                          "mrope_section": [1, 1, 2],
                                          "rope_theta": 1e4}),
        vision_config=dict(depth=2, embed_dim=32, num_heads=4, hidden_size=32,
                           patch_size=4, spatial_merge_size=2, temporal_patch_size=2,
                           mlp_ratio=2),
        image_token_id=59, vision_start_token_id=58, vision_end_token_id=57,
        video_token_id=56)
    grid = torch.tensor([[1, 4, 4], [1, 2, 4]])
    x = pixels(24, 3 * 2 * 16)
    row = lambda n, s: torch.cat([
        torch.tensor([58]), torch.full((n,), 59), torch.tensor([57]), text(6, s) % 50
        + 2])
    a, b = row(4, 1), row(2, 2)
    ids, mask = torch.zeros(2, 12).long(), torch.ones(2, 12).long()
    ids[0], ids[1, 2:], mask[1, :2] = a, b, 0

    def run(m):
        return m.generate(input_ids=ids, attention_mask=mask, pixel_values=x,
                          mm_token_type_ids=(ids == 59).int(),
                          image_grid_thw=grid, max_new_tokens=4, do_sample=False,
                          pad_token_id=0, suppress_tokens=[0, 56, 57, 58, 59])
    with Log(model) as log:
        run(model)
    seen, _, bad = watched(model, run)
    report(seen)
    vision = [c for c in log.calls if "visual" in c[0]]
    log.calls = [c for c in log.calls if "language_model" in c[0]]
    bad += compare_steps(seen, log, mask, 12)
    count = {}
    for name, w in vision:
        n = count[name] = count.get(name, 0) + 1
        key = name if n == 1 else f"{name}#{n}"
        hit = [r for r in seen.records if r.name == key and r.shape == w.shape[1:]
               and np.abs(np.asarray(r.weights()) - w[0].numpy()).max() < 1e-3]
        if not hit:
            shapes = [(r.name, r.shape) for r in seen.records if name in r.name]
            bad.append(f"{key} {tuple(w.shape)} is not among {shapes}"[:250])
    return bad


@situation
def layers_skipped_by_layerdrop():
    model = bart(encoder_layerdrop=0.5, decoder_layerdrop=0.5).train()
    ids, mask = torch.stack([text(7, 1), text(7, 2)]), torch.ones(2, 7).long()
    dec = torch.stack([text(5, 3), text(5, 4)])

    def run(m):
        torch.manual_seed(2)
        return [m(input_ids=ids, attention_mask=mask, decoder_input_ids=dec,
                  use_cache=False).logits.detach() for _ in range(4)]
    with Log(model) as log:
        run(model)
    seen, _, bad = watched(model, run)
    report(seen)
    for name in dict.fromkeys(n for n, _ in log.calls):
        want = [w[b].numpy() for w in log.of(name) for b in range(len(w))]
        mine = [np.asarray(r.weights()) for r in seen.records if r.name == name]
        if len(mine) != len(want):
            bad.append(f"{name}: {len(mine)} records for {len(want)}")
            continue
        if any(np.abs(a - b).max() > 1e-3 for a, b in zip(mine, want)):
            bad.append(f"WRONG {name}")
    return bad


@situation
def intervention_on_a_longer_text_in_one_watch():
    """Layer 0 has the same first keys; deeper layers do not."""
    model, ids = llama(), text(8, 1)[None]

    def run(m):
        with torch.no_grad():
            a = m(ids[:, :6], use_cache=False).logits
            h = m.model.layers[0].mlp.register_forward_hook(lambda m, x, y: y * 0)
            b = m(ids[:, :7], use_cache=False).logits
            h.remove()
        return a, b
    with Log(model) as log:
        run(model)
    seen, _, bad = watched(model, run)
    report(seen)
    for i in (0, 1):
        name = f"model.layers.{i}.self_attn"
        mine = [np.asarray(r.weights()) for r in seen.records if r.name == name]
        for w in log.of(name):
            x = w[0].numpy()
            if i == 0 and x.shape[1] == 6:
                continue  # computed again: the same numbers
            if not any(m.shape == x.shape and np.abs(m - x).max() < 1e-3 for m in mine):
                bad.append(f"{name} {x.shape} is not among {[m.shape for m in mine]}")
    both = [{r.shape[1] for r in (seen.layer(i, sequence=s) for i in (0, 1))}
            for s in range(1)]
    if any(len(x) > 1 for x in both):
        bad.append(f"sequence 0 has {both[0]} rows in its two layers: it mixes two "
                   "runs; " + str([x.note for x in seen.coverage()]))
    return bad


@situation
def many_generations_in_one_watch():
    model = llama()
    prompts = [text(3 + i % 4, i)[None] for i in range(12)]
    seen, outs, bad = watched(model, lambda m: [gen(m, p, n=3) for p in prompts])
    want = [finals(model, o)[0] for o in outs]
    return bad + compare(seen, want)


@situation
def bf16_eager_llama_generate():
    """Half precision and eager attention: one record for each text is promised."""
    model = llama().to(torch.bfloat16)
    model.set_attn_implementation("eager")
    ids, mask = batch([6, 3])
    with Log(model) as log:
        gen(model, ids, mask, n=3)
    seen, _, bad = watched(model, lambda m: gen(m, ids, mask, n=3))
    report(seen)
    return bad + compare_steps(seen, log, mask, 6, tol=3e-2)


@situation
def bf16_gpt_oss_is_recorded():
    """The dtype in which gpt-oss is published."""
    model = DECODERS["gpt_oss_sinks"]().to(torch.bfloat16)
    with regard.watch(model) as seen, torch.no_grad():
        model(text(9, 1)[None])
    return [f"{x.name}: {x.note or x.reason}" for x in seen.coverage()
            if x.attention is not False and (x.note or x.reason)]


@situation
def bf16_eager_gemma2_forward_is_traced():
    model = gemma2().to(torch.bfloat16)
    with regard.watch(model) as seen, torch.no_grad():
        model(text(9, 1)[None])
    return [f"{x.name}: {x.note or x.reason}" for x in seen.coverage()
            if "traced" in x.note or x.reason]


if __name__ == "__main__":
    main()
