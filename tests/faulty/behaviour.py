"""Faults that depend on an index, a size, a value, a dtype or the number of calls.

    for name, fn in bend(exercise): ...

Each wraps the reference solution: it changes the arguments before, or the answer after.
To compute in float32 is no fault: an exercise's tolerance says how exact it must be.

Next: contracts.py
"""

import inspect

import numpy as np

EDGES = (1, 2, 3, 4, 8, 16)  # from here on an index or a size is treated wrongly
LIMITS = (1, 3, 10, 100, 500, 1e4)  # beyond which a value is treated wrongly


def bend(exercise, call):
    """Yield the name and the function of each fault; call: one that is allowed."""
    reference = exercise.reference
    answer = split(reference(*call))
    for i, part in enumerate(answer):
        for axis in range(np.ndim(part)):
            yield from spoil_indices(reference, i, axis)
        yield from spoil_answer(reference, i)
    names = list(inspect.signature(reference).parameters)
    for i, (name, x) in enumerate(zip(names, call, strict=True)):
        for axis in range(np.ndim(x)):
            yield from spoil_sizes(reference, i, axis, name)
        yield from spoil_argument(reference, i, name, x)
    yield from spoil_calls(reference)


def split(answer):
    return list(answer) if isinstance(answer, tuple) else [answer]


def join(parts):
    return tuple(parts) if len(parts) > 1 else parts[0]


def wrap(reference, change, i):
    """Return the reference with one part of its answer changed."""

    def fn(*arguments):
        parts = split(reference(*arguments))
        parts[i] = change(np.array(parts[i]))
        return join(parts)

    return fn


CHANGES = {
    "0": lambda part, _: 0 * part,
    "the first": lambda part, first: first + 0 * part,
    "x 1.001": lambda part, _: part * 1.001,
    "NaN": lambda part, _: part * np.nan,
}


def spoil_indices(reference, i, axis):
    for what, change in CHANGES.items():
        for edge in EDGES:

            def late(part, edge=edge, change=change):
                return spoil(part, axis, slice(edge, None), change)

            yield (
                f"part {i}: {what} from index {edge} of axis {axis}",
                wrap(reference, late, i),
            )
        for where, place in (("first", slice(0, 1)), ("last", slice(-1, None))):

            def end(part, place=place, change=change):
                return spoil(part, axis, place, change)

            yield (
                f"part {i}: {what} at the {where} of axis {axis}",
                wrap(reference, end, i),
            )


def spoil(part, axis, place, change):
    """Change a range of indices of an axis."""
    part = part.astype(float)
    at = (slice(None),) * axis
    first = part[(*at, slice(0, 1))]
    with np.errstate(invalid="ignore"):
        part[(*at, place)] = change(part[(*at, place)], first)
    return part


ANSWERS = {
    "float16": lambda x: x.astype(np.float16),
    "integers": lambda x: np.nan_to_num(x).astype(int),
    "booleans": lambda x: x > 0.5,
    "3 digits": lambda x: np.round(x.astype(float), 3),
    "5 digits": lambda x: np.round(x.astype(float), 5),
    "negative": lambda x: -1.0 * x,
    "absolute": np.abs,
    "a string": str,
    "strings": lambda x: x.astype(str),
    "a list of strings": lambda x: x.astype(str).tolist(),
    "bytes": lambda x: x.astype("S"),
    "objects": lambda x: x.astype(object),
    "None": lambda _: None,
    "a dict": lambda x: dict(enumerate(x.ravel())),
    "complex": lambda x: x + 0j,
    "an axis more": lambda x: x[None],
    "an axis more behind": lambda x: x[..., None],
    "an axis less": lambda x: x[0] if x.ndim else x,
    "the mean of a row": lambda x: x.mean(-1, keepdims=True) if x.ndim else x + 1,
    "transposed": lambda x: x.T,
    "upside down": lambda x: x[::-1] if x.ndim else x,
    "mirrored": lambda x: x[..., ::-1] if x.ndim else x,
    "NaN where 0": lambda x: np.where(x == 0, np.nan, x),
    "-1e9 where -inf": lambda x: np.where(x == -np.inf, -1e9, x),
    "1e-3 more": lambda x: x + 1e-3,
    "5e-6 more": lambda x: x + 5e-6,
    "x 1.0001": lambda x: x * 1.0001,
    "the upper triangle 0": lambda x: np.tril(x) if x.ndim > 1 else x,
    "the diagonal 0": lambda x: x * (1 - np.eye(*x.shape[-2:])) if x.ndim > 1 else x,
} | {
    f"clipped at {limit}": lambda x, limit=limit: np.clip(x, -limit, limit)
    for limit in LIMITS
}


