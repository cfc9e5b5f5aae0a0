"""Suggest an option of the convention under which a failed case passes.

    suggest_option(subject, case, seed)      "passes as bnhd: add --layout bnhd", or ""

A failure may be a convention that was not declared: another layout, meaning of True in
a mask, alignment, order of shared heads or base of lse. The case is asked again with
one option changed at a time. An option is suggested only if the case passes with it,
the cases that it depends on do not fail, and, for a layout, the axes are told apart.

Next: run_check.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

from regard.errors import RegardError
from regard.judge.case import Case
from regard.judge.convention import (
    LAYOUTS,
    STATES,
    Base,
    Convention,
    Counted,
    End,
    HeadOrder,
    Order,
    Polarity,
)
from regard.judge.detect_library import LIBRARIES
from regard.judge.precision import settle_precision
from regard.judge.subject import Subject

Judge = Callable[[Subject, Case], str]  # returns the status
AXES = (
    "it_answers",
    "equal_scores_equal_weights",
    "heads_do_not_mix",
    "batches_do_not_mix",
    "keys_answer_queries",
    "argument_order",
)
SAYS = {
    "layout": "as {0}: add --layout {0}",
    "out_layout": "with out as {0}: add --out-layout {0}",
    "order": "as {0}: add --order {0}",
    "library": "with arrays of {0}: add --library {0}",
    "true_means": "if True means {0}: add --true-means {0}",
    "causal_from": "as {0}: add --causal-from {0}",
    "head_order": "as {0}: add --head-order {0}",
    "lse_base": "with base {0}: add --lse-base {0}",
    "window_counts": "if the window counts {0}: add --window-counts {0}",
}


def suggest_option(
    subject: Subject, case: Case, cases: dict[str, Case], judge: Judge
) -> str:
    """Return which option makes a failed case pass, or ""."""
    if case.name == "causal_as_declared":  # it passes, as that is what was observed
        if not subject.convention.always_causal:
            return ""
        end = subject.convention.causal_from
        more = f" --causal-from {end}" if end else ""
        return f"passes as always causal: add --always-causal{more}"
    for name, value in list_options(subject.convention, case):
        if passes_with(subject, {name: value}, case, cases, judge):
            return f"passes {SAYS[name].format(value)}"
    return ""


def suggest_declaration(
    subject: Subject, case: Case, cases: dict[str, Case], judge: Judge
) -> str:
    """Return the option that declares what a case could not ask, if one passes."""
    words = subject.convention
    declared = words.causal_from or words.q_start or not words.causal
    if case.name != "causal_alignment" or declared:
        return ""
    options = [{"causal_from": x} for x in get_args(End)]
    right = [x for x in options if passes_with(subject, x, case, cases, judge)]
    said = [f"passes {SAYS['causal_from'].format(x['causal_from'])}" for x in right]
    return said[0] if len(said) == 1 else ""


def list_options(words: Convention, case: Case) -> Iterator[tuple[str, Any]]:
    """Yield the options that could explain a failure, each with another value."""
    kinds: dict[str, tuple[Any, ...]] = {}
    if words.mask:
        kinds["true_means"] = get_args(Polarity)
    if words.causal or words.always_causal:
        kinds["causal_from"] = get_args(End)
    if words.shared_heads:
        kinds["head_order"] = get_args(HeadOrder)
    if words.window:
        kinds["window_counts"] = get_args(Counted)
    kinds["lse_base"] = get_args(Base)
    if "argument_order" not in case.after:  # else the axes are right
        kinds |= list_layouts(words)
    for name, values in kinds.items():
        yield from ((name, x) for x in values if x != getattr(words, name))


def list_layouts(words: Convention) -> dict[str, tuple[Any, ...]]:
    """Return the options on the axes and the kind of the arrays."""
    if words.projections:
        return {"layout": STATES}
    plain = tuple(x for x in LAYOUTS if words.heads or "(" not in x)
    loaded = tuple(x for x in LIBRARIES if x in sys.modules)
    orders = tuple(x for x in get_args(Order) if len(x) == 3)
    return {"layout": plain, "out_layout": plain, "order": orders, "library": loaded}


def passes_with(
    subject: Subject,
    options: dict[str, Any],
    case: Case,
    cases: dict[str, Case],
    judge: Judge,
) -> bool:
    """Return whether a case passes with other options, and nothing before it fails."""
    try:
        other = Subject(
            subject.form.fn,
            replace(subject.convention, **options),
            limit=subject.limit,
        )
        settle_precision(other)
    except RegardError:  # the convention does not fit
        return False
    is_axis = not {"layout", "out_layout", "order", "library"}.isdisjoint(options)
    before = dict.fromkeys((*(AXES if is_axis else ()), *case.after))
    failed = (judge(other, cases[x]) == "failed" for x in before if x != case.name)
    return judge(other, case) == "passed" and not any(failed)
