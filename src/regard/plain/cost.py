"""The cost of a model as formulas: parameters, FLOPs, activation memory, KV cache.

    print(parameters(config))                 a table: part, formula, value
    forward_flops(config, 1_024).total        the total
    cache_bytes(config, 1_024)["attention"]   the value of one part

Every value is computed from the formula that is printed next to it. In a formula a
space means multiplication; LETTERS explains the symbols, as does every printed table.

FLOPs count matrix products only, a multiply-add as two. Norms, activations, softmax and
rotations are not included: they are not matrix products, and far cheaper.

Next: nn/attention.py
"""

from __future__ import annotations

import ast
import operator
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from regard.errors import OptionError
from regard.plain.config import Config

LETTERS = {
    "V": "vocabulary",
    "C": "context",
    "D": "width",
    "L": "layers",
    "H": "heads",
    "Hk": "heads of keys",
    "d": "width of a head",
    "F": "width of feed-forward",
    "N": "tokens",
    "B": "batch",
    "W": "keys of a query at most",
    "s": "bytes of a number",
    "w": "bytes of a number in float32 or wider",
}
PARTS = (
    "embedding",
    "norms",
    "projections",  # qkv and output projections
    "attention",  # scores, weights, weighted values; the KV cache
    "feed-forward",
    "head",
    "loss",
)
STRIP = 256  # rows per strip of the engine under a window
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,  # formulas only divide products that divide evenly
}

Line = tuple[str, str, str]  # part, what, formula
Attention = Literal["fused", "textbook"]


@dataclass(frozen=True)
class Row:
    """One row of a cost table."""

    part: str
    what: str
    formula: str
    value: int


@dataclass(frozen=True)
class Cost:
    """A cost as a table of rows; print it to see the formulas.

    >>> tiny = Config(vocabulary=9, context=64, width=8, layers=2, heads=4, kv_heads=2)
    >>> print(cache_bytes(tiny, 64))
    bytes of the cache
    part       what    formula       value    share
    attention  keys    s B L Hk N d  1,024   50.0 %
    attention  values  s B L Hk N d  1,024   50.0 %
    total                            2,048
    L=2 layers, Hk=2 heads of keys, d=2 width of a head, N=64 tokens, B=1 batch,
    s=2 bytes of a number
    """

    title: str
    rows: tuple[Row, ...]
    letters: Mapping[str, int]  # the values of the symbols in the formulas

    @property
    def total(self) -> int:
        """The sum of all rows."""
        return sum(row.value for row in self.rows)

    def __getitem__(self, part: str) -> int:
        if part not in PARTS:
            raise OptionError(f"no part {part!r}, expected one of {', '.join(PARTS)}.")
        return sum(row.value for row in self.rows if row.part == part)

    def __str__(self) -> str:
        cells = [("part", "what", "formula", "value", "share")]
        for row in self.rows:
            share = f"{100 * row.value / self.total:.1f} %"
            cells.append((row.part, row.what, row.formula, f"{row.value:,}", share))
        cells.append(("total", "", "", f"{self.total:,}", ""))
        a, b, c, e, _ = (max(map(len, column)) for column in zip(*cells, strict=True))
        lines = [
            f"{part:<{a}}  {what:<{b}}  {formula:<{c}}  {value:>{e}}  {share:>7}"
            for part, what, formula, value, share in cells
        ]
        return "\n".join([self.title, *map(str.rstrip, lines), self.legend])

    @property
    def legend(self) -> str:
        """The symbols used in the formulas, with value and meaning."""
        used = set(re.findall("[A-Za-z]+", " ".join(row.formula for row in self.rows)))
        words = [
            f"{letter}={self.letters[letter]:,} {meaning}"
            for letter, meaning in LETTERS.items()
            if letter in used
        ]
        return textwrap.fill(", ".join(words), 76, break_on_hyphens=False)


def parameters(config: Config) -> Cost:
    """Count the learned parameters.

    >>> gpt2 = Config(vocabulary=50_257, context=1_024, width=768, layers=12, heads=12)
    >>> parameters(gpt2).total
    124439808
    """
    return compute_lines("parameters", list_parameters(config), list_sizes(config))


def forward_flops(
    config: Config,
    n: int,
    *,
    batch: int = 1,
    causal: bool = False,  # count only the pairs that the mask allows
) -> Cost:
    """Count the FLOPs of a forward pass, with logits for every token.

    By default attention counts the full N x N score matrix, like PyTorch's
    FlopCounterMode. `causal=True` counts only the pairs that the causal mask and window
    allow: a lower bound. A fused kernel works on whole tiles and lies in between.
    """
    lines = list_flops(config, causal=causal, times=(1, 1, 1))
    title = f"FLOPs of a forward pass, {describe_pairs(causal=causal)}"
    return compute_lines(title, lines, list_sizes(config, n, batch))


