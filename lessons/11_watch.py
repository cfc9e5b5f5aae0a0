# %% [markdown]
# # 11. Watching any PyTorch model
#
# Here the model is not ours. It comes from transformers, made from a config with random
# weights, so that nothing is downloaded; a real one is watched in the same way.
#
# ## First, the definition on tensors
#
# `regard.attention` takes PyTorch tensors as it takes NumPy arrays. A widely read
# tutorial computes the sentence "Life is short, eat dessert first" from the seed 123,
# and its figures hold: the context vector of the second word is the one it prints.

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
# ## A model of someone else
#
# Two layers of four heads; every two share keys. Two sequences of twelve tokens.

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
# The model ran its own fast kernel, which never stores a weight. What was kept of every
# layer is q, k and lse, and every weight follows from these (lesson 9):
#
#     weights[i, j] = exp(scale q_i · k_j - lse_i)        where the mask allows
#
# Is that so? transformers can compute the weights the slow way, if it is asked to:

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
# What did every head do? Entropy says how spread its rows are, sink how much the first
# token got, previous how much the token before, distance how far it looks. None of it
# needs the matrix, so it works at 100,000 tokens too. The heads of the first sequence
# come first; where no token comes twice, induction is not defined.

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
# Is there weight where none belongs? Say what you expect. The model is causal, so
# nothing is found. But suppose that the first four tokens of the second sequence were
# padding, and that someone forgot to tell the model:

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
