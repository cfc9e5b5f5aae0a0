"""`explain`: every step of attention with its name, formula, shape and values.

    print(regard.explain(q, k, v, regard.causal(), tokens=["the", "cat", "sat"]))

Small matrices are printed in full, large ones abbreviated; large weights are also drawn
as a map in which each character shows the largest weight of its cells.

Next: masks/formula.py
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.arguments import NotAnArray, suggest
from regard.arrays import Array, is_array, to_numpy
from regard.definition.attention import STEPS, define
from regard.definition.contract import Call, read_call
from regard.definition.heads import multiply_heads
from regard.display import (
    Displayed,
    shade_weights,
    write_html_table,
    write_line,
    write_pictures,
)
from regard.errors import OptionError, ShapeError
from regard.masks.algebra import Mask
from regard.masks.biases import Bias
from regard.masks.formula import Start

FEW = 8  # rows or columns that are printed in full
CORNER = 3  # rows or columns shown at each end of a longer axis
LABEL = 8  # terminal columns for a token
MAP = (16, 64)  # size of the map, in characters
SHADES = "·░▒▓█"


@dataclass(frozen=True)
class Step(Displayed, NotAnArray):
    """One named step of a computation."""

    name: str
    formula: str
    values: Array  # (..., H, rows, columns), or (..., H, rows)
    rows: tuple[str, ...]  # a label for each row
    columns: tuple[str, ...]  # a label for each column; empty if columns are features
    lead: tuple[int, ...]  # the axes before rows and columns

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return tuple(self.values.shape)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Return the values, as NumPy asks for them."""
        return np.asarray(to_numpy(self.values), dtype=dtype, copy=copy)

    def __getitem__(self, at: Any) -> Array:
        return self.values[at]

    def __str__(self) -> str:
        return self.text()

    def pick(self, at: int | tuple[int, ...] | None = None) -> Any:
        """Return the values for batch and head `at`, by default the first."""
        at = (0,) * len(self.lead) if at is None else at
        at = (at,) if isinstance(at, int) else at
        inside = all(-n <= i < n for i, n in zip(at, self.lead, strict=False))
        if len(at) != len(self.lead) or not inside:
            raise OptionError(
                f"at={at}, expected an index for each of {self.lead}, counted from 0."
            )
        sizes = zip(at, self.shape, self.lead, strict=False)
        at = tuple(i * size // full for i, size, full in sizes)  # shared k and v heads
        return to_numpy(self.values[(*at, ...)])

    @suggest
    def text(self, at: int | tuple[int, ...] | None = None) -> str:
        """Format the step for batch and head `at` = (b, h), by default the first."""
        values = self.pick(at)
        matrix = values[:, None] if values.ndim == 1 else values
        table = write_table(matrix, self.rows, self.columns)
        parts = [f"{self.name:<8} {self.formula}   {self.shape}", *table]
        if self.name == "weights" and values.size and max(values.shape) > FEW:
            parts += write_map(values)
        return "\n".join(parts)

    def to_html(self) -> str:
        """Return the formula and the values of the first batch and head."""
        values = self.pick()
        matrix = values[:, None] if values.ndim == 1 else values
        head, left, cells = format_cells(matrix, self.rows, self.columns)
        rows = [[label, *row] for label, row in zip(left, cells, strict=True)]
        shades, picture = None, ""
        if self.name == "weights":
            shades = [[0.0, *row] for row in shade_ends(matrix)]
            if values.size and max(values.shape) > FEW:
                picture = write_pictures([("all weights", shade_weights(values))])
        title = write_line(f"{self.name} = {self.formula}", strong=True)
        about = write_line(f"shape {self.shape}")
        table = write_html_table(
            ["", *head] if head else [], rows, texts=1, shades=shades
        )
        return title + about + table + picture


@dataclass(frozen=True)
class Steps(Displayed, NotAnArray):
    """The steps in order; `steps["weights"]` is one of them."""

    steps: tuple[Step, ...]

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def keys(self) -> tuple[str, ...]:
        """Return the names of the steps."""
        return tuple(step.name for step in self.steps)

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __getitem__(self, name: str) -> Step:
        for step in self.steps:
            if step.name == name:
                return step
        names = ", ".join(self.keys())
        raise OptionError(f'there is no step "{name}"; there are {names}.')

    def __str__(self) -> str:
        return self.text()

    @suggest
    def text(self, at: int | tuple[int, ...] | None = None) -> str:
        """Format all steps for batch and head `at` = (b, h), by default the first."""
        return "\n\n".join([*self.name_head(at), *(step.text(at) for step in self)])

    def name_head(self, at: int | tuple[int, ...] | None) -> list[str]:
        """Return a title that names the batch and the head, if there are several."""
        lead = self.steps[0].lead
        shown = (0,) * len(lead) if at is None else at
        shown = (shown,) if isinstance(shown, int) else shown
        axes = ", ".join(f"{i} of {n}" for i, n in zip(shown, lead, strict=False))
        title = f"batch and head: {axes}" if len(lead) > 1 else f"head: {axes}"
        return [title][: len(lead)]

    def to_html(self) -> str:
        """Return all steps for the first batch and head."""
        titles = map(write_line, self.name_head(None))
        return "".join([*titles, *(step.to_html() for step in self)])


@suggest
def explain(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | Mask | None = None,
    *,
    tokens: Sequence[str] | tuple[Sequence[str], Sequence[str]] | None = None,
    bias: Array | Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Array | None = None,
    q_start: Start | None = None,
) -> Steps:
    """Compute attention and return every step.

    >>> import numpy as np, regard
    >>> steps = regard.explain(np.eye(2), np.eye(2), np.eye(2), tokens=["a", "b"])
    >>> print(steps["weights"])
    weights  exp(scores) / Σ exp(scores)   (2, 2)
                   a     b
             a  0.67  0.33
             b  0.33  0.67

    tokens: one per position, or (tokens of the queries, tokens of the keys)
    The other arguments are those of `attention`.
    """
    call = read_call(
        (q, k, v),
        mask,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sink=sink,
        q_start=q_start,
    ).widen()
    done = define(call, STEPS)
    rows, columns = label_axes(call, tokens)
    dots = multiply_heads(call.q, call.xp.matrix_transpose(call.k))
    formulas = write_formulas(call, given_scale=scale)
    lead = call.shape[:-2]
    q, k, v = (
        call.xp.reshape(x, (1,) * (len(lead) + 2 - x.ndim) + tuple(x.shape))
        for x in (call.q, call.k, call.v)
    )
    made: dict[str, tuple[Array, tuple[str, ...], tuple[str, ...]]] = {
        "q": (q, rows, ()),
        "k": (k, columns, ()),
        "v": (v, columns, ()),
        "dots": (dots, rows, columns),
        **{name: (getattr(done, name), rows, columns) for name in STEPS},
        "lse": (done.lse, rows, ()),
        "out": (done.out, rows, ()),
    }
    return Steps(
        tuple(
            Step(name, formulas[name], values, down, across, lead)
            for name, (values, down, across) in made.items()
            if name in formulas
        )
    )


def write_formulas(call: Call, *, given_scale: float | None) -> dict[str, str]:
    """Return a formula for each step that this call performs."""
    formulas = dict.fromkeys(("q", "k", "v"), "given")
    root = "" if given_scale is not None else f", 1 / √{call.q.shape[-1]}"
    formulas["dots"] = "q kᵀ"
    formulas["scores"] = f"dots × scale (scale = {call.scale:.4g}{root})"
    at = "scores"
    if call.softcap is not None:
        formulas["capped"] = f"{call.softcap:g} × tanh({at} / {call.softcap:g})"
        at = "capped"
    if call.mask is not None or call.bias is not None:
        bias = "" if call.bias is None else f" + {name_formula(call.bias)}"
        mask = "" if call.mask is None else f", −∞ outside {name_formula(call.mask)}"
        formulas["logits"] = f"{at}{bias}{mask}"
        at = "logits"
    sink = "" if call.sink is None else " + exp(sink)"
    total = f"Σ exp({at}){sink}"
    formulas["weights"] = f"exp({at}) / {f'({total})' if sink else total}"
    return formulas | {"lse": f"log({total})", "out": "weights v"}


def name_formula(x: Any) -> str:
    """Return the expression of a formula, or the dtype and shape of an array."""
    if is_array(x):
        return f"<{x.dtype} array of shape {tuple(x.shape)}>"
    return repr(x)


def label_axes(call: Call, tokens: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return labels for queries and keys: tokens if given, else positions."""
    n_q, n_k = call.shape[-2:]
    starts = set(np.atleast_1d(to_numpy(call.q_start)).tolist())
    start = starts.pop() if len(starts) == 1 else None
    rows: Sequence[Any]
    columns: Sequence[Any]
    if isinstance(tokens, tuple) and len(tokens) == 2 and not is_label(tokens[0]):
        rows, columns = read_labels(tokens[0]), read_labels(tokens[1])
    elif tokens is None:
        rows = [f"+{i}" for i in range(n_q)]  # if batches differ in q_start
        rows = rows if start is None else range(start, start + n_q)
        columns = range(n_k)
    elif start is None or start < 0:
        raise ShapeError(
            f"queries start at {call.q_start}, so one list of tokens cannot label "
            "them. Write tokens=(tokens_of_queries, tokens_of_keys)."
        )
    else:
        labels = read_labels(tokens)
        most = n_k if len(labels) <= max(n_k, start + n_q) else None  # None: refused
        rows, columns = labels[start : start + n_q], labels[:most]
    if (len(rows), len(columns)) != (n_q, n_k):
        raise ShapeError(
            f"tokens give {len(rows)} labels for {n_q} queries and {len(columns)} for "
            f"{n_k} keys. Write tokens=(tokens_of_queries, tokens_of_keys)."
        )
    return tuple(map(shorten, rows)), tuple(map(shorten, columns))


def read_labels(tokens: Any) -> list[Any]:
    """Return a list of tokens, one per position."""
    labels = to_numpy(tokens).tolist() if is_array(tokens) else tokens
    if is_label(labels) or not all(map(is_label, labels)):
        given = tuple(tokens.shape) if is_array(tokens) else f"{tokens!r:.40}"
        raise ShapeError(
            f"tokens: {given}, expected a list with one token per position, or two: "
            "tokens=(tokens_of_queries, tokens_of_keys). Write text.split() for words."
        )
    return list(labels)


def is_label(x: object) -> bool:
    """Return whether x is a token or its number, not several of them."""
    return isinstance(x, str) or not isinstance(x, Sequence | np.ndarray)


def shorten(token: object) -> str:
    """Escape control characters of a token, and truncate it to LABEL columns."""
    safe = "".join(
        f"\\u{ord(c):04x}" if unicodedata.category(c)[0] == "C" else c
        for c in str(token)
    )
    kept, width = "", 0
    for c in safe:
        width += measure_width(c)
        if width > LABEL or len(kept) == 4 * LABEL:  # or a stack of marks
            return kept[:-1] + "…" if measure_width(kept[-1]) == 1 else kept[:-1] + " …"
        kept += c
    return kept


def measure_width(text: str) -> int:
    """Return the width of a text in terminal columns."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


def format_cells(
    values: Any, rows: Sequence[str], columns: Sequence[str]
) -> tuple[list[str], list[str], list[list[str]]]:
    """Return the labels above and beside a matrix, and its cells, abbreviated."""
    down, across = pick_ends(values.shape[0]), pick_ends(values.shape[1])
    cells = [[write_cell(values, i, j) for j in across] for i in down]
    head = ["…" if j is None else columns[j] for j in across] if columns else []
    return head, ["⋮" if i is None else rows[i] for i in down], cells


def shade_ends(values: Any) -> list[list[float]]:
    """Return the weights of the cells that are shown, as shades; 0 for the others."""
    down, across = pick_ends(values.shape[0]), pick_ends(values.shape[1])
    return [
        [0.0 if i is None or j is None else float(values[i, j]) for j in across]
        for i in down
    ]


def write_table(values: Any, rows: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Format a matrix with its labels; abbreviate a large one."""
    head, left, cells = format_cells(values, rows, columns)
    table = ([head] if head else []) + cells
    widths = [
        max((measure_width(line[j]) for line in table), default=0)
        for j in range(len(head or (cells[0] if cells else ())))
    ]
    margin = 9 + max(map(measure_width, left), default=0)
    return [
        pad_left(label, margin)
        + "".join("  " + pad_left(c, w) for c, w in zip(line, widths, strict=True))
        for label, line in zip(["", *left] if head else left, table, strict=True)
    ]


def pad_left(text: str, width: int) -> str:
    """Pad a text with spaces on the left."""
    return " " * (width - measure_width(text)) + text


def pick_ends(n: int) -> list[int | None]:
    """Return 0 … n-1, or both ends with None in place of the middle."""
    if n <= FEW:
        return list(range(n))
    return [*range(CORNER), None, *range(n - CORNER, n)]


def write_cell(values: Any, i: int | None, j: int | None) -> str:
    """Format one cell, or an ellipsis for omitted cells."""
    if i is None or j is None:
        return "⋮" if i is None else "…"
    return write_number(values[i, j])


def write_number(x: float) -> str:
    """Format a number in few columns."""
    if np.isneginf(x):
        return "−∞"
    if x == 0:
        return "0"
    if 0.005 <= abs(x) < 1000:
        return f"{x:.2f}"
    return f"{x:.0e}"


def write_map(weights: Any) -> list[str]:
    """Draw a matrix as a map; each character shows the largest weight of its cells."""
    rows, columns = (min(n, most) for n, most in zip(weights.shape, MAP, strict=True))
    cut_rows = np.linspace(0, weights.shape[0], rows, endpoint=False).astype(int)
    cut_columns = np.linspace(0, weights.shape[1], columns, endpoint=False).astype(int)
    pooled = np.maximum.reduceat(weights, cut_rows, axis=0)
    pooled = np.maximum.reduceat(pooled, cut_columns, axis=1)
    shade = np.digitize(pooled, (np.nextafter(0, 1), 0.05, 0.2, 0.5))
    cells = -(-weights.shape[0] // rows), -(-weights.shape[1] // columns)
    legend = "· 0   ░ above 0   ▒ from 0.05   ▓ from 0.2   █ from 0.5"
    lines = ["".join(SHADES[i] for i in line) for line in shade]
    told = f"each character: the largest of up to {cells[0]} × {cells[1]} weights"
    return ["", *(" " * 9 + line for line in (*lines, told, legend))]
