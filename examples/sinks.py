# %% [markdown]
"""Find attention sinks: heads with nearly all weight on the first token.

    python examples/sinks.py [model]     needs: pip install "regard[torch,notebook]"

Or run it cell by cell in VS Code or Spyder, or with jupytext in Jupyter: the last cell
is the map, opened at the strongest sink. Look at the layers in which sinks begin, and
at how little changes when another token comes first.
"""

# %% run the model on a text, and list the strongest sinks
import sys

import torch
from IPython import get_ipython
from IPython.display import display
from models import find_smollm

import regard
from regard.seen import Seen
from regard.show.terminal_map import draw_table

TEXT = "The old keeper counted seventeen grey ships before the fog came from the north."
NOTEBOOK = get_ipython() is not None

if NOTEBOOK:
    sys.argv = sys.argv[:1]  # these are the arguments of the notebook kernel
model, tokenizer = regard.load(find_smollm())


def read(text: str) -> Seen:
    """Run the model on a text under the lens, and return the recording."""
    with regard.watch(model) as found, torch.no_grad():
        model(torch.tensor([tokenizer.encode(text)]))
    return found.label(tokenizer.decode)


seen = read(TEXT)
table = seen.table().sort("sink")
print(table.head(5))

# %% how many, and where
sinks = table.rows[table.rows["sink"] > 0.3]  # the threshold of Gu et al. 2024
print(f"{len(sinks)} of {len(table)} heads are sinks; ", end="")
print(f"{table.rows['sink'].mean():.0%} of all weight is on the first token")
print(draw_table(table, numbers=["sink"]))

# %% does the sink depend on the word, or on the position?
for first in ("The", "Suddenly", "1871", "ships"):
    mean = read(first + TEXT[3:]).table().rows["sink"].mean()
    print(f"{mean:.0%} when the first word is {first!r}")

# %% the map, at the strongest sink
_, layer, _, head, *_ = table.rows[0]
widget = seen.widget(address=f"l={layer}&h={head}")
display(widget)
if not NOTEBOOK:  # the script ends here, and the map with it
    widget.close()
