"""How models are run: dtypes, masks, threads, exceptions, wrappers, several watches."""

import contextlib
import copy
import gc
import io
import os
import pickle
import tempfile
import threading

import numpy as np
import regard
import torch
from caches import V, batch, finals, fork_check, gemma2, gemma3, gen, llama, mistral
from caches import text
from families import DECODERS, build, logged_forward
from oracle import (
    Log, compare, dense_record, final_text, main, report, same, situation, state_of,
    watched,
)
from torch import nn
from transformers import DynamicCache


@situation
def packed_sequences_by_position_ids():
    model = llama()
    ids = text(12, 1)[None]
    pos = torch.cat([torch.arange(5), torch.arange(4), torch.arange(3)])[None]
    return logged_forward(model, lambda m: m(ids, position_ids=pos,
                                             use_cache=False).logits)


@situation
def packed_sequences_sliding():
    model = gemma3()
    ids = text(16, 1)[None]
    pos = torch.cat([torch.arange(9), torch.arange(7)])[None]
    return logged_forward(model, lambda m: m(ids, position_ids=pos,
                                             use_cache=False).logits)


@situation
def mask_4d_bool_prefix_lm():
    model = llama()
    ids = text(8, 1)[None].repeat(2, 1)
    mask = torch.ones(8, 8).tril().bool()
    mask[:, :3] = True
    masks = torch.stack([mask, torch.ones(8, 8).tril().bool()])[:, None]
    return logged_forward(model, lambda m: m(ids, attention_mask=masks).logits)


@situation
def mask_4d_float_tree():
    model = llama()
    ids = text(8, 1)[None]
    g = torch.Generator().manual_seed(1)
    mask = (torch.rand(8, 8, generator=g) < 0.5) & torch.ones(8, 8).tril().bool()
    mask |= torch.eye(8).bool()
    add = torch.zeros(1, 1, 8, 8).masked_fill(~mask, torch.finfo(torch.float32).min)
    pos = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 4]])
    return logged_forward(model, lambda m: m(ids, attention_mask=add,
                                             position_ids=pos).logits)


