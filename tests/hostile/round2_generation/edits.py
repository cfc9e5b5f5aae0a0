"""knock_out, patch_heads and trace_heads in generations, against hooks on o_proj."""

import copy

import numpy as np
import regard
import torch
from caches import batch, finals, gemma2, gemma3, gen, llama, mistral, text
from families import DECODERS
from hidden import bart, t5
from oracle import compare, main, report, same, situation, state_of, watched
from transformers import DynamicCache, StaticCache


def zero_head(module, head, width=8):
    """Zero a head before the output projection."""
    def hook(_, args):
        x = args[0].clone()
        x[..., head * width : (head + 1) * width] = 0
        return (x, *args[1:])
    return module.register_forward_pre_hook(hook)


def projection(model, layer):
    """Return the output projection of a layer."""
    names = ("o_proj", "out_proj", "dense", "c_proj")
    found = [
        m for n, m in model.named_modules()
        if n.split(".")[-1] in names and f".{layer}." in n and "attn" in n.lower()
        or n.endswith(f".{layer}.self_attention.dense")
        or n.endswith(f".{layer}.attention.dense")
    ]
    return found[0]


def scores(model, ids, mask, **more):
    """Return tokens and logits of a generation."""
    out = gen(model, ids, mask, return_dict_in_generate=True, output_logits=True,
              **more)
    return torch.stack(out.logits, 1), out.sequences


def close(a, b, tol=2e-4):
    """Return problems if two generations differ."""
    bad = []
    if not torch.equal(a[1], b[1]):
        bad.append("WRONG: other tokens than with a hook")
    elif (a[0] - b[0]).nan_to_num(posinf=0, neginf=0).abs().max() > tol:
        off = (a[0] - b[0]).nan_to_num(posinf=0, neginf=0).abs().max()
        bad.append(f"WRONG: logits differ by {float(off):.3g}")
    return bad


def ablated(name, make, width=8, options=None, **more):
    def f():
        model = make()
        ids, mask = batch([9, 5])
        def fresh():
            return {k: v(model) if callable(v) else v for k, v in more.items()}
        plain = scores(model, ids, mask, **fresh())
        h = zero_head(projection(model, 1), 2, width)
        want = scores(model, ids, mask, **fresh())
        h.remove()
        before = state_of(model)
        with regard.knock_out(model, heads=[(1, 2)]):
            got = scores(model, ids, mask, **fresh())
        bad = close(got, want)
        if state_of(model) != before:
            bad.append("left behind")
        if same(plain[0], want[0]):
            bad.append("(the hook changed nothing)")
        # a watch inside and outside of the ablation must not change it
        with regard.knock_out(model, heads=[(1, 2)]), regard.watch(model):
            inner = scores(model, ids, mask, **fresh())
        with regard.watch(model), regard.knock_out(model, heads=[(1, 2)]):
            outer = scores(model, ids, mask, **fresh())
        if not same(inner, got) or not same(outer, got):
            bad.append("OUTPUT CHANGED by a watch")
        if not same(plain, scores(model, ids, mask, **fresh())):
            bad.append("OUTPUT after the ablation changed")
        return bad
    f.__name__ = f"knock_out_{name}"
    situation(f)


ablated("llama", llama)
ablated("llama_beams", llama, num_beams=3)
ablated("llama_static", llama, cache_implementation="static")
ablated("llama_no_cache", llama, use_cache=False)
ablated("llama_chunked", llama, prefill_chunk_size=4)
ablated("gemma2", gemma2)
ablated("gemma3_static", gemma3, cache_implementation="static")
ablated("mistral", mistral)
for _n, _w in dict(gpt2=8, bloom_alibi=8, gpt_oss_sinks=8, falcon_new=8, deepseek_v3=6,
                   falcon_multi_query=8, bigcode_mqa=8, gptj=8, opt=8,
                   gpt_neox=8, llama4_chunked=8).items():
    ablated(_n, DECODERS[_n], _w)


