"""Caches whose keys change: quantized, evicted, merged, shifted; repeated runs."""

import numpy as np
import regard
import torch
from caches import batch, finals, gemma3, gen, llama, mistral, text
from oracle import Log, compare, dense_record, main, notes, report, situation, watched
from transformers import DynamicCache, QuantizedCache


def rows_by_log(seen, log, mask, prompt, tol=1e-3, layers=2):
    """Each logged row must be in a record at its token's position, in some sequence.

    Padding is not counted in positions.
    """
    bad = []
    for i in range(layers):
        name = f"model.layers.{i}.self_attn"
        ws = log.of(name)
        for b in range(len(mask)):
            pad, end = int((mask[b] == 0).sum()), 0
            mine = [r for s, r in enumerate(x for x in seen.records if x.name == name)
                    if s % len(mask) == b]
            for w in ws:
                first, end = end, end + w.shape[2]
                for j, slot in enumerate(range(first, end)):
                    if slot < pad:
                        continue
                    want, hit, moved = w[b, :, j].numpy()[:, pad:], False, None
                    for r in mine:
                        got, qp = np.asarray(r.weights()), r.q_positions.tolist()
                        kp = np.asarray(r.k_positions)
                        for x, q in enumerate(qp):
                            full = np.zeros((4, 99))
                            full[:, kp] = got[:, x]
                            n = want.shape[1]
                            if q == slot - pad and np.abs(
                                    full[:, :n] - want).max() < tol:
                                hit = True
                            elif np.abs(full[:, q + 1 - n: q + 1] - want).max() < tol \
                                    if q + 1 >= n else False:
                                moved = q
                    if not hit:
                        bad.append(
                            f"{i}/{b}: row {slot - pad} is " + (
                                f"shown as row {moved}" if moved is not None
                                else "lost"))
    return bad


def quantized(name, lengths, **more):
    def f():
        model = llama()
        ids, mask = batch(lengths)

        def run(m):
            cache = QuantizedCache("fp8", m.config)
            return gen(m, ids, mask, n=5, past_key_values=cache, **more)
        with Log(model) as log:
            run(model)
        seen, out, bad = watched(model, run)
        report(seen)
        return bad + rows_by_log(seen, log, mask, max(lengths))
    f.__name__ = name
    situation(f)


quantized("fp8_cache_one_text", [6])
quantized("fp8_cache_left_padded", [6, 3])


def evicted(name, keep, shift):
    def f():
        model = llama()

        def run(m):
            cache, out = DynamicCache(), []
            with torch.no_grad():
                m(text(10, 1)[None], past_key_values=cache)
                for layer in cache.layers:
                    layer.keys = layer.keys[:, :, keep]
                    layer.values = layer.values[:, :, keep]
                for t in range(3):
                    at = (10 if not shift else len(keep)) + t
                    out.append(m(text(1, 20 + t)[None], past_key_values=cache,
                                 position_ids=torch.tensor([[at]])).logits)
            return out
        with Log(model) as log:
            run(model)
        seen, out, bad = watched(model, run)
        report(seen)
        true = [*keep, 10, 11, 12]
        for i in range(2):
            name = f"model.layers.{i}.self_attn"
            ws = log.of(name)
            for t, w in enumerate(ws[1:]):
                want = np.zeros((4, 13))
                want[:, true[: w.shape[-1]]] = w[0, :, 0].numpy()
                hit, moved = False, []
                for r in (x for x in seen.records if x.name == name):
                    got = np.asarray(r.weights())
                    kp, qp = r.k_positions.tolist(), r.q_positions.tolist()
                    for x, q in enumerate(qp):
                        full = np.zeros((4, 20))
                        full[:, kp] = got[:, x]
                        off = np.abs(full[:, :13] - want).max()
                        hit |= q == 10 + t and off < 1e-3
                        if got.shape[-1] >= w.shape[-1] and np.abs(
                                got[:, x, : w.shape[-1]] - w[0, :, 0].numpy()
                        ).max() < 1e-3:
                            moved.append((q, len(kp)))
                if not hit:
                    bad.append(f"layer {i}: token {10 + t} is shown as {moved}; "
                               f"{notes(seen)[:1]}")
        return bad
    f.__name__ = name
    situation(f)


