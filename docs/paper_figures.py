"""Draw the figures of docs/figures.md: text, heads, arcs and a sound, one column wide.

python docs/paper_figures.py SmolLM2-135M-Instruct.Q4_1.gguf MiniLM-folder docs/pictures
"""

import sys
from pathlib import Path

from tones import hear_tones

import regard
from regard.show.figures import (
    plot_head_grid,
    plot_head_scatter,
    plot_layer_bars,
    plot_sound_map,
    plot_tinted_text,
    plot_token_arcs,
)

TEXT = (
    "The cat sat on the mat because it was warm. The dog sat on the floor, and the cat "
    "sat on the mat."
)
BRIDGE = "The old bridge across the river was closed, because the ice had damaged it."
DOTS = 240  # per inch


def main(smollm: str, minilm: str, folder: str) -> None:
    """Write seven pictures."""
    seen = regard.read(TEXT, model=smollm)
    table = seen.table()
    figures = {
        "text": plot_tinted_text(seen, 15),
        "bert": plot_tinted_text(regard.read(BRIDGE, model=minilm), 4),
        "scatter": plot_head_scatter(table, "previous", "induction"),
        "bars": plot_layer_bars(table, ["previous", "induction"]),
        "grid": plot_head_grid(table, "induction"),
        "arcs": plot_token_arcs(seen, 17, 5),
    }
    seen, words, sound = hear_tones()
    cross = seen.layer("model.decoder.layers.0.encoder_attn")
    figures["sound"] = plot_sound_map(cross, 1, words=words, sound=sound)
    for name, figure in figures.items():
        figure.savefig(Path(folder) / f"paper-{name}.png", dpi=DOTS)


if __name__ == "__main__":
    main(*sys.argv[1:])