@situation
def knock_out_prompt_lookup():
    model = llama()
    p = text(4, 1).repeat(4)[None]
    h = zero_head(projection(model, 1), 2)
    want = gen(model, p, n=10)
    h.remove()
    with regard.knock_out(model, heads=[(1, 2)]):
        got = gen(model, p, n=10, prompt_lookup_num_tokens=3)
    return [] if torch.equal(got, want) else ["WRONG tokens"]


def hidden_key(name, make, key=2, tol=2e-4, **more):
    """A key is hidden: the same as a mask that hides it from all other tokens."""
    def f():
        model = make()
        ids, mask = batch([9, 5])
        with regard.knock_out(model, keys=[key]):
            got = scores(model, ids, mask, **more)
        # oracle: run step by step without cache on each text, with a 4d mask
        bad = []
        for b in range(2):
            pad = int((mask[b] == 0).sum())
            row = got[1][b, pad:]
            n = len(row) - 1
            see = torch.ones(n, n).tril().bool()
            see[:, key] = False
            with torch.no_grad():
                logits = eager_with_mask(model, row[:-1], see)
            mine = got[0][b]
            off = (logits[-mine.shape[0]:] - mine)[:, 2:].abs().max()
            if off > tol:
                bad.append(f"WRONG sequence {b}: logits differ by {float(off):.3g}")
        return bad
    f.__name__ = f"hidden_key_{name}"
    situation(f)


def eager_with_mask(model, row, see):
    """Return the logits of one text under a mask; a blind row returns 0."""
    from torch.nn import functional as F
    original = F.scaled_dot_product_attention

    def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
               enable_gqa=False):
        if k.shape[1] != q.shape[1]:
            n = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)
        ok = see
        if attn_mask is not None:
            ok = ok & (attn_mask if attn_mask.dtype == torch.bool else attn_mask > -1e9)
        x = q @ k.mT * (scale or q.shape[-1] ** -0.5)
        w = x.masked_fill(~ok, -torch.inf).softmax(-1).nan_to_num(0)
        return w @ v
    F.scaled_dot_product_attention = attend
    torch.nn.functional.scaled_dot_product_attention = attend
    try:
        return model(row[None], use_cache=False).logits[0]
    finally:
        F.scaled_dot_product_attention = original


hidden_key("llama", llama)
hidden_key("llama_static", llama, cache_implementation="static")
hidden_key("mistral_sliding", mistral)
hidden_key("gemma3_sliding", gemma3, n=9)
hidden_key("gemma3_static", gemma3, n=9, cache_implementation="static")
hidden_key("llama_beams", llama, num_beams=1)
hidden_key("llama_first_key", llama, key=0)
hidden_key("llama_no_cache", llama, use_cache=False)


@situation
def hidden_key_in_a_chat_that_began_before():
    """Positions count real tokens, also if the cache was filled before the block."""
    bad = []
    model = llama()
    ids, mask = batch([6, 3])
    two = torch.stack([text(3, 5), text(3, 6)])
    cache = DynamicCache()
    first = gen(model, ids, mask, n=2, past_key_values=cache)
    whole = torch.cat([first, two], 1)
    some = torch.cat([mask, torch.ones(2, 5).long()], 1)
    ref = copy.deepcopy(cache)
    with regard.knock_out(model, keys=[1]):
        got = gen(model, whole, some, n=3, past_key_values=cache,
                  return_dict_in_generate=True, output_logits=True)
    # oracle: the same, with the slot of token 1 hidden in the attention_mask
    hide = some.clone()
    for b in range(2):
        hide[b, int((mask[b] == 0).sum()) + 1] = 0
    n = ref.get_seq_length()
    pos = (some.cumsum(1) - 1).clamp(0)
    tokens, m, logits = got.sequences, hide, []
    with torch.no_grad():
        out = model(tokens[:, n : whole.shape[1]], attention_mask=m,
                    position_ids=pos[:, n:], past_key_values=ref).logits[:, -1]
        logits.append(out)
        for t in range(whole.shape[1], tokens.shape[1] - 1):
            m = torch.cat([m, torch.ones(2, 1).long()], 1)
            pos = torch.cat([pos, pos[:, -1:] + 1], 1)
            logits.append(model(
                tokens[:, t : t + 1], attention_mask=m, position_ids=pos[:, -1:],
                past_key_values=ref).logits[:, -1])
    for b in range(2):
        off = max((x - y)[b, 2:].abs().max() for x, y in zip(got.logits, logits))
        if off > 2e-4:
            bad.append(f"WRONG sequence {b}: logits differ by {float(off):.3g}")
    return bad