evicted("streaming_eviction_keeps_positions", [0, 1, 6, 7, 8, 9], False)
evicted("eviction_of_the_first_keys", [4, 5, 6, 7, 8, 9], False)
evicted("eviction_of_one_middle_key", [0, 1, 2, 3, 4, 6, 7, 8, 9], False)


@situation
def cropped_by_slices_and_continued():
    """A user cuts the cache by hand, then continues with another text."""
    model = llama()

    def run(m):
        cache = DynamicCache()
        with torch.no_grad():
            m(text(8, 1)[None], past_key_values=cache)
            for x in (text(1, 2), text(1, 3)):
                m(x[None], past_key_values=cache)
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[:, :, :5], layer.values[:, :, :5]
            return [m(x[None], past_key_values=cache).logits
                    for x in (text(3, 4), text(1, 5))]
    seen, _, bad = watched(model, run)
    report(seen)
    from oracle import final_text
    a = final_text(model, torch.cat([text(8, 1), text(1, 2), text(1, 3)]))
    b = final_text(model, torch.cat([text(8, 1)[:5], text(3, 4), text(1, 5)]))
    last = [False, False]
    for r in seen.records:
        i = 0 if "layers.0" in r.name else 1
        ok = False
        for w in (a, b):
            n = w[i].shape[1]
            try:
                got = dense_record(r, n, n)
            except Exception:
                continue
            have = ~np.isnan(got[0, :, 0])
            good = np.abs(got[:, have] - w[i][:, have]).max() < 1e-3
            ok |= good
            last[i] |= bool(good and w is b and have[5:].all())
        if not ok:
            bad.append(f"WRONG {r.name} {r.shape} {r.q_positions.tolist()}")
    return bad + ([] if all(last) else ["the last text is not there"])


@situation
def ten_samples_from_one_prefix_by_copies():
    """Best of n: the cache of the prompt is repeated, and the samples diverge."""
    model = llama()

    def run(m):
        cache = DynamicCache()
        with torch.no_grad():
            m(text(6, 1)[None], past_key_values=cache)
            cache.batch_repeat_interleave(4)
            x = torch.stack([text(1, 30 + i) for i in range(4)])
            a = m(x, past_key_values=cache).logits
            cache.batch_select_indices(torch.tensor([3, 3, 1]))
            y = torch.stack([text(1, 40 + i) for i in range(3)])
            return a, m(y, past_key_values=cache).logits
    seen, _, bad = watched(model, run)
    report(seen)
    from oracle import final_text
    want = [final_text(model, torch.cat([text(6, 1), text(1, 30 + j), text(1, 40 + i)]))
            for i, j in enumerate((3, 3, 1))]
    return bad + compare(seen, want, rows=8)


@situation
def same_batch_in_another_order_again():
    """The same texts in another order: new runs, no beams."""
    model = llama()
    ids, mask = batch([6, 4, 5])
    order = [2, 0, 1]

    def run(m):
        return gen(m, ids, mask, n=3), gen(m, ids[order], mask[order], n=3)
    seen, (a, b), bad = watched(model, run)
    report(seen)
    return bad + compare(seen, finals(model, a, mask) + finals(model, b, mask[order]))


@situation
def forward_then_generate_of_the_same_prompt():
    model = llama()
    ids, mask = batch([6, 4])

    def run(m):
        with torch.no_grad():
            m(ids, attention_mask=mask, use_cache=False)
        return gen(m, ids, mask, n=3)
    seen, out, bad = watched(model, run)
    report(seen)
    short = finals(model, out[:, :6], mask)
    return bad + compare(seen, short + finals(model, out, mask),
                         rows=[6, 4, 8, 6])


