# %% [markdown]
# # 16. Read a head, then remove it
#
# The weights of a head show where it attends. Whether the model needs it is another
# question, and only an intervention answers it. This lesson does both on the model of
# lesson 10, which learned to copy eight digits. Training it takes some seconds.

# %%
from contextlib import nullcontext
from typing import Any

import torch

import regard
from regard.nn import CausalTransformer
from regard.nn.tasks import Copy
from regard.nn.train import Plan, train
from regard.plain import Config

task = Copy(items=8)
torch.manual_seed(0)
sizes = {"vocabulary": task.vocabulary, "context": task.length, "width": 32}
model = CausalTransformer(Config(**sizes, layers=2, heads=2, position="rotary"))
train(model, task, Plan(steps=120, rate=1e-2, warmup=20), show=False)
tokens, _ = task.batch(50, seed=0, step=0, held_out=True)

# %% [markdown]
# ## Read
#
# `regard.watch` records every head while the model runs. While the answer is written,
# the next digit is eight tokens back. The score of a head is its weight there, the mean
# over the answer.

# %%
with torch.inference_mode(), regard.watch(model) as seen:
    model(tokens[:1])
rows = torch.arange(9, 16)
scores = seen.weights()[:, :, rows, rows - 8].mean(-1)  # (layers, heads)
print(scores.round(decimals=2))
places = [(i, h) for i in range(2) for h in range(2)]
copying = [place for place in places if scores[place] > 0.5]
others = [place for place in places if scores[place] <= 0.5]
assert copying
assert others

# %% [markdown]
# ## Remove
#
# `regard.knock_out` sets the output of heads to 0 while the `with` lasts. The measure
# is the loss of the answer.


# %%
def measure_loss(change: Any) -> float:
    """Return the loss of the 50 answers while a change lasts."""
    with torch.inference_mode(), change:
        said = model(tokens).log_softmax(-1)
    right = said[:, 8:-1].gather(-1, tokens[:, 9:, None])
    return -float(right.mean())


whole = measure_loss(nullcontext())
print(f"whole model             {whole:.2f}")
for place in places:
    lost = measure_loss(regard.knock_out(model, heads=[place]))
    print(f"without head {place}     {lost:.2f}")
without = measure_loss(regard.knock_out(model, heads=copying))
control = measure_loss(regard.knock_out(model, heads=others))
print(f"without all that copy   {without:.2f}")
print(f"without all others      {control:.2f}")
assert without > whole + 0.5
assert without > control + 0.5
assert measure_loss(nullcontext()) == whole  # after the `with`, all is as before

# %% [markdown]
# If two heads do the same, the model hardly misses one of them: the other takes its
# place. A small effect of one head does not show that the head does nothing. Remove all
# heads that do the same, and compare with the others as a control.
#
# ## Replace
#
# A head that outputs 0 is unusual for the layers after it. A milder intervention
# replaces its output by that of another run: `regard.patch_heads`. Here the heads
# output what they had output for *another* question, so that the model copies that one.

# %%
with torch.inference_mode(), regard.watch(model, keep="qkv") as other:
    model(tokens.roll(-1, 0))
patched = measure_loss(regard.patch_heads(model, other, copying))
print(f"outputs of another question    {patched:.2f}")
assert patched > whole + 0.5

# %% [markdown]
# Does it matter *where* the heads attend, or *what* they find there? `parts="pattern"`
# takes only the weights from the other run. They are nearly the same for every
# question, because these heads count positions (lesson 10). So little changes.

# %%
moved = measure_loss(regard.patch_heads(model, other, copying, parts="pattern"))
print(f"weights of another question    {moved:.2f}")
assert moved < patched / 2

# %% [markdown]
# Exercises (`regard learn`): `read_head`, `ablate_head`.
