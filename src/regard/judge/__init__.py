"""Judge an attention that somebody wrote: the pitfalls it falls into.

Next: judgement.py
"""

from regard.judge.convention import Convention, Projections
from regard.judge.difference import find_difference
from regard.judge.judgement import check

__all__ = ["Convention", "Projections", "check", "find_difference"]
