"""Count what learners are told about single edits of the reference solutions.

    PYTHONPATH=tests python -m faulty.messages            a row for each exercise
    PYTHONPATH=tests python -m faulty.messages softmax    and each edit without a name

A message is named if a mistake_ function of the exercise gives the same answers. The
others are told where their numbers differ: an edit that a learner could make deserves a
mistake_ function.

Next: behaviour.py
"""

# ruff: noqa: T201

import math
import sys
import warnings
from collections import Counter

import numpy as np

from faulty.syntax import edit_syntax
from regard.learn.course import ORDER
from regard.learn.exercise import read_exercise
from regard.learn.grade import grade


def tell(exercise):
    """Yield each edit and what is said about it: the kind of message and its text."""
    for edit, fn in edit_syntax(exercise):
        found = grade(exercise, fn, limit=math.inf)
        kind = "named" if found.mistake else "numbers"
        if found.passed:
            kind = "right"
        elif not found.mistake and " raised " in found.sentence:
            kind = "raised"
        yield edit, kind, found.sentence


def main():
    """Print the counts of all exercises, or the edits of the named ones."""
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    total = Counter()
    for name in sys.argv[1:] or ORDER:
        exercise = read_exercise(name)
        if exercise.extra:
            continue
        told = list(tell(exercise))
        counts = Counter(kind for _, kind, _ in told)
        total += counts
        print(f"{name:20}", *(f"{kind} {n}" for kind, n in sorted(counts.items())))
        if sys.argv[1:]:
            for edit, kind, sentence in told:
                if kind == "numbers":
                    print(f"  {edit}\n    {sentence}")
    print(f"{'all':20}", *(f"{kind} {n}" for kind, n in sorted(total.items())))


if __name__ == "__main__":
    main()
