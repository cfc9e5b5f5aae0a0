import torch, regard, transformers as T
torch.manual_seed(0)
m = T.LlamaForCausalLM(T.LlamaConfig(vocab_size=64,hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4)).double()
for p in m.parameters():
    if p.dim()>1: torch.nn.init.normal_(p,std=.2)
x = torch.randint(0, 64, (1, 6)); m.train(); m.enable_input_require_grads()
m.gradient_checkpointing_enable(dict(use_reentrant=True))
def grad(inside):
    m.zero_grad()
    with regard.knock_out(m, heads=[(1, 2)]):
        loss = m(x, labels=x, use_cache=False).loss
        if inside: loss.backward()
    if not inside: loss.backward()
    return m.model.layers[1].self_attn.o_proj.weight.grad.clone()
print((grad(True) - grad(False)).abs().max(), grad(True)[:, 16:24].abs().max(), grad(False)[:, 16:24].abs().max())
