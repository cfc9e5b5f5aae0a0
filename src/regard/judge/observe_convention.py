"""Find out by a few calls what a convention leaves open.

    always causal    with q = 0 and v = I, out is a lower triangle without being asked
    shared heads     two key heads for four heads of q are accepted, in either order

What is observed replaces what was not declared, so that a function which is always
causal fails one case, not every case that expects it to attend to all keys.

Next: basic_cases.py
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import get_args

import numpy as np

from regard.errors import RegardError
from regard.judge.case import SMALL, Examiner
from regard.judge.convention import Convention, End, HeadOrder
from regard.judge.difference import Difference, compare_arrays
from regard.judge.inputs import CallFailedError, Inputs, NotAskedError, Numbers
from regard.judge.subject import Subject


def observe_convention(subject: Subject) -> Subject:
    """Return the subject with what is observed instead of what was not declared."""
    e = Examiner(subject, np.random.default_rng(0))
    words = subject.convention
    with suppress(CallFailedError, NotAskedError):  # other cases report these
        words = observe_causal(e)
    if words.shared_heads is None and shares_heads(e, words):
        words = replace(words, shared_heads=True)
    if words == subject.convention:
        return subject
    observed = Subject(subject.form.fn, words, limit=subject.limit)
    observed.declared = subject.convention
    return observed


def observe_causal(e: Examiner) -> Convention:
    """Return the convention, always causal if the function is."""
    words = e.subject.convention
    plain = Inputs(q=e.zeros(3), k=e.zeros(3), v=e.unit(3))
    if attends_to(e, plain, np.ones((3, 3))):
        return replace(words, always_causal=False)
    if not words.always_causal and not attends_to(e, plain, np.tri(3)):
        return words
    words = replace(words, always_causal=True)
    late = Inputs(q=e.zeros(2), k=e.zeros(4), v=e.unit(4))
    for end, start in zip(get_args(End), (0, 2), strict=True):
        try:
            if attends_to(e, late, np.tri(2, 4, start)):
                words = replace(words, causal_from=words.causal_from or end)
        except CallFailedError:  # it takes as many keys as queries
            break
    return words


def attends_to(e: Examiner, inputs: Inputs, expected: Numbers) -> bool:
    """Return whether each query has weight on exactly these keys."""
    n = inputs.k.shape[2]
    return bool(np.array_equal(e.ask(inputs).out[0, 0, :, :n] > SMALL, expected))


def shares_heads(e: Examiner, words: Convention) -> bool:
    """Return whether two key heads for four heads give either of the two orders."""
    if "h" not in words.layout or words.projections:
        return False
    inputs = Inputs(q=e.draw(3, heads=4), k=e.draw(3, heads=2), v=e.draw(3, heads=2))
    for order in get_args(HeadOrder):
        shared = replace(words, shared_heads=True, head_order=order)
        try:
            other = Examiner(
                Subject(e.subject.form.fn, shared, limit=e.subject.limit), e.rng
            )
            yours, right = other.ask(inputs).out, other.expect(inputs).out
        except (CallFailedError, NotAskedError, RegardError):
            return False
        if compare_arrays(yours, right, atol=0.05) is None:
            return True
    return False


def compare_causal(e: Examiner) -> Difference | None:
    """Compare what was declared with what is observed."""
    observed = e.subject.convention.always_causal
    if e.subject.declared.always_causal == observed:
        return None
    keys = "keys 0 to i alone" if observed else "all keys"
    return Difference(f"without being asked, query i has weight on {keys}.")