@situation
def tree_attention_after_a_cache():
    """Tree speculation: a 4d mask over a cache, then the branch is kept."""
    model = llama()
    ok = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()

    def run(m):
        cache = DynamicCache()
        m(text(5, 1)[None], past_key_values=cache)
        mask = torch.cat([torch.ones(3, 5).bool(), ok], 1)[None, None]
        m(text(3, 2)[None], past_key_values=cache, attention_mask=mask,
          position_ids=torch.tensor([[5, 6, 6]]))
        for layer in cache.layers:  # the branch 0, 2 is accepted
            keep = torch.tensor([0, 1, 2, 3, 4, 5, 7])
            layer.keys, layer.values = layer.keys[:, :, keep], layer.values[:, :, keep]
        return m(text(1, 3)[None], past_key_values=cache,
                 position_ids=torch.tensor([[7]])).logits

    with torch.no_grad():
        seen, _, bad = watched(model, run)
    report(seen)
    row = torch.cat([text(5, 1), text(3, 2)[[0, 2]], text(1, 3)])
    want = final_text(model, row)
    for s in range(1, len(seen.records) // 2):  # the first has all of the tree
        for i in (0, 1):
            r = seen.layer(i, sequence=s)
            got, qp = np.asarray(r.weights()), np.asarray(r.q_positions)
            kp = np.asarray(r.k_positions)
            if 7 in qp and len(kp) == 8:
                off = np.abs(got[:, list(qp).index(7)] - want[i][:, 7]).max()
                if off > 1e-3:
                    bad.append(f"WRONG last row by {off:.2f}, record {i}/{s} {r.shape}")
    return bad


@situation
def custom_positions_given_by_hand():
    model = llama()
    ids = text(8, 1)[None]
    pos = torch.tensor([[3, 4, 5, 9, 10, 20, 21, 22]])
    return logged_forward(model, lambda m: m(
        ids, position_ids=pos, attention_mask=torch.ones(1, 8).long()).logits)


def lowp(dtype, make, name, tol):
    def f():
        model = make().to(dtype)
        ids, mask = batch([9, 5])
        return logged_forward(model, lambda m: m(ids, attention_mask=mask).logits,
                              {9: mask}, tol=tol)
    f.__name__ = name
    situation(f)


lowp(torch.bfloat16, llama, "bfloat16_llama", 3e-2)
lowp(torch.float16, gemma2, "float16_gemma2_eager", 3e-2)
lowp(torch.bfloat16, lambda: DECODERS["gpt_oss_sinks"](), "bfloat16_gpt_oss", 3e-2)
lowp(torch.float64, gemma3, "float64_gemma3", 1e-6)


@situation
def bfloat16_generate():
    model = llama().to(torch.bfloat16)
    ids, mask = batch([9, 5])
    from families import compare_steps

    def run(m):
        return gen(m, ids, mask)
    with Log(model) as log:
        run(model)
    seen, out, bad = watched(model, run)
    report(seen)
    return bad + compare_steps(seen, log, mask, 9, tol=3e-2)


@situation
def autocast_bfloat16():
    model = llama()
    ids, mask = batch([9, 5])

    def run(m):
        with torch.autocast("cpu", torch.bfloat16):
            return m(ids, attention_mask=mask).logits
    return logged_forward(model, run, {9: mask}, tol=3e-2)


@situation
def autocast_eager_attention():
    model = llama()
    model.set_attn_implementation("eager")
    ids, mask = batch([9, 5])

    def run(m):
        with torch.autocast("cpu", torch.bfloat16):
            return m(ids, attention_mask=mask).logits
    return logged_forward(model, run, {9: mask}, tol=5e-2)


@situation
def inference_mode_generate():
    model = llama()
    ids, mask = batch([9, 5])

    def run(m):
        with torch.inference_mode():
            return gen(m, ids, mask).clone()
    seen, out, bad = watched(model, run)
    report(seen)
    return bad + compare(seen, finals(model, out, mask))


def training(name, make, checkpointing=True, reentrant=False, steps=1, train=True):
    def f():
        ids, mask = batch([9, 5], "right")

        def run(m):
            m = m.train(train)
            m.zero_grad()
            if checkpointing:
                m.gradient_checkpointing_enable({"use_reentrant": reentrant})
            out = []
            for _ in range(steps):
                loss = m(ids, attention_mask=mask, labels=ids).loss
                loss.backward()
                out += [loss.detach()]
            out += [p.grad.clone() for p in m.parameters() if p.grad is not None]
            if checkpointing:
                m.gradient_checkpointing_disable()
                m.get_input_embeddings()._forward_hooks.clear()  # of transformers
            m.eval()
            return out
        model = make()
        seen, out, bad = watched(model, run)
        report(seen)
        want = [final_text(model, ids[b][: int(mask[b].sum())]) for b in range(2)]
        return bad + compare(seen, want * steps, rows=[9, 5] * steps)
    f.__name__ = name
    situation(f)


training("training_step", llama, False)
training("training_checkpointed", llama)
training("training_checkpointed_reentrant", llama, reentrant=True)
training("training_checkpointed_two_steps", llama, steps=2)
training("training_checkpointed_gemma3", gemma3)


@situation
def output_attentions_eager():
    model = llama()
    model.set_attn_implementation("eager")
    ids, mask = batch([9, 5])
    seen, out, bad = watched(model, lambda m: m(
        ids, attention_mask=mask, output_attentions=True).attentions)
    report(seen)
    for i, (a, b) in enumerate(zip(seen.attentions, out)):
        b = b.detach()
        # rows of padding are 0, otherwise the same array
        real = mask[:, None, :, None].bool()
        pad_first = torch.as_tensor(np.asarray(a))
        if pad_first.shape != b.shape:
            bad.append(f"attentions {i}: {pad_first.shape} for {b.shape}")
        elif ((pad_first - b) * real).abs().max() > 1e-4:
            bad.append(f"WRONG attentions {i}")
        elif (pad_first * ~real).abs().max() > 0:
            bad.append(f"attentions {i}: rows of padding are not 0")
    return bad


@situation
def attn_implementation_switched():
    model = llama()
    p, q = text(6, 1)[None], text(7, 2)[None]

    def run(m):
        m.set_attn_implementation("sdpa")
        a = gen(m, p)
        m.set_attn_implementation("eager")
        b = gen(m, q)
        m.set_attn_implementation("sdpa")
        return a, b
    seen, (a, b), bad = watched(model, run)
    report(seen)
    return bad + compare(seen, finals(model, a) + finals(model, b))


@situation
def attn_implementation_switched_within_a_generation():
    model = llama()

    def run(m):
        m.set_attn_implementation("sdpa")
        cache = DynamicCache()
        with torch.no_grad():
            m(text(6, 1)[None], past_key_values=cache)
            m.set_attn_implementation("eager")
            m(text(1, 2)[None], past_key_values=cache)
            m.set_attn_implementation("sdpa")
            return m(text(2, 3)[None], past_key_values=cache).logits
    seen, _, bad = watched(model, run)
    report(seen)
    row = torch.cat([text(6, 1), text(1, 2), text(2, 3)])
    return bad + compare(seen, [final_text(model, row)], rows=9)


@situation
def functional_call_with_other_weights():
    model, other = llama(), llama(seed=5)
    ids = text(8, 1)[None]
    weights = dict(other.named_parameters())

    def run(m):
        with torch.no_grad():
            return torch.func.functional_call(m, weights, (ids,)).logits
    seen, _, bad = watched(model, run)
    report(seen)
    return bad + compare(seen, [final_text(other, ids[0])], rows=8)


@situation
def vmap_over_ensembles():
    model = llama()
    ids = torch.stack([text(8, i) for i in range(3)])

    def run(m):
        with torch.no_grad():
            return torch.stack([m(x[None], use_cache=False).logits for x in ids])
    seen, _, bad = watched(model, run)
    return bad + compare(seen, [final_text(model, x) for x in ids], rows=8)


class Wrapper(nn.Module):
    """Like DataParallel or a trainer's wrapper."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def generate(self, *args, **kwargs):
        return self.module.generate(*args, **kwargs)


@situation
def wrapped_model_generate():
    model = Wrapper(llama())
    ids, mask = batch([9, 5])
    seen, out, bad = watched(model, lambda m: gen(m, ids, mask))
    report(seen)
    return bad + compare(seen, finals(model.module, out, mask))


@situation
def data_parallel_without_devices():
    model = nn.DataParallel(llama())
    ids, mask = batch([9, 5])
    seen, _, bad = watched(model, lambda m: m(
        input_ids=ids, attention_mask=mask).logits)
    report(seen)
    want = [final_text(model.module, ids[b][mask[b] > 0]) for b in range(2)]
    return bad + compare(seen, want, rows=[9, 5])


@situation
def watch_inner_of_wrapper():
    model = llama()
    ids, mask = batch([9, 5])
    wrapper = Wrapper(model)
    seen, out, bad = watched(model.model, lambda m: gen(wrapper, ids, mask))
    report(seen)
    return bad + compare(seen, finals(model, out, mask))


class Lora(nn.Module):
    """Like peft: a linear layer in a wrapper."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        g = torch.Generator().manual_seed(5)
        self.a = nn.Parameter(torch.randn(4, base.in_features, generator=g) * 0.3)
        self.b = nn.Parameter(torch.randn(base.out_features, 4, generator=g) * 0.3)

    def forward(self, x):
        return self.base_layer(x) + (x @ self.a.T) @ self.b.T


@situation
def lora_like_adapters():
    model = llama()
    for layer in model.model.layers:
        for n in ("q_proj", "v_proj"):
            setattr(layer.self_attn, n, Lora(getattr(layer.self_attn, n)))
    ids, mask = batch([9, 5])
    seen, out, bad = watched(model, lambda m: gen(m, ids, mask))
    return bad + compare(seen, finals(model, out, mask))


@situation
def hooks_of_others():
    """A hook changes the output of q_proj, another one the layer's output."""
    model = llama()
    ids = text(8, 1)[None]
    hooks = [
        model.model.layers[0].self_attn.q_proj.register_forward_hook(
            lambda m, a, o: o * 2),
        model.model.layers[0].register_forward_hook(
            lambda m, a, o: o + 1 if torch.is_tensor(o) else (o[0] + 1, *o[1:])),
    ]
    try:
        return logged_forward(model, lambda m: m(ids).logits)
    finally:
        for h in hooks:
            h.remove()


@situation
def exception_in_the_middle_then_again():
    model = llama()
    ids = text(8, 1)[None]

    def boom(*_):
        raise KeyboardInterrupt

    def run(m):
        h = m.model.layers[1].mlp.register_forward_pre_hook(boom)
        with contextlib.suppress(KeyboardInterrupt):
            gen(m, ids)
        h.remove()
        return gen(m, ids)

    seen, out, bad = watched(model, run)
    report(seen)
    # the first pass is broken: its layer 0 and 1 ran; nothing of it may be wrong
    want = finals(model, out)
    n = len(seen.recording.sequences)
    hits = 0
    for s in range(8):
        try:
            r = [seen.layer(i, sequence=s) for i in (0, 1)]
        except Exception:
            break
        for i in (0, 1):
            g = dense_record(r[i], *want[0][i].shape[1:])
            have = ~np.isnan(g[0, :, 0])
            off = np.abs(g[:, have] - want[0][i][:, have]).max()
            if off > 1e-3:
                bad.append(f"WRONG {i}/{s}")
            hits += have[:-1].all()
    if hits < 2:
        bad.append(f"the second generation is not whole: {hits}, {n}")
    return bad


@situation
def interrupt_in_decoding_then_continue_with_the_cache():
    model = llama()

    class Stop(Exception):
        pass

    def run(m):
        cache = DynamicCache()
        ids = text(6, 1)[None]
        count = [0]

        def boom(*_):
            count[0] += 1
            if count[0] == 4:
                raise Stop
        h = m.model.layers[1].self_attn.register_forward_pre_hook(boom)
        try:
            with torch.no_grad():
                logits = m(ids, past_key_values=cache).logits
                for _ in range(8):
                    ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
                    logits = m(ids[:, -1:], past_key_values=cache).logits
        except Stop:
            pass
        h.remove()
        # layer 0 has one key more than layer 1: the user crops it by hand
        a = cache.layers[0]
        n = cache.layers[1].keys.shape[2]
        a.keys, a.values = a.keys[:, :, :n], a.values[:, :, :n]
        with torch.no_grad():
            for x in (ids[:, -1:], text(1, 9)[None], text(1, 8)[None]):
                logits = m(x, past_key_values=cache).logits
        return torch.cat([ids, text(1, 9)[None], text(1, 8)[None]], 1)

    seen, out, bad = watched(model, run)
    report(seen)
    return bad + compare(seen, finals(model, out), rows=out.shape[1])


@situation
def exception_leaves_the_watch():
    model = llama()
    before = state_of(model)
    ids = text(6, 1)[None]
    seen = None
    try:
        with regard.watch(model) as seen:
            out = gen(model, ids)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    bad = [] if state_of(model) == before else ["left behind"]
    return bad + compare(seen, finals(model, out))


@situation
def threads_two_generations():
    model = llama()
    prompts = [text(6, 1)[None], text(9, 2)[None]]
    outs = [None, None]

    def run(m):
        def work(i):
            outs[i] = gen(m, prompts[i], n=8)
        ts = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
        for t in ts:
            t.start()
        for t in ts:
            t.join()
        return tuple(outs)

    seen, out, bad = watched(model, run)
    report(seen)
    return bad + fork_check(seen, model, list(out), 0)


@situation
def threads_hand_over_a_cache():
    """Prefill in one thread, decoding in another, as a server does."""
    model = llama()

    def run(m):
        cache = DynamicCache()
        got = []

        def work(ids):
            with torch.no_grad():
                got.append(m(ids[None], past_key_values=cache).logits)
        for i, n in enumerate((6, 1, 1, 2)):
            t = threading.Thread(target=work, args=(text(n, 50 + i),))
            t.start()
            t.join()
        return got
    seen, _, bad = watched(model, run)
    report(seen)
    row = torch.cat([text(n, 50 + i) for i, n in enumerate((6, 1, 1, 2))])
    want = final_text(model, row)
    rows = {}
    for r in seen.records:
        i = 0 if "layers.0" in r.name else 1
        got, kp = np.asarray(r.weights()), np.asarray(r.k_positions)
        for j, q in enumerate(np.asarray(r.q_positions)):
            full = np.zeros((4, 10))
            full[:, kp] = got[:, j]
            rows.setdefault(i, set()).add(int(q))
            off = np.abs(full - want[i][:, q]).max()
            if off > 1e-3:
                bad.append(f"WRONG {r.name} row {q} by {off:.2f}")
    if any(rows[i] != set(range(10)) for i in (0, 1)):
        bad.append(f"rows lost {rows}")
    return bad


@situation
def several_watches_nested_and_overlapping():
    model = llama()
    ids, mask = batch([9, 5])
    before = state_of(model)
    one, two = regard.watch(model), regard.watch(model, layers=[1], keep="qkv")
    a = one.__enter__()
    b = two.__enter__()
    out = gen(model, ids, mask)
    one.__exit__(None, None, None)
    out2 = gen(model, ids[:1], n=3)
    two.__exit__(None, None, None)
    bad = [] if state_of(model) == before else ["left behind"]
    want = finals(model, out, mask)
    bad += compare(a, want)
    want += finals(model, out2)
    return bad + compare(b, [x[1:] for x in want])


@situation
def deepcopy_of_model_in_watch():
    model = llama()
    ids = text(7, 1)[None]
    with regard.watch(model) as seen:
        out = gen(model, ids)
        twin = copy.deepcopy(model)
        out2 = gen(twin, text(6, 2)[None])
    bad = compare(seen, finals(model, out))
    n = len({id(x) for x in seen.records})
    if n != 2:
        bad.append(f"{n} records")
    fresh = state_of(llama())[:2]
    if state_of(twin)[0] != fresh[0]:
        bad.append("the copy has hooks of the watch")
    plain = gen(twin, text(6, 2)[None])
    if not torch.equal(plain, out2):
        bad.append("OUTPUT of the copy changed")
    with regard.watch(twin) as again:
        out3 = gen(twin, text(6, 2)[None])
    return bad + compare(again, finals(twin, out3))


@situation
def pickle_of_model_in_watch():
    model = llama()
    ids = text(7, 1)[None]
    with regard.watch(model) as seen:
        out = gen(model, ids)
        try:
            data = pickle.dumps(model)
        except Exception as e:
            return [f"pickle in a watch: {type(e).__name__} {e}"[:200]]
        twin = pickle.loads(data)
    bad = compare(seen, finals(model, out))
    if not torch.equal(gen(twin, ids), out):
        bad.append("OUTPUT of the copy changed")
    buf = io.BytesIO()
    with regard.watch(model):
        torch.save(model, buf)
    buf.seek(0)
    twin = torch.load(buf, weights_only=False)
    if state_of(twin)[0] != state_of(llama())[0]:
        bad.append("the saved model has hooks of the watch")
    return bad


@situation
def save_pretrained_in_watch():
    model = llama()
    with tempfile.TemporaryDirectory() as d, regard.watch(model) as seen:
        out = gen(model, text(7, 1)[None])
        model.save_pretrained(d)
        twin = type(model).from_pretrained(d)
    bad = compare(seen, finals(model, out))
    if not all(torch.equal(a, b) for a, b in zip(
            model.state_dict().values(), twin.state_dict().values())):
        bad.append("saved weights differ")
    return bad


@situation
def batches_of_different_shape():
    model = llama()
    shapes = [batch([9, 5]), batch([4], seed=9), batch([6, 6, 2], seed=20)]

    def run(m):
        with torch.no_grad():
            return [m(i, attention_mask=a).logits for i, a in shapes]
    seen, _, bad = watched(model, run)
    report(seen)
    want, rows = [], []
    for i, a in shapes:
        for b in range(len(i)):
            want.append(final_text(model, i[b][a[b] > 0]))
            rows.append(int(a[b].sum()))
    return bad + compare(seen, want, rows=rows)


@situation
def layers_by_name_and_qkv():
    model = llama()
    ids, mask = batch([9, 5])
    seen, out, bad = watched(model, lambda m: gen(m, ids, mask), keep="qkv",
                             layers=["model.layers.1"])
    want = [x[1:] for x in finals(model, out, mask)]
    if seen.layer(0).v is None:
        bad.append("no v")
    return bad + compare(seen, want)


@situation
def store_on_host():
    model = llama()
    ids, mask = batch([9, 5])
    seen, out, bad = watched(model, lambda m: gen(m, ids, mask), store="host")
    return bad + compare(seen, finals(model, out, mask))


@situation
def read_while_open():
    model = llama()
    ids = text(7, 1)[None]
    bad = []
    with regard.watch(model) as seen:
        out = gen(model, ids)
        for f in (lambda: seen.records, lambda: seen.layer(0), lambda: seen.table(),
                  lambda: seen.attentions, lambda: seen.coverage()):
            try:
                f()
            except regard.errors.OptionError:
                continue
            except Exception as e:
                bad.append(f"{type(e).__name__}: {e}"[:100])
        repr(seen)
        out2 = gen(model, ids)
    return bad + compare(seen, finals(model, out) + finals(model, out2))


@situation
def saved_and_opened():
    model = gemma2()
    ids, mask = batch([9, 5])
    seen, out, bad = watched(model, lambda m: gen(m, ids, mask, n=8), keep="qkv")
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "run.regard")
        seen.save(path)
        again = regard.open(path)
        bad += compare(again, finals(model, out, mask))
        for a, b in zip(seen.records, again.records):
            if np.abs(np.asarray(a.weights()) - np.asarray(b.weights())).max() > 2e-6:
                bad.append("weights differ after saving")
        if str(seen.coverage()) != str(again.coverage()):
            bad.append("coverage differs after saving")
    return bad


