"""The calling convention of an attention function, as its author declares it.

    Convention(layout="bnhd", true_means="hide", mask="attn_mask", library="torch")

A declared convention is never an error, and cases about missing features are skipped.
Argument names can be read from a signature (`read_convention`). The meaning of True in
a mask and the alignment of a causal mask cannot, so they are never guessed.

Next: subject.py
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from regard.errors import OptionError
from regard.judge.detect_library import Library, read_library
from regard.judge.storage import Storage, read_storage

Attention = Callable[..., Any]
Polarity = Literal["attend", "hide", "added"]
Order = Literal["qkv", "qvk", "x", "xc"]
End = Literal["start", "end"]
Counted = Literal["others", "all"]
HeadOrder = Literal["grouped", "interleaved"]
Base = Literal["e", "2"]
Precision = Literal["float64", "float32", "float16", "bfloat16"]
LAYOUTS = ("bhnd", "bnhd", "nbhd", "hnd", "nhd", "bnd", "nd", "bn(hd)", "n(hd)")
STATES = ("bne", "nbe", "ne")  # of a module with projections
PARTS = ("out", "weights", "mean_weights", "lse", "other")

NAMES = {  # common names of these arguments
    "mask": ("mask", "attn_mask", "attention_mask"),
    "causal": ("causal", "is_causal"),
    "q_start": ("q_start", "offset"),
    "bias": ("bias", "attn_bias"),
    "scale": ("scale", "scaling", "softmax_scale", "sm_scale"),
    "softcap": ("softcap",),
    "sink": ("sink", "s_aux"),
    "look": ("need_weights", "return_weights", "return_attention", "see_weights"),
}
ROLES = {"q": ("q", "query", "queries"), "k": ("k", "key", "keys")}
ROLES["v"] = ("v", "value", "values")


@dataclass(frozen=True, kw_only=True)
class Projections:
    """Names of a module's projection matrices, which the test inputs are written to.

    q, k, v, out: dotted names of parameters, "attend.to_q.weight", or of arguments
    qkv: name of a fused matrix, with rows (or columns) in this order
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
    """How a function is called, what it returns, and what it does not support."""

    layout: str = "bhnd"  # of q, k, v: bhnd, bnhd, nd, bn(hd), …; x of a module: bne
    out_layout: str | None = None  # default: layout
    order: Order = "qkv"  # of the first arguments; "x" or "xc" (context) for modules
    library: Library = "numpy"
    device: str = "cpu"
    precisions: tuple[str, ...] | None = None  # best first; default: all of the library
    mask: str | None = None  # name of the argument; None: not supported
    true_means: Polarity = "attend"  # or "hide"; "added": numbers, 0 and -inf
    mask_axes: str | None = None  # "bhqk", "qk", "bk"; default: those of the layout
    float_mask: bool = False  # a mask of numbers is documented to be added
    causal: str | None = None
    always_causal: bool = False
    causal_from: End | None = None  # alignment of row 0 if Nq < Nk
    q_start: str | None = None  # or an argument that sets it
    window: str | None = None
    window_counts: Counted = "others"  # "all": the window includes the query itself
    bias: str | None = None
    scale: str | None = None
    softcap: str | None = None
    sink: str | None = None
    look: str | None = None  # a flag that requests the weights
    returns: tuple[str, ...] | None = None  # of PARTS; default: inferred from shapes
    lse_base: Base = "e"  # of the logarithm in lse; "2" if it is log2 of a sum of exp2
    shared_heads: bool | None = None  # fewer heads of k and v; None: by a call
    head_order: HeadOrder = "grouped"  # key head of h: h // (H / Hk), or h % Hk
    other_lengths: bool = True  # Nk may differ from Nq
    other_widths: bool = True  # the width of v may differ from that of q
    gradients: bool | None = None  # None: if out requires a gradient
    heads: str | None = None  # an argument that takes the number of heads
    fixed: Mapping[str, Any] = field(default_factory=dict)  # passed in every call
    projections: Projections | None = None
    storage: Storage | None = None  # packed tokens, pages, or a cache

    def __post_init__(self) -> None:
        object.__setattr__(self, "lse_base", str(self.lse_base))  # 2 is fine, too
        known: tuple[str, ...] = STATES if self.projections else LAYOUTS
        known = LAYOUTS[:2] if self.storage else known
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
            ("lse_base", Base, (self.lse_base,)),
            ("head_order", HeadOrder, (self.head_order,)),
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
                f"parts of {', '.join(PARTS)}; out comes first."
            )
        if self.order in ("x", "xc") and self.projections is None:
            raise OptionError(
                f'order="{self.order}" is for modules that project their inputs: '
                "name their matrices in projections=Projections(heads=…, …)."
            )

    @property
    def axes_of_mask(self) -> str:
        """The axes of a mask; by default those of the layout."""
        if self.mask_axes is not None:
            return self.mask_axes
        lead = [x for x in "bh" if x in (self.layout if not self.projections else "bh")]
        return "".join(lead) + "qk"

    def arguments(self) -> list[str]:
        """Return the names of all declared arguments."""
        named = (*NAMES, "window", "heads")
        given = [getattr(self, name) for name in named]
        stored = self.storage.arguments() if self.storage else []
        return [name for name in (*given, *self.fixed, *stored) if name is not None]


