"""Debug: the embedding of a sentence changes in a batch because of a missing mask.

    python examples/padding.py [folder]          needs: pip install "regard[hf]"

A search engine embeds texts in batches, and its results depend on the rest of the
batch. Look at the cosine first: it should be 1. The audit then reports the fault, the
layers and rows, and the fix; the second part of the output is with the fix.
"""

import torch
from models import find_minilm
from torch import Tensor
from transformers import AutoModel, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import regard

TEXTS = [
    "Where can I park?",
    "Visitors find parking behind the old town hall, next to the fire station.",
]


def look(model: torch.nn.Module, ids: Tensor, mask: Tensor | None, pad: int) -> None:
    """Embed the first text alone and in its batch, and audit the batch."""
    n = int((ids[0] != pad).sum())
    with torch.no_grad():
        alone = model(input_ids=ids[:1, :n]).last_hidden_state[0]
        with regard.watch(model) as seen:
            batch = model(input_ids=ids, attention_mask=mask).last_hidden_state[0, :n]
    cosine = torch.cosine_similarity(alone.mean(0), batch.mean(0), 0)
    print(f"cosine of the embedding alone and in a batch: {cosine:.4f}")
    errors = [x for x in seen.audit(pad=pad) if x.level == "error"]
    print(f"the audit finds {len(errors)} errors", *errors[:2], sep="\n  ")


def main() -> None:
    """Run without the mask, audit, and run with it."""
    disable_progress_bar()
    folder = find_minilm()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    ids, pad = batch["input_ids"], tokenizer.pad_token_id
    print("model(input_ids)")
    look(model, ids, None, pad)
    print("\nmodel(input_ids, attention_mask)")
    look(model, ids, batch["attention_mask"], pad)


if __name__ == "__main__":
    main()
