"""Families of models: one forward pass against a log of all softmaxes, generations."""

import numpy as np
import torch
import transformers as tf
from oracle import (
    Log, compare, final_text, main, report, situation, spread, watched,
)

V = 60


def logged_forward(model, run, masks=None, tol=1e-3, **options):
    """Compare all records of a single forward pass with the log of a plain one.

    masks: (B, N) of the tokens that are not padding, by length of an axis
    """
    with torch.no_grad(), Log(model) as log:
        run(model)
    with torch.no_grad():
        seen, out, bad = watched(model, run, **options)
    report(seen)
    masks = masks or {}
    names, count = {}, {}
    for name, w in log.calls:
        n = count[name] = count.get(name, 0) + 1
        names[name if n == 1 else f"{name}#{n}"] = w
    shown = {x.name: x for x in seen.coverage()}
    for name, w in names.items():
        c = shown.get(name)
        if name not in seen.layers and name.endswith(".softmax"):
            name = name[: -len(".softmax")]  # a module in the module that attends
        if name not in seen.layers:
            if c is None or not (c.reason or c.attention is False):
                bad.append(f"{name} is lost without a reason")
            continue  # else not recorded, but told
        if w.ndim == 3:
            w = w[None] if w.shape[0] == seen.layer(name).shape[0] else w.reshape(
                -1, seen.layer(name).shape[0], *w.shape[1:])
        w0 = w
        for b in range(len(w0)):
            w = w0
            try:
                r = seen.layer(name, sequence=b)
            except Exception as e:
                bad.append(f"{name}/{b}: {type(e).__name__} {e}"[:150])
                break
            w = w if r.sink is None else w[..., :-1]  # the last column is the sink
            nq, nk = w.shape[-2:]
            mq, mk = masks.get(nq), masks.get(nk)
            iq = np.arange(nq) if mq is None else np.flatnonzero(mq[b])
            ik = np.arange(nk) if mk is None else np.flatnonzero(mk[b])
            qp, kp = np.asarray(r.q_positions), np.asarray(r.k_positions)
            if len(qp) == nq:  # padding is kept: it is not hidden, or was not told
                iq, ik = np.arange(nq), np.arange(nk)
            if len(qp) != len(iq) or len(kp) > len(ik):
                bad.append(f"{name}/{b}: shape {r.shape}, {len(iq), len(ik)} expected")
                continue
            want = w[b][:, iq[qp]][:, :, ik[kp]].numpy()
            got = np.asarray(torch.as_tensor(r.weights()).double())
            if got.shape != want.shape:
                bad.append(f"{name}/{b}: {got.shape} for {want.shape}")
                continue
            rows = np.ones(nq, bool)[iq[qp]]
            off = np.abs(got - want)[:, rows].max(initial=0)
            if not off <= tol:
                bad.append(f"WRONG {name}/{b} by {off:.3g}")
    for name in seen.layers:
        part = dict(model.named_modules()).get(name)
        fused = isinstance(part, torch.nn.MultiheadAttention)  # is not in the log
        if name not in names and not any(n.startswith(name) for n in names) \
                and not fused:
            bad.append(f"(record of {name} has no oracle)")
    return bad


def text(*shape, seed=0, low=2):
    return torch.randint(low, V, shape, generator=torch.Generator().manual_seed(seed))


def padded(lengths, side="left"):
    n = max(lengths)
    ids, mask = text(len(lengths), n), torch.ones(len(lengths), n).long()
    for b, m in enumerate(lengths):
        mask[b, slice(0, n - m) if side == "left" else slice(m, n)] = 0
    ids[mask == 0] = 0
    return ids, mask


SMALL = dict(
    vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=128, initializer_range=0.3,
    pad_token_id=0, bos_token_id=1, eos_token_id=None,
)


def build(cls, config, **more):
    torch.manual_seed(0)
    return spread(getattr(tf, cls)(getattr(tf, config)(**more)).eval(), 1.5)