def read_convention(fn: Attention) -> Convention:
    """Read the argument names, the order of q, k, v and the library of a function."""
    names = read_names(fn)
    found: dict[str, Any] = {"library": read_library(fn)}
    if names is None:
        return Convention(**found)
    for role, known in NAMES.items():
        found[role] = next((name for name in known if name in names), None)
    roles = [r for name in names[:3] for r, known in ROLES.items() if name in known]
    if roles == ["q", "v", "k"]:
        found["order"] = "qvk"
    return declare_storage(Convention(**found), read_storage(names))


def declare_storage(words: Convention, storage: Storage | None) -> Convention:
    """Return a convention with a storage, and with what follows from it."""
    if storage is None:
        return words
    kept = storage.kind != "varlen"  # the queries are the last tokens, and not trained
    return replace(
        words,
        storage=storage,
        layout="bnhd",
        causal_from="end" if kept else words.causal_from,
        gradients=False if kept else words.gradients,
    )


def read_names(fn: Attention) -> list[str] | None:
    """Return the argument names; None if they are unknown."""
    call = getattr(fn, "forward", fn)  # of a module
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):  # functions in C may have no signature
        return None
    kinds = {p.kind for p in parameters.values()}
    return None if inspect.Parameter.VAR_KEYWORD in kinds else list(parameters)


def read_required(fn: Attention) -> set[str]:
    """Return the names of the arguments without a default value, or with True."""
    try:
        parameters = inspect.signature(getattr(fn, "forward", fn)).parameters
    except (TypeError, ValueError):
        return set()
    pairs = parameters.items()
    return {name for name, x in pairs if x.default is x.empty or x.default is True}


def check_arguments(fn: Attention, convention: Convention) -> None:
    """Raise if the convention declares an argument that the function lacks."""
    if not callable(fn):
        raise OptionError(
            f"a {type(fn).__name__} cannot be called, expected a function or a module. "
            "`regard check module:function` takes a name."
        )
    names = read_names(fn)
    for name in convention.arguments():
        if names is not None and name not in names:
            raise OptionError(
                f'the convention has an argument "{name}", the function has '
                f"{', '.join(names)}. Declare one of these, or None."
            )


def describe_convention(convention: Convention) -> str:
    """Return the layout, the library and all settings that differ from the default."""
    parts = []
    for each in fields(convention):
        value = getattr(convention, each.name)
        if each.name in ("layout", "library") or (
            value != each.default and value not in ({}, None)
        ):
            parts.append(f"{each.name}={value!r}")
    return ", ".join(parts)
