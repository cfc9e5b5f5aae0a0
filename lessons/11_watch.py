# %% [markdown]
# # 11. Watching any PyTorch model
#
# This model is not ours. It comes from transformers, with random weights from a config,
# so that nothing is downloaded; a trained one is watched in the same way.
#
# ## First, the definition on tensors
#
# `regard.attention` accepts PyTorch tensors as well as NumPy arrays. A widely read
# tutorial computes the sentence "Life is short, eat dessert first" from seed 123, and
# its figures are correct: we get the same context vector for the second word.

# %%
from importlib.util import find_spec

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import regard
from regard.show.figure import plot_weights
from regard.stats import entropy

words = ["Life", "is", "short", "eat", "dessert", "first"]
ids = torch.tensor([sorted(words).index(word) for word in words])
torch.manual_seed(123)
x = torch.nn.Embedding(50_000, 3)(ids).detach()
torch.manual_seed(123)
q, k, v = (x @ torch.rand(3, width) for width in (2, 2, 4))
context = regard.attention(q, k, v).out[1]
printed = torch.tensor([0.5313, 1.3607, 0.7891, 1.3110])
assert torch.allclose(context, printed, atol=5e-5)

# %% [markdown]
# ## A transformers model
#
# Two layers of four query heads with two KV heads (GQA). Two sequences of twelve
# tokens.

# %%
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3)).eval()
tokens = torch.randint(64, (2, 12))
with torch.inference_mode():
    unwatched = model(tokens).logits
    with regard.watch(model) as seen:
        watched = model(tokens).logits
print(seen)
assert torch.equal(watched, unwatched)  # the same bits

# %% [markdown]
# The model ran its own fused kernel, which never stores the weights. The lens kept q, k
# and lse of every layer, from which every weight can be computed (lesson 9):
#
#     weights[i, j] = exp(scale q_i · k_j - lse_i)        where the mask allows
#
# To verify this, let transformers compute the weights in its slow, eager way:

# %%
model.set_attn_implementation("eager")
with torch.inference_mode():
    slow = model(tokens, output_attentions=True).attentions
model.set_attn_implementation("sdpa")
for n in (0, 1):
    assert torch.allclose(seen.layer(n).weights(), slow[n][0], atol=1e-5)

# %% [markdown]
# ## The table
#
# The table has one row per head. Entropy measures how spread out the weights are, sink
# is the weight on the first token, previous that on the previous token, and distance
# how far back the head attends. None of them needs the matrix, so they work at 100,000
# tokens too. The first sequence comes first; without repeated tokens, induction is
# undefined.

# %%
print(seen.table())
weights = seen.layer(0).weights().double()
dense = -torch.special.xlogy(weights, weights).sum(-1)
found = torch.as_tensor(entropy(seen.layer(0)).values).double()
assert torch.allclose(found, dense, atol=1e-4)

# %% The heads of the first layer, for the first sequence
if find_spec("matplotlib"):
    figure = plot_weights(seen.layer(0))

# %% [markdown]
# ## The audit
#
# Is there weight where there should be none? Pass the mask that you expect. The model
# is causal, so nothing is found. But suppose that the first four tokens of the second
# sequence are padding, and that `attention_mask` was forgotten:

# %%
assert seen.audit(expect=regard.causal()) == ()
valid = torch.ones(2, 12, dtype=torch.bool)
valid[1, :4] = False
findings = seen.audit(valid=valid)
print(findings[0])
assert {finding.what for finding in findings} == {"weight on padding"}
with torch.inference_mode(), regard.watch(model) as told:
    model(tokens, attention_mask=valid.long())
assert told.audit(valid=valid) == ()

# %% [markdown]
# Exercises (`regard learn`): `without_the_matrix`.