DECODERS = {
    "gpt2": lambda: build("GPT2LMHeadModel", "GPT2Config", vocab_size=V, n_embd=32,
                          n_layer=2, n_head=4, n_positions=128, initializer_range=0.3,
                          eos_token_id=None, bos_token_id=1),
    "gpt2_scaled_by_layer": lambda: build(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=V, n_embd=32, n_layer=2, n_head=4,
        n_positions=128, initializer_range=0.3, eos_token_id=None,
        scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True),
    "gpt_oss_sinks": lambda: build(
        "GptOssForCausalLM", "GptOssConfig", **SMALL | dict(
            num_key_value_heads=2, head_dim=8, sliding_window=5, num_local_experts=2,
            num_experts_per_tok=1)),
    "bloom_alibi": lambda: build("BloomForCausalLM", "BloomConfig", vocab_size=V,
                                 hidden_size=32, n_layer=2, n_head=4,
                                 initializer_range=0.3, pad_token_id=0,
                                 eos_token_id=None),
    "mpt_alibi": lambda: build("MptForCausalLM", "MptConfig", vocab_size=V, d_model=32,
                               n_heads=4, n_layers=2, max_seq_len=128,
                               initializer_range=0.3, eos_token_id=None),
    "falcon_alibi": lambda: build("FalconForCausalLM", "FalconConfig", **{
        k: v for k, v in SMALL.items() if k != "intermediate_size"} | dict(
            alibi=True, new_decoder_architecture=False, multi_query=True)),
    "falcon_multi_query": lambda: build("FalconForCausalLM", "FalconConfig", **{
        k: v for k, v in SMALL.items() if k != "intermediate_size"} | dict(
            alibi=False, new_decoder_architecture=False, multi_query=True)),
    "falcon_new": lambda: build("FalconForCausalLM", "FalconConfig", **{
        k: v for k, v in SMALL.items() if k != "intermediate_size"} | dict(
            alibi=False, new_decoder_architecture=True, num_kv_heads=2)),
    "deepseek_v2": lambda: build(
        "DeepseekV2ForCausalLM", "DeepseekV2Config", **SMALL | dict(
            num_key_value_heads=4, kv_lora_rank=12, q_lora_rank=None,
            qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6, head_dim=4,
            n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=2,
            n_group=1, topk_group=1, moe_intermediate_size=16, n_shared_experts=1)),
    "deepseek_v3": lambda: build(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", **SMALL | dict(
            num_key_value_heads=4, kv_lora_rank=12, q_lora_rank=16,
            qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6, head_dim=4,
            n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1,
            n_group=1, topk_group=1, moe_intermediate_size=16, n_shared_experts=1)),
    "gpt_neox": lambda: build("GPTNeoXForCausalLM", "GPTNeoXConfig", **SMALL),
    "gptj": lambda: build("GPTJForCausalLM", "GPTJConfig", vocab_size=V, n_embd=32,
                          n_layer=2, n_head=4, n_positions=128, rotary_dim=4,
                          initializer_range=0.3, eos_token_id=None, bos_token_id=1),
    "gpt_neo_local": lambda: build(
        "GPTNeoForCausalLM", "GPTNeoConfig", vocab_size=V, hidden_size=32,
        num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=4, max_position_embeddings=128, initializer_range=0.3,
        eos_token_id=None, bos_token_id=1),
    "qwen3": lambda: build("Qwen3ForCausalLM", "Qwen3Config",
                           **SMALL | dict(num_key_value_heads=2, head_dim=16)),
    "cohere2": lambda: build("Cohere2ForCausalLM", "Cohere2Config", **SMALL | dict(
        num_key_value_heads=2, sliding_window=4)),
    "diffllama": lambda: build("DiffLlamaForCausalLM", "DiffLlamaConfig",
                               **SMALL | dict(num_key_value_heads=2)),
    "granite": lambda: build("GraniteForCausalLM", "GraniteConfig", **SMALL | dict(
        num_key_value_heads=2, attention_multiplier=0.7)),
    "olmo2": lambda: build("Olmo2ForCausalLM", "Olmo2Config",
                           **SMALL | dict(num_key_value_heads=2)),
    "phi3": lambda: build("Phi3ForCausalLM", "Phi3Config", **SMALL | dict(
        num_key_value_heads=2, sliding_window=5)),
    "opt": lambda: build("OPTForCausalLM", "OPTConfig", vocab_size=V, hidden_size=32,
                         ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
                         max_position_embeddings=128, init_std=0.3, pad_token_id=0,
                         word_embed_proj_dim=32, eos_token_id=None),
    "codegen": lambda: build("CodeGenForCausalLM", "CodeGenConfig", vocab_size=V,
                             n_embd=32, n_layer=2, n_head=4, n_positions=128,
                             rotary_dim=4, initializer_range=0.3, eos_token_id=None),
    "bigcode_mqa": lambda: build("GPTBigCodeForCausalLM", "GPTBigCodeConfig",
                                 vocab_size=V, n_embd=32, n_layer=2, n_head=4,
                                 n_positions=128, initializer_range=0.3,
                                 eos_token_id=None, bos_token_id=1),
    "llama4_chunked": lambda: build(
        "Llama4ForCausalLM", "Llama4TextConfig", **SMALL | dict(
            num_key_value_heads=2, head_dim=8, attention_chunk_size=6,
            intermediate_size_mlp=48, num_local_experts=2, num_experts_per_tok=1,
            layer_types=["chunked_attention", "full_attention"])),
    "jamba_hybrid": lambda: build(
        "JambaForCausalLM", "JambaConfig", **SMALL | dict(
            num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1,
            num_experts=2, num_experts_per_tok=1, mamba_d_state=4, mamba_d_conv=2,
            use_mamba_kernels=False)),
    "stablelm": lambda: build("StableLmForCausalLM", "StableLmConfig",
                              **SMALL | dict(num_key_value_heads=2)),
    "xglm": lambda: build("XGLMForCausalLM", "XGLMConfig", vocab_size=V, d_model=32,
                          ffn_dim=48, num_layers=2, attention_heads=4, init_std=0.3,
                          max_position_embeddings=128, pad_token_id=0,
                          eos_token_id=None),
    "gemma3n": lambda: build(
        "Gemma3nForCausalLM", "Gemma3nTextConfig", **SMALL | dict(
            num_hidden_layers=4, num_key_value_heads=2, head_dim=8, sliding_window=5,
            num_kv_shared_layers=2, layer_types=[
                "sliding_attention", "full_attention"] * 2, intermediate_size=[48] * 4,
            vocab_size_per_layer_input=V, hidden_size_per_layer_input=8,
            laurel_rank=4, altup_num_inputs=2, activation_sparsity_pattern=None)),
}


