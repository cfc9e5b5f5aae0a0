# %% [markdown]
"""Find sinks: heads that give the first token nearly everything, whatever it is.

    python examples/sinks.py [model]     needs: pip install "regard[torch,notebook]"

Or cell by cell in VS Code or Spyder, or with jupytext in Jupyter: the last cell is the
map, opened at the strongest sink. Look at where sinks begin, layer by layer, and at
what is left of a sink when another token comes first.
"""

# %% a text, and what every head did with it
import sys

import torch
from IPython import get_ipython
from IPython.display import display
from models import find_smollm

import regard
from regard.seen import Seen
from regard.show.text import draw_table

TEXT = "The old keeper counted seventeen grey ships before the fog came from the north."
NOTEBOOK = get_ipython() is not None

if NOTEBOOK:
    sys.argv = sys.argv[:1]  # the arguments of a notebook are not ours
model, tokenizer = regard.load(find_smollm())


def read(text: str) -> Seen:
    """Return what was seen of the model on a text."""
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

# %% is it the word, or the place?
for first in ("The", "Suddenly", "1871", "ships"):
    mean = read(first + TEXT[3:]).table().rows["sink"].mean()
    print(f"{mean:.0%} when the first word is {first!r}")

# %% the map, at the strongest sink
_, layer, _, head, *_ = table.rows[0]
widget = seen.widget(address=f"l={layer}&h={head}")
display(widget)
if not NOTEBOOK:  # the script ends here, and the map with it
    widget.close()