@situation
def statistics_of_a_padded_generation():
    model = mistral()
    ids, mask = batch([9, 5])
    seen, out, bad = watched(model, lambda m: gen(m, ids, mask, n=8))
    want = finals(model, out, mask)
    table, sequences = seen.table(), len(want)
    for n in range(len(table["layer"])):
        b = int(table["sequence"][n]) if sequences > 1 else 0
        w = want[b][int(table["layer"][n])][int(table["head"][n])][:-1]
        safe = np.where(w > 0, w, 1)
        true = {
            "sink": w[:, 0].mean(), "self": np.diagonal(w).mean(),
            "previous": np.diagonal(w[1:]).mean(),
            "entropy": -(safe * np.log2(safe)).sum(-1).mean(),
        }
        for name, x in true.items():
            if abs(float(table[name][n]) - x) > 2e-3:
                bad.append(f"{name} of row {n}: {float(table[name][n])} for {x}")
    return bad


@situation
def compiled_mlp_only():
    model = llama()
    ids, mask = batch([9, 5])
    for layer in model.model.layers:
        layer.mlp = torch.compile(layer.mlp, backend="eager")
    seen, out, bad = watched(model, lambda m: gen(m, ids, mask))
    report(seen)
    clean = llama()
    return bad + compare(seen, finals(clean, out, mask))


