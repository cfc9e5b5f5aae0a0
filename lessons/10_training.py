# %% [markdown]
# # 10. A head learns to copy
#
# From here on, PyTorch computes the gradients: `pip install "regard[torch]"`. The model
# is that of lesson 8 as torch modules, small enough to learn a task in seconds, and we
# watch the attention of its heads during training.
#
# ## A task that needs attention
#
#     question, separator, answer        4 0 5 2 = 4 0 5 2
#
# The model reads the whole question, then writes it again. To write the first digit, it
# has to find it several positions back, and only attention can do that.
#
# A widely read tutorial trains a "copy task" whose target at each position is the token
# *at this position*. With a causal mask that is trivial: a token may attend to itself,
# and attention to nothing else solves the task, without any training:

# %%
from importlib.util import find_spec

import torch

import regard
from regard.nn import CausalTransformer
from regard.nn.tasks import Copy, measure_accuracy
from regard.nn.train import Plan, train
from regard.plain import Config
from regard.seen import Seen
from regard.show.training import Film, plot_training

x = torch.randn(6, 4)
assert torch.allclose(regard.attention(x, x, x, regard.window(0)).out, x)

# %% [markdown]
# In our task the copy is delayed, and the loss covers only the answer:

# %%
task = Copy(items=8)
tokens, answers = task.batch(3, seed=0, step=0)
print(*map(task.show, tokens), sep="\n")
assert torch.equal(tokens[:, :8], tokens[:, 9:])
assert (answers == (torch.arange(17) > 8)).all()

# %% [markdown]
# ## Training
#
# Two layers of two heads. AdamW, gradients clipped to norm 1, a learning rate that
# warms up over 20 steps and then decays. A `Film` runs the model on one held-out
# sequence at the given steps and records all heads; it changes no weight and no random
# number of the run. In the end the model generates 200 held-out answers; one wrong
# digit makes an answer wrong.

# %%
torch.manual_seed(0)
sizes = {"vocabulary": task.vocabulary, "context": task.length, "width": 32}
model = CausalTransformer(Config(**sizes, layers=2, heads=2, position="rotary"))
held_out, _ = task.batch(1, seed=0, step=0, held_out=True)
digits = task.show(held_out[0])
film = Film(model, held_out, steps=(0, 15, 25, 100))
plan = Plan(steps=120, rate=1e-2, warmup=20)
losses = train(model, task, plan, show=False, watch=film)
print(f"loss {losses[0]:.1f} before, {losses[-1]:.2f} after")
assert 2 < losses[0] < 3  # about log 11: a uniform guess over eleven tokens
assert losses[-1] < 0.1
right = measure_accuracy(model, task, 200)
print(f"{right:.0%} of 200 held-out answers are right")
assert right > 0.9

# %% [markdown]
# ## What the head attends to
#
# At the separator and at each digit of the answer (rows 8 and later), the next digit is
# found eight positions back. At first the weight is spread over all tokens; within
# about twenty steps a diagonal appears, and the loss falls.


# %%
def find_next(seen: Seen) -> torch.Tensor:
    """Return the weight of rows 9 to 15 on the digit to be written, for each head."""
    rows = torch.arange(9, 16)
    heads = torch.cat([record.weights() for record in seen.records])  # (4, 17, 17)
    return heads[:, rows, rows - 8].mean(1)


for steps, seen in film.seen.items():
    print(f"after {steps:>3} steps   {find_next(seen).max():.1f}")
before, after = find_next(film.seen[0]), find_next(film.seen[100])
assert before.max() < 0.2
assert after.max() > 0.5
layer, head = divmod(int(after.argmax()), 2)

# %% The loss, and the head before, during and after
if find_spec("matplotlib"):
    figure = plot_training(losses, film, layer=layer, head=head, labels=digits)

# %% [markdown]
# The head attends to the *next* digit, not to the current one. How does it find it?
# Write wrong digits into the answer, and it attends to the same positions as before: it
# does not compare digits, it counts, because in this task the distance is always eight.
# In text the distance varies, and a head that counts would be of no use.

# %%
wrong = torch.cat([held_out[:, :9], (held_out[:, 9:] + 3) % 10], 1)
with torch.inference_mode(), regard.watch(model) as seen:
    model(wrong)
assert find_next(seen)[2 * layer + head] > 0.5

# %% [markdown]
# Exercises (`regard learn`): `copy_task`.
