"""Figures for a paper, one function each; `.save("a")` writes SVG, PDF, PNG, text.

    plot_tinted_text(seen, 12)                          what token 12 attends to
    plot_head_scatter(table, "previous", "induction")   two statistics of all heads
    plot_layer_bars(table, "induction")                 a statistic by layer
    plot_head_grid(table, "induction")                  a statistic by layer and head
    plot_token_arcs(seen, 17, 5)                        one head over a short text
    plot_sound_map(record, 30, words=words)             words over the time of a sound

Next: tinted_text.py
"""

from regard.show.figures.head_grid import draw_head_grid, plot_head_grid
from regard.show.figures.head_scatter import draw_head_scatter, plot_head_scatter
from regard.show.figures.layer_bars import draw_layer_bars, plot_layer_bars
from regard.show.figures.sound_map import draw_sound_map, plot_sound_map
from regard.show.figures.tinted_text import draw_tinted_text, plot_tinted_text
from regard.show.figures.token_arcs import draw_token_arcs, plot_token_arcs

__all__ = [
    "draw_head_grid",
    "draw_head_scatter",
    "draw_layer_bars",
    "draw_sound_map",
    "draw_tinted_text",
    "draw_token_arcs",
    "plot_head_grid",
    "plot_head_scatter",
    "plot_layer_bars",
    "plot_sound_map",
    "plot_tinted_text",
    "plot_token_arcs",
]
