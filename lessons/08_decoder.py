# %% [markdown]
# # 8. A block, and a decoder
#
# Attention moves information between tokens. A language model needs three more parts,
# all of which work on each token separately: a norm, a feed-forward layer, and the
# residual connection.
#
# ## The norm
#
# LayerNorm scales a row to mean 0 and variance 1. For [1, 2, 3, 6] the mean is 3, the
# deviations are -2, -1, 0, 3, their mean square is 14 / 4 = 3.5, and √3.5 is 1.871.
# RMSNorm only divides by the root mean square, √(50 / 4) = 3.536.

# %%
import numpy as np

from regard.plain import Config, Decoder, Sampling, init_weights
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
#     x = x + attention(norm(x))        gather from other tokens
#     x = x + feed(norm(x))             process each token
#
# The `x +` is the residual connection: a block adds to its input. If its two output
# matrices are 0, it changes nothing, so a deep model can start like a shallow one. This
# is "pre-norm"; the original paper of 2017 had the norm after the sum ("post-norm").

# %%
config = Config(vocabulary=50, context=16, width=32, layers=2, heads=4)
weights = init_weights(config, seed=0)
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
# Tokens are mapped to rows of the embedding, and positions are added. After the blocks
# and a final norm, the product with the same embedding matrix ("tied") gives one number
# per token of the vocabulary at every position: the *logits* of the next token.

# %%
model = Decoder(config, weights)
logits = model(tokens)
assert logits.shape == (8, 50)

# %% [markdown]
# Is it causal? Change the last token: no earlier logit may change. This test detects a
# missing mask immediately.

# %%
changed = tokens.copy()
changed[-1] = 7
other = model(changed)
assert np.allclose(other[:-1], logits[:-1], rtol=0, atol=1e-12)
assert np.abs(other[-1] - logits[-1]).max() > 0.01

# %% [markdown]
# ## Generation
#
# Take the logits at the last position, choose a token, append it, and repeat. Greedy
# decoding takes the largest logit. A temperature T divides the logits before the
# softmax: below 1 likely tokens get more likely, above 1 the distribution is flatter.
# When the text exceeds the context, the last `context` tokens are used.

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
# ## Number of parameters
#
# The number of parameters of each part follows from the sizes. For GPT-2, the sum is
# the well-known 124 million.

# %%
gpt2 = Config(vocabulary=50_257, context=1_024, width=768, layers=12, heads=12)
print(parameters(gpt2))
assert parameters(gpt2).total == 124_439_808
assert parameters(config).total == sum(w.size for w in weights.values())

# %% [markdown]
# Exercises (`regard learn`): `layer_norm`, `rms_norm`, `feed_forward`, `block`,
# `decoder_logits`, `sampling`.