@situation
def compiled_model_eager_backend():
    model = llama()
    ids = text(9, 1)[None]
    other = torch.compile(model, backend="eager")
    with torch.no_grad():
        seen, out, bad = watched(other, lambda m: m(ids).logits)
    report(seen)
    return bad + compare(seen, [final_text(llama(), ids[0])], rows=9)


@situation
def unwatched_generation_before_cache_is_continued():
    """The cache was filled before the watch: rows of the prompt are unknown."""
    model = llama()
    cache = DynamicCache()
    p = text(6, 1)[None]
    first = gen(model, p, n=3, past_key_values=cache)
    ids = torch.cat([first, text(3, 5)[None]], 1)
    with regard.watch(model) as seen:
        out = gen(model, ids, n=4, past_key_values=cache)
    report(seen)
    want = final_text(model, out[0])
    bad = []
    for i in (0, 1):
        r = seen.layer(i)
        qp = np.asarray(r.q_positions).tolist()
        if qp != list(range(8, out.shape[1] - 1)):
            bad.append(f"rows {qp}, {list(range(8, out.shape[1] - 1))} expected")
        got = np.asarray(r.weights())
        for j, q in enumerate(qp):
            if np.abs(got[:, j] - want[i][:, q, : got.shape[-1]]).max() > 1e-3:
                bad.append(f"WRONG row {q}")
    return bad


