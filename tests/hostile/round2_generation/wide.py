"""More decoders by type: a left-padded generation against a log of its steps."""

import numpy as np
import torch
from caches import batch, finals, gen, llama, text
from families import SMALL, compare_steps
from oracle import Log, compare, main, report, situation, spread, watched
from transformers import AutoConfig, AutoModelForCausalLM

TYPES = """arcee apertus bamba biogpt bitnet blenderbot cohere ctrl cwm dbrx doge dots1
ernie4_5 exaone4 falcon_h1 gemma glm glm4 glm4_moe gpt_neox_japanese granitemoe
granitemoehybrid helium hunyuan_v1_dense hyperclovax jais2 jetmoe lfm2 longcat_flash
mimo_v2_flash minimax ministral mistral4 mixtral modernbert-decoder moshi nanochat
nemotron olmo olmo3 olmoe openai-gpt persimmon phi phimoe qwen2 qwen2_moe qwen3_moe
qwen3_next rembert roformer seed_oss smollm3 solar_open starcoder2 t5gemma trocr
vaultgemma xlm youtu zamba2 big_bird deepseek_v32 minicpm3 openai_privacy_filter
granite_swa laguna axk1 afmoe kimi_linear olmo_hybrid qwen3_5_text hy_v3""".split()
MORE = dict(num_key_value_heads=2, head_dim=8, sliding_window=5, num_experts=4,
            num_local_experts=4, num_experts_per_tok=2, n_routed_experts=4, n_group=1,
            topk_group=1, moe_intermediate_size=16, n_shared_experts=1,
            shared_expert_intermediate_size=16, kv_lora_rank=12, q_lora_rank=16,
            qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, is_decoder=True,
            first_k_dense_replace=1)


def make(kind):
    torch.manual_seed(0)
    for more in (MORE, {k: MORE[k] for k in ("num_key_value_heads", "is_decoder")}, {}):
        try:
            config = AutoConfig.for_model(kind, **SMALL | more)
            config.pad_token_id, config.eos_token_id = 0, None
            model = AutoModelForCausalLM.from_config(config).eval()
            if sum(p.numel() for p in model.parameters()) > 2e7:
                continue
            model = spread(model, 1.5)
            with torch.no_grad():
                model(text(5, 1)[None])
            return model
        except Exception as e:
            why = e
    raise RuntimeError(f"not built: {type(why).__name__} {why}"[:90])


def add(kind):
    def f():
        try:
            model = make(kind)
        except Exception as e:
            return None if "not built" in str(e) else [str(e)]
        ids, mask = batch([9, 5])
        if kind in ("xlm", "openai-gpt"):  # no cache: each pass is a record of its own
            from attacks import by_log
            ids, mask = ids[:1], mask[:1]
        heads = getattr(model.config, "num_attention_heads", 4)

        def run(m):
            return gen(m, ids, mask, n=7)
        with Log(model) as log:
            run(model)
        seen, out, bad = watched(model, run)
        report(seen)
        if len(mask) == 1:
            return bad + by_log(seen, log)
        return bad + compare_steps(seen, log, mask, 9, heads=heads)
    f.__name__ = f"type_{kind}"
    situation(f)


for _kind in TYPES:
    add(_kind)


@situation
def attentions_of_a_padded_generation():
    model = llama()
    ids, mask = batch([9, 5])
    seen, out, bad = watched(model, lambda m: gen(m, ids, mask, n=5))
    want = finals(model, out, mask)
    for i, a in enumerate(seen.attentions):
        a = np.asarray(a)
        for b in range(2):
            pad = int((mask[b] == 0).sum())
            x = want[b][i][:, :-1, :-1]
            places = [(0, x.shape[1]), (pad, pad + x.shape[1])]
            if not any(a[b][:, s:e, s:e].shape == x.shape
                       and np.abs(a[b][:, s:e, s:e] - x).max() < 1e-3
                       for s, e in places):
                bad.append(f"WRONG attentions {i}/{b} {a.shape}")
    return bad


@situation
def attentions_of_two_batches():
    model = llama()
    one, two = batch([9, 5]), batch([4, 3], seed=30)

    def run(m):
        with torch.no_grad():
            return [m(i, attention_mask=a).logits for i, a in (one, two)]
    seen, _, bad = watched(model, run)
    from oracle import final_text
    texts = [i[b][a[b] > 0] for i, a in (one, two) for b in range(2)]
    for i, a in enumerate(seen.attentions):
        a = np.asarray(a)
        for s, x in enumerate(texts):
            w, n = final_text(model, x)[i], len(x)
            hits = [t for t in range(a.shape[2] - n + 1)
                    if np.abs(a[s][:, t : t + n, t : t + n] - w).max() < 1e-3]
            rest = a[s].sum() - w.sum()
            if not hits or abs(rest) > 1e-2:
                bad.append(f"WRONG attentions {i}/{s} {a.shape} {hits} {rest:.2f}")
    return bad


if __name__ == "__main__":
    main()