def spoil_answer(reference, i):
    for name, change in ANSWERS.items():
        yield f"part {i}: {name}", wrap(reference, change, i)


def spoil_sizes(reference, i, axis, name):
    for what in ("0", "x 1.001"):
        tests = {f"above {e}": lambda n, e=e: n > e for e in EDGES}
        tests |= {"of 1": lambda n: n == 1, "that are odd": lambda n: n % 2 == 1}
        for when, test in tests.items():

            def fn(*arguments, test=test, what=what):
                parts = split(reference(*arguments))
                if test(arguments[i].shape[axis]):
                    parts = [CHANGES[what](np.asarray(x, float), 0) for x in parts]
                return join(parts)

            yield f"{what} for sizes {when} of axis {axis} of {name}", fn


FLOATS = {
    "absolute": np.abs,
    "negative": np.negative,
    "positive only": lambda x: np.maximum(x, 0),
    "rounded to 1 digit": lambda x: np.round(x, 1),
    "rounded to 3 digits": lambda x: np.round(x, 3),
    "float16": lambda x: np.asarray(x, np.float16),
    "0 below 1e-2": lambda x: np.where(np.abs(x) < 1e-2, 0, x),
    "0": lambda x: 0 * x,
    "1e-3 more": lambda x: x + 1e-3,
} | {
    f"clipped at {limit:g}": lambda x, limit=limit: np.clip(x, -limit, limit)
    for limit in LIMITS
}
WHOLE = {
    "one more": lambda x: x + 1,
    "one less": lambda x: x - 1,
    "absolute": np.abs,
    "0": lambda x: 0 * x,
} | {f"at most {e}": lambda x, e=e: np.minimum(x, e) for e in EDGES}


def spoil_argument(reference, i, name, x):
    kind = np.asarray(x).dtype.kind
    tables = {"f": FLOATS, "i": WHOLE, "b": {"not": np.logical_not}}
    table = tables.get(kind, {})  # a model is taken as it is
    for what, change in table.items():

        def fn(*arguments, change=change):
            with np.errstate(all="ignore"):
                new = change(arguments[i])
            new = new if np.ndim(x) else type(x)(new)
            return reference(*arguments[:i], new, *arguments[i + 1 :])

        yield f"{name} is taken as {what}", fn
    if np.ndim(x):

        def overwrite(*arguments):
            answer = reference(*(np.copy(a) if np.ndim(a) else a for a in arguments))
            arguments[i][...] = 0
            return answer

        yield f"{name} is overwritten", overwrite


def spoil_calls(reference):
    """Yield functions that remember earlier calls."""

    def count():
        calls = 0

        def third(*arguments):
            nonlocal calls
            calls += 1
            parts = split(reference(*arguments))
            return join([x * 1.01 for x in parts] if calls > 2 else parts)

        return third

    def remember():
        known = {}

        def stale(*arguments):
            key = tuple(x.shape if np.ndim(x) else x for x in arguments)
            if key not in known:
                known[key] = reference(*arguments)
            return known[key]

        return stale

    count.fresh = remember.fresh = True  # a new function for each use
    yield "1 % more from the third call on", count
    yield "the answer of an earlier call of the same shapes", remember