def two_decoder_situations(name, make):
    def forward():
        model = make()
        ids, mask = padded([9, 5])
        return logged_forward(model, lambda m: m(ids, attention_mask=mask).logits,
                              {9: mask})

    def generate():
        model = make()
        ids, mask = padded([9, 5])

        def run(m):
            return m.generate(ids, attention_mask=mask, max_new_tokens=7,
                              do_sample=False, pad_token_id=0, suppress_tokens=[0])

        # the log of a plain generation is the oracle
        with Log(model) as log:
            run(model)
        seen, out, bad = watched(model, run)
        report(seen)
        return bad + compare_steps(
            seen, log, mask, 9, times=2 if name == "diffllama" else 1)

    forward.__name__, generate.__name__ = f"forward_{name}", f"generate_{name}"
    situation(forward)
    situation(generate)


def compare_steps(seen, log, mask, prompt, heads=4, tol=1e-3, times=1):
    """Compare the records of a generation with the log of all of its steps."""
    bad, steps, turn = [], {}, {}
    for name, w in log.calls:
        if w.ndim == 3:
            w = w.reshape(len(mask), -1, *w.shape[-2:])
        if w.shape[1] != heads and w.shape[1] * w.shape[2] % heads == 0:
            w = w.reshape(len(w), heads, -1, w.shape[-1])
        turn[name] = turn.get(name, 0) + 1
        n = turn[name] % times
        key = name if n == 1 or times == 1 else f"{name}#{n or times}"
        steps.setdefault(key, []).append(w)
    for name, ws in steps.items():
        if name not in seen.layers:
            c = [x for x in seen.coverage() if x.name == name]
            if not c or not (c[0].reason or c[0].attention is False):
                bad.append(f"{name} is lost without a reason")
            continue  # else not recorded, but told
        for b in range(len(mask)):
            r = seen.layer(name, sequence=b)
            pad = int((mask[b] == 0).sum())
            got, qp = np.asarray(r.weights()), np.asarray(r.q_positions).tolist()
            kp = np.asarray(r.k_positions)
            end = 0
            for w in ws:
                w = w if r.sink is None else w[..., :-1]
                first, end = end, end + w.shape[2]
                if w.shape[2] == w.shape[3]:  # no cache: all is computed again
                    first, end = 0, w.shape[2]
                for j, slot in enumerate(range(first, end)):
                    if slot < pad:
                        continue
                    if slot - pad not in qp:
                        bad.append(f"{name}/{b}: row {slot - pad} is lost")
                        continue
                    row = got[:, qp.index(slot - pad)]
                    have = np.zeros((row.shape[0], end))
                    seen_keys = kp + pad < end
                    have[:, kp[seen_keys] + pad] = row[:, seen_keys]
                    want = w[b, :, j].numpy()
                    want = want[:, -end:] if want.shape[1] >= end else want
                    have_w = have[:, -want.shape[1]:]
                    off = np.abs(have_w - want).max()
                    rest = np.abs(row[:, ~seen_keys]).max(initial=0)
                    rest = max(rest, np.abs(have[:, : -want.shape[1]]).max(initial=0))
                    if not max(off, rest) <= tol:
                        bad.append(f"WRONG {name}/{b} row {slot - pad} by {off:.3g}")
            if len(qp) != end - pad:
                bad.append(f"{name}/{b}: {len(qp)} rows for {end - pad}")
    return bad


for _name, _make in DECODERS.items():
    two_decoder_situations(_name, _make)

if __name__ == "__main__":
    main()
