"""Small random models in the shapes that vLLM is tested with."""

import torch
import transformers

BASE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "head_dim": 32,
}
SHAPES = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 64,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 5.0,
        },
    ),
    "deepseek": (  # multi-head latent attention (MLA)
        "DeepseekV2",
        {
            "num_key_value_heads": 4,
            "head_dim": 64,
            "kv_lora_rank": 512,  # vLLM's kernel has no other sizes
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
        },
    ),
    "gptoss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {  # vLLM reads no other than YaRN
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
}


def make_model(name, folder):
    """Save a small random model, and return its path."""

    torch.manual_seed(0)
    prefix, options = SHAPES[name]
    config = getattr(transformers, f"{prefix}Config")(**BASE | options)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.ndim > 1 or parameter.numel() == config.num_attention_heads:
            torch.nn.init.normal_(parameter, std=0.15)  # sinks are of a head each
    model.save_pretrained(folder)
    return folder
