"""The kind of an attention layer: encoder, decoder, cross or vision.

    cross      keys of another sequence than the queries: what its module is called, or
               keys that end elsewhere than the queries without a causal mask
    vision     tokens are patches of a picture: a picture was given for the sequence, or
               the module or the model is called so
    decoder    no query may attend to a later key, by the mask
    encoder    everything else

What a layer does is read from its mask and its positions; names decide only what these
cannot tell. The gallery shows the layers of a kind together.

Next: map_source.py
"""

from __future__ import annotations

import re

from regard.arrays import to_numpy
from regard.masks.algebra import And, Mask, Or, PerHead
from regard.masks.primitives import Band
from regard.recording.record import Record, Recording

CROSS = re.compile(r"cross|encoder_attn|encdec|enc_dec|encoder_decoder", re.IGNORECASE)
VISION = re.compile(r"(^|[._])(vision|visual|image|vit)", re.IGNORECASE)
VISION_MODELS = re.compile(r"ViT|Vision|DeiT|Dino|Beit|Swin|Siglip")


def find_kind(recording: Recording, record: Record) -> str:
    """Return "cross", "vision", "decoder" or "encoder"."""
    causal = is_causal(record) or is_last(record)
    if CROSS.search(record.name) or (not causal and ends_elsewhere(record)):
        return "cross"
    if VISION.search(record.name) or reads_pictures(recording):
        return "vision"
    return "decoder" if causal else "encoder"


def reads_pictures(recording: Recording) -> bool:
    """Return whether the model reads pictures only.

    The modules of a model that also reads text are called after what they read.
    """
    known = recording.notes.get("pictures") or VISION_MODELS.search(recording.model)
    return bool(known) and not any(recording.tokens)


def is_last(record: Record) -> bool:
    """Return whether there is one query, and several keys up to it: a step."""
    q, k = (to_numpy(x) for x in (record.q_positions, record.k_positions))
    return q.size == 1 < k.size and bool(k.max() == q[0])


def ends_elsewhere(record: Record) -> bool:
    """Return whether the last query and the last key are at different positions."""
    q, k = (to_numpy(x) for x in (record.q_positions, record.k_positions))
    return bool(q.size and k.size and q.max() != k.max())


def is_causal(record: Record) -> bool:
    """Return whether no query may attend to a later key, as far as is known."""
    q, k = (to_numpy(x) for x in (record.q_positions, record.k_positions))
    if isinstance(record.mask, Mask):
        return forbids_ahead(record.mask)
    if record.mask is None:
        return False
    rows = range(record.q.shape[1])
    return not any(to_numpy(record.mask[:, i, :])[:, k > q[i]].any() for i in rows)


def forbids_ahead(mask: object) -> bool:
    """Return whether the structure of a formula rules out later keys."""
    if isinstance(mask, Band):
        return mask.lo is not None and mask.lo >= 0
    if isinstance(mask, And):
        return any(map(forbids_ahead, mask.parts))
    return isinstance(mask, Or | PerHead) and all(map(forbids_ahead, mask.parts))