@situation
def hidden_key_in_a_window_that_began_before():
    """The cache of a window has dropped its first keys; positions go on."""
    bad = []
    for key in (11, 13, 15):
        model = mistral()
        cache = DynamicCache(config=model.config)
        first = gen(model, text(12, 1)[None], n=3, past_key_values=cache)
        ids = torch.cat([first, text(2, 5)[None]], 1)
        with regard.knock_out(model, keys=[key]):
            got = gen(model, ids, n=3, past_key_values=cache,
                      return_dict_in_generate=True, output_logits=True)
        # oracle: the whole text, in which only the rows from 14 on are edited
        row = got.sequences[0][:-1]
        n = len(row)
        at = torch.arange(n)
        see = (at[:, None] >= at) & (at[:, None] - at < 6)
        see[14:, key] = False
        want = eager_rows(model, row, see)[-3:]
        off = (torch.stack(got.logits, 1)[0] - want)[:, 2:].abs().max()
        if off > 3e-4:
            bad.append(f"WRONG key {key}: logits differ by {float(off):.3g}")
    return bad


def eager_rows(model, row, see):
    """Return the logits of one text under this mask alone."""
    from torch.nn import functional as F
    original = F.scaled_dot_product_attention

    def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
               enable_gqa=False):
        n = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)
        x = q @ k.mT * (scale or q.shape[-1] ** -0.5)
        return x.masked_fill(~see, -torch.inf).softmax(-1).nan_to_num(0) @ v
    F.scaled_dot_product_attention = attend
    try:
        with torch.no_grad():
            return model(row[None], use_cache=False).logits[0]
    finally:
        F.scaled_dot_product_attention = original


@situation
def hidden_key_with_a_mask_of_the_static_cache():
    """attention_mask is longer than the text; positions count real tokens."""
    model = llama()
    ids, mask = batch([6, 4])

    def run(hide):
        cache = StaticCache(config=model.config, max_cache_len=16)
        whole = torch.zeros(2, 16).long()
        whole[:, :6] = mask
        pos = (mask.cumsum(1) - 1).clamp(0)
        if hide:
            for b in range(2):
                whole[b, int((mask[b] == 0).sum()) + 1] = 0
        with torch.no_grad():
            a = model(ids, attention_mask=whole, past_key_values=cache,
                      position_ids=pos).logits[:, -1]
            whole[:, 6] = 1
            b = model(text(2, 4)[:, None], attention_mask=whole, past_key_values=cache,
                      position_ids=pos[:, -1:] + 1).logits[:, -1]
        return torch.stack([a, b])
    with regard.knock_out(model, keys=[1]):
        got = run(False)
    off = (got - run(True)).abs().amax((0, 2))
    return [f"WRONG sequence {b} by {float(x):.3g}"
            for b, x in enumerate(off) if x > 2e-4]


