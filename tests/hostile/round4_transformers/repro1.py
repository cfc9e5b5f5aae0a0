import torch, regard
from transformers import GptOssConfig, GptOssForCausalLM
torch.manual_seed(0)
m = GptOssForCausalLM._from_config(GptOssConfig(vocab_size=97, hidden_size=32, intermediate_size=40,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4,
    num_experts_per_tok=2, eos_token_id=2, pad_token_id=0), attn_implementation="eager").eval()
with torch.no_grad():
    for l in m.model.layers: l.self_attn.sinks.normal_()
for prompt in ([[1, 5]], [[1]]):  # two tokens; only <bos>
    with regard.watch(m, keep="qkv") as seen, torch.no_grad():
        m.generate(torch.tensor(prompt), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    print(seen)