@situation
def padded_cache_filled_before_the_watch():
    model = llama()
    cache = DynamicCache()
    ids, mask = batch([6, 3])
    first = gen(model, ids, mask, n=3, past_key_values=cache)
    ids2 = torch.cat([first, torch.stack([text(3, 5), text(3, 6)])], 1)
    mask2 = torch.cat([mask, torch.ones(2, 6).long()], 1)
    with regard.watch(model) as seen:
        out = gen(model, ids2, mask2, n=4, past_key_values=cache)
    report(seen)
    bad = []
    for b in range(2):
        pad = int((mask[b] == 0).sum())
        want = final_text(model, out[b, pad:])
        for i in (0, 1):
            r = seen.layer(i, sequence=b)
            qp = np.asarray(r.q_positions).tolist()
            kp = np.asarray(r.k_positions)
            if qp != list(range(8 - pad, out.shape[1] - 1 - pad)):
                true = want[i][:, 8 - pad : -1, 0].mean()
                sink = np.asarray(r.weights())[..., 0].mean()
                bad.append(f"{b}: rows are said to be {qp[0]}-{qp[-1]}, not "
                           f"{8 - pad}-{out.shape[1] - 2 - pad}: padding is kept; "
                           f"weight on the first key {sink:.2f} for {true:.2f}")
                continue
            got = np.asarray(r.weights())
            for j, q in enumerate(qp):
                full = np.zeros(want[i][:, q].shape)
                full[:, kp] = got[:, j]
                if np.abs(full - want[i][:, q]).max() > 1e-3:
                    bad.append(f"WRONG {i}/{b} row {q}")
    return bad


if __name__ == "__main__":
    main()
