import numpy as np


def just_adds(top, total, mix, score, value):
    """The old sums are not corrected"""
    if score > top:
        top = score
    e = np.exp(score - top) if np.isfinite(score) else 0
    return top, total + e, mix + e * value


def half_corrected(top, total, mix, score, value):
    """but mix is not"""
    if score == -np.inf:
        return top, total, mix
    before, top = top, max(top, score)
    e = np.exp(score - top)
    return top, total * np.exp(before - top) + e, mix + e * value


def upside_down(top, total, mix, score, value):
    """The factor of the old sums is inverted"""
    if score == -np.inf:
        return top, total, mix
    new = max(top, score)
    factor = 0 if total == 0 else np.exp(new - top)
    e = np.exp(score - new)
    return new, total * factor + e, mix * factor + e * value


def not_a_number(top, total, mix, score, value):
    """-inf minus -inf is NaN if the first key is masked"""
    new = max(top, score)
    with np.errstate(invalid="ignore"):
        factor, e = np.exp(np.subtract(top, new)), np.exp(np.subtract(score, new))
    return new, total * factor + e, mix * factor + e * value


def normalises_each_time(top, total, mix, score, value):
    """mix is divided by total in every step"""
    if score == -np.inf:
        return top, total, mix
    new = max(top, score)
    e, factor = np.exp(score - new), np.exp(top - new)
    total = total * factor + e
    return new, total, (mix * factor + e * value) / total


def in_place(top, total, mix, score, value):
    """add_key changes its argument mix"""
    if score == -np.inf:
        return top, total, mix
    new = max(top, score)
    e, factor = np.exp(score - new), np.exp(top - new)
    mix *= factor
    mix += e * value
    return new, total * factor + e, mix
