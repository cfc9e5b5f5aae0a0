"""A small ViT trained here to name the colour of a square: where it looks.

Next: tones_in_time.py
"""

import torch
from entry import Entry, write_entry
from figures import PATCH, SIDE, watch_vision


def make() -> Entry:
    """Measure how much weight of the class token is on the square."""
    seen, picture = watch_vision()
    patches = picture.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
    inside = patches[..., 1:-1, 1:-1].flatten(-2)  # (3, rows, columns, pixels)
    square = int(inside.std(-1).sum(0).argmin())  # the only patch of one colour
    weights = seen.weights()[:, :, 0, 1 + square]  # (layers, heads), of the class token
    layer, head = divmod(int(weights.argmax()), weights.shape[1])
    assert torch.isfinite(weights).all()
    return Entry(
        title="Where it looks",
        model="ViT of two layers, trained here",
        sentence="To name the colour of the square, the class token puts {share:.1%} "
        "of the weight of head {head} on its patch, one of {patches} "
        "({even:.0%} each if it looked everywhere).",
        numbers={
            "share": float(weights.max()),
            "head": f"{layer}.{head}",
            "patches": SIDE * SIDE,
            "even": 1 / (1 + SIDE * SIDE),
        },
        write=seen.picture(picture).page,
        address=f"l={layer}&h={head}&pin=0",
    )


if __name__ == "__main__":
    write_entry("coloured_square")
