"""A small Whisper trained here to name tones: its words listen to their own tone.

Next: atoms.py
"""

import torch
from entry import Entry, write_entry
from tones import hear_tones
from torch import Tensor

LOUD = 0.9  # noise is below 0.4, a tone above 1


def find_tones(sound: Tensor) -> list[slice]:
    """Return the encoder positions of each tone: runs of loud frames, halved."""
    loud = (sound.amax(0) > LOUD).tolist()
    starts = [i for i, x in enumerate(loud) if x and not (i and loud[i - 1])]
    stops = [i for i, x in enumerate(loud, 1) if x and not (i < len(loud) and loud[i])]
    return [slice(a // 2, (b + 1) // 2) for a, b in zip(starts, stops, strict=True)]


def make() -> Entry:
    """Measure how much of the weight of each word is on its own tone."""
    seen, words, sound = hear_tones()
    places = find_tones(sound)
    names = [name for name in seen.layers if "encoder_attn" in name]
    weights = seen.weights(names)  # (layers, heads, words, encoder positions)
    own = torch.stack(
        [weights[:, :, i, at].sum(-1) for i, at in enumerate(places)], -1
    ).mean(-1)
    even = sum(at.stop - at.start for at in places) / len(places) / weights.shape[-1]
    layer, head = divmod(int(own.argmax()), own.shape[1])
    return Entry(
        title="Words over a sound",
        model="Whisper of two layers, trained here",
        sentence="Each of the {words} words puts {share:.0%} of the weight of one "
        "cross-attention head on the time of its own tone, which is "
        "{even:.0%} of the sound.",
        numbers={"words": len(words), "share": float(own.max()), "even": even},
        write=seen.sound(sound, 1, words=words).page,
        address=f"v=text&sel=2&l={seen.layers.index(names[layer])}&h={head}",
    )


if __name__ == "__main__":
    write_entry("tones_in_time")
