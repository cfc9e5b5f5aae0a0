"""How an attention wants to be spoken to, as its author declares it.

    Convention(layout="bnhd", true_means="hide", mask="attn_mask", library="torch")

What is declared is not held against a function; what it declares not to have is not
asked. Names of arguments can be read from a signature (`read_convention`); what True
means cannot, nor where a causal mask is aligned, so these are never guessed.

Next: subject.py
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from regard.errors import OptionError
from regard.judge.imports import Library, read_library

Attention = Callable[..., Any]
Polarity = Literal["attend", "hide", "added"]
Order = Literal["qkv", "qvk", "x", "xc"]
End = Literal["start", "end"]
Counted = Literal["others", "all"]
Precision = Literal["float64", "float32", "float16", "bfloat16"]
LAYOUTS = ("bhnd", "bnhd", "nbhd", "hnd", "nhd", "bnd", "nd", "bn(hd)", "n(hd)")
STATES = ("bne", "nbe", "ne")  # of a module with projections
PARTS = ("out", "weights", "mean_weights", "lse", "other")

NAMES = {  # what these arguments are called in the field
    "mask": ("mask", "attn_mask", "attention_mask"),
    "causal": ("causal", "is_causal"),
    "q_start": ("q_start", "offset"),
    "bias": ("bias", "attn_bias"),
    "scale": ("scale", "scaling", "softmax_scale"),
    "softcap": ("softcap",),
    "sink": ("sink", "s_aux"),
    "look": ("need_weights", "return_weights", "return_attention", "see_weights"),
}
ROLES = {"q": ("q", "query", "queries"), "k": ("k", "key", "keys")}
ROLES["v"] = ("v", "value", "values")


@dataclass(frozen=True, kw_only=True)
class Projections:
    """Where the matrices of a module are, so that questions can be written into them.

    q, k, v, out: dotted names of parameters, "attend.to_q.weight", or of arguments
    qkv: one name instead of three, rows (or columns) in this order
    inputs_first: matrices are (in, out), as in x @ W; else (out, in), as in nn.Linear
    """

    heads: int
    q: str | None = None
    k: str | None = None
    v: str | None = None
    out: str | None = None
    qkv: str | None = None
    inputs_first: bool = False

    def __post_init__(self) -> None:
        if (self.qkv is None) == (None in (self.q, self.k, self.v)):
            raise OptionError(
                f"{self}: expected q, k and v, or one qkv. Write "
                'Projections(heads=4, q="to_q.weight", k="to_k.weight", …).'
            )


@dataclass(frozen=True, kw_only=True)
class Convention:
    """What a function expects, and what it does not have."""

    layout: str = "bhnd"  # of q, k, v: bhnd, bnhd, nd, bn(hd), …; x of a module: bne
    out_layout: str | None = None  # the same unless given
    order: Order = "qkv"  # of the first arguments; "x" or "xc" (context) for modules
    library: Library = "numpy"
    device: str = "cpu"
    precisions: tuple[str, ...] | None = None  # best first; all that the library has
    mask: str | None = None  # the name of the argument; None: there is none
    true_means: Polarity = "attend"  # or "hide"; "added": numbers, 0 and -inf
    mask_axes: str | None = None  # "bhqk", "qk", "bk"; those of the layout unless given
    float_mask: bool = False  # numbers in a mask are added, and documented to be
    causal: str | None = None
    always_causal: bool = False
    causal_from: End | None = None  # where row 0 stands if Nq < Nk
    q_start: str | None = None  # or an argument that says so
    window: str | None = None
    window_counts: Counted = "others"  # is a query among its window?
    bias: str | None = None
    scale: str | None = None
    softcap: str | None = None
    sink: str | None = None
    look: str | None = None  # a flag that asks for the weights
    returns: tuple[str, ...] | None = None  # of PARTS; by their shapes unless given
    shared_heads: bool = False  # fewer heads of k and v than of q
    other_lengths: bool = True  # Nk need not be Nq
    other_widths: bool = True  # the width of v need not be that of q
    gradients: bool = True  # where the library has them
    heads: str | None = None  # an argument that takes the number of heads
    fixed: Mapping[str, Any] = field(default_factory=dict)  # passed in every call
    projections: Projections | None = None

    def __post_init__(self) -> None:
        known = STATES if self.projections else LAYOUTS
        for layout in (self.layout, self.out_layout or self.layout):
            if layout not in known:
                raise OptionError(
                    f'layout "{layout}", expected one of {", ".join(known)}.'
                )
        for name, kind, given in (
            ("order", Order, (self.order,)),
            ("library", Library, (self.library,)),
            ("true_means", Polarity, (self.true_means,)),
            ("window_counts", Counted, (self.window_counts,)),
            ("causal_from", End, (self.causal_from,) if self.causal_from else ()),
            ("precisions", Precision, self.precisions or ()),
            ("mask_axes", Literal["b", "h", "q", "k"], self.mask_axes or ""),
        ):
            wrong = [x for x in given if x not in get_args(kind)]
            if wrong:
                expected = ", ".join(get_args(kind))
                raise OptionError(f'{name}="{wrong[0]}", expected one of {expected}.')
        if self.returns is not None and (
            self.returns[:1] != ("out",) or not set(self.returns) <= set(PARTS)
        ):
            raise OptionError(
                f'returns={self.returns}, expected ("out",), ("out", "weights"), …, '
                f"parts of {', '.join(PARTS)}; out is the first."
            )
        if self.order in ("x", "xc") and self.projections is None:
            raise OptionError(
                f'order="{self.order}" is for what projects its inputs itself: say '
                "where its matrices are, projections=Projections(heads=…, …)."
            )

    @property
    def axes_of_mask(self) -> str:
        """The axes of a mask, those of the layout unless declared."""
        if self.mask_axes is not None:
            return self.mask_axes
        lead = [x for x in "bh" if x in (self.layout if not self.projections else "bh")]
        return "".join(lead) + "qk"

    def arguments(self) -> list[str]:
        """Return the names of arguments that are declared."""
        named = (*NAMES, "window", "heads")
        given = [getattr(self, name) for name in named]
        return [name for name in (*given, *self.fixed) if name is not None]


def read_convention(fn: Attention) -> Convention:
    """Read what a signature tells: the names of arguments, the order of q, k and v."""
    names = read_names(fn)
    found: dict[str, Any] = {"library": read_library(fn)}
    if names is None:
        return Convention(**found)
    for role, known in NAMES.items():
        found[role] = next((name for name in known if name in names), None)
    roles = [r for name in names[:3] for r, known in ROLES.items() if name in known]
    if roles == ["q", "v", "k"]:
        found["order"] = "qvk"
    return Convention(**found)


def read_names(fn: Attention) -> list[str] | None:
    """Return the names of the arguments; None if they are not known."""
    call = getattr(fn, "forward", fn)  # of a module
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):  # written in C
        return None
    kinds = {p.kind for p in parameters.values()}
    return None if inspect.Parameter.VAR_KEYWORD in kinds else list(parameters)


def check_fit(fn: Attention, convention: Convention) -> None:
    """Refuse a declared argument that the function does not have."""
    if not callable(fn):
        raise OptionError(
            f"{type(fn).__name__} cannot be called, expected a function or a module."
        )
    names = read_names(fn)
    for name in convention.arguments():
        if names is not None and name not in names:
            raise OptionError(
                f'the convention has an argument "{name}", the function has '
                f"{', '.join(names)}. Declare one of these, or None."
            )


def describe(convention: Convention) -> str:
    """Return what was declared, or read, and is not the default."""
    parts = []
    for each in fields(convention):
        value = getattr(convention, each.name)
        if each.name in ("layout", "library") or (
            value != each.default and value not in ({}, None)
        ):
            parts.append(f"{each.name}={value!r}")
    return ", ".join(parts)