def training_flops(
    config: Config,
    n: int,
    *,
    batch: int = 1,
    causal: bool = False,
    attention: Attention = "fused",
) -> Cost:
    """Count the FLOPs of a forward and a backward pass.

    A product Y = X W has two more in its backward pass, for the gradients of X and W,
    so it counts three times. A fused kernel does not store the scores but recomputes
    them in the backward pass, so they count four times.
    """
    check_attention(attention)
    times = (3, 4 if attention == "fused" else 3, 3)
    title = f"FLOPs of a step of training, {describe_pairs(causal=causal)}"
    lines = list_flops(config, causal=causal, times=times)
    return compute_lines(title, lines, list_sizes(config, n, batch))


def cache_bytes(
    config: Config, n: int, *, batch: int = 1, bytes_per_number: int = 2
) -> Cost:
    """Count the bytes of the KV cache of n tokens; a window does not reduce it."""
    lines: list[Line] = [
        ("attention", "keys", "s B L Hk N d"),
        ("attention", "values", "s B L Hk N d"),
    ]
    sizes = list_sizes(config, n, batch, bytes_per_number)
    return compute_lines("bytes of the cache", lines, sizes)


def activation_bytes(
    config: Config,
    n: int,
    *,
    batch: int = 1,
    bytes_per_number: int = 4,
    attention: Attention = "fused",
    loss: bool = False,  # include the log-probabilities that cross entropy stores
) -> Cost:
    """Count the bytes that CausalTransformer stores for the backward pass.

    These are the tensors that autograd holds after a forward pass over two or more
    tokens on a CPU, with all weights in one dtype, without weights and position tables.
    Peak memory is higher: gradients and temporary tensors are not included.

    Fused attention stores q, k, v, out and lse. Textbook attention stores the N x N
    weights of every head instead of lse.
    """
    check_attention(attention)
    if config.dropout:
        raise OptionError(
            f"dropout={config.dropout}: memory used by dropout is not counted. "
            "Write activation_bytes(dataclasses.replace(config, dropout=0.0), ...)."
        )
    sizes = list_sizes(config, n, batch, bytes_per_number)
    lines = [
        *list_kept_norms(config, narrow=sizes["s"] < sizes["w"]),
        *list_kept_attention(config, n, fused=attention == "fused"),
        ("feed-forward", *KEPT_FEED[config.activation]),
    ]
    if loss:
        lines.append(("loss", "log-probabilities", "s B N V"))
    return compute_lines("bytes kept for the backward pass", lines, sizes)


def list_parameters(config: Config) -> Iterator[Line]:
    """Yield the weights in the order of Config.shapes, summed over layers."""
    qkv_bias = config.bias if config.qkv_bias is None else config.qkv_bias
    norms = "(2 L + 1)" if config.norm_first else "2 L"
    ups = "2 F" if config.activation == "swiglu" else "F"
    yield "embedding", "tokens", "V D"
    if config.position == "learned":
        yield "embedding", "positions", "C D"
    yield "norms", "weights", f"{norms} D"
    if config.norm == "layer" and config.bias:
        yield "norms", "biases", f"{norms} D"
    if config.qk_norm:
        yield "norms", "of q and k", "L 2 d"
    yield "projections", "qkv", "L (H + 2 Hk) d D"
    if qkv_bias:
        yield "projections", "qkv, biases", "L (H + 2 Hk) d"
    yield "projections", "out", "L D H d"
    if config.bias:
        yield "projections", "out, biases", "L D"
    yield "feed-forward", "up", f"L {ups} D"
    yield "feed-forward", "down", "L D F"
    if config.bias:
        yield "feed-forward", "biases", f"L ({ups} + D)"
    if not config.tied:
        yield "head", "weights", "V D"


def list_flops(
    config: Config, *, causal: bool, times: tuple[int, int, int]
) -> Iterator[Line]:
    """Yield the matrix products; times: counts of (matrices, scores, weights v)."""
    matrix, scores, mix = (2 * count for count in times)
    pairs = "W (2 N - W + 1) / 2" if causal else "N N"
    ups = "2 F" if config.activation == "swiglu" else "F"
    yield "projections", "x Wqkvᵀ", f"{matrix} B N L D (H + 2 Hk) d"
    yield "attention", "scores = q kᵀ", f"{scores} B L H d {pairs}"
    yield "attention", "weights v", f"{mix} B L H d {pairs}"
    yield "projections", "heads Woᵀ", f"{matrix} B N L H d D"
    yield "feed-forward", "up", f"{matrix} B N L D {ups}"
    yield "feed-forward", "down", f"{matrix} B N L F D"
    yield "head", "logits", f"{matrix} B N D V"


