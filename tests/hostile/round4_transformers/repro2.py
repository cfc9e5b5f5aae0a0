import torch, regard
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
torch.manual_seed(0)
m = DeepseekV3ForCausalLM._from_config(DeepseekV3Config(vocab_size=97, hidden_size=32, intermediate_size=40,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4,
    num_experts_per_tok=2, n_group=2, topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4,
    qk_nope_head_dim=8, v_head_dim=12, first_k_dense_replace=2), attn_implementation="eager").eval()
x = torch.randint(3, 97, (2, 9))
for mask in ([[1]*6+[0]*3, [1]*9], [[0]*3+[1]*6, [1]*9]):   # right padding, left padding
    with regard.watch(m, keep="qkv") as seen, torch.no_grad():
        m(x, attention_mask=torch.tensor(mask))
    print(seen)
