"""Models of other libraries than transformers and timm, and of regard itself."""

from collections.abc import Iterable
from itertools import chain

from wild.case import Case
from wild.libraries import (
    diffusion_models,
    graph_models,
    idea_models,
    language_models,
    own_models,
    vit_models,
    x_models,
)

FILES = (
    own_models,
    x_models,
    vit_models,
    diffusion_models,
    language_models,
    graph_models,
    idea_models,
)


def list_cases() -> Iterable[Case]:
    """Yield the cases of all files."""
    return chain.from_iterable(file.list_cases() for file in FILES)
