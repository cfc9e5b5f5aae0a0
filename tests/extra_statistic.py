"""A statistic that is no part of the library, in a module that a worker can import."""

import numpy as np

from regard.stats.registry import Badge, Statistic
from regard.stats.rows import ask_mass


def ask_third(record, tokens):
    return ask_mass(record, (np.asarray(record.k_positions) == 2)[:, None])


THIRD = Statistic(
    name="third",
    unit="weight",
    description="weight on the third key",
    request=ask_third,
    label="third key",
    badge=Badge(label="3rd", least=0.001, light="#123456", dark="#fedcba"),
    charted=True,
    ranked=True,
)
