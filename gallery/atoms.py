"""A model of chemical reactions: one head finds where each atom comes from.

RXNMapper (Schwaller et al. 2021) is an ALBERT that learned to fill gaps in reactions,
written as SMILES. Nobody told it which atom of the product was which before. The truth
here follows from how the reactions are written: the product is the acid without its
leaving group, followed by the amine or the alcohol.

Next: build.py
"""

import json
import re
from pathlib import Path

import torch
from entry import Entry, find_package, write_entry
from transformers import AlbertConfig, AlbertModel

import regard

# acid, leaving group, what remains of the partner; the group is the acid's last atom
REACTIONS = (
    ("CC(=O)", "Cl", "NCc1ccc(F)cc1"),
    ("CCCC(=O)", "O", "OCCCCBr"),
    ("CS(=O)(=O)", "Cl", "NCCCCC#N"),
    ("O=C(C1CC1)", "Cl", "NCC(C)C"),
)
TOKEN = re.compile(r"\[[^\]]+\]|Br|Cl|>>|.")
LAYER, HEAD = 10, 5  # that the package uses


def load_model() -> tuple[AlbertModel, list[str]]:
    """Return the model and its vocabulary."""
    folder = find_package("rxnmapper", "models/transformers/albert*")
    config = AlbertConfig(**json.loads((folder / "config.json").read_text("utf-8")))
    model = AlbertModel(config).eval()
    # a pickle: weights_only refuses everything in it but tensors
    state = torch.load(folder / "pytorch_model.bin", "cpu", weights_only=True)
    own = {k[7:]: v for k, v in state.items() if k.startswith("albert.")}
    missing, _ = model.load_state_dict(own, strict=False)
    assert not [name for name in missing if "pooler" not in name], missing
    return model, (folder / "vocab.txt").read_text("utf-8").split("\n")


def find_atoms(parts: list[str], first: int) -> list[int]:
    """Return the places of the tokens that are atoms."""
    return [first + i for i, x in enumerate(parts) if x[0].isalpha() or x[0] == "["]


def make() -> Entry:
    """Count the atoms of products whose origin one head finds."""
    model, words = load_model()
    right = total = 0
    every = []  # (layers, heads), by reaction: how many are right
    for acid, group, partner in REACTIONS:
        before = TOKEN.findall(f"{acid}{group}.{partner}")
        after = TOKEN.findall(f"{acid}{partner}")
        names = ["[CLS]", *before, ">>", *after, "[SEP]"]
        with regard.watch(model) as seen, torch.inference_mode():
            model(input_ids=torch.tensor([[words.index(x) for x in names]]))
        old = find_atoms(before, 1)
        new = find_atoms(after, len(before) + 2)
        origin = [at for at in old if at != 1 + len(TOKEN.findall(acid))]
        chosen = seen.weights()[:, :, new][..., old].argmax(-1)
        hits = (torch.tensor(old)[chosen] == torch.tensor(origin)).sum(-1)
        every.append(hits)
        right, total = right + int(hits[LAYER, HEAD]), total + len(new)
    found = torch.stack(every).sum(0)
    seen = seen.label(lambda ids: "".join(words[i] for i in ids))
    return Entry(
        title="Where an atom comes from",
        model="RXNMapper",
        sentence="In {reactions} reactions the strongest weight of head {head} finds "
        "the origin of {right} of {total} atoms of the product; half of "
        "the {heads} heads find {median} or fewer.",
        numbers={
            "reactions": len(REACTIONS),
            "head": f"{LAYER}.{HEAD}",
            "right": right,
            "total": total,
            "heads": found.numel(),
            "median": int(found.median()),
        },
        write=lambda path: seen.page(Path(path)),
        address=f"l={LAYER}&h={HEAD}",
    )


if __name__ == "__main__":
    write_entry("atoms")
