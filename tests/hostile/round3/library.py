"""Situations with small random models of transformers, in float32 and bfloat16."""

import sys

import torch
import transformers as T
from oracle import COUNT, STATE, situation, tap, tokens

BF = torch.bfloat16
SMALL = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    "initializer_range": 0.5, "max_position_embeddings": 64,
}  # fmt: skip
G2 = {
    "vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "initializer_range": 0.5, "eos_token_id": None, "bos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
T5 = {
    "vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
    "num_heads": 4, "decoder_start_token_id": 0, "eos_token_id": None,
    "initializer_factor": 2.0,
}  # fmt: skip
BART = {
    "vocab_size": 50, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 64, "init_std": 0.5,
    "eos_token_id": None, "forced_eos_token_id": None, "decoder_start_token_id": 2,
}  # fmt: skip
MODELS = {
    "llama": (T.LlamaForCausalLM, T.LlamaConfig, SMALL),
    "mistral": (
        T.MistralForCausalLM, T.MistralConfig, {**SMALL, "sliding_window": 6},
    ),
    "gemma2": (
        T.Gemma2ForCausalLM, T.Gemma2Config,
        {**SMALL, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    ),
    "gptoss": (
        T.GptOssForCausalLM, T.GptOssConfig,
        {**SMALL, "head_dim": 8, "sliding_window": 6, "num_local_experts": 2,
         "num_experts_per_tok": 1},
    ),
    "gpt2": (T.GPT2LMHeadModel, T.GPT2Config, G2),
    "t5": (T.T5ForConditionalGeneration, T.T5Config, T5),
    "bart": (T.BartForConditionalGeneration, T.BartConfig, BART),
}  # fmt: skip


def listen(model):
    """Tap the weights that modules return."""

    def hook(name):
        def hear(module, args, kwargs, out):
            found = [
                x for x in (out if isinstance(out, tuple) else ())
                if isinstance(x, torch.Tensor) and x.dim() == 4
                and x.shape[1] == 4 and x.dtype.is_floating_point
            ]  # fmt: skip
            if STATE["tap"] is not None and found:
                w = found[-1]
                cross = "EncDec" in name or "encoder_attn" in name
                q = list(range(w.shape[2]))
                if cross:
                    q = [None for _ in q]
                elif "encoder." not in name or "decoder." in name:
                    last = (w > 0).double().amax((0, 1))
                    q = [int(x.nonzero().max()) for x in last]
                tap(name, w, w, q, STATE.get("keep"))

        return hear

    for n, m in model.named_modules():
        kind = type(m).__name__
        if "Attention" in kind and "Layer" not in kind:
            m.register_forward_hook(hook(n), with_kwargs=True)


def make(kind, run, how="sdpa", dtype=torch.float32):
    def build():
        cls, config, args = MODELS[kind]
        torch.manual_seed(0)
        c = config(**args)
        eager = STATE["tap"] is None and len(made) == 0
        made.append(1)
        c._attn_implementation = "eager" if eager else how  # noqa: SLF001
        model = cls(c).eval().to(dtype)
        for n, p in model.named_parameters():
            if p.dim() > 1 and any(x in n for x in ("q_proj", "k_proj", "c_attn")):
                p.data.mul_(1.0)
        if eager:
            listen(model)
        return model, lambda: run(model)

    made = []
    return build


def gen(model, **kw):
    t = tokens(2, 7) % 47 + 3
    STATE["keep"] = None
    mask = torch.ones_like(t)
    out = model.generate(
        t, attention_mask=mask, max_new_tokens=5, do_sample=False, **kw
    )
    return out


RUNS = {
    "greedy": gen,
    "beams": lambda m: gen(m, num_beams=3),
    "no cache": lambda m: gen(m, use_cache=False),
    "beams no cache": lambda m: gen(m, num_beams=3, use_cache=False),
    "static": lambda m: gen(m, cache_implementation="static"),
    "twice": lambda m: [gen(m), gen(m)],
    "returned": lambda m: gen(m, num_beams=2, num_return_sequences=2),
    "prompt lookup": lambda m: m.generate(
        tokens(1, 7) % 47 + 3, max_new_tokens=6, do_sample=False,
        prompt_lookup_num_tokens=2,
    ),
}  # fmt: skip


def main():
    which = sys.argv[1:] or list(MODELS)
    for kind in which:
        for how in ("sdpa", "eager"):
            if how == "sdpa" and kind == "gptoss":
                continue
            for name, run in RUNS.items():
                if name in ("static", "prompt lookup") and kind in ("t5", "bart"):
                    continue
                STATE["rolls"] = kind in ("mistral", "gemma2", "gptoss")
                STATE["follow"] = name not in ("beams", "returned")
                same = how == "eager" or kind != "gemma2"
                if same:
                    situation(f"{kind} {how} {name}", make(kind, run, how), tol=1e-3)
        situation(f"{kind} eager bf16", make(kind, gen, "eager", BF), tol=5e-2)
    print(COUNT)


if __name__ == "__main__":
    main()
