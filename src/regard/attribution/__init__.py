"""Which documents an answer is based on: attention mass, and the effect of hiding one.

Next: sources.py
"""

from regard.attribution.result import AnswerPart, SourceDocument, Sources
from regard.attribution.sources import sources

__all__ = ["AnswerPart", "SourceDocument", "Sources", "sources"]