@situation
def generate_then_forward_of_the_whole_text():
    """Generation, then one pass over prompt and answer, as for scores in RL."""
    model = llama()
    ids, mask = batch([6, 4])

    def run(m):
        out = gen(m, ids, mask, n=3)
        whole = torch.cat([mask, torch.ones(2, 3).long()], 1)
        with torch.no_grad():
            logits = m(out, attention_mask=whole, use_cache=False,
                       position_ids=(whole.cumsum(1) - 1).clamp(0)).logits
        return out, logits
    seen, (out, _), bad = watched(model, run)
    report(seen)
    want = finals(model, out, mask)
    # the same numbers: it may count as a generation whose rows are computed again
    n = seen.layer(0).shape[1]
    if n == 9:
        return bad + compare(seen, want, rows=[9, 7])
    return bad + compare(seen, want + want, rows=[8, 6, 9, 7])


@situation
def generate_with_an_adapter_then_score_without_it():
    """As in RL: the policy generates, the reference scores prompt and answer."""
    from runtime import Lora
    model = llama()
    loras = []
    for layer in model.model.layers:
        lora = Lora(layer.self_attn.q_proj)
        layer.self_attn.q_proj = lora
        loras.append(lora)
    p = text(6, 1)[None]
    before = [x.b.data.clone() for x in loras]

    def run(m):
        for x, b in zip(loras, before):
            x.b.data.copy_(b)
        out = gen(m, p, n=3)
        for x in loras:
            x.b.data.zero_()  # the adapter is disabled
        with torch.no_grad():
            return out, m(out).logits
    seen, (out, _), bad = watched(model, run)
    report(seen)
    for x, b in zip(loras, before):
        x.b.data.copy_(b)
    policy = finals(model, out)[0]
    for x in loras:
        x.b.data.zero_()
    reference = finals(model, out)[0]
    for i in (0, 1):
        mine = [r for r in seen.records if f"layers.{i}." in r.name]
        for who, want in (("policy", policy), ("reference", reference)):
            hit = False
            for r in mine:
                got = dense_record(r, 9, 9)
                have = ~np.isnan(got[0, :, 0])
                hit |= np.abs(got[:, have] - want[i][:, have]).max() < 1e-3
            if not hit:
                left = [dict(x.left_out) for x in seen.coverage()]
                bad.append(f"layer {i}: the weights of the {who} are lost, told: "
                           f"{left[i]}")
    return bad


@situation
def no_cache_generation_then_a_longer_forward():
    model = llama()
    p = text(6, 1)[None]

    def run(m):
        out = gen(m, p, n=3, use_cache=False)
        with torch.no_grad():
            return out, m(out, use_cache=False).logits
    seen, (out, _), bad = watched(model, run)
    report(seen)
    n = sum(r.shape[1] for r in seen.records if "layers.1" in r.name)
    left = [dict(x.left_out) for x in seen.coverage()]
    want = finals(model, out)
    bad += compare(seen, want, rows=seen.layer(0).shape[1])
    return bad + ([] if n in (9, 17) else [f"{n} rows, {left}"])


@situation
def mixed_seq2seq_and_language_model_in_one_wrapper():
    from hidden import bart
    from more import Pair

    class Both(Pair):
        """Two models of different kinds."""

    model = Both(bart(), llama())
    ids = text(6, 1)[None]

    def run(m):
        a = m.main.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4,
                            min_new_tokens=4, do_sample=False)
        b = gen(m.draft, ids, n=4)
        c = m.main.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3,
                            min_new_tokens=3, do_sample=False)
        return a, b, c
    with Log(model) as log:
        run(model)
    seen, _, bad = watched(model, run)
    report(seen)
    for name in dict.fromkeys(n for n, _ in log.calls):
        rows = sum(w.shape[0] * w.shape[2] for w in log.of(name))
        mine = sum(r.shape[1] for r in seen.records if r.name == name)
        if rows != mine:
            bad.append(f"{name}: {mine} rows of {rows}")
        got = [(np.asarray(r.weights())[:, j], r.shape[2])
               for r in seen.records if r.name == name for j in range(r.shape[1])]
        for w in log.of(name):
            for j in range(w.shape[2]):
                x = w[0, :, j].numpy()
                if not any(np.abs(g[:, : x.shape[1]] - x).max() < 1e-3
                           for g, n in got if n >= x.shape[1]):
                    bad.append(f"WRONG {name}: a row is missing")
    return bad


if __name__ == "__main__":
    main()