def list_kept_norms(config: Config, *, narrow: bool) -> Iterator[Line]:
    """Yield what the embedding and the norms store, including the norms' outputs.

    The output of a norm is the input of the next matrix, which stores it.
    """
    norms = "(2 L + 1)" if config.norm_first else "2 L"
    yield "embedding", "tokens, int64", "8 B N"
    if not config.norm_first:
        yield "embedding", "x of the first layer", "s B N D"
    if config.norm == "layer":
        yield "norms", "input, output, mean, 1/std", f"s B N {norms} (2 D + 2)"
    else:  # torch computes it in several ops, in float32 or wider
        yield "norms", "output", f"s B N {norms} D"
        yield "norms", "input, input/rms, 1/rms", f"w B N {norms} (2 D + 1)"
    if config.qk_norm:
        yield "norms", "q/rms, k/rms, 1/rms", "w B N L (H + Hk) (d + 1)"
        if narrow:
            yield "norms", "q and k in float32", "w B N L (H + Hk) d"


def list_kept_attention(config: Config, n: int, *, fused: bool) -> Iterator[Line]:
    """Yield what attention stores between the qkv and output projections."""
    yield "projections", "q, k and v", "s B N L (H + 2 Hk) d"
    if config.position == "rotary" or config.qk_norm:
        yield "attention", "q and k, normed, turned", "s B N L (H + Hk) d"
    if config.position == "rotary":
        yield "attention", "cosines and sines", "2 s N d"
    if not fused:
        yield "attention", "weights", "s B L H N N"
        yield "attention", "heads", "s B N L H d"
        return
    yield "attention", "out", "s B N L H d"
    yield "attention", "lse", "w B N L H"
    strips = config.window is not None and n > STRIP
    if (config.qk_norm or strips) and config.heads > 1:  # out is stored head by head
        yield "attention", "out, joined by a copy", "s B N L H d"


KEPT_FEED = {
    "relu": ("relu(up)", "s B N L F"),
    "gelu": ("up, gelu(up)", "s B N L 2 F"),
    "gelu_tanh": ("up, gelu(up)", "s B N L 2 F"),
    "swiglu": ("gate, up, silu, product", "s B N L 4 F"),
}


def list_sizes(
    config: Config, n: int = 1, batch: int = 1, bytes_per_number: int = 1
) -> dict[str, int]:
    """Return the value of every symbol."""
    given = {"n": n, "batch": batch, "bytes_per_number": bytes_per_number}
    for name, value in given.items():
        if not isinstance(value, int) or value < 1:
            raise OptionError(f"{name}={value!r}, expected an integer of at least 1.")
    if config.window_layers is not None:
        raise OptionError(
            "the cost of a model with a window in some layers only is not known. Use "
            "window_layers=None, for a bound window=None."
        )
    return {
        "V": config.vocabulary,
        "C": config.context,
        "D": config.width,
        "L": config.layers,
        "H": config.heads,
        "Hk": config.shared,
        "d": config.head,
        "F": config.inner,
        "N": n,
        "B": batch,
        "W": min(n, config.window or n),
        "s": bytes_per_number,
        "w": max(4, bytes_per_number),
    }


def describe_pairs(*, causal: bool) -> str:
    """Describe which query-key pairs are counted."""
    return "pairs under the mask only" if causal else "the full square of scores"


def check_attention(attention: str) -> None:
    """Raise OptionError for an unknown kind of attention."""
    if attention not in {"fused", "textbook"}:
        raise OptionError(f"attention={attention!r}, expected 'fused' or 'textbook'.")


def compute_lines(
    title: str, lines: Iterable[Line], letters: Mapping[str, int]
) -> Cost:
    """Evaluate the formula of each line, and return the table."""
    rows = (Row(*line, compute(line[2], letters)) for line in lines)
    ordered = sorted(rows, key=lambda row: PARTS.index(row.part))
    return Cost(title, tuple(ordered), letters)


def compute(formula: str, letters: Mapping[str, int]) -> int:
    """Evaluate a formula in which a space means multiplication.

    >>> compute("2 N (D + 1)", {"N": 10, "D": 4})
    100
    """

    def visit(node: ast.expr) -> int:
        match node:
            case ast.BinOp(left=left, op=op, right=right):
                return int(OPERATORS[type(op)](visit(left), visit(right)))
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=name):
                return letters[name]
        raise ValueError(ast.dump(node))

    starred = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula)
    return visit(ast.parse(starred, mode="eval").body)
