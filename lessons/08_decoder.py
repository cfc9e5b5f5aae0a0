# %% [markdown]
# # 8. A block, and a decoder
#
# Attention moves numbers between tokens. A language model needs three more parts, all
# of which work on each token by itself: a norm, a feed-forward layer, and the residual
# that holds everything together.
#
# ## The norm
#
# Layer norm takes a row to mean 0 and width 1. For [1, 2, 3, 6] the mean is 3, the
# deviations are -2, -1, 0, 3, their mean square is 14 / 4 = 3.5, and √3.5 is 1.871. Rms
# norm only divides by the root of the mean square, √(50 / 4) = 3.536.

# %%
import numpy as np

from regard.plain import Config, Decoder, Sampling, draw_weights
from regard.plain.cost import parameters
from regard.plain.norm import layer_norm, rms_norm, softmax

row = np.array([1.0, 2.0, 3.0, 6.0])
print(layer_norm(row).round(3), rms_norm(row).round(3))
assert np.allclose(layer_norm(row), np.array([-2, -1, 0, 3]) / np.sqrt(3.5), atol=1e-5)
assert np.allclose(rms_norm(row), row / np.sqrt(12.5), atol=1e-5)
assert np.allclose(layer_norm(10 * row + 7), layer_norm(row), atol=1e-5)

# %% [markdown]
# ## The block
#
#     x = x + attention(norm(x))        look at other tokens
#     x = x + feed(norm(x))             think about what was seen
#
# The `x +` is the residual: a block adds to what is there. With its two last matrices 0
# it changes nothing, and so a deep model can begin as a shallow one. This is
# "pre-norm"; the paper of 2017 had the norm after the sum.

# %%
config = Config(vocabulary=50, context=16, width=32, layers=2, heads=4)
weights = draw_weights(config, seed=0)
tokens = np.array([3, 1, 4, 1, 5, 9, 2, 6])
silent = {
    name: 0 * w if name.endswith(("out.weight", "down.weight")) else w
    for name, w in weights.items()
}
embedded = weights["embed.weight"][tokens] + weights["positions.weight"][:8]
bare = layer_norm(embedded) @ weights["embed.weight"].T
assert np.allclose(Decoder(config, silent)(tokens), bare)

# %% [markdown]
# ## The decoder
#
# Tokens become rows of the embedding, positions are added, blocks follow, one more
# norm, and the product with the embedding once more ("tied") gives a number for every
# word of the vocabulary at every place: the *logits* of the token that comes next.

# %%
model = Decoder(config, weights)
logits = model(tokens)
assert logits.shape == (8, 50)

# %% [markdown]
# Is it causal? Change the last token: no logit before it may move. This test finds a
# forgotten mask at once.

# %%
changed = tokens.copy()
changed[-1] = 7
other = model(changed)
assert np.allclose(other[:-1], logits[:-1], rtol=0, atol=1e-12)
assert np.abs(other[-1] - logits[-1]).max() > 0.01

# %% [markdown]
# ## Writing
#
# Take the logits at the last place, choose a token, append it, and begin again. Greedy
# choice takes the largest. A temperature T divides the logits before the softmax: below
# 1 the likely tokens get likelier, above 1 the choice is more even. When the text
# outgrows the context, the last `context` tokens are read.

# %%
greedy = list(model.generate(tokens.tolist(), 20))  # 28 tokens, a context of 16
assert greedy[0] == logits[-1].argmax()
assert len(greedy) == 20

peaked = np.array([2.0, 1.0, 0.0])
rng = np.random.default_rng(0)
for temperature in (0.2, 1.0, 5.0):
    sampling = Sampling(temperature=temperature)
    drawn = [sampling.pick(peaked, [], rng) for _ in range(4000)]
    counts = np.bincount(drawn, minlength=3) / 4000
    print(temperature, counts.round(2))
    assert np.abs(counts - softmax(peaked / temperature)).max() < 0.03

# %% [markdown]
# ## Its size
#
# Every part is a formula of the sizes. For those of GPT-2 the sum is the 124 million
# that it is known for.

# %%
gpt2 = Config(vocabulary=50_257, context=1_024, width=768, layers=12, heads=12)
print(parameters(gpt2))
assert parameters(gpt2).total == 124_439_808
assert parameters(config).total == sum(w.size for w in weights.values())

# %% [markdown]
# Exercises (`regard learn`): `layer_norm`, `rms_norm`, `feed_forward`, `block`,
# `decoder_logits`, `sampling`.