@situation
def hidden_key_fp8_left_padded():
    from transformers import QuantizedCache
    model = llama()
    ids, mask = batch([6, 4])
    with regard.knock_out(model, keys=[1]):
        got = gen(model, ids, mask, n=4, return_dict_in_generate=True,
                  output_logits=True,
                  past_key_values=QuantizedCache("fp8", model.config))
    hide, cache = mask.clone(), QuantizedCache("fp8", model.config)
    for b in range(2):
        hide[b, int((mask[b] == 0).sum()) + 1] = 0
    pos, new, out = (mask.cumsum(1) - 1).clamp(0), ids, []
    with torch.no_grad():
        for t in range(4):
            out.append(model(new, attention_mask=hide, position_ids=pos,
                             past_key_values=cache).logits[:, -1])
            new, pos = got.sequences[:, 6 + t : 7 + t], pos[:, -1:] + 1
            hide = torch.cat([hide, torch.ones(2, 1).long()], 1)
    off = (torch.stack(got.logits) - torch.stack(out))[..., 2:].abs().amax((0, 2))
    return [f"WRONG sequence {b} by {float(x):.3g}"
            for b, x in enumerate(off) if x > 3e-4]


@situation
def last_key_hidden_in_each_step():
    """keys=[-1] is the last token so far; a row may not see itself."""
    model = llama()
    ids, mask = batch([6, 4])
    with regard.knock_out(model, keys=[-1]):
        got = scores(model, ids, mask, n=4)
    bad = []
    for b in range(2):
        pad = int((mask[b] == 0).sum())
        cache, outs = DynamicCache(), []
        row = got[1][b, pad:]
        n = 6 - pad
        parts = [row[:n], *(row[i : i + 1] for i in range(n, n + 3))]
        end = 0
        for part in parts:
            end += len(part)
            see = torch.ones(len(part), end).tril(end - len(part)).bool()
            see[:, end - 1] = False
            with torch.no_grad():
                outs.append(model(
                    part[None], attention_mask=see[None, None], past_key_values=cache,
                    position_ids=torch.arange(end - len(part), end)[None],
                ).logits[0, -1])
        off = (torch.stack(outs) - got[0][b])[:, 2:].abs().max()
        if off > 3e-4:
            bad.append(f"WRONG sequence {b} by {float(off):.3g}")
    return bad


@situation
def patch_last_prompt_token_in_a_padded_generation():
    """z of one head at one token is replaced by that of another run."""
    model = llama()
    ids, mask = batch([9, 5])
    other = ids.clone()
    other[mask > 0] = (other[mask > 0] + 7) % 50 + 2
    with regard.watch(model, keep="qkv") as source, torch.no_grad():
        model(other, attention_mask=mask)
    at, kept = projection(model, 1), {}

    def keep(_, args):
        kept["x"] = args[0].clone()
    h = at.register_forward_pre_hook(keep)
    with torch.no_grad():
        model(other, attention_mask=mask)
    h.remove()

    def put(_, args):
        x = args[0].clone()
        if x.shape[1] == 9:
            for b in range(2):
                slot = int((mask[b] == 0).sum()) + 3
                x[b, slot, 16:24] = kept["x"][b, slot, 16:24]
        return (x,)
    h = at.register_forward_pre_hook(put)
    want = scores(model, ids, mask)
    h.remove()
    with regard.patch_heads(model, source, [(1, 2)], queries=[3]):
        got = scores(model, ids, mask)
    return close(got, want)


@situation
def patch_by_a_function_in_beams():
    model = llama()
    ids, mask = batch([9, 5])

    def half(_, args):
        x = args[0].clone()
        x[..., 16:24] /= 2
        return (x,)
    h = projection(model, 1).register_forward_pre_hook(half)
    want = scores(model, ids, mask, num_beams=3)
    h.remove()
    with regard.patch_heads(model, lambda z: z / 2, [(1, 2)]):
        got = scores(model, ids, mask, num_beams=3)
    return close(got, want)


@situation
def knock_out_bart_layers():
    """Layers of an encoder-decoder are counted in the order in which they attend."""
    bad = []
    model = bart()
    ids = torch.stack([text(6, 1), text(6, 2)])
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    for layer, at in enumerate((
        model.model.encoder.layers[0].self_attn,
        model.model.encoder.layers[1].self_attn,
        model.model.decoder.layers[0].self_attn,
        model.model.decoder.layers[0].encoder_attn,
        model.model.decoder.layers[1].self_attn,
        model.model.decoder.layers[1].encoder_attn,
    )):
        def run():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=4,
                                 min_new_tokens=4, do_sample=False, num_beams=1,
                                 return_dict_in_generate=True, output_logits=True)
            return torch.stack(out.logits, 1), out.sequences
        h = zero_head(at.out_proj, 2)
        want = run()
        h.remove()
        with regard.knock_out(model, heads=[(layer, 2)]):
            got = run()
        bad += [f"layer {layer}: {x}" for x in close(got, want)]
    return bad


@situation
def knock_out_within_training():
    model = llama().train()
    ids, mask = batch([9, 5], "right")

    def grads():
        model.zero_grad()
        loss = model(ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]
    h = zero_head(projection(model, 1), 2)
    want = grads()
    h.remove()
    with regard.knock_out(model, heads=[(1, 2)]), regard.watch(model):
        got = grads()
    off = max(float((a - b).abs().max()) for a, b in zip(got, want))
    return [f"gradients differ by {off:.3g}"] if off > 1e-4 else []


@situation
def knock_out_within_checkpointed_training():
    model = llama().train()
    ids, mask = batch([9, 5], "right")

    def grads(checkpoint):
        model.zero_grad()
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = model(ids, attention_mask=mask, labels=ids, use_cache=False).loss
        loss.backward()
        if checkpoint:
            model.gradient_checkpointing_disable()
        return [p.grad.clone() for p in model.parameters()]
    h = zero_head(projection(model, 1), 2)
    want = grads(False)
    h.remove()
    with regard.knock_out(model, heads=[(1, 2)]):
        got = grads(True)
    bad = []
    off = max(float((a - b).abs().max()) for a, b in zip(got, want))
    if off > 1e-4:
        bad.append(f"gradients differ by {off:.3g}")

    def outside():
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        with regard.knock_out(model, heads=[(1, 2)]):
            loss = model(ids, attention_mask=mask, labels=ids, use_cache=False).loss
        loss.backward()  # after the block: the layers run again, without the edit
        model.gradient_checkpointing_disable()
        return [p.grad.clone() for p in model.parameters()]
    try:
        late = outside()
    except Exception as e:
        assert "Checkpoint" in type(e).__name__  # of torch: told, not wrong
        return bad
    off = max(float((a - b).abs().max()) for a, b in zip(late, want))
    if off > 1e-4:
        bad.append(f"backward after the block: gradients are off by {off:.3g}, "
                   "without a message")
    return bad


@situation
def knock_out_two_models_and_threads():
    import threading
    one, two = llama(), llama(seed=4)
    ids, mask = batch([9, 5])
    plain = scores(two, ids, mask)
    h = zero_head(projection(one, 0), 1)
    want = scores(one, ids, mask)
    h.remove()
    got = {}
    with regard.knock_out(one, heads=[(0, 1)]):
        ts = [threading.Thread(target=lambda n=n, m=m: got.update(
            {n: scores(m, ids, mask)})) for n, m in (("one", one), ("two", two))]
        for t in ts:
            t.start()
        for t in ts:
            t.join()
    bad = close(got["one"], want)
    return bad + ([] if same(got["two"], plain) else ["the other model changed"])


@situation
def nested_ablations_with_an_exception():
    model = llama()
    ids, mask = batch([9, 5])
    plain = scores(model, ids, mask)
    before = state_of(model)
    try:
        with regard.knock_out(model, heads=[(0, 1)]):
            with regard.knock_out(model, heads=[(1, 2)]):
                gen(model, ids, mask)
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    bad = [] if state_of(model) == before else ["left behind"]
    return bad + ([] if same(plain, scores(model, ids, mask)) else ["changed"])


if __name__ == "__main__":
    main()
